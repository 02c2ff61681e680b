"""Errors of AOA programs show the statement and the column. Tested in tests/aoa/test_compile_errors.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle_flexckpt.catalog import AoaError

__all__ = ["AoaError", "Place", "StatementError", "describe_problem", "shorten"]

# A macro may expand to hundreds of names; the two ends of a line identify it.
MAX_LINE = 400


@dataclass(frozen=True)
class Place:
    """A place in a program.

    Attributes:
        number: Number of the text in ``aoa_statements``, from 1.
        text: The statement as the user wrote it.
        column: Column in it, from 1; 0: the whole statement.
    """

    number: int
    text: str
    column: int = 0

    def at(self, column: int) -> Place:
        """Return the place of another column in the same statement."""
        return Place(self.number, self.text, column)


class StatementError(ValueError):
    """An error in a statement whose place is not known yet; an unknown column is 0."""

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.column = column


def shorten(text: str) -> str:
    """Return a line of bounded length."""
    text = text.strip()
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE // 2]} ... {text[-MAX_LINE // 2 :]}"


def describe_problem(message: str, place: Place, expansion: Sequence[str] = ()) -> str:
    """Return a problem with its statement, a mark under the column, and the statements it was expanded to."""
    where = f"AOA statement {place.number}"
    if place.column:
        where += f", column {place.column}"
    lines = [f"{where}: {message}", f"    {shorten(place.text)}"]
    if place.column and len(place.text) <= MAX_LINE:
        lines.append("    " + " " * (place.column - 1) + "^")
    lines += [f"    expanded to: {shorten(text)}" for text in expansion if text.strip() != place.text.strip()]
    return "\n".join(lines)
