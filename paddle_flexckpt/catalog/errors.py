"""Problems and errors: every one names key, rank, file, expected, got and remedy where it knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# An error text with thousands of lines hides its cause; the first ones and the count tell the story.
MAX_LISTED = 20


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
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class CheckpointError(RuntimeError):
    """Base class of every error that this library raises about a checkpoint or a state."""


class CorruptCheckpointError(CheckpointError):
    """Bytes of a checkpoint are not those that were written."""


class UnreadableCheckpointError(CheckpointError):
    """Report that the storage did not let something be read now; what is stored may be whole."""


class LostRankError(CheckpointError):
    """A rank has gone (killed, crashed, cut off) while the others were waiting for it."""


class UnsafePickleError(CorruptCheckpointError):
    """A pickle asks for more than plain data; nothing of it has been carried out."""


class ValidationError(CheckpointError, ValueError):
    """What was asked for does not fit; nothing has been touched.

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
    """An AOA program is malformed or does not fit the tensors; nothing has been touched."""
