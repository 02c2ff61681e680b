"""Sources, from which a transfer fills targets, and the task of one rank in a transfer.

A load's plan is a function of its options, the ranks, the targets of all ranks, and the checkpoint's table of shards.
So another load of the same layout, from a checkpoint of the same structure, needs no new plan. A cached plan, found by
a fingerprint of all of these, has no tensors, files or names of files. Offsets and checksums come from the manifest,
which each load reads.

Tested in tests/transfer/test_transfer.py, tests/transfer/test_files.py and tests/loading/test_cached_loads.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.wire import encode_catalog
from paddle_flexckpt.transfer.plan import FillPlan
from paddle_flexckpt.transfer.plan_cache import fingerprint
from paddle_flexckpt.transfer.powers import Facts
from paddle_flexckpt.transfer.resolution import Resolution, Resolved
from paddle_flexckpt.transfer.targets import Memory, Targets

# About the bytes of an entry that is not in columns: a tile, a computed tensor, a resolved target.
_ENTRY_BYTES = 500


@dataclass(frozen=True, eq=False)
class Task:
    """The targets of one rank, and their sources.

    Attributes:
        resolution: The source of each target.
        mapping: The mapping of the statements, or None.
        plan: The rows to fill.
    """

    resolution: Resolution
    mapping: TensorMapping | None
    plan: FillPlan

    @property
    def maps(self) -> BoxMaps | None:
        """Return the box maps of keys that statements make by moving elements, or None."""
        return None if self.mapping is None else self.mapping.maps

    @property
    def memory(self) -> Memory:
        """Return the memory of the targets."""
        return self.resolution.targets.memory

    def keys_of(self, rows: Iterable[int]) -> list[str]:
        """Return the targets' own keys of some rows of the plan, sorted."""
        catalog, band_of = self.resolution.targets.catalog, self.plan.band_of
        return sorted({catalog.key_name(row if band_of is None else int(band_of[row])) for row in rows})


class Source(Facts):
    """A source of targets. :class:`Transfer` calls :meth:`open`, ``prepare``, ``plan`` and ``move``.

    Attributes:
        path: Its path, or another name for it.
        unique_id: The checkpoint's id, or None.
        partial: A text about missing files, if a repair has rebuilt its manifest without them.
        catalog: All of its shards, or those that :meth:`want` chose; known when it is open.
        between_ranks: Whether ranks send each other elements: then each has to know the others' targets.
        caches_plans: Whether plans can be cached, by :meth:`planned_reads` and :meth:`reuse`.
    """

    path: str
    unique_id: int | None = None
    partial = ""
    catalog: Catalog
    between_ranks = False
    caches_plans = False

    def __init__(self) -> None:
        self.closing = contextlib.ExitStack()

    def open(self) -> dict[str, str]:
        """Open it; return the values that ranks compare: ``checkpoint`` identifies it."""
        return {}

    def want(self, targets: Targets) -> None:
        """Read the rows of all shards from which these targets may be filled; by default the source has all rows."""

    def complete(self) -> bool:
        """Read the rows of all shards; return whether some were not known before."""
        return False

    def describe(self) -> bytes:
        """Return its part of a cached plan's key on this rank: equal for sources with the same shards."""
        return encode_catalog(replace(self.catalog, files=()))

    def used(self, task: Task) -> bytes:
        """Return this rank's message to :meth:`gather_used`: the keys that it uses."""
        return np.packbits(task.resolution.used(self.catalog, task.mapping)).tobytes()

    def gather_used(self, answers: Sequence[bytes]) -> tuple[Sequence[str], np.ndarray]:
        """Return all keys of the source, and bool for each: whether a rank uses it.

        There are no keys if every key of a model is used.

        Args:
            answers: Every rank's :meth:`used`.
        """
        bits = np.bitwise_or.reduce([np.frombuffer(each, dtype=np.uint8) for each in answers])
        return self.catalog.keys, np.unpackbits(bits, count=len(self.catalog.keys)).astype(bool)

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Check that this rank can take part in a task, and return its message to the other ranks."""
        raise NotImplementedError

    def plan(self, task: Task, answers: Sequence[tuple[bytes, ...]]) -> None:
        """Plan the exchange between ranks; ``answers``: every rank's :meth:`prepare`, by field."""

    def planned_reads(self) -> Any:
        """Return the plan, as :class:`CachedReads`, without anything of this checkpoint alone."""
        raise NotImplementedError

    def reuse(self, task: Task, planned: Any) -> bytes:
        """Do what :meth:`prepare` does, with the plan of :meth:`planned_reads` for a source with the same shards.

        Return this rank's address for the others, if ranks send each other anything.
        """
        raise NotImplementedError

    def set_addresses(self, addresses: list[bytes]) -> bool:
        """Note every rank's address of :meth:`reuse`; return whether the plan is still valid."""
        return True

    def move(self, task: Task) -> dict[str, Any]:
        """Fill all rows of the plan; return fields of the report."""
        raise NotImplementedError


