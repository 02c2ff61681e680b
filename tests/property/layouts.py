"""Random layouts of tensors over ranks, and the numpy oracle of what their shards hold.

A layout is a plain list of :class:`Shard`. Nothing here uses the package but to build catalogs from such lists, so what
the package computes can be compared with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, concat

ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    rank: int

    @property
    def identity(self) -> tuple:
        """Equal for replicas only."""
        return self.key, self.offset, self.shape, self.flat

    @property
    def size(self) -> int:
        return math.prod(self.shape) if self.flat is None else self.flat[1] - self.flat[0]

    def of(self, whole: np.ndarray) -> np.ndarray:
        """The shard's storage: its elements of the whole tensor, flat, in its own order."""
        # reshape(-1) of a single column is a view with a step; a storage has none.
        box = np.ascontiguousarray(whole[tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape))]).reshape(-1)
        return box if self.flat is None else box[self.flat[0] : self.flat[1]]


class Pick:
    """A source of choices: hypothesis where failures should shrink, a numpy generator where worlds are large."""

    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self.integer = integer

    @classmethod
    def from_seed(cls, seed: int) -> Pick:
        rng = np.random.default_rng(seed)
        return cls(lambda low, high: int(rng.integers(low, high + 1)))

    @classmethod
    def from_draw(cls, draw: Callable) -> Pick:
        return cls(lambda low, high: draw(st.integers(low, high)))

    def choice(self, options: Sequence):
        return options[self.integer(0, len(options) - 1)]

    def some(self, low: int, high: int, count: int) -> list[int]:
        """At most ``count`` (and at least one) distinct integers, sorted."""
        return sorted({self.integer(low, high) for _ in range(max(count, 1))})

    def shape(self, max_ndim: int = 4, max_extent: int = 5) -> tuple[int, ...]:
        return tuple(self.integer(1, max_extent) for _ in range(self.integer(0, max_ndim)))


def axis_cuts(pick: Pick, extent: int, most: int = 3) -> list[tuple[int, int]]:
    """Uneven (start, stop) intervals that tile an axis."""
    parts = pick.integer(1, most)
    inner = pick.some(1, extent - 1, parts - 1) if parts > 1 and extent > 1 else []
    edges = [0, *inner, extent]
    return list(zip(edges[:-1], edges[1:]))


def grid(pick: Pick, global_shape: tuple[int, ...], most: int = 3) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The (offset, shape) of every cell of a random grid."""
    axes = [axis_cuts(pick, extent, most) for extent in global_shape]
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*axes)]


def flat_parts(pick: Pick, size: int, most: int = 4) -> list[tuple[int, int]]:
    """Flattened ranges that tile ``[0, size)``; some may be empty."""
    edges = [0, *sorted(pick.integer(0, size) for _ in range(pick.integer(0, most - 1))), size]
    return list(zip(edges[:-1], edges[1:]))


def holders(pick: Pick, world: int) -> list[int]:
    kind = pick.integer(0, 9)
    if kind == 0:
        return list(range(world))
    return pick.some(0, world - 1, 1 if kind < 5 else pick.integer(2, 4))


def tensor_layout(pick: Pick, key: str, dtype: str, global_shape: tuple[int, ...], world: int) -> list[Shard]:
    """Shards that hold every element, and no element in two shards that are not replicas."""
    kind = pick.choice(("whole", "grid", "flattened", "flattened grid"))
    cells = [((0,) * len(global_shape), global_shape)]
    if "grid" in kind and 0 not in global_shape:
        cells = grid(pick, global_shape)
    shards = []
    for offset, shape in cells:
        flats: list = [None]
        # Within one grid some cells may be flattened and others not.
        if "flattened" in kind and pick.integer(0, 3):
            flats = flat_parts(pick, math.prod(shape))
        for flat in flats:
            shards += [Shard(key, dtype, global_shape, offset, shape, flat, r) for r in holders(pick, world)]
    return list(dict.fromkeys(shards))


def random_tensors(pick: Pick, count: int, max_ndim: int = 4, max_extent: int = 5) -> dict[str, tuple]:
    """Names, dtypes and shapes: ``{key: (dtype, global_shape)}``."""
    return {f"k{i}": (pick.choice(tuple(ITEMSIZE)), pick.shape(max_ndim, max_extent)) for i in range(count)}


def layout(pick: Pick, tensors: dict[str, tuple], world: int) -> list[Shard]:
    """A valid layout of all the tensors, sorted by rank."""
    shards = [s for key, (dtype, shape) in tensors.items() for s in tensor_layout(pick, key, dtype, shape, world)]
    return by_rank(shards)


def by_rank(shards: Sequence[Shard]) -> list[Shard]:
    return sorted(shards, key=lambda shard: shard.rank)


def catalog_of(shards: Sequence[Shard], file_of: Callable[[int], str] | None = None) -> Catalog:
    """The catalog of shards that are sorted by rank; row i is shard i."""
    parts = []
    for rank, members in itertools.groupby(shards, key=lambda shard: shard.rank):
        builder = CatalogBuilder(rank, None if file_of is None else file_of(rank))
        for s in members:
            builder.add(s.key, s.dtype, s.global_shape, s.offset, s.shape, s.flat)
        parts.append(builder.build())
    return concat(parts)


def shard_of_row(catalog: Catalog, row: int) -> Shard:
    """A row of a catalog as a shard."""
    flat = (int(catalog.flat_start[row]), int(catalog.flat_stop[row])) if catalog.is_flattened[row] else None
    return Shard(
        catalog.key_name(row),
        catalog.dtype_name(row),
        catalog.unpadded(row, catalog.global_shape),
        catalog.unpadded(row, catalog.offset),
        catalog.unpadded(row, catalog.shape),
        flat,
        int(catalog.rank[row]),
    )


def whole_values(tensors: dict[str, tuple], seed: int = 0) -> dict[str, np.ndarray]:
    """Random bytes for every tensor, as opaque elements of its element size."""
    rng = np.random.default_rng(seed)
    values = {}
    for key, (dtype, shape) in tensors.items():
        raw = rng.integers(0, 256, math.prod(shape) * ITEMSIZE[dtype], dtype=np.uint8)
        values[key] = raw.view(f"V{ITEMSIZE[dtype]}").reshape(shape)
    return values


def index_array(shape: Sequence[int]) -> np.ndarray:
    """Every element's row-major index, in place."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(tuple(shape))


