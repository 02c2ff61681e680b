"""Saves of several ranks in the background: one outcome for all of them, without a collective."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paddle_flexckpt.background import outcome
from paddle_flexckpt.background.outcome import SaveOutcome
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.catalog import CheckpointError, LostRankError, NotDurableError, ValidationError
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from paddle_flexckpt.live.saver import save_state_dict
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.names import SaveNames, token_after
from paddle_flexckpt.native.save_directory import CleanUpError
from paddle_flexckpt.ranks import presence
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import PATIENCE_SECONDS, Watch, kill, limit_file_size, load_shards, shards, stopped
from tests.background.test_worker import job_of
from tests.native.samples import items_of, whole
from tests.saved import short, short_names

# Large enough to be refused by a limit of a MiB, which a part or an error never needs.
MANY_ROWS = 100_000


@pytest.fixture
def ranks(writers):
    """``ranks(size, **arguments)``: a writer for each rank."""
    return lambda size, **arguments: [writers(**arguments) for _ in range(size)]


def save(path, version, writers, rows=4, ranks=None, **arguments):
    """Every rank's handle, or its exception."""
    size = len(writers)
    return SimulatedWorld(size).run_all(
        lambda comm: save_state_dict(
            shards(comm.position, size, version, rows), path, comm, async_save=writers[comm.position], **arguments
        ),
        ranks,
    )


def outcomes(handles):
    """Every rank's report, or its error."""
    found = []
    for handle in handles:
        try:
            found.append(handle.result(PATIENCE_SECONDS))
        except CheckpointError as error:
            found.append(error)
    return found


def one_error(handles, kind=CheckpointError):
    """The text of the error that all ranks have."""
    errors = outcomes(handles)
    assert {type(error) for error in errors} == {kind}
    (text,) = {str(error) for error in errors}
    return text


@pytest.mark.parametrize("coordinator", [0, 2])
def test_parts_of_all_ranks_make_a_checkpoint(tmp_path, ranks, coordinator):
    writers = ranks(3)
    for version in range(2):
        reports = outcomes(save(tmp_path, version, writers, coordinator_rank=coordinator))
        assert [report.unique_id for report in reports] == [version] * 3
        assert sum(report.bytes_written for report in reports) == reports[0].total_bytes
    assert [load_shards(tmp_path, 3, unique_id) for unique_id in (0, 1)] == [0, 1]
    assert short_names(tmp_path) == sorted(
        [f"{rank}_{unique_id}-{unique_id + 1}.safetensors" for rank in range(3) for unique_id in (0, 1)]
        + ["0.manifest", "1.manifest", PADDLE_METADATA]
    )


def test_a_save_needs_two_collectives(tmp_path, ranks):
    writers = ranks(2)

    def job(comm):
        handle = save_state_dict(shards(comm.position, 2, 1), tmp_path, comm, async_save=writers[comm.position])
        handle.result()
        return comm.collectives

    assert SimulatedWorld(2).run(job) == [2, 2]


def test_no_rank_waits_for_another_ranks_writer(tmp_path, ranks):
    writers = ranks(2)
    with stopped(writers[0]), stopped(writers[1]):
        handles = save(tmp_path, 1, writers)
        assert not any(handle.done() for handle in handles)
    outcomes(handles)
    assert load_shards(tmp_path, 2) == 1


def test_all_or_none_save_asynchronously(tmp_path, ranks):
    (writer,) = ranks(1)
    found = SimulatedWorld(2).run_all(
        lambda comm: save_state_dict(
            shards(comm.position, 2, 1), tmp_path, comm, async_save=writer if comm.position else False
        )
    )
    assert {type(error) for error in found} == {ValidationError}
    assert '"async_save": true' in str(found[0])
    assert '"async_save": false' in str(found[0])
    assert writer.pending == 0
    outcomes(save(tmp_path, 1, [writer]))


