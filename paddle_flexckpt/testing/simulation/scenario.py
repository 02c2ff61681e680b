"""What is simulated, as data: a scenario, and a schedule of faults. Both are drawn from a seed, and have a JSON form.

A fault strikes at a time, or at a moment of the protocol: at a call of some process that does what a name in
:data:`MOMENTS` says. Faults at random times rarely meet a commit.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from paddle_flexckpt.testing.simulation.habits import draw_habits

DAY = 86400.0
HOUR = 3600.0


@dataclass(frozen=True)
class Scenario:
    """A run: its jobs, where it saves, and how.

    Attributes:
        seed: Of all choices that the simulated world makes.
        world_sizes: Ranks of the job, and of the job after each restart; the last one of all that follow.
        storage: ``shared``, ``leased`` (a shared file system without locks), ``object`` or ``per_node``.
        keep: Policies of retention: ``latest:2``, ``every:6``, ``best:1``, ``interval:7200``.
        steps: Of the job; as many are trained, however often it is restarted.
        on_error: What the script does when a save fails: ``exit``, or ``continue`` with the next step.
        grace: Seconds until an operator ends what is left of a job of which a rank has gone, and until the next start.
        jobs: Jobs on one root; two have the same script.
        overwrites: Whether steps that are trained again are saved over what is there.
        preemption: Whether the manager catches SIGTERM, and ranks agree about it after each step.
        timeout: Seconds that writers wait for each other.
        lease_seconds: Of a lease, where storage has no locks.
        habits: What jobs ask for beyond plain saves: see ``habits.py``.
    """

    seed: int
    world_sizes: tuple[int, ...] = (2,)
    nodes: int = 1
    storage: str = "shared"
    is_async: bool = False
    keep: tuple[str, ...] = ()
    save_every: int = 1
    steps: int = 8
    step_seconds: float = 3 * HOUR
    on_error: str = "exit"
    grace: float = 60.0
    jobs: int = 1
    overwrites: bool = True
    preemption: bool = False
    readers: int = 0
    reader_seconds: float = 4 * HOUR
    timeout: float = 1800.0
    lease_seconds: float = 30.0
    habits: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long the job takes if nothing happens, without its saves."""
        return self.steps * self.step_seconds

    def world_size(self, incarnation: int) -> int:
        """Return the ranks of the job's n-th start."""
        return self.world_sizes[min(incarnation, len(self.world_sizes) - 1)]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of :data:`KINDS`.
        at: When, in seconds since the beginning; with a moment, from when on it is waited for.
        target: Whom it strikes: ``rank:1``, ``writer:0`` (the writer process of a rank), ``node:0``, ``job``,
            ``storage``, ``nodes:0:1``; with ``b/`` before it, of the second job.
        moment: At which call of the target, or of any process, it strikes; one of :data:`MOMENTS`, or empty. After
            ``after``, before the call that follows.
        count: At how many of these calls.
        seconds: How long it lasts.
        amount: Seconds, a rate, an error number, or which of several things is meant.
    """

    kind: str
    at: float
    target: str = ""
    moment: str = ""
    count: int = 1
    seconds: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        what = f"{self.kind} {self.target}".strip()
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        amount = f" ({self.amount:g})" if self.amount else ""
        moment = f", at call {self.count} that is {self.moment!r}" if self.moment else ""
        return f"{what}{amount}{lasts}, from {self.at:.0f} s{moment}"


@dataclass(frozen=True)
class Case:
    """A scenario and its schedule; and what it once violated, if that is known."""

    scenario: Scenario
    faults: tuple[Fault, ...] = ()
    violated: str = ""

    def to_json(self) -> str:
        """Encode the case, for people as well."""
        return json.dumps(
            {
                "violated": self.violated,
                "scenario": asdict(self.scenario),
                "faults": [asdict(each) for each in self.faults],
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Decode what :meth:`to_json` returned."""
        read = json.loads(text)
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in read["scenario"].items()
        }
        return cls(Scenario(**fields), tuple(Fault(**each) for each in read["faults"]), read.get("violated", ""))


def _call(*kinds: str) -> Callable[[str, str], bool]:
    return lambda kind, where: kind in kinds


def _file(suffix: str, *kinds: str) -> Callable[[str, str], bool]:
    return lambda kind, where: kind in kinds and suffix in where


# Calls of a save, by what system call they are and the path that it has; "put" and "delete" are an object store's.
MOMENTS: dict[str, Callable[[str, str], bool]] = {
    "any call": lambda kind, where: True,
    "marker": _file(".saving", "open", "put"),
    "end of marker": _file(".saving", "unlink", "delete"),
    "data": _file(".safetensors", "open", "writev", "write", "put"),
    "part": _file(".part", "open", "rename", "put"),
    "fsync": _call("fsync"),
    "manifest begun": _file(".manifest", "open", "put"),
    "manifest put in place": lambda kind, where: kind in ("rename", "put") and ".manifest" in where,
    "rename": _call("rename"),
    "manifest removed": lambda kind, where: kind in ("unlink", "delete") and where.endswith(".manifest"),
    "removal": _call("unlink", "delete"),
    "removal noted": _file(".removing", "open", "put"),
    "lease": _file(".lease", "open", "rename", "put"),
    "lock": _call("flock"),
    "listing": _call("scandir", "list"),
    "failure": _file(".failed", "open", "rename", "put"),
    "send": _call("send"),
    "connect": _call("connect"),
}

