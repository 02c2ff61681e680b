"""Patches put in and taken out: exactly, all or nothing, and through interruptions."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import py_compile
import subprocess
import sys

import pytest

from paddle_flexckpt.patching import Package, PatchError, apply_patches, check_patches, revert_patches
from tests.patching.samples import BOTH, CLASH, FIRST, LATER, SECOND, files, install, patch

FIRST_PATH, SECOND_PATH = "sample/inner/first.py", "sample/inner/second.py"


def status(package, *patches):
    return [finding.status for finding in check_patches(package, patches)]


def test_what_is_applied_is_reverted_to_the_byte(tmp_path):
    package = install(tmp_path)
    os.chmod(tmp_path / FIRST_PATH, 0o640)
    before = files(tmp_path)
    assert status(package, BOTH) == ["fits"]
    assert apply_patches(package, [BOTH]) == [FIRST_PATH, SECOND_PATH]
    assert (tmp_path / FIRST_PATH).read_bytes() == FIRST.replace(b"first_5 = 5\n", b"first_5 = 50\nfirst_6 = 60\n")
    assert (tmp_path / SECOND_PATH).read_bytes() == SECOND.replace(b"last = 2", b"last = 3")
    assert os.stat(tmp_path / FIRST_PATH).st_mode & 0o777 == 0o640
    assert status(package, BOTH) == ["applied"]
    assert apply_patches(package, [BOTH]) == []
    assert revert_patches(package, ["both"]) == [FIRST_PATH, SECOND_PATH]
    assert files(tmp_path) == before
    assert os.stat(tmp_path / FIRST_PATH).st_mode & 0o777 == 0o640
    assert not (tmp_path / ".flexckpt-patches").exists()


def test_patches_of_one_file_come_and_go_in_any_order(tmp_path):
    package = install(tmp_path)
    apply_patches(package, [BOTH])
    alone = files(tmp_path / "sample")
    assert status(package, BOTH, LATER, CLASH) == ["applied", "fits", "conflicts"]
    apply_patches(package, [LATER])
    text = (tmp_path / FIRST_PATH).read_bytes()
    assert b"first_9 = 90" in text and b"first_5 = 50" in text
    revert_patches(package, ["both"])
    assert (tmp_path / FIRST_PATH).read_bytes() == FIRST.replace(b"first_9 = 9\nfirst_10 = 10\n", b"first_9 = 90\n")
    assert (tmp_path / SECOND_PATH).read_bytes() == SECOND
    apply_patches(package, [BOTH])
    assert (tmp_path / FIRST_PATH).read_bytes() == text
    revert_patches(package, ["later"])
    assert files(tmp_path / "sample") == alone


def test_all_or_none(tmp_path):
    package = install(tmp_path)
    before = files(tmp_path)
    with pytest.raises(PatchError, match="'both' and 'clash' change the same lines"):
        apply_patches(package, [BOTH, LATER, CLASH])
    assert files(tmp_path) == before


def test_files_that_differ_by_a_byte_are_refused(tmp_path):
    package = install(tmp_path)
    (tmp_path / SECOND_PATH).write_bytes(SECOND + b" ")
    before = files(tmp_path)
    with pytest.raises(
        PatchError, match=r"second.py: expected sha256 [0-9a-f]{64}, as in sample 1.0; got [0-9a-f]{64}"
    ):
        apply_patches(package, [BOTH])
    assert files(tmp_path) == before
    (tmp_path / SECOND_PATH).unlink()
    (finding,) = check_patches(package, [BOTH])
    assert finding.status == "does not fit" and "got no such file" in finding.details[0]


def test_links_are_refused(tmp_path):
    package = install(tmp_path)
    os.rename(tmp_path / FIRST_PATH, tmp_path / "elsewhere.py")
    os.symlink(tmp_path / "elsewhere.py", tmp_path / FIRST_PATH)
    with pytest.raises(PatchError, match="is a link"):
        apply_patches(package, [BOTH])


def test_hard_links_are_left_alone(tmp_path):
    package = install(tmp_path / "package")
    os.link(package.root / FIRST_PATH, tmp_path / "cache.py")
    apply_patches(package, [BOTH])
    assert (tmp_path / "cache.py").read_bytes() == FIRST


def test_what_was_changed_since_is_not_reverted(tmp_path):
    package = install(tmp_path)
    apply_patches(package, [BOTH])
    with open(tmp_path / FIRST_PATH, "ab") as stream:
        stream.write(b"mine = 1\n")
    before = files(tmp_path)
    for action in (lambda: revert_patches(package, ["both"]), lambda: apply_patches(package, [LATER])):
        with pytest.raises(PatchError, match=r"was changed after both had been applied[^$]*first.py: expected sha256"):
            action()
    assert status(package, BOTH, LATER) == ["changed", "changed"]
    assert files(tmp_path) == before


def test_only_what_is_in_is_taken_out(tmp_path):
    package = install(tmp_path)
    apply_patches(package, [BOTH])
    with pytest.raises(PatchError, match="has no patch 'later' of this command; it has both"):
        revert_patches(package, ["later"])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_package_installed_anew_has_no_patches(tmp_path, version):
    package = install(tmp_path)
    apply_patches(package, [BOTH])
    first = FIRST if version == "1.0" else FIRST + b"new = 1\n"
    (tmp_path / FIRST_PATH).write_bytes(first)
    (tmp_path / SECOND_PATH).write_bytes(SECOND)
    package = Package("sample", tmp_path, version)
    if version == "1.0":
        assert status(package, BOTH) == ["fits"]
        apply_patches(package, [BOTH])
        revert_patches(package, ["both"])
    else:
        assert status(package, BOTH, LATER) == ["does not fit", "does not fit"]
        with pytest.raises(PatchError, match="has no patch 'both'"):
            revert_patches(package, ["both"])
    assert (tmp_path / FIRST_PATH).read_bytes() == first


def test_what_another_tool_applied_is_not_ours(tmp_path):
    package = install(tmp_path)
    (tmp_path / FIRST_PATH).write_bytes(FIRST.replace(b"first_9 = 9\nfirst_10 = 10\n", b"first_9 = 90\n"))
    (finding,) = check_patches(package, [LATER])
    assert finding.status == "does not fit" and "put in by other means" in finding.details[0]


def test_two_processes_do_not_patch_at_once(tmp_path):
    package = install(tmp_path)
    apply_patches(package, [BOTH])
    with open(tmp_path / ".flexckpt-patches" / "sample" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PatchError, match="another process is patching"):
            revert_patches(package, ["both"])
    revert_patches(package, ["both"])


@pytest.mark.parametrize("mode", ["TIMESTAMP", "UNCHECKED_HASH"])
def test_compiled_code_of_the_old_source_is_never_run(tmp_path, mode):
    """UNCHECKED_HASH: never compared with the source. TIMESTAMP: compared by whole seconds and size only."""
    package = install(tmp_path)
    source = tmp_path / FIRST_PATH

    def compile_it():
        invalidation = getattr(py_compile.PycInvalidationMode, mode)
        py_compile.compile(str(source), doraise=True, invalidation_mode=invalidation)

    def value():
        code = "import sample.inner.first as first; print(first.first_5)"
        return subprocess.run(
            [sys.executable, "-B", "-c", code], cwd=tmp_path, text=True, capture_output=True, check=True
        ).stdout.strip()

    same_size = patch("same-size", first=(b"first_5 = 5\n", b"first_5 = 7\n"))
    compile_it()
    assert value() == "5"
    apply_patches(package, [same_size])
    assert not os.path.exists(importlib.util.cache_from_source(str(source)))
    assert value() == "7"
    compile_it()
    revert_patches(package, ["same-size"])
    assert value() == "5"


class Killed(Exception):
    """Stands for the end of the process."""


CALLS = ("replace", "unlink", "fsync", "open", "utime", "fchmod", "rmdir")


def count_and_stop(monkeypatch, at):
    """Counts calls that change files; the one with number ``at``, and all after it, do not happen."""
    counter = {"calls": 0, "stopped": False}
    for name in CALLS:
        original = getattr(os, name)

        def call(*arguments, original=original, **options):
            if counter["calls"] == at or counter["stopped"]:
                counter["stopped"] = True
                raise Killed
            counter["calls"] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)
    return counter


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("then", ["same", "other"])
def test_killed_at_any_call_it_is_carried_through_or_undone(tmp_path, monkeypatch, verb, then):
    actions = {
        "apply": lambda package: apply_patches(package, [BOTH]),
        "revert": lambda package: revert_patches(package, ["both"]),
    }
    opposite = {"apply": "revert", "revert": "apply"}
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    at, interrupted = 0, 0
    while True:
        root = tmp_path / str(at)
        package = install(root)
        apply_patches(package, [LATER])
        with_later = files(root / "sample")
        apply_patches(package, [BOTH])
        with_both = files(root / "sample")
        if verb == "apply":
            revert_patches(package, ["both"])
        with monkeypatch.context() as context:
            counter = count_and_stop(context, at)
            with contextlib.suppress(Killed):
                actions[verb](package)
        if not counter["stopped"]:
            break
        at += 1
        # Every file is whole at every moment, and the command that looks changes nothing.
        ours = {name: content for name, content in files(root / "sample").items() if not name.endswith(".tmp")}
        for name, content in ours.items():
            assert content in (with_later[name], with_both[name])
        if status(package, BOTH) == ["interrupted"]:
            interrupted += 1
            with pytest.raises(
                PatchError, match=f"cut short. Remedy: the same command finishes it, `--{opposite[verb]}"
            ):
                revert_patches(package, ["later"])
            actions[verb if then == "same" else opposite[verb]](package)
            end = verb if then == "same" else opposite[verb]
        else:
            # Before the journal or after its end: an ordinary state, in which the next command works as ever.
            done = (status(package, BOTH) == ["applied"]) == (verb == "apply")
            if not done:
                actions[verb](package)
            end = verb
        assert files(root / "sample") == (with_both if end == "apply" else with_later)
        if end == "apply":
            revert_patches(package, ["both"])
        revert_patches(package, ["later"])
        assert (root / FIRST_PATH).read_bytes() == FIRST and (root / SECOND_PATH).read_bytes() == SECOND
        assert not (root / ".flexckpt-patches").exists()
    assert at > 30 and interrupted > 5
