"""Ranks that come late to what has become of a save: committed and replaced by then, or dead and cleaned up."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.background import outcome
from paddle_flexckpt.background.outcome import SaveOutcome
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest
from paddle_flexckpt.native.listing import is_complete
from paddle_flexckpt.native.partition_files import split_rows
from tests.background.helpers import PATIENCE_SECONDS
from tests.background.test_ranks import agree_late
from tests.background.test_worker import job_of
from tests.native.samples import items_of, whole
from tests.saved import short_names


def save_next(path, unique_id: int) -> None:
    """Save in the name of a rank that is alone."""
    directory = open_to_save(str(path))
    with directory.lock():
        names = directory.open_save(unique_id, 1)
        directory.cleaner.remove_dead_saves(names)
        write(directory, names, 0, 1)
        directory.commit(names, [0])


def outcome_of(job, path, rank: int) -> SaveOutcome:
    return SaveOutcome(WriteJob(**{**vars(job), "rank": rank, "presences": ((), ())}), open_to_save(str(path)))


def write(directory, names, rank: int, world_size: int) -> None:
    items = items_of([whole(key, "float32", (2,), rank) for key in ("a", "b")], names.data_file(rank))
    directory.write_share(names, rank, items, [np.zeros(8, dtype=np.uint8)] * 2, world_size=world_size)


def test_a_rank_that_gives_up_after_the_save_was_committed_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "_GRACE_SECONDS", 0.0)
    stopped, replaced = threading.Event(), threading.Event()

    def delay(ranks):
        # The coordinator is slow: it commits when rank 1 has waited in vain and is about to give up.
        directory = ranks[0].directory
        commit, decide0 = directory.commit, directory.messages.decide

        def late(*args):
            assert stopped.wait(PATIENCE_SECONDS)
            return decide0(*args)

        def commit_and_be_replaced(*args):
            found = commit(*args)
            save_next(tmp_path, 0)
            replaced.set()
            return found

        directory.messages.decide, directory.commit = late, commit_and_be_replaced
        decide1 = ranks[1].directory.messages.decide

        def stop(*args):
            stopped.set()
            assert replaced.wait(PATIENCE_SECONDS)
            return decide1(*args)

        ranks[1].directory.messages.decide = stop

    (first, second), _ = agree_late(tmp_path, delay)
    assert first is None
    assert second is None or "it is not known" in str(second.problems)
    assert short_names(tmp_path) == ["0.manifest", "0_0-2.safetensors", PADDLE_METADATA]


@pytest.mark.parametrize("is_coordinator", [False, True])
def test_a_rank_that_gives_up_late_leaves_no_decision(tmp_path, monkeypatch, is_coordinator):
    monkeypatch.setattr(outcome, "_GRACE_SECONDS", 0.0)
    job, _, _ = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=0.05)
    rank = 0 if is_coordinator else 1
    late = SaveOutcome(WriteJob(**{**vars(job), "rank": rank, "presences": ((), ())}), open_to_save(str(tmp_path)))
    decide = late.directory.messages.decide

    def stop(*args):  # the job is killed meanwhile, and its next start saves
        save_next(tmp_path, 1)
        return decide(*args)

    late.directory.messages.decide = stop
    assert late.agree(None) is not None
    save_next(tmp_path, 2)
    assert not [name for name in os.listdir(tmp_path) if job.names.owns(name)]


class Killed(BaseException):
    pass


def test_the_failure_of_a_writer_that_has_died_goes_with_a_committed_save(tmp_path):
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=PATIENCE_SECONDS)
    for rank in range(2):
        write(directory, job.names, rank, 2)
    writer = open_to_save(str(tmp_path))  # rank 1's
    remove_replaced = directory.cleaner.remove_replaced

    def meanwhile(*arguments):
        # The coordinator has listed what is to go. Now rank 1 says that it failed.
        looks = iter([True])
        sees = writer.sees

        def killed_at_the_second_look(save):
            if next(looks, None):
                return sees(save)
            raise Killed

        writer.sees = killed_at_the_second_look
        with contextlib.suppress(Killed):
            writer.messages.write_failure(job.names, 1, b'{"kind": "CheckpointError", "problems": ["no answer"]}')
        remove_replaced(*arguments)

    directory.cleaner.remove_replaced = meanwhile
    directory.commit(job.names, (0, 1))
    mine = SaveOutcome(WriteJob(**{**vars(job), "rank": 1, "presences": ((), ())}), open_to_save(str(tmp_path)))
    assert mine.agree_after_death(CheckpointError("it died")) is None
    assert short_names(tmp_path) == ["0.manifest", "0_0-1.safetensors", "1_0-1.safetensors", PADDLE_METADATA]


@pytest.mark.parametrize("message", ["part", "failed", "decided"])
def test_what_a_dead_save_says_is_nothing_to_the_next_one(tmp_path, message):
    """A manager has cleaned up, and a rank of the dead save says something all the same."""
    job, dead, _ = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=PATIENCE_SECONDS)
    with dead.lock():
        dead.cleaner.remove_dead_saves()
        dead.companion.remove_refusal()
    again = open_to_save(str(tmp_path))
    with again.lock():
        names = again.open_save(0, 2)
        ranks = []
        for rank in range(2):
            write(again, names, rank, 2)
            ranks.append(outcome_of(replace(job, names=names), tmp_path, rank))
        said = {
            "part": job.names.part_file(1),
            "failed": job.names.failure_file(0),
            "decided": job.names.decision_file(0),
        }
        (tmp_path / said[message]).write_bytes(b'{"kind": "CheckpointError", "problems": ["the writer was killed"]}')
        told = {}
        other = threading.Thread(target=lambda: told.__setitem__(1, ranks[1].agree(None)))
        other.start()
        told[0] = ranks[0].agree(None)
        other.join()
    assert told == {0: None, 1: None}
    assert is_complete(str(tmp_path), 0)
    with again.lock():
        again.cleaner.remove_dead_saves()
    assert short_names(tmp_path) == ["0.manifest", "0_0-1.safetensors", "1_0-1.safetensors", PADDLE_METADATA]


def test_a_part_without_an_answer_that_was_committed_and_replaced_is_no_failure(tmp_path):
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1))
    for rank in (0, 1):
        write(directory, job.names, rank, 2)
    directory.commit(job.names, (0, 1))
    save_next(tmp_path, 0)
    late = outcome_of(job, tmp_path, 1)
    late.is_unanswered = True
    assert "it is not known what became of the save" in late.agree(Failure.of(OSError("no answer"))).problems[0]


def test_a_dead_writers_part_that_is_still_on_its_way_is_no_failure(tmp_path):
    """And the training process cannot say so, as the store does not answer."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1))
    write(directory, job.names, 0, 2)
    late = outcome_of(job, tmp_path, 1)
    late.directory.backend.has_path = False

    def refuse(*args):
        raise OSError("503")

    late.directory.messages.write_failure = refuse
    failure = late.agree_after_death(CheckpointError("the writer died"))
    write(directory, job.names, 1, 2)
    assert outcome_of(job, tmp_path, 0).agree(None) is None
    assert "it is not known what became of the save" in failure.problems[0]


