"""Hold what a command that can find something wrong returns."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """The text to print, and the exit code."""

    text: str
    code: int = 0
