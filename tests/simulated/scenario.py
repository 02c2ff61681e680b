"""What is simulated, as data: a scenario, and a schedule of faults. Both have a JSON form.

A fault strikes at a time, or at a moment of the protocol: at a call of some process that does what a name in
:data:`MOMENTS` says. Faults at random times rarely meet a commit. ``drawing.py`` draws both from a seed.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

DAY = 86400.0
HOUR = 3600.0


@dataclass(frozen=True)
class Scenario:
    """Describe a run: its jobs, where it saves, and how.

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
        max_pending: Saves that a rank may have in the background at a time.
        in_pairs: Whether every second step comes a second after the one before.
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
    max_pending: int = 1
    in_pairs: bool = False
    habits: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return how long the job takes if nothing happens, without its saves."""
        return self.steps * self.step_seconds

    def time_of(self, step: int) -> float:
        """Return how long a step takes."""
        if not self.in_pairs:
            return self.step_seconds
        return 2 * self.step_seconds - 1.0 if step % 2 else 1.0

    def world_size(self, incarnation: int) -> int:
        """Return the ranks of the job's n-th start."""
        return self.world_sizes[min(incarnation, len(self.world_sizes) - 1)]


@dataclass(frozen=True)
class Fault:
    """Describe one fault.

    Attributes:
        kind: One of :data:`KINDS`.
        at: When, in seconds since the beginning; with a moment, from when on it is waited for.
        target: Whom it strikes: ``rank:1``, ``writer:0`` (the writer process of a rank), ``node:0``, ``job``,
            ``storage``, ``nodes:0:1``, ``reader``; with ``b/`` before it, of the second job.
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
    """Hold a scenario and its schedule; and what it once violated, if that is known."""

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
    "reading": _call("pread", "preadv", "read", "get"),
    "failure": _file(".failed", "open", "rename", "put"),
    "send": _call("send"),
    "connect": _call("connect"),
}

ENDS = ("kill_rank", "kill_writer", "kill_node", "kill_job", "terminate_job", "terminate_node")
STOPS = ("stop_rank", "stop_writer", "stop_node", "stop_job")
NETWORK = ("slow_network", "partition")
CLOCKS = ("clock_jump", "clock_rate")
STORAGE = ("disk_full", "disk_slow", "disk_read_only", "disk_gone", "io_error", "slow_call")
OBJECTS = ("store_errors", "store_lost_answers", "store_stale", "store_slow", "slow_call")
PERSON = ("person_copies", "person_moves", "person_deletes", "person_restores", "person_damages")
CARE = ("care_damage", "care_look")
# A node has another, empty disk when it comes back; where each saves to its own, with copies.
DISK = ("lose_disk",)
# A node is away for a while, and keeps what is in its memory; another run begins in the same place.
MEMORY = ("drain_node", "begin_anew")
KINDS = tuple(
    dict.fromkeys((*ENDS, *STOPS, *NETWORK, *CLOCKS, *STORAGE, *OBJECTS, "power_loss", *PERSON, *CARE, *DISK, *MEMORY))
)
