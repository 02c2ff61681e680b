"""Steps that the storage does not let anybody read, and directories that change while they are listed."""

from __future__ import annotations

import errno
import os
import shutil

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.manager import CheckpointManager
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.local_locks import LocalLocks
from paddle_flexckpt.native.directory import CheckpointDirectory, is_complete, latest, list_checkpoints
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from tests.manager.samples import directory_of
from tests.saved import data_file

STEPS = (1, 2, 3)


@pytest.fixture
def run(tmp_path):
    with CheckpointManager(tmp_path, process_group=SoloCommunicator(), preemption_signals=()) as manager:
        for step in STEPS:
            manager.save(step, state={"w": np.full(4, step, np.float32)}, rng=False)
        yield manager


def refuse(monkeypatch, number: int, part: str):
    """What has a part in its path cannot be opened or listed: this process may read everything."""
    opened, listed = LocalBackend.open, LocalBackend.names

    def fail(path: str) -> None:
        if part in path:
            raise OSError(number, os.strerror(number), path)

    def open_(self, name):
        fail(self.where(name))
        return opened(self, name)

    def names(self, kind="files"):
        fail(f"{self.path}/")
        return listed(self, kind)

    monkeypatch.setattr(LocalBackend, "open", open_)
    monkeypatch.setattr(LocalBackend, "names", names)


PARTS = ["step_00000003/", "step_00000003/0.manifest", "step_00000003/0_0-"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("part", PARTS)
def test_an_unreadable_step_is_passed_over_and_listed_with_the_reason(run, tmp_path, monkeypatch, number, part):
    refuse(monkeypatch, number, part)
    infos = list_checkpoints(tmp_path)
    assert {info.path: info.complete for info in infos} == {
        str(directory_of(tmp_path, step)): step != 3 for step in STEPS
    }
    (broken,) = (info for info in infos if not info.complete)
    assert os.strerror(number) in broken.problem
    assert latest(tmp_path).step == 2
    assert [info.complete for info in run.checkpoints()] == [True, True, False]
    target = {"w": np.zeros(4, np.float32)}
    with pytest.raises(fc.UnreadableCheckpointError, match=os.strerror(number)):
        run.restore(state=target, rng=False)
    report = run.restore(state=target, rng=False, fallback=True)
    assert (report.step, list(report.skipped)) == (2, [3])
    assert os.strerror(number) in report.skipped[3]
    assert target["w"].tolist() == [2.0] * 4


def test_a_link_to_itself_in_the_place_of_a_step(run, tmp_path):
    shutil.rmtree(directory_of(tmp_path, 3))
    os.symlink("step_00000003", directory_of(tmp_path, 3))
    assert latest(tmp_path).step == 2
    assert run.restore(state={"w": np.zeros(4, np.float32)}, rng=False, fallback=True).step == 2


def test_the_root_itself_cannot_be_read(run, tmp_path, monkeypatch):
    refuse(monkeypatch, errno.EACCES, f"{tmp_path}/")
    for look in (list_checkpoints, latest, is_complete):
        with pytest.raises(fc.UnreadableCheckpointError, match="Permission denied"):
            look(tmp_path)


def test_a_step_that_is_removed_while_it_is_restored(run, tmp_path, monkeypatch):
    """Another process's retention comes between the choice of the step and its reading."""
    order = run._steps.order

    def late(*arguments):
        found = order(*arguments)
        shutil.rmtree(directory_of(tmp_path, 3))
        return found

    monkeypatch.setattr(run._steps, "order", late)
    report = run.restore(state={"w": np.zeros(4, np.float32)}, rng=False, fallback=True)
    assert report.step == 2
    assert "has been removed meanwhile" in report.skipped[3]


def save(path, version: int, unique_id: int = 0) -> None:
    fc.save_state_dict({"w": np.full(4, version, np.float32)}, path, SoloCommunicator(), unique_id=unique_id)


def between(monkeypatch, method: str, act) -> None:
    """Acts once, right before a method of the directory does its work."""
    work, acts = getattr(CheckpointDirectory, method), [act]

    def late(self, *arguments):
        while acts:
            acts.pop()()
        return work(self, *arguments)

    monkeypatch.setattr(CheckpointDirectory, method, late)


@pytest.mark.parametrize("method", ["read_committed", "check_complete"])
def test_a_listing_during_an_overwrite_finds_the_new_checkpoint_whole(tmp_path, monkeypatch, method):
    save(tmp_path, 1)
    between(monkeypatch, method, lambda: save(tmp_path, 2))
    (info,) = list_checkpoints(tmp_path)
    assert (info.complete, info.problem) == (True, "")


def remove(path) -> None:
    for name in (data_file(path), "0.manifest"):
        os.unlink(path / name)


@pytest.mark.parametrize("method", ["read_committed", "check_complete"])
def test_a_listing_during_a_removal_finds_nothing(tmp_path, monkeypatch, method):
    save(tmp_path, 1)
    between(monkeypatch, method, lambda: remove(tmp_path))
    assert list_checkpoints(tmp_path) == []
    save(tmp_path, 1)
    between(monkeypatch, method, lambda: remove(tmp_path))
    assert not is_complete(tmp_path, 0)


def test_a_read_during_a_removal_and_another_save(tmp_path, monkeypatch):
    save(tmp_path, 1)
    share = LocalLocks.share
    acts = [lambda: remove(tmp_path)]

    def late(self, name):
        if acts:
            acts.pop()()
            try:
                return share(self, name)
            finally:
                save(tmp_path, 2)
        return share(self, name)

    monkeypatch.setattr(LocalLocks, "share", late)
    target = {"w": np.zeros(4, np.float32)}
    load_state_dict(target, tmp_path, SoloCommunicator())
    assert target["w"].tolist() == [2.0] * 4


def test_a_manifest_that_is_a_link_to_nothing(tmp_path):
    save(tmp_path, 1)
    os.symlink("nothing", tmp_path / "7.manifest")
    with pytest.raises(fc.CorruptCheckpointError, match=r"7\.manifest is listed in its directory, and is not there"):
        load_state_dict({"w": np.zeros(4, np.float32)}, tmp_path, SoloCommunicator())
    assert {info.unique_id: info.complete for info in list_checkpoints(tmp_path)} == {0: True, 7: False}
