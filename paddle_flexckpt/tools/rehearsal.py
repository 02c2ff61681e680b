"""Predict a load on each rank of a job, without the job: whether it fits, its reads, and its memory.

A layout has each rank's targets. The functions of a load resolve, plan and match them; reads are counted instead of
made. Ranks with equal targets are computed once, and many ranks together.

Tested in tests/tools/test_rehearsal.py and tests/distributed/test_rehearsal.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.algebra.rows import group_rows
from paddle_flexckpt.catalog import Catalog, CheckpointError, concat, group_replicas, validate_coverage
from paddle_flexckpt.catalog.errors import Failure, combine
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.media.opening import shown
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning.job_layout import JobLayout
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher
from paddle_flexckpt.planning.readers import choose_readers, find_wanted, match_sections, reads_of_rows
from paddle_flexckpt.tools.rehearsal_report import RankReads, RehearsalReport
from paddle_flexckpt.transfer.files import Files, plan_reads
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.options import FileOptions, LoadOptions
from paddle_flexckpt.transfer.plan import FillPlan, plan_fill
from paddle_flexckpt.transfer.read_counts import bytes_by_source, count_announced, count_reads, count_requests, sums_of
from paddle_flexckpt.transfer.resolution import check_unexpected
from paddle_flexckpt.transfer.source import Task
from paddle_flexckpt.transfer.targets import Memory, Targets
from paddle_flexckpt.transfer.transfer import make_task

# Rows of targets to match at once: bounds memory.
ROWS_AT_ONCE = 1 << 19
# If a load fails, the most ranks to check for all problems; of a larger job one rank of each kind.
RANKS_ASKED = 1024
# Assumed: bytes per second of a link between ranks over those that a rank reads, and seconds to agree and to connect.
_LINK_SPEED, _MEETING_SECONDS = 2, 0.05
# The ends of the names of columns of an object store, and the columns that these replace in an estimate.
_IN_STORE = (("bytes", "bytes_read"), ("requests", "reads"))


class _Nowhere(Memory):
    """The memory of targets that are not filled."""


def rehearse(
    path: Location,
    layout: JobLayout,
    options: LoadOptions | None = None,
    *,
    cooperative: bool = False,
    by_source: bool = False,
    object_store: bool = False,
    bytes_per_second: float | None = None,
    request_seconds: float = 0.0,
    notes: Sequence[str] = (),
) -> RehearsalReport:
    """Predict the load of a checkpoint into a layout.

    Counts are those with ``verify="read"``; those of an object store are in fields of their own.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file.
        layout: The layout of the job.
        options: The options of the load.
        cooperative: Whether to predict also the load in which one rank reads for all.
        by_source: Whether to report also the ranks that saved the bytes which each rank needs.
        object_store: Whether to count requests as if the checkpoint were in an object store; always if it is in one.
        bytes_per_second: The speed of one rank while all read; by default no time is estimated. Links between ranks
            count as twice as fast.
        request_seconds: The time that each read adds, where several threads read.
        notes: Assumptions about the layout, for the report.

    Raises:
        ValidationError: There is no such checkpoint.
        CorruptCheckpointError: Its manifest is damaged.
    """
    asked = options or LoadOptions()
    asked.check()
    directory = SourceDirectory(path)
    with LockedManifest(directory, asked.unique_id) as manifest:
        details: dict[str, Any] = {"source": directory.path, "unique_id": manifest.unique_id, "notes": list(notes)}
        details.update(strategy=str(layout.strategy), world_size=layout.strategy.ranks)
        try:
            found = _Rehearsal(path, manifest, layout, asked, cooperative, by_source, object_store).run()
        except CheckpointError as error:
            return RehearsalReport(**details, error=str(error))
        report = RehearsalReport(**details, **found)
        if bytes_per_second:
            report = replace(report, seconds=_seconds(report, bytes_per_second, request_seconds))
        return report


def _seconds(report: RehearsalReport, rate: float, request: float) -> dict[str, float]:
    """Return the seconds of the slowest rank, by way of reading."""
    seconds = {"direct": max(each.seconds(rate, request) for each in report.ranks)}
    most = report.cooperative
    if most:
        link = max(max(most["bytes_received"]), max(most["bytes_sent"])) / _LINK_SPEED
        nbytes, count = (most.get(f"object_{name}", most[other]) for name, other in _IN_STORE)
        read = max(size / rate + made * request for size, made in zip(nbytes, count))
        seconds["cooperative"] = read + link / rate + _MEETING_SECONDS
    return seconds


class _Rehearsal:
    """The prediction of one load into a layout."""

    def __init__(
        self,
        path: Location,
        manifest: Manifest,
        layout: JobLayout,
        options: LoadOptions,
        cooperative: bool,
        by_source: bool,
        object_store: bool,
    ) -> None:
        self._manifest, self._layout, self._options = manifest, layout, options
        # The targets of ranks, as far as they have to be known.
        self._filled: list[Catalog] | None = [] if cooperative else None
        self._by_source = by_source
        self._source = manifest.catalog
        self._context = f"cannot load from {shown(path)}"
        self._files = Files(path, FileOptions(), manifest)
        self._object_store = object_store
        groups = group_replicas(self._source)
        coverage = validate_coverage(self._source, groups)
        self._matcher = ShardMatcher(self._source, groups, coverage)
        # Which of several replicas a rank reads depends on its number, so no two ranks are alike.
        ranks_differ = len(groups) < len(self._source) or bool(coverage.overlaps)
        self._alike: dict[tuple[int, ...], list[int]] = {}
        for rank in range(layout.strategy.ranks):
            self._alike.setdefault((rank,) if ranks_differ else layout.kind(rank), []).append(rank)

    def run(self) -> dict[str, Any]:
        """Return the fields of the report.

        Raises:
            CheckpointError: The load would fail, with this text.
        """
        union, self._known = self._all_targets()
        with self._files.closing:
            self._files.open()
            try:
                task, _ = make_task(self._job_targets(union), self._source, self._options, self._known)
                groups, used = self._count(task)
                # The files are checked once for all ranks.
                self._check_files(np.flatnonzero(used))
            except CheckpointError as error:
                raise self._failure(error) from error
        used = task.resolution.used(self._source, task.mapping)
        unexpected = check_unexpected(self._source.keys, used, task.mapping, self._options, self._context)
        details = task.resolution.report()
        names = ("missing", "aliases", "cast", "masters", "maybe_fused")
        total = sum(len(each.ranks) * each.bytes_needed for each in groups)
        found = {name: details[name] for name in names}
        if self._filled is not None:
            ranks, block_bytes = self._layout.strategy.ranks, self._manifest.checksums.block_bytes
            in_store = self._is_in_store()
            shared = count_shared_reads(self._source, concat(self._filled), task.maps, ranks, block_bytes, in_store)
            columns = {name: column.tolist() for name, column in vars(shared).items()}
            found["cooperative"] = {name: columns[name] for name in columns if in_store or "object" not in name}
        return {**found, "unexpected": unexpected, "ranks": groups, "total_bytes": total}

    def _all_targets(self) -> tuple[Catalog, Catalog | None]:
        """Return a row for each key of the job; and all shards, each once, if statements need them."""
        seen, held = np.zeros(len(self._layout.keys), dtype=bool), self._layout.held
        first, everything = [], []
        for _, batch in self._batches(ROWS_AT_ONCE):
            if self._options.aoa_config is not None:
                everything.append(batch)
            row = np.full(len(seen), -1)
            row[batch.key[::-1]] = np.arange(len(batch))[::-1]
            new = (row >= 0) & ~seen
            first.append(batch.take(np.sort(row[new])))
            seen |= new
            if seen[held].all() and not everything:
                break
        if not everything:
            return concat(first), None
        known = concat(everything)
        return concat(first), known.take(np.sort(group_replicas(known).first))

    def _count(self, task: Task) -> tuple[list[RankReads], np.ndarray]:
        """Return the reads of ranks, and the used rows of the source."""
        resolution, mapping = task.resolution, task.mapping
        computes = mapping is not None and bool(mapping.regions)
        numbers = {name: row for row, name in enumerate(resolution.targets.catalog.keys)}
        rows = [numbers.get(name, -1) for name in self._layout.keys]
        # By key of the layout: its name in the source or the mapping, and whether it is filled.
        keys = tuple(resolution.catalog.keys[row] if row >= 0 else name for row, name in zip(rows, self._layout.keys))
        is_filled = np.zeros(len(numbers) + 1, dtype=bool)
        is_filled[resolution.filled] = True
        is_filled = is_filled[rows]
        used, found = np.zeros(len(self._source), dtype=bool), []
        for ranks, batch in self._batches(1 if computes else ROWS_AT_ONCE):
            place = _kind_of(batch, ranks)
            target_bytes = sums_of(place, batch.byte_length, len(ranks))
            batch = replace(batch, keys=keys)
            plan = plan_fill(batch, np.flatnonzero(is_filled[batch.key]), mapping if computes else None)
            pieces = plan_reads(self._matcher, plan, mapping).pieces
            used[pieces.source] = True
            if self._filled is not None:
                self._filled.append(_for_all_ranks(plan.in_order, ranks))
            scratch = 0
            if computes:
                scratch = _peak_scratch(plan, pieces)
                place = np.where(np.arange(len(plan.catalog)) < plan.targets, 0, -1)
            block_bytes = self._manifest.checksums.block_bytes
            counts = count_reads(pieces, self._source, plan.catalog, place, len(ranks), block_bytes)
            sources = bytes_by_source(pieces, self._source, place, len(ranks)) if self._by_source else [{}] * len(ranks)
            requests, nbytes = np.zeros((2, len(ranks)), dtype=np.int64)
            if self._is_in_store():
                filling = Filling(plan, _Nowhere())
                requests, nbytes = count_requests(filling, pieces, self._source, place, len(ranks), block_bytes)
            for number, each in enumerate(ranks):
                found.append(
                    RankReads(
                        ranks=each,
                        bytes_needed=int(counts.bytes_needed[number]),
                        bytes_read=int(counts.bytes_read[number]),
                        reads=int(counts.reads[number]),
                        files=int(counts.files[number]),
                        target_bytes=int(target_bytes[number]),
                        scratch_bytes=scratch,
                        buffer_bytes=int(counts.buffer_bytes[number]),
                        object_requests=int(requests[number]),
                        object_bytes=int(nbytes[number]),
                        sources=sources[number],
                    )
                )
        return sorted(found, key=lambda each: each.ranks[0]), used

    def _is_in_store(self) -> bool:
        """Return whether requests to an object store are counted."""
        return self._object_store or self._files.directory.backend.at_once > 1

    def _batches(self, rows: int) -> Iterator[tuple[list[list[int]], Catalog]]:
        """Yield groups of ranks with equal targets, and the first one's targets: about ``rows`` of these at a time."""
        alike, first = [*self._alike.values()], 0
        count = max(rows // max(int(self._layout.held.sum()), 1), 1)
        while first < len(alike):
            some = alike[first : first + count]
            batch = self._layout.catalogs([ranks[0] for ranks in some])
            yield some, batch
            first += count
            # A stage of a pipeline has a part of all keys; later ones may have more.
            count = min(max(rows * len(some) // max(len(batch), 1), 1), 8 * count)

    def _job_targets(self, catalog: Catalog) -> Targets:
        """Return the targets of a job. The raw names of its states are taken from the source."""
        return _targets(replace(catalog, state_names=self._source.state_names))

    def _failure(self, error: CheckpointError) -> CheckpointError:
        """Return the error that the ranks of the job would raise together, by checking one after the other."""
        total = self._layout.strategy.ranks
        asked: Iterable[int] = range(total)
        if total > RANKS_ASKED:
            asked = sorted(ranks[0] for ranks in self._alike.values())[:RANKS_ASKED]
        failures = []
        for rank in asked:
            try:
                targets = self._job_targets(self._layout.catalog(rank))
                self._files.prepare(make_task(targets, self._source, self._options, self._known)[0])
            except CheckpointError as own:
                failures.append((rank, Failure.of(own)))
        return combine(failures).error(self._context) if failures else error

    def _check_files(self, rows: np.ndarray) -> None:
        backend, options = self._files.directory.backend, self._options
        with FileReader(backend, self._manifest, options.verify, options.use_replicas) as reader, reading(backend.path):
            reader.check_files(rows)


def _peak_scratch(plan: FillPlan, pieces: Pieces) -> int:
    """Return the most bytes of scratch at any time while pieces are read, as :class:`Filling` would hold them."""
    nbytes = plan.catalog.byte_length.tolist()
    held: set[int] = set()
    used = peak = 0
    for rows, freed in _scratch_steps(plan, pieces):
        used += sum(nbytes[row] for row in {*rows} - held)
        held.update(rows)
        peak = max(peak, used)
        used -= sum(nbytes[row] for row in freed)
        held.difference_update(freed)
    return peak


def _scratch_steps(plan: FillPlan, pieces: Pieces) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield, in the order of filling, the scratch rows that each portion or tile needs and those that it frees."""
    tiles = deque(plan.tiles)
    for first, last in Filling(plan, _Nowhere()).portions(pieces.target):
        rows = np.unique(pieces.target[first:last]).tolist()
        while rows and tiles and tiles[0].after < plan.turn[pieces.target[first]]:
            tile = tiles.popleft()
            yield tile.operands, tile.freed
        yield [row for row in rows if not plan.is_target(row)], ()
    for tile in tiles:
        yield tile.operands, tile.freed


def _kind_of(catalog: Catalog, alike: Sequence[list[int]]) -> np.ndarray:
    """Return the kind of ranks of each row, in a catalog of the first rank of each kind."""
    first = np.asarray([ranks[0] for ranks in alike])
    kind = np.zeros(first.max() + 1, dtype=np.int64)
    kind[first] = np.arange(len(first))
    return kind[catalog.rank]


def _for_all_ranks(filled: Catalog, alike: Sequence[list[int]]) -> Catalog:
    """Repeat the rows of the first rank of each kind for every rank of the kind."""
    if all(len(ranks) == 1 for ranks in alike):
        return filled
    of = _kind_of(filled, alike)
    count = np.bincount(of, minlength=len(alike))
    begin = np.cumsum(count) - count
    kind = np.repeat(np.arange(len(alike)), [len(ranks) for ranks in alike])
    place = np.repeat(begin[kind] - np.cumsum(count[kind]) + count[kind], count[kind])
    rows = np.argsort(of, kind="stable")[place + np.arange(len(place))]
    rank = np.repeat(np.concatenate([np.asarray(ranks, dtype=np.int32) for ranks in alike]), count[kind])
    return replace(filled.take(rows), rank=rank)


def _targets(catalog: Catalog) -> Targets:
    """Return targets with memory of their own each."""
    names = tuple(map(catalog.keys.__getitem__, catalog.key.tolist()))
    nothing = ((),) * len(names)
    own = replace(catalog, keys=names, key=np.arange(len(names), dtype=np.int32))
    return Targets(own, nothing, nothing, np.zeros((len(names), 2), dtype=np.int64), _Nowhere())


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
    reader = choose_readers(wanted, rows.byte_length, ranks, together=True)[1]
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
        # A rank announces the reads of one round after the other, and rows rise from round to round.
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
