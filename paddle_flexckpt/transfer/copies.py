"""Copy pieces between storages, and between storages and streams of bytes.

A storage holds the elements of one tensor, counted in row-major order. It is a 1-D array in host memory, and a
:class:`DeviceStorage` otherwise.

Tested in tests/transfer/test_copies.py, tests/memory/test_tensors.py and tests/device/test_device_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, Union

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog.dtypes import assign

if TYPE_CHECKING:
    from paddle_flexckpt.planning.matching import Pieces

# Bytes per step on the host: small enough to stay in cache between the strided side and the contiguous one.
CHUNK_BYTES = 1 << 20
# Pieces of up to this share of a step are put into one step with their neighbours.
SMALL_PART = 4
# Bytes per step of a copy from, to or within a device: enough to use the link's bandwidth. An exchange through the host
# holds up to five such steps at a time, and may take 64 MiB.
DEVICE_CHUNK_BYTES = 8 << 20


class DeviceStorage(Protocol):
    """Elements in memory that the host cannot access. Positions count elements in row-major order."""

    @property
    def dtype(self) -> np.dtype:
        """Return the elements' type."""

    def along_axes(self, copy: StridedCopy, side: int) -> StridedCopy:
        """Return a copy in a form in which this storage can access its parts; side 0 is its source, 1 its target."""

    def read(self, copy: StridedCopy) -> np.ndarray:
        """Return the source side of a copy as a host array of the copy's extents."""

    def read_range(self, start: int, stop: int) -> np.ndarray:
        """Return the elements ``[start, stop)`` as a 1-D host array."""

    def whole(self) -> StridedCopy:
        """Return the copy of all elements to a storage of the same shape."""

    def write(self, copy: StridedCopy, values: np.ndarray) -> None:
        """Write host values of the storage's dtype, in the order of the copy, to its target side."""

    def copy_from(self, source: DeviceStorage, copy: StridedCopy) -> None:
        """Carry out a copy from another device storage of the same type, without the host."""


AnyStorage = Union[np.ndarray, DeviceStorage]
Storage = Callable[[int], AnyStorage]


def read_values(storage: AnyStorage, copy: StridedCopy) -> np.ndarray:
    """Return the source side of a copy: a view of host memory, or a host copy of device memory."""
    return copy.gather_from(storage) if isinstance(storage, np.ndarray) else storage.read(copy)


def write_values(storage: AnyStorage, copy: StridedCopy, values: np.ndarray, row: int = -1) -> None:
    """Write values, in the order of a copy, to its target side; they are cast to the storage's dtype.

    Raises:
        OverflowingCastError: Numbers are too large for that dtype; the error has the row.
    """
    if isinstance(storage, np.ndarray):
        assign(copy.scatter_into(storage), values.reshape(copy.extents), row)
        return
    if values.dtype != storage.dtype:
        cast = np.empty(values.shape, dtype=storage.dtype)
        assign(cast, values, row)
        values = cast
    storage.write(copy, values)


def copy_values(copy: StridedCopy, source: AnyStorage, target: AnyStorage, row: int = -1) -> None:
    """Carry out one copy between storages, in bounded steps where a device takes part.

    Values are cast where dtypes differ. A cast is numpy's, on the host, so that it rounds alike everywhere.

    Raises:
        OverflowingCastError: Numbers are too large for the target's dtype; the error has the row.
    """
    if isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
        assign(copy.scatter_into(target), copy.gather_from(source), row)
        return
    for side, storage in enumerate((source, target)):
        copy = copy if isinstance(storage, np.ndarray) else storage.along_axes(copy, side)
    for start, stop in _chunks(copy, source.dtype.itemsize, DEVICE_CHUNK_BYTES):
        for part in copy.part(start, stop) if stop - start < copy.size else (copy,):
            if isinstance(target, np.ndarray) or type(source) is not type(target) or source.dtype != target.dtype:
                write_values(target, part, read_values(source, part), row)
            else:
                target.copy_from(source, part)


