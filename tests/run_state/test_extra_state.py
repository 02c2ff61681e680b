"""Extra state: schedulers, scalers, generators and positions through a checkpoint and back."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker
from paddle.optimizer import lr

import paddle_flexckpt as fc
from paddle_flexckpt.catalog.portable import decode, encode
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.run_state.schedules import restore_scheduler, scheduler_state

pytestmark = pytest.mark.compat

SCHEDULERS = {
    "Noam": lambda: lr.NoamDecay(d_model=8, warmup_steps=3),
    "Piecewise": lambda: lr.PiecewiseDecay([2, 6], [0.1, 0.05, 0.01]),
    "NaturalExp": lambda: lr.NaturalExpDecay(0.1, 0.3),
    "InverseTime": lambda: lr.InverseTimeDecay(0.1, 0.3),
    "Polynomial": lambda: lr.PolynomialDecay(0.1, 7, cycle=True),
    "Exponential": lambda: lr.ExponentialDecay(0.1, 0.9),
    "MultiStep": lambda: lr.MultiStepDecay(0.1, [2, 5, 7]),
    "Step": lambda: lr.StepDecay(0.1, 3),
    "Lambda": lambda: lr.LambdaDecay(0.1, lambda n: 0.9**n),
    "Multiplicative": lambda: lr.MultiplicativeDecay(0.1, lambda n: 0.95),
    "Cosine": lambda: lr.CosineAnnealingDecay(0.1, 5),
    "CosineRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.1, 2, 2),
    "OneCycle": lambda: lr.OneCycleLR(0.1, 20),
    "Cyclic": lambda: lr.CyclicLR(0.1, 0.5, 2, 3),
    "Linear": lambda: lr.LinearLR(0.1, 8),
    "Warmup": lambda: lr.LinearWarmup(0.1, 3, 0.0, 0.1),
    "Warmup(Cosine)": lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 5), 3, 0.0, 0.1),
    "Warmup(Warmup(Poly))": lambda: lr.LinearWarmup(
        lr.LinearWarmup(lr.PolynomialDecay(0.1, 7), 2, 0.05, 0.1), 3, 0.0, 0.1
    ),
}


# The same with other arguments, and the first that is told.
CHANGED = {
    "Noam": (lambda: lr.NoamDecay(d_model=16, warmup_steps=3), "d_model was 8, and is 16 here"),
    "Piecewise": (
        lambda: lr.PiecewiseDecay([3, 9], [0.1, 0.02, 0.01]),
        r"boundaries was \[2, 6\], and is \[3, 9\] here",
    ),
    "NaturalExp": (lambda: lr.NaturalExpDecay(0.1, 0.2), "gamma was 0.3, and is 0.2 here"),
    "InverseTime": (lambda: lr.InverseTimeDecay(0.2, 0.3), "base_lr was 0.1, and is 0.2 here"),
    "Polynomial": (lambda: lr.PolynomialDecay(0.1, 7, power=2.0, cycle=True), "power was 1.0, and is 2.0 here"),
    "Exponential": (lambda: lr.ExponentialDecay(0.1, 0.99), "gamma was 0.9, and is 0.99 here"),
    "MultiStep": (lambda: lr.MultiStepDecay(0.1, [4, 6]), r"milestones was \[2, 5, 7\], and is \[4, 6\] here"),
    "Step": (lambda: lr.StepDecay(0.1, 30), "step_size was 3, and is 30 here"),
    "Lambda": (lambda: lr.LambdaDecay(0.1, lambda n: 0.8**n), "lr_lambda gave a rate of 0.0"),
    "Multiplicative": (lambda: lr.MultiplicativeDecay(0.3, lambda n: 0.95), "base_lr was 0.1, and is 0.3 here"),
    "Cosine": (lambda: lr.CosineAnnealingDecay(0.1, 50), "T_max was 5, and is 50 here"),
    "CosineRestarts": (lambda: lr.CosineAnnealingWarmRestarts(0.1, 3, 2), "T_0 was 2, and is 3 here"),
    "OneCycle": (lambda: lr.OneCycleLR(0.1, 20, anneal_strategy="linear"), "anneal_func was '_cos_annealing'"),
    "Cyclic": (lambda: lr.CyclicLR(0.1, 0.5, 4, 3), "cycle_size was 5.0, and is 7.0 here"),
    "Linear": (lambda: lr.LinearLR(0.1, 16), "total_steps was 8, and is 16 here"),
    "Warmup": (lambda: lr.LinearWarmup(0.2, 3, 0.0, 0.1), "learning_rate was 0.1, and is 0.2 here"),
    "Warmup(Cosine)": (
        lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 9), 3, 0.0, 0.1),
        "in learning_rate, T_max was 5, and is 9 here",
    ),
    "Warmup(Warmup(Poly))": (
        lambda: lr.LinearWarmup(lr.LinearWarmup(lr.PolynomialDecay(0.1, 70), 2, 0.05, 0.1), 2, 0.0, 0.1),
        "warmup_steps was 3, and is 2 here; in learning_rate, in learning_rate, decay_steps was 7, and is 70 here",
    ),
}


@pytest.fixture(autouse=True)
def own_tracker():
    get_rng_state_tracker().reset()
    yield
    get_rng_state_tracker().reset()


def through_a_checkpoint(tmp_path, state):
    fc.save_state_dict({"weight": paddle.ones([2]), **state}, tmp_path)
    return load_extra_state(tmp_path)


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(tmp_path, name, steps):
    saved, fresh = SCHEDULERS[name](), SCHEDULERS[name]()
    for _ in range(steps):
        saved.step()
    state = through_a_checkpoint(tmp_path, collect_extra_state(saved, rng=False))
    report = restore_extra_state(state, fresh, rng=False)
    assert report.restored == ["lr_scheduler"]
    assert report.not_restored == {}
    for _ in range(8):
        assert fresh.get_lr() == saved.get_lr()
        assert fresh() == saved()
        saved.step()
        fresh.step()


def test_a_scheduler_that_looks_at_the_loss(tmp_path):
    saved, fresh = lr.ReduceOnPlateau(0.1, patience=1), lr.ReduceOnPlateau(0.1, patience=1)
    losses = [3.0, np.float32(2.0), np.asarray([2.5], "float32"), paddle.to_tensor([2.25])]
    for loss in losses[:2]:
        saved.step(loss)
    state = through_a_checkpoint(tmp_path, collect_extra_state(saved, rng=False))
    restore_extra_state(state, fresh, rng=False)
    for loss in losses:
        saved.step(loss)
        fresh.step(loss)
        assert fresh() == saved()
    assert fresh() < 0.1


class Wrapping(lr.LRScheduler):
    """A user's scheduler around another one: Paddle's state_dict() says nothing of what is inside."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(0.1)

    def get_lr(self):
        self.inner.step()
        return self.inner() / 2


