"""Announce later reads to a reader, in their order, where that makes its medium faster.

Tested in tests/media/test_object_store.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.native.read_planner import wanted_bytes
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.transfer.buffered_reads import buffered_reads
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.piece_columns import PieceColumns, are_contiguous, group_forms

Ranges = tuple[np.ndarray, np.ndarray, np.ndarray]


def announce(reader: FileReader, pieces: Pieces, memory: Filling) -> None:
    """Announce the reads of pieces.

    Args:
        reader: The reader of the files.
        pieces: The pieces, in the order in which rows are filled.
        memory: The memory of the rows.

    Raises:
        CorruptCheckpointError: A file is not as it was.
        OSError: A file cannot be opened.
    """
    found: list[Ranges] = []
    common = reader.catalog, memory.catalog, reader.block_bytes
    for first, last in memory.portions(pieces.target):
        part = pieces.take(slice(first, last))
        on_device = memory.on_device[part.target]
        if on_device.any():
            reads = buffered_reads(reader, part.take(on_device), memory)
            for numbers in reads:
                found += ranges_read(reads.parts.take(numbers), reads.places[numbers], *common)
            part = part.take(~on_device)
        found += ranges_read(part, memory.addresses[part.target], *common)
    if found:
        reader.read_ahead(*(np.concatenate(column) for column in zip(*found)))


def ranges_read(
    part: Pieces, addresses: np.ndarray, source: Catalog, target: Catalog, block_bytes: int
) -> Iterator[Ranges]:
    """Yield the ranges of bytes that pieces read, in this order, on a medium without memory maps.

    Args:
        part: The pieces.
        addresses: int64 per piece: where its target's memory is, or -1 where it has to be opened first.
        source: The catalog of the files.
        target: The rows to fill.
        block_bytes: Bytes of a block with a checksum.
    """
    columns = PieceColumns.of(part, source, target, addresses)
    for rows in columns.turns(part, source):
        chosen = part.take(rows)
        piece, begin, end = ranges_of(chosen, source, block_bytes)
        yield chosen.source[piece], begin, end


def announce_reads(reader: FileReader, parts: list[Pieces]) -> None:
    """Announce pieces that :meth:`FileReader.read` will read one by one, in this order.

    Raises:
        CorruptCheckpointError: A file is not as it was.
        OSError: A file cannot be opened.
    """
    found = [(part, ranges_of(part, reader.catalog, reader.block_bytes)) for part in parts]
    if found:
        items = np.concatenate([part.source[piece] for part, (piece, _, _) in found])
        reader.read_ahead(items, *(np.concatenate(column) for column in list(zip(*(each for _, each in found)))[1:]))


def ranges_of(pieces: Pieces, source: Catalog, block_bytes: int) -> Ranges:
    """Return the ranges that pieces read: number of the piece, rising, first byte and the one beyond."""
    itemsize, size = source.itemsize[pieces.source], pieces.size
    plain = (size > 0) & are_contiguous(pieces.extents, pieces.source_strides)
    number = [np.flatnonzero(plain)]
    begin = [(pieces.source_base * itemsize)[plain]]
    end = [begin[0] + (size * itemsize)[plain]]
    rest = np.flatnonzero((size > 0) & ~plain)
    length, axes = source.byte_length[pieces.source], pieces.extents.shape[1]
    tables = (pieces.extents, pieces.source_strides)
    columns = [itemsize[rest], *(column for table in tables for column in table.take(rest, axis=0).T)]
    for form, members in group_forms(columns):
        rows, extents, strides = rest[members], tuple(form[1 : 1 + axes]), tuple(form[1 + axes :])
        copy = StridedCopy(extents, 0, strides, 0, strides).simplified()
        first, beyond = wanted_bytes(copy, form[0], pieces.source_base[rows], length[rows], block_bytes)
        number.append(np.repeat(rows, first.shape[1]))
        begin.append(first.reshape(-1))
        end.append(beyond.reshape(-1))
    order = np.argsort(np.concatenate(number), kind="stable")
    return np.concatenate(number)[order], np.concatenate(begin)[order], np.concatenate(end)[order]
