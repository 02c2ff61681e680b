"""Announce the bytes of an item that a strided copy will read, where a request takes long.

Tested in tests/media/test_object_store.py.
"""

from __future__ import annotations

import math

import numpy as np

from paddle_flexckpt.algebra import StridedCopy


def wanted_bytes(
    copy: StridedCopy, itemsize: int, base: np.ndarray, length: np.ndarray, block_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first bytes of the ranges that copies of one form read, in their order, and the first ones beyond.

    Runs that are shorter than a block are read in whole blocks. Copies that go back in the file are not announced.

    Args:
        copy: The form of each copy, from its base on; not empty.
        itemsize: Bytes of an element.
        base: int64 per copy, the first element in its item.
        length: int64 per copy, bytes of its item.
        block_bytes: Bytes of an item's blocks, of which the last may be shorter.

    Returns:
        int64 ``[copies, ranges of each]``, twice.
    """
    outer = len(copy.extents) - copy.source_tail()
    width = math.prod(copy.extents[outer:]) * itemsize
    in_blocks = bool(outer) and width < block_bytes
    starts = np.zeros(1, dtype=np.int64)
    if not copy.is_ascending():
        nothing = np.zeros((len(base), 0), dtype=np.int64)
        return nothing, nothing
    for extent, stride in zip(copy.extents[:outer][::-1], copy.source_strides[:outer][::-1]):
        step = stride * itemsize
        if len(starts) == 1 and step <= width + (block_bytes if in_blocks else 0):
            # All bytes between them belong to blocks that are read.
            width += (extent - 1) * step
        else:
            starts = (np.arange(extent)[:, None] * step + starts).reshape(-1)
    begin = starts + base[:, None] * itemsize
    end = begin + width
    if in_blocks:
        begin = begin // block_bytes * block_bytes
        end = np.minimum(-(-end // block_bytes) * block_bytes, length[:, None])
    return begin, end