def test_schedulers_inside_schedulers_of_any_kind(tmp_path):
    saved, fresh = Wrapping(SCHEDULERS["Step"]()), Wrapping(SCHEDULERS["Step"]())
    for _ in range(4):
        saved.step()
    state = through_a_checkpoint(tmp_path, collect_extra_state(saved, rng=False))
    restore_extra_state(state, fresh, rng=False)
    assert fresh.inner.last_epoch == saved.inner.last_epoch
    assert fresh() == saved()


class Counting(lr.LRScheduler):
    """A user's scheduler with an attribute of another name than its argument, and one that no state has."""

    def __init__(self, peak, hold=3):
        self._peak, self.hold, self.calls = peak, hold, 0
        super().__init__(peak)

    def get_lr(self):
        self.calls += 1
        return self.last_lr * 0.5 if self.calls > self.hold else self._peak


def check_goes_on(saved, fresh, new, told, caplog):
    """The schedule of a run with other arguments is at the saved step, as if all steps had been made with them."""
    state = collect_extra_state(saved, rng=False)
    with caplog.at_level("WARNING", "paddle_flexckpt"):
        report = restore_extra_state(state, fresh, rng=False)
    assert (report.restored, report.not_restored) == (["lr_scheduler"], {})
    assert re.search(told, caplog.messages[0])
    for _ in range(saved.last_epoch):
        new.step()
    assert f"The rate at step {saved.last_epoch} is {new():g}; it was {saved():g}" in caplog.messages[0]
    for _ in range(8):
        assert fresh() == new()
        fresh.step(), new.step()


