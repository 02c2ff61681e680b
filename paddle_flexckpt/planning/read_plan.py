"""The read plan: which pieces of which file each rank reads, and into which target.

Tested in tests/planning/test_matching.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """What one rank reads.

    Attributes:
        pieces: Sorted by target, then by file and position in it: a target that is staged can go as soon as it is
            full, and each file is read forwards as far as the targets' order is that of the save.
        needed_bytes: Bytes that the plan reads; as many as the targets have, since no element is read twice.
    """

    pieces: Pieces
    needed_bytes: int


def plan_read(
    matcher: ShardMatcher, target: Catalog, rows: np.ndarray | None = None, maps: BoxMaps | None = None
) -> ReadPlan:
    """Plan the reads that fill target shards from stored ones.

    Args:
        matcher: Matcher of the stored shards' catalog.
        target: This rank's targets.
        rows: The rows of ``target`` to fill; all by default.
        maps: What the keys that it defines are made of.
    """
    pieces = matcher.match(target, rows, maps)
    source = matcher.source
    itemsize = source.itemsize[pieces.source]
    position = source.byte_offset[pieces.source] + pieces.source_base * itemsize
    order = np.lexsort((position, source.file[pieces.source], pieces.target))
    return ReadPlan(pieces.take(order), int((pieces.size * itemsize).sum()))
