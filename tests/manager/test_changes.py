"""What managers make of steps that change while they look, of damage they know of, and of repairs under way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")


import paddle_flexckpt as fc
import paddle_flexckpt.manager.restore as restore_module
import paddle_flexckpt.manager.storage_saves as saves_module
from paddle_flexckpt.catalog import CheckpointError, NotDurableError, ValidationError
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.manager import KeepBest, KeepLatest
from paddle_flexckpt.manager import step_contents as contents_module
from paddle_flexckpt.manager.pending_steps import PendingSteps
from paddle_flexckpt.manager.step_listing import StepListing
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools import verification
from tests.manager.samples import (
    data_of,
    directory_of,
    empty,
    files_of,
    flip_values,
    listed,
    manager_of,
    restore,
    save,
    tree,
    version_of,
)
from tests.manager.test_pending_steps import Save
from tests.saved import data_file


def at(monkeypatch, now: float) -> None:
    monkeypatch.setattr(contents_module, "time", SimpleNamespace(time=lambda: now))


def test_what_was_saved_last_in_the_background_stays_though_a_clock_has_gone_back(tmp_path, writer, monkeypatch):
    """A job on a host whose clock is behind has gone back to 1, and saves in the background."""
    with manager_of(tmp_path) as manager:
        for step in (1, 3):
            at(monkeypatch, 1000.0 + step)
            save(manager, step)
    manager = manager_of(tmp_path, async_save=writer, keep=KeepLatest(1))
    assert restore(manager, 1)[0] == 1
    at(monkeypatch, 500.0)
    save(manager, 2).result(60)  # the job is told that it is complete
    manager.wait()
    assert 2 in manager.all_steps()  # "Never removed: the highest step, and the one that was saved last"


def test_what_a_restore_has_found_damaged_does_not_count(tmp_path, writer, stopped):
    """Else the one whole checkpoint would go before the next one is there."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            save(manager, step)
    flip_values(tmp_path, 2)
    manager = manager_of(tmp_path, async_save=writer, keep=KeepLatest(1))
    report = restore(manager, fallback=True)[2]
    assert (report.step, set(report.skipped)) == (1, {2})
    with stopped():
        save(manager, 3)
        steps = manager.all_steps()  # and here the job is killed, or the disk is full
        assert 1 in steps


def test_a_repair_does_not_undo_a_later_save(tmp_path, monkeypatch):
    """A person repairs a damaged manifest; while its files are read, the job saves the step again."""
    manager = manager_of(tmp_path)
    save(manager, 1)
    save(manager, 2)
    path = directory_of(tmp_path, 2)
    (path / "0.manifest").write_bytes(b"damaged")
    rebuild = verification.rebuild_manifest

    def slowly(*arguments):
        rebuilt = rebuild(*arguments)
        assert restore(manager, fallback=True)[0] == 1
        save(manager, 2, version=20)  # complete
        assert fc.latest(tmp_path).step == 2
        return rebuilt

    monkeypatch.setattr(verification, "rebuild_manifest", slowly)
    with pytest.raises(
        CheckpointError, match=r"0\.manifest is not what it was before: somebody has saved, repaired or removed"
    ):
        fc.repair_manifest(path, 0, overwrite=True)
    assert fc.latest(tmp_path).step == 2
    assert restore(manager_of(tmp_path))[:2] == (2, 20)


def test_a_repair_without_overwrite_does_not_undo_a_save(tmp_path, monkeypatch):
    """The manifest is lost, so overwrite is not asked for; meanwhile somebody saves the step."""
    manager = manager_of(tmp_path)
    save(manager, 2)
    path = directory_of(tmp_path, 2)
    (path / "0.manifest").unlink()
    rebuild = verification.rebuild_manifest

    def slowly(*arguments):
        rebuilt = rebuild(*arguments)
        save(manager, 2, version=20)
        return rebuilt

    monkeypatch.setattr(verification, "rebuild_manifest", slowly)
    with pytest.raises(
        CheckpointError, match=r"0\.manifest is not what it was before: somebody has saved, repaired or removed"
    ):
        fc.repair_manifest(path, 0)
    assert restore(manager_of(tmp_path))[:2] == (2, 20)


def test_a_repair_does_not_bring_back_a_removed_step(tmp_path, monkeypatch):
    """Retention removes the step, and its directory, while a repair reads it."""
    manager = manager_of(tmp_path, keep=KeepLatest(1))
    save(manager, 1)
    path = directory_of(tmp_path, 1)
    rebuild = verification.rebuild_manifest

    def slowly(*arguments):
        rebuilt = rebuild(*arguments)
        save(manager, 2)
        assert not path.exists()
        return rebuilt

    monkeypatch.setattr(verification, "rebuild_manifest", slowly)
    with pytest.raises(
        CheckpointError, match=r"0\.manifest is not what it was before: somebody has saved, repaired or removed"
    ):
        fc.repair_manifest(path, 0, overwrite=True)
    save(manager, 3)
    assert tree(tmp_path) == files_of(3)


