"""Buffered reads: reads into targets on devices, through a few host buffers, one buffer after the other.

While a thread reads into one buffer and verifies it, the caller copies the buffer before to its device. So a load is
as fast as the slower of medium and link, and needs only the memory of the buffers, whatever the size of the tensors.

Tested in tests/transfer/test_buffered_reads.py and tests/device/test_bounds.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra import Columns, StridedCopy, row_major_strides, strides_of_shape
from paddle_flexckpt.catalog import Catalog, dtype_of
from paddle_flexckpt.media.ring import BufferRing
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.piece_columns import PieceColumns, are_contiguous

# Small, as nothing is copied while the first buffer is read; large enough for the link's bandwidth.
BUFFER_BYTES = 4 << 20
# One is read and one is copied at a time; the others are ready.
BUFFERS = 6
# Each target begins at a multiple of this in a buffer, so that elements of all widths are aligned.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Write:
    """A write of the elements at byte ``place`` of a buffer, in the order of a copy, to the target side of the copy."""

    row: int
    place: int
    copy: StridedCopy


# A full buffer, and its writes.
Full = tuple[np.ndarray, list[Write]]


@dataclass(frozen=True, eq=False)
class _Boxes(Columns):
    """The boxes of targets to which elements of a buffer go, in columns.

    Attributes:
        part: int64 ``[n]``, the number of a contiguous read, which is in the buffer in the order of the file.
        offset: int64 ``[n]``, elements of that part before this box.
        extents: int64 ``[n, d]``.
        base: int64 ``[n]``, position of the first element in the target's storage.
        strides: int64 ``[n, d]``, steps in that storage.
    """

    part: np.ndarray
    offset: np.ndarray
    extents: np.ndarray
    base: np.ndarray
    strides: np.ndarray


@dataclass(frozen=True, eq=False)
class BufferedReads:
    """The reads into each buffer, and their places in targets.

    Attributes:
        parts: The pieces from the files to buffers. The target side of each counts from its place, and has no gaps.
        places: int64 per part, its byte in the buffer.
        edges: The first part of each buffer, and the number of parts.
    """

    parts: Pieces
    places: np.ndarray
    edges: Sequence[int]
    _boxes: _Boxes
    _itemsize: np.ndarray

    @classmethod
    def of(cls, pieces: Pieces, source: Catalog, target: Catalog, block_bytes: int, buffer_bytes: int) -> BufferedReads:
        """Divide pieces among buffers, about in the order of the files, with the pieces of a target together.

        Args:
            pieces: The pieces to read.
            source: The catalog of the files.
            target: The rows to fill.
            block_bytes: Bytes of a block with a checksum: files are cut between blocks, so that these are verified.
            buffer_bytes: Bytes of a buffer.
        """
        parts, boxes = _cut(pieces.take(pieces.size > 0), source, target, block_bytes, buffer_bytes)
        order = _order(parts, source)
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(len(order))
        parts, boxes = parts.take(order), replace(boxes, part=number[boxes.part])
        itemsize = target.itemsize[parts.target]
        places, edges = _places(parts.target, parts.size * itemsize, buffer_bytes)
        strides = row_major_strides(parts.extents)
        dense = replace(parts, target_base=np.zeros_like(parts.target_base), target_strides=strides)
        return cls(dense, places, edges, boxes.take(np.lexsort((boxes.offset, boxes.part))), itemsize)

    def __iter__(self) -> Iterator[slice]:
        """Yield the numbers of the parts of each buffer."""
        for first, last in zip(self.edges, self.edges[1:]):
            yield slice(first, last)

    def writes(self, numbers: slice) -> list[Write]:
        """Return the writes of parts from their buffer to the targets; adjacent ones are one write."""
        first, last = np.searchsorted(self._boxes.part, (numbers.start, numbers.stop)).tolist()
        boxes = self._boxes.take(slice(first, last))
        rows, itemsize = self.parts.target[boxes.part], self._itemsize[boxes.part]
        place, size = self.places[boxes.part] + boxes.offset * itemsize, boxes.extents.prod(axis=1, dtype=np.int64)
        plain = are_contiguous(boxes.extents, boxes.strides)
        joined = plain[1:] & plain[:-1] & (rows[1:] == rows[:-1]) & (boxes.base[1:] == (boxes.base + size)[:-1])
        joined &= place[1:] == (place + size * itemsize)[:-1]
        edges = np.flatnonzero(np.concatenate([[True], ~joined]))
        found = []
        for box, total in zip(edges.tolist(), np.add.reduceat(size, edges).tolist()):
            extents, strides = boxes.extents[box].tolist(), boxes.strides[box].tolist()
            shape, steps = ((total,), (1,)) if plain[box] else (tuple(extents), tuple(strides))
            copy = StridedCopy(shape, 0, strides_of_shape(shape), int(boxes.base[box]), steps)
            found.append(Write(int(rows[box]), int(place[box]), copy.simplified()))
        return found


class _Reading:
    """The reader's side: it fills buffers from the files; a buffer is full when its reads have been verified."""

    def __init__(self, reader: FileReader, reads: BufferedReads, memory: Filling) -> None:
        self._reader, self._reads, self._memory = reader, reads, memory
        self._left = iter(reads)

    def fill(self, buffer: np.ndarray) -> list[Full] | None:
        """Fill a buffer and return it with its writes; None at the end."""
        numbers = next(self._left, None)
        if numbers is None:
            return None
        self._read(self._reads.parts.take(numbers), self._reads.places[numbers], buffer)
        return [(buffer, self._reads.writes(numbers))]

    def _read(self, part: Pieces, places: np.ndarray, buffer: np.ndarray) -> None:
        """Read pieces into their places in a buffer."""
        reader, catalog = self._reader, self._memory.catalog
        if (places + part.size * catalog.itemsize[part.target]).max() > len(buffer):
            raise IndexError("what is read leaves its buffer")  # memory is written by its address
        columns = PieceColumns.of(part, reader.catalog, catalog, buffer.ctypes.data + places)
        columns.read(reader)
        for piece in np.flatnonzero(~columns.direct).tolist():
            dtype = dtype_of(catalog.dtype_name(int(part.target[piece]))).numpy
            copy, place = part.copy(piece), int(places[piece])
            values = buffer[place : place + copy.size * dtype.itemsize].view(dtype)
            reader.read(int(part.source[piece]), copy, values)