def test_replicas_that_differ_are_refused_before_anything_is_handed_over(tmp_path, ranks):
    writers = ranks(2)
    outcomes(save(tmp_path, 1, writers))
    before, taken = os.listdir(tmp_path), [writer.staging_bytes for writer in writers]
    for _ in range(2):
        found = SimulatedWorld(2).run_all(
            lambda comm: save_state_dict(
                {"b": shards(0, 1, comm.position)["b"]}, tmp_path, comm, async_save=writers[comm.position]
            )
        )
        assert {type(error) for error in found} == {ValidationError}
        assert "replicas of one shard differ" in str(found[0])
    assert os.listdir(tmp_path) == before
    assert [writer.pending for writer in writers] == [0, 0]
    outcomes(save(tmp_path, 2, writers))
    assert load_shards(tmp_path, 2) == 2
    assert [writer.staging_bytes for writer in writers] == taken


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_writer_is_the_same_error_on_every_rank(tmp_path, ranks, failing):
    writers = ranks(3)
    outcomes(save(tmp_path, 1, writers))
    limit_file_size(writers[failing], 1 << 20)
    handles = save(tmp_path, 2, writers, MANY_ROWS, ranks=(4, 5, 6))
    assert short(one_error(handles)) == (
        f"cannot save to {str(tmp_path)!r}: [rank {4 + failing}] OSError: [Errno 27] File too large: "
        f"{str(tmp_path / f'{4 + failing}_1-2.safetensors')!r}"
    )
    assert load_shards(tmp_path, 3) == 1
    limit_file_size(writers[failing], 1 << 40)
    outcomes(save(tmp_path, 3, writers))
    assert load_shards(tmp_path, 3) == 3
    assert not [name for name in os.listdir(tmp_path) if "_1-" in name or name.startswith(("1.", "1-"))]


def test_an_unseen_error_of_one_rank_is_raised_on_every_rank_by_the_next_save(tmp_path, ranks):
    writers = ranks(2)
    limit_file_size(writers[1], 1 << 20)
    handles = save(tmp_path, 1, writers, MANY_ROWS)
    with pytest.raises(CheckpointError):
        handles[0].result()
    limit_file_size(writers[1], 1 << 40)
    found = save(tmp_path, 2, writers)
    assert len({str(error) for error in found}) == 1
    here = f"cannot save to {str(tmp_path)!r}: "
    # These ranks are one process, in which the first to look finds it.
    assert short(str(found[0])) in [
        f"{here}[rank {finder}] the asynchronous save of id 0 to {str(tmp_path)!r} failed: {here}[rank 1] OSError: "
        f"[Errno 27] File too large: {str(tmp_path / '1_0-1.safetensors')!r}"
        for finder in (0, 1)
    ]
    outcomes(save(tmp_path, 3, writers))
    assert load_shards(tmp_path, 2) == 3


@pytest.mark.parametrize("dying", [0, 1])
def test_a_writer_that_dies_fails_the_save_everywhere_at_once(tmp_path, ranks, dying):
    writers = ranks(2, timeout=1000)
    outcomes(save(tmp_path, 1, writers))
    with stopped(writers[dying]) as pid:
        handles = save(tmp_path, 2, writers)
        kill(pid)
    assert short(one_error(handles)) == (
        f"cannot save to {str(tmp_path)!r}: [rank {dying}] the background writer (pid {pid}) was killed by signal 9 "
        "(Killed) while it was saving"
    )
    assert load_shards(tmp_path, 2) == 1
    outcomes(save(tmp_path, 3, writers))
    assert load_shards(tmp_path, 2) == 3


def test_a_writer_that_dies_when_its_part_is_there_does_no_harm(tmp_path, ranks):
    writers = ranks(2, timeout=1000)
    with stopped(writers[0]), Watch(tmp_path, Watch.MOVED_TO) as watch:
        handles = save(tmp_path, 1, writers)
        watch.wait_for("1_0-*.part")
        kill(writers[1].pid)
        assert not handles[1].done()
    assert [report.unique_id for report in outcomes(handles)] == [0, 0]
    assert load_shards(tmp_path, 2) == 1


def test_a_rank_of_which_nothing_is_heard_is_named(tmp_path, ranks):
    writers = ranks(3, timeout=2)
    outcomes(save(tmp_path, 1, writers))
    with stopped(writers[2]):
        begin = time.monotonic()
        handles = save(tmp_path, 2, writers)
        text = one_error(handles[:2], LostRankError)
        assert time.monotonic() - begin < 20
    assert text.startswith(
        f"cannot save to {str(tmp_path)!r}: [rank 2] has written nothing within 2 s after others had written"
    )
    # When it comes at last, it learns what the others have decided.
    assert one_error(handles, LostRankError) == text
    assert load_shards(tmp_path, 3) == 1


