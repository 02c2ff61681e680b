"""Parameters that are frozen, or trained, since the save: no advice loses a state or leaves one stale."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.transfer.problems import first_value
from tests.remedies.following import advised, provoked


@pytest.fixture(autouse=True)
def installed():
    fc.install()
    yield
    fc.uninstall()


class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.body(x))


def job(frozen=False, steps=0):
    """A model whose body may be frozen, and its optimizer, after some steps."""
    model = Model()
    freeze(model, frozen)
    optimizer = paddle.optimizer.AdamW(0.1, beta1=0.75, parameters=model.parameters())
    for _ in range(steps):
        model(paddle.ones([1, 2])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    return model, optimizer


def freeze(model, frozen):
    for parameter in model.body.parameters():
        parameter.stop_gradient = frozen


def state(model, optimizer):
    shards = model.sharded_state_dict()
    return {**shards, **optimizer.sharded_state_dict(shards)}


def values(state):
    return {key: np.asarray(weight.local_tensor).copy() for key, weight in state.items()}


def equal(found, expected):
    assert found.keys() == expected.keys()
    assert [key for key in found if found[key].tobytes() != expected[key].tobytes()] == []


def test_a_parameter_that_is_frozen_since_keeps_its_states(tmp_path):
    saved = state(*job(steps=3))
    fc.save_state_dict(saved, tmp_path)
    model, optimizer = job(frozen=True)
    with provoked("transfer/resolution.py", "load before that (stop_gradient=False), and freeze them then") as caught:
        fc.load_state_dict(state(model, optimizer), tmp_path)
    assert "'body.bias.beta1_pow_acc_0'" in str(caught.value)
    freeze(model, False)
    fc.load_state_dict(state(model, optimizer), tmp_path)
    freeze(model, True)
    equal(values(state(model, optimizer)), values(saved))
    # It is saved as ever, and trained on when it is thawed.
    fc.save_state_dict(state(model, optimizer), tmp_path / "frozen")
    again = job()
    fc.load_state_dict(state(*again), tmp_path / "frozen")
    equal(values(state(*again)), values(saved))
    # Or without them: what is loaded is right, and what is not begins anew.
    model, optimizer = job(frozen=True)
    with provoked("transfer/resolution.py", "to go on without these states, give optimizer_states='ignore'"):
        fc.load_state_dict(state(model, optimizer), tmp_path)
    loaded = state(model, optimizer)
    fc.load_state_dict(loaded, tmp_path, optimizer_states="ignore")
    equal(values(loaded), {key: value for key, value in values(saved).items() if key in loaded})


@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_is_trained_since_begins_with_the_values_of_a_fresh_optimizer(tmp_path, steps):
    """Also in an optimizer that has stepped: what strict=False would leave there are states of other steps."""
    saved = state(*job(frozen=True, steps=3))
    fc.save_state_dict(saved, tmp_path)
    model, optimizer = job(steps=steps)
    target = state(model, optimizer)
    with provoked("transfer/problems.py", "correct the state's name") as caught:
        fc.load_state_dict(target, tmp_path)
    advised("transfer/problems.py", "give it the value that an optimizer begins with", str(caught.value))
    assert "load with strict=False" not in str(caught.value)
    statements = re.findall(r"AOA statement '(_ -> .*?)'", str(caught.value))
    assert len(statements) == 8
    betas = {"BETA1": "0.75", "BETA2": "0.999"}
    statements = [re.sub("BETA[12]", lambda found: betas[found[0]], each) for each in statements]
    fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": statements})
    fresh, found = values(state(*job())), values(target)
    equal(found, {**{key: fresh[key] for key in found}, **values(saved)})


def test_a_state_that_a_statement_removes_is_filled_likewise(tmp_path):
    fc.save_state_dict({"a": np.ones(2, np.float32), "a.moment1_0": np.ones(2, np.float32)}, tmp_path)
    target = {"a": np.zeros(2, np.float32), "a.moment1_0": np.full(2, 9, np.float32)}
    statements = ["a.moment1_0 -> _"]
    with provoked("transfer/problems.py", "add a statement that makes the state") as caught:
        fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": statements})
    statements += re.findall(r"AOA statement '(_ -> .*?)'", str(caught.value))
    fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": statements})
    assert (target["a"].tolist(), target["a.moment1_0"].tolist()) == ([1, 1], [0, 0])


def test_what_the_checkpoint_has_under_another_count_is_not_filled_with_zeros(tmp_path):
    fc.save_state_dict({"w": np.ones(2, np.float32), "linear_4.w_0_moment1_0": np.ones(2, np.float32)}, tmp_path)
    target = {"w": np.zeros(2, np.float32), "linear_0.w_0_moment1_0": np.full(2, 9, np.float32)}
    with provoked("transfer/problems.py", "give its name by an AOA statement") as caught:
        fc.load_state_dict(target, tmp_path)
    assert "fill=" not in str(caught.value) and "strict=False" not in str(caught.value)
    statements = ["linear_4.w_0_moment1_0 -> linear_0.w_0_moment1_0"]
    fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": statements})
    assert target["linear_0.w_0_moment1_0"].tolist() == [1, 1]


MASTERS = ["fc.weight.w_0", "master_weights.linear_0.w_0", "linear_0.w_0_fp32_master_0"]


@pytest.mark.parametrize("key", MASTERS)
def test_a_master_begins_with_its_parameter_and_never_with_zeros(tmp_path, key):
    saved = paddle.to_tensor([1.0, 2.0]).astype("bfloat16")
    fc.save_state_dict({"model.fc.weight": saved}, tmp_path)
    target = {"fc.weight": paddle.zeros([2], "bfloat16"), key: paddle.full([2], 9.0)}
    with provoked("transfer/problems.py", "correct the state's name") as caught:
        fc.load_state_dict(target, tmp_path)
    text = str(caught.value)
    advised("transfer/problems.py", "start it from its parameter, whose name in the source is to stand for", text)
    assert "fill=" not in text
    (statement,) = re.findall(r"AOA statement '(PARAMETER -> .*?)'", text)
    more = {"master_weights": "convert"} if "master_weights='convert'" in text else {}
    fc.load_state_dict(target, tmp_path, aoa_config=[statement.replace("PARAMETER", "model.fc.weight")], **more)
    assert target["fc.weight"].astype("float32").tolist() == target[key].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind, more", [
    ("NAdam", {}), ("RAdam", {}), ("Rprop", {"learning_rate_range": (1e-5, 1.0)}), ("Adamax", {}), ("Lamb", {}),
])  # fmt: skip
def test_the_value_that_each_optimizer_begins_with_is_named(kind, more):
    parameter = nn.Linear(2, 2, bias_attr=False).weight
    parameter.stop_gradient = False
    optimizer = getattr(paddle.optimizer, kind)(0.25, parameters=[parameter], **more)
    with paddle.no_grad():
        optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), [parameter])
    states = {key: value for key, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)}
    named = {"BETA1": 0.9, "BETA2": 0.999, "LEARNING_RATE": 0.25}
    for key, value in states.items():
        (fill,) = re.findall("fill=([A-Z_0-9]+)", first_value(key))
        assert (value.numpy() == np.float32(named.get(fill, fill))).all(), key
    assert len(states) >= 2
