"""Files as a source: plan the reads of what a rank fills, and carry them out row by row.

Tested in tests/engine/test_whole_tensors.py and tests/live/test_policies.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.engine.filling import Filling
from paddle_flexckpt.engine.options import LoadOptions
from paddle_flexckpt.engine.plan import FillPlan
from paddle_flexckpt.engine.transfer import Source, Task
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning import Pieces, ReadPlan, ShardMatcher, plan_read
from paddle_flexckpt.planning.matching import uncovered_targets


class Files(Source):
    """Read a checkpoint, of which this rank sees all files; each rank reads just what its targets need."""

    def __init__(self, location: Location, options: LoadOptions) -> None:
        """Open nothing yet."""
        super().__init__()
        self._location, self._options = location, options

    def open(self) -> dict[str, str]:
        """Take the checkpoint's lock and read its manifest; return which checkpoint it is."""
        self._directory = SourceDirectory(self._location)
        self.path = self._directory.path
        with reading(self.path):
            manifest = self.closing.enter_context(LockedManifest(self._directory, self._options.unique_id))
        self._manifest, self.catalog, self.unique_id = manifest, manifest.catalog, manifest.unique_id
        return {"checkpoint": f"id {manifest.unique_id} ({manifest.save_token})"}

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Plan the reads, and check that the files look right."""
        self._plan = plan_reads(ShardMatcher(self.catalog), task.plan, task.mapping)
        reader = FileReader(self._directory.backend, self._manifest, self._options.verify, self._options.use_replicas)
        self._reader = self.closing.enter_context(reader)
        with reading(self.path):
            self._reader.check_files(self._plan.pieces.source)
        return ()

    def move(self, task: Task) -> dict[str, Any]:
        """Read every piece into its target, and compute what is computed."""
        task.memory.wait()
        filling = Filling(task.plan, task.memory, self._plan.pieces.target)
        with reading(self.path):
            read_pieces(self._reader, self._plan.pieces, filling, computes=bool(task.plan.tiles))
        filling.finish()
        counts = {"bytes_needed": self._plan.needed_bytes, "peak_scratch_bytes": filling.peak_scratch_bytes}
        return {**counts, "reads": self._reader.count.reads, **reads_of(self._reader)}


def reads_of(reader: FileReader) -> dict[str, Any]:
    """Return what a report says of the reads of a reader, by field."""
    names = ("bytes_read", "bytes_verified", "bytes_extra")
    return {**{name: getattr(reader.count, name) for name in names}, "replicas_used": reader.replicas_used}


def plan_reads(matcher: ShardMatcher, plan: FillPlan, mapping: TensorMapping | None) -> ReadPlan:
    """Plan the reads that fill a rank's targets and scratch, in the order in which these are filled.

    Raises:
        ValidationError: They would not fill all of it.
    """
    target = plan.in_order
    reads = plan_read(matcher, target, maps=None if mapping is None else mapping.maps)
    problems = uncovered_targets(reads.pieces, target, np.arange(len(target)), plan.covered_in_order)
    if problems:
        raise ValidationError(problems)
    return replace(reads, pieces=replace(reads.pieces, target=plan.order[reads.pieces.target]))


def read_pieces(reader: FileReader, pieces: Pieces, memory: Filling, computes: bool) -> None:
    """Read pieces into their rows.

    Args:
        reader: Of the files.
        pieces: In the order in which rows are filled.
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

    reader.read_ahead(pieces.source.tolist(), pieces.copies())
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
