"""What is kept of a load, so that the same layout need not be planned again from a checkpoint like the first.

A load's plan is a function of its options, the ranks, the targets of all ranks, and the checkpoint's table of shards.
It is kept for a fingerprint of all of these, and no tensor, file or name of a file with it. So it serves for another
checkpoint of the same structure too. Offsets and checksums are those of the manifest, which each load reads.

Tested in tests/live/test_kept_loads.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog.wire import encode_catalog
from paddle_flexckpt.engine.kept_plans import fingerprint
from paddle_flexckpt.engine.plan import FillPlan
from paddle_flexckpt.engine.resolution import Resolution, Resolved
from paddle_flexckpt.engine.source import Task
from paddle_flexckpt.engine.targets import Targets

# About what an entry of a table takes that is not in columns: a tile, a computed tensor, how a target is filled.
_ENTRY_BYTES = 500


class KeptReads(Protocol):
    """Hold what a source has planned: of files a :class:`ReadPlan`, or more where ranks read for each other."""

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes."""


@dataclass(frozen=True, eq=False)
class KeptLoad:
    """Hold what one rank has resolved and planned of a load: a task without its targets, and how it is carried out.

    Attributes:
        origin: Fingerprint of what it was made of, on all ranks.
        others: As of :class:`Resolution`.
        filled: Likewise.
        same_memory: Likewise.
        mapping: What statements make, or None.
        plan: The rows to fill.
        reads: What is read into them, or sent and received.
        unexpected: Keys of the source that no rank asks for.
        whole: Whether the reads are of all shards of the source, where fewer are known at first.
    """

    origin: bytes
    others: dict[int, Resolved]
    filled: np.ndarray
    same_memory: dict[int, int]
    mapping: TensorMapping | None
    plan: FillPlan
    reads: KeptReads
    unexpected: list[str]
    whole: bool

    @classmethod
    def of(cls, owns: Sequence[bytes], task: Task, reads: KeptReads, unexpected: list[str], whole: bool) -> KeptLoad:
        """Return what is kept of a task, given the fingerprint of each rank's part of what it was made of."""
        how = task.resolution
        columns = how.others, how.filled, how.same_memory
        return cls(fingerprint(owns), *columns, task.mapping, task.plan, reads, [*unexpected], whole)

    def task(self, targets: Targets) -> Task:
        """Return the task of filling these targets."""
        how = Resolution(targets, self.others, self.filled, self.same_memory)
        return Task(how, self.mapping, self.plan)

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes."""
        plan, mapping = self.plan, self.mapping
        columns = plan.catalog.nbytes + plan.in_order.nbytes + self.reads.nbytes
        entries = len(plan.catalog.keys) + len(self.others) + len(plan.tiles) + len(plan.kept) + len(self.unexpected)
        if mapping is not None:
            columns += mapping.maps.nbytes
            entries += len(mapping.tensors) + len(mapping.nodes) + sum(map(len, mapping.regions.values()))
        return columns + self.filled.nbytes + _ENTRY_BYTES * entries


def describe_load(options: bytes, ranks: Sequence[int], targets: Targets, source: bytes) -> bytes:
    """Return a fingerprint of all that one rank's part of a plan is made of, but for the other ranks' targets.

    Nothing where it is made of more than this knows.

    Args:
        options: Those of the load, encoded, without the checkpoint's id.
        ranks: All that load.
        targets: This rank's.
        source: What is the same for a checkpoint with the same shards (``Source.describe``).
    """
    shared = _shared_memory(targets.spans)
    # Live targets have neither a mapping nor bands. Such as overlap themselves are refused, or left alone.
    if targets.mapping is not None or targets.bands or targets.overlapping:
        return b""
    strides = [targets.strides.get(row) for row in shared[:, 0].tolist()]
    names = repr((targets.aliases, targets.raw_names, strides, sorted(targets.masters))).encode()
    tables = encode_catalog(targets.catalog), source
    return fingerprint((options, repr(tuple(ranks)).encode(), *tables, names, shared.tobytes()))


def _shared_memory(spans: np.ndarray) -> np.ndarray:
    """Return int64 ``[n, 4]`` for the rows whose memory lies in one stretch with others', in rising order.

    Each: the row, a row that stands for the stretch, and first and last byte (exclusive) counted from its beginning.
    """
    rows = np.flatnonzero(spans[:, 0] < spans[:, 1])
    rows = rows[np.lexsort((spans[rows, 1], spans[rows, 0]))]
    begin, end = spans[rows].T
    # Most targets begin where all earlier ones have ended.
    starts = np.append(True, begin[1:] >= np.maximum.accumulate(end)[:-1])[: len(rows)]
    stretch = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)[stretch]
    several = np.bincount(stretch)[stretch] > 1 if len(rows) else starts
    table = np.column_stack([rows, rows[first], begin - begin[first], end - begin[first]])[several]
    return table[np.argsort(table[:, 0])].astype(np.int64)
