"""The seeded mistakes fit today's library, are made, and leave nothing behind. Some show on the object store alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("greenlet")

from tests.simulation.mistakes import MISTAKES, make
from tests.simulation.store_world import seeds_until_broken

SEEDS = 400


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


@pytest.mark.parametrize("name", ["done-when-begun", "retention-files-first", "retention-first"])
def test_a_few_seeds_find_some(name):
    pytest.importorskip("paddle")
    from tests.simulation.run import run_seeds

    with make(name):
        assert run_seeds(0, 10, stop=True).violated


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        None,
        "discards-committed",
        "files-not-checked",
        "lease-at-once",
        "lease-checked-once",
        "lease-not-checked",
        "names-believed",
        "no-lock",
        "old-first",
    ],
)
def test_an_object_store_finds_mistakes_and_nothing_else(name, record_property):
    if name is None:
        assert not seeds_until_broken(SEEDS // 2)[1]
        return
    with make(name):
        found, broken = seeds_until_broken(SEEDS)
    record_property("seeds", found)
    print(f"{name}: found by seed {found}: {broken}")
    assert broken