class _Side:
    """One side of pieces as arrays; those in host memory need no call for each."""

    def __init__(self, rows: np.ndarray, base: np.ndarray, strides: np.ndarray, storage: Storage) -> None:
        """Args: rows, base, strides: of the pieces. storage: gives the storage of a row."""
        unique = np.unique(rows).tolist()
        self.storages = {row: storage(row) for row in unique}
        self._raw = {
            row: (memory.view(np.uint8), memory.dtype)
            for row, memory in self.storages.items()
            if isinstance(memory, np.ndarray)
        }
        itemsizes = np.zeros(max(unique, default=0) + 1, dtype=np.int64)
        itemsizes[unique] = [memory.dtype.itemsize for memory in self.storages.values()]
        self.itemsize = itemsizes[rows]
        self.rows = rows.tolist()
        self._base, self._strides = (base * self.itemsize).tolist(), (strides * self.itemsize[:, None]).tolist()

    def is_on_host(self, piece: int) -> bool:
        """Return whether a piece is in host memory on this side."""
        return self.rows[piece] in self._raw

    def dtype(self, piece: int) -> np.dtype:
        """Return the type of a piece's elements."""
        return self.storages[self.rows[piece]].dtype

    def view(self, piece: int, extents: list[int]) -> np.ndarray:
        """Return a piece in host memory; numpy checks the bounds of the storage."""
        raw, dtype = self._raw[self.rows[piece]]
        return np.ndarray(extents, dtype, raw, self._base[piece], self._strides[piece])


def copy_pieces(pieces: Pieces, source: Storage, target: Storage) -> int:
    """Copy pieces from storages to storages, cast where dtypes differ; return the bytes, of the source's dtype."""
    pieces = pieces.take(pieces.size > 0)
    sides = _source_of(pieces, source), _target_of(pieces, target)
    for piece, extents in enumerate(pieces.extents.tolist()):
        if all(side.is_on_host(piece) for side in sides):
            assign(sides[1].view(piece, extents), sides[0].view(piece, extents), sides[1].rows[piece])
        else:
            one, other = (side.storages[side.rows[piece]] for side in sides)
            copy_values(pieces.copy(piece), one, other, sides[1].rows[piece])
    return int((pieces.size * sides[0].itemsize).sum())


def _source_of(pieces: Pieces, storage: Storage) -> _Side:
    return _Side(pieces.source, pieces.source_base, pieces.source_strides, storage)


def _target_of(pieces: Pieces, storage: Storage) -> _Side:
    return _Side(pieces.target, pieces.target_base, pieces.target_strides, storage)


