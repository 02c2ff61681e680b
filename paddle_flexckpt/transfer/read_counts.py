"""Count the requests of loads, without files or memory: for many ranks at once, in columns.

The reader's own planner finds the requests, as on a file system, with ``verify="read"`` and without damage. Tests
compare with the reader's counters, and with the log of an object store.

Tested in tests/transfer/test_read_counts.py and tests/transfer/test_object_reads.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra.rows import distinct
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.media.read_ahead import Wanted, plan_for_readers
from paddle_flexckpt.native.read_planner import BLOCKS_AT_ONCE, NeededBlocks, ReadPlanner, portion_edges
from paddle_flexckpt.native.row_files import MOST_THREADS, map_step
from paddle_flexckpt.native.stretches import RUNS_AT_ONCE, AlikeCopies, Stretches
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.transfer.announcing import ranges_of
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.piece_columns import PieceColumns, alike_copies, are_contiguous


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
        block_bytes: Bytes of a block with a checksum.
    """
    pieces = pieces.take(pieces.size > 0)
    by, rows, count = place[pieces.target], pieces.source, len(source.files)
    rank = np.where(by < 0, -1 - by, by)
    needed = sums_of(rank, pieces.size * source.itemsize[rows], ranks)
    # Each rank has items and files of its own, so that no request is for two.
    pairs, own = np.unique(rank * len(source) + rows, return_inverse=True)
    reader, row = np.divmod(pairs, max(len(source), 1))
    file, offset, length = source.file.astype(np.int64), source.byte_offset, source.byte_length
    files = reader * count + file[row]
    together = _Counter((files, offset[row], length[row]), reader, reader, ranks, block_bytes)
    columns = PieceColumns.of(pieces, source, target, np.where(by < 0, -1, 0))
    together.count_stretches(replace(columns.stretches, item=own[columns.rows[0]]))
    for copies, members in zip(columns.alike, columns.rows[1:]):
        together.read_alike(replace(copies, item=own[members]))
    # Each of the others is read alone.
    rest = np.flatnonzero(~columns.direct)
    row, number = rows[rest], np.arange(len(rest))
    alone = _Counter((number, offset[row], length[row]), rank[rest], number, ranks, block_bytes)
    stored, wanted = (np.asarray(each.dtypes, dtype=object) for each in (source, target))
    alone.count_alone(pieces.take(rest), source, stored[source.dtype[row]] == wanted[target.dtype[pieces.target[rest]]])
    opened = np.bincount(distinct(files) // max(count, 1), minlength=ranks)
    buffers = block_bytes * (1 + together.through_blocks * MOST_THREADS * BLOCKS_AT_ONCE)
    return ReadCounts(needed, together.nbytes + alone.nbytes, together.reads + alone.reads, opened, buffers)


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


class _Counter(ReadPlanner):
    """The planner of many readers, whose reads are counted. No two readers have a file in common.

    Attributes:
        reads: int64 per rank, requests.
        nbytes: int64 per rank, their bytes.
        through_blocks: int64 per rank, 1 if it copies out of blocks.
    """

    def __init__(
        self,
        items: tuple[np.ndarray, np.ndarray, np.ndarray],
        rank: np.ndarray,
        reader: np.ndarray,
        ranks: int,
        block_bytes: int,
    ) -> None:
        """Take the columns of the items, the rank of each, and a number of its reader."""
        super().__init__(*items, block_bytes, needs_blocks=False)
        self._rank, self._reader = rank, reader
        self.reads, self.nbytes, self.through_blocks = np.zeros((3, ranks), dtype=np.int64)

    def count_stretches(self, stretches: Stretches) -> None:
        """Count stretches, each reader's together."""
        for some in self._some_readers(stretches.item, stretches.count_parts(self.block_bytes)):
            self.read_stretches(stretches.take(some))

    def count_alone(self, pieces: Pieces, source: Catalog, same: np.ndarray) -> None:
        """Count pieces that are read one by one, the items; ``same``: bool, whether the target has the same dtype."""
        plain = are_contiguous(pieces.extents, pieces.source_strides)
        straight = same & plain & are_contiguous(pieces.extents, pieces.target_strides)
        nowhere, width = np.zeros(len(pieces), dtype=np.int64), source.itemsize[pieces.source]
        stretches = Stretches(np.arange(len(pieces)), pieces.source_base * width, pieces.size * width, nowhere)
        self.count_stretches(stretches.take(straight))
        self._count_blocks(stretches.take(plain & ~straight))
        for is_same in (False, True):
            numbers = np.flatnonzero(~plain & (same == is_same))
            for copies, members in alike_copies(pieces.take(numbers), source, nowhere[numbers]):
                self._count_each(replace(copies, item=numbers[members]), is_same and copies.is_straight)

    def _some_readers(self, items: np.ndarray, parts: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the numbers of reads, all of some readers, with about ``RUNS_AT_ONCE`` parts: bounds memory."""
        reader = self._reader[items]
        order = np.argsort(reader, kind="stable")
        start = np.flatnonzero(np.diff(reader[order], prepend=-1))
        edges = portion_edges(np.add.reduceat(parts[order], start), RUNS_AT_ONCE, len(items), start[:0])
        bounds = np.append(start, len(items))[edges].tolist()
        for first, last in zip(bounds, bounds[1:]):
            yield order[first:last]

    def _add(self, items: np.ndarray, reads: np.ndarray | int, nbytes: np.ndarray | int) -> None:
        rank = self._rank[items]
        np.add.at(self.reads, rank, reads)
        np.add.at(self.nbytes, rank, nbytes)

    def _count_each(self, copies: AlikeCopies, straight: bool) -> None:
        if self.is_scattered(copies):
            steps = -(-copies.copy.extents[0] // map_step(copies.copy, copies.dtype.itemsize))
            self._add(copies.item, steps, copies.nbytes)
            return
        for some in self._some_readers(copies.item, np.full(len(copies), copies.count_runs)):
            for runs in copies.take(some).runs():
                (self.read_stretches if straight else self._count_blocks)(runs)

    def _count_blocks(self, stretches: Stretches) -> None:
        self._add(stretches.item, stretches.count_parts(self.block_bytes), stretches.length)

    def read_runs(self, copies: AlikeCopies) -> None:
        """Count the requests for runs, each reader's together."""
        for some in self._some_readers(copies.item, np.full(len(copies), copies.count_runs)):
            super().read_runs(copies.take(some))

    def read_parts(self, parts: Stretches) -> None:
        """Count the requests for stretches that are each of one block."""
        edges, (first, *_) = self.divide(parts.item, parts)
        rank, is_first = self._rank[parts.item], np.zeros(len(parts), dtype=bool)
        is_first[edges[:-1]] = is_first[first[:-1]] = True
        self.reads += np.bincount(rank[is_first], minlength=len(self.reads))
        np.add.at(self.nbytes, rank, parts.length)

    def copy_from_blocks(self, needed: NeededBlocks) -> None:
        """Count the requests for stretches inside blocks."""
        self.through_blocks[self._rank[needed.copies.item]] = 1
        if len(needed.blocks):
            self.read_parts(needed.blocks)

    def read_across_blocks(self, copies: AlikeCopies, whole: bool) -> None:
        """Count the requests of copies that each span several blocks."""
        self.read_each(copies)

    def copy_mapped(self, copies: AlikeCopies) -> AlikeCopies:
        """Count copies out of memory maps; there are no others."""
        self._add(copies.item, 1, copies.nbytes)
        return copies.take(slice(0))

    def are_remote(self, copies: AlikeCopies) -> np.ndarray:
        """Return bool per copy: that its file has a memory map."""
        return np.zeros(len(copies), dtype=bool)

    def read_each(self, copies: AlikeCopies) -> None:
        """Count the requests of copies that are carried out one by one."""
        self._count_each(copies, straight=False)


def count_requests(
    filling: Filling, pieces: Pieces, source: Catalog, place: np.ndarray, ranks: int, block_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many requests ranks make, and for how many bytes of tensors; int64 per rank.

    Args:
        filling: The memory of the rows to fill.
        pieces: The pieces to read, in the order in which rows are filled.
        source: The catalog of the files.
        place: int64 per row to fill: the place of its rank; -1 - p for scratch of the place p.
        ranks: Number of ranks.
        block_bytes: Bytes of a block with a checksum.
    """
    by = np.where(place >= 0, place, -1 - place)[pieces.target]
    order = np.argsort(by, kind="stable")
    pieces, by = pieces.take(order), by[order]
    portion = np.zeros(len(pieces), dtype=np.int64)
    for number, (first, last) in enumerate(filling.portions(pieces.target) if len(pieces) else ()):
        portion[first:last] = number
    # Each portion of a rank in the order of `PieceColumns.turns`: a column in that of the files, the rest as it comes.
    columns = PieceColumns.of(pieces, source, filling.catalog, np.where(place >= 0, 0, -1)[pieces.target])
    begin = source.byte_offset[pieces.source] + pieces.source_base * source.itemsize[pieces.source]
    begin, file = np.where(columns.direct, begin, 0), np.where(columns.direct, source.file[pieces.source], 0)
    turns = np.lexsort((begin, file, columns.column, portion, by))
    return count_announced(pieces.take(turns), source, by[turns], ranks, block_bytes)


def count_announced(
    pieces: Pieces, source: Catalog, reader: np.ndarray, ranks: int, block_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many requests ranks make, and for how many bytes of tensors; int64 per rank.

    What is read is announced, so that near neighbours share a request, with as many under way as by default. Opening a
    file is a request too.

    Args:
        pieces: What is read, one rank's after the other's, each in the order in which it is read.
        source: What the files hold.
        reader: int64 per piece, which of the ranks reads it; rising.
        ranks: Number of ranks.
        block_bytes: Bytes of a block with a checksum.
    """
    piece, begin, end = ranges_of(pieces, source, block_bytes)
    row, of = pieces.source[piece], reader[piece]
    # Blocks are fetched whole, to be verified.
    begin = begin // block_bytes * block_bytes
    end = np.minimum(-(-end // block_bytes) * block_bytes, source.byte_length[row])
    file, offset = source.file[row].astype(np.int64), source.byte_offset[row]
    made, whose = plan_for_readers(Wanted(file, offset + begin, offset + end), of)
    opened = np.unique(of * len(source.files) + file) // max(len(source.files), 1)
    requests = np.bincount(opened, minlength=ranks) + np.bincount(whose, minlength=ranks)
    return requests, sums_of(whose, made.end - made.begin, ranks)
