"""Saves through less memory than their share needs: what they write, what they take, and what ends them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from paddle_flexckpt.background.staging import BUCKETS, WaveReceiver, WaveSender
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.saving.background_saves import Staging
from paddle_flexckpt.saving.save_options import LEAST_BYTES
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import PATIENCE_SECONDS, SOLO, limit_file_size, load, save
from tests.background.test_exit import run
from tests.saved import short_names

MIB = 1 << 20


def large_state(seed=0):
    """More than the memory that is allowed: items larger than a bucket, of odd sizes, small ones, and empty ones."""
    random = np.random.default_rng(seed)
    sizes = {
        "a": 41 * MIB + 3,
        "b": 0,
        **{f"c{i:03}": i * 5 for i in range(300)},
        "d": 70 * MIB,
        "e": 7 * MIB + 1,
        "f": 0,
    }
    return {key: random.integers(0, 256, size, dtype=np.uint8) for key, size in sizes.items()}


def is_there(path, state, unique_id=None):
    found = {key: np.zeros_like(array) for key, array in state.items()}
    load_state_dict(found, path, SOLO, unique_id=unique_id)
    return all((found[key] == array).all() for key, array in state.items())


def test_a_bucket_is_filled_again_only_when_it_is_written():
    sender = WaveSender(np.zeros(BUCKETS * 10, np.uint8))
    receiver = WaveReceiver(sender.theirs.dup(), sender._buckets[0].base.reshape(-1))
    whole = np.arange(1, 96, dtype=np.uint8)
    waiting = threading.Event()

    def fill():
        for number, start in enumerate(range(0, len(whole), 10)):
            if number == BUCKETS:
                waiting.set()
            bucket = sender.bucket()
            bucket[: len(whole[start : start + 10])] = whole[start : start + 10]
            sender.send(len(whole[start : start + 10]))
        sender.go()

    thread = threading.Thread(target=fill)
    thread.start()
    assert waiting.wait(60)
    # Nothing is read yet, so nothing is overwritten: the first bucket is as it was filled.
    assert (sender._buckets[0] == whole[:10]).all()
    pieces, kept = [], None
    for piece in receiver.items([95]):
        if kept is not None:
            pieces.append(kept.copy())  # the one before is still there when the next has come
        kept = piece
    pieces.append(kept.copy())
    thread.join()
    assert (np.concatenate(pieces) == whole).all()
    sender.close()
    receiver.close()


def test_a_share_goes_through_less_memory_than_it_has(tmp_path, writers):
    writer, state = writers(), large_state()
    total = sum(array.nbytes for array in state.values())
    assert total > LEAST_BYTES * 1.5
    for number in range(2):
        handle = save_state_dict(state, tmp_path, SOLO, async_save=writer, staging_bytes=LEAST_BYTES)
        report = handle.result(PATIENCE_SECONDS)
        assert report.bytes_written == total
        assert report.unique_id == number
    # The description of the save, and whole huge pages.
    assert writer.staging_bytes <= LEAST_BYTES + 2 * (2 * MIB)
    assert is_there(tmp_path, state)


def test_a_share_that_fits_is_copied_at_once(tmp_path, writers, monkeypatch):
    monkeypatch.setattr(Staging, "fill", None)
    save(tmp_path, 4, writers(), staging_bytes=LEAST_BYTES).result(PATIENCE_SECONDS)
    assert load(tmp_path) == 4


def test_tensors_may_change_after_the_call(tmp_path, writers):
    writer, state = writers(), large_state()
    was = {key: array.copy() for key, array in state.items()}
    handle = save_state_dict(state, tmp_path, SOLO, async_save=writer, staging_bytes=LEAST_BYTES)
    for array in state.values():
        array[...] = 0
    handle.result(PATIENCE_SECONDS)
    assert is_there(tmp_path, was)


def test_replicas_that_differ_are_an_error_on_every_rank_and_nothing_is_saved(tmp_path, writers):
    both = [writers(), writers()]

    def job(comm, differ):
        whole = np.full(9, comm.position * differ)
        own = np.full(80 * MIB, comm.position, np.uint8)
        state = {"w": ShardedWeight("w", own, own.shape, (2 * len(own),), (comm.position * len(own),)), "same": whole}
        try:
            options = {"async_save": both[comm.position], "staging_bytes": LEAST_BYTES}
            return save_state_dict(state, tmp_path, comm, **options).result(PATIENCE_SECONDS).unique_id
        except CheckpointError as error:
            return str(error)

    said = SimulatedWorld(2).run(lambda comm: job(comm, 1))
    assert said[0] == said[1]
    assert "replicas of one shard differ" in said[0]
    assert not list(tmp_path.glob("*.manifest"))
    # The error was raised, and is not raised again; what is left is removed.
    (unique_id,) = set(SimulatedWorld(2).run(lambda comm: job(comm, 0)))
    assert short_names(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"{r}_{unique_id}-1.safetensors" for r in (0, 1)
    ]


@pytest.mark.parametrize("how", ["full", "killed"])
def test_a_writer_that_fails_meanwhile_is_an_error_of_the_call(tmp_path, writers, how, monkeypatch):
    writer, state, count = writers(), large_state(), []
    save(tmp_path / "warm", 1, writer).result(PATIENCE_SECONDS)
    if how == "full":
        limit_file_size(writer, 20 * MIB)
    right = Staging.fill

    def fill(self, bucket):
        count.append(len(bucket))
        if len(count) == 3 and how == "killed":
            os.kill(writer.pid, signal.SIGKILL)
        return right(self, bucket)

    monkeypatch.setattr(Staging, "fill", fill)
    text = {"full": "File too large", "killed": "the background writer has ended while a save was handed over"}[how]
    with pytest.raises(CheckpointError, match=text):
        save_state_dict(state, tmp_path / "x", SOLO, async_save=writer, staging_bytes=LEAST_BYTES)
    writer.wait(PATIENCE_SECONDS)
    if how == "full":
        writer = writers()
    save(tmp_path / "x", 2, writer).result(PATIENCE_SECONDS)
    assert load(tmp_path / "x") == 2


@pytest.mark.parametrize("waits", [False, True])
def test_a_writer_that_ends_with_unread_words_is_still_heard(waits):
    """Its end then resets the connection, behind what it has said."""
    sender = WaveSender(np.zeros(LEAST_BYTES, np.uint8))
    theirs = socket.socket(fileno=os.dup(sender.theirs.fileno()))
    for _ in range(BUCKETS if waits else 1):
        sender.bucket()
        sender.send(1)
    WaveReceiver(theirs, np.zeros(LEAST_BYTES, np.uint8)).fail(OSError("File too large"))
    theirs.close()
    with pytest.raises(CheckpointError, match="File too large"):
        sender.bucket() if waits else sender.send(1)
    sender.close()


def test_ctrl_c_ends_the_save(tmp_path, writers, monkeypatch):
    writer, state, count = writers(), large_state(), []
    right = Staging.fill

    def fill(self, bucket):
        count.append(len(bucket))
        if len(count) == 3:
            raise KeyboardInterrupt
        return right(self, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "fill", fill)
        with pytest.raises(KeyboardInterrupt):
            save_state_dict(state, tmp_path, SOLO, async_save=writer, staging_bytes=LEAST_BYTES)
    save(tmp_path, 2, writer).result(PATIENCE_SECONDS)
    assert load(tmp_path) == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_a_training_process_that_dies_meanwhile_leaves_no_checkpoint(tmp_path, writers):
    status, _, _ = run(
        tmp_path,
        """
        from paddle_flexckpt.saving.background_saves import Staging
        from tests.background.test_waves import LEAST_BYTES, large_state
        from paddle_flexckpt.saving.saver import save_state_dict
        from tests.background.helpers import SOLO
        right, count = Staging.fill, []
        def fill(self, bucket):
            count.append(1)
            if len(count) == 3:
                os._exit(7)
            return right(self, bucket)
        Staging.fill = fill
        save_state_dict(large_state(), path, SOLO, async_save=writer, staging_bytes=LEAST_BYTES)
        """,
    )
    assert status == 7
    assert not list(tmp_path.glob("*.manifest"))
    writer, until = writers(), time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            save(tmp_path, 2, writer).result(PATIENCE_SECONDS)
        except CheckpointError as error:  # its writer may still be ending
            assert "another save" in str(error) and time.monotonic() < until
        else:
            break
    assert load(tmp_path) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"async_save": False},
        {"staging_bytes": MIB},
        {"slice_bytes": 4096},
        {"staging_bytes": "64MB"},
        {"staging_bytes": True},
    ],
)
def test_options_that_make_no_sense(tmp_path, writers, wrong):
    options = {"async_save": writers(), "staging_bytes": LEAST_BYTES, **wrong}
    texts = "staging_bytes(=.* needs async_save, no slice_bytes, and 67108864 bytes| has to be an integer >= 0; got )"
    with pytest.raises(ValidationError, match=texts):
        save_state_dict({"w": np.zeros(3)}, tmp_path, SOLO, **options)
