"""The two ways in which a scenario names the remedy that it follows."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
_CALLS = ("Advice", "advised", "provoked")
# Shorter words would stand in too many texts.
_SHORTEST = 8


class Advice(NamedTuple):
    """A remedy in a table of scenarios: ``provoked(*advice)``."""

    module: str
    words: str


def advised(module: str, words: str, text: str) -> None:
    """Assert that a text, such as a warning or an output, gives the remedy of a module that has these words."""
    remedy = re.split(r"Remedy \(FC\d{3}\): ", text, maxsplit=1)[-1]
    assert words in remedy, f"the remedy of {module} is {remedy!r}; expected {words!r}"


@contextmanager
def provoked(module: str, words: str, kind: type[Exception] = Exception) -> Iterator[Any]:
    """Assert that the block raises an error with the remedy of a module that has these words; then follow it."""
    with pytest.raises(kind, match=r"Remedy \(FC\d{3}\): ") as caught:
        yield caught
    advised(module, words, str(caught.value))


@functools.cache
def scenarios(tests: Path = TESTS) -> dict[tuple[str, str], str]:
    """The module and words of each remedy that a test follows, with the place."""
    found = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text("utf-8")
        if not any(f"{call}(" in text for call in _CALLS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
                place = f"{path.relative_to(tests)}:{node.lineno}"
                given = node.args[:2]
                if any(isinstance(each, ast.Starred) for each in given):
                    continue  # an Advice, which is found where it is made
                assert all(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in given), (
                    f"{place} has to name module and words as texts"
                )
                module, words = (each.value for each in given)
                assert len(words) >= _SHORTEST, f"{place}: {words!r} is too short to name one remedy"
                found[module, words] = place
    return found
