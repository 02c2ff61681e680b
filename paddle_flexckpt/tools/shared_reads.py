"""Count the reads and messages of ranks where one of them reads for all, without the ranks.

Tested in tests/tools/test_rehearsal.py and tests/distributed/test_rehearsal.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.algebra.rows import group_rows
from paddle_flexckpt.catalog import Catalog, group_replicas
from paddle_flexckpt.planning import Pieces, ShardMatcher
from paddle_flexckpt.planning.readers import choose_readers, find_wanted, match_sections, reads_of_rows
from paddle_flexckpt.transfer.read_counts import count_announced, count_reads, sums_of


@dataclass(frozen=True, eq=False)
class SharedReads:
    """The reads and messages of ranks; int64 per rank.

    Attributes:
        bytes_read: Bytes read from files.
        reads: Requests, and copies out of a memory map.
        bytes_received: Bytes from other ranks.
        bytes_sent: Bytes to other ranks.
        object_requests: Requests to an object store; 0 if they are not counted.
        object_bytes: Bytes of these requests.
    """

    bytes_read: np.ndarray
    reads: np.ndarray
    bytes_received: np.ndarray
    bytes_sent: np.ndarray
    object_requests: np.ndarray
    object_bytes: np.ndarray


def count_shared_reads(
    stored: Catalog, targets: Catalog, maps: BoxMaps | None, ranks: int, block_bytes: int, object_store: bool = False
) -> SharedReads:
    """Count the reads and messages of ranks with ``comm_method="cooperative"``, where all see all files.

    Args:
        stored: The catalog of the files.
        targets: The rows that all ranks fill, scratch included; ranks count from 0.
        maps: The box maps of keys that statements make.
        ranks: Number of ranks.
        block_bytes: Of a block with a checksum.
        object_store: Whether to count requests to an object store too.
    """
    groups = group_replicas(stored)
    matched = match_sections(stored, groups, targets, ranks, block_bytes, maps, ranks)
    sections, rows, alike, coverage, pieces = matched
    wanted = find_wanted(pieces, targets.rank.astype(np.int64), ranks)
    reader = choose_readers(wanted, rows.byte_length, ranks, None, True)[1]
    if coverage.overlaps:  # a rank's own reads come first
        own = replace(rows, rank=np.where(reader < 0, ranks, reader).astype(np.int32))
        pieces = ShardMatcher(own, alike, coverage).match(targets, maps=maps)
    place, by = targets.rank[pieces.target].astype(np.int64), reader[pieces.source]
    moved = _each_once(pieces.take(by != place), place[by != place])
    size = moved[0].size * rows.itemsize[moved[0].source]
    read = reads_of_rows([pieces])
    by, base = reader[read.source], read.source_base + sections.start[read.source]
    read = replace(read, source=groups.first[sections.group[read.source]], source_base=base)
    counts = count_reads(read, stored, rows, -1 - reader, ranks, block_bytes)
    requests = (np.zeros(ranks, dtype=np.int64),) * 2
    if object_store:
        # A rank announces its reads round by round, and the rounds' rows rise.
        order = np.argsort(by, kind="stable")
        requests = count_announced(read.take(order), stored, by[order], ranks, block_bytes)
    received, sent = sums_of(moved[1], size, ranks), sums_of(reader[moved[0].source], size, ranks)
    return SharedReads(counts.bytes_read, counts.reads, received, sent, *requests)


def _each_once(pieces: Pieces, place: np.ndarray) -> tuple[Pieces, np.ndarray]:
    """Return pieces and the ranks that want them, without pieces of the same elements for the same rank."""
    columns = [place, pieces.source, pieces.source_base, *pieces.extents.T, *pieces.source_strides.T]
    order, start = group_rows(columns, len(pieces))
    first = order[start[:-1]]
    return pieces.take(first), place[first]
