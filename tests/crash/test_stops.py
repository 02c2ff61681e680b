"""Saves that die before each of their calls: a seeded part of the points that ``make test-crash`` goes through."""

from __future__ import annotations

import os
import re

import pytest

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.local_locks import DirectoryLock
from paddle_flexckpt.native import save_directory
from paddle_flexckpt.native.cleaner import Cleaner
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames
from tests.crash import explore
from tests.crash import scenario as scenarios
from tests.crash.explore import SPREADS, stops
from tests.crash.file_system import Fault
from tests.crash.harness import Broken, after_dead
from tests.crash.scenarios import SCENARIOS, find


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_old_or_new_and_a_next_save(bench, scenario):
    count = 2 if scenario.large else 3
    found = stops(bench(scenario), seed=1, count=count)
    assert not found.violations, "\n".join(found.violations)
    assert found.points == count


@pytest.mark.parametrize("at", [8, 33, 55])
def test_a_save_after_a_dead_one_dies_too(bench, tmp_path, at):
    scenario = after_dead(find("overwrite, 2 ranks"), at, str(tmp_path / "first"))
    found = stops(bench(scenario), seed=2, count=6)
    assert not found.violations, "\n".join(found.violations)
    assert found.points >= 3


@pytest.mark.parametrize(
    "name", ["overwrite, 2 ranks", "asynchronous: overwrite, 2 ranks", "manager: one goes, 2 ranks"]
)
def test_a_rank_that_gives_up_takes_nothing_from_a_coordinator_that_commits(bench, name):
    """A rank sees a collective fail, by a limit of time, while the other is slow: anywhere in its commit, for one."""
    found = stops(bench(find(name)), seed=4, share=0.15, spreads=("give up",))
    assert not found.violations, "\n".join(found.violations)
    assert len(found.outcomes) >= 2


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

    def in_place(self, name, mode="new", size=None):
        if mode != "overwrite":
            self.remove(name)
            mode = "new"
        return create(self, name, mode)

    monkeypatch.setattr(LocalBackend, "create", in_place)


def _no_tokens(monkeypatch):
    """Let all saves of an id have the same names."""
    monkeypatch.setattr(SaveNames, "_stem", property(lambda self: str(self.unique_id)))
    _in_place(monkeypatch)


def _remove_first(monkeypatch):
    commit = SaveDirectory.commit

    def early(self, ticket, *arguments):
        self.backend.remove(f"{ticket.unique_id}.manifest")
        return commit(self, ticket, *arguments)

    monkeypatch.setattr(SaveDirectory, "commit", early)


def _no_marker(monkeypatch):
    write = save_directory.write_file

    def without(backend, name, data, mode="overwrite"):
        if not name.endswith(".saving"):
            write(backend, name, data, mode)

    monkeypatch.setattr(save_directory, "write_file", without)


def _marker_last(monkeypatch):
    """Let the marker of a save go before its files do."""

    replaced, save_files = Cleaner.remove_replaced, Cleaner.remove_save

    def early(right):
        return lambda self, save, *arguments: (self._backend.remove(save.marker_file), right(self, save, *arguments))

    monkeypatch.setattr(Cleaner, "remove_replaced", early(replaced))
    monkeypatch.setattr(Cleaner, "remove_save", early(save_files))


def _lock_by_file(monkeypatch):
    """Let a lock outlive its holder."""

    def take(path):
        os.close(os.open(os.path.join(path, "lock"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        lock = DirectoryLock(os.open(path, os.O_RDONLY))
        lock.release = lambda: (os.unlink(os.path.join(path, "lock")), lock.detach())
        return lock

    monkeypatch.setattr(DirectoryLock, "take", take)


def _careless(monkeypatch):
    """Let a rank whose collective fails remove what it wrote, wherever the coordinator is."""
    save = scenarios.save_state_dict
    tickets = {}
    write_data = SaveDirectory.write_data

    def note(self, ticket, items, *args, **kwargs):
        tickets.update({rank: (self, ticket) for rank in items.rank.tolist()})
        return write_data(self, ticket, items, *args, **kwargs)

    def careless(state, path, comm, **kwargs):
        try:
            return save(state, path, comm, **kwargs)
        except LostRankError:
            directory, ticket = tickets[comm.rank]
            if not directory.is_committed(ticket):
                directory.backend.remove(ticket.data_file(comm.rank))
            raise

    monkeypatch.setattr(SaveDirectory, "write_data", note)
    monkeypatch.setattr(scenarios, "save_state_dict", careless)


@pytest.mark.parametrize(
    ("fault", "spreads", "said"),
    [
        (
            _in_place,
            SPREADS,
            r"a reader finds \{\}|is not whole: .*CorruptCheckpointError|for a Hugging Face directory",
        ),
        (_no_tokens, SPREADS, "is not whole: .*CorruptCheckpointError"),
        (_remove_first, SPREADS, r"a reader finds \{\}"),
        (_no_marker, SPREADS, "the next save left"),
        (_marker_last, SPREADS, "the next save left"),
        (_lock_by_file, SPREADS, "the next save: .*FileExistsError"),
        (_careless, ("give up",), r"is not whole: .*1_0-\w+.safetensors is missing; the manifest names it"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_save_without_its_precautions_is_found_out(bench, monkeypatch, fault, spreads, said):
    monkeypatch.setattr(explore, "ENOUGH", 1)
    bench = bench(find("overwrite, 2 ranks"))
    fault(monkeypatch)
    found = stops(bench, share=1.0 if fault is _careless else 0.3, spreads=spreads)
    assert re.search(said, found.violations[0]), found.violations


def test_a_mistake_that_cannot_run_is_not_taken_for_one_that_was_found(bench, monkeypatch):
    bench = bench(find("overwrite, 2 ranks"))
    monkeypatch.setattr(LocalBackend, "create", lambda self, name: None)
    with pytest.raises(Broken, match="takes 2 positional arguments but 4 were given"):
        stops(bench, share=0.1)