@pytest.mark.parametrize("name", CHANGED)
def test_a_schedule_whose_arguments_have_changed_goes_on_with_the_new_ones(name, caplog):
    saved, (make, told) = SCHEDULERS[name](), CHANGED[name]
    for _ in range(5):
        saved.step()
    check_goes_on(saved, make(), make(), told, caplog)


def test_schedules_of_a_user_whose_arguments_have_changed(caplog):
    for before, after, told in (
        (lambda: Counting(0.1), lambda: Counting(0.4), "_peak was 0.1, and is 0.4 here"),
        (lambda: Counting(0.1), lambda: Counting(0.1, 6), "hold was 3, and is 6 here"),
        (lambda: Wrapping(lr.StepDecay(0.1, 3)), lambda: Wrapping(lr.StepDecay(0.1, 4)), "in inner, step_size was 3"),
    ):
        caplog.clear()
        saved = before()
        for _ in range(5):
            saved.step()
        check_goes_on(saved, after(), after(), told, caplog)


def test_a_scheduler_that_looks_at_the_loss_keeps_its_reductions_under_other_arguments(caplog):
    saved, fresh = lr.ReduceOnPlateau(0.1, patience=1), lr.ReduceOnPlateau(0.05, patience=4, factor=0.5)
    for loss in [3.0] * 4:
        saved.step(loss)
    restore_extra_state(collect_extra_state(saved, rng=False), fresh, rng=False)
    assert "factor was 0.1, and is 0.5 here" in caplog.messages[0]
    assert "patience was 1, and is 4 here; base_lr was 0.1, and is 0.05 here" in caplog.messages[0]
    assert (saved(), fresh()) == (0.1 * 0.1, 0.1 * 0.1 * 0.05 / 0.1)
    assert fresh.num_bad_epochs == saved.num_bad_epochs == 1
    before = fresh()
    for _ in range(4):
        fresh.step(3.0)
    assert fresh() == before * 0.5


def test_a_schedule_that_cannot_be_at_the_saved_step_is_refused_and_unchanged(caplog):
    saved = SCHEDULERS["OneCycle"]()
    for _ in range(15):
        saved.step()
    state, other = collect_extra_state(saved, rng=False), lr.OneCycleLR(0.1, 10)
    before = other.state_dict()
    told = restore_extra_state(state, other, rng=False).not_restored["lr_scheduler"]
    why = "cannot be stepped to the saved step: ValueError.*number of total steps is 10"
    assert re.search(f"total_steps was 20, and is .* {why}", told)
    assert other.state_dict() == before


def test_a_schedule_goes_back_within_a_run_that_has_lowered_its_rate(caplog):
    schedule = lr.StepDecay(0.1, 4)
    for _ in range(10):
        schedule.step()
    state = collect_extra_state(schedule, rng=False)
    for _ in range(5):
        schedule.step()
    schedule.base_lr *= 0.5
    assert restore_extra_state(state, schedule, rng=False).restored == ["lr_scheduler"]
    assert "base_lr was 0.1, and is 0.05 here" in caplog.messages[0]
    assert schedule.last_epoch == 10
    schedule.step()
    assert schedule() == 0.05 * 0.1**2


class Best(lr.LRScheduler):
    """A user's scheduler with state that steps alone do not give."""

    def __init__(self, peak, best=9.0):
        self._best = best
        super().__init__(peak)

    def state_keys(self):
        super().state_keys()
        self.keys.append("_best")

    def get_lr(self):
        return self.base_lr / self._best


