"""Remedies where the checkpoint has another optimizer's states than those that are wanted, or none of any."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from tests.remedies.following import advised, provoked

ADAMW, SGD = paddle.optimizer.AdamW, paddle.optimizer.SGD


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


def states(run) -> dict:
    named = run["optimizer"].sharded_state_dict(run["model"].sharded_state_dict())
    return {key: each.local_tensor.numpy().tolist() for key, each in named.items() if not key.endswith(".w_0")}


def stepped(run):
    run["model"](paddle.ones([1, 2])).sum().backward()
    run["optimizer"].step()
    run["optimizer"].clear_grad()
    return run


@pytest.mark.parametrize("wanted", ["Momentum", "NAdam", "RAdam", "Adamax", "Adadelta"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "RAdam", "Adamax", "Momentum", "SGD"])
def test_the_states_of_another_optimizer(tmp_path, kind, wanted):
    """One remedy, to the letter: the weights and the rate come, and the new optimizer's states are its own."""
    if kind == wanted:
        return
    saved, run, fresh = (job(getattr(paddle.optimizer, name)) for name in (kind, wanted, wanted))
    stepped(saved)["optimizer"].set_lr(0.001)
    fc.save(tmp_path, **saved)
    with provoked("transfer/other_states.py", "give optimizer_states='ignore', and the optimizer as now") as caught:
        fc.load(tmp_path, **run)
    advised("transfer/other_states.py", "an optimizer that has not stepped begins with fresh states", str(caught.value))
    (problem,) = caught.value.lines
    assert ("another optimizer" if kind != "SGD" else "has no optimizer states") in problem
    assert "fill=" not in problem
    fc.load(tmp_path, **run, optimizer_states="ignore")
    assert values(run) == values(saved)
    assert run["optimizer"].get_lr() == 0.001
    assert states(run) == states(fresh)


def test_states_of_another_optimizer_by_statements_are_not_taken_for_frozen_parameters(tmp_path):
    saved, run = stepped(job(ADAMW)), job(paddle.optimizer.NAdam)
    fc.save(tmp_path, **saved)
    keys = [key for key in states(run) if "moment1" not in key and "moment2" not in key]
    with pytest.raises(fc.ValidationError, match="no rank asks for 8 optimizer states") as caught:
        fc.load(tmp_path, **run, aoa_config=[f'_ -> "{key}", fill=1' for key in keys])
    assert "frozen" not in str(caught.value) and "install()" not in str(caught.value)
    assert "an optimizer of another kind, which has no such states" in str(caught.value)


def test_an_optimizer_without_states(tmp_path):
    saved, run = job(ADAMW), job(SGD)
    fc.save(tmp_path, **saved)
    with provoked("manager/restore_targets.py", "give optimizer_states='ignore' to load all else") as caught:
        fc.load(tmp_path, **run)
    assert "this optimizer (SGD) has no states" in str(caught.value) and "install()" not in str(caught.value)
    fc.load(tmp_path, **run, optimizer_states="ignore")
    assert values(run) == values(saved)


def test_weights_alone(tmp_path):
    saved, run, fresh = job(ADAMW), job(ADAMW), job(ADAMW)
    fc.save_state_dict(saved["model"].state_dict(), tmp_path)
    with provoked("transfer/other_states.py", "give optimizer_states='ignore', and the optimizer as now") as caught:
        fc.load(tmp_path, **run, schedule="ignore")
    (problem,) = caught.value.lines
    assert "no optimizer states" in problem and "16 states" in problem
    fc.load(tmp_path, **run, schedule="ignore", optimizer_states="ignore")
    assert values(run) == values(saved)
    assert states(run) == states(fresh)


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


def test_a_schedule_that_was_left_out_is_named(tmp_path, caplog):
    rate = paddle.optimizer.lr.StepDecay(0.1, 5)
    saved, other = job(lambda _, parameters: ADAMW(rate, parameters=parameters)), paddle.optimizer.lr.StepDecay(0.1, 5)
    rate.step(7)
    fc.save(tmp_path, **saved)
    fc.load(tmp_path, model=job(ADAMW)["model"], rng=False, optimizer_states="ignore")
    advised("run_state/extra_state.py", "to restore it too", caplog.text)
    assert "lr_scheduler: none was passed. Remedy (FC904): give lr_scheduler= to restore" in caplog.text
    report = fc.load(tmp_path, model=job(ADAMW)["model"], rng=False, optimizer_states="ignore", lr_scheduler=other)
    assert other() == rate() != 0.1 and report.extra.not_restored == {}
