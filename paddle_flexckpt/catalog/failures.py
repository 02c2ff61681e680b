"""Failures: an error as plain data, for other ranks and other processes, and the errors of many ranks as one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog.errors import CheckpointError, ValidationError


def _kinds(kind: type[CheckpointError] = CheckpointError) -> Iterator[type[CheckpointError]]:
    """This library's classes of errors, as far as their modules have been imported."""
    if kind.__module__.startswith("paddle_flexckpt."):
        yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


@dataclass(frozen=True)
class Failure:
    """What is left of an error where it is not raised.

    Attributes:
        kind: Name of the error's class.
        problems: What it says, problem by problem.
    """

    kind: str
    problems: tuple[str, ...]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """An error's class and text; what is not this library's own becomes a CheckpointError that names its class."""
        if not isinstance(error, CheckpointError):
            return cls("CheckpointError", (f"{type(error).__name__}: {error}",))
        known = set(_kinds())
        kind = next(kind for kind in type(error).__mro__ if kind in known).__name__
        problems = error.problems if isinstance(error, ValidationError) else [error]
        return cls(kind, tuple(map(str, problems)))

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(self.as_dict()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """The failure that :meth:`encode` made the bytes of."""
        return cls.from_dict(json.loads(data))

    def as_dict(self) -> dict[str, Any]:
        """As a part of a larger JSON text."""
        return {"kind": self.kind, "problems": list(self.problems)}

    @classmethod
    def from_dict(cls, decoded: dict[str, Any]) -> Failure:
        """The failure that :meth:`as_dict` made the dict of; other entries of the dict do not matter.

        Raises:
            KeyError: It is not one.
        """
        return cls(str(decoded["kind"]), tuple(map(str, decoded["problems"])))

    def error(self, context: str = "") -> CheckpointError:
        """The error.

        Args:
            context: What was being done.
        """
        kind = {kind.__name__: kind for kind in _kinds()}.get(self.kind, CheckpointError)
        if issubclass(kind, ValidationError):
            return kind(list(self.problems), context)
        return kind((f"{context}: " if context else "") + "; ".join(self.problems))


def combine(failures: Sequence[tuple[int, Failure]]) -> Failure:
    """One failure for all ranks: each problem once, with the ranks that met it.

    Args:
        failures: Rank and failure of each rank that failed; at least one.
    """
    met: dict[str, list[int]] = {}
    for rank, failure in failures:
        for problem in failure.problems:
            met.setdefault(problem, []).append(rank)
    texts = tuple(f"[rank {', '.join(map(str, ranks))}] {problem}" for problem, ranks in met.items())
    validation = {kind.__name__ for kind in _kinds(ValidationError)}
    kinds = {failure.kind for _, failure in failures}
    if kinds <= validation:
        return Failure(kinds.pop() if len(kinds) == 1 else ValidationError.__name__, texts)
    return Failure(min(kinds - validation), texts)
