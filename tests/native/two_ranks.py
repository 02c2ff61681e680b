"""Checkpoints of two simulated ranks, whose every value tells the version that was saved."""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld

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
