"""Checkpoints on disk, as several ranks write them. Neither ranks nor Paddle are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.planning import plan_write
from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.native.samples import whole
from tests.property.layouts import Shard, catalog_of

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


def shards_of(values: Mapping[str, np.ndarray], position: int, world: int, rank: int = 0) -> list[Shard]:
    """What one of some ranks holds: tensors of two axes in columns, of more as flattened ranges, others whole."""
    shards = []
    for key, value in values.items():
        dtype, shape = value.dtype.name, value.shape
        edges = [(shape[-1] if value.ndim == 2 else value.size) * i // world for i in range(world + 1)]
        low, high = edges[position : position + 2]
        if value.ndim == 2 and value.size:
            shards.append(Shard(key, dtype, shape, (0, low), (shape[0], high - low), None, rank))
        elif value.ndim > 2:
            shards.append(Shard(key, dtype, shape, (0,) * value.ndim, shape, (low, high), rank))
        else:
            shards.append(whole(key, dtype, shape, rank))
    return shards


def cut(values: Mapping[str, np.ndarray], position: int, world: int) -> dict:
    """The same as a live state."""
    state = {}
    for s in shards_of(values, position, world):
        data = s.of(values[s.key]).copy()
        if s.flat is not None:
            state[s.key] = ShardedWeight(s.key, data, s.shape, s.global_shape, s.offset, True, slice(*s.flat))
        elif s.shape != s.global_shape:
            state[s.key] = ShardedWeight(s.key, data.reshape(s.shape), s.shape, s.global_shape, s.offset)
        else:
            state[s.key] = data.reshape(s.shape)
    return state


def save(
    path,
    values: Mapping[str, np.ndarray],
    world: int = 3,
    replicas: int = 1,
    *,
    save_replicas: bool = False,
    unique_id: int | None = None,
    step: int | None = None,
) -> None:
    """Saves tensors, cut among so many ranks, and all of it so many times."""
    ranks = range(world * replicas)
    shards = [shard for rank in ranks for shard in shards_of(values, rank % world, world, rank)]
    directory = open_to_save(path)
    with contextlib.ExitStack() as stack:
        stack.callback(directory.lock().release)
        names = directory.open_save(unique_id, len(ranks))
        plan = plan_write(catalog_of(shards), names.data_file, save_replicas)
        for rank in ranks:
            rows = np.flatnonzero(plan.catalog.rank == rank)
            items = plan.catalog.take(rows)
            stored = zip(plan.source[rows], plan.source_start[rows], items.size)
            data = (shards[row].of(values[shards[row].key])[start : start + n] for row, start, n in stored)
            bytes_of = (part.view(np.uint8) for part in data)
            directory.write_share(names, rank, items, bytes_of, world_size=len(ranks), step=step)
        directory.commit(names, ranks)
