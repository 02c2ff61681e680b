"""The manager's saves in the background: when they are complete, and who is told that one has failed.

The writer process is stopped where a save must not be complete yet.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

import paddle_flexckpt as fc
import paddle_flexckpt.manager.storage_saves as saves_module
from paddle_flexckpt.manager import KeepLatest
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.sliced_saves import SlicedSave
from tests.manager.samples import directory_of, empty, files_of, listed, manager_of, restore, save, tree


def fail(root, stopped, manager, step: int) -> fc.SaveHandle:
    """A save in the background that fails: its directory goes away."""
    with stopped():
        handle = save(manager, step)
        shutil.rmtree(directory_of(root, step))
    assert handle.wait(300)
    return handle


def test_a_checkpoint_is_there_when_its_save_is_complete(tmp_path, writer, stopped):
    manager = manager_of(tmp_path, async_save=writer, keep=KeepLatest(1))
    save(manager, 1, blocking=True)
    with stopped():
        handle = save(manager, 2)
        assert isinstance(handle, fc.SaveHandle)
        assert not manager.should_save(2)
        assert manager.all_steps() == [1]
    report = handle.result(60)
    assert (report.path, report.unique_id) == (str(directory_of(tmp_path, 2)), 0)
    assert manager.all_steps() == [1, 2]
    manager.wait()
    assert tree(tmp_path) == files_of(2)
    assert restore(manager)[:2] == (2, 2)


def test_what_was_kept_for_a_save_goes_at_the_next_save(tmp_path, writer):
    manager = manager_of(tmp_path, async_save=writer, keep=KeepLatest(1))
    for step in (1, 2, 3):
        save(manager, step).wait(300)
    assert manager.all_steps()[-2:] == [2, 3]
    save(manager, 4, blocking=True)
    assert tree(tmp_path) == files_of(4)


def test_blocking_is_a_matter_of_each_save(tmp_path, writer):
    manager = manager_of(tmp_path)
    assert isinstance(save(manager, 1), SaveReport)
    handle = save(manager, 2, blocking=False)
    assert isinstance(handle, fc.SaveHandle)
    manager.close()
    assert handle.done()
    manager = manager_of(tmp_path, async_save=writer)
    restore(manager)
    assert isinstance(save(manager, 3, blocking=True), SaveReport)
    assert manager.all_steps() == [1, 2, 3]


def test_leaving_the_context_waits(tmp_path, writer):
    with manager_of(tmp_path, async_save=writer) as manager:
        handle = save(manager, 1)
    assert handle.done()
    assert restore(manager_of(tmp_path))[:2] == (1, 1)


def test_an_error_in_the_loop_does_not_stop_the_save(tmp_path, writer, stopped):
    with stopped():
        with pytest.raises(ZeroDivisionError), manager_of(tmp_path, async_save=writer) as manager:
            handle = save(manager, 1)
            1 / 0  # noqa: B018
        assert not handle.done()
    assert handle.result(60).keys == 4
    assert restore(manager_of(tmp_path))[:2] == (1, 1)


def test_restoring_waits_for_the_save(tmp_path, writer):
    manager = manager_of(tmp_path, async_save=writer)
    save(manager, 1)
    assert restore(manager)[:2] == (1, 1)


def test_a_step_that_is_being_saved(tmp_path, writer):
    manager = manager_of(tmp_path, async_save=writer)
    save(manager, 1, 10)
    with pytest.raises(fc.ValidationError, match="there is a checkpoint of step 1"):
        save(manager, 1, 11)
    save(manager, 1, 12, overwrite=True)
    save(manager, 1, 13, overwrite=True)
    assert restore(manager, 1)[:2] == (1, 13)


@pytest.mark.parametrize("call", ["save", "blocking save", "wait", "restore", "close"])
def test_a_failure_is_an_error_of_the_next_call_and_only_of_that(tmp_path, writer, stopped, call):
    manager = manager_of(tmp_path, async_save=writer)
    save(manager, 1, blocking=True)
    handle = fail(tmp_path, stopped, manager, 2)
    calls = {
        "save": lambda: save(manager, 3),
        "blocking save": lambda: save(manager, 3, blocking=True),
        "wait": manager.wait,
        "restore": lambda: manager.restore(state=empty()),
        "close": manager.close,
    }
    with pytest.raises(fc.CheckpointError, match="an earlier save failed: .*step_00000002"):
        calls[call]()
    assert handle.seen
    if call in ("wait", "restore", "close"):
        assert listed(tmp_path) == ["step_00000001"]  # no empty directory is left
    if call == "close":
        with pytest.raises(fc.ValidationError, match="has been closed"):
            manager.wait()
        manager = manager_of(tmp_path, async_save=writer)
        restore(manager)
    assert manager.all_steps() == [1]
    calls[call]()
    save(manager, 2)
    manager.wait()
    assert restore(manager, 2)[:2] == (2, 2)


def test_a_failure_that_was_seen_is_not_told_again(tmp_path, writer, stopped):
    manager = manager_of(tmp_path, async_save=writer)
    with pytest.raises(fc.CheckpointError):
        fail(tmp_path, stopped, manager, 1).result()
    save(manager, 2)
    manager.close()
    assert restore(manager_of(tmp_path))[:2] == (2, 2)


def test_no_removal_that_fails_hides_a_save_on_its_way(tmp_path, writer, monkeypatch):
    save(manager_of(tmp_path, async_save=writer), 1, blocking=True)
    manager = manager_of(tmp_path, async_save=writer)  # it looks for dead saves in each directory once
    restore(manager)

    def remove(self, step):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("paddle_flexckpt.manager.removal.Removal.remove_dead_save", remove)
    with pytest.raises(fc.CheckpointError, match="the checkpoint of step 2 is on its way, but .*Permission denied"):
        save(manager, 2)
    monkeypatch.undo()
    manager.wait()
    assert restore(manager)[:2] == (2, 2)


# -- in slices ---------------------------------------------------------------------------------------------------------

SLICE = 4096


class Training:
    """A model whose weight has four slices, each of its two moments as many."""

    def __init__(self, seed: int = 1) -> None:
        paddle.seed(seed)
        with paddle.utils.unique_name.guard():
            self.model = paddle.nn.Linear(64, 64, bias_attr=False)
            self.optimizer = paddle.optimizer.AdamW(0.1, parameters=self.model.parameters())
        self.step()

    def step(self) -> None:
        self.model(paddle.ones([1, 64])).sum().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()

    def save(self, manager, step: int, **options):
        return manager.save(step, model=self.model, optimizer=self.optimizer, rng=False, **options)

    def values(self) -> list[bytes]:
        tensors = {**self.model.state_dict(), **self.optimizer.state_dict()}
        return [value.numpy().tobytes() for value in tensors.values() if isinstance(value, paddle.Tensor)]

    @classmethod
    def restored(cls, root) -> list[bytes]:
        other = cls(2)
        manager_of(root).restore(model=other.model, optimizer=other.optimizer, rng=False)
        return other.values()


@pytest.fixture
def training():
    yield Training()
    fc.uninstall()


def test_slices_are_copied_between_micro_steps_and_the_rest_before_the_step(tmp_path, writer, training):
    manager = manager_of(tmp_path, async_save=writer, slice_bytes=SLICE)
    assert not manager.stage_next()  # nothing to do
    expected, own_step = training.values(), training.optimizer.step
    handle = training.save(manager, 1)
    assert isinstance(handle, SlicedSave)
    assert [manager.stage_next() for _ in range(3)] == [True] * 3
    assert not handle.is_staged
    assert not handle.done()
    training.step()
    assert handle.is_staged
    assert training.optimizer.step == own_step
    assert not manager.stage_next()
    assert training.values() != expected
    manager.wait()
    assert Training.restored(tmp_path) == expected


@pytest.mark.parametrize("call", ["save", "blocking save", "wait", "restore", "close"])
def test_what_is_not_staged_is_staged_by_the_next_call(tmp_path, writer, training, call):
    manager = manager_of(tmp_path, async_save=writer, slice_bytes=SLICE)
    expected, own_step = training.values(), training.optimizer.step
    first = training.save(manager, 1)
    calls = {
        "save": lambda: training.save(manager, 2),
        "blocking save": lambda: training.save(manager, 2, blocking=True),
        "wait": manager.wait,
        "restore": lambda: manager.restore(1, model=training.model, optimizer=training.optimizer),
        "close": manager.close,
    }
    calls[call]()
    assert first.is_staged
    manager.close()
    assert training.optimizer.step == own_step
    assert fc.list_checkpoints(tmp_path)[0].complete
    assert Training.restored(tmp_path) == expected


@pytest.mark.parametrize("seen", ["optimizer.step()", "wait()"])
def test_a_change_before_the_step_is_an_error_once_and_nothing_is_saved(tmp_path, writer, training, seen):
    manager = manager_of(tmp_path, async_save=writer, slice_bytes=SLICE)
    training.save(manager, 1)
    with paddle.no_grad():
        training.model.weight.add_(paddle.ones([64, 64]))
    changed = training.values()
    with pytest.raises(fc.ValidationError, match="changed while the save was staged in slices") as caught:
        training.step() if seen == "optimizer.step()" else manager.wait()
    assert ("an earlier save failed" in str(caught.value)) == (seen == "wait()")
    assert training.values() == changed  # nor was there a step
    training.save(manager, 2)
    manager.close()
    assert manager_of(tmp_path).all_steps() == [2]
    assert not directory_of(tmp_path, 1).exists()
    assert Training.restored(tmp_path) == changed


def test_without_an_optimizer_all_is_copied_by_the_call(tmp_path, writer):
    manager = manager_of(tmp_path, async_save=writer, slice_bytes=SLICE)
    state = {"w": np.ones(4 * SLICE, dtype=np.uint8)}
    handle = manager.save(1, state=state, rng=False)
    assert not isinstance(handle, SlicedSave)
    state["w"][...] = 2
    manager.close()
    target = {"w": np.zeros(4 * SLICE, dtype=np.uint8)}
    manager_of(tmp_path).restore(state=target)
    assert (target["w"] == 1).all()


def test_the_memory_that_a_save_may_take_is_passed_on_to_those_in_the_background(tmp_path, writer, monkeypatch):
    seen, right = [], saves_module.save_from_file

    def spy(shards, path, comm, options, written):
        seen.append((options.staging_bytes, options.slice_bytes))
        return right(shards, path, comm, options, written)

    monkeypatch.setattr(saves_module, "save_from_file", spy)
    with manager_of(tmp_path, async_save=writer, staging_bytes=64 << 20) as manager:
        save(manager, 1)
        save(manager, 2, blocking=True)
    assert seen == [(64 << 20, None), (None, None)]


@pytest.mark.parametrize(
    "wrong", [{"slice_bytes": 8192}, {"staging_bytes": 64 << 20}, {"async_save": True, "slice_bytes": 16}]
)
def test_options_of_staging_are_checked_when_the_manager_is_made(tmp_path, wrong):
    with pytest.raises(fc.ValidationError, match="(slice|staging)_bytes=.* needs async_save"):
        manager_of(tmp_path, **wrong)
