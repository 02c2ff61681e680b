"""Shrink a case that fails: fewer faults, fewer ranks, less time, while the same invariant is violated.

Tested in tests/simulation/test_shrink.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.simulated.scenario import Case, Fault, Scenario

Fails = Callable[[Case], bool]
# Fields of a scenario that are given their defaults, the ones that matter most first.
_SIMPLIFIED = (
    *("jobs", "readers", "reader_seconds", "preemption", "is_async", "keep", "save_every", "on_error", "grace"),
    *("timeout", "lease_seconds", "overwrites"),
)


def shrink(case: Case, fails: Fails, tries: int = 400) -> Case:
    """Return a case as small as can be found in so many tries; ``fails`` tells whether one still fails alike."""
    left = [tries]

    def still(smaller: Case) -> bool:
        if left[0] <= 0:
            return False
        left[0] -= 1
        return fails(smaller)

    while left[0] > 0:
        before = case
        case = _fewer_faults(case, still)
        case = _simpler(case, still)
        if case == before:
            break
    return case


def _fewer_faults(case: Case, fails: Fails) -> Case:
    """Leave out halves, quarters and so on of the faults, and in the end each alone."""
    size = max(1, len(case.faults) // 2)
    while case.faults:
        begin, found = 0, False
        while begin < len(case.faults):
            fewer = replace(case, faults=case.faults[:begin] + case.faults[begin + size :])
            if fails(fewer):
                case, found = fewer, True
            else:
                begin += size
        if size == 1 and not found:
            break
        size = max(1, size // 2)
    return case


def _simpler(case: Case, fails: Fails) -> Case:
    for simplify in (_scenarios, _schedules):
        tried = True
        while tried:
            tried = False
            for smaller in simplify(case):
                if smaller != case and fails(smaller):
                    case, tried = smaller, True
                    break
    return case


def _scenarios(case: Case) -> Iterator[Case]:
    """Yield cases of which the scenario is simpler in one respect."""
    scenario, plain = case.scenario, Scenario(case.scenario.seed)
    if len(scenario.world_sizes) > 1:
        yield _with(case, world_sizes=scenario.world_sizes[:-1])
        yield _with(case, world_sizes=scenario.world_sizes[1:])
    for index, size in enumerate(scenario.world_sizes):
        for fewer in sorted({1, 2, size // 2, size - 1}):
            if 0 < fewer < size:
                sizes = list(scenario.world_sizes)
                sizes[index] = fewer
                yield _with(case, world_sizes=tuple(sizes), nodes=min(scenario.nodes, max(sizes)))
    for fewer in sorted({1, scenario.nodes - 1}):
        if 0 < fewer < scenario.nodes:
            yield _with(case, nodes=fewer)
    for name in _SIMPLIFIED:
        if getattr(scenario, name) != getattr(plain, name):
            yield _with(case, **{name: getattr(plain, name)})
    for name in scenario.habits:
        yield _with(case, habits=tuple(other for other in scenario.habits if other != name))
    if scenario.storage != "shared":
        yield _with(case, storage="shared")
    for fewer in sorted({1, 2, scenario.steps // 2, scenario.steps - 1}):
        if 0 < fewer < scenario.steps:
            yield _with(case, steps=fewer)
    if scenario.step_seconds > 1000.0:
        ratio = 1000.0 / scenario.step_seconds
        faults = tuple(replace(fault, at=round(fault.at * ratio, 3)) for fault in case.faults)
        yield replace(_with(case, step_seconds=1000.0), faults=faults)


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, scenario=replace(case.scenario, **changes))


def _schedules(case: Case) -> Iterator[Case]:
    """Yield cases of which one fault is simpler."""
    for index, fault in enumerate(case.faults):
        for simpler in _faults(fault):
            yield replace(case, faults=(*case.faults[:index], simpler, *case.faults[index + 1 :]))


def _faults(fault: Fault) -> Iterator[Fault]:
    if fault.count > 1:
        yield replace(fault, count=1)
        yield replace(fault, count=fault.count // 2)
        yield replace(fault, count=fault.count - 1)
    if fault.at:
        yield replace(fault, at=0.0)
        if fault.at != round(fault.at, -2):
            yield replace(fault, at=round(fault.at, -2))
    if fault.seconds != round(fault.seconds):
        yield replace(fault, seconds=float(round(fault.seconds)))
