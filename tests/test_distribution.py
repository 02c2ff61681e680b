"""The source distribution: what is in it, and what a package index shows of it."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from tests.documents import ROOT

pytest.importorskip("setuptools")
#: What a checkout has and a source distribution need not have.
NOT_SHIPPED = {".git", ".gitignore", ".gitattributes"}


def tracked() -> list[str]:
    """The files of the repository, or of what was unpacked in its place."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository: what is here was unpacked")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The distribution, made from a copy of what git has, and unpacked."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("made")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats=tar", "-d", str(made)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (archive,) = made.glob("*.tar")
    with tarfile.open(archive) as tar:
        tar.extractall(made)
    (root,) = [path for path in made.iterdir() if path.is_dir()]
    return root


def test_all_that_a_checkout_has_is_in_it(unpacked):
    missing = [
        name for name in tracked() if name.partition("/")[0] not in NOT_SHIPPED and not (unpacked / name).is_file()
    ]
    assert missing == []
    for name in ("docs/guide.md", "docs/schemas/save.json", "examples/semi_auto/train.py", "patches/index.json"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


def test_an_index_shows_no_link_that_leads_nowhere(unpacked):
    metadata = email.message_from_bytes((unpacked / "PKG-INFO").read_bytes())
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "A hybrid-parallel job saves its model" in text
    relative = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not re.match(r"[a-z]+://", link)]
    assert relative == []
    named = set(re.findall(r"`((?:docs|examples|patches)/[\w./-]+\.md|[A-Z]+\.md)`", text))
    assert {"docs/guide.md", "docs/trainer.md", "patches/README.md", "SECURITY.md"} <= named
    assert [name for name in named if not (unpacked / name).is_file()] == []
    assert "in the source distribution" in text
