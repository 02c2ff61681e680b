"""Plans carried out on numpy arrays, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddle_flexckpt.planning.exchange_plan import ReadPlan
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.planning.write_plan import WritePlan
from tests.property.layouts import Shard, shard_of_row


def storages(shards: Sequence[Shard], values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The memory of each shard."""
    return [shard.of(values[shard.key]).copy() for shard in shards]


def blank(shards: Sequence[Shard], values: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [np.zeros(shard.size, dtype=values[shard.key].dtype) for shard in shards]


def counters(shards: Sequence[Shard]) -> list[np.ndarray]:
    return [np.zeros(shard.size, dtype=np.int64) for shard in shards]


def carry_out(
    pieces: Pieces, source: Sequence[np.ndarray], target: list[np.ndarray], written: list[np.ndarray]
) -> None:
    """Copies every piece and counts, in ``written``, how often each target element is written."""
    for i, copy in enumerate(pieces.copies()):
        into = int(pieces.target[i])
        copy.scatter_into(target[into])[...] = copy.gather_from(source[int(pieces.source[i])])
        copy.scatter_into(written[into])[...] += 1


def write_files(plan: WritePlan, memory: Sequence[np.ndarray]) -> list[bytearray]:
    """The data files of a write plan; bytes that no item wrote are 0xEE."""
    files = [bytearray(b"\xee" * int(size)) for size in plan.rank_bytes]
    catalog = plan.catalog
    for i in range(len(catalog)):
        start = int(plan.source_start[i])
        data = memory[int(plan.source[i])][start : start + int(catalog.size[i])].tobytes()
        at = int(catalog.byte_offset[i])
        files[int(catalog.file[i])][at : at + len(data)] = data
    return files


def file_storages(plan: WritePlan, files: Sequence[bytearray], values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Every item of a write plan as a reader finds it: by file, byte offset and shape alone."""
    found = []
    for i in range(len(plan.catalog)):
        item = shard_of_row(plan.catalog, i)
        dtype = values[item.key].dtype
        at = int(plan.catalog.byte_offset[i])
        data = bytes(files[int(plan.catalog.file[i])][at : at + item.size * dtype.itemsize])
        found.append(np.frombuffer(data, dtype=dtype))
    return found


def read_positions(plan: ReadPlan, source) -> list[tuple[int, int]]:
    """(file, first byte) of every piece of a read plan, in its order."""
    pieces = plan.pieces
    position = source.byte_offset[pieces.source] + pieces.source_base * source.itemsize[pieces.source]
    return list(zip(source.file[pieces.source].tolist(), position.tolist()))
