"""Calls that fail, a seeded part of them, and disks that are really full."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media import full_disks, local
from tests.crash import explore
from tests.crash.faults import FAULTS, can_fail, faults
from tests.crash.job import Job
from tests.crash.scenario import DIRECTORY, read_version, run, save
from tests.crash.scenarios import find
from tests.saved import short

SAMPLE = (
    "fresh, 2 ranks",
    "overwrite, 1 ranks",
    "overwrite, 2 ranks",
    "repair of 2 files",
    "asynchronous: overwrite, 1 ranks",
    "asynchronous: overwrite, 2 ranks",
    "manager: one goes, 1 ranks",
    "manager: one goes, 2 ranks",
)
CASES = [(find(name), fault) for name in SAMPLE for fault in FAULTS if can_fail(find(name), fault)]


@pytest.mark.parametrize("scenario, fault", CASES, ids=lambda each: each if isinstance(each, str) else each.name)
def test_a_clear_error_and_the_old_checkpoint_or_none_and_the_new(bench, scenario, fault):
    found = faults(bench(scenario), fault, count=2)
    assert not found.violations, "\n".join(found.violations)


def test_both_outcomes_are_met(bench):
    """Before the commit an error means the old checkpoint; right after it, the new one."""
    found = faults(bench(find("overwrite, 1 ranks")), "I/O error", count=35)
    assert not found.violations
    old, new = (str(state) for state in find("overwrite, 1 ranks").states)
    assert found.outcomes[old] > 15
    assert found.outcomes[new] > 3


def _nameless(monkeypatch):
    for module in (local, full_disks):
        monkeypatch.setattr(module, "naming", lambda path: contextlib.nullcontext())


def _no_abort(monkeypatch):
    monkeypatch.setattr(local.LocalOutputFile, "abort", local.LocalOutputFile._close)


def _quick_write(monkeypatch):
    monkeypatch.setattr(local, "write_all", lambda descriptor, parts: os.writev(descriptor, parts))


def _no_fsync_errors(monkeypatch):
    sync = local.sync_path

    def careless(path):
        with contextlib.suppress(OSError):
            sync(path)

    monkeypatch.setattr(local, "sync_path", careless)


@pytest.mark.parametrize(
    "fault, mistake, said",
    [
        ("I/O error", _nameless, "the error says none of"),
        ("disk full", _no_abort, "left over: "),
        ("short write", _quick_write, "is not whole|a short write is no error"),
        ("I/O error", _no_fsync_errors, "nobody noticed"),
    ],
)
def test_a_mistake_is_found_out(bench, monkeypatch, fault, mistake, said):
    monkeypatch.setattr(explore, "ENOUGH", 1)
    bench = bench(find("overwrite, 1 ranks"))
    mistake(monkeypatch)
    found = faults(bench, fault)
    assert re.search(said, found.violations[0]), found.violations


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a real file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / DIRECTORY))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_really_full(small_disk, ranks):
    root = str(small_disk)
    run(ranks, lambda comm: save(root, comm, 1))
    before = names(small_disk)
    for _ in range(3):
        # 2 MiB and a bit of data on 2 MiB of disk; in the end as much is free as was.
        outcomes = Job(ranks).run(lambda comm: save(root, comm, 2, 0, large=True))
        assert all(type(outcome) is CheckpointError for outcome in outcomes), outcomes
        (text,) = {str(outcome) for outcome in outcomes}
        assert "No space left on device" in text
        assert any(f"{DIRECTORY}/{rank}_0-2.safetensors" in short(text) for rank in (0, 1))
        assert "[rank " in text
        assert names(small_disk) == before
        assert read_version(f"{root}/{DIRECTORY}", 0) == 1
    run(ranks, lambda comm: save(root, comm, 3, 0))
    assert read_version(f"{root}/{DIRECTORY}") == 3


def test_a_disk_without_a_byte_left(small_disk):
    """Not even the marker of a save can be written."""
    root = str(small_disk)
    run(2, lambda comm: save(root, comm, 1))
    before = names(small_disk)
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))
    outcomes = Job(2).run(lambda comm: save(root, comm, 2))
    (text,) = {str(outcome) for outcome in outcomes}
    assert "[rank 0]" in text
    assert "No space left on device" in text
    assert f"{DIRECTORY}/1-2.saving" in short(text)
    assert names(small_disk) == before
    assert read_version(f"{root}/{DIRECTORY}") == 1
    ballast.unlink()
    run(2, lambda comm: save(root, comm, 3))
    assert read_version(f"{root}/{DIRECTORY}", 0) == 1
    assert read_version(f"{root}/{DIRECTORY}", 1) == 3
