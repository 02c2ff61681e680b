"""Problems and errors, with key, rank, file, expected, got and remedy; and failures, which are errors as data.

Tested in tests/catalog/test_errors.py and tests/catalog/test_failures.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle_flexckpt.catalog.texts import format_ranks, printable

# Thousands of lines would hide the cause: the first ones and the count are shown.
MAX_LISTED = 20
# Codes of problems that many keys have of one cause: those with one remedy have one line, with the expected and got of
# the first, and the keys of all.
_COMMON = frozenset(("FC106", "FC205", "FC206"))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: The problem in a few words.
        key: Name of the tensor.
        rank: Rank on which it was found.
        file: File in which it was found.
        expected: What should have been there.
        got: What was there.
        remedy: What the user can do about it.
        offset: The first byte of the file that is concerned.
        end: The first byte after these.
        code: The section of docs/troubleshooting.md about this kind of problem; whatever has a remedy has one.
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
    code: str | None = None

    def __str__(self) -> str:
        return self.on([] if self.rank is None else [self.rank])

    def on(self, ranks: Sequence[int]) -> str:
        """Return the text of the problem, as these ranks have it."""
        where = [f"key {self.key!r}"] if self.key is not None else []
        where += [f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"] if ranks else []
        where += [f"file {self.file!r}"] if self.file is not None else []
        where += [f"byte {self.offset!r}"] if self.offset is not None else []
        text = self.what + (f" ({', '.join(where)})" if where else "")
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.got is not None:
            text += f"; got {self.got}"
        if self.remedy:
            text += f". Remedy ({self.code}): {self.remedy}"
        return text


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first names as printable text, and the number of further ones."""
    return ", ".join(map(printable, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def without_remedy(error: Exception) -> str:
    """Return an error's text without its remedy, for an error with another remedy."""
    return str(error).partition(". Remedy (")[0]


class CheckpointError(RuntimeError):
    """The base class of every error that this library raises about a checkpoint or a state."""


class CorruptCheckpointError(CheckpointError):
    """An error of a checkpoint whose bytes are not those that were written."""


class UnreadableCheckpointError(CheckpointError):
    """An error of storage that could not be read now; the stored data may be whole."""


class NotDurableError(CheckpointError):
    """An error of a checkpoint that is in place but not durable: a loss of power may undo it."""


class TakenError(CheckpointError):
    """An error of a save whose directory another save is writing to."""

    @classmethod
    def of(cls, path: str, by: object = None) -> TakenError:
        """Return the error about a directory, with the other save's process, if it is known."""
        who = "" if by is None else f" ({by})"
        return cls(
            f"another save is writing to {path}{who}. Remedy (FC403): wait until it has finished, or save elsewhere"
        )


class LostRankError(CheckpointError):
    """The loss of a rank (killed, crashed, cut off) while the others were waiting for it."""


class EngineError(CheckpointError):
    """An error of a serving engine that cannot be reached, or that refused weights; it has the version it had."""


class EngineLostError(CheckpointError):
    """An error of a serving engine that holds no version as a whole: it is paused, and has to be started again."""


class StoppedExchangeError(CheckpointError):
    """The end of a connection by which ranks send each other data, mostly because another rank failed.

    The call raises an error of the same class as that rank's, or a CheckpointError.
    """


class OverflowingCastError(CheckpointError):
    """An error of a cast that would have made finite numbers infinite or NaN.

    Attributes:
        row: The row that was being filled; -1: unknown.
    """

    def __init__(self, text: str, row: int = -1) -> None:
        super().__init__(text)
        self.row = row

    def of_key(self, key: str) -> OverflowingCastError:
        """Return the error with the key that it is about."""
        return OverflowingCastError(f"key {key!r}: {self}")


class UnsafePickleError(CorruptCheckpointError):
    """An error of a pickle that asks for more than plain data; nothing in it has been executed."""


class ValidationError(CheckpointError, ValueError):
    """An error of a request that does not fit; nothing has been touched.

    Attributes:
        problems: All problems found, as :class:`Problem` or as texts that came from another rank.
        lines: Their texts, each once. Problems that differ in the rank alone have one line.
    """

    def __init__(self, problems: Problem | str | Sequence[Problem | str], context: str = "") -> None:
        self.problems = [problems] if isinstance(problems, (Problem, str)) else list(problems)
        self.lines = _lines(self.problems)
        head = f"{context}: " if context else ""
        if len(self.lines) == 1:
            super().__init__(head + self.lines[0])
            return
        listed = [f"  {i + 1}. {line}" for i, line in enumerate(self.lines[:MAX_LISTED])]
        if len(self.lines) > MAX_LISTED:
            listed.append(f"  ... and {len(self.lines) - MAX_LISTED} more")
        super().__init__(f"{head}{len(self.lines)} problems\n" + "\n".join(listed))


def _lines(problems: Sequence[Problem | str]) -> list[str]:
    """Return the texts of problems, each once, with all ranks that have it; one text for those with a common remedy."""
    found: dict[str, tuple[Problem, set[int]] | None] = {}
    for problem in problems:
        if isinstance(problem, str):
            found.setdefault(problem)
            continue
        # The text of a Problem is of one rank or of several, and never of a rank that is no number.
        group = found.setdefault(str(problem) if problem.rank is None else problem.on([-1]), (problem, set()))
        if group is not None and problem.rank is not None:
            group[1].add(problem.rank)
    alike: dict[object, list[tuple[Problem, list[int]]]] = {}
    for text, group in found.items():
        if group is None:
            alike[text] = []
            continue
        problem, ranks = group[0], sorted(group[1])
        kind = (problem.what, problem.code, _without_key(problem)) if problem.code in _COMMON else text
        alike.setdefault(kind, []).append((problem, ranks))
    return [_one_text(each) if each else str(text) for text, each in alike.items()]


def _without_key(problem: Problem) -> str:
    """Return a remedy with a mark in place of the problem's key."""
    return re.sub(rf"(?<![\w.]){re.escape(problem.key or '')}(?!\w)", "KEY", problem.remedy or "")


def _one_text(problems: Sequence[tuple[Problem, list[int]]]) -> str:
    """Return the text of problems, each with its ranks, that differ in key, expected and got alone."""
    first = problems[0][0]
    ranks = sorted({rank for each, theirs in problems if each.got == first.got for rank in theirs})
    others = []
    for each, theirs in problems[1:]:
        on = f"rank{'s' * (len(theirs) > 1)} {format_ranks(theirs)}: "
        own = f" ({on * (theirs != ranks)}expected {each.expected}, got {each.got})"
        others.append(repr(each.key) + own * (each.got != first.got))
    if not others:
        return first.on(ranks)
    more, has_key = f"{len(others)} more key{'s' * (len(others) > 1)}", first.remedy != _without_key(first)
    got = f"{first.got}, and the like for {more}: {listed(others, MAX_LISTED)}"
    return replace(first, got=got).on(ranks) + "; likewise for the other keys" * has_key


class AoaError(ValidationError):
    """An error of an AOA program that is malformed or does not fit the tensors; nothing has been touched."""


# A traceback gives the names by which users catch the public ones.
for _public in (
    CheckpointError,
    CorruptCheckpointError,
    EngineError,
    EngineLostError,
    LostRankError,
    UnreadableCheckpointError,
    ValidationError,
):
    _public.__module__ = "paddle_flexckpt"
AoaError.__module__ = "paddle_flexckpt.aoa"

# The classes that are sent. An error of another class is sent as its nearest base class among these.
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CorruptCheckpointError,
        UnreadableCheckpointError,
        NotDurableError,
        TakenError,
        LostRankError,
        EngineError,
        EngineLostError,
        StoppedExchangeError,
        UnsafePickleError,
        ValidationError,
        AoaError,
    )
}