def test_state_of_a_user_s_scheduler_is_no_argument_and_is_kept(caplog):
    saved, same, other = Best(0.9), Best(0.9), Best(1.8)
    saved._best = 3.0
    saved.step()
    state = collect_extra_state(saved, rng=False)
    restore_extra_state(state, same, rng=False)
    assert (caplog.messages, same._best, same()) == ([], 3.0, saved())
    restore_extra_state(state, other, rng=False)
    assert "base_lr was 0.9, and is 1.8 here" in caplog.messages[0]
    other.step()
    assert (other._best, other()) == (3.0, 0.6)


def test_a_function_that_fails_at_the_saved_step_is_refused():
    saved, table = lr.LambdaDecay(0.1, lambda step: 1.0), [1.0] * 3
    for _ in range(5):
        saved.step()
    state = collect_extra_state(saved, rng=False)
    fresh = lr.LambdaDecay(0.1, lambda step: table[step])
    told = restore_extra_state(state, fresh, rng=False).not_restored["lr_scheduler"]
    assert "raises IndexError" in told


def test_an_argument_that_is_no_number_equals_itself(caplog):
    saved, fresh = Counting(0.1, float("nan")), Counting(0.1, float("nan"))
    restore_extra_state(collect_extra_state(saved, rng=False), fresh, rng=False)
    assert caplog.messages == []


def test_a_schedule_of_an_earlier_release_has_no_arguments_to_compare(caplog):
    saved, fresh = SCHEDULERS["Cosine"](), CHANGED["Cosine"][0]()
    saved.step()
    state = scheduler_state(saved)
    del state["arguments"]
    restore_scheduler(fresh, state)
    assert (fresh(), caplog.messages) == (saved(), [])


def test_another_scheduler_is_reported():
    state = collect_extra_state(SCHEDULERS["Warmup(Cosine)"](), rng=False)
    other = SCHEDULERS["Warmup(Warmup(Poly))"]()
    before = other.state_dict()
    report = restore_extra_state(state, other, rng=False)
    assert report.restored == []
    assert report.not_restored == {
        "lr_scheduler": "the checkpoint has a LinearWarmup(learning_rate=CosineAnnealingDecay), this run a "
        "LinearWarmup(learning_rate=LinearWarmup(learning_rate=PolynomialDecay))"
    }
    assert other.state_dict() == before


def scaler(scale=2.0, count=0):
    """Of itself a scaler is disabled on a CPU, and then it has no state."""
    made = paddle.amp.GradScaler(enable=False)
    made._enable = True
    made._init_loss_scaling, made._scale = scale, paddle.to_tensor([scale])
    made._incr_ratio, made._decr_ratio = scale, 1 / scale
    made._incr_every_n_steps, made._decr_every_n_nan_or_inf = count + 1, count + 2
    made._incr_count, made._decr_count = count, count
    made._use_dynamic_loss_scaling = True
    return made


def test_scaler(tmp_path):
    saved, fresh = scaler(1024.0, 3), scaler()
    state = through_a_checkpoint(tmp_path, collect_extra_state(scaler=saved, rng=False))
    assert restore_extra_state(state, scaler=fresh, rng=False).restored == ["scaler"]
    ours, theirs = fresh.state_dict(), saved.state_dict()
    assert ours["scale"].dtype == theirs["scale"].dtype
    assert ours == theirs


class Around:
    """Pass everything on to a scaler."""

    def __init__(self, inside) -> None:
        self.inside = inside

    def __getattr__(self, name):
        return getattr(self.inside, name)


def test_a_scaler_in_another_object():
    saved, fresh = scaler(1024.0, 3), scaler()
    state = collect_extra_state(scaler=Around(saved), rng=False)
    assert restore_extra_state(state, scaler=Around(fresh), rng=False).restored == ["scaler"]
    assert fresh.state_dict() == saved.state_dict()


