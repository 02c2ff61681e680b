"""The patches that come with this library: their index, how they are installed, and how they are made."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.patching import patches_directory, plan_change, read_patches, write_files

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = read_patches()
ENTRIES = json.loads((REPOSITORY / "patches" / "index.json").read_text())["patches"]


def test_every_patch_is_what_the_index_and_the_pages_say():
    readme = (REPOSITORY / "patches" / "README.md").read_text(encoding="utf-8")
    troubleshooting = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for entry in ENTRIES:
        name, patch = entry["name"], PATCHES[entry["name"]]
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        assert any(name.startswith(f"{patch.package}-{version}-") for version in patch.versions)
        assert list(patch.edits) == list(patch.files) and all(patch.edits.values())
        assert all(path.startswith(f"{patch.package}/") for path in patch.files)
        head = " ".join((REPOSITORY / "patches" / f"{name}.patch").read_bytes().split(b"\n\n")[0].decode().split())
        for key in ("title", "symptom", "mends", "test"):
            assert f"{key.capitalize()}: {entry[key]}" in head, name
        test, scenario = entry["test"].split(", ")
        assert (REPOSITORY / test).is_file() and name.endswith(f"-{scenario}")
        assert f"`{scenario}`" in readme and f"`{scenario}`" in troubleshooting, name
    assert {path.stem for path in patches_directory().glob("*.patch")} == set(PATCHES)


def test_they_are_built_into_the_package(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("paddle_flexckpt", "patches"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md"):
        shutil.copy(REPOSITORY / name, source / name)
    built = tmp_path / "built"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "-d", built], cwd=source, check=True, capture_output=True
    )
    shutil.rmtree(source)
    command = [sys.executable, "-m", "paddle_flexckpt", "patch", "--list"]
    done = subprocess.run(command, cwd=built, check=True, capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(PATCHES)


def test_the_generator(tmp_path):
    """A tree, an edited copy, a script of replacements: the same patch, and an index that `check` agrees with."""
    if sys.version_info < (3, 11):
        pytest.skip("the generator's `edit` needs Python 3.11")
    directory = tmp_path / "patches"
    directory.mkdir()
    shutil.copy(REPOSITORY / "patches" / "make.py", directory)
    (directory / "index.json").write_text('{"format": 1, "patches": []}')
    (tmp_path / "paddle_flexckpt").symlink_to(REPOSITORY / "paddle_flexckpt")
    trees = {name: tmp_path / name for name in ("released", "edited")}
    for tree in trees.values():
        (tree / "paddlenlp").mkdir(parents=True)
        (tree / "paddlenlp" / "a.py").write_text("".join(f"line_{number} = 0\n" for number in range(20)))
        (tree / "paddlenlp-9.dist-info").mkdir()
        (tree / "paddlenlp-9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: paddlenlp\nVersion: 9\n")
    edited = trees["edited"] / "paddlenlp" / "a.py"
    edited.write_text(edited.read_text().replace("line_7 = 0\n", "line_7 = 7\n") + "last = 1\n")
    head = {"title": "What", "symptom": "It " + "is broken " * 30, "mends": "It", "test": "tests/a.py, topic"}
    (tmp_path / "head").write_text("".join(f"{key.capitalize()}: {value}\n" for key, value in head.items()))

    def make(*arguments):
        command = [
            sys.executable,
            str(directory / "make.py"),
            *map(str, arguments),
            "--released",
            str(trees["released"]),
        ]
        return subprocess.run(command, capture_output=True, text=True)

    made = make("diff", "paddlenlp-9-topic", "--edited", trees["edited"], "--head", tmp_path / "head")
    assert made.returncode == 0, made.stderr
    (patch,) = read_patches(directory).values()
    (entry,) = json.loads((directory / "index.json").read_text())["patches"]
    assert (entry["versions"], entry["title"], entry["test"]) == (["9"], "What", "tests/a.py, topic")
    assert entry["symptom"] == head["symptom"].strip()
    assert make("check").returncode == 0
    script = "".join(f"{key} = '{value}'\n" for key, value in head.items())
    script += "[[edit]]\nfile = 'paddlenlp/a.py'\nold = 'line_7 = 0'\nnew = 'line_7 = 7'\n"
    script += '[[edit]]\nfile = "paddlenlp/a.py"\nappend = "last = 1\\n"\n'
    (directory / "paddlenlp-9-topic.toml").write_text(script)
    assert make("edit", directory / "paddlenlp-9-topic.toml").returncode == 0
    assert list(read_patches(directory).values()) == [patch]
    write_files(plan_change(trees["released"], [patch], [patch]))
    assert (trees["released"] / "paddlenlp" / "a.py").read_text() == edited.read_text()
    # Now the tree is not the released one: the index cannot be made from it.
    failed = make("check")
    assert failed.returncode == 1 and "does not fit" in failed.stderr
    (directory / "paddlenlp-9-topic.toml").write_text(script.replace("line_7 = 0", "line_99 = 0"))
    failed = make("edit", directory / "paddlenlp-9-topic.toml")
    assert failed.returncode == 1 and "expected one place in 'paddlenlp/a.py'; got 0" in failed.stderr
