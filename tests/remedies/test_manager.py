"""Remedies of the manager of a run's checkpoints, each provoked and followed."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.run_state import collect_extra_state
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.trainer import TrainerOptions
from paddle_flexckpt.trainer.restoring import restore_from
from tests.documents import code_block
from tests.remedies.following import provoked

A = np.arange(6, dtype=np.float32)


def restored(manager, **options) -> tuple[int, list]:
    target = np.zeros_like(A)
    report = manager.restore(state={"a": target}, **options)
    return report.step, target.tolist()


@pytest.fixture
def manager(tmp_path):
    with fc.CheckpointManager(tmp_path / "run") as manager:
        yield manager


def test_an_optimizer_comes_with_its_model(manager):
    model = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    with provoked("manager/step_contents.py", "give model= as well"):
        manager.save(1, optimizer=optimizer, state={"a": A})
    manager.save(1, model=model, optimizer=optimizer)
    before = model.weight.numpy().tolist()
    model.weight.set_value(model.weight * 0)
    manager.restore(model=model, optimizer=optimizer)
    assert model.weight.numpy().tolist() == before


def test_a_model_that_is_no_layer_is_described(manager):
    with provoked("manager/step_contents.py", "paddle.nn.Layer, or describe the shards yourself and give state="):
        manager.save(1, model={"a": A})
    manager.save(1, state={"a": A})
    assert restored(manager) == (1, A.tolist())


def test_a_name_that_the_manager_saves_itself(manager):
    model = paddle.nn.Linear(2, 2)
    with provoked("manager/step_contents.py", "rename it, or leave it out: the manager saves all of these itself"):
        manager.save(1, model=model, state={"weight": A})
    manager.save(1, model=model, state={"own_weight": A})
    manager.save(2, model=model)
    target = {"own_weight": np.zeros_like(A)}
    manager.restore(1, model=model, state=target)
    assert target["own_weight"].tolist() == A.tolist()
    assert manager.restore(2, model=model).step == 2


def test_metrics_are_those_of_all_ranks(tmp_path):
    def save(comm, loss):
        with fc.CheckpointManager(tmp_path, process_group=comm, preemption_signals=()) as manager:
            manager.save(1, state={"a": A}, metrics={"loss": loss})
            return manager.best_step("loss")

    with provoked("manager/step_contents.py", "make it one number first, with paddle.distributed.all_reduce"):
        SimulatedWorld(2).run(lambda comm: save(comm, float(comm.rank)))
    assert SimulatedWorld(2).run(lambda comm: save(comm, 0.5)) == [1, 1]


def test_a_step_that_is_there_is_replaced_if_asked(manager, tmp_path):
    manager.save(1, state={"a": A})
    with provoked(
        "manager/step_directories.py", "to lose that checkpoint, overwrite=True replaces it as soon as the new one is"
    ):
        manager.save(1, state={"a": A + 1})
    assert restored(manager) == (1, A.tolist())
    with fc.CheckpointManager(tmp_path / "other") as other:
        other.save(1, state={"a": A + 1})
        assert restored(other) == (1, (A + 1).tolist())
    manager.save(1, state={"a": A + 1}, overwrite=True)
    assert restored(manager) == (1, (A + 1).tolist())


def test_a_directory_of_a_step_that_was_renamed(manager, tmp_path):
    manager.save(1, state={"a": A})
    (tmp_path / "run" / "step_00000001").rename(tmp_path / "run" / "step_00000005")
    with provoked("manager/restore.py", "give it its own name back, or load it with load_state_dict"):
        restored(manager)
    target = {"a": np.zeros_like(A)}
    fc.load_state_dict(target, tmp_path / "run" / "step_00000005")
    assert target["a"].tolist() == A.tolist()
    (tmp_path / "run" / "step_00000005").rename(tmp_path / "run" / "step_00000001")
    assert restored(manager) == (1, A.tolist())


def test_the_best_needs_a_metric(manager):
    """A manager with a KeepBest would remove the others with its next save, so no remedy advises one."""
    for step, loss in ((1, 0.5), (2, 0.75)):
        manager.save(step, state={"a": A + step}, metrics={"loss": loss})
    for call in (manager.best_step, lambda: restored(manager, step="best")):
        with provoked("manager/step_directories.py", "restore the step that best_step(metric=...) returns"):
            call()
    assert restored(manager, step=manager.best_step(metric="loss")) == (1, (A + 1).tolist())
    manager.save(3, state={"a": A})
    assert manager.all_steps() == [1, 2, 3]


def test_the_best_cannot_be_told_beside_a_damaged_one(manager, tmp_path):
    for step, loss in ((1, 0.5), (2, 0.75)):
        manager.save(step, state={"a": A + step}, metrics={"loss": loss})
    damaged = tmp_path / "run" / "step_00000002"
    (manifest,) = damaged.glob("*.manifest")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-9])
    with provoked(
        "manager/step_directories.py", "name a step; or repair the damaged ones, or move them out of this directory"
    ):
        manager.best_step("loss")
    assert restored(manager, step=1) == (1, (A + 1).tolist())
    damaged.rename(tmp_path / "aside")
    assert manager.best_step("loss") == 1
    (tmp_path / "aside").rename(damaged)
    fc.repair_manifest(damaged, 0, overwrite=True)
    assert manager.best_step("loss") == 1
    assert restored(manager, step=2) == (2, (A + 2).tolist())


def test_a_schedule_that_is_saved_is_given_or_left_out_by_name(manager):
    model = paddle.nn.Linear(2, 2)

    def schedule():
        return paddle.optimizer.lr.StepDecay(0.1, 1)

    saved, other = schedule(), paddle.optimizer.lr.NoamDecay(64, 10)
    saved.step()
    manager.save(1, model=model, lr_scheduler=saved)
    with provoked("manager/restore_targets.py", "built as in the run that saved it"):
        manager.restore(model=model, lr_scheduler=other)
    restored = schedule()
    manager.restore(model=model, lr_scheduler=restored)
    assert restored() == saved() != schedule()()
    rate = other()
    report = manager.restore(model=model, lr_scheduler=other, schedule="ignore")
    assert (other(), list(report.extra.not_restored)) == (rate, ["lr_scheduler"])
    with provoked("manager/restore_targets.py", "for the model alone give optimizer_states='ignore'"):
        manager.restore(model=model)
    manager.restore(model=model, optimizer_states="ignore")


def test_a_trainer_with_another_schedule(tmp_path):
    model = paddle.nn.Linear(2, 2)

    def trainer(scheduler):
        return SimpleNamespace(model=model, model_wrapped=model, optimizer=None, lr_scheduler=scheduler,
                               args=SimpleNamespace(), scaler=None, do_grad_scaling=False)  # fmt: skip

    def schedule():
        return paddle.optimizer.lr.StepDecay(0.1, 1)

    saved, other = schedule(), paddle.optimizer.lr.NoamDecay(64, 10)
    saved.step()
    inside = tmp_path / "checkpoint-1" / "flex_checkpoint"
    state = {**model.sharded_state_dict(), **collect_extra_state(saved, step=1)}
    fc.save_state_dict(state, inside, process_group="self")
    resume = functools.partial(restore_from, path=str(inside.parent), everything=True, comm=communicator_for("self"))
    with provoked("trainer/restoring.py", "give the flags of the saved run; --flex_ignore_schedule 1"):
        resume(trainer(other), options=TrainerOptions())
    restored = schedule()
    resume(trainer(restored), options=TrainerOptions())
    assert restored() == saved() != schedule()()
    rate = other()
    assert "lr_scheduler" in resume(trainer(other), options=TrainerOptions(ignore_schedule=True)).not_restored
    assert other() == rate


def test_several_optimizers_are_given_as_states(manager):
    """As docs/manager.md shows it."""
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2))
    a, b = (paddle.optimizer.Momentum(0.1, parameters=each.parameters()) for each in model)
    model(paddle.ones([1, 2])).sum().backward()
    a.step(), b.step()
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 1)
    with provoked("manager/step_contents.py", "fc.optimizer_sharded_state_dict(b, shards)}, where shards is model"):
        manager.save(1, model=model, optimizer=[a, b])
    save, load = code_block("docs/manager.md", "optimizer_sharded_state_dict(a, shards)").split("manager.restore")
    names = {"fc": fc, "model": model, "a": a, "b": b, "scheduler": scheduler, "manager": manager, "step": 1}
    exec(save, names)
    live = {key: weight.local_tensor for key, weight in names["states"].items()}
    saved = {key: tensor.numpy() for key, tensor in live.items()}
    assert len(saved) == 4 and all(value.any() for value in saved.values())
    for tensor in live.values():
        tensor.set_value(tensor * 0)
    exec(f"manager.restore{load}", names)
    assert all((tensor.numpy() == saved[key]).all() for key, tensor in live.items())
