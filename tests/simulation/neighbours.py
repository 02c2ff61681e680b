"""Draw neighbours of the cases in ``found``: where one mistake was, another is often near.

``python -m tests.simulation.run --neighbours`` simulates them in place of cases that are drawn from nothing. A
neighbour is a case that failed once, or one drawn as always, with a few changes: another moment, a fault more.

Tested in tests/simulation/test_neighbours.py.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.simulated.drawing import draw, draw_fault, draw_meeting
from tests.simulated.habits import draw_habits
from tests.simulated.scenario import (
    MOMENTS,
    Case,
    Fault,
    Scenario,
)

FOUND = Path(__file__).parent / "found"

# Kinds that may take each other's place, with what they strike if that has to change.
_ALIKE: tuple[dict[str, str], ...] = (
    dict.fromkeys(("kill_rank", "stop_rank", "io_error", "slow_call"), ""),
    dict.fromkeys(("kill_writer", "stop_writer", "io_error", "slow_call"), ""),
    {"kill_node": "node:0", "stop_node": "node:0", "power_loss": "storage", "kill_job": "job"},
    {"kill_job": "job", "terminate_job": "job", "stop_job": "job", "kill_node": "node:0"},
)
_SHARED, _EIO = ("shared", "leased", "object"), 5.0


@functools.cache
def known() -> tuple[Case, ...]:
    """Return the cases that have failed once."""
    return tuple(Case.from_json(path.read_text(encoding="utf-8")) for path in sorted(FOUND.glob("*.json")))


def draw_neighbour(seed: int) -> Case:
    """Return the neighbour of a seed; which one that is changes with the cases in ``found``."""
    choose = random.Random(f"neighbour {seed}")
    case = choose.choice(known()) if choose.random() < 0.75 else draw(choose.randrange(10**9))
    scenario, faults = replace(case.scenario, seed=seed), [*case.faults]
    changes: list[Callable[[random.Random, Scenario, list[Fault]], Scenario]]
    changes = [_change_scenario] * 4 + [_move] * 5 + [_alter] * 3 + [_swap] * 2 + [_aim] * 2 + [_remove] + [_add] * 4
    for _ in range(choose.choice([1, 1, 2, 2, 3, 4])):
        scenario = choose.choice(changes)(choose, scenario, faults)
    fitting = filter(None, (_fit(fault, scenario) for fault in faults))
    return Case(scenario, tuple(sorted(fitting, key=lambda fault: fault.at)))


# Changes: they return the scenario, and change the list of faults in place.


def _change_scenario(choose: random.Random, scenario: Scenario, faults: list[Fault]) -> Scenario:
    """Change one field, if it may have another value where nodes save to their own disks."""
    sizes = tuple(choose.choice([1, 2, 2, 3, 4]) for _ in range(choose.choice([1, 2])))
    values = {
        "timeout": choose.choice([20.0, 200.0, 1800.0]),
        "lease_seconds": choose.choice([5.0, 30.0]),
        "grace": choose.choice([1.0, 30.0, 300.0, 2000.0]),
        "on_error": choose.choice(["exit", "continue"]),
        "max_pending": choose.choice([1, 2]),
    }
    if scenario.storage != "per_node":
        values |= {
            "keep": choose.choice([(), ("latest:1",), ("latest:2",), ("best:1", "latest:1")]),
            "readers": 1 - min(scenario.readers, 1),
            "jobs": 3 - scenario.jobs,
            "in_pairs": not scenario.in_pairs,
            "world_sizes": sizes,
            "storage": choose.choice(_SHARED),
            "is_async": not scenario.is_async,
        }
    name = choose.choice(sorted(values))
    scenario = replace(scenario, **{name: values[name]})
    if name == "world_sizes":
        scenario = replace(scenario, nodes=min(scenario.nodes, max(sizes)))
    if name in ("storage", "is_async"):
        habits = draw_habits(scenario.seed, storage=scenario.storage, is_async=scenario.is_async)
        scenario = replace(scenario, habits=habits)
    return scenario


def _of_one(change: Callable[[random.Random, Scenario, Fault], Fault]) -> Callable[..., Scenario]:
    """Make of what changes one fault what changes one of several."""

    def apply(choose: random.Random, scenario: Scenario, faults: list[Fault]) -> Scenario:
        if faults:
            at = choose.randrange(len(faults))
            faults[at] = change(choose, scenario, faults[at])
        return scenario

    return apply


@_of_one
def _move(choose: random.Random, scenario: Scenario, fault: Fault) -> Fault:
    """Have a fault strike at another moment."""
    if not fault.moment and choose.random() < 0.7:
        return fault
    moment = choose.choice(["", "", "after "]) + choose.choice(list(MOMENTS))
    return replace(fault, moment=moment, count=choose.choice([1, 1, 2, 3, choose.randint(1, 20)]))


@_of_one
def _alter(choose: random.Random, scenario: Scenario, fault: Fault) -> Fault:
    """Have a fault strike some calls or seconds earlier or later, or for longer."""
    by = choose.choice([-1, 1]) * choose.choice([1.0, 20.0, 300.0, scenario.step_seconds])
    return choose.choice(
        [
            replace(fault, count=max(1, fault.count + choose.choice([-2, -1, 1, 2, 5]))),
            replace(fault, seconds=fault.seconds * choose.choice([0.1, 0.5, 2.0, 10.0])),
            replace(fault, at=max(0.0, fault.at + by)),
        ]
    )


@_of_one
def _swap(choose: random.Random, scenario: Scenario, fault: Fault) -> Fault:
    """Replace a fault's kind by one like it."""
    group = next((group for group in _ALIKE if fault.kind in group), None)
    if group is None:
        return fault
    kind = choose.choice(list(group))
    seconds = fault.seconds or (0.0 if kind.startswith(("kill", "power")) else choose.choice([5.0, 100.0, 2500.0]))
    amount = _EIO if kind == "io_error" else fault.amount
    return replace(fault, kind=kind, target=group[kind] or fault.target, seconds=seconds, amount=amount)


