"""Powers of beta that a source lacks: made of the steps that it counts, or asked for by the statement for them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.tensor_reader import TensorReader
from paddle_flexckpt.transfer.powers import Facts, Power
from tests.remedies.following import provoked

DEEPSPEED = Path(__file__).parents[1] / "foreign" / "data" / "deepspeed"
BETAS = 0.9, 0.999
POWERS = [f"beta{number}_pow_acc_0" for number in (1, 2)]
W = np.arange(6, dtype=np.float32).reshape(3, 2)


def after(steps: int, betas=BETAS) -> list[float]:
    """What Paddle's optimizer has after so many steps: it begins with beta itself."""
    return [np.float32(beta ** (steps + 1)).item() for beta in betas]


def target_of(path) -> dict[str, np.ndarray]:
    """Arrays for all of a checkpoint, and the powers of Paddle's optimizers."""
    with TensorReader(path) as reader:
        infos = {key: info for key, info in reader.infos.items() if info.dtype != "bfloat16"}
    parameters = [key[: -len(".moment1_0")] for key in infos if key.endswith(".moment1_0")]
    powers = {f"{name}.{power}": np.zeros(1, np.float32) for name in parameters for power in POWERS}
    return {key: np.zeros(info.shape, info.dtype) for key, info in infos.items()} | powers


def powers_in(target) -> set[tuple[str, float]]:
    return {(key.rpartition(".")[2], value.item()) for key, value in target.items() if "_pow_acc_0" in key}


def test_a_key_of_a_power():
    assert Power.of("a.w.beta2_pow_acc_0") == ("a.w", "beta2_pow_acc_0", 2)
    assert Power.of("a.w.beta3_pow_acc_0") is Power.of("beta1_pow_acc_0") is Power.of("a.moment1_0") is None
    facts = Facts()
    assert (facts.settings(), facts.progress("a.moment1_0")) == ({}, None)
    assert Power.of("w.beta1_pow_acc_0").progress(facts, ["w.moment1_0"]) == (None, None)


def test_steps_of_moments_that_contradict_each_other_are_not_believed():
    class Two(Facts):
        def progress(self, key):
            return {"a": (3.0, BETAS), "b": (4.0, BETAS), "c": (3.0, BETAS)}.get(key)

    power = Power.of("w.beta2_pow_acc_0")
    assert power.progress(Two(), ["a", "b"]) == (None, None)
    assert power.progress(Two(), ["a", "c", "d"]) == (3.0, 0.999)


@pytest.mark.parametrize("how", ["direct", "cooperative"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3"])
def test_powers_follow_from_the_steps_and_betas_of_deepspeed(name, size, how):
    path = DEEPSPEED / name
    targets = [target_of(path) for _ in range(size)]
    SimulatedWorld(size).run(lambda comm: fc.load_state_dict(targets[comm.rank], path, comm, comm_method=how))
    for target in targets:
        assert powers_in(target) == {*zip(POWERS, after(3))}


@pytest.mark.parametrize("name", ["universal1", "universal3"])
def test_where_betas_are_not_recorded_the_statement_that_gives_the_power_is_named(name):
    target = target_of(DEEPSPEED / name)
    for strict in ("missing", True):
        with provoked("transfer/powers.py", "give the number by the AOA statement") as caught:
            fc.load_state_dict(target, DEEPSPEED / name, strict=strict)
    text = str(caught.value)
    assert "strict=False" not in text
    assert "after 3 steps is beta1 ** 4:" in text
    statements = re.findall(r"'(_ -> [^']+)'", text)
    numbers = dict(zip(POWERS, after(3)))
    given = [each.replace("NUMBER", repr(numbers[each.split('states="')[1][: len(POWERS[0])]])) for each in statements]
    fc.load_state_dict(target, DEEPSPEED / name, aoa_config={"aoa_statements": given})
    assert powers_in(target) == {*numbers.items()}


def of_torch(steps: int) -> dict[str, np.ndarray]:
    step = np.full((), steps, np.float32)
    state = {"model.weight": W, "optim.state.weight.exp_avg": W / 2, "optim.state.weight.exp_avg_sq": W / 4}
    return state | {"optim.state.weight.step": step}


TORCH = [
    "model.weight -> weight",
    "optim.state.weight.exp_avg -> weight.moment1_0",
    "optim.state.weight.exp_avg_sq -> weight.moment2_0",
]


@pytest.mark.parametrize("again", ["native", "torch_dcp"])
def test_powers_follow_from_the_steps_of_torch_and_the_betas_of_the_live_optimizer(tmp_path, again):
    betas = 0.8, 0.95
    layer = paddle.nn.Linear(3, 2, bias_attr=False)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters(), beta1=betas[0], beta2=betas[1])
    # One that has stepped: its own powers say nothing of beta.
    layer(paddle.ones([1, 3])).sum().backward()
    optimizer.step()
    model = layer.sharded_state_dict()
    state = {**model, **fc.optimizer_sharded_state_dict(optimizer, model)}
    # The second one has the same structure: its steps are no part of a plan that is kept.
    for steps in (10_001, 7):
        fc.save_state_dict(of_torch(steps), tmp_path / f"first{steps}")
        path = tmp_path / f"again{steps}"
        convert_checkpoint(tmp_path / f"first{steps}", path, format=again)
        report = fc.load_state_dict(state, path, aoa_config={"aoa_statements": TORCH})
        assert sorted(report.computed) == [f"weight.{power}" for power in POWERS]
        found = [state[f"weight.{power}"].local_tensor.item() for power in POWERS]
        assert found == after(steps, betas)
        assert state["weight.moment1_0"].local_tensor.numpy().tolist() == (W / 2).tolist()


def test_where_steps_are_not_counted_the_remedy_says_how_to_count(tmp_path):
    fc.save_state_dict({"w": W, "w.moment1_0": W, "w.moment2_0": W}, tmp_path)
    target = {key: np.zeros((3, 2), np.float32) for key in ("w", "w.moment1_0", "w.moment2_0")}
    target["w.beta1_pow_acc_0"] = np.zeros(1, np.float32)
    with provoked("transfer/powers.py", "the moments that are there need their power") as caught:
        fc.load_state_dict(target, tmp_path)
    assert """after n steps is beta1 ** (n + 1): give the number by the AOA statement '_ -> w, states=""" in str(
        caught.value
    )
    statement = '_ -> w, states="beta1_pow_acc_0", fill=0.6561'
    fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": [statement]})
    assert target["w.beta1_pow_acc_0"].item() == np.float32(0.6561)
    # Without moments a power is a missing key as any other.
    with pytest.raises(fc.CheckpointError, match="the source has no such key"):
        fc.load_state_dict({"w": W.copy(), "v.beta1_pow_acc_0": np.zeros(1, np.float32)}, tmp_path)