@dataclass(frozen=True)
class Failure:
    """An error as data: the name of its class, and its problems."""

    kind: str
    problems: tuple[str, ...]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return an error's class and text; other errors become a CheckpointError that names their class."""
        if not isinstance(error, CheckpointError):
            return cls("CheckpointError", (f"{type(error).__name__}: {error}",))
        kind = next(kind for kind in type(error).__mro__ if kind in _KINDS.values()).__name__
        return cls(kind, tuple(error.lines) if isinstance(error, ValidationError) else (str(error),))

    def encode(self) -> bytes:
        """Return the failure as JSON."""
        return json.dumps(self.as_dict()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """Return the failure that :meth:`encode` encoded."""
        return cls.from_dict(json.loads(data))

    def as_dict(self) -> dict[str, Any]:
        """Return the failure as a part of a larger JSON text."""
        return {"kind": self.kind, "problems": list(self.problems)}

    @classmethod
    def from_dict(cls, decoded: dict[str, Any]) -> Failure:
        """Return the failure of which :meth:`as_dict` made a dict; other entries are ignored.

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
    """Return one failure for all ranks that failed: each problem once, with its ranks, causes first.

    Problems that differ only in each rank's own number are one. A remedy of all of them stands once, at the end.
    """
    by_text: dict[str, dict[int, str]] = {}
    for rank, failure in sorted(failures, key=lambda each: each[1].kind == StoppedExchangeError.__name__):
        # The rank as a Problem writes it: last, first, or alone in the brackets.
        own = re.compile(rf", rank {rank}(?=[,)])|(?<=\()rank {rank}, | \(rank {rank}\)")
        for problem in failure.problems:
            by_text.setdefault(own.sub("", problem, count=1), {}).setdefault(rank, problem)
    texts = tuple(
        f"[ranks {format_ranks(sorted(ranks))}] {shared}"
        if len(ranks) > 1
        else "".join(f"[rank {rank}] {text}" for rank, text in ranks.items())
        for shared, ranks in by_text.items()
    )
    validation = {name for name, kind in _KINDS.items() if issubclass(kind, ValidationError)}
    # A rank whose exchange was cut off knows little of the cause.
    kinds = {failure.kind for _, failure in failures} - {StoppedExchangeError.__name__} or {CheckpointError.__name__}
    if kinds <= validation:
        return Failure(kinds.pop() if len(kinds) == 1 else ValidationError.__name__, texts)
    told, remedies = zip(*(text.partition(". Remedy (")[::2] for text in texts))
    texts = (*told[:-1], texts[-1]) if len({*remedies}) == 1 else texts
    return Failure(min(kinds - validation), texts)
