"""The patches that come with this library: their index, how they are installed, and the command."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.patching import Package, Patch, PatchError, apply_patches, patches_directory, read_patches
from tests.patching.samples import BOTH, CLASH, FIRST, LATER, files, install

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = read_patches()


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_every_patch_is_what_the_index_and_the_readme_say(patch):
    assert re.fullmatch(r"[a-z0-9.-]+", patch.name)
    assert any(patch.name.startswith(f"{patch.package}-{version}-") for version in patch.versions)
    assert list(patch.diffs()) == [file.path for file in patch.files]
    assert all(path.startswith(f"{patch.package}/") for path in patch.diffs())
    assert all(re.fullmatch("[0-9a-f]{64}", each) for file in patch.files for each in (file.before, file.after))
    head = " ".join(patch.text.split(b"\n\n")[0].decode().split())
    for key in ("title", "symptom", "mends", "test"):
        assert f"{key.capitalize()}: {getattr(patch, key)}" in head
    test, scenario = patch.test.split(", ")
    assert (REPOSITORY / test).is_file() and patch.name.endswith(f"-{scenario}")
    readme = (REPOSITORY / "patches" / "README.md").read_text(encoding="utf-8")
    assert f"`{scenario}`" in readme


def test_no_patch_is_without_its_entry():
    assert {path.stem for path in patches_directory().glob("*.patch")} == set(PATCHES)


def test_every_mend_is_in_the_troubleshooting_page():
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    missing = [patch.name for patch in PATCHES.values() if f"`{patch.name.split('-', 2)[2]}`" not in text]
    assert missing == []


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


def write_index(directory: Path, *patches: Patch):
    directory.mkdir()
    (directory / "index.json").write_text(json.dumps({"format": 1, "patches": [patch.as_dict() for patch in patches]}))
    for patch in patches:
        (directory / f"{patch.name}.patch").write_bytes(patch.text)


def test_the_index_is_read_as_it_is_written(tmp_path):
    write_index(tmp_path / "patches", BOTH, LATER)
    assert list(read_patches(tmp_path / "patches").values()) == [BOTH, LATER]
    (tmp_path / "patches" / "later.patch").unlink()
    with pytest.raises(PatchError, match=r"index.json cannot be read: FileNotFoundError.*later.patch"):
        read_patches(tmp_path / "patches")
    (tmp_path / "patches" / "index.json").write_text('{"format": 2}')
    with pytest.raises(PatchError, match="another format; expected 1; got 2"):
        read_patches(tmp_path / "patches")


@pytest.fixture
def sample(tmp_path, monkeypatch):
    write_index(tmp_path / "patches", BOTH, LATER, CLASH)
    monkeypatch.setattr("paddle_flexckpt.cli.patch.read_patches", lambda: read_patches(tmp_path / "patches"))
    return str(install(tmp_path / "site").root)


def test_the_command(sample, capsys):
    def run(*arguments):
        code = main(["patch", *arguments, "--package-dir", sample])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    before = files(Path(sample))
    code, text = run("--list")
    assert code == 0 and text.splitlines()[0] == "both   sample 1.0: title"
    assert run("--check") == (
        0,
        "".join(f"{name}: fits (sample 1.0 in {sample})\n" for name in ("both", "later", "clash")),
    )
    code, text = run("--apply", "both", "later")
    assert code == 0
    assert text.splitlines() == [
        "applied both, later (sample 1.0)",
        f"  {sample}/sample/inner/first.py",
        f"  {sample}/sample/inner/second.py",
    ]
    assert run("--check", "both", "later")[0] == 0
    code, text = run("--check", "clash")
    assert code == 1 and "clash: conflicts" in text and "change the same lines" in text
    code, text = run("--check", "--json")
    assert [each["status"] for each in json.loads(text)] == ["applied", "applied", "conflicts"]
    code, text = run("--apply", "clash")
    assert code == 1 and text.startswith("flexckpt patch: patches 'both' and 'clash' change the same lines")
    assert run("--revert", "clash")[0] == 1
    assert run("--apply", "nothing") == (
        1,
        "flexckpt patch: there is no patch 'nothing'; `flexckpt patch --list` prints those there are\n",
    )
    assert run("--revert", "later", "both")[0] == 0
    assert files(Path(sample)) == before


def test_a_patch_of_another_release_of_this_library_is_taken_out(sample, tmp_path, capsys):
    assert main(["patch", "--apply", "both", "later", "--package-dir", sample]) == 0
    (tmp_path / "patches" / "index.json").unlink()
    shutil.rmtree(tmp_path / "patches")
    write_index(tmp_path / "patches", CLASH)
    assert main(["patch", "--revert", "both", "later", "--package-dir", sample]) == 0
    assert (Path(sample) / "sample" / "inner" / "first.py").read_bytes() == FIRST


def test_what_is_not_installed_is_said_so(sample, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    directory = ["--package-dir", str(tmp_path / "empty")]
    assert main(["patch", "--check", "both", *directory]) == 1
    assert capsys.readouterr().out == "both: not installed\n"
    assert main(["patch", "--apply", "both", *directory]) == 1
    assert "package 'sample' is not installed in" in capsys.readouterr().err


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
    assert (patch.versions, patch.title, patch.test) == (("9",), "What", "tests/a.py, topic")
    assert patch.symptom == head["symptom"].strip()
    package = Package("paddlenlp", trees["released"], "9")
    assert make("check").returncode == 0
    script = "".join(f"{key} = '{value}'\n" for key, value in head.items())
    script += "[[edit]]\nfile = 'paddlenlp/a.py'\nold = 'line_7 = 0'\nnew = 'line_7 = 7'\n"
    script += '[[edit]]\nfile = "paddlenlp/a.py"\nappend = "last = 1\\n"\n'
    (directory / "paddlenlp-9-topic.toml").write_text(script)
    assert make("edit", directory / "paddlenlp-9-topic.toml").returncode == 0
    assert list(read_patches(directory).values()) == [patch]
    apply_patches(package, [patch])
    assert (package.root / "paddlenlp" / "a.py").read_text() == edited.read_text()
    # Now the tree is not the released one: the index cannot be made from it.
    failed = make("check")
    assert failed.returncode == 1 and "does not fit" in failed.stderr
    (directory / "paddlenlp-9-topic.toml").write_text(script.replace("line_7 = 0", "line_99 = 0"))
    failed = make("edit", directory / "paddlenlp-9-topic.toml")
    assert failed.returncode == 1 and "expected one place in 'paddlenlp/a.py'; got 0" in failed.stderr