def test_a_coordinator_of_which_nothing_is_heard_is_named_and_does_not_commit_later(tmp_path, ranks):
    writers = ranks(2, timeout=2)
    with stopped(writers[0]):
        handles = save(tmp_path, 2, writers)
        text = one_error(handles[1:], LostRankError)
        assert text.startswith(f"cannot save to {str(tmp_path)!r}: [rank 0] has not decided about the save within 2 s")
    with pytest.raises(LostRankError, match=r"\[rank 0\] has not decided"):
        handles[0].result(PATIENCE_SECONDS)
    assert CheckpointDirectory(tmp_path).list_ids() == []
    outcomes(save(tmp_path, 3, writers))
    assert load_shards(tmp_path, 2) == 3


@pytest.mark.parametrize("losing", [0, 1])
def test_a_rank_that_does_not_hand_over_as_it_has_lost_another_tells_the_rest(tmp_path, ranks, losing):
    writers = ranks(3, timeout=1000)

    def job(comm):
        if comm.position == losing:
            gather = comm.all_gather

            def all_gather(payload):
                answers = gather(payload)
                if comm.collectives == 2:
                    raise LostRankError("the connection to rank 9 is gone")
                return answers

            comm.all_gather = all_gather
        return save_state_dict(shards(comm.position, 3, 1), tmp_path, comm, async_save=writers[comm.position])

    found = SimulatedWorld(3).run_all(job)
    assert type(found[losing]) is LostRankError
    text = one_error([handle for position, handle in enumerate(found) if position != losing], LostRankError)
    assert str(found[losing]) == f"cannot save to {str(tmp_path)!r}: the connection to rank 9 is gone"
    assert text == f"cannot save to {str(tmp_path)!r}: [rank {losing}] {found[losing]}"
    outcomes(save(tmp_path, 2, writers))
    assert load_shards(tmp_path, 3) == 2
    assert short_names(tmp_path) == [
        "0_1-2.safetensors", "1.manifest", "1_1-2.safetensors", "2_1-2.safetensors", PADDLE_METADATA
    ]  # fmt: skip


def test_a_plan_serves_again_as_long_as_the_writers_are_the_same(tmp_path, ranks):
    """Their addresses are part of what ranks describe: a writer that was started anew has another."""
    first, second = ranks(2), ranks(2)

    def job(comm):
        sizes, gather, in_full = [], comm.all_gather, []
        comm.all_gather = lambda payload: sizes.append(len(payload)) or gather(payload)
        for version, writers in enumerate((first, first, second, second, (first[0], second[1]))):
            sizes.clear()
            handle = save_state_dict(
                shards(comm.position, 2, version, 4), tmp_path, comm, async_save=writers[comm.position]
            )
            handle.result(PATIENCE_SECONDS)
            assert load_shards(tmp_path, 2) == version
            in_full.append(max(sizes) > 500)
        return in_full

    # In the end both have kept a plan, but of different times.
    assert SimulatedWorld(2).run(job) == [[True, False, True, False, True]] * 2


