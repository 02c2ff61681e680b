"""Saves whose manifest has partitions, at the points of their deaths: as every other save."""

from __future__ import annotations

import pytest

from paddle_flexckpt.media.backend import write_file
from paddle_flexckpt.native import partitions, save_directory
from paddle_flexckpt.saving import planners
from tests.crash.explore import losses, stops
from tests.crash.faults import faults
from tests.crash.scenarios import find

NAMES = [
    "overwrite twice, 2 ranks", "second id, then overwrite the first, 2 ranks", "asynchronous: overwrite, 2 ranks",
    "nodes: overwrite", "manager: one goes, 2 ranks", "repair of 2 files, manifest there",
]  # fmt: skip


@pytest.fixture(autouse=True)
def every_manifest_is_large(monkeypatch):
    monkeypatch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 0)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 4)


@pytest.mark.parametrize("name", NAMES)
def test_old_or_new_and_a_next_save_wherever_it_dies(bench, name):
    found = stops(bench(find(name)), seed=11, count=4)
    assert not found.violations, "\n".join(found.violations)
    assert found.points == 4


@pytest.mark.parametrize("name", NAMES)
def test_old_or_new_and_a_next_save_when_power_goes(bench, name):
    found = losses(bench(find(name)), seed=11, limit=8, count=3)
    assert not found.violations, "\n".join(found.violations)
    assert found.points >= 1


@pytest.fixture
def every_rank_writes_partitions(monkeypatch):
    monkeypatch.setattr(planners, "SPREAD_ROWS", -1)


SPREAD = ["overwrite twice, 2 ranks", "second id, then overwrite the first, 2 ranks", "manager: one goes, 2 ranks"]


@pytest.mark.parametrize("name", SPREAD)
def test_old_or_new_where_each_rank_writes_partitions(bench, name, every_rank_writes_partitions):
    found = stops(bench(find(name)), seed=12, count=6)
    assert not found.violations, "\n".join(found.violations)
    assert found.points == 6
    found = losses(bench(find(name)), seed=12, limit=8, count=3)
    assert not found.violations, "\n".join(found.violations)


@pytest.mark.parametrize("fault", ["I/O error", "quota"])
def test_one_error_where_each_rank_writes_partitions(bench, fault, every_rank_writes_partitions):
    found = faults(bench(find("overwrite, 2 ranks")), fault, count=16)
    assert not found.violations, "\n".join(found.violations)


@pytest.mark.parametrize("fault", ["I/O error", "quota"])
def test_one_error_and_nothing_left_over_where_a_call_fails(bench, fault):
    found = faults(bench(find("overwrite, 2 ranks")), fault, count=12)
    assert not found.violations, "\n".join(found.violations)


def test_partitions_that_are_put_in_place_after_the_manifest_are_found_out(bench, monkeypatch):
    late = []

    def write_late(backend, name, data, mode="overwrite"):
        if name.endswith(".partition"):
            late.append(lambda: write_file(backend, name, data, mode))
        else:
            write_file(backend, name, data, mode)

    publish = save_directory.publish

    def publish_first(backend, name, data, *checks):
        publish(backend, name, data)
        while late:
            late.pop()()

    monkeypatch.setattr(save_directory, "write_file", write_late)
    monkeypatch.setattr(save_directory, "publish", publish_first)
    found = stops(bench(find("overwrite, 2 ranks")), seed=None)
    assert any("partition" in text for text in found.violations)
