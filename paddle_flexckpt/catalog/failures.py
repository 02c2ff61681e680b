"""Carry errors to other ranks and processes as plain data, and make one of the errors of many ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog.errors import (
    AoaError,
    CheckpointError,
    CorruptCheckpointError,
    LostRankError,
    UnreadableCheckpointError,
    UnsafePickleError,
    ValidationError,
)

# The classes that travel. An error of another class travels as the nearest of these that it is derived from.
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CorruptCheckpointError,
        UnreadableCheckpointError,
        LostRankError,
        UnsafePickleError,
        ValidationError,
        AoaError,
    )
}


@dataclass(frozen=True)
class Failure:
    """Hold what is left of an error where it is not raised.

    Attributes:
        kind: Name of the error's class.
        problems: What it says, problem by problem.
    """

    kind: str
    problems: tuple[str, ...]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return an error's class and text; other errors become a CheckpointError that names their class."""
        if not isinstance(error, CheckpointError):
            return cls("CheckpointError", (f"{type(error).__name__}: {error}",))
        kind = next(kind for kind in type(error).__mro__ if kind in _KINDS.values()).__name__
        problems = error.problems if isinstance(error, ValidationError) else [error]
        return cls(kind, tuple(map(str, problems)))

    def encode(self) -> bytes:
        """Return the failure as JSON."""
        return json.dumps(self.as_dict()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """Return the failure that :meth:`encode` made the bytes of."""
        return cls.from_dict(json.loads(data))

    def as_dict(self) -> dict[str, Any]:
        """Return the failure as a part of a larger JSON text."""
        return {"kind": self.kind, "problems": list(self.problems)}

    @classmethod
    def from_dict(cls, decoded: dict[str, Any]) -> Failure:
        """Return the failure that :meth:`as_dict` made the dict of; other entries of the dict do not matter.

        Raises:
            KeyError: It is not one.
        """
        return cls(str(decoded["kind"]), tuple(map(str, decoded["problems"])))

    def error(self, context: str = "") -> CheckpointError:
        """Return the error."""
        kind = _KINDS.get(self.kind, CheckpointError)
        if issubclass(kind, ValidationError):
            return kind(list(self.problems), context)
        return kind((f"{context}: " if context else "") + "; ".join(self.problems))


def combine(failures: Sequence[tuple[int, Failure]]) -> Failure:
    """Return one failure for all ranks: each problem once, with the ranks that met it.

    Args:
        failures: Rank and failure of each rank that failed; at least one.
    """
    met: dict[str, list[int]] = {}
    for rank, failure in failures:
        for problem in failure.problems:
            met.setdefault(problem, []).append(rank)
    texts = tuple(f"[rank {', '.join(map(str, ranks))}] {problem}" for problem, ranks in met.items())
    validation = {name for name, kind in _KINDS.items() if issubclass(kind, ValidationError)}
    kinds = {failure.kind for _, failure in failures}
    if kinds <= validation:
        return Failure(kinds.pop() if len(kinds) == 1 else ValidationError.__name__, texts)
    return Failure(min(kinds - validation), texts)
