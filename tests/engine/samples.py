"""Checkpoints on disk, saved by simulated worlds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.live.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld

SHAPES = ((7, 4), (3, 2, 5), (11,), ())


def values_of(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Random bits for every key, by dtype and shape."""
    values = {}
    for seed, (key, (dtype, shape)) in enumerate(kinds.items()):
        found = dtype_of(dtype).numpy
        count = int(np.prod(shape)) * found.itemsize
        high = 2 if dtype == "bool" else 256
        data = np.random.default_rng(seed).integers(0, high, count, dtype=np.uint8)
        values[key] = data.view(found).reshape(shape)
    return values


def cut(values: Mapping[str, np.ndarray], position: int, world: int) -> dict:
    """What one of some ranks holds: tensors of two axes in columns, of more as flattened ranges, others whole."""
    state = {}
    for key, value in values.items():
        edges = [(value.shape[-1] if value.ndim == 2 else value.size) * i // world for i in range(world + 1)]
        low, high = edges[position : position + 2]
        if value.ndim == 2 and value.size:
            part = value[:, low:high].copy()
            state[key] = ShardedWeight(key, part, part.shape, value.shape, (0, low))
        elif value.ndim > 2:
            part = value.reshape(-1)[low:high].copy()
            zeros = (0,) * value.ndim
            state[key] = ShardedWeight(key, part, value.shape, value.shape, zeros, True, slice(low, high))
        else:
            state[key] = value.copy()
    return state


def save(path, values: Mapping[str, np.ndarray], world: int = 3, replicas: int = 1, **options) -> None:
    """Saves tensors, cut among so many ranks, and all of it so many times."""

    def job(comm):
        save_state_dict(cut(values, comm.position % world, world), path, comm, **options)

    SimulatedWorld(world * replicas).run(job)
