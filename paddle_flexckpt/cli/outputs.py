"""What commands print with ``--json``, besides the reports of the functions that they call.

Tested in tests/cli/test_json.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.native.listing import CheckpointInfo
from paddle_flexckpt.report import Report


@dataclass(frozen=True)
class Shard:
    """Say what one shard is, and where it is stored.

    Attributes:
        global_offset: Where it begins in the tensor, by axis.
        local_shape: Its extents.
        description: The same in words, with its range where it is flattened.
        rank: The rank that saved it.
        file: The data file.
        byte_offset: Its first byte there.
        bytes: How many it has.
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
    """Say what one tensor is, and how it is stored.

    Attributes:
        dtype: Name of its element type.
        shape: Its global shape.
        order: In which order its elements lie, where that is not the natural one.
        shards: Its shards, replicas among them.
    """

    dtype: str
    shape: list[int]
    order: str | None
    shards: list[Shard]


@dataclass(frozen=True)
class InspectReport(Report):
    """Say what a checkpoint holds.

    Attributes:
        path: Its directory.
        unique_id: Its id there.
        step: Training step, if it was recorded.
        world_size: Ranks that saved it.
        format: ``flexckpt``, or whose format it is.
        tensors: By key: all, or those that were asked for.
    """

    path: str
    unique_id: int
    step: int | None
    world_size: int
    format: str
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True)
class ShownTensor:
    """Say what values a tensor has, or a slice of it.

    Attributes:
        what: What was asked for: a key, or a slice of it.
        dtype: Name of the element type.
        shape: Of the values.
        smallest: The smallest finite value; None without one, and so of complex numbers.
        largest: The largest, likewise.
        mean: Of the finite values, likewise.
        deviation: The standard deviation, likewise.
        zeros: Values that are zero.
        not_finite: Values that are infinite or no number.
        values: They, nested by axis; None of more than so many as a person reads. Complex numbers are text.
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
    """Say what values tensors have.

    Attributes:
        path: The checkpoint's directory.
        tensors: In the order in which they were asked for.
    """

    path: str
    tensors: list[ShownTensor]


@dataclass(frozen=True)
class DigestReport(Report):
    """Give the digests of a checkpoint's tensors.

    Attributes:
        path: The checkpoint's directory.
        digests: 32 hexadecimal digits by key.
    """

    path: str
    digests: dict[str, str]


@dataclass(frozen=True)
class ListedCheckpoint(CheckpointInfo):
    """Describe one checkpoint of a run.

    Attributes:
        time: When it was saved, in seconds since 1970, if a manager recorded that.
        metrics: What a manager recorded by name.
    """

    time: float | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class ListReport(Report):
    """List the checkpoints of a directory.

    Attributes:
        root: The directory.
        checkpoints: In the order of their steps.
    """

    root: str
    checkpoints: list[ListedCheckpoint]


@dataclass(frozen=True)
class Usage:
    """Say how much room a group of tensors takes.

    Attributes:
        name: Of the group: a role, a layer, a dtype or a rank.
        bytes: Bytes of tensors, replicas included.
        keys: Tensors.
    """

    name: str
    bytes: int
    keys: int


@dataclass(frozen=True)
class UsageReport(Report):
    """Say what takes the room of a checkpoint.

    Attributes:
        path: The checkpoint's directory.
        by: What is summed up: ``role``, ``layer``, ``dtype`` or ``rank``.
        groups: The largest first.
        total_bytes: Bytes of all of them.
    """

    path: str
    by: str
    groups: list[Usage]
    total_bytes: int


@dataclass(frozen=True)
class Package:
    """Say whether a package is installed, and does.

    Attributes:
        package: Its name.
        version: That is installed; "" without one.
        supported: Whether tests run with it.
        purpose: What it is for.
    """

    package: str
    version: str
    supported: bool
    purpose: str


@dataclass(frozen=True)
class PatchState:
    """Say what is the matter with a patch.

    Attributes:
        name: Its name.
        status: ``fits`` or ``applied``.
        mends: The defect.
    """

    name: str
    status: str
    mends: str


@dataclass(frozen=True)
class DoctorReport(Report):
    """Say what is installed, and what is wrong with that.

    Attributes:
        flexckpt: Version of this library.
        python: Version of Python.
        packages: Those that matter.
        patches: Those that fit, or are in.
        shared_memory_free: Bytes; None where there is none.
        problems: What is to be done something about.
    """

    flexckpt: str
    python: str
    packages: list[Package]
    patches: list[PatchState]
    shared_memory_free: int | None
    problems: list[str]
