"""Checkpoints on disk, as several ranks write them; shards and targets. Neither ranks nor Paddle are needed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, Order, Problem, ValidationError, concat, dtype_of
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.planning.write_plan import plan_write
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.transfer.targets import Memory, Targets
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
        parts = []
        for rank in ranks:
            rows = np.flatnonzero(plan.catalog.rank == rank)
            items = plan.catalog.take(rows)
            stored = zip(plan.source[rows], plan.source_start[rows], items.size)
            data = (shards[row].of(values[shards[row].key])[start : start + n] for row, start, n in stored)
            bytes_of = (part.view(np.uint8) for part in data)
            parts.append(directory.write_data(names, items, bytes_of, world_size=len(ranks), step=step))
        directory.commit(names, parts)


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor; all of it unless ``shape`` says less.

    Attributes:
        key: The tensor's name.
        whole: Its global shape.
        dtype: Its element type.
        shape: The part's.
        offset: Where the part begins; at the first element by default.
        order: The order of the tensor's elements.
        rank: Who holds it.
        aliases: Other names of a tied parameter.
        raw_names: Raw names of a state.
        state_names: Structured names of a state under a raw name.
        array: The memory, of a target that may share it.
    """

    key: str
    whole: tuple[int, ...] = (4, 12)
    dtype: str = "float32"
    shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    order: Order | None = None
    rank: int = 0
    aliases: tuple[str, ...] = ()
    raw_names: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    array: np.ndarray | None = None


def catalog(*parts: Part, file: str | None = None) -> Catalog:
    """The table of parts, which are sorted by rank; a rank's file has its number in the place of ``{}``."""
    tables = []
    for rank, members in itertools.groupby(parts, key=lambda part: part.rank):
        builder = CatalogBuilder(rank, None if file is None else file.format(rank))
        for part in members:
            offset = part.offset or (0,) * len(part.whole)
            shape = part.whole if part.shape is None else part.shape
            builder.add(part.key, part.dtype, part.whole, offset, shape, order=part.order)
        names = {part.key: part.state_names for part in parts if part.state_names}
        tables.append(replace(builder.build(), state_names=names))
    return concat(tables)


def columns(key: str, extents: Sequence[int], rows: int = 4, **more) -> list[Part]:
    """The parts of a tensor of two axes that is cut along the second one, a rank each."""
    ends = list(itertools.accumulate(extents, initial=0))
    whole = (rows, ends[-1])
    pairs = enumerate(zip(extents, ends))
    return [Part(key, whole, shape=(rows, n), offset=(0, end), rank=rank, **more) for rank, (n, end) in pairs]


class Arrays(Memory):
    """The memory of targets that are numpy arrays, or nowhere; ``asked`` are the rows whose overlap was looked for."""

    def __init__(self, arrays: Sequence[np.ndarray | None]) -> None:
        self.arrays, self.asked = arrays, []

    def overlap(self, one: int, other: int) -> bool:
        self.asked.append((one, other))
        return np.shares_memory(self.arrays[one], self.arrays[other])


def span_of(array: np.ndarray | None) -> tuple[int, int]:
    """Where an array is, as a target says it."""
    if array is None or not array.size:
        return 0, 0
    begin = array.__array_interface__["data"][0]
    steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides)]
    low, high = (sum(step for step in steps if (step > 0) is up) for up in (False, True))
    return begin + low, begin + high + array.itemsize


def targets(*parts: Part) -> Targets:
    """One rank's targets."""
    table = catalog(*parts)
    return Targets(
        table,
        tuple(part.aliases for part in parts),
        tuple(part.raw_names for part in parts),
        np.asarray([span_of(part.array) for part in parts], dtype=np.int64).reshape(-1, 2),
        Arrays([part.array for part in parts]),
        strides={
            row: part.array.strides
            for row, part in enumerate(parts)
            if part.array is not None and not part.array.flags.c_contiguous
        },
    )


def refusal(call: Callable[..., object], *arguments: object, **options: object) -> list[Problem]:
    """The problems for which a call is refused; a Problem each."""
    with pytest.raises(ValidationError) as caught:
        call(*arguments, **options)
    assert all(isinstance(problem, Problem) for problem in caught.value.problems)
    return caught.value.problems


def the_refusal(call: Callable[..., object], *arguments: object, **options: object) -> Problem:
    """The only problem for which a call is refused."""
    (problem,) = refusal(call, *arguments, **options)
    return problem