class CachedReads(Protocol):
    """The plan of a source: for files a :class:`ReadPlan`, or more if ranks read for each other."""

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes."""


@dataclass(frozen=True, eq=False)
class CachedLoad:
    """One rank's cached plan of a load: a task without its targets, and its reads.

    Attributes:
        fingerprint: Fingerprint of the inputs of all ranks, by which ranks compare their plans.
        others: As in :class:`Resolution`.
        filled: Likewise.
        same_memory: Likewise.
        mapping: The mapping of the statements, or None.
        plan: The rows to fill.
        reads: The plan of the source.
        unexpected: Keys of the source that no rank asks for.
        dropped: Those of them that are parameters in layers like the loaded ones.
        whole: Whether the plan needs all shards of the source, where fewer are known at first.
    """

    fingerprint: bytes
    others: dict[int, Resolved]
    filled: np.ndarray
    same_memory: dict[int, int]
    mapping: TensorMapping | None
    plan: FillPlan
    reads: CachedReads
    unexpected: list[str]
    dropped: list[str]
    whole: bool

    @classmethod
    def of(
        cls, plan_keys: Sequence[bytes], task: Task, reads: CachedReads, left: tuple[list[str], list[str]], whole: bool
    ) -> CachedLoad:
        """Return the cached plan of a task, given the plan's key on each rank; ``left`` has two of the attributes."""
        resolution = task.resolution
        columns = resolution.others, resolution.filled, resolution.same_memory
        unexpected, dropped = map(list, left)
        return cls(fingerprint(plan_keys), *columns, task.mapping, task.plan, reads, unexpected, dropped, whole)

    def task(self, targets: Targets) -> Task:
        """Return the task for these targets."""
        resolution = Resolution(targets, self.others, self.filled, self.same_memory)
        return Task(resolution, self.mapping, self.plan)

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes."""
        plan, mapping = self.plan, self.mapping
        columns = plan.catalog.nbytes + plan.in_order.nbytes + self.reads.nbytes
        entries = len(plan.catalog.keys) + len(self.others) + len(plan.tiles) + len(plan.kept)
        entries += len(self.unexpected) + len(self.dropped)
        if mapping is not None:
            columns += mapping.maps.nbytes
            entries += len(mapping.tensors) + len(mapping.nodes) + sum(map(len, mapping.regions.values()))
        return columns + self.filled.nbytes + _ENTRY_BYTES * entries


def describe_load(options: bytes, ranks: Sequence[int], targets: Targets, source: bytes) -> bytes:
    """Return a plan's key on one rank: a fingerprint of the rank's inputs, without the other ranks' targets.

    It is empty if the plan depends on anything else, so that it cannot be cached.

    Args:
        options: The load's options, encoded, without the checkpoint's id.
        ranks: All ranks of the load.
        targets: This rank's targets.
        source: ``Source.describe``, which is equal for checkpoints with the same shards.
    """
    shared = _shared_memory(targets.spans)
    # Live targets have neither a mapping nor bands. Targets that overlap themselves are refused elsewhere, or unused.
    if targets.mapping is not None or targets.bands or targets.self_overlapping:
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
