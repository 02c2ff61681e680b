"""Patches for installed packages: diffs, what is in a file, changes, and the command."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.patching import (
    PatchError,
    check_patch,
    plan_change,
    read_diff,
    read_patches,
    replace_lines,
    write_files,
)
from tests.patching.samples import FIRST, SECOND, files, format_diff, install, write_patches

lines = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\x0c\n", b"\n", b"--- a/x\n", b"+++ b/x\n", b"@@ -1 +1 @@\n"]),
    max_size=40,
)


@given(lines.map(b"".join), lines.map(b"".join))
def test_a_diff_is_applied_to_the_byte(before, after):
    edits = read_diff(b"A comment\n\n" + format_diff("p/x.py", before, after)).get("p/x.py", [])
    assert replace_lines(before, edits) == after


@pytest.fixture
def patches(tmp_path):
    return write_patches(tmp_path / "patches")


@pytest.fixture
def root(tmp_path):
    return install(tmp_path / "site")


def change(root, patches, *names, reverse=False):
    write_files(plan_change(root, list(patches.values()), [patches[name] for name in names], reverse))


def status(root, patches):
    return [check_patch(root, list(patches.values()), patch)[0] for patch in patches.values()]


def test_patches_of_one_file_come_and_go_in_any_order(root, patches):
    before = files(root)
    change(root, patches, "both")
    alone = files(root)
    assert status(root, patches) == ["applied", "fits", "does not fit"]
    for first, second in (("both", "later"), ("later", "both")):
        change(root, patches, "both", "later", reverse=True)
        assert files(root) == before
        assert status(root, patches) == ["fits", "fits", "fits"]
        change(root, patches, first)
        change(root, patches, second)
        change(root, patches, second)
        text = (root / "sample/inner/first.py").read_text()
        assert "first_5 = 50\nfirst_6 = 60\nfirst_6 = 6\n" in text and "first_8 = 8\nfirst_9 = 90\nfirst_11" in text
    change(root, patches, "later", reverse=True)
    assert files(root) == alone


def test_patches_that_change_the_same_lines_are_refused(root, patches):
    change(root, patches, "both")
    before = files(root)
    assert check_patch(root, list(patches.values()), patches["clash"]) == (
        "does not fit",
        "two of both, clash change the same lines (file 'sample/inner/first.py', line 5)",
    )
    with pytest.raises(PatchError, match="two of both, later, clash change the same lines"):
        change(root, patches, "later", "clash")
    assert files(root) == before


@pytest.mark.parametrize("applied", [False, True])
def test_files_that_differ_by_a_byte_are_refused(root, patches, applied):
    if applied:
        change(root, patches, "both")
    with open(root / "sample/inner/second.py", "ab") as file:
        file.write(b"#")
    before = files(root)
    for reverse in (False, True):
        with pytest.raises(PatchError, match=r"both: .*second.py: expected sha256 \w{64}, as in sample 1.0, .*got sha"):
            change(root, patches, "later", "both", reverse=reverse)
    assert files(root) == before
    assert status(root, patches)[0] == "does not fit"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("finish", [False, True])
def test_a_command_that_was_killed_is_finished_or_undone(root, patches, reverse, finish):
    released = files(root)
    if reverse:
        change(root, patches, "both", "later")
    contents = plan_change(root, list(patches.values()), [patches["both"]], reverse)
    assert len(contents) == 2
    write_files(dict(itertools.islice(contents.items(), 1)))
    assert check_patch(root, list(patches.values()), patches["both"])[0] == "partly applied"
    change(root, patches, "both", reverse=reverse == finish)
    assert status(root, patches)[0] == ("fits" if reverse == finish else "applied")
    change(root, patches, "both", "later", reverse=True)
    assert files(root) == released


def test_a_write_that_fails_leaves_nothing_behind(root, patches, monkeypatch):
    before = files(root)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        change(root, patches, "both")
    assert files(root) == before


def test_links_are_refused(root, patches):
    file = root / "sample/inner/first.py"
    file.rename(root / "elsewhere.py")
    file.symlink_to(root / "elsewhere.py")
    with pytest.raises(PatchError, match="got no regular file"):
        change(root, patches, "later")
    file.unlink()
    with pytest.raises(PatchError, match="got no regular file"):
        change(root, patches, "later")


def test_hard_links_keep_the_old_contents_and_files_their_permissions(root, patches):
    file, cache = root / "sample/inner/first.py", root / "cache"
    os.link(file, cache)
    file.chmod(0o754)
    change(root, patches, "later")
    assert cache.read_bytes() == FIRST != file.read_bytes()
    assert file.stat().st_mode & 0o7777 == 0o754


@pytest.mark.parametrize("mode", ["timestamp", "unchecked-hash"])
def test_compiled_code_of_the_old_source_is_never_run(root, patches, mode):
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", mode, str(root)]
    subprocess.run(command, check=True)
    assert list(root.rglob("second.*.pyc"))
    change(root, patches, "both")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"}
    command = [sys.executable, "-c", "from sample.inner.second import last; print(last)"]
    assert subprocess.check_output(command, cwd=root, env=environment).strip() == b"3"


def test_a_patch_that_is_not_the_one_of_the_index_is_refused(root, tmp_path, patches):
    file = tmp_path / "patches" / "later.patch"
    file.write_bytes(file.read_bytes().replace(b"+first_9 = 90", b"+first_9 = 91"))
    with pytest.raises(PatchError, match=r"patch 'later' is not the one of the index .* expected sha256 \w+ after it"):
        change(root, read_patches(tmp_path / "patches"), "later")
    file.unlink()
    with pytest.raises(PatchError, match=r"index.json cannot be read: FileNotFoundError.*later.patch"):
        read_patches(tmp_path / "patches")


def test_the_command(root, patches, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paddle_flexckpt.cli.doctor.read_patches", lambda: patches)

    def run(*arguments, directory=root):
        code = main(["patch", *arguments, "--package-dir", str(directory)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    before = files(root)
    code, text = run("--list")
    assert code == 0 and text.splitlines()[0] == "both   sample 1.0: title"
    assert run("--check") == (0, "both: fits\nlater: fits\nclash: fits\n")
    changed = f"  {root}/sample/inner/first.py\n  {root}/sample/inner/second.py\n"
    assert run("--apply", "both", "later") == (0, "applied both, later\n" + changed)
    assert run("--apply", "both") == (0, "applied both\n  no file had to be changed\n")
    assert run("--check", "both", "later")[0] == 0
    code, text = run("--check", "clash")
    assert code == 1 and text.startswith("clash: does not fit\n  two of") and "change the same lines" in text
    code, text = run("--apply", "clash")
    assert code == 1 and text.startswith("flexckpt patch: two of both, later, clash change the same lines")
    unknown = "flexckpt patch: there is no patch 'nothing'; `flexckpt patch --list` prints those there are\n"
    assert run("--apply", "nothing") == (1, unknown)
    assert run("--revert", "later", "both") == (0, "reverted later, both\n" + changed)
    assert files(root) == before
    (tmp_path / "empty").mkdir()
    assert run("--check", "both", directory=tmp_path / "empty") == (1, "both: not installed\n")
    code, text = run("--apply", "both", directory=tmp_path / "empty")
    assert code == 1 and "package 'sample' is not installed in" in text


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch(1) is not installed")
def test_what_patch_has_applied_is_taken_out(root, patches, tmp_path):
    text = (tmp_path / "patches" / "both.patch").read_bytes()
    subprocess.run(["patch", "-p1", "-s", "--binary"], input=text, cwd=root, check=True)
    assert status(root, patches)[0] == "applied"
    change(root, patches, "both", reverse=True)
    assert Path(root, "sample/inner/second.py").read_bytes() == SECOND
