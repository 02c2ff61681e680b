"""Random layouts for the programs: every tensor cut over tensor-parallel parts, flattened ranges and replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from paddle_flexckpt.catalog import Catalog, CatalogBuilder
from tests.aoa.program_writer import Cut
from tests.property.layouts import Shard

Layout = list[Shard]  # sorted by rank; no rank holds two shards of a tensor


def edges(rng: Random, total: int, parts: int, even: bool, may_be_empty: bool = False) -> list[tuple[int, int]]:
    """Intervals that tile ``[0, total)``."""
    if even:
        inner = [total * i // parts for i in range(1, parts)]
    elif may_be_empty:
        inner = sorted(rng.randint(0, total) for _ in range(parts - 1))
    else:
        inner = sorted(rng.sample(range(1, total), parts - 1))
    bounds = [0, *inner, total]
    return list(zip(bounds[:-1], bounds[1:]))


def shards_of(
    rng: Random, key: str, dtype: str, shape: tuple[int, ...], world: int, cut: Cut | None
) -> list[tuple[int, Shard]]:
    """(rank, shard) of one tensor; expert-parallel tensors are those that few ranks hold."""
    boxes = [((0,) * len(shape), shape)]
    if shape and (cut is not None or rng.random() < 0.6):
        axis = cut.axis if cut else rng.randrange(len(shape))
        parts = cut.parts if cut else rng.randint(1, min(4, world, shape[axis]))
        boxes = []
        for low, high in edges(rng, shape[axis], parts, even=cut is not None or rng.random() < 0.3):
            offset = [0] * len(shape)
            offset[axis] = low
            boxes.append((tuple(offset), (*shape[:axis], high - low, *shape[axis + 1 :])))
    ranges = rng.randint(1, min(3, world // len(boxes))) if rng.random() < 0.5 else 1
    shards: list[Shard] = []
    for offset, box in boxes:
        flats: list = [None]
        if ranges > 1 or rng.random() < 0.1:
            size = math.prod(box)
            flats = list(edges(rng, size, ranges, even=False, may_be_empty=True))
        shards += [Shard(key, dtype, shape, offset, box, flat, 0) for flat in flats]
    # Who holds which part does not follow the ranks' order; some of the other ranks hold replicas.
    ranks = rng.sample(range(world), world)
    held = list(zip(ranks, shards))
    if rng.random() < 0.4:
        held += [(rank, rng.choice(shards)) for rank in ranks[len(shards) :] if rng.random() < 0.7]
    return [(rank, replace(shard, rank=rank)) for rank, shard in held]


def random_layout(
    rng: Random, tensors: Mapping[str, tuple[str, tuple[int, ...]]], cuts: Mapping[str, Cut], world: int
) -> Layout:
    """A layout of all tensors.

    Args:
        rng: Source of choices.
        tensors: dtype and shape by key.
        cuts: The cuts that are prescribed.
        world: Number of ranks; at least the parts of every prescribed cut.
    """
    held = [
        shard
        for key, (dtype, shape) in tensors.items()
        for shard in shards_of(rng, key, dtype, shape, world, cuts.get(key))
    ]
    return [shard for _, shard in sorted(held, key=lambda each: each[0])]


def catalog_of(layout: Sequence[Shard]) -> Catalog:
    """The catalog of a layout: row i is shard i."""
    builder = CatalogBuilder(0)
    for s in layout:
        builder.add(s.key, s.dtype, s.global_shape, s.offset, s.shape, s.flat)
    return replace(builder.build(), rank=np.asarray([s.rank for s in layout], dtype=np.int32))
