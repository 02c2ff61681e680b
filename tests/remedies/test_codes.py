"""Each remedy has a code, and each code has a section of docs/troubleshooting.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.remedies.collected import codes, uncoded

_DOCS = Path(__file__).parents[2] / "docs"
_SECTION = re.compile(r"^## (FC\d{3}) ([A-Z].*)$", re.MULTILINE)


def test_each_remedy_has_a_code() -> None:
    assert uncoded() == []


def test_codes_and_sections_are_the_same() -> None:
    text = (_DOCS / "troubleshooting.md").read_text("utf-8")
    sections = [code for code, _ in _SECTION.findall(text)]
    assert sections == sorted(set(sections)), "a code has two sections, or they are not in order"
    assert sorted(codes()) == sections, "left: codes of the source; right: sections"


def test_documents_name_codes_that_there_are() -> None:
    known = codes()
    for path in _DOCS.glob("*.md"):
        named = re.findall(r"\bFC\d+", path.read_text("utf-8"))
        assert [code for code in named if code not in known] == [], path


def test_a_remedy_without_a_code_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        '''"""Say nothing. Remedy: of a docstring"""
def f(key):
    raise ValueError(f"{key} is wrong. Remedy (FC101): correct " "it")
    raise ValueError(f"{key} is wrong. Remedy: " + key)
    Problem("wrong", key, remedy="correct it", code="FC102")
    Problem("wrong", key, remedy="correct it")
    Problem("wrong", key, None, None, None, None, "correct it")
    Problem("wrong", key, remedy="correct it", code="FC1")
''',
        "utf-8",
    )
    assert codes(tmp_path) == {"FC101": ["new.py:3"], "FC102": ["new.py:5"]}
    assert sorted(uncoded(tmp_path)) == ["new.py:4", "new.py:6", "new.py:7", "new.py:8"]
