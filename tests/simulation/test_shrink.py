"""How a case that fails gets shorter."""

from __future__ import annotations

from dataclasses import replace

from tests.simulated.drawing import draw
from tests.simulated.scenario import Case, Fault, Scenario
from tests.simulated.shrink import shrink
from tests.simulated.story import clock, fingerprint, timeline


def test_only_what_matters_is_left() -> None:
    case = draw(3)
    needed = Fault("power_loss", 5000.0, count=7), Fault("kill_rank", 9000.0, "rank:1", "rename", count=9)
    faults = (*case.faults, needed[0], *draw(4).faults, needed[1], *draw(5).faults)
    scenario = replace(case.scenario, world_sizes=(4, 3), nodes=3, is_async=True, readers=1)
    tried = []

    def fails(smaller: Case) -> bool:
        tried.append(smaller)
        kinds = [fault.kind for fault in smaller.faults if fault.count >= 2]
        return smaller.scenario.is_async and "power_loss" in kinds and "kill_rank" in kinds

    found = shrink(Case(scenario, faults), fails)
    assert [(fault.kind, fault.count, fault.at) for fault in found.faults] == [
        ("power_loss", 2, 0.0),
        ("kill_rank", 2, 0.0),
    ]
    assert found.scenario == replace(
        Scenario(scenario.seed), world_sizes=(1,), is_async=True, steps=1, step_seconds=1000.0
    )
    assert len(tried) < 200


def test_what_cannot_be_shorter_stays() -> None:
    case = Case(Scenario(1, (1,), steps=1, step_seconds=1000.0), (Fault("power_loss", 0.0),))
    assert shrink(case, lambda smaller: smaller == case) == case


def test_tries_are_bounded() -> None:
    tried = []
    shrink(draw(8), lambda smaller: bool(tried.append(smaller)) or True, tries=10)
    assert len(tried) == 10


def test_stories() -> None:
    lines = [(0.0, "a", "begins"), (0.0, "a", "goes on"), (3723.5, "b", "ends")]
    assert timeline(lines).splitlines() == [
        "  0:00:00.000  a                begins",
        "                                goes on",
        "  1:02:03.500  b                ends",
    ]
    assert clock(90061.0625) == " 25:01:01.062"
    assert fingerprint(lines) == fingerprint(list(lines)) != fingerprint(lines[:2])