_ENDS = ("kill_rank", "kill_writer", "kill_node", "kill_job", "terminate_job")
_STOPS = ("stop_rank", "stop_writer", "stop_node", "stop_job")
_NETWORK = ("slow_network", "partition")
_CLOCKS = ("clock_jump", "clock_rate")
_STORAGE = ("disk_full", "disk_slow", "disk_read_only", "disk_gone", "io_error", "slow_call")
_OBJECTS = ("store_errors", "store_lost_answers", "store_stale", "store_slow", "slow_call")
_PERSON = ("person_copies", "person_moves", "person_deletes", "person_restores")
_CARE = ("care_damage", "care_look")
KINDS = tuple(
    dict.fromkeys((*_ENDS, *_STOPS, *_NETWORK, *_CLOCKS, *_STORAGE, *_OBJECTS, "power_loss", *_PERSON, *_CARE))
)
# Errors of calls on files: EIO, ENOSPC, EDQUOT, ESTALE.
_ERRORS = (5, 5, 28, 122, 116)


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    choose = random.Random(f"case {seed}")
    scenario = draw_scenario(choose, seed)
    count = min(1 + int(choose.expovariate(1 / 3.5)), 12)
    faults = [draw_fault(choose, scenario) for _ in range(count)]
    if choose.random() < 0.4:
        faults += draw_meeting(choose, scenario)
    faults += draw_care(seed, scenario)
    return Case(scenario, tuple(sorted(faults, key=lambda fault: fault.at)))


def draw_care(seed: int, scenario: Scenario) -> list[Fault]:
    """Draw damage to checkpoints, and a person who looks after them; for themselves, as habits are."""
    choose = random.Random(f"care {seed}")
    if choose.random() > 0.12:
        return []
    faults = []
    for _ in range(choose.choice([1, 1, 2])):
        at = choose.uniform(0.2, 1.0) * scenario.seconds
        if choose.random() < 0.8:
            faults.append(Fault("care_damage", at, amount=float(choose.randrange(1 << 20))))
        faults.append(Fault("care_look", at + choose.choice([0.001, 1.0, 5000.0])))
    return faults


