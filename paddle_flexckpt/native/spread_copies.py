"""Divide copies that each span several blocks of an item among groups of blocks, which are read one by one.

Tested in tests/native/test_stretches.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from paddle_flexckpt.native.stretches import AlikeCopies, reach


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
        """Return the elements of a copy, by its place, that are in some blocks.

        Returns:
            Copies without an item; the byte where each begins, from the first block on; and the bytes from the begin of
            the copy's own memory to that of each.
        """
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
