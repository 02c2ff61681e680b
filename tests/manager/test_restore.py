"""Schedule, rate and scaler of a run are saved and restored, or an error; what else is left out is a warning."""

from __future__ import annotations

import logging
import re

import paddle
import pytest
from paddle.optimizer.lr import CosineAnnealingDecay as Cosine
from paddle.optimizer.lr import LinearWarmup

import paddle_flexckpt as fc
from tests.manager.samples import manager_of
from tests.remedies.following import provoked
from tests.run_state.test_extra_state import scaler as scaler_of

REMEDY = "with schedule='ignore' this run's stays as it is, and lr_scheduler alone starts over"


def warming(scheduler=None):
    return LinearWarmup(scheduler or Cosine(0.1, 100), 5, 0.0, 0.1)


class Run:
    """A network and its optimizer, whose rate a scheduler decides, or nobody does."""

    def __init__(self, rate) -> None:
        self.model = paddle.nn.Linear(2, 2)
        self.optimizer = paddle.optimizer.AdamW(rate, parameters=self.model.parameters())

    def parts(self, **more):
        return {"model": self.model, "optimizer": self.optimizer, "rng": False, **more}


@pytest.fixture(autouse=True)
def installed():
    fc.install()
    yield
    fc.uninstall()


def stepped(scheduler, steps: int = 90):
    for _ in range(steps):
        scheduler.step()
    return scheduler


SCHEDULES = {"cosine": lambda: Cosine(0.1, 100), "warming": warming, "constant": lambda: 0.1,
             "warming of warming": lambda: warming(warming())}  # fmt: skip


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    ("saved", "new"), [(a, b) for a in SCHEDULES for b in SCHEDULES if a != b and "cosine" in (a, b)]
)
def test_another_schedule_is_an_error_that_changes_nothing(tmp_path, saved, new, fallback):
    first = Run(SCHEDULES[saved]())
    manager = manager_of(tmp_path)
    manager.save(90, **first.parts())
    run = Run(SCHEDULES[new]())
    weight, rate = run.model.weight.numpy(), run.optimizer.get_lr()
    with pytest.raises(fc.ValidationError, match=r"lr_scheduler is saved and would not be restored: the.*" + REMEDY):
        manager.restore(**run.parts(), fallback=fallback)
    assert (run.model.weight.numpy() == weight).all()
    manager.restore(**run.parts(), schedule="ignore")
    assert run.optimizer.get_lr() == rate
    assert (run.model.weight.numpy() == first.model.weight.numpy()).all()


@pytest.mark.parametrize("gives", [(True, True), (True, False), (False, True), (False, False)])
def test_a_schedule_that_nobody_gives_is_the_optimizers_own(tmp_path, gives):
    first, run = Run(stepped(warming())), Run(warming())
    parts = [
        each.parts(**({"lr_scheduler": each.optimizer._learning_rate} if given else {}))
        for each, given in zip((first, run), gives)
    ]
    manager = manager_of(tmp_path)
    manager.save(90, **parts[0])
    report = manager.restore(**parts[1])
    assert run.optimizer.get_lr() == first.optimizer.get_lr() != 0.0
    assert (report.extra.restored, report.extra.not_restored) == (["lr_scheduler"], {})
    assert [stepped(each.optimizer._learning_rate, 3)() for each in (first, run)][0] == run.optimizer.get_lr()


class Wrapper:
    """An optimizer in another one, which passes on nothing but its description."""

    def __init__(self, optimizer) -> None:
        self._inner_opt = optimizer
        self.sharded_state_dict = optimizer.sharded_state_dict


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapper, paddle.incubate.LookAhead])
def test_a_rate_that_was_set_comes_back(tmp_path, wrap):
    first, run = Run(0.1), Run(0.1)
    first.optimizer.set_lr(0.001)
    manager = manager_of(tmp_path)
    manager.save(1, **first.parts(optimizer=wrap(first.optimizer)))
    report = manager.restore(**run.parts(optimizer=wrap(run.optimizer)))
    assert (run.optimizer.get_lr(), report.extra.not_restored) == (0.001, {})


