"""The manager on stores without locks, directories and power losses, but with answers that do not come."""

from __future__ import annotations

import copy
from threading import Barrier

import pytest

pytest.importorskip("paddle")
pytest.importorskip("fsspec")

import paddle_flexckpt as fc
from paddle_flexckpt.manager import KeepBest, KeepEvery, KeepLatest, identities, step_directories
from paddle_flexckpt.manager.identities import OWNER
from paddle_flexckpt.manager.step_directories import StepDirectories, save_token_in
from paddle_flexckpt.media.lease import LEASE_FILE
from tests.manager.samples import files_of, manager_of, restore, retain, run_in, save
from tests.media.test_remote import clock, disk_of, kind, location
from tests.saved import short

__all__ = ["clock", "kind"]  # fixtures: nobody waits, and a store of each kind


def tree(backend) -> list[str]:
    names = (path.partition("d/run/")[2] for path in disk_of(backend).files)
    return sorted(short(name) for name in names if name not in (OWNER, LEASE_FILE))


def all_files_of(*steps: int) -> list[str]:
    return sorted(name for step in steps for name in files_of(step))


def test_a_run(kind, clock):
    backend = location(kind)
    keep = [KeepLatest(1), KeepBest(1)]
    with manager_of(backend, keep=keep) as manager:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            save(manager, step, metrics={"loss": loss})
    assert tree(backend) == all_files_of(2, 3)
    with manager_of(backend, keep=keep) as manager:
        assert restore(manager, "best")[:2] == (2, 2)
        assert restore(manager)[:2] == (3, 3)
        with pytest.raises(fc.ValidationError, match="there is a checkpoint of step 3"):
            save(manager, 3)
        save(manager, 4, metrics={"loss": 0.0})
        assert [(info.step, info.complete) for info in manager.checkpoints()] == [(4, True)]
    assert tree(backend) == files_of(4)


def test_a_removal_that_is_interrupted_anywhere_is_carried_through(kind, clock):
    backend = location(kind, retries=0)
    with manager_of(backend) as manager:
        for step in (1, 2, 3):
            save(manager, step)
    disk = disk_of(backend)
    kept = copy.deepcopy(disk.files)
    run = run_in(location(kind))
    before = len(disk.calls)
    retain(location(kind), run, 2)
    count = len(disk.calls) - before
    assert tree(backend) == all_files_of(2, 3)
    seen = set()
    for at in range(count):
        disk.files.clear()
        disk.files.update(copy.deepcopy(kept))
        start = len(disk.calls)
        disk.fate = lambda number, operation, path, first=start + at: OSError(5, f"injected: {operation} {path}") if (
            number >= first
        ) else None  # fmt: skip
        try:
            retain(location(kind, retries=0), run, 2)
        except (fc.CheckpointError, OSError) as error:
            assert "injected" in str(error)
            where = disk.calls[start + at]
        else:
            where = disk.calls[start + at]
            assert ".lease" in str(where), "a lease that is not given back runs out"
        disk.fate = None
        manager = manager_of(location(kind))
        steps = manager.all_steps()
        seen.add(tuple(steps))
        assert steps in ([1, 2, 3], [2, 3]), where
        if 1 in steps:
            assert restore(manager, 1)[:2] == (1, 1), where
        assert all(info.complete for info in manager.checkpoints()), where
        retain(location(kind), run, 2)
        assert tree(backend) == all_files_of(2, 3), where
    assert seen == {(1, 2, 3), (2, 3)}


def test_a_save_makes_one_request_for_each_step_that_is_kept(kind, clock, monkeypatch):
    """Whether the steps were there when the manager was made, or it has saved and removed some itself."""
    monkeypatch.setattr(identities, "TIMES_OF_A_RUN", 1e3)  # the root's lease is not renewed by this clock
    backend = location(kind)
    disk, counts = disk_of(backend), {}

    def calls_of_a_save(manager, step: int) -> int:
        before = len(disk.calls)
        save(manager, step)
        return len(disk.calls) - before

    with manager_of(backend, keep=[KeepEvery(10), KeepLatest(1)]) as manager:
        for kept in range(1, 13):
            save(manager, 10 * kept)
            save(manager, 10 * kept + 1)
            counts[kept] = calls_of_a_save(manager, 10 * kept + 2)
        assert counts[12] - counts[2] == 10 * (counts[12] - counts[11]) == 10 * counts_of_a_look(disk, manager)
    with manager_of(backend, keep=[KeepEvery(10), KeepLatest(1)]) as manager:
        restore(manager)
        save(manager, 123)
        assert calls_of_a_save(manager, 124) == counts[12]


def test_a_start_reads_each_record_once(kind, clock):
    """However often it is looked at: for a fall-back, before the training, and at the first save."""
    backend = location(kind)
    disk = disk_of(backend)
    with manager_of(backend) as manager:
        for step in (1, 2, 3, 4):
            save(manager, step)
    with manager_of(location(kind)) as manager:
        before = len(disk.calls)
        restore(manager, 3, fallback=True)
        restored = [path for _, path in disk.calls[before:]].count(data_path(disk, 1))
        manager.should_save(5)
        save(manager, 5)
    assert restored > 0
    assert [path for _, path in disk.calls[before:]].count(data_path(disk, 1)) == restored


def data_path(disk, step: int) -> str:
    """The path of a step's file of values, which has its record."""
    (path,) = (path for path in disk.files if f"step_{step:08d}/" in path and path.endswith(".safetensors"))
    return path


def test_a_start_looks_at_several_steps_at_a_time(kind, clock, monkeypatch):
    backend = location(kind)
    with manager_of(backend) as manager:
        for step in (1, 2, 3, 4):
            save(manager, step)
    run, reads = run_in(location(kind)), Barrier(4, timeout=9)

    def read(*arguments):
        reads.wait()
        return save_token_in(*arguments)

    monkeypatch.setattr(step_directories, "save_token_in", read)
    steps = StepDirectories(location(kind))
    steps._root.at_once = 4  # as of a store whose client is asynchronous
    steps.order("latest", None, fallback=False)
    assert steps.begin_run(5, 4) == run


def counts_of_a_look(disk, manager) -> int:
    """How many calls reading the first bytes of one manifest makes."""
    before = len(disk.calls)
    save_token_in(manager._steps.directory(10))
    return len(disk.calls) - before
