"""Reading: plans of reads carried out row by row, with the computation of what is not just moved."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.engine.plan import Work
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning import Pieces, ReadPlan, ShardMatcher, plan_read
from paddle_flexckpt.planning.matching import uncovered_targets


class RowMemory(Protocol):
    """The memory of a work's rows."""

    def advance(self, row: int) -> None:
        """Computes what can be computed when all rows before the given one have been filled."""

    def host_storage(self, row: int) -> np.ndarray:
        """Return the 1-D host memory in which a row is filled."""

    def piece_done(self, row: int) -> None:
        """Notes that a piece of a row has arrived."""


def plan_reads(matcher: ShardMatcher, work: Work, mapping: TensorMapping | None) -> ReadPlan:
    """The reads that fill a rank's targets and scratch.

    Args:
        matcher: Matcher of what is stored.
        work: What is to be filled.
        mapping: What the keys that it defines are made of.

    Raises:
        ValidationError: They would not fill all of it.
    """
    plan = plan_read(matcher, work.catalog, maps=None if mapping is None else mapping.maps)
    problems = uncovered_targets(plan.pieces, work.catalog, np.arange(len(work.catalog)), work.covered)
    if problems:
        raise ValidationError(problems)
    return plan


def read_pieces(reader: FileReader, pieces: Pieces, memory: RowMemory, computes: bool) -> None:
    """Reads pieces into their rows.

    Args:
        reader: Of the files.
        pieces: Sorted by target.
        memory: Of the rows.
        computes: Whether anything is computed from rows: what that needs has to be verified before.

    Raises:
        CorruptCheckpointError: The files are damaged.
    """
    # Rows of pieces that have been read and are not verified yet, each with what the reader had begun by then.
    arriving: deque[tuple[int, int]] = deque()

    def arrive() -> None:
        while arriving and arriving[0][1] <= reader.hashing_done:
            memory.piece_done(arriving.popleft()[0])

    for piece, copy in enumerate(pieces.copies()):
        row = int(pieces.target[piece])
        if computes:
            reader.wait_for_hashes()
            arrive()
            memory.advance(row)
        reader.read(int(pieces.source[piece]), copy, memory.host_storage(row))
        arriving.append((row, reader.hashing_begun))
        arrive()
    reader.wait_for_hashes()
    arrive()
