"""The two ways in which a scenario names the remedy that it follows."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
# Shorter words would stand in too many texts.
_SHORTEST = 8


def advised(module: str, words: str, text: str) -> None:
    """Assert that a text, such as a warning or what a command printed, gives the remedy of a module that has these words."""
    remedy = text.partition("Remedy: ")[2]
    assert words in remedy, f"the remedy of {module} is {remedy!r}; expected {words!r}"


@contextmanager
def provoked(module: str, words: str, kind: type[Exception] = Exception) -> Iterator[Any]:
    """Assert that the block raises an error with the remedy of a module that has these words. Then follow the remedy."""
    with pytest.raises(kind, match=r"Remedy: ") as caught:
        yield caught
    advised(module, words, str(caught.value))


@functools.cache
def scenarios(tests: Path = TESTS) -> dict[tuple[str, str], str]:
    """The module and words of each remedy that a test follows, with the place."""
    found = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text("utf-8")
        if "provoked" not in text and "advised" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("provoked", "advised")
            ):
                place = f"{path.relative_to(tests)}:{node.lineno}"
                given = node.args[:2]
                assert all(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in given), (
                    f"{place} has to name module and words as texts"
                )
                module, words = (each.value for each in given)
                assert len(words) >= _SHORTEST, f"{place}: {words!r} is too short to name one remedy"
                found[module, words] = place
    return found