def draw_meeting(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw faults that meet in one save: who decides is held up, and another dies, or is held up as well."""
    save = choose.randrange(max(1, scenario.steps // scenario.save_every)) + 1
    begin = max(0.0, save * scenario.save_every * scenario.step_seconds - 1.0)
    who = "writer" if scenario.is_async and choose.random() < 0.7 else "rank"
    moments = ["manifest begun", "manifest put in place", "fsync", "part", "listing", "lease", "any call"]
    seconds = choose.choice([0.5, 5.0, 40.0, 300.0, 2500.0])
    how = choose.choice([f"stop_{who}", "slow_call"])
    held = Fault(how, begin, f"{who}:0", _moment(choose, moments), choose.choice([1, 1, 1, 2, 3]), seconds)
    kind = choose.choice(["kill", "kill", "kill", "stop"])
    if choose.random() < 0.3:
        who = "rank"
    target = f"{who}:{choose.randrange(max(scenario.world_sizes))}"
    moments = ["send", "send", "send", "data", "part", "fsync", "listing", "failure", "any call"]
    seconds = 0.0 if kind == "kill" else choose.choice([1.0, 100.0])
    other = Fault(f"{kind}_{who}", begin, target, _moment(choose, moments), choose.randint(1, 12), seconds)
    if choose.random() < 0.3:  # when the first has been held up for a while
        later = replace(other, at=begin + 1.0 + choose.uniform(0.0, held.seconds), moment="", count=1)
        # It may come to a certain place first, and no further.
        stopped = replace(other, kind=f"stop_{who}", seconds=held.seconds + 100.0)
        return [held, stopped, later] if choose.random() < 0.5 else [held, later]
    return [held, other]


def _moment(choose: random.Random, moments: list[str]) -> str:
    return choose.choice(["", "after "]) + choose.choice(moments)


def draw_scenario(choose: random.Random, seed: int) -> Scenario:
    """Draw a run of about a day."""
    sizes = [1, 2, 2, 2, 2, 2, 2, 3, 3, 4] if choose.random() < 0.98 else [5, 6, 7, 8, 12, 16]
    if choose.random() < 0.0005:
        sizes = [32, 64]
    world_sizes = tuple(choose.choice(sizes) for _ in range(choose.choice([1, 1, 2, 3])))
    nodes = choose.randint(1, max(1, min(max(world_sizes), 16)))
    storage = choose.choices(["shared", "leased", "object"], [6, 2, 2])[0]
    saves = choose.randint(2, 6)
    every = choose.choice([1, 1, 2, 3])
    is_async = choose.random() < 0.5
    policies = ["latest:1", "latest:2", "latest:3", f"every:{2 * every}", "best:1", "interval:20000"]
    return Scenario(
        seed=seed,
        world_sizes=world_sizes,
        nodes=nodes,
        storage=storage,
        is_async=is_async,
        keep=tuple(sorted(choose.sample(policies, choose.choice([0, 1, 1, 1, 2])))),
        save_every=every,
        steps=saves * every,
        step_seconds=DAY / (saves * every),
        on_error=choose.choice(["exit", "continue"]),
        grace=choose.choice([1.0, 30.0, 300.0, 2000.0]),
        jobs=2 if choose.random() < 0.1 else 1,
        preemption=choose.random() < 0.3,
        readers=choose.choice([0, 0, 0, 1]),
        reader_seconds=choose.uniform(HOUR, 6 * HOUR),
        timeout=choose.choice([20.0, 200.0, 1800.0]),
        lease_seconds=choose.choice([5.0, 30.0]),
        habits=draw_habits(seed, storage=storage, is_async=is_async),
    )


def draw_fault(choose: random.Random, scenario: Scenario) -> Fault:
    """Draw a fault that the scenario can have."""
    groups = [_ENDS, _STOPS, _CLOCKS, _PERSON, ("power_loss",)]
    weights = [6.0, 3.0, 1.0, 1.0, 1.5]
    if max(scenario.world_sizes) > 1:
        groups.append(_NETWORK)
        weights.append(1.0)
    groups.append(_OBJECTS if scenario.storage == "object" else _STORAGE)
    weights.append(4.0)
    kind = choose.choice(choose.choices(groups, weights)[0])
    if kind.endswith("_writer") and not scenario.is_async:
        kind = kind.replace("writer", "rank")
    if kind == "partition" and scenario.nodes == 1:
        kind = "slow_network"
    rank, node = choose.randrange(max(scenario.world_sizes)), choose.randrange(scenario.nodes)
    if choose.random() < 0.5:
        rank = 0  # the coordinator
    # What a fault strikes, and whose calls it waits for.
    target = {
        "rank": f"rank:{rank}",
        "writer": f"writer:{rank}",
        "node": f"node:{node}",
        "job": "job",
        "jump": f"node:{node}",
        "rate": f"node:{node}",
        "partition": f"nodes:{node}:{(node + 1) % scenario.nodes}",
    }.get(kind.rpartition("_")[2], "storage")
    prefix = "b/" if scenario.jobs > 1 and choose.random() < 0.3 else ""
    if target.startswith(("rank", "writer", "job")):
        target = prefix + target
    begin = choose.uniform(0.0, scenario.seconds)
    fault = Fault(kind, begin, target, seconds=_draw_seconds(choose, kind), amount=_draw_amount(choose, kind))
    if choose.random() < 0.7 and kind not in (*_CLOCKS, *_PERSON):
        moments = [name for name in MOMENTS if scenario.storage == "leased" or name != "lease"]
        moment = choose.choice(["", "", "after "]) + choose.choice(moments)
        count = choose.choice([1, 1, 1, 2, 3, 5, choose.randint(1, 40)])
        fault = replace(fault, moment=moment, count=count)
    return fault


def _draw_seconds(choose: random.Random, kind: str) -> float:
    if kind in (*_ENDS, *_CLOCKS, *_PERSON, "power_loss"):
        return 0.0
    short, long = choose.uniform(0.01, 3.0), choose.uniform(30.0, 4000.0)
    return round(choose.choice([short, long, choose.uniform(1.0, 100.0)]), 3)


def _draw_amount(choose: random.Random, kind: str) -> float:
    amounts: dict[str, Any] = {
        "clock_jump": lambda: round(choose.choice([-1, 1]) * choose.choice([1.0, 60.0, 3600.0, 2 * DAY]), 3),
        "clock_rate": lambda: choose.choice([0.9, 0.99, 1.01, 1.1]),
        "slow_network": lambda: choose.choice([0.05, 1.0, 20.0]),
        "disk_slow": lambda: choose.choice([0.1, 2.0, 40.0]),
        "store_slow": lambda: choose.choice([0.1, 2.0, 40.0]),
        "io_error": lambda: float(choose.choice(_ERRORS)),
        "store_errors": lambda: choose.choice([0.1, 0.5, 1.0]),
        "store_lost_answers": lambda: choose.choice([0.1, 0.5]),
        "power_loss": lambda: choose.random(),
    }
    if kind.startswith("person"):
        return float(choose.randrange(8))
    return float(amounts[kind]()) if kind in amounts else 0.0
