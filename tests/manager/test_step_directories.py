"""Removal: what goes, what stays whatever happens, and how an interrupted one is carried through."""

from __future__ import annotations

import errno
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle_flexckpt as fc
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.manager import KeepBest, KeepEvery, KeepLatest
from paddle_flexckpt.manager import step_contents as contents_module
from paddle_flexckpt.manager.step_directories import StepDirectories
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest
from paddle_flexckpt.native.save_names import token_after
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from tests.manager.samples import (
    damage_manifest,
    data_of,
    directory_of,
    files_of,
    flip_values,
    manager_of,
    restore,
    retain,
    run_in,
    save,
    tree,
)
from tests.manager.test_pending_steps import Save
from tests.media.faults import FaultyFiles
from tests.native.test_cleaner import begin
from tests.saved import short


def all_files_of(*steps: int) -> list[str]:
    return sorted(name for step in steps for name in files_of(step))


def run_of(root, *steps: int, **options) -> fc.CheckpointManager:
    """A manager that has saved some steps and kept them all; the given options are those of the next one."""
    with manager_of(root) as first:
        for step in steps:
            save(first, step)
    manager = manager_of(root, **options)
    restore(manager)
    return manager


def test_what_need_not_be_kept_is_gone_with_its_directory(tmp_path):
    manager = manager_of(tmp_path, keep=[KeepLatest(2), KeepEvery(10)])
    for step in (5, 10, 15, 20, 25):
        save(manager, step)
    assert tree(tmp_path) == all_files_of(10, 20, 25)
    assert manager.all_steps() == [10, 20, 25]


@pytest.mark.parametrize("busy, left", [(1, [1, 3]), (2, [2, 3]), (3, [2, 3])])
def test_a_save_on_its_way_does_not_go_and_nothing_goes_for_its_sake(tmp_path, busy, left):
    """It may be committed, and not be durable yet, or not be known to all ranks."""
    run_of(tmp_path, 1, 2, 3)
    retain(tmp_path, run_in(tmp_path), 1, {busy})
    assert manager_of(tmp_path).all_steps() == left


def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    manager = manager_of(tmp_path, keep=KeepLatest(1))
    for step, now in ((5, 100.0), (3, 50.0)):
        monkeypatch.setattr(contents_module, "time", SimpleNamespace(time=lambda now=now: now))
        save(manager, step)
    # 5 is the highest, and 3 has just been saved.
    assert manager.all_steps() == [3, 5]


def test_what_earlier_starts_left_is_subject_to_the_policies_of_this_one(tmp_path):
    manager = run_of(tmp_path, 1, 2, 3, keep=KeepLatest(1))
    assert manager.all_steps() == [1, 2, 3]
    save(manager, 4)
    assert tree(tmp_path) == files_of(4)


def test_what_no_manager_saved_is_never_removed(tmp_path):
    manager = manager_of(tmp_path, keep=KeepLatest(1))
    save(manager, 4)
    fc.save_state_dict({"w": np.zeros(2)}, directory_of(tmp_path, 1), SoloCommunicator(), unique_id=0, step=1)
    fc.save_state_dict({"w": np.zeros(2)}, tmp_path / "step_2", SoloCommunicator())
    (tmp_path / "notes").write_text("mine")
    before = sorted({*tree(tmp_path)} - {*files_of(4)})
    for step in (5, 6):
        save(manager, step)
    assert tree(tmp_path) == sorted(before + files_of(6))
    assert manager.all_steps() == [1, 6]


def test_other_files_in_a_step_s_directory_stay(tmp_path):
    manager = run_of(tmp_path, 1, keep=KeepLatest(1))
    directory = directory_of(tmp_path, 1)
    (directory / "notes").write_text("mine")
    (directory / f"3_7-{token_after(8)}.safetensors").write_bytes(b"another's, or what a lost manifest named")
    (directory / "sub").mkdir()
    save(manager, 2)
    stay = ["step_00000001/3_7-9.safetensors", "step_00000001/notes", "step_00000001/sub/"]
    assert tree(tmp_path) == sorted(stay + files_of(2))
    assert manager.all_steps() == [2]


def test_a_damaged_checkpoint_is_left_alone_and_does_not_count(tmp_path):
    manager = run_of(tmp_path, 1, 2, 3, keep=KeepLatest(2))
    damage_manifest(tmp_path, 2)
    save(manager, 4)
    assert tree(tmp_path) == all_files_of(2, 3, 4)
    # Damage that nobody has looked for is not known.
    flip_values(tmp_path, 3)
    save(manager, 5)
    assert tree(tmp_path) == all_files_of(2, 4, 5)


def test_what_is_being_read_is_removed_later(tmp_path):
    manager = run_of(tmp_path, 1, keep=KeepLatest(1))
    with LockedManifest(CheckpointDirectory(directory_of(tmp_path, 1))):
        save(manager, 2)
        assert tree(tmp_path) == all_files_of(1, 2)
        assert restore(manager, 1)[:2] == (1, 1)
    save(manager, 3)
    assert tree(tmp_path) == files_of(3)


