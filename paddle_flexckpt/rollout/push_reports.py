"""Reports of a channel to an engine: of a push, and of a comparison.

Tested in tests/rollout/test_channel.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.report import Report


@dataclass(frozen=True)
class PushReport(Report):
    """The result of a push of weights to an engine.

    Attributes:
        url: The engine.
        version: The version that it serves now.
        keys: Tensors of the segment.
        left_out: Optimizer states and tensors of extra state, which are not pushed.
        total_bytes: Bytes of tensors in the segment.
        bytes_written: Bytes of tensors that this rank wrote or sent.
        planned: Whether this push planned, because it was the first, or the model has changed.
        recycled: Whether the memory of a segment that the engine has released was used again.
        seconds: Wall time by phase: ``write``, ``stage`` (the engine serves), ``pause`` (it does not); ``total``.
    """

    url: str
    version: str
    keys: int
    left_out: int
    total_bytes: int
    bytes_written: int
    planned: bool
    recycled: bool
    seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for people."""
        return (
            f"pushed version {self.version} to {self.url}: {self.keys} tensors, {format_bytes(self.total_bytes)}, "
            f"{self.seconds.get('total', 0.0):.2f} s; paused {self.seconds.get('pause', 0.0):.2f} s"
        )


@dataclass(frozen=True)
class ComparedWeightsReport(Report):
    """The result of comparing a live model with what an engine's ranks hold.

    Attributes:
        url: The engine.
        version: The version that was compared.
        keys: Tensors of the version.
        engine_ranks: Ranks of the engine that compared.
        different: Tensors whose bytes, as an engine's rank received them, are not those of the model.
        live_compared: Tensors that were read again from the live parameters, over all ranks of the engine.
        live_different: Those of them that differ.
        live_unreadable: Tensors that were not read again, with the reason; at most 20 of each rank.
    """

    url: str
    version: str
    keys: int
    engine_ranks: int
    different: list[str]
    live_compared: int
    live_different: list[str]
    live_unreadable: dict[str, str]

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.different and not self.live_different

    derived = ("is_equal",)

    def summary(self) -> str:
        """Return one line for people."""
        what = f"{self.keys} tensors as received, {self.live_compared} read again from the engine's parameters"
        if self.is_equal:
            return f"{self.url} holds version {self.version} bit for bit: {what}"
        names = listed([*dict.fromkeys([*self.different, *self.live_different])], 5)
        return f"{self.url} differs from version {self.version} in {names}; compared: {what}"
