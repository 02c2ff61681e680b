"""Progress: what a callback is told, by which call, and that its failure is the call's."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.progress import MOST_STEP_BYTES, STEPS, Meter, Progress
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.digests import digest_checkpoint

MIB = 1 << 20
PATIENCE_SECONDS = 120.0
# Larger than a band of an export is not needed: what is told is bytes.
WHOLE = {
    "a": np.random.default_rng(0).standard_normal((1024, 3072), dtype=np.float32),
    "b": np.random.default_rng(1).standard_normal((640, 1024), dtype=np.float32),
    "c": np.arange(5, dtype=np.int64),
}
NBYTES = sum(array.nbytes for array in WHOLE.values())


def rows(position, size, blank=False, keys=("a", "b")):
    """A rank's rows of the large tensors."""
    made = {}
    for key in keys:
        values, height = np.split(WHOLE[key], size)[position], len(WHOLE[key]) // size
        values = np.zeros_like(values) if blank else values.copy()
        made[key] = ShardedWeight(key, values, values.shape, WHOLE[key].shape, (position * height, 0))
    return made


def blank():
    return {key: np.zeros_like(array) for key, array in WHOLE.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    SimulatedWorld(1).run(lambda comm: fc.save_state_dict(dict(WHOLE), path, comm))
    return path


def check(told: list[Progress], phase: str, nbytes: int, items: int = 0) -> None:
    """From nothing to all, without a step back, and not too often."""
    assert told[0] == Progress(phase, 0, nbytes, 0, items)
    assert told[-1] == Progress(phase, nbytes, nbytes, items, items)
    done = [each.bytes_done for each in told]
    assert done == sorted(set(done))
    assert {(each.phase, each.bytes_total, each.items_total) for each in told} == {(phase, nbytes, items)}
    assert [each.items_done for each in told] == sorted(each.items_done for each in told)
    assert len(told) <= STEPS + 2


def test_a_meter_tells_steps_of_bytes():
    told = []
    meter = Meter(told.append, "write", 1000, 4)
    for count in range(1, 1001):
        meter.add(1, items=count % 250 == 0)
    assert [each.bytes_done for each in told] == [*range(0, 1000, 10)]
    assert told[50].fraction == 0.5
    meter.finish()
    meter.finish()
    check(told, "write", 1000, 4)
    assert len(told) == 101
    assert [each.items_done for each in told][::25] == [0, 1, 2, 3, 4]


def test_large_steps_are_of_64_mib():
    told = []
    meter = Meter(told.append, "read", 1000 * MOST_STEP_BYTES)
    for number in range(10):
        meter.reach(number * MOST_STEP_BYTES)
    assert [each.bytes_done for each in told] == [number * MOST_STEP_BYTES for number in range(10)]


def test_what_is_done_twice_or_not_needed_does_not_count():
    told = []
    meter = Meter(told.append, "read", 100)
    for count in (40, 20, 41, 170):
        meter.reach(count)
    meter.finish()
    assert [each.bytes_done for each in told] == [0, 40, 41, 100]


def test_nothing_is_all():
    told = []
    Meter(told.append, "read", 0).finish()
    assert [(each.bytes_done, each.fraction) for each in told] == [(0, 1.0), (0, 1.0)]


def test_threads_may_share_a_meter():
    told, inside = [], []

    def callback(progress):
        inside.append(threading.get_ident())
        told.append(progress)
        assert inside.pop() == threading.get_ident()

    meter = Meter(callback, "read", 4000)
    threads = [threading.Thread(target=lambda: [meter.add(1) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    meter.finish()
    check(told, "read", 4000)
    assert len(told) == 101


def test_a_callback_that_fails_is_not_called_again():
    calls = []

    def callback(progress):
        calls.append(progress)
        if progress.bytes_done:
            raise OSError("the screen is full")

    meter = Meter(callback, "read", 100)
    with pytest.raises(CheckpointError, match=r"progress callback failed at .*bytes_done=1,.*OSError: the screen is"):
        meter.add(1)
    meter.add(1)
    meter.finish()
    assert len(calls) == 2


def test_a_save_tells_what_each_rank_writes(tmp_path):
    told = {0: [], 1: []}
    SimulatedWorld(2).run(
        lambda comm: fc.save_state_dict(rows(comm.rank, 2), tmp_path, comm, progress=told[comm.rank].append)
    )
    nbytes = (WHOLE["a"].nbytes + WHOLE["b"].nbytes) // 2
    for each in told.values():
        check(each, "write", nbytes, 2)
    found = blank()
    SimulatedWorld(1).run(lambda comm: fc.load_state_dict({key: found[key] for key in "ab"}, tmp_path, comm))
    assert (found["a"] == WHOLE["a"]).all()


def test_a_save_to_nodes_tells_it_too(tmp_path):
    told = []
    SimulatedWorld(1).run(
        lambda comm: fc.save_state_dict(dict(WHOLE), tmp_path, comm, storage="per_node", progress=told.append)
    )
    check(told, "write", NBYTES, 3)


def test_a_rank_with_nothing_to_write_has_written_all_of_it(tmp_path):
    told = {0: [], 1: []}

    def save(comm):
        state = dict(WHOLE) if comm.rank == 0 else {}
        fc.save_state_dict(state, tmp_path, comm, progress=told[comm.rank].append)

    SimulatedWorld(2).run(save)
    check(told[0], "write", NBYTES, 3)
    assert told[1] == [Progress("write", 0, 0), Progress("write", 0, 0)]


@pytest.mark.parametrize("verify", ["read", "full", "off"])
def test_a_load_tells_what_is_read(saved, verify):
    told, found = [], blank()
    SimulatedWorld(1).run(lambda comm: fc.load_state_dict(found, saved, comm, verify=verify, progress=told.append))
    check(told, "read", NBYTES)
    assert len(told) > 4
    assert all((found[key] == array).all() for key, array in WHOLE.items())


@pytest.mark.parametrize("verify", ["read", "full"])
def test_a_load_of_columns_tells_what_is_needed(saved, verify):
    told, part = [], np.zeros((1024, 100), dtype=np.float32)
    weight = ShardedWeight("a", part, part.shape, WHOLE["a"].shape, (0, 7))
    SimulatedWorld(1).run(
        lambda comm: fc.load_state_dict({"a": weight}, saved, comm, verify=verify, progress=told.append)
    )
    check(told, "read", part.nbytes)
    assert (part == WHOLE["a"][:, 7:107]).all()


def test_a_load_that_ranks_read_together_tells_what_this_one_reads(saved):
    told = {0: [], 1: []}

    def load(comm):
        found = blank()
        fc.load_state_dict(found, saved, comm, comm_method="cooperative", progress=told[comm.rank].append)
        assert all((found[key] == array).all() for key, array in WHOLE.items())

    SimulatedWorld(2).run(load)
    totals = [each[0].bytes_total for each in told.values()]
    assert sum(totals) == NBYTES
    for each, total in zip(told.values(), totals):
        check(each, "read", total)


def test_a_merged_load_and_an_export_tell_what_they_read(saved, tmp_path):
    told = []
    report = fc.export_safetensors(saved, tmp_path / "out", progress=told.append)
    check(told, "write", report.total_bytes)
    assert len(told) > 4
    told.clear()
    fc.load_merged_state_dict(saved, progress=told.append)
    check(told, "read", NBYTES)


def test_verify_digest_and_diff_tell_all_bytes(saved):
    told = []
    assert fc.verify_checkpoint(saved, progress=told.append).ok
    check(told, "verify", NBYTES, 1)
    told.clear()
    digest_checkpoint(saved, progress=told.append)
    check(told, "digest", NBYTES, 3)
    told.clear()
    assert fc.diff(saved, saved, progress=told.append).equal
    check(told, "compare", NBYTES, 3)


def test_publishing_tells_what_each_rank_writes(tmp_path):
    told = {0: [], 1: []}

    def publish(comm):
        return fc.publish(rows(comm.rank, 2), tmp_path, comm, max_file_bytes=MIB, progress=told[comm.rank].append)

    reports = SimulatedWorld(2).run(publish)
    for each, report in zip(told.values(), reports):
        check(each, "write", report.bytes_written, each[0].items_total)
    # Each writes its rows of both tensors.
    assert [each[0].items_total for each in told.values()] == [2, 2]


def fails_late(progress):
    if progress.bytes_done > progress.bytes_total // 2:
        raise RuntimeError("no more")


def outcomes(size, job):
    return SimulatedWorld(size).run_all(job)


def test_a_callback_that_fails_on_one_rank_fails_the_save_on_all(tmp_path):
    def save(comm):
        state = rows(comm.rank, 2)
        fc.save_state_dict(state, tmp_path, comm, progress=fails_late if comm.rank == 1 else None)

    errors = outcomes(2, save)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "[rank 1] the progress callback failed at Progress(phase='write'" in str(errors[0])
    assert "RuntimeError: no more" in str(errors[0])
    assert fc.list_checkpoints(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"] == []
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(rows(comm.rank, 2), tmp_path, comm))


@pytest.mark.parametrize("method", ["direct", "cooperative"])
def test_a_callback_that_fails_on_one_rank_fails_the_load_on_all(saved, method):
    def load(comm):
        progress = fails_late if comm.rank == 1 else None
        fc.load_state_dict(blank(), saved, comm, comm_method=method, progress=progress)

    errors = outcomes(2, load)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "[rank 1] the progress callback failed at Progress(phase='read'" in str(errors[0])


def test_a_callback_that_fails_leaves_no_export_and_nothing_published(saved, tmp_path):
    with pytest.raises(CheckpointError, match="RuntimeError: no more"):
        fc.export_safetensors(saved, tmp_path / "export", progress=fails_late)
    assert not (tmp_path / "export").exists()
    errors = outcomes(2, lambda comm: fc.publish(rows(comm.rank, 2), tmp_path / "p", comm, progress=fails_late))
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert not (tmp_path / "p").exists()
    with pytest.raises(CheckpointError, match="RuntimeError: no more"):
        fc.verify_checkpoint(saved, progress=fails_late)


def test_progress_is_a_function(tmp_path):
    (error,) = outcomes(1, lambda comm: fc.save_state_dict(dict(WHOLE), tmp_path, comm, progress="yes"))
    assert isinstance(error, ValidationError)
    assert "progress has to be a function of a Progress, or None; got 'yes'" in str(error)


def test_the_handle_of_an_asynchronous_save_says_how_far_it_is(tmp_path, monkeypatch):
    (error,) = outcomes(1, lambda comm: fc.save_state_dict({}, tmp_path, comm, async_save=True, progress=print))
    assert "Remedy (FC101): leave progress= out, and ask handle.progress" in str(error)
    seen = []
    owner = property(lambda self: seen[-1], lambda self, now: seen.append(now))
    monkeypatch.setattr(SaveHandle, "progress", owner, raising=False)
    with fc.BackgroundWriter() as writer:

        def save(comm):
            return fc.save_state_dict(dict(WHOLE), tmp_path, comm, async_save=writer)

        (handle,) = SimulatedWorld(1).run(save)
        assert (handle.progress.bytes_total, handle.progress.items_total) == (NBYTES, 3)
        handle.result(PATIENCE_SECONDS)
    assert seen[-1] == Progress("commit", NBYTES, NBYTES, 3, 3)
    done = [each.bytes_done for each in seen]
    assert done == sorted(done)