def test_what_is_being_saved_is_not_removed(tmp_path):
    manager = run_of(tmp_path, 1, keep=KeepLatest(1))
    lock = open_to_save(directory_of(tmp_path, 1)).lock()
    save(manager, 2)
    assert tree(tmp_path) == all_files_of(1, 2)
    lock.release()
    save(manager, 3)
    assert tree(tmp_path) == files_of(3)


def test_a_step_that_another_process_has_saved_again_is_looked_at_again(tmp_path, monkeypatch):
    manager = run_of(tmp_path, 1, 2, keep=[KeepBest(1)])
    other = manager_of(tmp_path)
    restore(other)
    save(other, 1, overwrite=True, metrics={"loss": 1.0})
    real = StepDirectories.records

    def replaced_after(self):
        found = real(self)
        if self is not other._steps:
            save(other, 1, 11, overwrite=True, metrics={"loss": 0.0})
        return found

    monkeypatch.setattr(StepDirectories, "records", replaced_after)
    save(manager, 3)
    assert manager.all_steps() == [1, 3]
    assert restore(manager, 1)[:2] == (1, 11)
    monkeypatch.undo()
    save(manager, 4)
    assert manager.all_steps() == [1, 4]


def test_what_cannot_be_removed_is_an_error_and_the_new_checkpoint_is_complete(tmp_path, monkeypatch):
    manager = run_of(tmp_path, 1, 2, 3, keep=KeepLatest(1))
    real = os.unlink

    def unlink(path, **kwargs):
        if os.path.basename(os.path.dirname(path)) == "step_00000002":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(
        fc.CheckpointError, match="the checkpoint of step 4 is complete, but .*Permission denied.*00002"
    ):
        save(manager, 4)
    # What could be removed has been.
    assert manager.all_steps() == [2, 4]
    assert restore(manager)[:2] == (4, 4)
    assert restore(manager, 2)[:2] == (2, 2)
    monkeypatch.undo()
    save(manager, 5)
    assert tree(tmp_path) == files_of(5)


# -- interrupted -------------------------------------------------------------------------------------------------------


def remove_first(root, run: str) -> None:
    """One retention, which removes step 1 of 3."""
    retain(root, run, 2)


@pytest.mark.parametrize("fault", ["one call fails", "killed", "power loss"])
def test_a_removal_that_is_interrupted_anywhere_is_carried_through(tmp_path, monkeypatch, fault):
    kept = tmp_path / "kept"
    run_of(kept, 1, 2, 3)
    run = run_in(kept)
    whole = all_files_of(1, 2, 3)
    with monkeypatch.context() as patch:
        files = FaultyFiles(patch)
        shutil.copytree(kept, tmp_path / "count")
        remove_first(tmp_path / "count", run)
    count = [call for call, _ in files.calls].count("unlink")
    assert count >= 3
    seen = set()
    for at in range(len(files.calls)):
        root = tmp_path / "run"
        shutil.copytree(kept, root)
        with monkeypatch.context() as patch:
            files = FaultyFiles(patch, at, dead_after=fault != "one call fails")
            try:
                remove_first(root, run)
            except (fc.CheckpointError, OSError) as error:
                assert "injected" in str(error)
        if fault == "power loss":
            files.lose_power()
        where = f"call {at}: {files.calls[at]}"
        manager = manager_of(root)
        steps = manager.all_steps()
        seen.add(tuple(steps))
        assert steps in ([1, 2, 3], [2, 3]), where
        # What exists is whole.
        if 1 in steps:
            assert restore(manager, 1)[:2] == (1, 1), where
        assert all(info.complete for info in manager.checkpoints()), where
        if steps == [2, 3] and at % 2:
            # The same step can be saved again.
            restore(manager)
            save(manager, 1, 11)
            assert restore(manager, 1)[:2] == (1, 11), where
            assert tree(root) == whole, where
        else:
            remove_first(root, run)
            assert tree(root) == all_files_of(2, 3), where
        shutil.rmtree(root)
    assert seen == {(1, 2, 3), (2, 3)}


def marker_of(root, step: int, files) -> None:
    (root / f"step_{step:08d}.removing").write_text(json.dumps({"files": files}))


def test_a_removal_takes_along_what_a_loss_of_power_has_brought_back(tmp_path):
    """A manifest that a save without its lease had begun and removed long ago."""
    manager = run_of(tmp_path, 1, 2)
    directory = tmp_path / "step_00000001"
    marker_of(tmp_path, 1, [path.name for path in directory.iterdir() if path.suffix == ".safetensors"])
    (directory / "0.manifest").unlink()
    (directory / f"0.manifest.{'0' * 32}.tmp").write_bytes(b"begun")
    save(manager, 3)
    assert tree(tmp_path) == all_files_of(2, 3)


def test_a_note_of_a_removal_that_never_began(tmp_path):
    manager = run_of(tmp_path, 1, 2)
    marker_of(tmp_path, 1, [data_of(tmp_path, 1).name])
    marker_of(tmp_path, 9, [data_of(tmp_path, 1).name])
    save(manager, 3)
    assert tree(tmp_path) == all_files_of(1, 2, 3)
    assert restore(manager, 1)[:2] == (1, 1)


