"""The distributions: what is in them, what the wheel needs, and what a package index shows."""

from __future__ import annotations

import email
import json
import os
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


@pytest.fixture(scope="module")
def library(unpacked, tmp_path_factory):
    """What a wheel has of the package, made from the source distribution. The wheel's archive needs more tools."""
    made = tmp_path_factory.mktemp("library")
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(made / "work"), "--build-lib"]
    subprocess.run([*command, str(made / "lib")], cwd=unpacked, check=True, capture_output=True)
    return made / "lib"


def test_a_wheel_has_all_of_the_package_and_nothing_else(library):
    shipped = {name for name in tracked() if name.startswith("paddle_flexckpt/")}
    patches = {name for name in tracked() if re.fullmatch(r"patches/([^/]+\.patch|index\.json|README\.md)", name)}
    assert {"paddle_flexckpt/py.typed", "paddle_flexckpt/aoa/families.json"} <= shipped
    assert any(re.fullmatch(r"paddle_flexckpt/aoa/rules/\w+\.json", name) for name in shipped)
    there = {path.relative_to(library).as_posix() for path in library.rglob("*") if path.is_file()}
    assert there == shipped | {f"paddle_flexckpt/{name}" for name in patches}


#: Runs elsewhere, with the library alone and as if Paddle were not installed.
PROGRAM = """
import contextlib, io, json, sys
import numpy
sys.modules["paddle"] = None  # `import paddle` raises ImportError
import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.patching import read_patches

numpy.savez("weights.npz", weight=numpy.arange(12, dtype="float32").reshape(3, 4))
assert main(["convert", "weights.npz", "checkpoint"]) == 0
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    assert main(["inspect", "checkpoint"]) == 0
found = {"from": fc.__file__, "inspect": printed.getvalue(), "patches": len(read_patches())}
found["rules"] = len(fc.model_rules("llama")["aoa_statements"])
print(json.dumps(found))
"""


def test_a_wheel_works_without_paddle_and_without_the_checkout(library, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(library)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["from"].startswith(str(library))
    assert re.search(r"^ *weight +.*float32", found["inspect"], re.M)
    assert found["patches"] > 10 and found["rules"] > 5


def test_the_pythons_that_pip_accepts_are_those_that_are_named(unpacked):
    specifiers = pytest.importorskip("packaging.specifiers")
    metadata = email.message_from_bytes((unpacked / "PKG-INFO").read_bytes())
    accepted = specifiers.SpecifierSet(metadata["Requires-Python"])
    named = {name.rpartition(" ")[2] for name in metadata.get_all("Classifier") if "Python :: 3." in name}
    assert {f"3.{minor}" for minor in range(30) if f"3.{minor}.5" in accepted} == named
    assert {"cpu", "viz", "cli"} <= set(metadata.get_all("Provides-Extra"))