@_of_one
def _aim(choose: random.Random, scenario: Scenario, fault: Fault) -> Fault:
    """Have a fault strike another rank or node."""
    whom, colon, _ = fault.target.rpartition(":")
    if not colon or whom.startswith("nodes"):
        return fault
    return replace(fault, target=f"{whom}:{choose.randrange(scenario.nodes if whom == 'node' else _ranks(scenario))}")


def _remove(choose: random.Random, scenario: Scenario, faults: list[Fault]) -> Scenario:
    if len(faults) > 1:
        del faults[choose.randrange(len(faults))]
    return scenario


def _add(choose: random.Random, scenario: Scenario, faults: list[Fault]) -> Scenario:
    """Add a fault, mostly near another one; or faults that meet."""
    if choose.random() < 0.25:
        faults += draw_meeting(choose, scenario)
        return scenario
    fault = draw_fault(choose, scenario)
    if faults and choose.random() < 0.8:
        begin = choose.choice(faults).at + choose.choice([-1.0, 0.0, 0.0, 1.0, 10.0, 200.0])
        fault = replace(fault, at=max(0.0, begin))
    faults.append(fault)
    return scenario


def _ranks(scenario: Scenario) -> int:
    return max(scenario.world_sizes)


def _fit(fault: Fault, scenario: Scenario) -> Fault | None:
    """Return a fault as a scenario can have it; None if it cannot."""
    if not scenario.is_async:
        fault = replace(fault, kind=fault.kind.replace("writer", "rank"), target=fault.target.replace("writer", "rank"))
    if scenario.jobs == 1:
        fault = replace(fault, target=fault.target.removeprefix("b/"))
    whom, _, number = fault.target.rpartition(":")
    if whom == "node" and int(number) >= scenario.nodes:
        fault = replace(fault, target="node:0")
    elif whom.startswith("nodes:") and int(number) >= scenario.nodes:
        return None
    is_object = scenario.storage == "object"
    if fault.kind.startswith("store_" if not is_object else "disk_"):
        return None
    if fault.kind == "lose_disk" and not (scenario.storage == "per_node" and "copies" in scenario.habits):
        return None
    return None if fault.target == "reader" and not scenario.readers else fault