def test_what_a_late_rank_leaves_is_kept_for_those_who_read_it(tmp_path):
    """Its save was committed and replaced while it was stopped, and somebody reads it still."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1))
    for rank in (0, 1):
        write(directory, job.names, rank, 2)
    directory.commit(job.names, (0, 1))
    reading = CheckpointDirectory(str(tmp_path))
    with LockedManifest(reading, 0) as manifest:
        save_next(tmp_path, 0)
        assert "it is not known what became" in outcome_of(job, tmp_path, 1).agree(None).problems[0]
        save_next(tmp_path, 1)
        reading.check_complete(manifest)
    save_next(tmp_path, 0)
    assert not [name for name in os.listdir(tmp_path) if job.names.owns(name)]


@pytest.mark.parametrize(("rank", "numbers"), [(1, (1, 3)), (4, (0,))])
def test_partitions_of_a_late_rank_go_with_its_other_files(tmp_path, rank, numbers):
    """Ranks write several, with numbers of their own, and their group may begin with any rank."""
    late = open_to_save(str(tmp_path))
    names = late.open_save(0, 2)
    with late.lock():
        open_to_save(str(tmp_path)).cleaner.remove_dead_saves()
    shards = [whole(f"w{number}", "float32", (2,), rank) for number in range(40)]
    items = items_of(shards, names.data_file(rank))
    part = late.write_data(names, items, [np.zeros(8, np.uint8)] * len(shards), world_size=2)
    for number, rows in split_rows(part, 4):
        if number in numbers:
            late.write_partition(names, number, 4, rows)
    late.discard_late(names, [rank])
    assert not [name for name in os.listdir(tmp_path) if names.owns(name)]
