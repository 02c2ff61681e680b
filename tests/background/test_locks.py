"""The right to save is the writer's from the moment a save is handed over, and is free when it is over, however."""

from __future__ import annotations

import contextlib
import os
import time
import warnings

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media.lease import LeaseLocks
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import SOLO, kill, load, save, shards, stopped


def assert_locked(path):
    with pytest.raises(CheckpointError, match="another save is writing to"):
        open_backend(path).locks.take()


def assert_free(path):
    open_backend(path).locks.take().release()


def test_saves_that_wait_for_the_writer_have_their_locks(tmp_path, writers):
    writer = writers(max_pending=2)
    with stopped(writer):
        handles = [save(tmp_path / name, 1, writer) for name in "ab"]
        for name in "ab":
            assert_locked(tmp_path / name)
    for handle in handles:
        handle.result()
    for name in "ab":
        assert_free(tmp_path / name)


def test_a_lock_that_the_writer_did_not_live_to_take_over_is_free(tmp_path, writers):
    writer = writers()
    with stopped(writer) as pid:
        handle = save(tmp_path, 1, writer)
        kill(pid)
    with pytest.raises(CheckpointError, match="was killed by signal 9"):
        handle.result()
    assert_free(tmp_path)


@contextlib.contextmanager
def forked():
    """A context with a fork of this process, as a worker of a data loader, which does nothing."""
    ours, theirs = os.pipe()
    begun, begins = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        child = os.fork()
    if not child:
        os.close(theirs)
        os.write(begins, b"1")
        os.read(ours, 1)  # until the parent closes it, or has ended
        os._exit(0)
    assert os.read(begun, 1)
    os.close(begun)
    os.close(begins)
    try:
        yield
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)


@pytest.mark.parametrize("forks", [False, True])
def test_a_lock_that_the_writer_dies_with_is_free(tmp_path, writers, forks):
    """The writer of the coordinator has it while it waits for another rank, which never comes.

    A fork that is made before the writer has taken the lock up does not keep it.
    """
    pair = [writers(), writers()]
    with contextlib.ExitStack() as stack:
        with stopped(pair[1]):
            with stopped(pair[0]):
                handles = SimulatedWorld(2).run(
                    lambda comm: save_state_dict(
                        shards(comm.position, 2, 1), tmp_path, comm, async_save=pair[comm.position]
                    )
                )
                if forks:
                    stack.enter_context(forked())
            while handles[0].progress.phase != "commit":  # it has written, and has had the lock since it began
                time.sleep(0.01)
            assert_locked(tmp_path)
            kill(pair[0].pid)
        for handle in handles:
            with pytest.raises(CheckpointError, match="it is not known what became of the save"):
                handle.result()
        assert_free(tmp_path)


def test_a_fork_does_not_keep_the_right_of_a_save_in_slices(tmp_path, writers):
    """Else the training process's death would not free it."""
    handle = save_state_dict(shards(0, 1, 1, 5000), tmp_path, SOLO, async_save=writers(), slice_bytes=4096)
    descriptor = handle._save.stage_slice.func.__self__.lock.handover()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "it has the descriptor"
    assert_locked(tmp_path)
    handle.finish_staging()
    handle.result()
    assert_free(tmp_path)


def test_a_fork_leaves_a_lease_alone(tmp_path):
    """Its thread is not there, and a lock that it had at that moment would stay locked."""
    lock = LeaseLocks(LocalBackend(str(tmp_path)), 30.0).take()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        lock.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lock.check()
    assert (tmp_path / ".lease").exists()
    lock.release()
    assert not (tmp_path / ".lease").exists()


def test_a_save_that_is_refused_before_it_is_handed_over_leaves_no_lock(tmp_path, writers):
    # A hole: rows 0 and 1 of 4. That is found out after the lock was taken.
    part = np.zeros((2, 3), dtype=np.float32)
    state = {"w": ShardedWeight("w", part, (2, 3), (4, 3), (0, 0))}
    with pytest.raises(CheckpointError, match="no rank holds"):
        save_state_dict(state, tmp_path, SOLO, async_save=writers())
    assert_free(tmp_path)
    save(tmp_path, 1)
    assert load(tmp_path) == 1
