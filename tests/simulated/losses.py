"""Draw clusters that keep steps in the memory of nodes, and what befalls these: losses, old nodes, another run.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.simulated.scenario import DAY, Case, Fault, Scenario


def draw_moment(choose: random.Random, moments: Sequence[str]) -> str:
    """Draw one of these moments, or the call after it."""
    return choose.choice(["", "after "]) + choose.choice(moments)


def with_memory(case: Case) -> Case:
    """Have some cases keep steps in the memory of nodes, which are lost, are away and come back, and lose power."""
    scenario, choose = case.scenario, random.Random(f"memory {case.scenario.seed}")
    if scenario.storage == "per_node" or choose.random() > 0.12:
        return case
    nodes, every, saves = choose.choice([2, 2, 3, 3, 4]), choose.choice([1, 2, 2, 3]), choose.randint(2, 4)
    if choose.random() < 0.8:
        habits = {*scenario.habits} & {"asks", "gs", "partitions", "verify"}
        keep = tuple(each for each in scenario.keep if "best" not in each)
        scenario = replace(scenario, keep=keep, readers=0, preemption=False)
    else:
        habits = {*scenario.habits} - {"clock", "upgrade", "large", "waves"}
    scenario = replace(
        scenario,
        nodes=nodes,
        world_sizes=tuple(max(size, nodes) for size in scenario.world_sizes),
        jobs=1,
        save_every=every,
        steps=saves * every,
        step_seconds=DAY / (saves * every),
        grace=choose.choice([1.0, 30.0, 300.0]),
        habits=tuple(sorted({*habits, "memory"})),
    )
    if choose.random() < 0.3:  # parity needs as many ranks on each node
        sizes = tuple(-(-size // nodes) * nodes for size in scenario.world_sizes)
        scenario = replace(scenario, world_sizes=sizes, habits=tuple(sorted({*scenario.habits, "parity"})))
    faults = case.faults if choose.random() < 0.3 else ()
    for _ in range(choose.choice([0, 1, 1, 2, 3, 4, 6])):
        faults = (*faults, *choose.choice(_LOSSES)(choose, scenario))
    return Case(scenario, tuple(sorted(faults, key=lambda fault: fault.at)))


_SAVING = ("data", "data", "part", "manifest begun", "manifest put in place", "removal", "send", "listing", "lock")


def _lost_nodes(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw that one node or two lose power at once, in a save or at any time."""
    begin, seconds = _just_before(choose, scenario), choose.choice([60.0, 60.0, 4000.0, 20000.0])
    moment, count = draw_moment(choose, [*_SAVING]), choose.choice([1, 1, 2, 3, 5])
    if choose.random() < 0.3:
        begin, moment = choose.uniform(0.0, scenario.seconds), ""
    nodes = choose.sample(range(scenario.nodes), min(choose.choice([1, 1, 2]), scenario.nodes))
    return [Fault("kill_node", begin, f"node:{node}", moment, count, seconds) for node in nodes]


def _lost_power_of_all(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw that all nodes lose power, in a save or at any time."""
    moment = choose.choice(["", draw_moment(choose, [*_SAVING])])
    return [Fault("power_loss", _just_before(choose, scenario), "storage", moment, amount=choose.random())]


def _old_node(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw that a node is away while others go on, comes back with what it had, and maybe others lose theirs."""
    begin, node = _just_before(choose, scenario), choose.randrange(scenario.nodes)
    others = [each for each in range(scenario.nodes) if each != node]
    if choose.random() < 0.4:  # the others lose all, and save again the step that is in memory alone
        alone = [step for step in range(1, scenario.steps) if step % scenario.save_every] or [1]
        begin = (choose.choice(alone) + 0.2) * scenario.step_seconds
        seconds = choose.uniform(1.3, 1.9) * scenario.step_seconds
        away = Fault("drain_node", begin, f"node:{node}", seconds=seconds)
        lost = [Fault("kill_node", begin + 10.0, f"node:{each}", seconds=60.0) for each in others]
        return [away, *lost, Fault("kill_job", begin + seconds + 10.0, "job")]
    moment, seconds = (
        choose.choice(["", draw_moment(choose, [*_SAVING])]),
        choose.uniform(0.2, 2.5) * scenario.step_seconds,
    )
    faults = [Fault("drain_node", begin, f"node:{node}", moment, choose.choice([1, 1, 2, 3]), seconds)]
    again = begin + seconds + choose.choice([10.0, 2000.0])
    if choose.random() < 0.5:
        at = choose.choice([again, begin + choose.uniform(0.0, seconds)])
        some = choose.sample(others, choose.randint(1, len(others)))
        faults += [Fault("kill_node", at, f"node:{each}", seconds=60.0) for each in some]
    return [*faults, Fault("kill_job", again, "job")]


def _loss_in_restore(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw that a job is killed, and something ends while it restores."""
    begin = _just_before(choose, scenario) + choose.choice([2.0, 100.0, 5000.0])
    kind, rank, node = choose.choice(["kill_node", "kill_rank"]), choose.randrange(2), choose.randrange(scenario.nodes)
    target = f"node:{node}" if kind == "kill_node" else f"rank:{rank}"
    moment = draw_moment(choose, ["reading", "reading", "send", "listing", "lock"])
    later = Fault(kind, begin + 0.5, target, moment, choose.randint(1, 20), 60.0 if kind == "kill_node" else 0.0)
    return [Fault("kill_job", begin, "job"), later]


def _death_in_save(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw that a rank or a writer dies in a save, or stops."""
    kind = choose.choice(
        ["kill_rank", "kill_writer", "kill_writer", "kill_job", "stop_writer", "stop_rank", "slow_call"]
    )
    who = "writer" if kind == "slow_call" else kind.partition("_")[2]
    target = "job" if who == "job" else f"{who}:{choose.randrange(max(scenario.world_sizes))}"
    seconds = 0.0 if kind.startswith("kill") else choose.choice([5.0, 100.0, 2500.0])
    moment, count = draw_moment(choose, [*_SAVING]), choose.choice([1, 1, 2, 3, 5])
    return [Fault(kind, _just_before(choose, scenario), target, moment, count, seconds)]


def _another_run(choose: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw that somebody begins another run in the same place, where storage does what it is told at once."""
    if scenario.storage == "object":
        return []
    return [Fault("begin_anew", _just_before(choose, scenario) + choose.choice([5.0, 5000.0]), "storage")]


_LOSSES: list[Callable[[random.Random, Scenario], list[Fault]]] = [
    *(_lost_nodes, _lost_nodes, _lost_power_of_all, _old_node, _old_node),
    *(_loss_in_restore, _death_in_save, _death_in_save, _another_run),
]


def _just_before(choose: random.Random, scenario: Scenario) -> float:
    """Return a time right before a step ends."""
    return choose.randint(1, scenario.steps) * scenario.step_seconds - 1.0
