"""The glossary has each term once, and words that it has replaced are not used again."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TERMS = re.findall(r"^\| (?!term \||---)([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
# Replaced by transport, save names, save slot, pending save, outcome, finish, not found.
RETIRED = ("carrier", "ticket", "admission", "flight", "settlement", "settle", "absence", "bury")
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