def test_a_listing_out_of_date_does_not_finish_a_removal_of_a_step_that_was_saved_again(tmp_path, monkeypatch):
    manager, names = run_of(tmp_path, 1, 2), LocalBackend.names
    marker_of(tmp_path, 1, [data_of(tmp_path, 1).name])

    def late(self, *kind):
        return [name for name in names(self, *kind) if not (name == "0.manifest" and self.path.endswith("1"))]

    monkeypatch.setattr(LocalBackend, "names", late)
    save(manager, 3)
    monkeypatch.undo()
    assert tree(tmp_path) == all_files_of(1, 2, 3)
    assert restore(manager, 1)[:2] == (1, 1)


@pytest.mark.parametrize(
    "content", ["rubbish", "{}", '{"files": ["../notes"]}', '{"files": ["a/b"]}', '{"files": [3]}']
)
def test_a_note_that_cannot_be_understood_removes_nothing(tmp_path, content, caplog):
    manager = run_of(tmp_path, 1, 2)
    (tmp_path / "notes").write_text("mine")
    (directory_of(tmp_path, 1) / "0.manifest").unlink()
    (tmp_path / "step_00000001.removing").write_text(content)
    before = tree(tmp_path)
    save(manager, 3)
    assert tree(tmp_path) == sorted(before + files_of(3))
    assert "cannot be understood, and is left alone" in caplog.text


def test_a_removal_is_not_finished_while_somebody_saves_there(tmp_path):
    manager = run_of(tmp_path, 1, 2)
    (directory_of(tmp_path, 1) / "0.manifest").unlink()
    marker_of(tmp_path, 1, [data_of(tmp_path, 1).name])
    lock = open_to_save(directory_of(tmp_path, 1)).lock()
    save(manager, 3)
    assert "step_00000001/0_0-1.safetensors" in tree(tmp_path)
    lock.release()
    save(manager, 4)
    assert tree(tmp_path) == all_files_of(2, 3, 4)


# -- dead saves --------------------------------------------------------------------------------------------------------


def test_what_dead_saves_left_is_removed_by_the_next_save_of_any_step(tmp_path):
    manager = run_of(tmp_path, 1)
    begin(directory_of(tmp_path, 7), 0)
    directory_of(tmp_path, 8).mkdir()
    save(manager, 2)
    assert tree(tmp_path) == all_files_of(1, 2)


def test_a_save_that_is_under_way_is_not_dead(tmp_path):
    manager = run_of(tmp_path, 1)
    directory = open_to_save(directory_of(tmp_path, 7))
    lock = directory.lock()
    begin(directory.path, 0)
    before = tree(tmp_path)
    save(manager, 2)
    assert tree(tmp_path) == sorted(before + files_of(2))
    lock.release()
    # As long as a rank of this run may be writing there, it does not matter who has the lock.
    manager._pending.add(7, Save())
    save(manager, 3)
    assert tree(tmp_path) == sorted(before + all_files_of(2, 3))


@pytest.mark.parametrize("blocking", [True, False])
def test_the_directory_of_another_save_stays_while_it_is_empty(tmp_path, blocking):
    """A save has made it, has the lock, and has written nothing yet."""
    manager = run_of(tmp_path, 1)
    lock = open_to_save(directory_of(tmp_path, 7)).lock()
    with pytest.raises(fc.CheckpointError, match="another save is writing to"):
        save(manager, 7, blocking=blocking)
        manager.wait()
    assert os.listdir(directory_of(tmp_path, 7)) == []
    lock.release()


def test_files_of_unknown_origin_stay(tmp_path):
    manager = run_of(tmp_path, 1, 2)
    (directory_of(tmp_path, 1) / "0.manifest").unlink()
    save(manager, 3)
    assert "step_00000001/0_0-1.safetensors" in tree(tmp_path)
    fc.repair_manifest(directory_of(tmp_path, 1), 0)
    assert restore(manager, 1)[:2] == (1, 1)


def test_a_save_of_the_step_of_a_dead_save(tmp_path):
    manager = run_of(tmp_path, 1)
    begin(directory_of(tmp_path, 2), 0)
    assert manager.all_steps() == [1]
    save(manager, 2)
    assert restore(manager)[:2] == (2, 2)
    assert [info.complete for info in manager.checkpoints()] == [True, True]
    assert len(tree(tmp_path)) == 4


def test_metrics_are_read_once(tmp_path, monkeypatch):
    run_of(tmp_path, *range(4))
    opened = []
    real = os.open

    def count(path, *args, **kwargs):
        opened.append(short(os.path.basename(path)))
        return real(path, *args, **kwargs)

    directories = StepDirectories(tmp_path)
    monkeypatch.setattr(os, "open", count)
    directories.records()
    assert opened.count("0_0-1.safetensors") == 4
    opened.clear()
    records, damaged = directories.records()
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert damaged == {}
    assert opened == ["0.manifest"] * 4