def buffered_reads(reader: FileReader, pieces: Pieces, memory: Filling) -> BufferedReads:
    """Return the buffered reads of pieces; arguments as in :func:`read_through_buffers`."""
    return BufferedReads.of(pieces, reader.catalog, memory.catalog, reader.block_bytes, BUFFER_BYTES)


def read_through_buffers(reader: FileReader, pieces: Pieces, memory: Filling) -> None:
    """Read pieces into targets on devices: a thread reads and verifies them, the caller copies them.

    Raises:
        CorruptCheckpointError: The files are damaged.
        OSError: The file system failed.
        Exception: A device failed.
    """
    reads = buffered_reads(reader, pieces, memory)
    count, reading = min(BUFFERS, len(reads.edges)), _Reading(reader, reads, memory)
    with memory.host_buffers(count, BUFFER_BYTES) as buffers, BufferRing(buffers, reading.fill) as ring:
        while (taken := ring.take()) is not None:
            for buffer, writes in taken[1]:
                for write in writes:
                    storage = memory.device_storage(write.row)
                    values = buffer[write.place : write.place + write.copy.size * storage.dtype.itemsize]
                    storage.write(storage.along_axes(write.copy, 1), values.view(storage.dtype))
                ring.give_back(buffer)


def _cut(
    pieces: Pieces, source: Catalog, target: Catalog, block_bytes: int, buffer_bytes: int
) -> tuple[Pieces, _Boxes]:
    """Return pieces in parts that each fit into a buffer, and their boxes in the targets.

    The pieces that fit come first, each as one part.
    """
    widths = np.stack([source.itemsize[pieces.source], target.itemsize[pieces.target]])
    most = buffer_bytes // widths.max(axis=0)
    plain, fits = are_contiguous(pieces.extents, pieces.source_strides), pieces.size <= most
    small, reads = pieces.take(fits), _flattened(pieces, plain)
    zeros = np.zeros(len(small), dtype=np.int64)
    all_boxes = [_Boxes(np.arange(len(small)), zeros, small.extents, small.target_base, small.target_strides)]
    all_parts, count = [reads.take(fits)], len(small)
    for number in np.flatnonzero(~fits).tolist():
        piece, read = (table.take(slice(number, number + 1)) for table in (pieces, reads))
        unit, first = 1, 0
        if not plain[number]:
            unit = _inner_size(piece, int(most[number]))
        elif most[number] * widths[0, number] >= block_bytes:
            unit = block_bytes // int(widths[0, number])
            # The first block that begins in the piece begins at this element.
            first = -int(piece.source_base[0]) % unit
        for start, stop in _ranges(int(piece.size[0]), int(most[number]), unit, first):
            parts, boxes = (_one_part if plain[number] else _part_per_box)(piece, read, start, stop)
            all_parts.append(parts)
            all_boxes.append(replace(boxes, part=boxes.part + count))
            count += len(parts)
    return Pieces.concat(all_parts), _Boxes.concat(all_boxes)


