"""Neighbours of known cases: drawn from a seed, different from what is known, and such as a run can have."""

from __future__ import annotations

import pytest

pytest.importorskip("greenlet")

from tests.simulated.scenario import KINDS, Case
from tests.simulation.campaign import Totals, simulate_one
from tests.simulation.neighbours import draw_neighbour, known


def test_a_seed_has_one_neighbour_and_most_are_new():
    cases = [draw_neighbour(seed) for seed in range(2000)]
    assert cases[7] == draw_neighbour(7)
    assert [case.scenario.seed for case in cases] == list(range(2000))
    schedules = {each.faults for each in known()}
    new = [case for case in cases if case.faults not in schedules]
    assert len(new) > 1500
    assert len({case.faults for case in new}) > 1300
    assert {case.scenario.storage for case in cases} == {"shared", "leased", "object", "per_node"}


def test_faults_fit_their_scenarios():
    for case in map(draw_neighbour, range(2000)):
        for fault in case.faults:
            assert fault.kind in KINDS
            assert case.scenario.is_async or not fault.target.startswith("writer")
            assert case.scenario.readers or fault.target != "reader"
            assert case.scenario.jobs > 1 or not fault.target.startswith("b/")
            assert not (fault.kind.startswith("disk") and case.scenario.storage == "object")
        assert Case.from_json(case.to_json()) == case


def test_neighbours_are_simulated():
    totals = Totals()
    for seed in range(12):
        simulate_one(draw_neighbour(seed), totals)
    assert totals.violated == []
    assert sum(totals.struck.values()) > 8
