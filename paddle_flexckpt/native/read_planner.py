"""The planner of reads: the rules by which reads of items become requests.

A subclass makes the requests (:class:`~paddle_flexckpt.native.reader.FileReader`), or counts them
(:mod:`paddle_flexckpt.transfer.read_counts`).

If the file side of a copy is contiguous, it is read block by block, straight into the target if that is contiguous too.
Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a system call per run.
Many reads are made in portions: neighbours in a file are one request.

:func:`wanted_bytes` computes the byte ranges that strided copies will read. They are announced where a request takes
long.

Tested in tests/native/test_stretches.py, tests/transfer/test_read_counts.py and tests/media/test_object_store.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.algebra.rows import lexsort_packed
from paddle_flexckpt.native import row_files
from paddle_flexckpt.native.stretches import AlikeCopies, Stretches

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10
# The most blocks, or as many bytes, that a thread reads before it hashes them: they have to be still in its cache.
BLOCKS_AT_ONCE = 2
# Stretches that are read at once: as many buffers as the system takes in one request.
STRETCHES_AT_ONCE = 1024


class NeededBlocks(NamedTuple):
    """Stretches inside blocks, each once, from which copies of one form are made.

    Attributes:
        copies: The copies, in the order of the stretches.
        first: int64 per copy, the first byte of its stretch in its item.
        number: int64 per copy, the number of its stretch.
        blocks: The stretches in the order of the files. Their addresses are relative to the beginning of all of them.
    """

    copies: AlikeCopies
    first: np.ndarray
    number: np.ndarray
    blocks: Stretches


class ReadPlanner(ABC):
    """The base of readers of items.

    Attributes:
        file: int64 per item, a number of its file.
        byte_offset: int64 per item, its first byte in the file.
        byte_length: int64 per item, its bytes.
        block_bytes: Bytes of a block that has a checksum.
        needs_blocks: Whether nothing but whole blocks may be read.
    """

    def __init__(
        self, file: np.ndarray, byte_offset: np.ndarray, byte_length: np.ndarray, block_bytes: int, needs_blocks: bool
    ) -> None:
        """Take the attributes."""
        self.file, self.byte_offset, self.byte_length = file, byte_offset, byte_length
        self.block_bytes, self.needs_blocks = block_bytes, needs_blocks

    def read_stretches(self, stretches: Stretches) -> None:
        """Fill memory with stretches of items, in the order of the files.

        Raises:
            CorruptCheckpointError: No copy is as it was written.
            OSError: The only copy cannot be read.
        """
        parts = stretches.cut_at(self.block_bytes)
        order = lexsort_packed([self.file[parts.item], self.byte_offset[parts.item] + parts.position], len(parts))
        self.read_parts(parts.take(order))

    def read_alike(self, copies: AlikeCopies) -> None:
        """Carry out strided copies of one form, in the order of the files.

        Raises:
            CorruptCheckpointError: A block differs from its checksum, or a file ends early.
            OSError: The file system failed.
        """
        if not copies.outer:
            self._read_out_of_blocks(copies, whole=False)
        elif not self.is_scattered(copies):
            remote = self.are_remote(copies) & self.is_scattered(copies, remote=True)
            self._read_out_of_blocks(copies.take(remote), whole=True)
            self.read_runs(copies.take(~remote))
        elif self.needs_blocks:
            self._read_out_of_blocks(copies, whole=True)
        elif copies.reach_bytes > row_files.MAP_SPAN_BYTES:
            self.read_each(copies)
        else:
            rest = self.copy_mapped(copies)
            self._read_out_of_blocks(rest, whole=True)

    def read_runs(self, copies: AlikeCopies) -> None:
        """Carry out copies of one form whose runs are long enough for requests of their own; errors likewise."""
        if copies.is_straight:
            for runs in copies.runs():
                self.read_stretches(runs)
        else:
            self.read_each(copies)

    def is_scattered(self, copies: AlikeCopies, remote: bool = False) -> bool:
        """Return whether copies have runs that are too short for requests of their own."""
        # A file without a memory map is remote: a request takes as long as some MiB of its answer.
        return copies.outer > 0 and copies.run_bytes < (self.block_bytes if remote else MIN_PREAD_BYTES)

    def _read_out_of_blocks(self, copies: AlikeCopies, whole: bool) -> None:
        """Carry out copies out of blocks that are read, and verified, many at once.

        ``whole``: the blocks are read whole; else just the bytes of the copies, which are contiguous there.
        """
        size = self.block_bytes
        first = copies.position + copies.low_bytes
        end = first + copies.reach_bytes
        inside = first // size == (end - 1) // size
        self.read_across_blocks(copies.take(~inside), whole)
        copies, first, end = copies.take(inside), first[inside], end[inside]
        if whole or self.needs_blocks:
            first = first // size * size
            end = np.minimum(first + size, self.byte_length[copies.item])
        order = lexsort_packed([self.file[copies.item], self.byte_offset[copies.item] + first], len(first))
        copies, first, end = copies.take(order), first[order], end[order]
        new = np.ones(len(first), dtype=bool)
        new[1:] = (copies.item[1:] != copies.item[:-1]) | (first[1:] != first[:-1]) | (end[1:] != end[:-1])
        length = (end - first)[new]
        blocks = Stretches(copies.item[new], first[new], length, np.cumsum(length) - length)
        self.copy_from_blocks(NeededBlocks(copies, first, np.cumsum(new) - 1, blocks))

    def divide(self, rows: np.ndarray, parts: Stretches) -> tuple[list[int], tuple[np.ndarray, ...]]:
        """Divide stretches that are each of one block into portions. A portion is of one file; one thread reads it.

        Args:
            rows: int64 per stretch, the row that it is read from.
            parts: The stretches, in the order of the files.

        Returns:
            The first stretch of each portion, and the number of stretches; and the columns of the stretches' ``Runs``.
            A portion is as many requests as it has runs.
        """
        file, offset = self.file[rows], self.byte_offset[rows] + parts.position
        end, new_file = offset + parts.length, file[1:] != file[:-1]
        first = np.flatnonzero(np.concatenate([[True], new_file | (offset[1:] != end[:-1]), [True]]))
        files = np.flatnonzero(new_file) + 1
        edges = portion_edges(parts.length, BLOCKS_AT_ONCE * self.block_bytes, STRETCHES_AT_ONCE, files)
        return edges, (first, file, offset, end)

    @abstractmethod
    def read_parts(self, parts: Stretches) -> None:
        """Read stretches that are each of one block, in the order of the files."""

    @abstractmethod
    def copy_from_blocks(self, needed: NeededBlocks) -> None:
        """Read stretches inside blocks, and carry out copies from them."""

    @abstractmethod
    def read_across_blocks(self, copies: AlikeCopies, whole: bool) -> None:
        """Carry out copies that each span several blocks; ``whole``: the blocks are read whole."""

    @abstractmethod
    def copy_mapped(self, copies: AlikeCopies) -> AlikeCopies:
        """Copy short scattered runs out of memory maps. Return the copies that need verified blocks instead."""

    @abstractmethod
    def are_remote(self, copies: AlikeCopies) -> np.ndarray:
        """Return bool per copy: whether its file has no memory map."""

    @abstractmethod
    def read_each(self, copies: AlikeCopies) -> None:
        """Carry out copies one by one."""


def portion_edges(length: np.ndarray, most_bytes: int, most: int, breaks: np.ndarray) -> list[int]:
    """Return the first entry of each portion, and the number of entries.

    A portion has at most so many bytes, or one entry, and at most so many entries. A new one begins at each of some
    entries, the ``breaks``, which rise.
    """
    count, ends = len(length), np.cumsum(length)
    number = np.arange(count)
    after = np.searchsorted(ends, ends - length + most_bytes, side="right")
    stop = np.append(breaks, count)[np.searchsorted(breaks, number, side="right")]
    after = np.minimum(np.clip(after, number + 1, number + most), stop).tolist()
    edges = [0]
    while edges[-1] < count:
        edges.append(after[edges[-1]])
    return edges


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