def test_what_was_not_saved_or_not_passed_is_reported():
    on, off = scaler(), paddle.amp.GradScaler(enable=False)
    scheduler = SCHEDULERS["Step"]()
    for state, arguments, wanted in (
        (collect_extra_state(scheduler, on), {}, {"lr_scheduler": "none was passed", "scaler": "none was passed"}),
        (
            collect_extra_state(),
            {"lr_scheduler": scheduler, "scaler": on},
            {"lr_scheduler": "the checkpoint has none", "scaler": "the checkpoint has none"},
        ),
        (collect_extra_state(scaler=off), {"scaler": on}, {"scaler": "it was disabled"}),
        (collect_extra_state(scaler=on), {"scaler": off}, {"scaler": "it is disabled"}),
        (collect_extra_state(rng=False), {}, {"rng": "the checkpoint has none of this rank"}),
    ):
        report = restore_extra_state(state, **arguments)
        assert set(report.not_restored) == set(wanted)
        for name, text in wanted.items():
            assert text in report.not_restored[name]


def draw():
    """Something of every generator."""
    tracker = get_rng_state_tracker()
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    numbers += paddle.rand([3]).numpy().tolist() + paddle.nn.functional.dropout(paddle.ones([20])).numpy().tolist()
    for name in sorted(tracker.states_):
        with tracker.rng_state(name):
            numbers += paddle.rand([2]).numpy().tolist()
    return numbers


def test_generators(tmp_path):
    tracker = get_rng_state_tracker()
    tracker.add("global_seed", 11)
    tracker.add("local_seed", 12)
    draw()
    state = collect_extra_state()
    wanted = draw()
    assert draw() != wanted
    state = through_a_checkpoint(tmp_path, state)
    random.seed(0)
    np.random.seed(0)
    paddle.seed(0)
    report = restore_extra_state(state)
    assert report.not_restored == {}
    assert report.restored == [
        "rng.python",
        "rng.numpy",
        "rng.paddle.cpu",
        "rng.tracker.global_seed",
        "rng.tracker.local_seed",
    ]
    assert draw() == wanted
    # Asking for the state draws nothing.
    restore_extra_state(state)
    collect_extra_state()
    assert draw() == wanted
    # And not restoring it changes nothing.
    following = collect_extra_state()
    restore_extra_state(state, rng=False)
    assert collect_extra_state()["extra_state.rng.rank0"].numpy().tobytes() == (
        following["extra_state.rng.rank0"].numpy().tobytes()
    )


def test_tracker_states_that_only_one_side_has_are_reported():
    get_rng_state_tracker().add("saved", 21)
    state = collect_extra_state()
    get_rng_state_tracker().reset()
    get_rng_state_tracker().add("here", 22)
    report = restore_extra_state(state)
    assert "rng.python" in report.restored
    assert sorted(report.not_restored) == ["rng.tracker.here", "rng.tracker.saved"]


class Loader:
    def state_dict(self):
        return {"epoch": 2, "order": np.arange(5), "seen": (1, 2)}


def test_positions_step_and_the_rest(tmp_path):
    more = {
        "best": float("-inf"),
        "history": [1, 2.5, None, True, "text"],
        "by_number": {1: "a", (2, 3): b"\x00\xff"},
        "average": paddle.arange(6).reshape([2, 3]).astype("bfloat16"),
        "nested": {"$": [paddle.ones([1])]},
    }
    state = through_a_checkpoint(tmp_path, collect_extra_state(step=7, dataloader=Loader(), **more))
    report = restore_extra_state(state)
    assert report.step == 7
    assert report.dataloader["seen"] == (1, 2)
    assert report.dataloader["order"].tolist() == list(range(5))
    assert report.dataloaders == {0: report.dataloader}
    assert {name: report.more[name] for name in ("best", "history", "by_number")} == {
        name: more[name] for name in ("best", "history", "by_number")
    }
    assert str(report.more["average"].dtype) == "paddle.bfloat16"
    assert (report.more["average"] == more["average"]).all()
    assert report.more["nested"]["$"][0].item() == 1
    assert "dataloader" in report.restored