def _chunks(copy: StridedCopy, itemsize: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, chunk_bytes // itemsize)
    for start in range(0, copy.size, step):
        yield start, min(start + step, copy.size)


def pack(pieces: Pieces, source: Storage) -> Iterator[np.ndarray]:
    """Yield the pieces' elements in order, as contiguous uint8 arrays, each valid until the next.

    Small pieces are gathered into one array, which is one message.
    """
    buffer, used = np.empty(CHUNK_BYTES, dtype=np.uint8), 0
    pieces = pieces.take(pieces.size > 0)
    side = _source_of(pieces, source)
    for piece, (extents, nbytes) in enumerate(zip(pieces.extents.tolist(), (pieces.size * side.itemsize).tolist())):
        if nbytes > CHUNK_BYTES // SMALL_PART or not side.is_on_host(piece):
            if used:
                yield buffer[:used]
                used = 0
            yield from pack_copy(pieces.copy(piece), side.storages[side.rows[piece]], buffer)
            continue
        dtype = side.dtype(piece)
        if used + nbytes > CHUNK_BYTES or used % dtype.itemsize:
            yield buffer[:used]
            used = 0
        np.ndarray(extents, dtype, buffer, used)[...] = side.view(piece, extents)
        used += nbytes
    if used:
        yield buffer[:used]


def pack_copy(copy: StridedCopy, storage: AnyStorage, buffer: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yield the elements of a copy in order, as contiguous uint8 arrays, each valid until the next.

    Contiguous host memory is yielded as views; other host memory is gathered into one buffer, of ``CHUNK_BYTES``.
    """
    if not isinstance(storage, np.ndarray):
        copy = storage.along_axes(copy, 0)
        for start, stop in _chunks(copy, storage.dtype.itemsize, DEVICE_CHUNK_BYTES):
            for part in copy.part(start, stop):
                yield storage.read(part).reshape(-1).view(np.uint8)
        return
    if copy.is_contiguous()[0]:
        yield storage[copy.source_base : copy.source_base + copy.size].view(np.uint8)
        return
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8) if buffer is None else buffer
    for start, stop in _chunks(copy, storage.itemsize, CHUNK_BYTES):
        out = buffer[: (stop - start) * storage.itemsize].view(storage.dtype)
        position = 0
        for part in copy.part(start, stop):
            out[position : position + part.size].reshape(part.extents)[...] = part.gather_from(storage)
            position += part.size
        yield out.view(np.uint8)


def unpack(pieces: Pieces, target: Storage, dtype_of_source: Callable[[int], np.dtype]) -> Iterator[np.ndarray]:
    """Yield buffers to fill with the pieces' elements in order; the elements are stored when the next buffer is taken.

    A large piece that is contiguous in host memory and of the same dtype is received directly into it; small pieces are
    received together. The functions are about a row of the targets, and one of the sources.
    """
    pieces = pieces.take(pieces.size > 0)
    side, sizes = _target_of(pieces, target), pieces.size.tolist()
    buffer, used, small = np.empty(CHUNK_BYTES, dtype=np.uint8), 0, list[tuple[int, int]]()
    all_extents, rows = pieces.extents.tolist(), pieces.source.tolist()

    def scatter() -> None:
        for piece, position in small:
            values = np.ndarray(all_extents[piece], dtype_of_source(rows[piece]), buffer, position)
            assign(side.view(piece, all_extents[piece]), values, side.rows[piece])
        small.clear()

    for piece, size in enumerate(sizes):
        dtype = dtype_of_source(rows[piece])
        is_small = size * dtype.itemsize <= CHUNK_BYTES // SMALL_PART and side.is_on_host(piece)
        if used and (not is_small or used + size * dtype.itemsize > CHUNK_BYTES or used % dtype.itemsize):
            yield buffer[:used]
            scatter()
            used = 0
        if is_small:
            small.append((piece, used))
            used += size * dtype.itemsize
        else:
            row = side.rows[piece]
            yield from _unpack_copy(pieces.copy(piece), side.storages[row], dtype, buffer, row)
    if used:
        yield buffer[:used]
        scatter()


def _unpack_copy(
    copy: StridedCopy, storage: AnyStorage, dtype: np.dtype, buffer: np.ndarray, row: int
) -> Iterator[np.ndarray]:
    """Yield buffers to fill with one piece's elements, as in :func:`unpack`."""
    if isinstance(storage, np.ndarray) and copy.is_contiguous()[1] and storage.dtype == dtype:
        yield storage[copy.target_base : copy.target_base + copy.size].view(np.uint8)
        return
    limit = CHUNK_BYTES
    if not isinstance(storage, np.ndarray):
        copy, limit = storage.along_axes(copy, 1), DEVICE_CHUNK_BYTES
        buffer = np.empty(min(limit, copy.size * dtype.itemsize), dtype=np.uint8)
    for start, stop in _chunks(copy, dtype.itemsize, limit):
        out = buffer[: (stop - start) * dtype.itemsize]
        yield out
        values, position = out.view(dtype), 0
        for part in copy.part(start, stop):
            write_values(storage, part, values[position : position + part.size], row)
            position += part.size
