"""A save that fails, or loses power, at each system call in turn: the directory holds the old state or the new one."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.runtime.loader import load_state_dict
from paddle_flexckpt.runtime.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.storage import CheckpointDirectory
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.storage.faults import FaultyFiles

RANKS = 2
SHAPE = (6, 5)


def shards(position: int, whole: np.ndarray) -> dict[str, ShardedWeight]:
    """A tensor cut by rows, and a replicated one."""
    rows = SHAPE[0] // RANKS
    part = whole[position * rows : (position + 1) * rows].copy()
    return {
        "w": ShardedWeight("w", part, part.shape, SHAPE, (position * rows, 0)),
        "b": ShardedWeight("b", whole[0].copy(), SHAPE[1:], SHAPE[1:], (0,)),
    }


def state(version: int) -> np.ndarray:
    return np.arange(30, dtype=np.float32).reshape(SHAPE) + 100 * version


def save(path, version: int, unique_id: int | None) -> list:
    """Every rank's report, or its exception."""
    return SimulatedWorld(RANKS).run_all(
        lambda comm: save_state_dict(shards(comm.position, state(version)), path, comm, unique_id=unique_id)
    )


def load(path, unique_id: int | None = None) -> int:
    """The version that the checkpoint holds, whole."""

    def job(comm) -> float:
        found = shards(comm.position, np.full(SHAPE, -1, dtype=np.float32))
        load_state_dict(found, path, comm, unique_id=unique_id)
        version = int(found["b"].local_tensor[0]) // 100
        expected = shards(comm.position, state(version))
        for key, shard in found.items():
            assert (shard.local_tensor == expected[key].local_tensor).all()
        return version

    (version,) = set(SimulatedWorld(RANKS).run(job))
    return version


def calls_of_a_save(tmp_path, monkeypatch, unique_id: int | None) -> int:
    path = tmp_path / "count"
    save(path, 1, 0)
    with monkeypatch.context() as patch:
        files = FaultyFiles(patch)
        assert not any(isinstance(outcome, Exception) for outcome in save(path, 2, unique_id))
    return len(files.calls)


@pytest.mark.parametrize("unique_id", [0, None], ids=["replaced id", "new id"])
@pytest.mark.parametrize("fault", ["one call fails", "power loss"])
def test_old_or_new_never_half(tmp_path, monkeypatch, unique_id, fault):
    count = calls_of_a_save(tmp_path, monkeypatch, unique_id)
    assert count >= 20
    new_id = 0 if unique_id == 0 else 1
    seen = set()
    for at in range(count):
        path = tmp_path / "d"
        save(path, 1, 0)
        before = set(os.listdir(path))
        with monkeypatch.context() as patch:
            files = FaultyFiles(patch, at, dead_after=fault == "power loss")
            outcomes = save(path, 2, unique_id)
        if fault == "power loss":
            files.lose_power()
        where = f"call {at}: {files.calls[at]}"

        ids = CheckpointDirectory(path).list_ids()
        assert ids in ([0], [0, new_id] if new_id else [0]), where
        version = load(path)
        seen.add(version)
        if new_id:
            assert load(path, 0) == 1, where
            assert (version == 2) == (ids == [0, 1]), where
        failed = [isinstance(outcome, BaseException) for outcome in outcomes]
        assert any(failed) == all(failed), where
        assert any(failed), where
        assert all(isinstance(outcome, CheckpointError) for outcome in outcomes), (where, outcomes)
        assert all("injected" in str(outcome) for outcome in outcomes), where
        if fault == "one call fails" and version == 1:
            # What a failed save wrote is gone again.
            assert set(os.listdir(path)) == before, where

        assert not any(isinstance(outcome, Exception) for outcome in save(path, 3, unique_id)), where
        assert load(path) == 3, where
        shutil.rmtree(path)
    assert seen == {1, 2}


def test_each_rank_reports_the_same_text(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        FaultyFiles(patch, 3)
        outcomes = save(tmp_path, 1, None)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert f"cannot save to {str(tmp_path)!r}" in str(outcomes[0])
    assert CheckpointDirectory(tmp_path).list_ids() == []


def test_a_full_disk_is_an_error_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1, 0)
    before = set(os.listdir(tmp_path))
    write = os.write

    def full(descriptor, data):
        if len(data) > 40:
            write(descriptor, data[:40])
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        outcomes = save(tmp_path, 2, 0)
    assert all("No space left on device" in str(outcome) for outcome in outcomes)
    assert set(os.listdir(tmp_path)) == before
    assert load(tmp_path) == 1
