"""Reports: what a save, a load or something else did, as one line for people and one dict for machines.

Tested in tests/live/test_policies.py and tests/cli/test_cli.py.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_flexckpt.catalog.texts import format_bytes

if TYPE_CHECKING:
    from paddle_flexckpt.catalog import Problem

# Patterns of keys that a line shows, and keys of which patterns are looked for: of more it takes too long.
_PATTERNS, _KEYS = 3, 20_000


def replica_warning(source: str, replicas_used: dict[str, str]) -> str:
    """Return the warning that replicas had to serve: by key, what was damaged and which file served instead."""
    key, text = next(iter(replicas_used.items()))
    count = "a tensor was" if len(replicas_used) == 1 else f"{len(replicas_used)} tensors were"
    return (
        f"{source} is damaged: {count} read from replicas, such as {key!r}: {text}. `flexckpt verify` lists all that "
        "is damaged"
    )


def order_warning(source: str, keys: list[str]) -> str:
    """Return the warning that nobody knows in which order elements of parameters and states lie that may be fused."""
    return (
        f"{source} does not say in which order the elements of {len(keys)} tensors lie that are cut along the outputs "
        "of their layer. Where one of them fuses several parameters (q, k and v; gate and up), it was taken as its "
        "shards are: part by part, not in natural order. Remedy: load it once into parameters that are marked with a "
        "FusedAxis, under the strategy of its save, and save it again; or give AOA statements such as "
        f"'{keys[0]} -> {keys[0]}, fused_ffn'. These are: {', '.join(keys)}"
    )


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _of_one_rank(replicas: dict[str, str]) -> str:
    """Return what a summary says of keys whose replicas need not be equal."""
    differing = [key for key, text in replicas.items() if text != "equal"]
    if not differing:
        return ""
    key = differing[0]
    return f", replicas of {_tensors(len(differing))} differ, such as {key!r}: {replicas[key]}"


def _rate(count: int, seconds: float) -> str:
    return f"{format_bytes(int(count / seconds))}/s" if seconds > 0 else "-"


class Report:
    """Base of all reports: dataclasses whose fields say what was done.

    As JSON it begins with ``schema``, which names what it is: docs/schemas has a JSON Schema for each name. A new field
    leaves the version as it is; one that goes, or means something else, makes another.
    """

    #: The version of what :meth:`to_dict` returns.
    schema_version: ClassVar[int] = 1
    #: Properties that are part of it, besides the fields; any dataclass within may have some.
    derived: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def schema_name(cls) -> str:
        """Return the name of the schema: ``save`` of a SaveReport."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Report")).lower()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return {name: plain(value) for name, value in _fields_of(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and which schema they have, as JSON has values: it knows no number that is not finite."""
        schema = {"name": self.schema_name(), "version": self.schema_version}
        return {"schema": schema, **plain(self.as_dict(), finite=True)}

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any, finite: bool = False) -> Any:
    """Return a value with dataclasses as dicts; ``finite``: and ``"nan"``, ``"inf"`` and ``"-inf"`` as text."""
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


@dataclass(frozen=True)
class SaveReport(Report):
    """Say what a save did.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        keys: Tensors saved, over all ranks.
        items: Shards stored, over all ranks.
        bytes_written: Bytes of tensors that this rank wrote.
        total_bytes: Bytes of tensors that all ranks wrote.
        held_bytes: Bytes of tensors that all ranks hold, replicas counted.
        imbalance: Most loaded rank's bytes over the mean.
        seconds: Wall time on this rank, by phase; ``total`` is all. An asynchronous save ``blocked`` the caller for
            so long, of which ``queue`` was spent waiting for earlier saves; ``write`` and ``commit`` are the writer's.
        replicas: Of keys whose replicas need not be equal (``check_replicas``; running statistics): ``"equal"``, or
            that and by how much they differ, and whose values were saved. Without those that are only to be close and
            are equal.
        warnings: What did not go as it should have, without harm to the checkpoint.
        rank_bytes: ``bytes_written`` of all ranks, in the order of the group.
        rank_seconds: Of all ranks likewise, by phase: ``plan``, and ``write``, without waiting for others; of an
            asynchronous save ``stage`` instead.
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

    def summary(self) -> str:
        """Return one line for people."""
        total = self.seconds.get("total", 0.0)
        blocked = f", training stood still for {self.seconds['blocked']:.2f} s" if "blocked" in self.seconds else ""
        return (
            f"saved {_tensors(self.keys)} to {self.path} (id {self.unique_id}): {format_bytes(self.total_bytes)} of "
            f"{format_bytes(self.held_bytes)} held, {self.items} items, imbalance {self.imbalance:.2f}, "
            f"{total:.2f} s, {_rate(self.total_bytes, total)}{blocked}{_of_one_rank(self.replicas)}"
        )


def _patterns(keys: Sequence[str]) -> str:
    """Return the first patterns of keys, numbers as ``#``, with how many keys each stands for."""
    if len(keys) > _KEYS:
        return ""
    counts = Counter(re.sub(r"\d+", "#", key) for key in keys)
    shown = [pattern if count == 1 else f"{pattern} x {count}" for pattern, count in counts.most_common(_PATTERNS)]
    more = [f"{len(counts) - _PATTERNS} more patterns"] if len(counts) > _PATTERNS else []
    return f" ({', '.join([*shown, *more])})" if shown else ""


@dataclass(frozen=True)
class LoadReport(Report):
    """Say what a load or a reshard did on this rank.

    Attributes:
        source: Where the bytes came from: a path, or ``memory``.
        unique_id: The checkpoint's id, or None.
        keys: Tensors filled on this rank.
        missing: Keys that this rank asked for and the source does not have; their targets are unchanged.
        unexpected: Keys that the source has and no rank asked for.
        aliases: Keys that were found under another name (tied parameters; names of Paddle's other worlds).
        cast: Keys whose values were cast, with the dtypes.
        masters: Master weights that started from their parameters, and parameters taken from their master weights.
        fused: Fused parameters and states that were saved under another degree, with the numbers of parts.
        maybe_fused: Source keys that may be fused, for all that an old or a foreign source says, and are cut otherwise
            than here: those in ``fused`` were taken for as many parts as shards, others were taken as they are.
        kept: Targets of which something keeps what it had, as AOA statements say.
        computed: Targets of which something was computed, as AOA statements say.
        bytes_needed: Bytes of the pieces that fill this rank's targets.
        bytes_read: Bytes of tensors read from files.
        bytes_verified: Bytes of these whose checksums were compared.
        bytes_extra: Bytes of these that no target needed: they were read so that others could be verified, or turned
            out to be damaged.
        bytes_copied: Bytes copied within this rank's memory.
        bytes_received: Bytes received from other ranks.
        bytes_sent: Bytes sent to other ranks.
        reads: Read calls.
        comm_method: Of files: ``"direct"`` if every rank read what it needs (and sees), ``"cooperative"`` if one rank
            read for all that need the same.
        comm_reason: Why.
        peak_scratch_bytes: The most memory that operands of computed values took at any time.
        total_bytes: ``bytes_needed`` of all ranks.
        replicas_used: By key, what was damaged of what this rank read, and which file of which rank served instead.
        replicas: Of a reshard: as in SaveReport, of the sources.
        partial: What the checkpoint lacks of its files, where a repair has rebuilt its manifest without them.
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
    comm_reason: str = ""
    peak_scratch_bytes: int = 0
    total_bytes: int = 0
    replicas_used: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    partial: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        total = self.seconds.get("total", 0.0)
        what = "resharded" if self.source == "memory" else "loaded"
        origin = "in memory" if self.source == "memory" else f"from {self.source} (id {self.unique_id})"
        text = (
            f"{what} {_tensors(self.keys)} {origin}: {format_bytes(self.total_bytes)} on all ranks, "
            f"{total:.2f} s, {_rate(self.total_bytes, total)}"
        )
        for name, count in (
            ("missing", len(self.missing)),
            ("unexpected", len(self.unexpected)),
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
                text += f", {count} {name}{_patterns(getattr(self, name, ()))}"
        text += _of_one_rank(self.replicas)
        text += f"; the checkpoint is partial: {self.partial}" if self.partial else ""
        if self.comm_method == "cooperative":
            text += f", read once for all ranks ({self.comm_reason})"
        if self.bytes_extra:
            text += f", {format_bytes(self.bytes_extra)} more than needed read on this rank to verify it"
        return text


@dataclass(frozen=True)
class ExportReport(Report):
    """Say what an export did.

    Attributes:
        source: The checkpoint's directory.
        unique_id: Its id there.
        output: The directory written to.
        files: Names of the files of tensors, in order.
        keys: Tensors written.
        left_out: Optimizer states and tensors of extra state that were not asked for.
        unfed: Keys that the AOA statements would make, if the checkpoint had what they need: states, with ``states``.
        total_bytes: Bytes of tensors written.
        bytes_read: Bytes of tensors read.
        bytes_verified: Bytes of these whose checksums were compared.
        bytes_extra: Bytes of these that no tensor needed: they were read so that others could be verified, or turned
            out to be damaged.
        peak_scratch_bytes: The most memory that operands of computed values took at any time.
        maybe_fused: Keys that may be fused, for all that an old or a foreign checkpoint says: written as they lie.
        replicas_used: By key, what was damaged and which file of which rank served instead.
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
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        total = self.seconds.get("total", 0.0)
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        text = (
            f"exported {_tensors(self.keys)} from {self.source} (id {self.unique_id}) to {files} in {self.output}: "
            f"{format_bytes(self.total_bytes)}, {total:.2f} s, {_rate(self.total_bytes, total)}"
        )
        if self.left_out:
            text += f", {self.left_out} states left out"
        if self.replicas_used:
            text += f", {len(self.replicas_used)} read from replicas, as copies of them are damaged"
        return text + (f", nothing feeds {len(self.unfed)} keys such as {self.unfed[0]}" if self.unfed else "")


@dataclass(frozen=True)
class PublishReport(Report):
    """Say what publishing a live model did.

    Attributes:
        output: The directory written to.
        files: Names of the files of tensors of all ranks, in order.
        keys: Tensors written by all ranks.
        left_out: Optimizer states and tensors of extra state, which are not written.
        total_bytes: Bytes of tensors that all ranks wrote.
        bytes_written: Bytes of tensors that this rank wrote.
        bytes_received: Bytes of tensors that it received for that from other ranks.
        seconds: Wall time; ``total`` is all of it.
    """

    output: str
    files: list[str]
    keys: int
    left_out: int
    total_bytes: int
    bytes_written: int
    bytes_received: int
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        total = self.seconds.get("total", 0.0)
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return (
            f"published {_tensors(self.keys)} in {files} in {self.output}: {format_bytes(self.total_bytes)}, "
            f"{total:.2f} s, {_rate(self.total_bytes, total)}"
        )


@dataclass(frozen=True)
class VerifyReport(Report):
    """Say what is wrong with a checkpoint.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        files: Number of data files that the manifest names.
        keys: Tensors in them.
        items: Shards in them.
        total_bytes: Bytes of tensors in them.
        bytes_read: Bytes read of the data files, headers included.
        bytes_verified: Bytes of tensors that have the checksum they were written with.
        problems: All that is wrong, in the order of the files; ``offset`` and ``end`` count from the start of the file.
        recoverable: Whether a load gives everything as it was saved nonetheless, with ``verify="full"``: what is
            damaged has intact replicas, or no load needs it.
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
            return (
                f"looked through {self.path}: {found}; {_tensors(self.keys)}, {self.items} items, {self.files} files; "
                f"{format_bytes(self.total_bytes)} have no checksums and were not read, {total:.2f} s"
            )
        return (
            f"verified {self.path} (id {self.unique_id}): {found}; {_tensors(self.keys)}, {self.items} items, "
            f"{self.files} files, {format_bytes(self.bytes_verified)} of {format_bytes(self.total_bytes)} as written, "
            f"{total:.2f} s, {_rate(self.bytes_read, total)}"
        )


@dataclass(frozen=True)
class RepairReport(Report):
    """Describe a manifest that was rebuilt from the data files.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        save_token: That of the save whose files were taken.
        step: Its training step, if it was recorded.
        files: Names of the data files.
        left_out: Names of data files of the same id that belong to other saves.
        keys: Tensors in them.
        items: Shards in them.
        bytes_read: Bytes of tensors read to compute their checksums anew.
        partial: What the manifest says of data files that are missing; empty if it is that of the whole save.
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