def test_everything_is_a_tensor_with_a_name_and_text_is_json():
    state = collect_extra_state(step=7, dataloader=[3], average=paddle.ones([2]))
    assert sorted(state) == [
        "extra_state.common",
        "extra_state.common.more.average",
        "extra_state.dataloader.rank0",
        "extra_state.rng.rank0",
    ]
    assert json.loads(state["extra_state.common"].numpy().tobytes())["step"] == 7
    assert json.loads(state["extra_state.dataloader.rank0"].numpy().tobytes()) == [3]
    assert all(str(tensor.place) == "Place(cpu)" for tensor in state.values())


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        {1, 2},
        np.asarray([object()]),
        np.ma.masked_array([1, 2], [0, 1]),
        np.datetime64("2020-01-01"),
        {"a": [{"b": object()}]},
    ],
)
def test_what_is_not_portable_is_refused(value):
    with pytest.raises(fc.ValidationError, match=r"extra_state\.common\.more\.mine.*cannot be part of.*Remedy"):
        collect_extra_state(mine=value)


def test_two_tensors_of_one_name_are_refused():
    tensor = paddle.ones([1])
    with pytest.raises(fc.ValidationError, match=r"two tensors .* 'extra_state.common.more.a.b'"):
        collect_extra_state(a={"b": tensor}, **{"a.b": tensor})


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64", ">i4"])
def test_arrays_and_scalars(dtype):
    for value in (np.arange(6).astype(dtype).reshape(2, 3), np.zeros((0, 2), dtype), np.asarray(1, dtype)):
        back = decode(encode(value, "x"), "x")
        assert back.dtype == value.dtype.newbyteorder("<") or back.dtype == value.dtype
        assert back.shape == value.shape
        assert (back == value).all()
    scalar = np.ones(1, dtype)[0]
    assert type(decode(encode(scalar, "x"), "x")) is type(scalar)
    assert decode(encode(float("nan"), "x"), "x") != 0


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1",
        '{"$": "os.system"}',
        '{"$": "array"}',
        '{"$": "array", "dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="}',
        '{"$": "tensor", "name": "y"}',
        '{"$": "float", "value": "x"}',
        "[" * 100_000,
    ],
)
def test_damaged_text(text):
    with pytest.raises(fc.CorruptCheckpointError, match="x is damaged"):
        decode(text.encode(), "x")


def test_no_extra_state(tmp_path):
    fc.save_state_dict({"weight": paddle.ones([2])}, tmp_path)
    with pytest.raises(fc.ValidationError, match=r"cannot load extra state.*id 0 has no extra state. Remedy"):
        load_extra_state(tmp_path)
    with pytest.raises(fc.ValidationError, match=r"there is no 'extra_state.common'.*Remedy"):
        restore_extra_state({})
    with pytest.raises(fc.ValidationError, match="does not exist"):
        load_extra_state(tmp_path / "nowhere")


def test_ids(tmp_path):
    for step in (3, 4):
        fc.save_state_dict(collect_extra_state(step=step), tmp_path)
    assert restore_extra_state(load_extra_state(tmp_path)).step == 4
    assert restore_extra_state(load_extra_state(tmp_path, unique_id=0)).step == 3


def test_a_newer_version_is_refused():
    state = collect_extra_state(rng=False)
    text = state["extra_state.common"].numpy().tobytes().replace(b'"version": 1', b'"version": 2')
    state["extra_state.common"] = paddle.to_tensor(np.frombuffer(text, "uint8").copy())
    with pytest.raises(fc.ValidationError, match="extra state of version 2.*Remedy"):
        restore_extra_state(state)


def test_extra_state_is_neither_unexpected_nor_a_weight(tmp_path):
    model = {"w": paddle.ones([2])}
    fc.save_state_dict({**model, **collect_extra_state(step=7)}, tmp_path)
    report = fc.load_state_dict({"w": paddle.zeros([2])}, tmp_path, strict=True)
    assert report.unexpected == []
    assert list(fc.load_merged_state_dict(tmp_path)) == ["w"]
    assert restore_extra_state(load_extra_state(tmp_path)).step == 7


def test_reading_it_is_no_load_that_the_log_tells_of(tmp_path, caplog):
    fc.save_state_dict({"weight": paddle.ones([2]), **collect_extra_state(step=3)}, tmp_path)
    with caplog.at_level("DEBUG", "paddle_flexckpt"):
        load_extra_state(tmp_path)
    levels = {record.levelname for record in caplog.records if "loaded" in record.getMessage()}
    assert levels == {"DEBUG"}
