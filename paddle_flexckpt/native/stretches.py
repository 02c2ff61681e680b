"""Stretches and alike copies: many reads in columns, from items of files to memory by its address.

Their maker keeps the memory alive, and has checked that they stay inside it. Tested in tests/native/test_stretches.py.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.algebra.columns import Columns

# All of this process's memory as one buffer, a slice of which costs less than a new buffer. It begins after the page at
# 0, for which numpy would make an array with memory of its own.
FIRST_ADDRESS = 1 << 12
ADDRESSES = memoryview((ctypes.c_uint8 * ((1 << 56) - FIRST_ADDRESS)).from_address(FIRST_ADDRESS)).cast("B")
# The most runs of strided copies that are listed at once, which bounds the memory of the columns.
RUNS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class Stretches(Columns):
    """Contiguous bytes of items, and the contiguous memory where they go. All columns are int64 ``[n]``.

    Attributes:
        item: Row of the manifest's catalog.
        position: First byte, counted from the item's.
        length: Bytes.
        address: Of the memory.
    """

    item: np.ndarray
    position: np.ndarray
    length: np.ndarray
    address: np.ndarray

    def cut_at(self, step: int) -> Stretches:
        """Return the same bytes in stretches that end at every multiple of ``step`` in their item."""
        first = self.position // step
        count = -(-(self.position + self.length) // step) - first
        if (count == 1).all():
            return self
        part = np.repeat(np.arange(len(self)), count)
        number = np.arange(len(part)) - np.repeat(np.cumsum(count) - count - first, count)
        begin, end = self.position[part], (self.position + self.length)[part]
        position = np.maximum(begin, number * step)
        length = np.minimum(end, (number + 1) * step) - position
        return Stretches(self.item[part], position, length, self.address[part] + position - begin)

    def edges(self, most_bytes: int, most: int) -> list[int]:
        """Return the edges of portions of at most so many bytes, or one stretch, and at most so many stretches."""
        ends, edges = np.cumsum(self.length), [0]
        while edges[-1] < len(self):
            first = edges[-1]
            done = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, done + most_bytes, side="right"))
            edges.append(min(max(last, first + 1), first + most, len(self)))
        return edges


@dataclass(frozen=True, eq=False)
class AlikeCopies:
    """Strided copies of one form, each from an item to memory of its own.

    Attributes:
        copy: The form, with both bases 0.
        dtype: Of the elements, on both sides.
        item: int64 ``[n]``, row of the manifest's catalog.
        position: int64 ``[n]``, byte of the copy's first element, counted from the item's start.
        address: int64 ``[n]``, of the memory of the copy's first element.
    """

    copy: StridedCopy
    dtype: np.dtype
    item: np.ndarray
    position: np.ndarray
    address: np.ndarray

    def __len__(self) -> int:
        return len(self.item)

    def take(self, rows: np.ndarray | slice) -> AlikeCopies:
        """Return some of them (indices, a mask or a slice)."""
        return AlikeCopies(self.copy, self.dtype, self.item[rows], self.position[rows], self.address[rows])

    def runs(self) -> Iterator[Stretches]:
        """Yield the runs along the innermost axis, which has to be contiguous on both sides, some at a time."""
        copy, itemsize = self.copy, self.dtype.itemsize
        outer, length = copy.extents[:-1], copy.extents[-1] * itemsize
        each = copy.size // copy.extents[-1]
        for first in range(0, each * len(self), RUNS_AT_ONCE):
            number = np.arange(first, min(first + RUNS_AT_ONCE, each * len(self)))
            member, index = number // each, np.unravel_index(number % each, outer)
            source, target = (
                sum((i * (stride * itemsize) for i, stride in zip(index, strides)), np.zeros_like(number))
                for strides in (copy.source_strides, copy.target_strides)
            )
            yield Stretches(
                self.item[member],
                self.position[member] + source,
                np.full(len(number), length, dtype=np.int64),
                self.address[member] + target,
            )

    def carry_out(self, source: np.ndarray | mmap.mmap, begin: np.ndarray) -> None:
        """Copy; the first element of each is at byte ``begin`` of the source, whose bounds numpy checks."""
        extents, dtype = self.copy.extents, self.dtype
        from_strides = [stride * dtype.itemsize for stride in self.copy.source_strides]
        to_strides = [stride * dtype.itemsize for stride in self.copy.target_strides]
        for origin, target in zip(begin.tolist(), (self.address - FIRST_ADDRESS).tolist()):
            values = np.ndarray(extents, dtype, source, origin, from_strides)
            np.ndarray(extents, dtype, ADDRESSES, target, to_strides)[...] = values

    def storages(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the memory of each copy as a flat array, and the place of the copy's first element in it."""
        low, high = reach(self.copy.extents, self.copy.target_strides)
        for begin in (self.address + low * self.dtype.itemsize - FIRST_ADDRESS).tolist():
            yield np.ndarray(high - low + 1, self.dtype, ADDRESSES, begin), -low


def reach(extents: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return how far the first and the last element of a strided view, by their place, are from its base."""
    steps = [stride * (extent - 1) for extent, stride in zip(extents, strides)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
