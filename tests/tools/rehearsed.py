"""Layouts on disk and in memory: what a rehearsal says is compared with loads of each rank, one after the other."""

from __future__ import annotations

import contextlib

import numpy as np

from paddle_flexckpt.catalog import concat, dtype_of
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.write_plan import plan_write
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.transfer.files import Files
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.targets import Memory, Targets
from paddle_flexckpt.transfer.transfer import Transfer


def values_of(layout: Layout) -> dict[str, np.ndarray]:
    """Bytes for each tensor of a layout, small numbers all."""
    values = {}
    for rank in range(layout.strategy.ranks):
        catalog = layout.catalog(rank)
        for row in range(len(catalog)):
            key, shape = catalog.key_name(row), catalog.unpadded(row, catalog.global_shape)
            if key not in values:
                numbers = np.random.default_rng(len(values)).integers(0, 100, shape)
                values[key] = numbers.astype(dtype_of(catalog.dtype_name(row)).numpy)
    return values


def shard_of(catalog, row: int, value: np.ndarray) -> np.ndarray:
    """What a row has of a tensor, 1-D."""
    offset, shape = catalog.unpadded(row, catalog.offset), catalog.unpadded(row, catalog.shape)
    box = value[tuple(slice(o, o + n) for o, n in zip(offset, shape))].reshape(-1)
    return box[catalog.flat_start[row] : catalog.flat_stop[row]] if catalog.is_flattened[row] else box


def save(path, layout: Layout, save_replicas: bool = False) -> dict[str, np.ndarray]:
    """Saves a job's state as its ranks would; returns all tensors."""
    values, ranks = values_of(layout), range(layout.strategy.ranks)
    job = concat([layout.catalog(rank) for rank in ranks]).compact()
    directory = open_to_save(path)
    with contextlib.ExitStack() as stack:
        stack.callback(directory.lock().release)
        names = directory.open_save(None, len(ranks))
        plan = plan_write(job, names.data_file, save_replicas)
        parts = []
        for rank in ranks:
            rows = np.flatnonzero(plan.catalog.rank == rank)
            items = plan.catalog.take(rows)
            stored = zip(plan.source[rows].tolist(), plan.source_start[rows].tolist(), items.size.tolist())
            data = (shard_of(job, row, values[job.key_name(row)])[start : start + n] for row, start, n in stored)
            share = (np.ascontiguousarray(part).view(np.uint8) for part in data)
            parts.append(directory.write_data(names, items, share, world_size=len(ranks)))
        directory.commit(names, parts)
    return values


def state_of(catalog) -> dict:
    """A rank's targets as a live state of numpy arrays."""
    state = {}
    for row in range(len(catalog)):
        columns = (catalog.shape, catalog.global_shape, catalog.offset)
        shape, whole, offset = (catalog.unpadded(row, column) for column in columns)
        data = np.zeros(int(catalog.size[row]), dtype_of(catalog.dtype_name(row)).numpy)
        flat = slice(int(catalog.flat_start[row]), int(catalog.flat_stop[row])) if catalog.is_flattened[row] else None
        data = data if flat else data.reshape(shape)
        key = catalog.key_name(row)
        state[key] = ShardedWeight(key, data, shape, whole, offset, flat is not None, flat)
    return state


class Host(Memory):
    """Memory of targets that are filled where they stand."""

    def __init__(self, catalog) -> None:
        sizes, names = catalog.size.tolist(), map(catalog.dtype_name, range(len(catalog)))
        self.arrays = [np.zeros(size, dtype_of(name).numpy) for size, name in zip(sizes, names)]

    def addresses(self):
        return np.asarray([array.ctypes.data for array in self.arrays], dtype=np.int64)


def load(path, catalog, rank: int = 0, **options):
    """Loads a rank's targets; returns the report and the targets."""
    names = tuple(map(catalog.key_name, range(len(catalog))))
    own = catalog.compact()
    numbers = {name: number for number, name in enumerate(own.keys)}
    own = own.take(np.argsort([numbers[name] for name in names], kind="stable"))
    nothing, memory = ((),) * len(names), Host(own)
    begin = memory.addresses()
    spans = np.stack([begin, begin + own.byte_length], axis=1)
    asked = LoadOptions(**options)
    targets = Targets(own, nothing, nothing, spans, memory)
    source = Files(str(path), asked)
    context = f"cannot load from {str(path)!r}"
    comm = SoloCommunicator(rank)
    return Transfer(comm, source, lambda: targets, asked, "load_state_dict", context).run(), targets
