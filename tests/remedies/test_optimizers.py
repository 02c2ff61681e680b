"""Remedies where the checkpoint has another optimizer's states than those that are wanted, or none of any."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from tests.remedies.following import advised, provoked

ADAMW, MOMENTUM, SGD = paddle.optimizer.AdamW, paddle.optimizer.Momentum, paddle.optimizer.SGD


@pytest.fixture(autouse=True)
def installed():
    yield
    fc.uninstall()


def job(kind, hidden: int = 3):
    model = paddle.nn.Sequential(paddle.nn.Linear(2, hidden), paddle.nn.Linear(hidden, 2))
    optimizer = kind(0.1, parameters=model.parameters())
    return {"model": model, "optimizer": optimizer, "rng": False}


def values(run) -> dict:
    return {key: value.numpy().tolist() for key, value in run["model"].state_dict().items()}


def test_the_states_of_another_optimizer(tmp_path):
    saved, run = job(ADAMW), job(MOMENTUM)
    fc.save(tmp_path, **saved)
    with provoked("transfer/other_states.py", "leave the optimizer out, and give optimizer_states='ignore'") as caught:
        fc.load(tmp_path, **run)
    advised("transfer/other_states.py", "an optimizer that has not stepped begins with fresh states", str(caught.value))
    (problem,) = caught.value.lines
    assert "another optimizer" in problem and "moment1_0" in problem and "velocity_0" in problem
    assert "fill=" not in problem
    fc.load(tmp_path, model=run["model"], rng=False, optimizer_states="ignore")
    assert values(run) == values(saved)
    assert all(not value.numpy().any() for key, value in run["optimizer"].state_dict().items() if "velocity" in key)


def test_an_optimizer_without_states(tmp_path):
    saved, run = job(ADAMW), job(SGD)
    fc.save(tmp_path, **saved)
    with provoked("transfer/resolution.py", "or for an optimizer of another kind, which has no such states"):
        fc.load(tmp_path, **run)
    fc.load(tmp_path, **run, optimizer_states="ignore")
    assert values(run) == values(saved)


def test_weights_alone_need_no_optimizer(tmp_path):
    saved, run = job(ADAMW), job(ADAMW)
    fc.save_state_dict(saved["model"].state_dict(), tmp_path)
    with provoked("transfer/other_states.py", "load the model alone: leave the optimizer out; ") as caught:
        fc.load(tmp_path, **run, schedule="ignore")
    (problem,) = caught.value.lines
    assert "no optimizer states" in problem and "16 states" in problem
    fc.load(tmp_path, model=run["model"], rng=False)
    assert values(run) == values(saved)


def test_a_wrong_size_is_one_problem_for_all_parameters(tmp_path):
    fc.save(tmp_path, **job(ADAMW, 3))
    with pytest.raises(fc.ValidationError) as caught:
        fc.load(tmp_path, **job(ADAMW, 4))
    (line,) = caught.value.lines
    assert "global shapes differ, and those of its states moment1_0, moment2_0 (key '0.weight', rank 0" in line
    assert re.search(
        r"the like for 2 more keys: '0.bias' \(expected .*\), '1.weight' \(.*\)\. Remedy \(FC205\): ", line
    )


def test_the_powers_of_an_optimizer_are_given_as_numbers(tmp_path):
    """The optimizer is at hand, and knows its betas."""
    saved, run = job(ADAMW), job(ADAMW)
    for parameter in saved["model"][0].parameters():
        parameter.stop_gradient = True
    fc.save(tmp_path, **saved)
    with pytest.raises(fc.ValidationError) as caught:
        fc.load(tmp_path, **run)
    advised("transfer/problems.py", "give it the value that an optimizer begins with", str(caught.value))
    statements = re.findall(r"AOA statement '(_ -> .*?)'", str(caught.value))
    assert len(statements) == 8 and "BETA" not in str(caught.value)
    fc.load(tmp_path, **run, aoa_config=statements)
    powers = {value.numpy().item() for key, value in run["optimizer"].state_dict().items() if "beta" in key}
    assert powers == {np.float32(0.9).item(), np.float32(0.999).item()}
