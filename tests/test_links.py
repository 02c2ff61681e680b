"""Relative links of all documents: the file that each names is there, and so is the heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("benchmarks/*/*.md"),
    *ROOT.glob("patches/*.md"),
    *ROOT.glob("examples/*/*.md"),
]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)


def anchors(document: Path) -> set[str]:
    """Return what headings are called in a link, as GitHub does it, and the names that stand alone in a line."""
    found: dict[str, int] = {}
    names = set()
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.S | re.M)
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found[name] = found.get(name, 0) + 1
        names.add(name if count == 1 else f"{name}-{count - 1}")
    return names | set(re.findall(r'^<a id="([^"]+)"></a>$', text, re.M))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document):
    for link in _LINK.findall(_CODE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{link}: leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_links_and_headings_are_found(tmp_path):
    text = "# A `b`, c!\n## A b c\n[x](y.md#z) `[no](link)` ![image](i.png)\n```\n# no\n[no](link)\n```\n"
    (tmp_path / "one.md").write_text(text)
    assert anchors(tmp_path / "one.md") == {"a-b-c", "a-b-c-1"}
    assert _LINK.findall(_CODE.sub("", text)) == ["y.md#z"]
