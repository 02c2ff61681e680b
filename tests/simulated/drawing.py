"""Draw cases from seeds: a scenario, faults at random, and faults that meet in one save, one restore or at a reader.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulated.habits import draw_habits
from tests.simulated.losses import draw_moment, with_memory
from tests.simulated.scenario import (
    CLOCKS,
    DAY,
    ENDS,
    HOUR,
    MOMENTS,
    NETWORK,
    OBJECTS,
    PERSON,
    STOPS,
    STORAGE,
    Case,
    Fault,
    Scenario,
)

# Errors of calls on files: EIO, ENOSPC, EDQUOT, ESTALE.
_ERRORS = (5, 5, 28, 122, 116)


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    choose = random.Random(f"case {seed}")
    scenario = draw_scenario(choose, seed)
    if choose.random() < 0.1:  # a death alone: then errors' texts are judged
        return Case(scenario, (_draw_death(choose, scenario),))
    count = min(1 + int(choose.expovariate(1 / 3.5)), 12)
    faults = [draw_fault(choose, scenario) for _ in range(count)]
    if choose.random() < 0.4:
        faults += draw_meeting(choose, scenario)
    faults += draw_care(seed, scenario)
    case = _with_many_faults(Case(scenario, tuple(sorted(faults, key=lambda fault: fault.at))))
    for change in (
        *(_with_slow_reader, _with_lost_publisher, _with_lost_disk, _with_slow_removal, _with_late_commit),
        *(_with_torn_saves, _without_overwriting, with_memory),
    ):
        case = change(case)
    return case


def _with_many_faults(case: Case) -> Case:
    """Have many more faults in some cases, so that more of them meet."""
    choose = random.Random(f"many {case.scenario.seed}")
    if choose.random() > 0.3:
        return case
    more = [draw_fault(choose, case.scenario) for _ in range(choose.randint(4, 12))]
    return Case(case.scenario, tuple(sorted((*case.faults, *more), key=lambda fault: fault.at)))


def _with_slow_reader(case: Case) -> Case:
    """Have a reader of some cases still read when its checkpoint is to be removed; drawn for itself, as habits are."""
    scenario, choose = case.scenario, random.Random(f"reading {case.scenario.seed}")
    if scenario.storage != "shared" or choose.random() > 0.04:
        return case
    save = scenario.save_every * scenario.step_seconds
    scenario = replace(
        scenario, keep=("latest:1",), readers=1, reader_seconds=choose.uniform(0.2, 0.6) * min(save, 6 * HOUR)
    )
    begin = save * choose.uniform(1.0, scenario.steps // scenario.save_every - 1.0)
    slow = Fault("slow_call", begin, "reader", "data", choose.choice([1, 1, 2, 3]), 1.5 * save)
    return Case(scenario, tuple(sorted((*case.faults, slow), key=lambda fault: fault.at)))


def _with_lost_publisher(case: Case) -> Case:
    """Have the first node of some cases publish a save alone, and then be away while others go on with copies."""
    scenario, choose = case.scenario, random.Random(f"publishing {case.scenario.seed}")
    if scenario.storage != "per_node" or "copies" not in scenario.habits or choose.random() > 0.25:
        return case
    save = scenario.save_every * scenario.step_seconds
    begin = save * choose.randint(1, scenario.steps // scenario.save_every - 1) - 1.0
    size = scenario.world_size(0)
    nodes = [rank * scenario.nodes // size for rank in range(size)]
    first = [nodes.index(node) for node in range(1, scenario.nodes)]
    held = [Fault("slow_call", begin, f"rank:{rank}", "manifest put in place", 1, 20.0) for rank in first]
    lost = Fault("kill_node", begin, "node:0", "after manifest put in place", seconds=choose.uniform(0.5, 1.5) * save)
    killed = Fault("kill_job", begin + 10.0, "job")
    return Case(scenario, tuple(sorted((*case.faults, *held, lost, killed), key=lambda fault: fault.at)))


def _with_lost_disk(case: Case) -> Case:
    """Have a node of some cases with copies or parity lose its disk."""
    scenario, choose = case.scenario, random.Random(f"losing {case.scenario.seed}")
    if scenario.storage != "per_node" or not {"copies", "parity"} & {*scenario.habits} or choose.random() > 0.4:
        return case
    begin, target = choose.uniform(0.0, scenario.seconds), f"node:{choose.randrange(scenario.nodes)}"
    moment = draw_moment(
        choose, ["manifest put in place", "manifest put in place", "removal", "data", "fsync", "reading"]
    )
    lost = Fault("lose_disk", begin, target, choose.choice(["", moment]), choose.choice([1, 1, 2, 3]))
    return Case(scenario, tuple(sorted((*case.faults, lost), key=lambda fault: fault.at)))


def _with_slow_removal(case: Case) -> Case:
    """Have a rank of some cases stop where it removes something of a failed save, while another job saves the step."""
    scenario, choose = case.scenario, random.Random(f"removing {case.scenario.seed}")
    if scenario.jobs == 1 or scenario.is_async or max(scenario.world_sizes) == 1 or choose.random() > 0.2:
        return case
    save = scenario.save_every * scenario.step_seconds
    begin = save * choose.randint(1, scenario.steps // scenario.save_every) - 1.0
    rank, seconds = f"rank:{choose.randrange(max(scenario.world_sizes))}", choose.choice([5.0, 30.0])
    later = Fault("slow_call", begin, "b/rank:0", "lock" if scenario.storage == "shared" else "lease", seconds=seconds)
    failed = Fault("io_error", begin, rank, "data", amount=5.0)
    stopped = Fault("stop_rank", begin, rank, "removal", choose.choice([1, 1, 2]), seconds=seconds + 20.0)
    scenario = replace(scenario, grace=max(scenario.grace, 60.0))
    return Case(scenario, tuple(sorted((*case.faults, later, failed, stopped), key=lambda fault: fault.at)))


def _with_late_commit(case: Case) -> Case:
    """Have who commits in some cases stop right before, for longer than its lease, while another job saves the step."""
    scenario, choose = case.scenario, random.Random(f"committing late {case.scenario.seed}")
    if scenario.jobs == 1 or scenario.storage == "shared" or scenario.is_async or choose.random() > 0.5:
        return case
    save = scenario.save_every * scenario.step_seconds
    begin = save * choose.randint(1, scenario.steps // scenario.save_every) - 1.0
    later = Fault("slow_call", begin, "b/rank:0", "lease", seconds=choose.choice([5.0, 20.0]))
    seconds = choose.uniform(1.5, 4.0) * scenario.lease_seconds + 20.0
    stopped = Fault("stop_rank", begin, "rank:0", "manifest put in place", seconds=seconds)
    return Case(scenario, tuple(sorted((*case.faults, later, stopped), key=lambda fault: fault.at)))


def _with_torn_saves(case: Case) -> Case:
    """Have several saves of some cases end near their commit, and nodes with disks of their own be away then."""
    scenario, choose = case.scenario, random.Random(f"tearing {case.scenario.seed}")
    own_disks = scenario.storage == "per_node"
    if choose.random() > (0.5 if own_disks else 0.08):
        return case
    if own_disks and choose.random() < 0.5:
        # Of three nodes two can go on with one id while the third is away.
        sizes, habits = tuple(max(size, 3) for size in scenario.world_sizes), {*scenario.habits, "copies"} - {"rising"}
        scenario = replace(scenario, nodes=3, world_sizes=sizes, habits=tuple(sorted(habits)))
    save, torn = scenario.save_every * scenario.step_seconds, []
    moments = ["after manifest put in place"] * 5 + ["manifest put in place", "manifest begun", "removal", "lock"]
    for number in range(1, scenario.steps // scenario.save_every):
        begin = number * save - 1.0
        if choose.random() < 0.8:
            moment, count, target = choose.choice(moments), choose.choice([1, 1, 2, 2, 3]), "job"
            if choose.random() < 0.4:  # the others outlive it
                target, count = f"rank:{choose.randrange(max(scenario.world_sizes))}", 1
            torn.append(Fault(f"kill_{target.partition(':')[0]}", begin, target, moment, count))
        if own_disks and choose.random() < 0.6:
            away = choose.uniform(0.2, 2.0) * save if choose.random() < 0.3 else choose.uniform(1.2, 1.9) * save
            torn.append(Fault("kill_node", begin + 10.0, f"node:{choose.randrange(scenario.nodes)}", seconds=away))
    others = case.faults if choose.random() < 0.5 else ()
    return Case(scenario, tuple(sorted((*others, *torn), key=lambda fault: fault.at)))


def _without_overwriting(case: Case) -> Case:
    """Have some cases keep steps that are there, and another job save one while a saver is about to take its right."""
    scenario, choose = case.scenario, random.Random(f"keeping {case.scenario.seed}")
    if scenario.storage == "per_node" or choose.random() > (0.3 if scenario.jobs > 1 else 0.05):
        return case
    # A job that goes back, to the best step or as no checkpoint is whole, would have to replace others, and is not let.
    if "best" in scenario.habits or any(fault.kind.startswith(("care", "person", "lose")) for fault in case.faults):
        return case
    scenario = replace(scenario, overwrites=False)
    if scenario.jobs == 1:
        return Case(scenario, case.faults)
    save = scenario.save_every * scenario.step_seconds
    begin, moment = save * choose.randint(1, scenario.steps // scenario.save_every) - 1.0, "lock"
    if scenario.storage != "shared":
        moment = "lease"
    later = Fault("slow_call", begin, choose.choice(["rank:0", "b/rank:0"]), moment, seconds=choose.choice([5.0, 60.0]))
    return Case(scenario, tuple(sorted((*case.faults, later), key=lambda fault: fault.at)))


def draw_care(seed: int, scenario: Scenario) -> list[Fault]:
    """Draw damage to checkpoints, and a person who looks after them; for themselves, as habits are."""
    choose = random.Random(f"care {seed}")
    if choose.random() > 0.12 or scenario.storage == "per_node":
        return []
    faults = []
    for _ in range(choose.choice([1, 1, 2])):
        at = choose.uniform(0.2, 1.0) * scenario.seconds
        if choose.random() < 0.8:
            faults.append(Fault("care_damage", at, amount=float(choose.randrange(1 << 20))))
        faults.append(Fault("care_look", at + choose.choice([0.001, 1.0, 5000.0])))
    return faults


def _draw_death(choose: random.Random, scenario: Scenario) -> Fault:
    target = f"rank:{choose.randrange(max(scenario.world_sizes))}"
    moment = draw_moment(choose, ["send", "any call", "data", "part", "manifest put in place", "listing", "fsync"])
    return Fault("kill_rank", choose.uniform(0.0, scenario.seconds), target, moment, choose.randint(1, 12))


def draw_meeting(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw faults that meet: in one save, in one restore, or with a reader."""
    meetings: list[Callable[[random.Random, Scenario, float], list[Fault]]] = [_late_decision] * 4
    meetings += [_lost_power] * 2 + [_failed_sync] * 2 + [_trouble_of_one]
    if scenario.nodes > 1:
        meetings += [_late_and_cut] * 2
    if max(scenario.world_sizes) > 2:
        meetings += [_death_beside_commit] * 2
    if scenario.readers:
        meetings += [_slow_reader] * 3
    if scenario.jobs > 1:
        meetings += [_slow_holder] * 6
    save = choose.randrange(max(1, scenario.steps // scenario.save_every)) + 1
    begin = max(0.0, save * scenario.save_every * scenario.step_seconds - 1.0)
    return choose.choice(meetings)(choose, scenario, begin)


def _saver(choose: random.Random, scenario: Scenario, share: float = 0.7) -> str:
    return "writer" if scenario.is_async and choose.random() < share else "rank"


def _late_decision(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that who decides is held up, and another dies, or is held up as well."""
    who = _saver(choose, scenario)
    moments = ["manifest begun", "manifest put in place", "fsync", "part", "listing", "lease", "any call"]
    seconds = choose.choice([0.5, 5.0, 40.0, 300.0, 2500.0])
    how = choose.choice([f"stop_{who}", "slow_call"])
    held = Fault(how, begin, f"{who}:0", draw_moment(choose, moments), choose.choice([1, 1, 1, 2, 3]), seconds)
    kind = choose.choice(["kill", "kill", "kill", "stop"])
    if choose.random() < 0.3:
        who = "rank"
    target = f"{who}:{choose.randrange(max(scenario.world_sizes))}"
    moments = ["send", "send", "send", "data", "part", "fsync", "listing", "failure", "any call"]
    seconds = 0.0 if kind == "kill" else choose.choice([1.0, 100.0])
    other = Fault(f"{kind}_{who}", begin, target, draw_moment(choose, moments), choose.randint(1, 12), seconds)
    if choose.random() < 0.3:  # when the first has been held up for a while
        later = replace(other, at=begin + 1.0 + choose.uniform(0.0, held.seconds), moment="", count=1)
        # It may come to a certain place first, and no further.
        stopped = replace(other, kind=f"stop_{who}", seconds=held.seconds + 100.0)
        return [held, stopped, later] if choose.random() < 0.5 else [held, later]
    return [held, other]


def _late_and_cut(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that who decides is held up, and its node is cut off from another."""
    moment = draw_moment(choose, ["manifest begun", "manifest put in place", "fsync", "listing"])
    held = Fault("slow_call", begin, f"{_saver(choose, scenario)}:0", moment, 1, choose.choice([5.0, 15.0, 100.0]))
    other, moment = choose.randrange(1, scenario.nodes), choose.choice(["part", "manifest begun"])
    return [held, Fault("partition", begin, f"nodes:0:{other}", moment, 1, held.seconds + 20.0)]


def _death_beside_commit(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that a commit takes long, and a rank that comes to a certain place and no further dies meanwhile."""
    held = Fault("slow_call", begin, f"{_saver(choose, scenario)}:0", "manifest put in place", 1, 20.0)
    target = f"rank:{choose.randrange(1, max(scenario.world_sizes))}"
    stopped = Fault("stop_rank", begin, target, "send", choose.randint(1, 12), 200.0)
    return [held, stopped, Fault("kill_rank", begin + 8.0, target)]


def _lost_power(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that who decides is held up right after the commit, or before it; then its node, or all, lose power."""
    moment = choose.choice(["after manifest put in place"] * 2 + ["manifest put in place", "fsync", "after data"])
    held = Fault("slow_call", begin, f"{_saver(choose, scenario, 0.9)}:0", moment, 1, 200.0)
    kind = choose.choice(["power_loss", "kill_node"])
    target = "storage" if kind == "power_loss" else "node:0"
    return [held, Fault(kind, begin + choose.uniform(2.0, 150.0), target, amount=choose.random())]


def _failed_sync(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that a write or an fsync fails, and soon after the power does, or not."""
    target = f"{_saver(choose, scenario)}:{choose.randrange(max(scenario.world_sizes))}"
    moment = choose.choice(["fsync", "fsync", "data"])
    failed = Fault("io_error", begin, target, moment, choose.randint(1, 6), amount=5.0)
    lost = Fault("power_loss", begin + choose.choice([10.0, 100.0]), "storage", amount=choose.random())
    return [failed, lost] if choose.random() < 0.5 else [failed]


def _trouble_of_one(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that a job is killed, and when it starts again one of its ranks cannot read something."""
    target = f"rank:{choose.randrange(max(scenario.world_sizes))}"
    killed = Fault("kill_job", begin + choose.choice([10.0, 1000.0]), "job")
    moment = choose.choice(["any call", "reading", "reading"])
    return [killed, Fault("io_error", killed.at + 1.0, target, moment, choose.randint(1, 20), amount=5.0)]


def _slow_holder(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that the first save takes long, and another job comes."""
    moment, seconds = choose.choice(["data", "part", "manifest begun", "fsync"]), choose.choice([10.0, 100.0])
    return [Fault("slow_call", begin, "storage", moment, choose.randint(1, 3), seconds)]


def _slow_reader(choose: random.Random, scenario: Scenario, begin: float) -> list[Fault]:
    """Draw that a reader takes long, and savers go on meanwhile."""
    moment, count = choose.choice([("any call", choose.randint(1, 60)), ("data", choose.randint(1, 6))])
    seconds = choose.uniform(0.5, 1.5) * scenario.save_every * scenario.step_seconds
    return [Fault("slow_call", begin, "reader", moment, count, seconds)]


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
    scenario = Scenario(
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
        max_pending=choose.choice([1, 1, 2]),
        in_pairs=choose.random() < 0.2,
        habits=draw_habits(seed, storage=storage, is_async=is_async),
    )
    return _on_own_disks(scenario)


def _on_own_disks(scenario: Scenario) -> Scenario:
    """Have some of the scenarios of several nodes save to the nodes' own disks; drawn for itself, as habits are."""
    if scenario.nodes == 1 or random.Random(f"disks {scenario.seed}").random() > 0.15:
        return scenario
    is_async = random.Random(f"writers {scenario.seed}").random() < 0.5
    scenario = replace(
        scenario,
        storage="per_node",
        is_async=is_async,
        jobs=1,
        keep=(),
        readers=0,
        preemption=False,
        world_sizes=tuple(max(size, scenario.nodes) for size in scenario.world_sizes),
        habits=draw_habits(scenario.seed, storage="per_node", is_async=is_async),
    )
    if random.Random(f"parity {scenario.seed}").random() > 0.3:
        return scenario
    # As many ranks on each node.
    sizes = tuple(-(-size // scenario.nodes) * scenario.nodes for size in scenario.world_sizes)
    habits = tuple(sorted({*scenario.habits, "parity"} - {"copies"}))
    return replace(scenario, world_sizes=sizes, habits=habits)


def draw_fault(choose: random.Random, scenario: Scenario) -> Fault:
    """Draw a fault that the scenario can have."""
    groups = [ENDS, STOPS, CLOCKS, PERSON, ("power_loss",)]
    weights = [6.0, 3.0, 1.0, 1.0, 1.5]
    if max(scenario.world_sizes) > 1:
        groups.append(NETWORK)
        weights.append(1.0)
    groups.append(OBJECTS if scenario.storage == "object" else STORAGE)
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
    if choose.random() < 0.7 and kind not in (*CLOCKS, *PERSON):
        moments = [name for name in MOMENTS if scenario.storage == "leased" or name != "lease"]
        moment = choose.choice(["", "", "after "]) + choose.choice(moments)
        count = choose.choice([1, 1, 1, 2, 3, 5, choose.randint(1, 40)])
        fault = replace(fault, moment=moment, count=count)
    return fault


def _draw_seconds(choose: random.Random, kind: str) -> float:
    if kind in (*ENDS, *CLOCKS, *PERSON, "power_loss"):
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
