"""Count the requests of loads to an object store, without the store: for many ranks at once.

Tested in tests/transfer/test_object_reads.py.
"""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.media.read_ahead import Wanted, plan_for_readers
from paddle_flexckpt.planning import Pieces
from paddle_flexckpt.transfer.announcing import ranges_of
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.piece_columns import PieceColumns
from paddle_flexckpt.transfer.read_counts import sums_of


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
        block_bytes: Of a block with a checksum.
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
        block_bytes: Of a block with a checksum.
    """
    piece, begin, end = ranges_of(pieces, source, block_bytes)
    row, of = pieces.source[piece], reader[piece]
    file, offset = source.file[row].astype(np.int64), source.byte_offset[row]
    made, whose = plan_for_readers(Wanted(file, offset + begin, offset + end), of)
    opened = np.unique(of * len(source.files) + file) // max(len(source.files), 1)
    requests = np.bincount(opened, minlength=ranks) + np.bincount(whose, minlength=ranks)
    return requests, sums_of(whose, made.end - made.begin, ranks)
