"""Saves in the background to directories without locks: the lease is kept up until the save is over."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import open_storage
from tests.background.helpers import PATIENCE_SECONDS, Watch, kill, load, save, stopped
from tests.saved import short_names


@pytest.fixture(autouse=True)
def no_flock(monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.EBADF, "injected")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_lease_outlives_the_wait_for_a_writer_that_is_busy(tmp_path, writers):
    """The process that was handed the save does not renew the lease before it gets to it; the training process does."""
    storage = open_storage(tmp_path, lease_seconds=1.0)
    writer = writers()
    with stopped(writer), Watch(tmp_path, Watch.MODIFY) as watch:
        handle = save(storage, 1, writer)
        for _ in range(14):
            watch.wait_for(".lease")
        with pytest.raises(CheckpointError, match="another save is writing to"):
            LocalBackend(str(tmp_path), lease_seconds=1.0).locks.take()
    handle.result(PATIENCE_SECONDS)
    assert load(tmp_path) == 1
    assert short_names(tmp_path) == ["0.manifest", "0_0-1.safetensors", PADDLE_METADATA]
    # The lease has been given back: nobody waits for it.
    save(storage, 2, writer).result(PATIENCE_SECONDS)
    assert load(tmp_path) == 2


def test_a_lease_is_given_back_for_a_writer_that_died(tmp_path, writers):
    storage = open_storage(tmp_path)
    writer = writers()
    with stopped(writer) as pid:
        handle = save(storage, 1, writer)
        assert ".lease" in os.listdir(tmp_path)
        kill(pid)
    with pytest.raises(CheckpointError, match="was killed by signal 9"):
        handle.result(PATIENCE_SECONDS)
    assert ".lease" not in os.listdir(tmp_path)
    save(storage, 2, writer).result(PATIENCE_SECONDS)
    assert load(tmp_path) == 2


def test_without_locks(tmp_path, writers):
    storage = open_storage(tmp_path, lock=False)
    save(storage, 1, writers()).result(PATIENCE_SECONDS)
    assert load(tmp_path) == 1