def elements(shard: Shard) -> np.ndarray:
    """Row-major indices, in the whole tensor, of a shard's elements in the order of its storage."""
    return shard.of(index_array(shard.global_shape))


def paint(shards: Sequence[Shard]) -> dict[str, np.ndarray]:
    """How many distinct shards (replicas count once) hold each element, flat, by key."""
    painted = {s.key: np.zeros(math.prod(s.global_shape), dtype=np.int64) for s in shards}
    for shard in {s.identity: s for s in shards}.values():
        painted[shard.key][elements(shard)] += 1
    return painted


@st.composite
def layouts(draw, max_tensors: int = 3, max_world: int = 6, **tensor_limits: int) -> list[Shard]:
    """Strategy: one valid layout."""
    pick = Pick.from_draw(draw)
    tensors = random_tensors(pick, pick.integer(1, max_tensors), **tensor_limits)
    return layout(pick, tensors, pick.integer(1, max_world))


def mutate(pick: Pick, shards: list[Shard], world: int) -> list[Shard]:
    """One random change that keeps every shard inside its tensor, but not the whole layout sound."""
    index = pick.integer(0, len(shards) - 1)
    victim = shards[index]
    rest = shards[:index] + shards[index + 1 :]
    kind = pick.choice(("drop", "shift", "shrink", "drop all replicas", "another box", "whole"))
    if kind == "drop" and rest:
        return rest
    if kind == "drop all replicas":
        return [s for s in shards if s.identity != victim.identity] or shards
    if kind == "whole":
        whole = Shard(
            victim.key,
            victim.dtype,
            victim.global_shape,
            (0,) * len(victim.shape),
            victim.global_shape,
            None,
            pick.integer(0, world - 1),
        )
        return by_rank([*shards, whole])
    if kind == "another box":
        offset = tuple(pick.integer(0, max(g - 1, 0)) for g in victim.global_shape)
        shape = tuple(pick.integer(min(1, g), g - o) for o, g in zip(offset, victim.global_shape))
        size = math.prod(shape)
        flat = None
        if pick.integer(0, 1):
            low = pick.integer(0, size)
            flat = (low, pick.integer(low, size))
        other = Shard(victim.key, victim.dtype, victim.global_shape, offset, shape, flat, pick.integer(0, world - 1))
        return by_rank([*shards, other])
    if victim.flat is not None:
        low, high = victim.flat
        if kind == "shift":
            step = pick.integer(-low, math.prod(victim.shape) - high)
            changed = (low + step, high + step)
        else:
            changed = (low, pick.integer(low, high))
        return by_rank([*rest, _changed(victim, flat=changed)])
    if not victim.shape or 0 in victim.global_shape:
        return shards
    axis = pick.integer(0, len(victim.shape) - 1)
    offset, shape = list(victim.offset), list(victim.shape)
    if kind == "shift":
        offset[axis] = pick.integer(0, victim.global_shape[axis] - shape[axis])
    else:
        shape[axis] = pick.integer(1, shape[axis])
    return by_rank([*rest, _changed(victim, offset=tuple(offset), shape=tuple(shape))])


def _changed(shard: Shard, **changes: object) -> Shard:
    return Shard(**{**shard.__dict__, **changes})