def _flattened(pieces: Pieces, plain: np.ndarray) -> Pieces:
    """Return the reads of pieces: a contiguous range of a file goes to a contiguous range of a buffer."""
    flat = np.ones_like(pieces.extents)
    flat[:, -1] = pieces.size
    extents = np.where(plain[:, None], flat, pieces.extents)
    strides = np.where(plain[:, None], row_major_strides(flat), pieces.source_strides)
    return replace(pieces, extents=extents, source_strides=strides)


def _inner_size(piece: Pieces, most: int) -> int:
    """Return the elements of as many inner axes of the only piece of a table as have at most ``most`` elements."""
    size = 1
    for extent in reversed(piece.extents[0].tolist()):
        if size * extent > most:
            break
        size *= extent
    return size


def _ranges(size: int, most: int, unit: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of up to ``most`` of ``size`` elements, cut at ``first`` and whole units from there."""
    edges = range(first + (most - first) // unit * unit, size, most // unit * unit)
    return zip([0, *edges], [*edges, size])


def _one_part(piece: Pieces, read: Pieces, start: int, stop: int) -> tuple[Pieces, _Boxes]:
    """Return a range of a piece that is contiguous in its file, as one part, and the boxes of the part."""
    boxes, _ = _boxes_of(piece, start, stop)
    size = boxes.extents.prod(axis=1)
    extents = np.ones_like(piece.extents)
    extents[:, -1] = stop - start
    part = replace(read, extents=extents, source_base=read.source_base + start, target_base=boxes.base[:1])
    return part, replace(boxes, part=np.zeros_like(size), offset=np.cumsum(size) - size)


def _part_per_box(piece: Pieces, read: Pieces, start: int, stop: int) -> tuple[Pieces, _Boxes]:
    """Return a range of a piece as parts that are one box each, and these boxes."""
    boxes, source_base = _boxes_of(piece, start, stop)
    parts = read.take(np.zeros(len(source_base), dtype=np.int64))
    return replace(parts, extents=boxes.extents, source_base=source_base, target_base=boxes.base), boxes


def _boxes_of(piece: Pieces, start: int, stop: int) -> tuple[_Boxes, np.ndarray]:
    """Return the boxes of a range of the only piece of a table, as parts of their own, and where each begins there."""
    copies = list(_copy(piece).part(start, stop))
    number = np.arange(len(copies))
    extents = np.asarray([copy.extents for copy in copies], dtype=np.int64)
    source_base, target_base = (
        np.asarray([getattr(copy, side) for copy in copies], dtype=np.int64) for side in ("source_base", "target_base")
    )
    strides = np.repeat(piece.target_strides, len(copies), axis=0)
    return _Boxes(number, np.zeros_like(number), extents, target_base, strides), source_base


def _copy(piece: Pieces) -> StridedCopy:
    """Return the only piece of a table, with all its axes."""
    sides = (piece.extents, piece.source_base, piece.source_strides, piece.target_base, piece.target_strides)
    extents, source_base, source_strides, target_base, target_strides = (side[0].tolist() for side in sides)
    return StridedCopy(tuple(extents), source_base, tuple(source_strides), target_base, tuple(target_strides))


def _order(pieces: Pieces, source: Catalog) -> np.ndarray:
    """Return the order of pieces: by the place of the target's first byte in the files, then by element."""
    place = source.byte_offset[pieces.source] + pieces.source_base * source.itemsize[pieces.source]
    by_file = np.lexsort((place, source.file[pieces.source]))
    rank = np.empty(len(pieces), dtype=np.int64)
    rank[by_file] = np.arange(len(pieces))
    first = np.full(int(pieces.target.max(initial=-1)) + 1, len(pieces), dtype=np.int64)
    np.minimum.at(first, pieces.target, rank)
    return np.lexsort((pieces.target_base, first[pieces.target]))


def _places(rows: np.ndarray, nbytes: np.ndarray, buffer_bytes: int) -> tuple[np.ndarray, list[int]]:
    """Return the place of each piece in its buffer, and the first piece of each buffer, and the number of pieces."""
    places, edges, used, before = [], [0], 0, -1
    for number, (row, length) in enumerate(zip(rows.tolist(), nbytes.tolist())):
        if row != before:
            used = -(-used // _ALIGNMENT) * _ALIGNMENT
        if used + length > buffer_bytes:
            edges.append(number)
            used = 0
        places.append(used)
        used, before = used + length, row
    if len(rows):
        edges.append(len(rows))
    return np.asarray(places, dtype=np.int64), edges
