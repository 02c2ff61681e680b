"""Cached plans of loads: the same layout and a checkpoint of the same structure need no new plan.

A load's plan is a function of its options, the ranks, the targets of all ranks, and the checkpoint's table of shards.
The cache's key is a fingerprint of all of these. A cached plan has no tensors, files or names of files, so it also
serves another checkpoint of the same structure. Offsets and checksums come from the manifest, which each load reads.

Tested in tests/load/test_kept_loads.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog.wire import encode_catalog
from paddle_flexckpt.transfer.plan import FillPlan
from paddle_flexckpt.transfer.plan_cache import fingerprint
from paddle_flexckpt.transfer.resolution import Resolution, Resolved
from paddle_flexckpt.transfer.source import Task
from paddle_flexckpt.transfer.targets import Targets

# About the bytes of an entry that is not in columns: a tile, a computed tensor, a resolved target.
_ENTRY_BYTES = 500


class KeptReads(Protocol):
    """The plan of a source: for files a :class:`ReadPlan`, or more if ranks read for each other."""

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes."""


@dataclass(frozen=True, eq=False)
class KeptLoad:
    """One rank's cached plan of a load: a task without its targets, and its reads.

    Attributes:
        origin: Fingerprint of the inputs of all ranks.
        others: As in :class:`Resolution`.
        filled: Likewise.
        same_memory: Likewise.
        mapping: The mapping of the statements, or None.
        plan: The rows to fill.
        reads: The plan of the source.
        unexpected: Keys of the source that no rank asks for.
        whole: Whether the plan needs all shards of the source, where fewer are known at first.
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
        """Return the cached plan of a task, given the fingerprint of each rank's inputs."""
        how = task.resolution
        columns = how.others, how.filled, how.same_memory
        return cls(fingerprint(owns), *columns, task.mapping, task.plan, reads, [*unexpected], whole)

    def task(self, targets: Targets) -> Task:
        """Return the task for these targets."""
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
    """Return a fingerprint of one rank's inputs of a plan; the other ranks' targets are in theirs.

    It is empty if the plan has other inputs, so that it cannot be cached.

    Args:
        options: The load's options, encoded, without the checkpoint's id.
        ranks: All ranks of the load.
        targets: This rank's targets.
        source: ``Source.describe``, which is equal for checkpoints with the same shards.
    """
    shared = _shared_memory(targets.spans)
    # Live targets have neither a mapping nor bands. Targets that overlap themselves are refused elsewhere, or unused.
    if targets.mapping is not None or targets.bands or targets.overlapping:
        return b""
    strides = [targets.strides.get(row) for row in shared[:, 0].tolist()]
    names = repr((targets.aliases, targets.raw_names, strides, sorted(targets.masters))).encode()
    tables = encode_catalog(targets.catalog), source
    return fingerprint((options, repr(tuple(ranks)).encode(), *tables, names, shared.tobytes()))


def _shared_memory(spans: np.ndarray) -> np.ndarray:
    """Return int64 ``[n, 4]`` for the rows that overlap with others in memory, in rising order.

    Each: the row, a row that identifies the stretch of memory, and first and last byte (exclusive) in the stretch.
    """
    rows = np.flatnonzero(spans[:, 0] < spans[:, 1])
    rows = rows[np.lexsort((spans[rows, 1], spans[rows, 0]))]
    begin, end = spans[rows].T
    # Most targets begin at or after the end of all earlier ones.
    starts = np.append(True, begin[1:] >= np.maximum.accumulate(end)[:-1])[: len(rows)]
    stretch = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)[stretch]
    several = np.bincount(stretch)[stretch] > 1 if len(rows) else starts
    table = np.column_stack([rows, rows[first], begin - begin[first], end - begin[first]])[several]
    return table[np.argsort(table[:, 0])].astype(np.int64)
