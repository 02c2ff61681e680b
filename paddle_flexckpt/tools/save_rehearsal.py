"""Predict a save on each rank of a job, without the job: the items of each rank, and their costs.

A layout describes all ranks' shards, which the functions of a save check and plan; writes and hashes are counted
instead of made.

Tested in tests/tools/test_save_rehearsal.py and tests/distributed/test_rehearsal.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from paddle_flexckpt.catalog import Catalog, CheckpointError, ReplicaGroups, ValidationError
from paddle_flexckpt.catalog.findings import inspect, raise_findings
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.media.remote import count_sends
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.native.data_file import BATCH_BLOCKS, BATCH_BYTES, encode_header
from paddle_flexckpt.native.manifest import SaveInfo
from paddle_flexckpt.planning.holder_sets import SPREAD_ROWS
from paddle_flexckpt.planning.job_layout import JobLayout
from paddle_flexckpt.planning.replica_comparison import compare_samples, compare_whole, compare_written
from paddle_flexckpt.planning.write_plan import Items, WritePlan, plan_write
from paddle_flexckpt.report import Report
from paddle_flexckpt.transfer.read_counts import sums_of

_CONTEXT = "cannot save"


@dataclass(frozen=True)
class SaveRehearsal(Report):
    """The prediction of a save of a job.

    Attributes:
        strategy: The strategy of the job.
        world_size: Number of its ranks.
        error: The error that the job would raise on every rank; "" if the save succeeds.
        keys: Number of tensors saved, over all ranks.
        items: Number of shards stored, over all ranks.
        files: Number of data files.
        total_bytes: Bytes of tensors that all ranks write.
        held_bytes: Bytes of tensors that all ranks hold, replicas counted.
        imbalance: Most loaded rank's bytes over the mean.
        ranks: By name, a number for each rank. ``held_bytes``: bytes of its tensors. ``bytes_written``: bytes of
            tensors in its data file. ``items``: stored shards in that file. ``writes``: calls that write the file.
            ``hashed_bytes``: bytes of which the rank computes checksums and digests. ``staging_bytes``: memory for a
            copy of its items in an asynchronous save. ``object_requests``, for an object store only: requests that
            send the file.
        notes: Assumptions of the rehearsal.
        seconds: The slowest rank's seconds of writing at the given rate; empty without a rate.
    """

    strategy: str
    world_size: int
    error: str = ""
    keys: int = 0
    items: int = 0
    files: int = 0
    total_bytes: int = 0
    held_bytes: int = 0
    imbalance: float = 1.0
    ranks: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    derived = ("ok",)

    @property
    def ok(self) -> bool:
        """Return whether the job can save."""
        return not self.error

    @property
    def worst(self) -> int:
        """Return the first of the ranks that write the most."""
        return int(np.argmax(self.ranks["bytes_written"]))

    def summary(self) -> str:
        """Return one line for people."""
        if not self.ok:
            return f"{self.strategy} on {self.world_size} ranks does not save: {self.error}"
        most = self.ranks["bytes_written"][self.worst]
        text = (
            f"{self.strategy} on {self.world_size} ranks saves {self.keys} tensors in {self.files} files: "
            f"{format_bytes(self.total_bytes)} of {format_bytes(self.held_bytes)} held, {self.items} items, imbalance "
            f"{self.imbalance:.2f}; rank {self.worst} writes the most, {format_bytes(most)}"
        )
        return text + "".join(f"; {way}: {value:.1f} s" for way, value in self.seconds.items())


def rehearse_save(
    layout: JobLayout,
    *,
    save_replicas: bool = False,
    check_replicas: Literal["equal", "all"] = "equal",
    staging_bytes: int | None = None,
    bytes_per_second: float | None = None,
    object_store: bool = False,
    turn: int = 0,
    notes: Sequence[str] = (),
) -> SaveRehearsal:
    """Predict a save of the state of a layout to storage that all ranks share.

    Args:
        layout: The layout of the job.
        save_replicas: As in a save.
        check_replicas: As in a save.
        staging_bytes: As in an asynchronous save.
        bytes_per_second: The speed of one rank while all write; by default no time is estimated.
        object_store: Whether to count the requests that send the data files to an object store with default options.
            The number of a save's other requests does not grow with its bytes.
        turn: The number that chooses the two ranks that compare a replica; each save has another one.
        notes: Assumptions about the layout, for the report.

    Raises:
        ValidationError: An option has another value.
    """
    _check_option(check_replicas)
    ranks = layout.strategy.ranks
    base: dict[str, Any] = {"strategy": str(layout.strategy), "world_size": ranks, "notes": [*notes]}
    job = _in_order(layout.catalogs(range(ranks)))
    found = inspect(job, np.arange(len(job)))
    try:
        raise_findings(found.findings, _CONTEXT)
    except CheckpointError as error:
        return SaveRehearsal(**base, error=str(error))
    base["notes"] += _assumptions(job, len(found.coverage.overlaps), ranks)
    plan = plan_write(job, "{}".format, save_replicas, groups=found.groups)
    whole = np.full(len(found.groups), save_replicas or check_replicas == "all")
    columns = _counts_by_rank(job, plan, ranks)
    held, written = columns["held_bytes"], columns["bytes_written"]
    columns["hashed_bytes"] = written + _bytes_compared(job, found.groups, plan, whole, turn, ranks)
    columns["staging_bytes"] = written if staging_bytes is None else np.minimum(written, staging_bytes)
    if object_store:
        columns["object_requests"] = _object_requests(plan, ranks)
    return SaveRehearsal(
        **base,
        keys=len(job.keys),
        items=len(plan.catalog),
        files=int(np.count_nonzero(columns["items"])),
        total_bytes=int(written.sum()),
        held_bytes=int(held.sum()),
        imbalance=_imbalance(written, job),
        ranks={name: column.tolist() for name, column in columns.items()},
        seconds={"write": float(written.max()) / bytes_per_second} if bytes_per_second else {},
    )


def _check_option(check_replicas: str) -> None:
    """Raise ValidationError if a save with this option cannot be rehearsed."""
    if check_replicas not in ("equal", "all"):
        raise ValidationError([f"a save is rehearsed with check_replicas 'equal' or 'all'; got {check_replicas!r}"])


def _counts_by_rank(job: Catalog, plan: WritePlan, ranks: int) -> dict[str, np.ndarray]:
    """Return what each rank holds and writes, under the names of the report."""
    writer = plan.catalog.rank.astype(np.int64)
    return {
        "held_bytes": sums_of(job.rank.astype(np.int64), job.byte_length, ranks),
        "bytes_written": sums_of(writer, plan.catalog.byte_length, ranks),
        "items": np.bincount(writer, minlength=ranks),
        "writes": _writes(plan, ranks),
    }


def _imbalance(written: np.ndarray, job: Catalog) -> float:
    """Return the most bytes that a rank writes over the mean of the ranks that hold tensors."""
    of_owners = written[np.unique(job.rank)]
    return float(of_owners.max() / of_owners.mean()) if written.any() else 1.0


def _assumptions(job: Catalog, overlaps: int, ranks: int) -> Iterator[str]:
    """Yield what a prediction leaves aside: ``overlaps`` pairs of shards, and the plan of a large job."""
    if overlaps:
        yield f"{overlaps} pairs of shards overlap: a save compares what they share, which is not counted"
    if len(job) > SPREAD_ROWS and ranks > 1:
        yield f"beyond {SPREAD_ROWS} shards a job plans each key on one rank, and may cut elsewhere what several hold"


def _bytes_compared(
    job: Catalog, groups: ReplicaGroups, plan: WritePlan, whole: np.ndarray, turn: int, ranks: int
) -> np.ndarray:
    """Return the bytes of each rank that it hashes only to compare replicas; ``whole``: bool per group, all of it."""
    items = Items(plan.source, plan.source_start, plan.source_start + plan.catalog.size)
    compared = compare_written(items, job, groups, ~whole, turn)
    compared = compared.concat(compare_samples(job, groups, ~whole, turn))
    compared = compared.concat(compare_whole(job, groups, whole))
    # A rank hashes what it writes in any case.
    written = {*zip(*(column.tolist() for column in vars(items).values()))}
    lines = zip(compared.row.tolist(), compared.start.tolist(), compared.stop.tolist())
    is_more = np.fromiter((line not in written for line in lines), dtype=bool, count=len(compared))
    nbytes = (compared.stop - compared.start) * job.itemsize[compared.row]
    return sums_of(job.rank[compared.row[is_more]].astype(np.int64), nbytes[is_more], ranks)


def _in_order(job: Catalog) -> Catalog:
    """Return all ranks' shards as in a save: keys are numbered in the order in which they occur."""
    used, first, key = np.unique(job.key, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(used), dtype=np.int32)
    number[order] = np.arange(len(used), dtype=np.int32)
    names = tuple(map(job.keys.__getitem__, used[order].tolist()))
    return replace(job, keys=names, key=number[key.reshape(-1)])


