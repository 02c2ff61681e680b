"""Count the requests to an object store that a load makes for pieces, without the store.

Tested in tests/engine/test_object_reads.py.
"""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.engine.announcing import Ranges, ranges_read
from paddle_flexckpt.engine.filling import Filling
from paddle_flexckpt.media.read_ahead import Budget, Wanted, plan_requests
from paddle_flexckpt.planning import Pieces


def count_requests(
    filling: Filling, pieces: Pieces, source: Catalog, place: np.ndarray, ranks: int, block_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many requests ranks make, and for how many bytes of tensors; int64 per rank.

    What is read is announced, so that near neighbours share a request, with as many under way as by default. Opening a
    file is a request too.

    Args:
        filling: Of the rows that are filled.
        pieces: What is read, in the order in which rows are filled.
        source: What the files hold.
        place: int64 per row that is filled: which of the ranks fills it; -1 - p for scratch of the place p.
        ranks: Number of ranks.
        block_bytes: Of a block with a checksum.
    """
    requests, nbytes = np.zeros((2, ranks), dtype=np.int64)
    address = np.where(place >= 0, 0, -1)
    by = np.where(place >= 0, place, -1 - place)[pieces.target]
    order = np.argsort(by, kind="stable")
    edges = np.searchsorted(by[order], np.arange(ranks + 1)).tolist()
    for rank, (begin_of, end_of) in enumerate(zip(edges, edges[1:])):
        own = pieces.take(order[begin_of:end_of])
        found: list[Ranges] = []
        for first, last in filling.portions(own.target) if len(own) else ():
            part = own.take(slice(first, last))
            found += ranges_read(part, address[part.target], source, filling.catalog, block_bytes)
        if not found:
            continue
        rows, begin, end = (np.concatenate(column) for column in zip(*found))
        files, number = np.unique(source.file[rows], return_inverse=True)
        offset = source.byte_offset[rows]
        made = plan_requests(Wanted(number.reshape(-1), offset + begin, offset + end), Budget())
        requests[rank] = len(files) + len(made.file)
        nbytes[rank] = (made.end - made.begin).sum()
    return requests, nbytes
