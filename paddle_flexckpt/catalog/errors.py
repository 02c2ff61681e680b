"""Problems and errors, which name key, rank, file, expected, got and remedy; and failures, errors sent as data.

Tested in tests/catalog/test_errors.py and tests/catalog/test_failures.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog.texts import printable

# An error text with thousands of lines hides its cause; the first ones and the count tell the story.
MAX_LISTED = 20


@dataclass(frozen=True)
class Problem:
    """Describe one thing that is wrong.

    Attributes:
        what: The problem in a few words.
        key: Name of the tensor.
        rank: Rank on which it was found.
        file: File in which it was found.
        expected: What should have been there.
        got: What was there.
        remedy: What the user can do about it.
        offset: First byte of the file that it concerns.
        end: The first byte beyond those.
    """

    what: str
    key: str | None = None
    rank: int | None = None
    file: str | None = None
    expected: object = None
    got: object = None
    remedy: str | None = None
    offset: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        where = [
            f"{name} {value!r}"
            for name, value in (("key", self.key), ("rank", self.rank), ("file", self.file), ("byte", self.offset))
            if value is not None
        ]
        text = self.what + (f" ({', '.join(where)})" if where else "")
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.got is not None:
            text += f"; got {self.got}"
        if self.remedy:
            text += f". Remedy: {self.remedy}"
        return text


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first names as text that can be printed, and how many more there are."""
    return ", ".join(map(printable, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def without_remedy(error: Exception) -> str:
    """Return an error's text up to its remedy, for an error that has another one."""
    return str(error).partition(". Remedy: ")[0]


class CheckpointError(RuntimeError):
    """Base class of every error that this library raises about a checkpoint or a state."""


class CorruptCheckpointError(CheckpointError):
    """Tell that bytes of a checkpoint are not those that were written."""


class UnreadableCheckpointError(CheckpointError):
    """Report that the storage did not let something be read now; what is stored may be whole."""


class NotDurableError(CheckpointError):
    """Report that a checkpoint is in place, and that storage has not made it durable: a loss of power may undo it."""


class LostRankError(CheckpointError):
    """Tell that a rank has gone (killed, crashed, cut off) while the others were waiting for it."""


class StoppedExchangeError(CheckpointError):
    """Report that ranks could not go on sending each other data: a connection ended, mostly as another rank failed.

    What a call raises is of the class of that rank's error, or a CheckpointError.
    """


class OverflowingCastError(CheckpointError):
    """Tell that a cast would have made finite numbers infinite, or no number.

    Attributes:
        row: The row that was being filled, as far as whoever cast it knew; -1 where it did not.
    """

    def __init__(self, text: str, row: int = -1) -> None:
        super().__init__(text)
        self.row = row

    def of_key(self, key: str) -> OverflowingCastError:
        """Return the error with the key that it is about."""
        return OverflowingCastError(f"key {key!r}: {self}")


class UnsafePickleError(CorruptCheckpointError):
    """Tell that a pickle asks for more than plain data; nothing of it has been carried out."""


class ValidationError(CheckpointError, ValueError):
    """Tell that what was asked for does not fit; nothing has been touched.

    Attributes:
        problems: All problems found, as :class:`Problem` or as texts that came from another rank.
    """

    def __init__(self, problems: Problem | str | Sequence[Problem | str], context: str = "") -> None:
        self.problems = [problems] if isinstance(problems, (Problem, str)) else list(problems)
        lines = list(dict.fromkeys(str(problem) for problem in self.problems))
        head = f"{context}: " if context else ""
        if len(lines) == 1:
            super().__init__(head + lines[0])
            return
        listed = [f"  {i + 1}. {line}" for i, line in enumerate(lines[:MAX_LISTED])]
        if len(lines) > MAX_LISTED:
            listed.append(f"  ... and {len(lines) - MAX_LISTED} more")
        super().__init__(f"{head}{len(lines)} problems\n" + "\n".join(listed))


class AoaError(ValidationError):
    """Tell that an AOA program is malformed or does not fit the tensors; nothing has been touched."""


# The classes that travel. An error of another class travels as the nearest of these that it is derived from.
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CorruptCheckpointError,
        UnreadableCheckpointError,
        NotDurableError,
        LostRankError,
        StoppedExchangeError,
        UnsafePickleError,
        ValidationError,
        AoaError,
    )
}


@dataclass(frozen=True)
class Failure:
    """Hold what is left of an error where it is not raised: the name of its class, and each of its problems."""

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
    """Return one failure for all ranks that failed: each problem once, with the ranks that met it, culprits first.

    Problems that name nothing but each rank's own number in another way are one.
    """
    met: dict[str, dict[int, str]] = {}
    for rank, failure in sorted(failures, key=lambda each: each[1].kind == StoppedExchangeError.__name__):
        own = re.compile(rf", rank {rank}(?=[,)])|(?<=\()rank {rank}, | \(rank {rank}\)")
        for problem in failure.problems:
            met.setdefault(own.sub("", problem, count=1), {}).setdefault(rank, problem)
    texts = tuple(
        f"[rank {', '.join(map(str, told))}] {shared if len(told) > 1 else next(iter(told.values()))}"
        for shared, told in met.items()
    )
    validation = {name for name, kind in _KINDS.items() if issubclass(kind, ValidationError)}
    # A rank that was left in the middle of an exchange says little of why.
    kinds = {failure.kind for _, failure in failures} - {StoppedExchangeError.__name__} or {CheckpointError.__name__}
    if kinds <= validation:
        return Failure(kinds.pop() if len(kinds) == 1 else ValidationError.__name__, texts)
    return Failure(min(kinds - validation), texts)
