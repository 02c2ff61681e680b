"""Stretches and alike copies: many reads in columns, from items of files to memory by its address.

Their maker keeps the memory alive, and has checked that they stay inside it. Copies that each span several blocks of an
item are divided among groups of blocks, which are read one by one.

Tested in tests/native/test_stretches.py.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

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

    def count_parts(self, step: int) -> np.ndarray:
        """Return int64 ``[n]``: in how many parts each is cut at every multiple of ``step`` in its item."""
        return -(-(self.position + self.length) // step) - self.position // step

    def cut_at(self, step: int) -> Stretches:
        """Return the same bytes in stretches that end at every multiple of ``step`` in their item."""
        first, count = self.position // step, self.count_parts(step)
        if (count == 1).all():
            return self
        part = np.repeat(np.arange(len(self)), count)
        number = np.arange(len(part)) - np.repeat(np.cumsum(count) - count - first, count)
        begin, end = self.position[part], (self.position + self.length)[part]
        position = np.maximum(begin, number * step)
        length = np.minimum(end, (number + 1) * step) - position
        return Stretches(self.item[part], position, length, self.address[part] + position - begin)


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

    @property
    def outer(self) -> int:
        """Return the number of outer axes. The axes inside them are contiguous in the file."""
        return len(self.copy.extents) - self.copy.source_tail()

    @property
    def run_bytes(self) -> int:
        """Return the bytes of a run, which is contiguous in the file."""
        return math.prod(self.copy.extents[self.outer :]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of a copy."""
        return self.copy.size * self.dtype.itemsize

    @property
    def count_runs(self) -> int:
        """Return how many runs a copy has."""
        return math.prod(self.copy.extents[: self.outer])

    @property
    def is_straight(self) -> bool:
        """Return whether each run is contiguous in memory too; the form has to be simplified."""
        return self.copy.target_strides[self.outer :] == (1,)

    @property
    def low_bytes(self) -> int:
        """Return how far the first byte of a copy in the file is from its base."""
        return reach(self.copy.extents, self.copy.source_strides)[0] * self.dtype.itemsize

    @property
    def reach_bytes(self) -> int:
        """Return the bytes of the file from the first to the last one of a copy."""
        low, high = reach(self.copy.extents, self.copy.source_strides)
        return (high - low + 1) * self.dtype.itemsize

    def runs(self) -> Iterator[Stretches]:
        """Yield the runs that are contiguous in the file, some at a time; an address is that of the first element."""
        copy, itemsize, length = self.copy, self.dtype.itemsize, self.run_bytes
        outer, each = copy.extents[: self.outer], self.count_runs
        for first in range(0, each * len(self), RUNS_AT_ONCE):
            number = np.arange(first, min(first + RUNS_AT_ONCE, each * len(self)))
            member, place = number // each, number % each
            position, address = self.position[member], self.address[member]
            index = np.unravel_index(place, outer) if outer else ()
            for along, source_stride, target_stride in zip(index, copy.source_strides, copy.target_strides):
                position += along * (source_stride * itemsize)
                address += along * (target_stride * itemsize)
            yield Stretches(self.item[member], position, np.full(len(number), length, dtype=np.int64), address)

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


@dataclass(frozen=True, eq=False)
class BlockGroup:
    """Consecutive blocks of an item, and the copies that need bytes of them.

    Attributes:
        item: Row of the manifest's catalog.
        first: The first block.
        last: The first one beyond.
        members: Numbers of the copies.
    """

    item: int
    first: int
    last: int
    members: np.ndarray


class SpreadCopies:
    """Ascending copies of one form, and the elements of each that lie in a group of blocks.

    All items that the copy reads at the same place have these in common, so they are computed once.
    """

    def __init__(self, copies: AlikeCopies, block_bytes: int) -> None:
        """Take the copies."""
        self._copies, self._block_bytes = copies, block_bytes
        self._per_block = block_bytes // copies.dtype.itemsize
        self._before = cache(self._count_before)
        self._parts = cache(self._find_parts)

    def groups(self, most: int) -> list[BlockGroup]:
        """Return the blocks that are needed, at most so many together, by items and in their order."""
        copies, found = self._copies, []
        order = np.argsort(copies.item, kind="stable")
        edges = np.flatnonzero(np.diff(copies.item[order], prepend=-1, append=-1))
        for begin, end in zip(edges, edges[1:]):
            members = order[begin:end]
            wanted = [np.flatnonzero(np.diff(self._before(each))) for each in copies.position[members].tolist()]
            blocks = np.unique(np.concatenate(wanted))
            item = int(copies.item[members[0]])
            for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
                first, last = int(run[0]), int(run[-1]) + 1
                found += [BlockGroup(item, i, min(i + most, last), members) for i in range(first, last, most)]
        return found

    def carry_out(self, group: BlockGroup, memory: np.ndarray) -> int:
        """Copy the elements of the copies in a group of blocks, which memory holds; return the number of bytes.

        Threads may call this at the same time.
        """
        count = 0
        for member in group.members.tolist():
            copy = self._copies.take(slice(member, member + 1))
            for part, begin, target in self._parts(int(copy.position[0]), group.first, group.last):
                replace(part, item=copy.item, address=copy.address + target).carry_out(memory, begin)
                count += part.copy.size * part.dtype.itemsize
        return count

    def _count_before(self, position: int) -> np.ndarray:
        """Return how many elements of a copy, by its place, precede each block of the item, and the end."""
        copy = replace(self._copies.copy, source_base=position // self._copies.dtype.itemsize)
        last = copy.source_base + reach(copy.extents, copy.source_strides)[1]
        edges = range(0, last + self._per_block + 1, self._per_block)
        return np.asarray([copy.count_before(edge) for edge in edges], dtype=np.int64)

    def _find_parts(self, position: int, first: int, last: int) -> list[tuple[AlikeCopies, np.ndarray, int]]:
        """Return the elements of a copy, by its place, that are in some blocks."""
        dtype, before = self._copies.dtype, self._before(position)
        copy = replace(self._copies.copy, source_base=position // dtype.itemsize)
        start, stop = (int(before[min(block, len(before) - 1)]) for block in (first, last))
        none, found = np.zeros(1, dtype=np.int64), []
        for part in copy.part(start, stop) if start < stop else ():
            begin = (part.source_base - first * self._per_block) * dtype.itemsize
            form = replace(part, source_base=0, target_base=0).simplified()
            target = part.target_base * dtype.itemsize
            found.append((AlikeCopies(form, dtype, none, none, none), np.asarray([begin]), target))
        return found
