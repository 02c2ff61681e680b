"""The seeded mistakes fit today's library, are made, and leave nothing behind. Some show on the object store alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("greenlet")

from paddle_flexckpt.media import remote
from tests.simulation.mistakes import MISTAKES, make
from tests.simulation.store_world import FAULTS, PART_BYTES, compete, store_world

SEEDS = 400
CONDUCTS: list[dict[str, Any]] = [
    {"shares": FAULTS},
    {"shares": FAULTS, "stale_lists": 30.0},
    {"shares": {**FAULTS, "hung": 0.02}},
    {"shares": {**FAULTS, "late": 0.02}},
]


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


def seeds_until_broken(seeds: int) -> int | None:
    """After how many seeds a manifest is in place without its files, while savers compete for an object store."""
    for seed in range(seeds):
        slow = bool(seed % 2)
        conduct = {**CONDUCTS[seed // 2 % len(CONDUCTS)], "latency": (0.01, 1.0 if slow else 0.08)}
        with store_world(seed, **conduct) as world:
            compete(world, "s3://bucket/run", pause=20.0 if seed % 3 == 0 else 2.0, lease_seconds=6.0 if slow else 30.0)
            if world.broken:
                return seed + 1
    return None


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
def test_an_object_store_finds_mistakes_and_nothing_else(name, monkeypatch, record_property):
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", PART_BYTES)
    if name is None:
        assert seeds_until_broken(SEEDS // 2) is None
        return
    with make(name):
        found = seeds_until_broken(SEEDS)
    record_property("seeds", found)
    print(f"{name}: found by seed {found}")
    assert found is not None
