"""Pieces between this rank's memory and streams of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.planning import Pieces

# Bytes per step: small enough to stay in cache between the strided side and the contiguous one.
CHUNK_BYTES = 1 << 20

Storage = Callable[[int], np.ndarray]


def copy_pieces(pieces: Pieces, source: Storage, target: Storage) -> int:
    """Copies pieces within memory; values are cast where dtypes differ.

    Args:
        pieces: What to copy.
        source: Gives the 1-D storage of a source row.
        target: Gives the 1-D storage of a target row.

    Returns:
        Bytes copied (of the source's dtype).
    """
    count = 0
    for i, copy in enumerate(pieces.copies()):
        from_storage, to_storage = source(int(pieces.source[i])), target(int(pieces.target[i]))
        copy.scatter_into(to_storage)[...] = copy.gather_from(from_storage)
        count += copy.size * from_storage.itemsize
    return count


def _chunks(copy: StridedCopy, itemsize: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK_BYTES // itemsize)
    for start in range(0, copy.size, step):
        yield start, min(start + step, copy.size)


def pack(pieces: Pieces, source: Storage) -> Iterator[np.ndarray]:
    """The pieces' elements in order, as contiguous uint8 arrays.

    A piece that is contiguous is yielded as a view of its memory; others are gathered into one reused buffer, so an
    array is valid until the next is asked for.
    """
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
    for i, copy in enumerate(pieces.copies()):
        storage = source(int(pieces.source[i]))
        if copy.is_contiguous()[0]:
            yield storage[copy.source_base : copy.source_base + copy.size].view(np.uint8)
            continue
        for start, stop in _chunks(copy, storage.itemsize):
            out = buffer[: (stop - start) * storage.itemsize].view(storage.dtype)
            position = 0
            for part in copy.part(start, stop):
                out[position : position + part.size].reshape(part.extents)[...] = part.gather_from(storage)
                position += part.size
            yield out.view(np.uint8)


def unpack(pieces: Pieces, target: Storage, dtype_of_source: Callable[[int], np.dtype]) -> Iterator[np.ndarray]:
    """Buffers to be filled with the pieces' elements in order; each is used when the next is asked for.

    A piece that is contiguous and of the same dtype is received straight into its memory.

    Args:
        pieces: What to receive.
        target: Gives the 1-D storage of a target row.
        dtype_of_source: Gives the numpy dtype of a source row.
    """
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
    for i, copy in enumerate(pieces.copies()):
        storage, dtype = target(int(pieces.target[i])), dtype_of_source(int(pieces.source[i]))
        if copy.is_contiguous()[1] and storage.dtype == dtype:
            yield storage[copy.target_base : copy.target_base + copy.size].view(np.uint8)
            continue
        for start, stop in _chunks(copy, dtype.itemsize):
            out = buffer[: (stop - start) * dtype.itemsize]
            yield out
            values, position = out.view(dtype), 0
            for part in copy.part(start, stop):
                part.scatter_into(storage)[...] = values[position : position + part.size].reshape(part.extents)
                position += part.size