def test_a_forgotten_scaler_is_an_error_and_so_is_one_that_is_disabled(tmp_path):
    run, off = Run(0.1), paddle.amp.GradScaler(enable=False)
    manager = manager_of(tmp_path)
    manager.save(1, **run.parts(scaler=scaler_of(1024.0)))
    with pytest.raises(fc.ValidationError, match=r"scaler is saved and would not be restored: none was passed"):
        manager.restore(**run.parts())
    with pytest.raises(fc.ValidationError, match="scaler is saved and would not be restored: it is disabled in this"):
        manager.restore(**run.parts(scaler=off))
    restored = scaler_of()
    manager.restore(**run.parts(scaler=restored))
    assert restored.state_dict()["scale"] == 1024
    manager.save(2, **run.parts(scaler=off))
    for scaler in (None, off):  # nothing was saved of it
        assert manager.restore(**run.parts(scaler=scaler)).extra.not_restored == {}


def test_the_model_alone_needs_no_schedule_and_what_is_left_out_is_one_warning(tmp_path, caplog):
    run = Run(warming())
    manager = manager_of(tmp_path)
    manager.save(1, **run.parts(scaler=scaler_of()))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="paddle_flexckpt"):
        manager.restore(model=run.model, optimizer_states="ignore")
    said = [record.getMessage() for record in caplog.records]
    expected = "not restored: lr_scheduler: none was passed; scaler: none was passed; rng: the checkpoint has none of"
    assert len(said) == 1 and said[0].startswith(expected)
    # An optimizer that is restored without some of its states still steps at some rate.
    with pytest.raises(fc.ValidationError, match="would not be restored"):
        manager.restore(**run.parts(), optimizer_states="ignore")


def test_a_checkpoint_without_a_schedule_is_no_error(tmp_path, caplog):
    """As those that were saved before rates were: nothing that was saved is lost."""
    manager = manager_of(tmp_path)
    manager.save(1, state={"w": paddle.ones([2])}, rng=False)
    with caplog.at_level(logging.WARNING, logger="paddle_flexckpt"):
        report = manager.restore(state={"w": paddle.zeros([2])}, lr_scheduler=Cosine(0.1, 10), rng=False)
    assert report.extra.not_restored == {"lr_scheduler": "the checkpoint has none"}
    assert re.findall("not restored: lr_scheduler: the checkpoint has none", caplog.text) != []


def test_a_forgotten_optimizer_is_named_and_not_a_schedule_that_the_run_never_had(tmp_path):
    for number, rate in enumerate((0.1, warming())):
        first, run = Run(rate), Run(0.1)
        fc.save(tmp_path / str(number), **first.parts())
        before = run.model.weight.numpy()
        with provoked("manager/restore_targets.py", "give optimizer=, as in the run that saved it") as caught:
            fc.load(tmp_path / str(number), model=run.model, rng=False)
        assert "no optimizer was given" in str(caught.value) and "scheduler" not in str(caught.value)
        assert (run.model.weight.numpy() == before).all()
        other = Run(0.1 if number == 0 else warming())
        assert fc.load(tmp_path / str(number), **other.parts()).extra.not_restored == {}
        fc.load(tmp_path / str(number), model=run.model, rng=False, optimizer_states="ignore")
        assert (run.model.weight.numpy() == first.model.weight.numpy()).all()


def test_states_that_are_given_as_such_are_no_forgotten_optimizer(tmp_path):
    first, run = Run(warming()), Run(warming())
    fc.save(tmp_path, **first.parts())
    states = fc.optimizer_sharded_state_dict(run.optimizer, run.model.sharded_state_dict())
    with pytest.raises(fc.ValidationError, match="lr_scheduler is saved and would not be restored"):
        fc.load(tmp_path, model=run.model, state=states, rng=False)


def test_a_scheduler_that_is_new_is_left_out(tmp_path):
    fc.save(tmp_path, **Run(0.1).parts())
    run, same = Run(warming()), Run(0.3)
    with provoked("manager/restore_targets.py", "make the optimizer with a constant rate, as in the run") as caught:
        fc.load(tmp_path, **run.parts())
    assert "the checkpoint has a constant rate, this run a LinearWarmup" in str(caught.value)
    fc.load(tmp_path, **same.parts())
    assert same.optimizer.get_lr() == 0.1
    with provoked("manager/restore_targets.py", "with schedule='ignore' this run's stays as it is"):
        fc.load(tmp_path, **run.parts())
    fc.load(tmp_path, **run.parts(), schedule="ignore")
    assert run.optimizer.get_lr() == 0.0
