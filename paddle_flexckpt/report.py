"""Reports of a save, a load and so on, as one line for people and one dict for machines.

Tested in tests/loading/test_policies.py and tests/cli/test_cli.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.short_reprs import ShortRepr
from paddle_flexckpt.catalog.texts import format_bytes, patterns

if TYPE_CHECKING:
    from paddle_flexckpt.catalog import Problem


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _of_one_rank(replicas: dict[str, str]) -> str:
    """Return the part of a summary about keys whose replicas need not be equal."""
    differing = [key for key, text in replicas.items() if text != "equal"]
    if not differing:
        return ""
    return f", replicas of {_tensors(len(differing))} differ, such as {differing[0]!r}: {replicas[differing[0]]}"


def _speed(count: int, seconds: Mapping[str, float]) -> str:
    """Return the time of a whole call, and the bytes per second."""
    total = seconds.get("total", 0.0)
    return f"{total:.2f} s, " + (f"{format_bytes(int(count / total))}/s" if total > 0 else "-")


def copied_files(copied: Sequence[str], notes: Sequence[str]) -> str:
    """Return the part of a summary about files beside the tensors, and the notes."""
    text = f"; copied {listed(copied, 5)}" if copied else ""
    return text + "".join(f"; note: {note}" for note in notes)


class Report(ShortRepr):
    """Base of all reports, which are dataclasses.

    Its JSON begins with ``schema``: a name, for which docs/schemas has a JSON Schema, and a version. A new field leaves
    the version as it is. The version changes if a field is removed or gets another meaning.
    """

    #: The version of the schema of :meth:`to_dict`.
    schema_version: ClassVar[int] = 1
    #: Properties that are in the dict besides the fields; any dataclass within may have some.
    derived: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def schema_name(cls) -> str:
        """Return the name of the schema: ``save`` of a SaveReport."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Report")).lower()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return {name: plain(value) for name, value in _fields_of(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return the schema and all fields as JSON values; a number that is not finite is text."""
        schema = {"name": self.schema_name(), "version": self.schema_version}
        return {"schema": schema, **plain(self.as_dict(), finite=True)}

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any, finite: bool = False) -> Any:
    """Return a value with dataclasses as dicts; with ``finite``, NaN and infinities are text, such as ``"nan"``."""
    if is_dataclass(value):
        return {name: plain(each, finite) for name, each in _fields_of(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(each, finite) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, finite) for each in value]
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if isinstance(value, float) and finite and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    for name in (*(each.name for each in fields(value)), *getattr(value, "derived", ())):
        yield name, getattr(value, name)


# The most loaded rank's bytes over the mean, from which on a summary has it.
_NOTABLE_IMBALANCE = 1.1


@dataclass(frozen=True)
class SaveReport(Report):
    """The result of a save.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        keys: Tensors saved, over all ranks.
        items: Shards stored, over all ranks.
        bytes_written: Bytes of tensors that this rank wrote.
        total_bytes: Bytes of tensors that all ranks wrote.
        held_bytes: Bytes of tensors that all ranks hold, replicas counted.
        imbalance: Most loaded rank's bytes over the mean.
        seconds: Wall time on this rank, by phase; ``total`` is all. For an asynchronous save, ``blocked`` is the time
            for which the caller was blocked, and ``queue`` the part of it spent waiting for earlier saves; ``write``
            and ``commit`` are the writer's.
        replicas: For keys whose replicas need not be equal (``check_replicas``; running statistics): ``"equal"``, or
            by how much they differ and which rank's values were saved. Keys whose replicas need only be close, and are
            equal, are left out.
        warnings: Problems that did no harm to the checkpoint.
        rank_bytes: ``bytes_written`` of all ranks, in the order of the group.
        rank_seconds: Seconds of all ranks in the same order, by phase: ``plan`` and ``write``, without the time of
            waiting for others; for an asynchronous save ``stage`` in place of ``write``.
        replaced: Whether the id had a checkpoint, which this one replaces.
    """

    path: str
    unique_id: int
    keys: int
    items: int
    bytes_written: int
    total_bytes: int
    held_bytes: int
    imbalance: float
    seconds: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    rank_bytes: list[int] = field(default_factory=list)
    rank_seconds: dict[str, list[float]] = field(default_factory=dict)
    replaced: bool = False

    def summary(self) -> str:
        """Return one line for people."""
        blocked = f", training stood still for {self.seconds['blocked']:.2f} s" if "blocked" in self.seconds else ""
        replaced = ", which replaces an earlier checkpoint" if self.replaced else ""
        held = f" of the {format_bytes(self.held_bytes)} that ranks hold" * (self.held_bytes != self.total_bytes)
        most = f", one rank wrote {self.imbalance:.2f} times the mean" * (self.imbalance >= _NOTABLE_IMBALANCE)
        return (
            f"saved {_tensors(self.keys)} to {self.path} (id {self.unique_id}{replaced}): "
            f"{format_bytes(self.total_bytes)}{held}{most}, "
            f"{_speed(self.total_bytes, self.seconds)}{blocked}{_of_one_rank(self.replicas)}"
        )


@dataclass(frozen=True)
class LoadReport(Report):
    """The result of a load or a reshard on this rank.

    Attributes:
        source: The source of the bytes: a path, or ``memory``.
        unique_id: The checkpoint's id, or None.
        keys: Tensors filled on this rank.
        missing: Keys that this rank asked for and the source does not have; their targets are unchanged.
        unexpected: Keys that the source has and no rank asked for.
        dropped: Those of them that are parameters in layers like those of loaded ones: of another number of layers or
            experts, or a bias, as where the model was made otherwise than the saved one.
        aliases: Keys that were found under another name (tied parameters; names of Paddle's other worlds).
        cast: Keys whose values were cast, with the dtypes.
        masters: Master weights that started from their parameters, and parameters taken from their master weights.
        fused: Fused parameters and states that were saved under another degree, with the numbers of parts.
        maybe_fused: Source keys whose element order is unknown (old and foreign sources) and whose sharding differs
            from that of the targets; their values may be permuted. Keys in ``fused`` were read as one part per shard,
            the others as they are.
        kept: Targets that keep their values in whole or in part, by AOA statements.
        computed: Targets that were computed in whole or in part, by AOA statements.
        bytes_needed: Bytes of the pieces that fill this rank's targets.
        bytes_read: Bytes of tensors copied out of files.
        bytes_verified: Bytes of the blocks that were compared with their checksums, by this rank or, in the page cache
            of its host, by another. A block that is hashed there for a part of it counts whole, and only the part in
            ``bytes_read``.
        bytes_extra: The part of ``bytes_read`` that no target needed: the rest of blocks that were read whole to be
            verified, damaged blocks that were read again elsewhere, and gaps between ranges that share a request.
        bytes_copied: Bytes copied within this rank's memory.
        bytes_received: Bytes received from other ranks.
        bytes_sent: Bytes sent to other ranks.
        reads: Read calls.
        comm_method: For files: ``"direct"`` if every rank read the bytes that it needs, ``"cooperative"`` if one rank
            read for all ranks that need the same bytes.
        comm_reason: The reason for this method.
        peak_scratch_bytes: The most memory that operands of computed values took at any time.
        total_bytes: ``bytes_needed`` of all ranks.
        replicas_used: By key, the damage that this rank found, and the file and rank whose replica was read instead.
        replicas: For a reshard: the ``replicas`` of its sources, as in SaveReport.
        partial: The data files that the checkpoint lacks, if a repair has rebuilt its manifest without them.
        seconds: Wall time of the call on this rank, by phase; ``total`` is all of it.
    """

    source: str
    unique_id: int | None
    keys: int
    missing: list[str]
    unexpected: list[str]
    aliases: dict[str, str]
    cast: dict[str, str]
    masters: dict[str, str] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    maybe_fused: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_verified: int = 0
    bytes_extra: int = 0
    bytes_copied: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    reads: int = 0
    comm_method: str = ""
    comm_reason: str = field(default="", repr=False)
    peak_scratch_bytes: int = 0
    total_bytes: int = 0
    replicas_used: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    partial: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        what = "resharded" if self.source == "memory" else "loaded"
        origin = "in memory" if self.source == "memory" else f"from {self.source} (id {self.unique_id})"
        text = (
            f"{what} {_tensors(self.keys)} on this rank {origin}; all ranks: {format_bytes(self.total_bytes)}, "
            f"{_speed(self.total_bytes, self.seconds)}"
        )
        for name, count in (
            ("missing", len(self.missing)),
            ("unexpected", len(self.unexpected)),
            ("dropped", len(self.dropped)),
            ("under another name", len(self.aliases)),
            ("cast", len(self.cast)),
            ("between parameter and master weight", len(self.masters)),
            ("fused under another degree", len(self.fused)),
            ("maybe fused, in an order that is not known", len(self.maybe_fused)),
            ("computed", len(self.computed)),
            ("kept in part or whole", len(self.kept)),
            ("read from replicas on this rank, as copies of them are damaged", len(self.replicas_used)),
        ):
            if count:
                text += f", {count} {name}{patterns(getattr(self, name, ()))}"
        text += _of_one_rank(self.replicas)
        text += f"; the checkpoint is partial: {self.partial}" if self.partial else ""
        if self.comm_method == "cooperative":
            text += f", read once for all ranks ({self.comm_reason})"
        if self.bytes_extra:
            text += f", {format_bytes(self.bytes_extra)} more than needed read on this rank"
        return text


@dataclass(frozen=True)
class ExportReport(Report):
    """The result of an export.

    Attributes:
        source: The checkpoint's directory.
        unique_id: Its id there.
        output: The directory written to.
        files: Names of the files of tensors, in order.
        keys: Tensors written.
        left_out: Optimizer states and tensors of extra state that were not asked for.
        unfed: Outputs of AOA statements that were skipped because the checkpoint lacks the inputs; empty without
            ``states``.
        total_bytes: Bytes of tensors written.
        bytes_read: Bytes of tensors read.
        bytes_verified: As of a load.
        bytes_extra: As of a load.
        peak_scratch_bytes: The most memory that operands of computed values took at any time.
        maybe_fused: Keys whose element order is unknown, as they may be fused (old and foreign checkpoints); they were
            written as they are.
        replicas_used: By key, the damage, and the file and rank whose replica was read instead.
        copied: Names of the files beside the tensors that were copied, such as ``config.json`` and a tokenizer's.
        notes: Files that were not copied, and why; what has to change in ``config.json``.
        seconds: Wall time by phase; ``total`` is all of it.
    """

    source: str
    unique_id: int
    output: str
    files: list[str]
    keys: int
    left_out: int
    unfed: list[str]
    total_bytes: int
    bytes_read: int
    bytes_verified: int
    bytes_extra: int
    peak_scratch_bytes: int
    maybe_fused: list[str] = field(default_factory=list)
    replicas_used: dict[str, str] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        text = (
            f"exported {_tensors(self.keys)} from {self.source} (id {self.unique_id}) to {files} in {self.output}: "
            f"{format_bytes(self.total_bytes)}, {_speed(self.total_bytes, self.seconds)}"
        )
        if self.left_out:
            text += f", {self.left_out} states left out"
        if self.replicas_used:
            text += f", {len(self.replicas_used)} read from replicas, as copies of them are damaged"
        text += f", nothing feeds {len(self.unfed)} keys such as {self.unfed[0]}" if self.unfed else ""
        return text + copied_files(self.copied, self.notes)


@dataclass(frozen=True)
class PublishReport(Report):
    """The result of publishing a live model.

    Attributes:
        output: The directory written to.
        files: Names of the files of tensors of all ranks, in order.
        keys: Tensors written by all ranks.
        left_out: Optimizer states and tensors of extra state, which are not written.
        total_bytes: Bytes of tensors that all ranks wrote.
        bytes_written: Bytes of tensors that this rank wrote.
        bytes_received: Bytes of tensors that this rank received from other ranks to write them.
        seconds: Wall time; ``total`` is all of it.
        version: The number of the version, of a :class:`WeightPublisher`; else None.
        base_version: That on which it is based, if it is a delta: keys and bytes are then of what has changed.
    """

    output: str
    files: list[str]
    keys: int
    left_out: int
    total_bytes: int
    bytes_written: int
    bytes_received: int
    seconds: dict[str, float] = field(default_factory=dict)
    version: int | None = None
    base_version: int | None = None

    def summary(self) -> str:
        """Return one line for people."""
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return (
            f"published {_tensors(self.keys)} in {files} in {self.output}: {format_bytes(self.total_bytes)}, "
            f"{_speed(self.total_bytes, self.seconds)}"
        )


@dataclass(frozen=True)
class VerifyReport(Report):
    """The result of verifying a checkpoint.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        files: Number of data files that the manifest names.
        keys: Tensors in them.
        items: Shards in them.
        total_bytes: Bytes of tensors in them.
        bytes_read: Bytes read of the data files, headers included.
        bytes_verified: Bytes of tensors that have the checksum they were written with.
        problems: All problems, in the order of the files; ``offset`` and ``end`` count from the start of the file.
        recoverable: Whether a load still gives everything as it was saved: all that is damaged
            has intact replicas, or no load needs it.
        seconds: Wall time; ``total`` is all of it.
        has_checksums: Whether there are checksums to compare; other programs write none.
    """

    path: str
    unique_id: int
    files: int = 0
    keys: int = 0
    items: int = 0
    total_bytes: int = 0
    bytes_read: int = 0
    bytes_verified: int = 0
    problems: list[Problem] = field(default_factory=list)
    recoverable: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    has_checksums: bool = True

    derived = ("ok",)

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems

    def summary(self) -> str:
        """Return one line for people."""
        total = self.seconds.get("total", 0.0)
        count = len(self.problems)
        found = "nothing is wrong" if self.ok else "1 problem" if count == 1 else f"{count} problems"
        if count and self.recoverable:
            found += ", in spite of which everything can be loaded"
        if not self.has_checksums:
            found += " with headers and sizes" if self.ok else ""
            read = f"{format_bytes(self.total_bytes)} have no checksums and were not read"
            if self.bytes_read:
                read = f"{format_bytes(self.bytes_verified)} as written; the rest has no checksums and was not read"
            return (
                f"looked through {self.path}: {found}; {_tensors(self.keys)}, {self.items} items, {self.files} files; "
                f"{read}, {total:.2f} s"
            )
        return (
            f"verified {self.path} (id {self.unique_id}): {found}; {_tensors(self.keys)}, {self.items} items, "
            f"{self.files} files, {format_bytes(self.bytes_verified)} of {format_bytes(self.total_bytes)} as written, "
            f"{_speed(self.bytes_read, self.seconds)}"
        )


@dataclass(frozen=True)
class RepairReport(Report):
    """The result of rebuilding a manifest from the data files.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        save_token: The token of the save whose files the manifest names.
        step: Its training step, if it was recorded.
        files: Names of the data files.
        left_out: Names of data files of the same id that belong to other saves.
        keys: Tensors in them.
        items: Shards in them.
        bytes_read: Bytes of tensors read to compute their checksums anew.
        partial: The missing data files, as the manifest names them; empty if all files of the save are there.
        seconds: Wall time; ``total`` is all of it.
    """

    path: str
    unique_id: int
    save_token: str
    step: int | None
    files: list[str]
    left_out: list[str]
    keys: int
    items: int
    bytes_read: int
    partial: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        total = self.seconds.get("total", 0.0)
        text = (
            f"rebuilt the manifest of id {self.unique_id} in {self.path} from {len(self.files)} data files: "
            f"{_tensors(self.keys)}, {self.items} items, {format_bytes(self.bytes_read)}, {total:.2f} s"
        )
        if self.left_out:
            text += f", {len(self.left_out)} files of other saves left out"
        if self.partial:
            text += f". The checkpoint is partial: {self.partial}"
        return (
            f"{text}. The checksums are those of the data as it is now: damage that happened before this repair cannot "
            "be found"
        )
