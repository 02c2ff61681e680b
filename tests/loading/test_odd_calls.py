"""Calls that are a mistake, or nearly: what is said of them, and on which ranks."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import load_merged_state_dict
from paddle_flexckpt.manager import CheckpointManager, KeepLatest
from paddle_flexckpt.manager.step_directories import StepDirectories
from paddle_flexckpt.media.local import LocalBackend, LocalOutputFile
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.run_state import load_extra_state
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.manager.samples import listed
from tests.saved import short

SOLO = SoloCommunicator()


def state(version: int = 1) -> dict[str, np.ndarray]:
    return {"w": np.full(4, version, np.float32)}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("extra_state.weight", "a run's extra state, which no model gets back .key 'extra_state.weight'"),
        ("extra_state.commoner", "those of a run's extra state"),
        ("", "a name is empty .key '', rank 0"),
        ("a\ud800b", r"a name has lone surrogates, which are no text .key 'a\\\\ud800b', rank 0"),
    ],
)
def test_names_that_would_not_come_back_are_refused(tmp_path, key, said):
    with pytest.raises(fc.ValidationError, match=said):
        save_state_dict({**state(), key: np.zeros(2)}, tmp_path, SOLO)
    assert os.listdir(tmp_path) == []


def test_extra_state_of_the_library_is_saved(tmp_path):
    save_state_dict({**state(), "extra_state.common": np.zeros(2, np.uint8)}, tmp_path, SOLO)
    assert list(load_merged_state_dict(str(tmp_path))) == ["w"]


def test_a_tensor_that_paddle_cannot_have(tmp_path):
    array = np.arange(4.0).reshape((1,) * 18 + (2, 2))
    save_state_dict({"deep": array}, tmp_path, SOLO)
    with pytest.raises(fc.ValidationError, match=r"cannot have so many axes .key 'deep'.; expected at most 9; got 20"):
        load_merged_state_dict(str(tmp_path))
    target = {"deep": np.zeros_like(array)}
    load_state_dict(target, tmp_path, SOLO)
    assert target["deep"].tolist() == array.tolist()


def test_a_manager_stays_where_it_was_made(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
    monkeypatch.chdir(first)
    with CheckpointManager("run", process_group=SOLO, preemption_signals=()) as manager:
        manager.save(1, state=state(), rng=False)
        monkeypatch.chdir(second)
        manager.save(2, state=state(), rng=False)
        assert manager.all_steps() == [1, 2]
    assert sorted(os.listdir(first / "run")) == ["step_00000001", "step_00000002"]
    assert os.listdir(second) == []


def texts(outcomes) -> set[str]:
    assert all(isinstance(outcome, fc.CheckpointError) for outcome in outcomes), outcomes
    return {str(outcome) for outcome in outcomes}


def test_ranks_that_do_not_make_the_same_call(tmp_path):
    save_state_dict(state(), tmp_path, SOLO)

    def job(comm):
        if comm.rank == 3:
            return load_state_dict(state(), tmp_path, comm)
        return save_state_dict(state(), tmp_path, comm)

    (text,) = {each.partition(": ")[2] for each in texts(SimulatedWorld(3).run_all(job, ranks=(2, 3, 5)))}
    assert text.startswith("ranks do not make the same call: ranks 2, 5: save_state_dict; rank 3: load_state_dict")
    assert load_merged_state_dict(str(tmp_path))["w"].tolist() == [1.0] * 4

    def other(comm):
        if comm.rank:
            return load_extra_state(tmp_path, process_group=comm)
        return save_state_dict(state(), tmp_path, comm)

    save_state_dict({**state(), "extra_state.common": np.zeros(2, np.uint8)}, tmp_path, SOLO)
    (text,) = {each.partition(": ")[2] for each in texts(SimulatedWorld(2).run_all(other))}
    assert "rank 0: save_state_dict; rank 1: load_extra_state" in text


@pytest.mark.parametrize("there", [True, False])
def test_ranks_that_disagree_about_the_path(tmp_path, there):
    paths = [tmp_path / "a", tmp_path / "b"]
    if there:
        paths[1].mkdir()
    outcomes = SimulatedWorld(2).run_all(lambda comm: save_state_dict(state(comm.rank), paths[comm.rank], comm))
    (text,) = texts(outcomes)
    assert f"[rank 1] {paths[1]}/0-1.saving is not there" in short(text)
    assert "Remedy (FC504): give all ranks the same path of storage that they share" in text
    assert [name for path in paths if path.exists() for name in os.listdir(path)] == []


def test_the_same_directory_by_two_names(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    paths = [tmp_path / "a", tmp_path / "b"]
    SimulatedWorld(2).run(lambda comm: save_state_dict(state(), paths[comm.rank], comm))
    assert load_merged_state_dict(str(tmp_path / "b"))["w"].tolist() == [1.0] * 4


def full(monkeypatch) -> None:
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    monkeypatch.setattr(LocalOutputFile, "write", write)


def test_a_failed_save_leaves_no_directory_and_says_what_retention_needs(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, keep=KeepLatest(2), process_group=SOLO, preemption_signals=()) as manager:
        for step in (1, 2):
            manager.save(step, state=state(step), rng=False)
        with monkeypatch.context() as patched:
            full(patched)
            with pytest.raises(fc.CheckpointError, match="no step can go yet. Remedy .FC402.: make room"):
                manager.save(3, state=state(3), rng=False)
        assert listed(tmp_path) == ["step_00000001", "step_00000002"]
        manager.save(3, state=state(3), rng=False)
        assert manager.all_steps() == [2, 3]


@pytest.mark.parametrize("failing", ["steps", "retain"])
def test_a_full_disk_is_named_even_if_nothing_can_be_removed(tmp_path, monkeypatch, failing):
    def refuse(*_):
        raise OSError(errno.EIO, "no answer")

    with CheckpointManager(tmp_path, keep=KeepLatest(1), process_group=SOLO, preemption_signals=()) as manager:
        manager.save(1, state=state(1), rng=False)
        with monkeypatch.context() as patched:
            full(patched)
            patched.setattr(StepDirectories, failing, refuse)
            said = "No space left.* steps that need not be kept has failed: .*no answer. Remedy .FC402.: make room"
            with pytest.raises(fc.CheckpointError, match=said) as caught:
                manager.save(2, state=state(2), rng=False)
            assert "no step can go" not in str(caught.value)
        manager.save(2, state=state(2), rng=False)
        assert manager.all_steps() == [2]


def test_a_refusal_of_the_storage_is_an_error_of_the_library(tmp_path, monkeypatch):
    save_state_dict(state(), tmp_path, SOLO)

    def refuse(self, name):
        raise PermissionError(errno.EACCES, "Forbidden", name)

    monkeypatch.setattr(LocalBackend, "open", refuse)
    for load in (
        lambda: load_merged_state_dict(str(tmp_path)),
        lambda: load_state_dict(state(), tmp_path, SOLO),
        lambda: load_extra_state(tmp_path, process_group=SOLO),
    ):
        with pytest.raises(fc.UnreadableCheckpointError, match="cannot be read: PermissionError: .*Forbidden"):
            load()
