"""The glossary has each term once, replaced words are gone, and docstrings of functions alone begin with a verb."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TERMS = re.findall(r"^\| (?!term \||---)([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
# Replaced by transport, save names, save slot, pending save, outcome, finish, not found.
RETIRED = ("carrier", "ticket", "admission", "flight", "settlement", "settle", "absence", "bury")
# First words of docstrings that name a thing: right for a class, wrong for a function.
NO_VERBS = set(
    "A After All Also An Another Any As At Before Both Bytes By Each Either Equal Every Everything For From Global How "
    "If In It Its Like Most Names No Nobody None Nothing Of On One Only OSError Our Positions Seconds Shards Some Such "
    "Tasks Texts That The Their There These They This Those Two Until Used Values What When Where Whether Which While "
    "Who Whose Why With".split()
)
FILES = [*(ROOT / "paddle_flexckpt").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]


def test_each_term_has_one_meaning():
    assert len(TERMS) > 50
    assert [term for term, count in Counter(TERMS).items() if count > 1] == []


@pytest.mark.parametrize("word", RETIRED)
def test_words_that_were_replaced_are_gone(word):
    # Also inside names: a word ends at a capital, an underscore or a digit.
    pattern = re.compile(rf"(?<![a-zA-Z]){word}(?:s|d|ing)?(?![a-z])|{word.capitalize()}(?:s)?(?![a-z])")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def first_words(*kinds: type[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]) -> Iterator[tuple[str, str]]:
    """Yield the place and the first word of each docstring of the package's functions or classes."""
    for path in sorted((ROOT / "paddle_flexckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                text = ast.get_docstring(node)
                # A constructor may have its arguments alone.
                if text and not (node.name == "__init__" and text.startswith("Args:")):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", text.split()[0].rstrip(",;:.")


def test_docstrings_of_functions_begin_with_a_verb():
    words = list(first_words(ast.FunctionDef, ast.AsyncFunctionDef))
    assert len(words) > 3000
    assert [each for each in words if each[1] in NO_VERBS or not each[1][:1].isupper()] == []


def test_docstrings_of_classes_begin_with_no_verb():
    verbs = {word for _, word in first_words(ast.FunctionDef, ast.AsyncFunctionDef)}
    words = list(first_words(ast.ClassDef))
    assert len(words) > 500
    assert [each for each in words if each[1] in verbs] == []
