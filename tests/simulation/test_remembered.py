"""Runs that remember what the library has computed tell the same stories, and nobody can change what is remembered."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("paddle")
pytest.importorskip("greenlet")

from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.planning.matching import ShardMatcher
from tests.simulated import remembered
from tests.simulated.cluster import simulate
from tests.simulated.remembered import Memory, remembering
from tests.simulated.scenario import Case, Scenario

CASES = [
    Case(Scenario(3, (2,), steps=2)),
    Case(Scenario(4, (3,), steps=2, is_async=True, storage="object")),
]


def test_stories_are_the_same() -> None:
    before = Manifest.decode
    alone = [simulate(case).fingerprint for case in CASES]
    with remembering() as memory:
        together = [simulate(case).fingerprint for case in CASES]
        given = memory.given
        memory.is_on = False
        assert simulate(CASES[0]).fingerprint == alone[0]
        assert memory.given == given > 50
    assert together == alone
    assert Manifest.decode == before
    assert isinstance(ShardMatcher, type)


@dataclasses.dataclass(frozen=True)
class Table:
    rows: np.ndarray
    name: str = ""


def test_what_holds_the_same_has_one_answer_that_nobody_can_change() -> None:
    asked = []
    memory = Memory()

    @memory.of
    def double(table: Table, times: int = 2) -> Table:
        asked.append(table)
        return Table(table.rows * times)

    first = double(Table(np.arange(3)))
    assert double(Table(np.arange(3))) is first
    assert len(asked) == 1
    with pytest.raises(ValueError, match="read-only"):
        first.rows[0] = 1
    others = [
        (Table(np.arange(4)),),
        (Table(np.arange(3, dtype=np.int32)),),
        (Table(np.arange(3), "x"),),
        (Table(np.arange(3)), 3),
        (first,),
    ]
    for count, arguments in enumerate(others, 2):
        double(*arguments)
        assert len(asked) == count
    double(first)
    assert len(asked) == len(others) + 1


def test_what_cannot_be_compared_is_computed_each_time() -> None:
    memory, asked = Memory(), []
    call = memory.of(asked.append)
    one = object()
    call(one)
    call(one)
    assert asked == [one, one]


def test_a_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 3)
    memory, asked = Memory(), []

    @memory.of
    def wrap(number: int) -> tuple[int]:
        asked.append(number)
        return (number,)

    for number in (0, 1, 2, 0, 3, 0, 1):
        wrap(number)
    assert asked == [0, 1, 2, 3, 1]
    assert len(memory._kept) == 3
