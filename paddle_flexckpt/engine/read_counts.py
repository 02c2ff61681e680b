"""Count the requests of FileReaders for pieces, without files or memory: for many ranks at once, in columns.

The rules are those of :class:`~paddle_flexckpt.native.reader.FileReader` on a file system, with ``verify="read"`` and
without damage; tests compare with its counters. Tested in tests/engine/test_read_counts.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra import Columns, StridedCopy
from paddle_flexckpt.algebra.rows import distinct, group_rows, lexsort_packed
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.engine.piece_columns import are_contiguous, group_forms
from paddle_flexckpt.native.block_reader import BLOCKS_AT_ONCE, STRETCHES_AT_ONCE
from paddle_flexckpt.native.read_threads import MOST_THREADS
from paddle_flexckpt.native.reader import MIN_PREAD_BYTES
from paddle_flexckpt.native.row_files import MAP_SPAN_BYTES
from paddle_flexckpt.native.stretches import RUNS_AT_ONCE, reach
from paddle_flexckpt.planning import Pieces

# From this number of whole blocks in the middle of a stretch on, each further pair is one more request, whatever comes
# before.
_TOLD_BLOCKS = 3 * BLOCKS_AT_ONCE
# Up to this number of readers, portions are cut one reader after the other.
_FEW_READERS = 8


@dataclass(frozen=True, eq=False)
class ReadCounts:
    """The reads of ranks; int64 per rank.

    Attributes:
        bytes_needed: Bytes of the pieces.
        bytes_read: Bytes read from files.
        reads: Requests, and copies out of a memory map.
        files: Files that are opened.
        buffer_bytes: Memory of read buffers, with the most threads of a reader.
    """

    bytes_needed: np.ndarray
    bytes_read: np.ndarray
    reads: np.ndarray
    files: np.ndarray
    buffer_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class _Stretches(Columns):
    """Contiguous bytes of items, by the readers that read them together; int64 ``[n]`` each."""

    reader: np.ndarray
    item: np.ndarray
    position: np.ndarray
    length: np.ndarray


def count_reads(
    pieces: Pieces, source: Catalog, target: Catalog, place: np.ndarray, ranks: int, block_bytes: int
) -> ReadCounts:
    """Count the reads of ranks that fill contiguous targets in host memory, and scratch.

    Args:
        pieces: The pieces to read.
        source: The catalog of the files.
        target: The rows to fill. Rows of a place of -1 - p are scratch of the place p.
        place: int64 per row of the targets: the place of its rank.
        ranks: Number of ranks.
        block_bytes: Of a block with a checksum.
    """
    pieces = pieces.take(pieces.size > 0)
    is_scratch = place[pieces.target] < 0
    rank = np.where(is_scratch, -1 - place[pieces.target], place[pieces.target])
    names = {name: i for i, name in enumerate(source.dtypes)}
    kind = source.dtype[pieces.source].astype(np.int64)
    same = kind == np.asarray([names.get(name, -1) for name in target.dtypes])[target.dtype[pieces.target]]
    itemsize = source.itemsize[pieces.source]
    size = pieces.size * itemsize
    needed = sums_of(rank, size, ranks)
    counter = _Counter(source, ranks, block_bytes, needed)
    direct = same & ~is_scratch
    position = pieces.source_base * itemsize
    plain = direct & are_contiguous(pieces.extents, pieces.source_strides)
    plain &= are_contiguous(pieces.extents, pieces.target_strides)
    counter.together(_Stretches(rank[plain], pieces.source[plain], position[plain], size[plain]))
    solid = same & is_scratch & are_contiguous(pieces.extents, pieces.source_strides)
    solid &= are_contiguous(pieces.extents, pieces.target_strides)
    counter.blocks(rank[solid], position[solid], size[solid], True)
    rest = np.flatnonzero(~plain & ~solid)
    strided = pieces.take(rest)
    own = [direct[rest].astype(np.int8), same[rest].astype(np.int8), itemsize[rest]]
    columns = [*own, *strided.extents.T, *strided.source_strides.T, *strided.target_strides.T]
    axes = pieces.extents.shape[1]
    for form, members in group_forms(columns):
        rows = rest[members]
        extents, from_strides, to_strides = (tuple(form[3 + part * axes : 3 + (part + 1) * axes]) for part in range(3))
        copy = StridedCopy(extents, 0, from_strides, 0, to_strides).simplified()
        alike = _Stretches(rank[rows], pieces.source[rows], position[rows], size[rows])
        (counter.columns if form[0] else counter.one_by_one)(copy, form[2], alike, bool(form[1]))
    opened = distinct(rank * len(source.files) + source.file[pieces.source])
    files = np.bincount(opened // max(len(source.files), 1), minlength=ranks)
    buffers = block_bytes * (1 + counter.through_blocks * MOST_THREADS * BLOCKS_AT_ONCE)
    return ReadCounts(needed, counter.bytes_read, counter.reads, files, buffers)


def sums_of(rank: np.ndarray, values: np.ndarray, ranks: int) -> np.ndarray:
    """Return int64 per rank, exact sums."""
    found = np.zeros(ranks, dtype=np.int64)
    np.add.at(found, rank, values)
    return found


def bytes_by_source(pieces: Pieces, source: Catalog, place: np.ndarray, ranks: int) -> list[dict[int, int]]:
    """Return bytes of pieces by the rank that saved them, for each rank; arguments as of :func:`count_reads`."""
    target = place[pieces.target]
    target = np.where(target < 0, -1 - target, target)
    count = int(source.rank.max(initial=0)) + 1
    pair, inverse = np.unique(target * count + source.rank[pieces.source], return_inverse=True)
    size = sums_of(inverse, pieces.size * source.itemsize[pieces.source], len(pair))
    found: list[dict[int, int]] = [{} for _ in range(ranks)]
    for each, nbytes in zip(pair.tolist(), size.tolist()):
        if nbytes:
            found[each // count][each % count] = nbytes
    return found


class _Counter:
    """The sums of reads, form by form."""

    def __init__(self, source: Catalog, ranks: int, block_bytes: int, needed: np.ndarray) -> None:
        self._source, self._ranks, self._block = source, ranks, block_bytes
        self._length = source.byte_length
        self.bytes_read, self.reads = needed.copy(), np.zeros(ranks, dtype=np.int64)
        self.through_blocks = np.zeros(ranks, dtype=np.int64)

    def _add(self, rank: np.ndarray, reads: np.ndarray | int) -> None:
        self.reads += sums_of(rank, np.broadcast_to(np.asarray(reads, dtype=np.int64), rank.shape), self._ranks)

    def columns(self, copy: StridedCopy, itemsize: int, alike: _Stretches, same: bool) -> None:
        """Count copies of one form as ``read_alike`` makes them, each rank's together."""
        tail, axes = copy.source_tail(), len(copy.extents)
        run_bytes = math.prod(copy.extents[axes - tail :]) * itemsize
        if tail == axes:
            first, last = alike.position // self._block, (alike.position + alike.length - 1) // self._block
            inside = first == last
            self._one_by_one(copy, itemsize, alike.take(~inside), False)
            self._once(alike.take(inside))
            self.through_blocks[alike.reader[inside]] = 1
        elif run_bytes < MIN_PREAD_BYTES:
            low, high = reach(copy.extents, copy.source_strides)
            if (high - low) * itemsize > MAP_SPAN_BYTES:
                self._one_by_one(copy, itemsize, alike, False)
            else:
                self._add(alike.reader, 1)
        elif tail == 1 and copy.target_strides[-1] == 1:
            self._runs(copy, itemsize, alike)
        else:
            self._one_by_one(copy, itemsize, alike, False)

    def one_by_one(self, copy: StridedCopy, itemsize: int, alike: _Stretches, same: bool) -> None:
        """Count copies of one form as ``read`` makes each of them."""
        tail = copy.source_tail()
        inner = StridedCopy(
            copy.extents[len(copy.extents) - tail :],
            0,
            copy.source_strides[len(copy.extents) - tail :],
            0,
            copy.target_strides[len(copy.extents) - tail :],
        )
        self._one_by_one(copy, itemsize, alike, same and inner.is_contiguous()[1])

    def _one_by_one(self, copy: StridedCopy, itemsize: int, alike: _Stretches, straight: bool) -> None:
        tail, axes = copy.source_tail(), len(copy.extents)
        run_bytes = math.prod(copy.extents[axes - tail :]) * itemsize
        if tail < axes and run_bytes < MIN_PREAD_BYTES:
            step = max(1, MAP_SPAN_BYTES // max(1, copy.source_strides[0] * itemsize))
            self._add(alike.reader, -(-copy.extents[0] // step))
            return
        each = copy.size * itemsize // max(run_bytes, 1)
        for first in range(0, each * len(alike), RUNS_AT_ONCE):
            reader, begin = self._run_begins(copy, itemsize, alike, first, each, tail)[:2]
            self.blocks(reader, begin, run_bytes, straight)

    def blocks(self, reader: np.ndarray, begin: np.ndarray, length: np.ndarray | int, straight: bool) -> None:
        """Count runs that are read alone, block by block; ``straight``: whole blocks go to memory, some at once."""
        end = begin + length
        blocks = -(-end // self._block) - begin // self._block
        if straight:
            head = -(-begin // self._block) * self._block
            whole = np.maximum(end - head, 0) // self._block
            blocks = np.where(whole > 1, blocks - whole + -(-whole // BLOCKS_AT_ONCE), blocks)
        self._add(reader, blocks)

    def _run_begins(
        self, copy: StridedCopy, itemsize: int, alike: _Stretches, first: int, each: int, tail: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return reader, first byte and member of some runs of copies of one form."""
        number = np.arange(first, min(first + RUNS_AT_ONCE, each * len(alike)))
        member, place = number // each, np.zeros(len(number), dtype=np.int64)
        outer = len(copy.extents) - tail
        if outer:
            for index, stride in zip(np.unravel_index(number % each, copy.extents[:outer]), copy.source_strides):
                place += index * (stride * itemsize)
        return alike.reader[member], alike.position[member] + place, member

    def _runs(self, copy: StridedCopy, itemsize: int, alike: _Stretches) -> None:
        """Count the runs of copies, each rank's read together, but only so many of them."""
        order = np.argsort(alike.reader, kind="stable")
        alike, each = alike.take(order), copy.size // copy.extents[-1]
        edges = [*np.flatnonzero(np.diff(alike.reader, prepend=-1)).tolist(), len(alike)]
        some: list[_Stretches] = []
        count = groups = 0
        for begin, end in zip(edges, edges[1:]):
            members = alike.take(slice(begin, end))
            for first in range(0, each * (end - begin), RUNS_AT_ONCE):
                reader, position, member = self._run_begins(copy, itemsize, members, first, each, 1)
                length = np.full(len(reader), copy.extents[-1] * itemsize, dtype=np.int64)
                # What is not read together with what comes before counts as another reader.
                some.append(_Stretches(reader + groups * self._ranks, members.item[member], position, length))
                count, groups = count + len(reader), groups + 1
                if count >= RUNS_AT_ONCE:
                    self.together(_Stretches.concat(some))
                    some, count, groups = [], 0, 0
        if some:
            self.together(_Stretches.concat(some))

    def _once(self, blocks: _Stretches) -> None:
        """Count stretches inside blocks, those that are the same read once, each rank's together."""
        columns = [blocks.reader, blocks.item, blocks.position, blocks.length]
        order, start = group_rows(columns, len(blocks))
        once = blocks.take(order[start[:-1]])
        self.bytes_read += sums_of(once.reader, once.length, self._ranks)
        self.bytes_read -= sums_of(blocks.reader, blocks.length, self._ranks)
        self.together(once)

    def together(self, stretches: _Stretches) -> None:
        """Count stretches as ``read_stretches`` reads them, each reader's together."""
        if not len(stretches):
            return
        size, source = self._block, self._source
        offset = source.byte_offset[stretches.item] + stretches.position
        file = source.file[stretches.item].astype(np.int64)
        order = lexsort_packed([stretches.reader, file, offset], len(offset))
        reader, file, offset = stretches.reader[order], file[order], offset[order]
        position, length = stretches.position[order], stretches.length[order]
        near = (reader[1:] == reader[:-1]) & (file[1:] == file[:-1])
        end = offset + length
        overlap = bool((near & (offset[1:] < end[:-1])).any())
        joined = np.append(False, near & (offset[1:] == end[:-1]))
        first, count = position // size, -(-(position + length) // size) - position // size
        whole = (position + length) // size - -(-position // size)
        # Blocks in the middle are counted, not listed; where stretches overlap, they are read between each other.
        pairs = np.zeros_like(whole) if overlap else np.maximum(whole - _TOLD_BLOCKS, 0) // BLOCKS_AT_ONCE
        self._add(reader % self._ranks, pairs)
        length, count = length - pairs * (BLOCKS_AT_ONCE * size), count - pairs * BLOCKS_AT_ONCE
        part = np.repeat(np.arange(len(count)), count)
        number = np.arange(len(part)) - np.repeat(np.cumsum(count) - count - first, count)
        begin = np.maximum(position[part], number * size)
        lengths = np.minimum((position + length)[part], (number + 1) * size) - begin
        is_new = np.ones(len(part), dtype=bool)
        is_new[1:] = (part[1:] != part[:-1]) & ~joined[part[1:]]
        reader = reader[part]
        if overlap:
            at = offset[part] + begin - position[part]
            order = lexsort_packed([reader, file[part], at], len(at))
            reader, lengths, at, of = reader[order], lengths[order], at[order], file[part][order]
            is_new[1:] = (reader[1:] != reader[:-1]) | (of[1:] != of[:-1]) | (at[1:] != (at + lengths)[:-1])
        is_new[_portion_starts(reader, lengths, BLOCKS_AT_ONCE * size)] = True
        self._add(reader[is_new] % self._ranks, 1)


def _portion_starts(reader: np.ndarray, length: np.ndarray, most_bytes: int) -> np.ndarray:
    """Return the first of the stretches of each portion, as :meth:`Stretches.edges` cuts those of each reader."""
    ends = np.cumsum(length)

    def following(at: np.ndarray, stop: np.ndarray) -> np.ndarray:
        last = np.searchsorted(ends, ends[at] - length[at] + most_bytes, side="right")
        return np.minimum(np.minimum(np.maximum(last, at + 1), at + STRETCHES_AT_ONCE), stop)

    edges = np.flatnonzero(np.diff(reader, prepend=-1, append=-1))
    at, stop = edges[:-1], edges[1:]
    starts = []
    # All readers go on together while there are many; then each by itself.
    while len(at) > _FEW_READERS:
        starts.append(at)
        at = following(at, stop)
        at, stop = at[at < stop], stop[at < stop]
    for first, end in zip(at.tolist(), stop.tolist()):
        place, found, steps = first, [], following(np.arange(first, end), np.asarray(end)).tolist()
        while place < end:
            found.append(place)
            place = steps[place - first]
        starts.append(np.asarray(found))
    return np.concatenate([at[:0], *starts])