def agree_late(tmp_path, delay, timeout=0.05):
    """What two ranks agree about whose parts are there, of which the coordinator is late, by ``delay(SaveOutcome)``."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=timeout)
    for rank in range(2):
        items = items_of([whole(key, "float32", (2,), rank) for key in ("a", "b")], job.names.data_file(rank))
        memory = [np.zeros(8, dtype=np.uint8)] * 2
        directory.write_share(job.names, rank, items, memory, world_size=2)
    mine = [
        SaveOutcome(WriteJob(**{**vars(job), "rank": rank, "presences": ((), ())}), open_to_save(str(tmp_path)))
        for rank in range(2)
    ]
    delay(mine)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(each.agree, None) for each in mine]
        return [each.result(PATIENCE_SECONDS) for each in found], directory.list_ids()


def after(event, function):
    def call(*args):
        assert event.wait(PATIENCE_SECONDS)
        return function(*args)

    return call


def and_then(event, function):
    def call(*args):
        try:
            return function(*args)
        finally:
            event.set()

    return call


def test_a_coordinator_that_commits_late_is_waited_for(tmp_path):
    given_up = threading.Event()

    def delay(ranks):
        ranks[0].directory.commit = after(given_up, ranks[0].directory.commit)
        ranks[1].directory.messages.decide = and_then(given_up, ranks[1].directory.messages.decide)

    assert agree_late(tmp_path, delay) == ([None, None], [0])


def test_a_coordinator_that_is_given_up_does_not_commit(tmp_path):
    given_up = threading.Event()

    def delay(ranks):
        ranks[0].directory.messages.decide = after(given_up, ranks[0].directory.messages.decide)
        ranks[1].directory.messages.decide = and_then(given_up, ranks[1].directory.messages.decide)

    (first, second), ids = agree_late(tmp_path, delay)
    assert first == second
    assert first.kind == "LostRankError"
    assert first.problems[0].startswith("[rank 0] has not decided about the save within 0.05 s")
    assert ids == []


def test_a_commit_that_is_decided_and_never_done_is_not_called_a_failure(tmp_path):
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=0.05)
    directory.messages.decide(job.names, 0, b"commit")
    other = WriteJob(**{**vars(job), "rank": 1, "presences": ((), ())})
    failure = SaveOutcome(other, open_to_save(str(tmp_path))).agree(None)
    assert failure.problems[0].startswith("[rank 0] it is not known what became of the save: it had decided to commit")


def test_a_decision_that_is_not_whole_yet_is_none_to_commit(tmp_path):
    def delay(ranks):
        directory = ranks[0].directory
        directory.backend.create(ranks[0].job.names.decision_file(0), "new").finish()

    (first, second), ids = agree_late(tmp_path, delay)
    assert first == second
    assert first.problems == ("[rank 0] another rank has given the save up. Remedy: look into its log",)
    assert ids == []


def test_a_rank_that_gives_up_after_the_commit_sees_it(tmp_path, monkeypatch):
    """It looked before the commit; when it decides, what the coordinator decided has been cleaned up."""
    monkeypatch.setattr(outcome, "_GRACE_SECONDS", 0.0)
    committed = threading.Event()

    def delay(ranks):
        ranks[0].directory.commit = and_then(committed, ranks[0].directory.commit)
        directory, looks = ranks[1].directory, iter([False])
        real = directory.is_committed
        directory.is_committed = lambda names: next(looks, None) is None and real(names)
        directory.progress = after(committed, directory.progress)

    assert agree_late(tmp_path, delay, timeout=1e-9) == ([None, None], [0])
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".decided", ".failed"))]


def raising(error):
    def call(*args, **options):
        raise error

    return call


@pytest.mark.parametrize("kind", [NotDurableError, CheckpointError])
def test_all_ranks_hear_how_a_commit_has_ended(tmp_path, kind):
    """Of one that is not durable; and of one whose clean-up failed, so that its marker stays."""

    def fail(ranks):
        ranks[0].directory.finish = raising(kind("as a test asks"))
        ranks[1].directory.backend.sync = raising(AssertionError("it makes the commit durable itself"))

    (first, second), ids = agree_late(tmp_path, fail, timeout=PATIENCE_SECONDS)
    assert ids == [0]
    assert first == second
    assert (first is None) == (kind is CheckpointError)
    if first is not None:
        assert (first.kind, first.problems) == ("NotDurableError", ("[rank 0] as a test asks",))


def test_a_rank_that_looks_before_the_commit_and_after_it_hears_that_it_is_one(tmp_path):
    told = threading.Event()

    def fail(ranks):
        ranks[0].directory.finish = raising(CheckpointError("as a test asks"))
        ranks[0]._tell = and_then(told, ranks[0]._tell)
        directory, looks = ranks[1].directory, iter([False])
        real = directory.is_committed
        directory.is_committed = lambda names: next(looks, None) is None and real(names)
        directory.progress = after(told, directory.progress)

    assert agree_late(tmp_path, fail, timeout=PATIENCE_SECONDS) == ([None, None], [0])


def test_a_coordinator_whose_writer_died_after_all_was_done_writes_nothing(tmp_path):
    """A loss of power could bring back what is written and removed, and no marker speaks of it."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0,), timeout=PATIENCE_SECONDS)
    items = items_of([whole(key, "float32", (2,), 0) for key in ("a", "b")], job.names.data_file(0))
    directory.write_share(job.names, 0, items, [np.zeros(8, dtype=np.uint8)] * 2, world_size=1)
    directory.commit(job.names, [0])
    mine = SaveOutcome(WriteJob(**{**vars(job), "ranks": (0, 1), "presences": ((), ())}), open_to_save(str(tmp_path)))
    mine.directory.backend.create = raising(AssertionError("it writes"))
    assert mine.agree_after_death(CheckpointError("it died")) is None


