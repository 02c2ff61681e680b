"""Scattered reads from a memory map: one numpy call instead of a system call per run."""

from __future__ import annotations

import mmap

import numpy as np

from paddle_flexckpt.algebra import StridedCopy

# Pages of a memory map count as resident until they are given back; this bounds them.
MAP_SPAN_BYTES = 16 << 20


def copy_mapped(
    mapped: mmap.mmap, begin: int, length: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype
) -> int:
    """Carries out a strided copy from an item in a mapped file, a bounded span of the file at a time.

    Args:
        mapped: The file.
        begin: First byte of the item.
        length: Its bytes.
        copy: What to copy; its outermost axis has the largest stride of the file.
        target: The target's storage, 1-D and contiguous.
        dtype: The item's element type.

    Returns:
        In how many spans.
    """
    storage = np.frombuffer(mapped, dtype=np.uint8, count=length, offset=begin).view(dtype)
    # Steps along the outermost axis keep the mapped span bounded.
    step = max(1, MAP_SPAN_BYTES // max(1, copy.source_strides[0] * dtype.itemsize))
    inner = copy.size // copy.extents[0]
    spans = 0
    for first in range(0, copy.extents[0], step):
        last = min(copy.extents[0], first + step)
        for part in copy.part(first * inner, last * inner):
            part.scatter_into(target)[...] = part.gather_from(storage)
        spans += 1
        _give_back(
            mapped,
            begin + (copy.source_base + first * copy.source_strides[0]) * dtype.itemsize,
            begin + (copy.source_base + last * copy.source_strides[0]) * dtype.itemsize,
        )
    return spans


def _give_back(mapped: mmap.mmap, begin: int, end: int) -> None:
    begin -= begin % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, begin, min(end, len(mapped)) - begin)