def _writes(plan: WritePlan, ranks: int) -> np.ndarray:
    """Return the number of calls that write each rank's data file: its header, and several blocks at a time."""
    writes = np.zeros(ranks, dtype=np.int64)
    writer = plan.catalog.rank
    edges = np.searchsorted(writer, np.arange(ranks + 1))
    for rank, (first, last) in enumerate(zip(edges.tolist(), edges[1:].tolist())):
        length = plan.catalog.byte_length[first:last]
        blocks = -(-length // BLOCK_BYTES)
        item = np.repeat(np.arange(len(length)), blocks)
        place = np.arange(len(item)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        ends = np.cumsum(np.minimum(length[item] - place * BLOCK_BYTES, BLOCK_BYTES))
        at, calls = 0, int(last > first)
        while at < len(ends):
            before = ends[at - 1] if at else 0
            full = int(np.searchsorted(ends, before + BATCH_BYTES)) + 1
            at, calls = min(full, at + BATCH_BLOCKS), calls + 1
        writes[rank] = calls
    return writes


def _object_requests(plan: WritePlan, ranks: int) -> np.ndarray:
    """Return the number of requests that send each rank's data file, with a header as long as that of a first save."""
    sizes, catalog = np.zeros(ranks, dtype=np.int64), plan.catalog
    save = SaveInfo(bytes(16).hex(), 0, ranks)
    edges = np.searchsorted(catalog.rank, np.arange(ranks + 1)).tolist()
    for rank, (first, last) in enumerate(zip(edges, edges[1:])):
        if first < last:
            items = catalog.take(slice(first, last))
            sizes[rank] = len(encode_header(items, save)) + int(items.byte_length.sum())
    return count_sends(sizes)