def test_a_save_that_is_replaced_before_its_clean_up_has_failed_is_done(tmp_path):
    """Its lease was lost meanwhile; another save has removed what is left, and the manifest."""

    def lose(ranks):
        directory = ranks[0].directory

        def finish(save, *rest):
            os.remove(tmp_path / "0.manifest")
            raise CleanUpError("as a test asks")

        directory.finish = finish

    (first, second), _ = agree_late(tmp_path, lose)
    assert first is None
    # It has seen the manifest, or not.
    assert second is None or "it is not known what became of the save" in str(second.problems)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_was_committed_and_replaced_is_no_failure_of_who_has_died_since(tmp_path, rank):
    """Its part was cleaned up, so it cannot be told whether it was written."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0,), timeout=PATIENCE_SECONDS)
    for names in (job.names, SaveNames(0, token_after(1))):
        directory.mark_save(names)
        items = items_of([whole(key, "float32", (2,), 0) for key in ("a", "b")], names.data_file(0))
        directory.write_share(names, 0, items, [np.zeros(8, dtype=np.uint8)] * 2, world_size=1)
        directory.commit(names, [0])
    mine = SaveOutcome(
        WriteJob(**{**vars(job), "rank": rank, "ranks": (0, 1), "presences": ((), ())}), open_to_save(str(tmp_path))
    )
    failure = mine.agree_after_death(CheckpointError("it died"))
    assert "it is not known what became of the save" in str(failure.problems)


def test_a_rank_that_comes_late_does_not_say_that_it_failed(tmp_path):
    """A loss of power could bring that back after it was removed."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0,), timeout=PATIENCE_SECONDS)
    directory.discard(job.names, [0])
    directory.backend.create = raising(AssertionError("it writes"))
    directory.messages.write_failure(job.names, 1, b"late")


