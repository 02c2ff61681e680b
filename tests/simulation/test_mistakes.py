"""The seeded mistakes fit today's library, are made, and leave nothing behind; the object store finds its own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.simulation.mistakes import MISTAKES, make


def parts(where: str) -> Any:
    """What is there now."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(f"paddle_flexckpt.{module}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return vars(owner)[name]


def test_there_are_enough_mistakes():
    assert len(MISTAKES) >= 20
    assert len({mistake.what for mistake in MISTAKES.values()}) == len(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_made_and_taken_back(name):
    places = MISTAKES[name].changes
    before = {where: parts(where) for where in places}
    with make(name):
        assert all(parts(where) is not before[where] for where in places)
    assert {where: parts(where) for where in places} == before
