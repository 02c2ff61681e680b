"""Say in advance which bytes of an item a strided copy will read, where a request takes long.

Tested in tests/media/test_object_store.py.
"""

from __future__ import annotations

import math

import numpy as np

from paddle_flexckpt.algebra import StridedCopy


def wanted_bytes(copy: StridedCopy, itemsize: int, length: int, block_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first bytes of the ranges that are read, in their order, and the first ones beyond.

    Runs that are shorter than a block are read in whole blocks. Of copies that go back in the file nothing is said.

    Args:
        copy: What is copied; not empty.
        itemsize: Bytes of an element.
        length: Bytes of the item.
        block_bytes: Bytes of its blocks, of which the last may be shorter.
    """
    outer = len(copy.extents) - copy.source_tail()
    width = math.prod(copy.extents[outer:]) * itemsize
    in_blocks = bool(outer) and width < block_bytes
    starts = np.zeros(1, dtype=np.int64)
    if not copy.is_ascending():
        return starts[:0], starts[:0]
    for extent, stride in zip(copy.extents[:outer][::-1], copy.source_strides[:outer][::-1]):
        step = stride * itemsize
        if len(starts) == 1 and step <= width + (block_bytes if in_blocks else 0):
            # Whatever lies between belongs to blocks that are read.
            width += (extent - 1) * step
        else:
            starts = (np.arange(extent)[:, None] * step + starts).reshape(-1)
    begin = starts + copy.source_base * itemsize
    end = begin + width
    if in_blocks:
        begin, end = begin // block_bytes * block_bytes, np.minimum(-(-end // block_bytes) * block_bytes, length)
    return begin, end
