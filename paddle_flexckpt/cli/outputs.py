"""Reports of commands that have no function of their own in the API, for ``--json``.

Tested in tests/cli/test_json.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.foreign.formats import OtherCheckpoint
from paddle_flexckpt.native.directory import CheckpointInfo
from paddle_flexckpt.native.unfinished import CleanedDirectory, LostManifest, UnfinishedSave
from paddle_flexckpt.report import Report, VerifyReport
from paddle_flexckpt.rollout.segment import SegmentFile
from paddle_flexckpt.tools.memory_runs import MemoryRun


@dataclass(frozen=True)
class Shard:
    """One shard, and its place in the files.

    Attributes:
        global_offset: Its first index in the tensor, by axis.
        local_shape: Its extents.
        description: The same as text, with its flattened range if it has one.
        rank: The rank that saved it.
        file: The data file.
        byte_offset: Its first byte there.
        bytes: Its number of bytes.
    """

    global_offset: list[int]
    local_shape: list[int]
    description: str
    rank: int
    file: str | None
    byte_offset: int
    bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, and its shards.

    Attributes:
        dtype: Name of its element type.
        shape: Its global shape.
        order: The order of its elements, if it is not the natural one.
        shards: Its shards, replicas included.
    """

    dtype: str
    shape: list[int]
    order: str | None
    shards: list[Shard]


@dataclass(frozen=True)
class InspectReport(Report):
    """The tensors of a checkpoint.

    Attributes:
        path: Its directory.
        unique_id: Its id there.
        step: Training step, if it was recorded.
        world_size: Ranks that saved it.
        format: ``flexckpt``, or the name of a foreign format.
        tensors: All tensors, or the requested ones, by key.
        run: What identifies the run that saved it, if a manager recorded that.
        degrees: The degrees of parallelism of the saving run, by fleet's names; empty where none were recorded.
    """

    path: str
    unique_id: int
    step: int | None
    world_size: int
    format: str
    tensors: dict[str, StoredTensor]
    run: str | None = None
    degrees: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownTensor:
    """The values of a tensor, or of a slice of it.

    Attributes:
        what: The request: a key, or a slice of it.
        dtype: Name of the element type.
        shape: Of the values.
        smallest: The smallest finite value; None if there is none, and for complex numbers.
        largest: The largest, likewise.
        mean: Of the finite values, likewise.
        deviation: The standard deviation, likewise.
        zeros: Values that are zero.
        not_finite: Values that are infinite or NaN.
        values: The values, nested by axis; None if they are many. Complex numbers are text.
    """

    what: str
    dtype: str
    shape: list[int]
    smallest: float | None
    largest: float | None
    mean: float | None
    deviation: float | None
    zeros: int
    not_finite: int
    values: Any


@dataclass(frozen=True)
class ShowReport(Report):
    """The values of tensors.

    Attributes:
        path: The checkpoint's directory.
        tensors: The tensors, in the order of the request.
    """

    path: str
    tensors: list[ShownTensor]


@dataclass(frozen=True)
class DigestReport(Report):
    """The digests of a checkpoint's tensors.

    Attributes:
        path: The checkpoint's directory.
        digests: The digest, 32 hexadecimal digits, by key.
    """

    path: str
    digests: dict[str, str]


@dataclass(frozen=True)
class ListedCheckpoint(CheckpointInfo):
    """One checkpoint of a run.

    Attributes:
        time: When it was saved, in seconds since 1970, if a manager recorded that.
        metrics: The metrics that a manager recorded, by name.
        run: What identifies the run that saved it, if a manager recorded that.
    """

    time: float | None = None
    metrics: Mapping[str, float] | None = None
    run: str | None = None


@dataclass(frozen=True)
class ListReport(Report):
    """The checkpoints of a directory.

    Attributes:
        root: The directory.
        checkpoints: The checkpoints, in the order of their steps.
        unfinished: The saves that have begun and are not complete.
        lost: The manifests that are gone.
        others: The checkpoints of other programs.
    """

    root: str
    checkpoints: list[ListedCheckpoint]
    unfinished: list[UnfinishedSave]
    lost: list[LostManifest]
    others: list[OtherCheckpoint]


@dataclass(frozen=True)
class VerifyRunReport(Report):
    """The result of verifying all checkpoints of a run.

    Attributes:
        root: Its directory.
        ok: Whether nothing is wrong in any.
        checkpoints: The report of each, by rising step.
        unfinished: The saves that have begun and are not complete. One that died is not ``ok``.
        lost: The manifests that are gone. None is ``ok``.
    """

    root: str
    ok: bool
    checkpoints: list[VerifyReport]
    unfinished: list[UnfinishedSave]
    lost: list[LostManifest]


@dataclass(frozen=True)
class CleanReport(Report):
    """The unfinished saves below a directory, and what was removed.

    Attributes:
        root: The directory.
        unfinished: The saves that had begun and were not complete.
        cleaned: The outcome in each of their directories; none without ``--remove``.
        memory: The runs with steps in memory, if this is the directory of a memory tier.
        segments: The segments of pushed weights, if this is a directory of shared memory.
        freed: The directories of those runs, and the segments, that were removed; none without ``--remove``.
        chosen: The checkpoint that was chosen, with ``--id`` or ``--step``.
        removed: The names of its files that were removed; none without ``--remove``.
        lost: The manifests that are gone; none with ``--id`` or ``--step``.
    """

    root: str
    unfinished: list[UnfinishedSave]
    cleaned: list[CleanedDirectory] = field(default_factory=list)
    memory: list[MemoryRun] = field(default_factory=list)
    segments: list[SegmentFile] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    chosen: CheckpointInfo | None = None
    removed: list[str] = field(default_factory=list)
    lost: list[LostManifest] = field(default_factory=list)


@dataclass(frozen=True)
class Usage:
    """The bytes of a group of tensors.

    Attributes:
        name: Of the group: a role, a layer, a dtype or a rank.
        bytes: Bytes of tensors, replicas included.
        keys: Number of tensors.
    """

    name: str
    bytes: int
    keys: int


@dataclass(frozen=True)
class UsageReport(Report):
    """The bytes of a checkpoint by groups of tensors.

    Attributes:
        path: The checkpoint's directory.
        by: The kind of groups: ``role``, ``layer``, ``dtype`` or ``rank``.
        groups: The groups, the largest first.
        total_bytes: Bytes of all of them.
    """

    path: str
    by: str
    groups: list[Usage]
    total_bytes: int


@dataclass(frozen=True)
class Package:
    """A package, and whether it is installed and supported.

    Attributes:
        package: Its name.
        version: The installed version; "" if there is none.
        supported: Whether tests run with that version.
        purpose: Its purpose.
    """

    package: str
    version: str
    supported: bool
    purpose: str


@dataclass(frozen=True)
class PatchState:
    """The status of a patch.

    Attributes:
        name: Its name.
        status: ``fits`` or ``applied``.
        mends: The defect that it fixes.
        owner: The package that has the defect, and its releases.
    """

    name: str
    status: str
    mends: str
    owner: str


@dataclass(frozen=True)
class DoctorReport(Report):
    """The installed packages, and problems with them.

    Attributes:
        flexckpt: Version of this library.
        python: Version of Python.
        packages: Packages that this library uses.
        patches: Patches that fit, or are applied.
        shared_memory_free: Free bytes of shared memory; None if there is none.
        problems: Problems to solve.
    """

    flexckpt: str
    python: str
    packages: list[Package]
    patches: list[PatchState]
    shared_memory_free: int | None
    problems: list[str]
