"""Saves that die before each of their calls: a seeded part of the points that ``make test-crash`` goes through."""

from __future__ import annotations

import os

import pytest

from paddle_flexckpt.storage import CheckpointDirectory
from paddle_flexckpt.storage.directory import SaveTicket
from paddle_flexckpt.storage.local import DirectoryLock, LocalBackend
from tests.crash import explore
from tests.crash.explore import stops
from tests.crash.file_system import Fault
from tests.crash.harness import Violation, after_dead
from tests.crash.scenarios import SCENARIOS, find


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_old_or_new_and_a_next_save(bench, scenario):
    found = stops(bench(scenario), seed=1, count=2 if scenario.large else 5)
    assert not found.violations, "\n".join(found.violations)
    assert found.points == (2 if scenario.large else 5)


@pytest.mark.parametrize("at", [8, 33, 55])
def test_a_save_after_a_dead_one_dies_too(bench, tmp_path, at):
    scenario = after_dead(find("overwrite, 2 ranks"), at, str(tmp_path / "first"))
    found = stops(bench(scenario), seed=2, count=6)
    assert not found.violations, "\n".join(found.violations)
    assert found.points >= 3


@pytest.mark.parametrize(
    "scenario", [find("overwrite, 1 ranks"), find("overwrite, 2 ranks")], ids=lambda each: each.name
)
def test_both_outcomes_are_met(bench, scenario):
    """Early the old checkpoint is there, late the new one; a stop changes nothing that was done before it."""
    bench = bench(scenario)
    calls = bench.record(5).calls
    seen = []
    for at in (0, len(calls) // 2, len(calls) - 1):
        run = bench.act(Fault(at, "job"), 5)
        assert len(run.calls) == at
        seen.append(bench.observe())
    assert seen == [scenario.states[0], scenario.states[0], scenario.states[1]]


def test_ranks_take_turns_in_many_orders(bench):
    bench = bench(find("overwrite, 2 ranks"))
    orders = {tuple(call.rank for call in bench.act(seed=seed).calls) for seed in range(8)}
    assert len(orders) == 8
    assert list(map(str, bench.act(seed=3).calls)) == list(map(str, bench.act(seed=3).calls))


# What a library that does not do its part would do, and that somebody sees it.


def _in_place(monkeypatch):
    create = LocalBackend.create
    monkeypatch.setattr(LocalBackend, "create", lambda self, name, replace=False: _fresh(create, self, name))


def _fresh(create, backend, name):
    backend.remove(name)
    return create(backend, name)


def _one_generation(monkeypatch):
    monkeypatch.setattr(SaveTicket, "_stem", property(lambda self: str(self.unique_id)))
    monkeypatch.setattr(SaveTicket, "data_file", lambda self, rank: f"{rank}_{self.unique_id}.safetensors")
    _in_place(monkeypatch)


def _remove_first(monkeypatch):
    commit = CheckpointDirectory.commit

    def early(self, ticket, ranks):
        self.backend.remove(f"{ticket.unique_id}.manifest")
        return commit(self, ticket, ranks)

    monkeypatch.setattr(CheckpointDirectory, "commit", early)


def _no_marker(monkeypatch):
    write = LocalBackend.write

    def without(self, name, data):
        if not name.endswith(".saving"):
            write(self, name, data)

    monkeypatch.setattr(LocalBackend, "write", without)


def _marker_last(monkeypatch):
    """The marker of a save goes before its files do."""

    def remove(self, doomed, marker):
        for name in [marker, *doomed]:
            self.backend.remove(name)

    monkeypatch.setattr(CheckpointDirectory, "_remove", remove)


def _lock_by_file(monkeypatch):
    """A lock that outlives its holder."""

    def take(path):
        os.close(os.open(os.path.join(path, "lock"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        lock = DirectoryLock(os.open(path, os.O_RDONLY))
        lock.release = lambda: (os.unlink(os.path.join(path, "lock")), lock.detach())
        return lock

    monkeypatch.setattr(DirectoryLock, "take", take)


@pytest.mark.parametrize("fault", [_in_place, _one_generation, _remove_first, _no_marker, _marker_last, _lock_by_file])
def test_a_save_without_its_precautions_is_found_out(bench, monkeypatch, fault):
    monkeypatch.setattr(explore, "ENOUGH", 1)
    bench = bench(find("overwrite, 2 ranks"))
    fault(monkeypatch)
    try:
        found = stops(bench, seed=None, share=0.3)
    except Violation:
        return
    assert found.violations
