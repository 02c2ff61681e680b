"""Saves of several ranks in the background: one outcome for all of them, without a collective."""

from __future__ import annotations

import os
import time

import pytest

from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import PATIENCE_SECONDS, kill, limit_file_size, load_shards, shards, stopped, too_large
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
        f"cannot save to {str(tmp_path)!r}: [rank {4 + failing}] OSError: "
        f"{too_large(tmp_path / f'{4 + failing}_1-2.safetensors', '1.9 MiB')}"
    )
    assert load_shards(tmp_path, 3) == 1
    assert not [name for name in os.listdir(tmp_path) if "_1-" in name or name.startswith(("1.", "1-"))]
    limit_file_size(writers[failing], 1 << 40)
    outcomes(save(tmp_path, 3, writers))
    assert load_shards(tmp_path, 3) == 3


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
        f"{too_large(tmp_path / '1_0-1.safetensors', '1.9 MiB')}"
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
    text = one_error(handles, LostRankError)
    assert text.startswith(f"cannot save to {str(tmp_path)!r}: [rank {dying}] ")
    assert ("it is not known what became of the save" if dying == 0 else "its processes have ended before it") in text
    assert load_shards(tmp_path, 2) == 1
    outcomes(save(tmp_path, 3, writers))
    assert load_shards(tmp_path, 2) == 3


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


def test_a_coordinator_of_which_nothing_is_heard_is_named_and_does_no_harm_later(tmp_path, ranks):
    writers = ranks(2, timeout=2)
    with stopped(writers[0]):
        handles = save(tmp_path, 2, writers)
        text = one_error(handles[1:], LostRankError)
        assert text.startswith(
            f"cannot save to {str(tmp_path)!r}: [rank 0] its background writer has ended, or has not decided within "
            "2 s: it is not known what became of the save. Remedy (FC404): look whether the checkpoint is there"
        )
    # All had handed their shares over: it commits, or says why it does not.
    (own,) = outcomes(handles[:1])
    assert CheckpointDirectory(tmp_path).list_ids() == ([] if isinstance(own, CheckpointError) else [0])
    outcomes(save(tmp_path, 3, writers))
    assert load_shards(tmp_path, 2) == 3


@pytest.mark.parametrize("losing", [0, 1])
def test_a_rank_that_does_not_hand_over_as_it_has_lost_another_tells_the_rest(tmp_path, ranks, losing):
    writers = ranks(3, timeout=1000)

    def job(comm):
        if comm.position == losing:
            trade = comm.all_to_all

            def all_to_all(*arguments):
                trade(*arguments)
                raise LostRankError("the connection to rank 9 is gone")

            comm.all_to_all = all_to_all
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