@pytest.mark.parametrize("message", ["decided", "failed"])
def test_a_rank_whose_writer_died_leaves_no_message_of_a_save_that_is_committed(tmp_path, message):
    """The coordinator has cleaned up before, or did not see it there."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0,), timeout=PATIENCE_SECONDS)
    items = items_of([whole(key, "float32", (2,), 0) for key in ("a", "b")], job.names.data_file(0))
    directory.write_share(job.names, 0, items, [np.zeros(8, dtype=np.uint8)] * 2, world_size=1)
    directory.commit(job.names, [0])
    there = sorted(os.listdir(tmp_path))
    mine = SaveOutcome(
        WriteJob(**{**vars(job), "rank": 1, "ranks": (0, 1), "presences": ((), ())}), open_to_save(str(tmp_path))
    )
    if message == "decided":
        directory.messages.decide(job.names, 0, b"")  # the writer died at it
    else:
        looks = iter([False])
        real = mine.directory.is_committed
        mine.directory.is_committed = lambda names: next(looks, None) is None and real(names)
        marks, sees = iter([True]), mine.directory.sees
        mine.directory.sees = lambda names: next(marks, None) or sees(names)
    assert mine.agree_after_death(CheckpointError("it died")) is None
    assert sorted(os.listdir(tmp_path)) == there


@pytest.mark.parametrize("fails", [False, True])
def test_a_commit_of_which_the_coordinator_says_nothing_is_made_durable_by_the_others(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(outcome, "_WORD_SECONDS", 0.01)
    over, synced = threading.Event(), []

    def hold(ranks):
        ranks[0].directory.finish = after(over, ranks[0].directory.finish)
        directory = ranks[1].directory
        sync = raising(OSError(5, "Input/output error")) if fails else directory.backend.sync
        directory.backend.sync = lambda: synced.append(sorted(os.listdir(tmp_path))) or sync()
        real = ranks[1]._finish
        ranks[1]._finish = and_then(over, real)

    (first, second), _ = agree_late(tmp_path, hold, timeout=PATIENCE_SECONDS)
    assert first is None
    assert (second is None) != fails
    assert "0.manifest" in synced[0]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_save_that_another_has_cleaned_up_is_not_called_a_failure(tmp_path, monkeypatch, is_gone):
    """Its coordinator may have gone with the job, while it was stopped until another start had saved the step."""
    monkeypatch.setattr(outcome, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(presence, "FIRST_LOOK_SECONDS", 0.0)
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=PATIENCE_SECONDS if is_gone else 0.05)
    presences = (presence.address_of(presence.open_presence()),) if is_gone else ()
    os.unlink(tmp_path / job.names.marker_file)
    (tmp_path / job.names.part_file(1)).write_bytes(b"late")
    other = WriteJob(**{**vars(job), "rank": 1, "presences": (presences, ())})
    failure = SaveOutcome(other, open_to_save(str(tmp_path))).agree(None)
    assert failure.problems[0].startswith("[rank 1] it is not known what became of the save: its files are not there")
    assert not [name for name in os.listdir(tmp_path) if directory.list_ids() or job.names.owns(name)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_has_written_after_the_save_was_over_does_not_wait_for_long(tmp_path, monkeypatch, fails):
    job = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=3600.0)[0]
    os.unlink(tmp_path / job.names.marker_file)
    (tmp_path / job.names.part_file(1)).write_bytes(b"late")
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        assert sum(pauses) < 3, "it waits"

    monkeypatch.setattr(outcome.time, "sleep", sleep)
    other = WriteJob(**{**vars(job), "rank": 1, "presences": ((), ())})
    own = Failure("CheckpointError", ("as a test asks",)) if fails else None
    failure = SaveOutcome(other, open_to_save(str(tmp_path))).agree(own)
    expected = "as a test asks" if fails else "it is not known what became of the save: its files are not there"
    assert failure.problems[0].startswith(f"[rank 1] {expected}")
    assert pauses
    assert not [name for name in os.listdir(tmp_path) if job.names.owns(name)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_coordinator_of_a_save_that_is_over_leaves_nothing(tmp_path, is_refused):
    """It was stopped until another start of the job had saved the step; perhaps it has no right to write any more."""
    job, directory, _ = job_of(tmp_path, rank=0, ranks=(0, 1), timeout=0.05)
    os.unlink(tmp_path / job.names.marker_file)
    for name in (job.names.part_file(0), job.names.data_file(0)):
        (tmp_path / name).write_bytes(b"late")
    if is_refused:
        directory.messages.write_failure = raising(CheckpointError("as a test asks"))
    failure = SaveOutcome(job, directory).agree(None)
    assert failure.problems[0].startswith("[rank 1] has written nothing within 0.05 s")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["files", "directory", "everything of another save"])
def test_a_save_whose_files_are_gone_is_not_waited_for(tmp_path, monkeypatch, what):
    """Another job has replaced it before this rank saw the commit, or somebody has removed it."""
    path = tmp_path / "step"
    job, directory, _ = job_of(path, rank=0, ranks=(0, 1), timeout=3600.0)
    monkeypatch.setattr(outcome.time, "sleep", lambda _: pytest.fail("it waits"))
    shutil.rmtree(path)
    if what != "directory":
        path.mkdir()
    if what.startswith("everything"):
        directory.open_save(0)
    before = sorted(os.listdir(path)) if path.exists() else None
    other = WriteJob(**{**vars(job), "rank": 1, "presences": ((), ())})
    failure = SaveOutcome(other, open_to_save(str(path))).agree(None)
    assert failure.problems[0].startswith("[rank 1] it is not known what became of the save: its files are not there")
    assert before == (sorted(os.listdir(path)) if path.exists() else None)
