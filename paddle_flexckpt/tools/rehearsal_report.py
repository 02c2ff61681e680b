"""The report of a rehearsal of a load: for the job, and for each of its ranks.

Tested in tests/tools/test_rehearsal.py and tests/cli/test_rehearse.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.report import Report


@dataclass(frozen=True)
class RankReads:
    """The reads of each of some ranks, which are all the same.

    Attributes:
        ranks: The ranks.
        bytes_needed: Bytes of the pieces that fill a rank's targets.
        bytes_read: Bytes of tensors read from files.
        reads: Read calls.
        files: Files opened.
        target_bytes: Bytes of the targets.
        scratch_bytes: The most memory of operands of computed values at any time.
        sources: Bytes of these pieces by the rank that saved them; empty unless asked for.
        buffer_bytes: Memory of read buffers, with four threads.
        object_requests: Requests to an object store, if the checkpoint is in one; else 0.
        object_bytes: Bytes of these requests, gaps included.
    """

    ranks: list[int]
    bytes_needed: int
    bytes_read: int
    reads: int
    files: int
    target_bytes: int
    scratch_bytes: int
    sources: dict[int, int] = field(default_factory=dict)
    buffer_bytes: int = 0
    object_requests: int = 0
    object_bytes: int = 0
    derived: ClassVar[tuple[str, ...]] = ("amplification", "memory_bytes")

    @property
    def amplification(self) -> float:
        """Return the bytes read per byte needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    @property
    def memory_bytes(self) -> int:
        """Return the most memory of targets, scratch and buffers."""
        return self.target_bytes + self.scratch_bytes + self.buffer_bytes

    def seconds(self, rate: float, request: float) -> float:
        """Return the seconds of reading, from bytes per second and seconds per request."""
        return (self.object_bytes or self.bytes_read) / rate + (self.object_requests or self.reads) * request


@dataclass(frozen=True)
class RehearsalReport(Report):
    """The prediction of a load under a layout.

    Attributes:
        source: The checkpoint's directory.
        unique_id: Its id.
        strategy: The strategy of the layout.
        world_size: Number of its ranks.
        error: The error that the job would raise on every rank; "" if the load succeeds.
        missing: Keys that ranks ask for and the source lacks; their targets would stay unchanged.
        unexpected: Keys that the source has and no rank asks for.
        aliases: Keys that would be found under another name.
        cast: Keys whose values would be cast, with the dtypes.
        masters: Master weights that would start from their parameters, and parameters from their master weights.
        maybe_fused: Source keys that may be fused without a record of it in the source.
        notes: Assumptions of the rehearsal.
        ranks: The reads of each rank; equal ranks together.
        total_bytes: ``bytes_needed`` of all ranks.
        cooperative: If one rank reads for all (``comm_method="cooperative"``): ``bytes_read``, ``reads``,
            ``bytes_received`` and ``bytes_sent``, by rank; for an object store also ``object_requests`` and
            ``object_bytes``. Empty unless asked for.
        seconds: The slowest rank's seconds at the given rate, by way of reading; empty without a rate.
    """

    source: str
    unique_id: int | None
    strategy: str
    world_size: int
    error: str = ""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    cast: dict[str, str] = field(default_factory=dict)
    masters: dict[str, str] = field(default_factory=dict)
    maybe_fused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ranks: list[RankReads] = field(default_factory=list)
    total_bytes: int = 0
    cooperative: dict[str, list[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    derived = ("ok",)

    @property
    def ok(self) -> bool:
        """Return whether the checkpoint loads."""
        return not self.error

    @property
    def worst(self) -> RankReads:
        """Return the first of the ranks that read the most."""
        return max(self.ranks, key=lambda each: each.bytes_read)

    def summary(self) -> str:
        """Return one line for people."""
        if not self.ok:
            return f"{self.source} (id {self.unique_id}) does not load under {self.strategy}: {self.error}"
        worst, reads = self.worst, sum(len(each.ranks) * each.reads for each in self.ranks)
        read = sum(len(each.ranks) * each.bytes_read for each in self.ranks)
        under = f"under {self.strategy} on {self.world_size} ranks" if self.world_size > 1 else "on 1 rank"
        text = (
            f"{self.source} (id {self.unique_id}) loads {under}: "
            f"{format_bytes(self.total_bytes)} needed, {format_bytes(read)} read in {reads} requests; rank "
            f"{worst.ranks[0]} reads the most, {format_bytes(worst.bytes_read)}"
        )
        for name, count in (("missing", len(self.missing)), ("unexpected", len(self.unexpected))):
            text += f", {count} {name}" if count else ""
        if self.cooperative:
            most = {name: format_bytes(max(found)) for name, found in self.cooperative.items()}
            text += (
                f"; read together: {format_bytes(sum(self.cooperative['bytes_read']))} in "
                f"{sum(self.cooperative['reads'])} requests, at most {most['bytes_read']} read, "
                f"{most['bytes_received']} received and {most['bytes_sent']} sent by one rank"
            )
            requests = self.cooperative.get("object_requests")
            text += f", {sum(requests)} requests to an object store" if requests else ""
        return text + "".join(f"; {way}: {value:.1f} s" for way, value in self.seconds.items())
