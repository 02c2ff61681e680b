"""CheckpointManager in one process: what is saved, when, and what comes back."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.manager import KeepBest, KeepLatest, KeepPolicy, SaveEvery, SaveInterval, SavePolicy, policies
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from tests.manager.samples import (
    DAMAGES,
    directory_of,
    empty,
    files_of,
    manager_of,
    restore,
    save,
    tree,
    values,
)
from tests.remedies.following import advised, provoked
from tests.run_state.test_extra_state import scaler

SIGNAL = signal.SIGUSR2


@pytest.fixture
def installed():
    fc.install()
    yield
    fc.uninstall()


# -- what is saved -----------------------------------------------------------------------------------------------------


class Run:
    """A model in training."""

    def __init__(self, seed: int) -> None:
        paddle.seed(seed)
        with paddle.utils.unique_name.guard():
            self.model = paddle.nn.Linear(3, 2)
            self.scheduler = paddle.optimizer.lr.StepDecay(0.1, 2)
            self.optimizer = paddle.optimizer.AdamW(self.scheduler, parameters=self.model.parameters())
            self.scaler = scaler(float(seed))

    def step(self) -> float:
        loss = (self.model(paddle.rand([4, 3])) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.scheduler.step()
        return float(loss)

    @property
    def parts(self):
        return {
            "model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler, "scaler": self.scaler,
        }  # fmt: skip


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path, installed):
    run = Run(1024)
    with manager_of(tmp_path) as manager:
        for _ in range(3):
            run.step()
        manager.save(3, **run.parts, extra={"name": "x", "seen": (1, 2)}, dataloader={"at": 7}, metrics={"loss": 1.5})
        expected = [run.step() for _ in range(3)]
    other = Run(7)
    other.step()
    with manager_of(tmp_path) as manager:
        report = manager.restore(**other.parts)
    assert [other.step() for _ in range(3)] == expected
    assert other.scaler.state_dict()["scale"] == 1024
    assert (report.step, report.path, report.skipped) == (3, str(directory_of(tmp_path, 3)), {})
    assert report.extra.more == {"name": "x", "seen": (1, 2)}
    assert report.extra.dataloader == {"at": 7}
    assert {"lr_scheduler", "scaler", "rng.paddle.cpu", "dataloader"} <= set(report.extra.restored)
    assert report.extra.not_restored == {}
    assert report.load.keys == len(other.model.sharded_state_dict()) + 8
    assert json.loads(json.dumps(report.as_dict()))["load"]["keys"] == report.load.keys
    assert report.summary().startswith("restored step 3: loaded 10 tensors on this rank from ")


def test_what_is_not_restored_is_said(tmp_path, installed):
    run = Run(8)
    manager = manager_of(tmp_path)
    manager.save(1, **run.parts, rng=False)
    with pytest.raises(fc.ValidationError, match=r"no optimizer was given.*give optimizer="):
        manager.restore(model=run.model)
    with pytest.raises(fc.ValidationError, match=r"8 optimizer states.*optimizer_states='ignore'"):
        manager.restore(model=run.model, schedule="ignore")
    report = manager.restore(model=run.model, optimizer_states="ignore")
    assert set(report.extra.not_restored) == {"lr_scheduler", "scaler", "rng"}
    assert "not restored: lr_scheduler, rng, scaler" in report.summary()
    # rng=False: nobody asked.
    assert "rng" not in manager.restore(model=run.model, rng=False, optimizer_states="ignore").extra.not_restored


def test_layout(tmp_path):
    manager = manager_of(tmp_path / "run")
    assert tree(tmp_path) == []
    report = save(manager, 100)
    save(manager, 123456789)
    assert tree(tmp_path / "run") == sorted(files_of(100) + files_of(123456789))
    assert report.path == str(tmp_path / "run" / "step_00000100")
    (info,) = fc.list_checkpoints(report.path)
    assert (info.step, info.unique_id) == (100, 0)
    assert fc.latest(tmp_path / "run").step == 123456789


def test_model_and_state_together(tmp_path, installed):
    model = paddle.nn.Linear(2, 2)
    manager = manager_of(tmp_path)
    manager.save(1, model=model, state={"ema": {"weight": model.weight * 2}})
    state = {"ema": {"weight": paddle.zeros([2, 2])}}
    manager.restore(state=state)
    assert state["ema"]["weight"].tolist() == (model.weight * 2).tolist()


def test_a_backend_as_root(tmp_path):
    manager = manager_of(open_storage(tmp_path, lock=False), keep=KeepLatest(1))
    save(manager, 1)
    save(manager, 2)
    assert tree(tmp_path) == files_of(2)
    assert restore(manager)[:2] == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "there is nothing to do: give model=, state=, or both"),
        ({"optimizer": object(), "state": {}}, "Remedy .FC101.: give model= as well"),
        ({"model": object()}, "model= has no sharded_state_dict.*got a object. Remedy .FC101.: give a paddle.nn.Layer"),
        ({"state": {"extra_state.x": np.zeros(1)}}, "state= has a name of .*key 'extra_state.x'"),
        ({"state": {"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}}, "same name"),
        ({"state": {}, "extra": {"step": 1}}, "extra: 'step' is not a free name"),
        ({"state": {}, "extra": {3: 1}}, "extra: 3 is not a free name"),
        ({"state": {}, "extra": [1]}, "extra has to be a dict"),
        ({"state": {}, "extra": {"f": print}}, "extra_state.common.more.f: a builtin_function_or_method cannot"),
        (
            {"state": {}, "metrics": {"loss": "1.0"}},
            "metrics: 'loss' has the value '1.0'.*Remedy .FC101.: give a number",
        ),
        ({"state": {}, "metrics": {"loss": None}}, "metrics: 'loss' has the value None"),
        ({"state": {}, "metrics": {"loss": np.zeros(2)}}, "metrics: 'loss' has the value"),
        ({"state": {}, "metrics": [1.0]}, "metrics has to be a dict"),
    ],
)
def test_what_cannot_be_saved(tmp_path, arguments, text):
    manager = manager_of(tmp_path)
    with pytest.raises(fc.ValidationError, match=f"cannot save a step in .*{text}"):
        manager.save(1, **arguments)
    assert tree(tmp_path) == []


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True])
def test_steps_are_numbers(tmp_path, step):
    manager = manager_of(tmp_path)
    for call in (lambda: save(manager, step, 1), lambda: manager.restore(step, state=empty())):
        text = f"step has to be an integer >= 0(, .latest. or .best.)?; got {step!r}"
        with pytest.raises(fc.ValidationError, match=text):
            call()
    with pytest.raises(fc.ValidationError, match="step has to be an integer"):
        manager.should_save(step)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": [3]}, "keep has to be a KeepPolicy or several; got 3"),
        ({"keep": SaveEvery(3)}, "keep has to be a KeepPolicy or several; got SaveEvery"),
        ({"save_when": [SaveEvery(1), KeepLatest(1)]}, "save_when has to be a SavePolicy or several; got KeepL"),
        ({"preemption_signals": [signal.SIGKILL]}, "cannot be handled"),
        (
            {"preemption_signals": signal.SIGTERM},
            "preemption_signals has to be signals in a tuple; got <Signals",
        ),
        ({"preemption_signals": None}, "preemption_signals has to be signals in a tuple; got None"),
        ({"preemption_signals": "SIGTERM"}, "preemption_signals has to be signals in a tuple; got 'SIGTERM'"),
        ({"preemption_signals": ["SIGTERM"]}, "preemption_signals has to be signals in a tuple; got .'SIGTERM'"),
        ({"async_save": "yes"}, "async_save has to be a bool or a BackgroundWriter; got 'yes'"),
    ],
)
def test_options_that_are_none(tmp_path, options, text):
    with pytest.raises(fc.ValidationError, match=f"cannot make a CheckpointManager: .*{text}"):
        manager_of(tmp_path, **options)


# -- when --------------------------------------------------------------------------------------------------------------


def test_should_save(tmp_path):
    manager = manager_of(tmp_path, save_when=[SaveEvery(4), SaveEvery(6)])
    assert [step for step in range(1, 14) if manager.should_save(step)] == [4, 6, 8, 12]
    assert manager_of(tmp_path).should_save(3)
    assert not manager_of(tmp_path, save_when=()).should_save(3)


def test_a_step_that_is_there_already_is_not_saved_again(tmp_path):
    manager = manager_of(tmp_path)
    assert manager.should_save(3)
    save(manager, 3)
    assert not manager.should_save(3)
    assert manager.should_save(4)
    again = manager_of(tmp_path)
    restore(again)
    assert not again.should_save(3)
    assert again.should_save(4)


def test_save_interval(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    manager = manager_of(tmp_path, save_when=SaveInterval(60))
    assert not manager.should_save(1)
    now[0] = 160.0
    assert manager.should_save(2)
    save(manager, 2)
    now[0] = 219.0
    assert not manager.should_save(3)
    now[0] = 220.0
    assert manager.should_save(4)
    restore(manager, 2)
    assert not manager.should_save(4)


def test_after_a_preemption_signal_the_loop_saves_once_and_stops(tmp_path):
    signal.signal(SIGNAL, signal.SIG_IGN)
    before = signal.getsignal(SIGNAL)
    done, saved = [], []
    with fc.CheckpointManager(tmp_path, save_when=SaveEvery(10), preemption_signals=[SIGNAL]) as manager:
        for step in range(1, 100):
            done.append(step)
            if step == 13:
                signal.raise_signal(SIGNAL)
                assert manager.preempted
                assert not manager.should_stop  # ranks have not agreed yet
            if manager.should_save(step):
                saved.append(step)
                save(manager, step)
            if manager.should_stop:
                break
        assert not manager.should_save(14)
        assert manager.should_save(20)
    assert (done[-1], saved) == (13, [10, 13])
    assert signal.getsignal(SIGNAL) == before
    signal.signal(SIGNAL, signal.SIG_DFL)
    assert restore(manager_of(tmp_path))[:2] == (13, 13)


def test_a_signal_in_a_step_that_has_just_been_saved(tmp_path):
    manager = fc.CheckpointManager(tmp_path, save_when=SaveEvery(10), preemption_signals=[SIGNAL])
    save(manager, 10)
    signal.raise_signal(SIGNAL)
    assert not manager.should_save(10)
    assert manager.should_stop
    manager.close()


def test_a_save_that_fails_after_the_signal_is_asked_for_again(tmp_path, monkeypatch):
    manager = fc.CheckpointManager(tmp_path, save_when=(), preemption_signals=[SIGNAL])
    signal.raise_signal(SIGNAL)
    assert manager.should_save(1)
    with pytest.raises(fc.ValidationError):
        manager.save(1, state={"w": 3})
    assert manager.should_save(1)
    save(manager, 2)
    assert not manager.should_save(3)
    manager.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preemption_signals": ()}, 0),
        ({"preemption_signals": (SIGNAL,)}, 1),
        ({"preemption_signals": (), "save_when": SaveInterval(5)}, 1),
        ({"preemption_signals": (SIGNAL,), "save_when": [SaveInterval(5), SaveEvery(3)]}, 1),
    ],
)
def test_should_save_needs_at_most_one_collective(tmp_path, options, expected):
    comm = SoloCommunicator()
    manager = fc.CheckpointManager(tmp_path, process_group=comm, **options)
    for step, looks in ((1, 1), (2, 0)):  # the first looks whether the root has steps of another run
        before = comm.collectives
        manager.should_save(step)
        assert comm.collectives - before == expected + looks
    before = comm.collectives
    assert (manager.preempted, manager.should_stop) == (False, False)
    manager.wait()
    manager.close()
    assert comm.collectives == before


# -- what is there already ---------------------------------------------------------------------------------------------


def test_a_step_is_not_saved_over_another_unless_asked(tmp_path):
    manager = manager_of(tmp_path)
    save(manager, 5, 1)
    with pytest.raises(
        fc.ValidationError, match="there is a checkpoint of step 5 in .*Remedy .FC405.: .*overwrite=True"
    ):
        save(manager, 5, 2)
    assert restore(manager, 5)[1] == 1
    save(manager, 5, 3, overwrite=True)
    assert restore(manager, 5)[1] == 3
    assert manager.all_steps() == [5]


def test_an_overwriting_save_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    save(manager, 5, 1)
    before = tree(tmp_path)
    with pytest.raises(fc.ValidationError):
        manager.save(5, state={**values(2), "bad": 3}, overwrite=True)
    assert tree(tmp_path) == before
    assert restore(manager, 5)[1] == 1


def test_without_a_checkpoint(tmp_path):
    manager = manager_of(tmp_path / "nothing", keep=KeepBest(1))
    assert manager.all_steps() == []
    assert manager.latest_step() is None
    assert manager.best_step() is None
    assert manager.checkpoints() == []
    for step in ("latest", "best", 3):
        with pytest.raises(fc.ValidationError, match="there is no complete checkpoint in .*ask latest_step"):
            manager.restore(step, state=empty())


def test_what_is_no_step_of_the_run_is_not_listed(tmp_path):
    manager = manager_of(tmp_path)
    save(manager, 7)
    for name in ("step_8", "step_000000009", "other", "step_00000010x"):
        fc.save_state_dict({"w": np.zeros(2)}, tmp_path / name, SoloCommunicator(), unique_id=0)
    fc.save_state_dict({"w": np.zeros(2)}, directory_of(tmp_path, 11), SoloCommunicator(), unique_id=1)
    (tmp_path / "step_00000012").write_bytes(b"a file")
    directory_of(tmp_path, 13).mkdir()
    assert manager.all_steps() == [7]
    assert [(info.step, info.complete) for info in manager.checkpoints()] == [(7, True)]


def test_no_metrics_are_a_warning_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(policies, "_WARNED", set())
    manager = manager_of(tmp_path, keep=[KeepLatest(9), KeepBest(1, "loss")])
    for step in range(3):
        save(manager, step)
    (warning,) = [record.getMessage() for record in caplog.records if "KeepBest" in record.getMessage()]
    assert warning.startswith("metrics= has no entry, and KeepBest chooses by loss: it does not keep this step. ")
    advised("manager/policies.py", "or save its metric from now on", warning)
    save(manager, 3, metrics={"loss": 1.0})
    assert manager.best_step() == 3


def test_metrics_without_the_one_that_decides_are_a_warning(tmp_path, caplog):
    manager = manager_of(tmp_path, keep=[KeepLatest(9), KeepBest(1, "loss"), KeepBest(1, "score")])
    for step, metrics in enumerate([{"loss": 3}, {"score": 1}, None]):
        save(manager, step, metrics=metrics)
    assert "KeepBest" not in caplog.text
    save(manager, 3, metrics={"los": 1})
    (warning,) = [record.getMessage() for record in caplog.records if "KeepBest" in record.getMessage()]
    assert warning.startswith("metrics= has los, and KeepBest chooses by loss and score: it does not keep this step. ")
    advised("manager/policies.py", "give KeepBest the name of a metric that is saved, or save its metric", warning)
    caplog.clear()
    save(manager, 4, metrics={"loss": 1})
    save(manager_of(tmp_path / "other", keep=[KeepLatest(9), KeepBest(1, "los")]), 5, metrics={"los": 1})
    assert "KeepBest" not in caplog.text
    assert manager.best_step() == 4


def test_best_step(tmp_path):
    manager = manager_of(tmp_path, keep=[KeepLatest(9), KeepBest(1, "loss"), KeepBest(1, "score", "max")])
    for step, metrics in enumerate([{"loss": 3}, {"loss": 1, "score": 2}, {"loss": 2}, {"score": 2}, None]):
        save(manager, step, metrics=metrics)
    assert manager.best_step() == 1
    assert manager.best_step("loss", "max") == 0
    assert manager.best_step("score", "max") == 3
    assert manager.best_step("accuracy") is None
    assert restore(manager, "best")[:2] == (1, 1)
    with pytest.raises(fc.ValidationError, match="mode has to be 'min' or 'max'"):
        manager.best_step("loss", "least")
    other = manager_of(tmp_path)
    assert other.best_step("loss") == 1
    for call in (other.best_step, lambda: other.restore("best", state=empty())):
        with pytest.raises(fc.ValidationError, match="Remedy .FC903.: restore the step that best_step"):
            call()
    none = manager_of(tmp_path, keep=KeepBest(1, "accuracy"))
    with pytest.raises(fc.ValidationError, match="no checkpoint in .* has what KeepBest.*there are the steps"):
        none.restore("best", state=empty())


def test_metrics_of_every_kind_of_number(tmp_path):
    manager = manager_of(tmp_path)
    kinds = [3, np.float32(2.5), np.int64(1), paddle.to_tensor(2.0), np.asarray([4.0]), float("inf"), float("nan")]
    for step, value in enumerate(kinds):
        save(manager, step, metrics={"loss": value})
    assert manager.best_step("loss") == 2
    assert manager.best_step("loss", "max") == 5


def test_metrics_of_a_step_that_was_saved_again_by_another_manager(tmp_path):
    manager, other = manager_of(tmp_path), manager_of(tmp_path)
    save(manager, 1, metrics={"loss": 1})
    save(manager, 2, metrics={"loss": 2})
    assert (manager.best_step("loss"), other.best_step("loss")) == (1, 1)
    restore(other)
    save(other, 1, metrics={"loss": 3}, overwrite=True)
    assert (manager.best_step("loss"), other.best_step("loss")) == (2, 2)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    """Steps 1 to 3, the best of which is 2."""
    manager = manager_of(tmp_path, keep=[KeepLatest(9), KeepBest(1)])
    for step, loss in ((1, 5.0), (2, 4.0), (3, 6.0)):
        save(manager, step, metrics={"loss": loss})
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_unless_a_fallback_is_asked_for(three, damage):
    DAMAGES[damage](three, 3)
    manager = manager_of(three)
    state = empty()
    with pytest.raises(fc.CorruptCheckpointError, match="step_00000003"):
        manager.restore(state=state)
    if damage != "flipped":
        assert all((array == -1).all() for array in state.values())
    step, version, report = restore(manager, fallback=True)
    assert (step, version) == (2, 2)
    assert set(report.skipped) == {3}
    assert "step_00000003" in report.skipped[3]
    assert "damaged or unreadable and skipped: step 3" in report.summary()
    assert report.as_dict()["skipped"] == {"3": report.skipped[3]}
    assert manager.all_steps() == [1, 2, 3]
    # The run goes on from 2, and comes to 3 again.
    save(manager, 3, 33)
    assert restore(manager)[:2] == (3, 33)
    with pytest.raises(fc.ValidationError, match="there is a checkpoint of step 3"):
        save(manager, 3, 34)


def test_a_fallback_goes_down_step_by_step_and_never_up(three):
    DAMAGES["flipped"](three, 2)
    manager = manager_of(three)
    assert restore(manager, 2, fallback=True)[:2] == (1, 1)
    assert restore(manager, 3, fallback=True)[:2] == (3, 3)
    DAMAGES["missing"](three, 3)
    step, version, report = restore(manager, fallback=True)
    assert (step, version, sorted(report.skipped)) == (1, 1, [2, 3])
    DAMAGES["manifest"](three, 1)
    said = "all that could be restored is damaged or cannot be read: step 3: .*; step 2: "
    with pytest.raises(fc.CorruptCheckpointError, match=said):
        restore(manager, fallback=True)


def test_the_best_falls_back_to_the_next_best(three):
    manager = manager_of(three, keep=KeepBest(1))
    DAMAGES["flipped"](three, 2)
    assert manager.best_step() == 2  # its metrics are whole
    with pytest.raises(fc.CorruptCheckpointError):
        restore(manager, "best")
    step, version, report = restore(manager, "best", fallback=True)
    assert (step, version, list(report.skipped)) == (1, 1, [2])


def test_the_best_cannot_be_told_where_metrics_cannot_be_read(three):
    manager = manager_of(three, keep=KeepBest(1))
    DAMAGES["manifest"](three, 3)
    for call in (manager.best_step, lambda: restore(manager, "best")):
        with pytest.raises(fc.CorruptCheckpointError, match="the best checkpoint cannot be told, .*step 3: .*Remedy"):
            call()
    step, _, report = restore(manager, "best", fallback=True)
    assert (step, list(report.skipped)) == (2, [3])
    DAMAGES["manifest"](three, 1)
    DAMAGES["manifest"](three, 2)
    said = "all that could be restored is damaged or cannot be read: step 1: .*; step 2: .*; step 3: "
    manager = manager_of(three, keep=KeepBest(1))
    with pytest.raises(fc.CorruptCheckpointError, match=said):
        restore(manager, "best", fallback=True)
    # The run has not gone back, and what is there may be all that is left of it.
    with pytest.raises(fc.ValidationError, match="there is a checkpoint of step 1"):
        save(manager, 1)


def test_what_is_no_damage_does_not_fall_back(three):
    manager = manager_of(three)
    for state, text in (
        ({"w": np.zeros((4, 4), "float32")}, "global shapes differ"),
        ({"other": np.zeros(2)}, "the source has no such key"),
        ({"w": np.zeros((4, 3), "float64")}, "dtypes differ"),
    ):
        with pytest.raises(fc.ValidationError, match=text):
            manager.restore(state=state, fallback=True)
    with pytest.raises(fc.ValidationError, match=r"no complete checkpoint of step 7 .*there are \[1, 2, 3\]"):
        manager.restore(7, state=empty(), fallback=True)


def test_a_fallback_leaves_no_target_as_the_damaged_one_left_it(tmp_path):
    manager = manager_of(tmp_path)
    save(manager, 1)
    manager.save(2, state={**values(2), "a": np.full(3, 2.0)}, rng=False)
    DAMAGES["flipped"](tmp_path, 2)
    state = {"a": np.zeros(3), **empty()}
    with pytest.raises(fc.ValidationError, match="the source has no such key.*'a'"):
        manager.restore(state=state, fallback=True, strict=False)
    assert state["a"].tolist() == [2.0] * 3  # so it is an error


def test_options_of_the_load_are_passed_on(three):
    manager = manager_of(three)
    state = {"W": np.zeros((4, 3), "float64"), "missing": np.ones(1)}
    report = manager.restore(
        state=state, aoa_config={"aoa_statements": ["w -> W"]}, dtype="cast", strict=False, verify="off"
    )
    assert (state["W"] == values(3)["w"]).all()
    assert report.load.missing == ["missing"]
    assert report.load.bytes_verified == 0
    with pytest.raises(fc.ValidationError, match="no rank asks for key 'b'"):
        manager.restore(state={"w": np.zeros((4, 3), "float32")}, strict=True)


def test_a_renamed_directory_is_not_taken_for_another_step(three):
    directory_of(three, 3).rename(directory_of(three, 4))
    manager = manager_of(three, keep=KeepBest(1))
    with pytest.raises(fc.ValidationError, match="is of step 3: the directory has been renamed or copied. Remedy"):
        restore(manager)
    assert restore(manager, fallback=True)[:2] == (2, 2)
    with pytest.raises(fc.CorruptCheckpointError, match="is the checkpoint of step 3"):
        manager.best_step()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_step_that_is_replaced_while_it_is_restored_is_restored_again(tmp_path, monkeypatch, times, place):
    """On a store nothing keeps the files that a reader needs, so that they are gone; else targets come from both."""
    from paddle_flexckpt.manager import restore as module

    root = tmp_path if place == "local" else f"memory://{tmp_path.name}"
    other = manager_of(root)
    for step in (1, 3):
        save(other, step)
    real, left = module.load_state_dict, [times]

    def replaced_before(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            save(other, 3, 33 + left[0], overwrite=True)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "load_state_dict", replaced_before)
    if times == 3:
        with provoked("manager/restore.py", "restore again") as caught:
            restore(manager_of(root), fallback=True)
        assert "another process has replaced the checkpoint meanwhile" in str(caught.value)
        assert restore(manager_of(root), fallback=True)[:2] == (3, 33)
    else:
        step, version, report = restore(manager_of(root), fallback=True)
        assert (step, version, report.skipped) == (3, 33, {})


def test_a_step_whose_files_go_while_it_is_restored_as_it_is_replaced_is_restored_again(tmp_path, monkeypatch):
    from paddle_flexckpt.manager import restore as module

    root = f"memory://{tmp_path.name}"
    other = manager_of(root)
    for step in (1, 3):
        save(other, step)
    real, begun = module.read_extra_state, []

    def replaced_after(directory, *args):
        if not begun:
            begun.append(True)
            save(other, 3, 33, overwrite=True)
            raise fc.UnreadableCheckpointError("a file of what has been replaced is not there")
        return real(directory, *args)

    monkeypatch.setattr(module, "read_extra_state", replaced_after)
    step, version, report = restore(manager_of(root), fallback=True)
    assert (step, version, report.skipped) == (3, 33, {})


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_closed_manager_does_nothing_more(tmp_path):
    manager = manager_of(tmp_path)
    save(manager, 1)
    manager.close()
    manager.close()
    for call in (
        lambda: save(manager, 2),
        lambda: restore(manager),
        lambda: manager.should_save(2),
        manager.wait,
        manager.all_steps,
        manager.latest_step,
        manager.checkpoints,
    ):
        with pytest.raises(fc.ValidationError, match="has been closed"):
            call()


def test_an_error_in_the_loop_closes_without_waiting_for_others(tmp_path):
    before = signal.getsignal(SIGNAL)
    comm = SoloCommunicator()
    with pytest.raises(ZeroDivisionError), fc.CheckpointManager(
        tmp_path, process_group=comm, preemption_signals=[SIGNAL]
    ) as manager:  # fmt: skip
        count = comm.collectives
        1 / 0  # noqa: B018
    assert comm.collectives == count
    assert signal.getsignal(SIGNAL) == before
    with pytest.raises(fc.ValidationError, match="has been closed"):
        manager.all_steps()


def test_policies_of_ones_own(tmp_path):
    class Odd(SavePolicy, KeepPolicy):
        def wants(self, step, seconds):
            return step % 2 == 1

        def kept(self, records):
            return [record.step for record in records if record.step % 2 == 1]

    manager = manager_of(tmp_path, save_when=Odd(), keep=Odd())
    assert [step for step in range(6) if manager.should_save(step)] == [1, 3, 5]
    for step in range(6):
        save(manager, step)
    assert manager.all_steps() == [1, 3, 5]
