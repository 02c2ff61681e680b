"""The table of the working notes names tests: each of them has to exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS / "notes_coverage.md"
NO_TEST = ("Outside a checkpoint: ", "Cannot run here: ")
#: Sections of the notes: every one has a row.
SECTIONS = {
    "000": {"1.1", "1.1.2", "1.2", "1.3", "1.4", "1.4.1", "1.5", "2.1", "2.2", "2.3", "2.4", "2.5", "4.1", "4.2", "4.3",
            "4.4", "4.5", "4.6", "4.7", "5", "6", "7.1", "7.2", "7.3", "7.4", "8.1", "8.2", "8.3", "8.4", "9.1", "9.2",
            "9.3", *(f"3.{number}" for number in range(1, 17))},
    "001": {"1"},
    "002": {str(number) for number in range(1, 9)},
    "003": {"1-3", "2", *(str(number) for number in range(4, 17))},
    "004": {"1", "2.1", "2.2", "2"},
}  # fmt: skip


def rows() -> list[tuple[str, str, str, str]]:
    """Page of the notes, section, item and proof of every row."""
    found, page = [], ""
    for line in PAGE.read_text().splitlines():
        heading = re.match(r"## (\d{3})", line)
        if heading:
            page = heading[1]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in ("note", "---|---|---"):
            found.append((page, *cells))
    return found  # type: ignore[return-value]


def names(file: Path) -> set[str]:
    """Functions of a test file, those of its classes as ``Class::test``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_every_section_of_the_notes_has_a_row():
    for page, sections in SECTIONS.items():
        assert sections <= {section for of, section, _, _ in rows() if of == page}, page


@pytest.mark.parametrize("page", SECTIONS)
def test_every_named_test_exists_and_every_row_names_one_or_says_why_not(page):
    problems = []
    for of, section, item, proof in rows():
        if of != page:
            continue
        named = re.findall(r"`([\w/]+\.py)(?:::([\w:]+))?`", proof)
        if not named and not proof.startswith(NO_TEST):
            problems.append(f"{section}, {item}: no test and no reason")
        for path, name in named:
            file = TESTS / path
            if not file.is_file() or (name and name not in names(file)):
                problems.append(f"{section}, {item}: there is no {path}::{name}")
    assert problems == []
