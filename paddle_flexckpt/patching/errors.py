"""The error of everything that concerns patches."""

from __future__ import annotations

from collections.abc import Sequence


class PatchError(RuntimeError):
    """A patch is malformed, does not fit, or cannot be taken back; unless the text says otherwise nothing has changed.

    Attributes:
        problems: Everything that was found, one text each.
    """

    def __init__(self, head: str, problems: Sequence[str] = ()) -> None:
        self.problems = list(problems)
        super().__init__("\n  ".join([head, *self.problems]))