def test_a_step_that_was_skipped_is_replaced_once(tmp_path, writer):
    """Skipped, saved again in the background, complete: a further save of it has to be an error."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            save(manager, step)
    flip_values(tmp_path, 2)
    manager = manager_of(tmp_path, async_save=writer)
    restore(manager, fallback=True)
    save(manager, 2, version=20)
    manager.wait()
    assert restore(manager_of(tmp_path))[:2] == (2, 20)
    with pytest.raises(ValidationError, match="there is a checkpoint of step 2"):
        save(manager, 2, version=30)


def test_damage_that_was_repaired_is_forgotten(tmp_path):
    """A person puts a file back from a backup, while the manager that has missed it goes on."""
    manager = manager_of(tmp_path, keep=[KeepLatest(1), KeepBest(1)])
    save(manager, 1, metrics={"loss": 1.0})
    file = data_of(tmp_path, 1)
    content = file.read_bytes()
    file.unlink()
    manager = manager_of(tmp_path, keep=[KeepLatest(1), KeepBest(1)])
    with pytest.raises(CheckpointError, match="all that could be restored is damaged"):
        restore(manager, fallback=True)
    save(manager, 2, metrics={"loss": 2.0})  # the record of step 1 cannot be read
    file.write_bytes(content)
    assert all(info.complete for info in manager.checkpoints())
    assert manager_of(tmp_path, keep=KeepBest(1)).best_step() == 1
    assert manager.best_step() == 1


def test_a_step_that_goes_right_before_the_end_of_a_restore_is_passed_over(tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    for step in (1, 2):
        save(manager, step)
    load = restore_module.load_state_dict

    def slowly(targets, directory, *arguments, **options):
        report = load(targets, directory, *arguments, **options)
        shutil.rmtree(directory_of(tmp_path, 2), ignore_errors=True)
        return report

    monkeypatch.setattr(restore_module, "load_state_dict", slowly)
    step, _, _ = restore(manager, fallback=True)
    assert step in (1, 2)


def test_the_removal_of_a_step_that_is_a_link_fails_nothing(tmp_path):
    """A person has moved the step to another disk, and left a link."""
    root, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    manager = manager_of(root, keep=KeepLatest(1))
    save(manager, 1)
    shutil.move(directory_of(root, 1), disk / "one")
    os.symlink(disk / "one", directory_of(root, 1))
    assert restore(manager)[:2] == (1, 1)
    errors = []
    for step in (2, 3, 4):
        try:
            save(manager, step)
        except CheckpointError as error:
            errors.append((step, str(error)))
    assert errors == []


@pytest.fixture
def meanwhile(tmp_path, monkeypatch):
    """Between the listing of the root and the looks into its directories another job saves 3; 1 and 2 go."""
    other = manager_of(tmp_path, keep=KeepLatest(1))
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        save(manager, 2)
    restore(other)
    directories = StepListing.directories

    def slowly(self):
        found = directories(self)
        monkeypatch.setattr(StepListing, "directories", directories)
        save(other, 3)
        assert fc.latest(tmp_path).step == 3
        return found

    monkeypatch.setattr(StepListing, "directories", slowly)


def test_the_latest_step_is_found_while_others_are_removed(tmp_path, meanwhile):
    """Else the loop of docs/manager.md would begin at step 0."""
    assert manager_of(tmp_path).latest_step() in (2, 3)


def test_a_restore_finds_a_step_while_others_are_removed(tmp_path, meanwhile):
    assert restore(manager_of(tmp_path), fallback=True)[0] in (2, 3)


def test_the_latest_step_is_found_though_the_one_before_has_just_gone(tmp_path, monkeypatch):
    """1 is looked at before, 2 after another job has saved 3 and removed both."""
    other = manager_of(tmp_path, keep=KeepLatest(1))
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        save(manager, 2)
    restore(other)
    look = StepListing._names

    def slowly(self, step):
        found = look(self, step)
        if step == 1:
            monkeypatch.setattr(StepListing, "_names", look)
            save(other, 3)
        return found

    monkeypatch.setattr(StepListing, "_names", slowly)
    assert manager_of(tmp_path).latest_step() in (2, 3)


def test_a_save_makes_room_where_the_disk_is_full(tmp_path, monkeypatch):
    """A job was killed before it removed what need not be kept: else no save would ever go well again."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            save(manager, step)
    manager = manager_of(tmp_path, keep=KeepLatest(1))
    restore(manager)

    def full(*arguments, **options):
        raise CheckpointError(f"cannot save: {os.strerror(errno.ENOSPC)}")

    with monkeypatch.context() as patch:
        patch.setattr(saves_module, "save_from_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(manager, 3)
    assert manager.all_steps() == [2]
    save(manager, 3)
    assert manager.all_steps() == [3]


def test_the_note_of_a_removal_that_never_began_goes_alone(tmp_path):
    """Its job was killed right after the note, and the next one keeps more."""
    with manager_of(tmp_path, pages=True, reports=True) as manager:
        save(manager, 1)
    (tmp_path / "step_00000001.removing").write_text(json.dumps({"files": [data_of(tmp_path, 1).name]}))
    with manager_of(tmp_path, keep=KeepLatest(5)) as manager:
        restore(manager)
        save(manager, 2)
    names = listed(tmp_path)
    assert names == ["step_00000001", "step_00000001.html", "step_00000001.report.json", "step_00000002"]
    assert restore(manager_of(tmp_path), 1)[:2] == (1, 1)


def test_ranks_know_alike_which_saves_have_ended_well():
    """One caller has seen an error, another has none: then no rank has a report to write."""
    pending = PendingSteps(SoloCommunicator())
    for step, error in enumerate((NotDurableError("may be undone"), CheckpointError("failed"), None), 1):
        handle = Save().end(None if error is None else "x")
        handle.error, handle.seen = error, True
        pending.add(step, handle)
    pending.collect("cannot go on", wait_for="all")
    assert (set(pending.drain_reports()), pending.last_saved, pending.doubtful) == ({3}, 3, {1})


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_step_that_another_job_saves_between_the_look_and_the_lock_is_replaced_only_if_asked(
    tmp_path, monkeypatch, overwrite
):
    manager, other = manager_of(tmp_path), manager_of(tmp_path)
    right = saves_module.save_from_file

    def stopped_before(*arguments, **options):
        monkeypatch.setattr(saves_module, "save_from_file", right)
        save(other, 1, version=5)
        return right(*arguments, **options)

    monkeypatch.setattr(saves_module, "save_from_file", stopped_before)
    if overwrite:
        save(manager, 1, version=7, overwrite=True)
    else:
        with pytest.raises(ValidationError, match="has a checkpoint with id 0, which overwrite=False keeps"):
            save(manager, 1, version=7)
    assert restore(other, 1)[1] == (7 if overwrite else 5)


@pytest.mark.parametrize("where", ["read_extra_state", "load_state_dict"])
def test_a_step_that_is_replaced_between_the_looks_of_two_ranks_is_restored_again(tmp_path, monkeypatch, where):
    other = manager_of(tmp_path)
    save(other, 1)
    is_replaced, has_looked = threading.Event(), threading.Event()
    right = getattr(restore_module, where)

    def call(*arguments, **options):
        comm = arguments[2]
        if not is_replaced.is_set() and comm.position == 1:
            assert has_looked.wait(60)
            save(other, 1, version=20, overwrite=True)
            is_replaced.set()
        elif not is_replaced.is_set():
            together = comm.together

            def first(work, *rest, **more):
                comm.together = together

                def work_and_tell():
                    result = work()
                    has_looked.set()
                    return result

                return together(work_and_tell, *rest, **more)

            comm.together = first
        return right(*arguments, **options)

    monkeypatch.setattr(restore_module, where, call)

    def job(comm):
        state = empty()
        report = manager_of(tmp_path, process_group=comm).restore("latest", state=state)
        return report.step, version_of(state), report.skipped

    assert SimulatedWorld(2).run(job) == [(1, 20, {})] * 2


@pytest.mark.parametrize("kind", ["part", "failed", "decided"])
def test_a_message_of_an_older_version_that_comes_late_goes_with_its_directory(tmp_path, kind):
    """A request of a rank that was killed arrives when a manager has cleaned up."""
    step = directory_of(tmp_path, 5)
    directory = open_to_save(str(step))
    with directory.lock():
        names = directory.open_save(0, 2)
    with directory.lock():
        directory.cleaner.remove_dead_saves()
        directory.companion.remove_refusal()
    (step / names.data_file(1).replace("safetensors", kind)).write_bytes(b"late")
    save(manager_of(tmp_path, keep=KeepLatest(1)), 6)
    assert tree(tmp_path) == files_of(6)


def test_a_step_that_was_rebuilt_without_a_file_does_not_count(tmp_path, caplog):
    """Retention keeps the step before it, and a fall-back passes it over."""

    def job(comm):
        state = {f"own.{comm.rank}": np.zeros(3, "f4")}
        with manager_of(tmp_path, process_group=comm) as manager:
            manager.save(1, state=state, rng=False)
            manager.save(2, state=state, rng=False)

    SimulatedWorld(2).run(job)
    path = directory_of(tmp_path, 2)
    (path / "0.manifest").unlink()
    (path / data_file(path, 1)).unlink()
    fc.repair_manifest(path, 0, fewer_files=True)
    with manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        state = {"own.0": np.zeros(3, "f4")}
        report = manager.restore(state=state, rng=False, fallback=True, strict="missing")
        assert (report.step, list(report.skipped)) == (1, [2])
        assert "is partial: rebuilt from the data files of 1 of 2 ranks" in report.skipped[2]
        report = manager.restore(state=state, rng=False, strict="missing")
        assert (report.step, bool(report.load.partial)) == (2, True)
        manager.save(3, state=state, rng=False)
        assert manager.all_steps() == [2, 3], "what is partial is left alone, as what is damaged"
