"""Keys that begin with a prefix on one side alone: the error's statements, taken from its text as they are."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from tests.remedies.following import provoked

NAMES = ("a.w", "l.0.w", "l.0.w.moment1_0", "odd name", "a.b")


def numbers(prefix: str, start: int = 1) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": np.full(2, start + i, np.float32) for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("prefix", ["student.", "a.model.", "0."])
def test_a_prefix_of_the_source_is_taken_off(tmp_path, prefix):
    fc.save_state_dict(numbers(prefix), tmp_path)
    state_dict = {name: np.zeros(2, np.float32) for name in NAMES}
    with provoked("transfer/problems.py", " keys begin with ") as error:
        fc.load_state_dict(state_dict, tmp_path)
    follow(str(error.value), state_dict, tmp_path)
    assert all((state_dict[name] == number).all() for name, number in numbers("").items())


@pytest.mark.parametrize("prefix", ["student.", "a.model.", "0."])
def test_a_prefix_of_the_targets_is_left_out(tmp_path, prefix):
    fc.save_state_dict(numbers(""), tmp_path)
    state_dict = {f"{prefix}{name}": np.zeros(2, np.float32) for name in NAMES}
    with provoked("transfer/problems.py", " keys begin with ") as error:
        fc.load_state_dict(state_dict, tmp_path)
    follow(str(error.value), state_dict, tmp_path)
    assert all((state_dict[name] == number).all() for name, number in numbers(prefix).items())


@pytest.mark.parametrize(("saved", "wanted"), [
    (["xa.w"], ["a.w"]), (["a.w"], ["xa.w"]), (["x.a.w", "x.b.v"], ["a.w", "b.w"]), (["x.a.w", "b.w"], ["a.w", "b.w"]),
    (["a.w", "b.w"], ["x.a.w", "b.w"]), (["a.w", "b.w"], ["x.a.w", "y.b.w"]),
    (["x.a.w", "y.a.w"], ["a.w"]), (["b.w", "w"], ["a.b.w"]), (["x.a.w", "w"], ["a.w"]),
])  # fmt: skip
def test_a_prefix_of_some_keys_is_none_of_all(tmp_path, saved, wanted):
    fc.save_state_dict({name: np.ones(2, np.float32) for name in saved}, tmp_path)
    with pytest.raises(fc.ValidationError, match="no such key") as error:
        fc.load_state_dict({name: np.zeros(2, np.float32) for name in wanted}, tmp_path)
    assert "keys begin with" not in str(error.value)


def test_the_statements_of_a_model_are_made_of_its_state_dict(tmp_path):
    model = paddle.nn.Linear(2, 2)
    fc.save_state_dict({f"net.{key}": value for key, value in model.state_dict().items()}, tmp_path)
    expected = model.weight.numpy().tolist()
    model.weight.set_value(model.weight * 0)
    with provoked("transfer/problems.py", "state_dict stands for model.state_dict(), or for that of the call") as error:
        fc.load(tmp_path, model=model)
    (text,) = set(re.findall(r"(\[[^]]* for key in )state_dict\]", str(error.value)))
    fc.load(tmp_path, model=model, aoa_config=eval(f"{text}model.state_dict()]", {"model": model}))
    assert model.weight.numpy().tolist() == expected


def follow(text: str, state_dict: dict[str, np.ndarray], path) -> None:
    """Load with the statements of an error's text; all of its texts give the same."""
    lists = {found for found in re.findall(r"give the AOA statements (\[.*? for key in state_dict\])", text)}
    assert len(lists) == 1
    statements = eval(lists.pop(), {"state_dict": state_dict})
    fc.load_state_dict(state_dict, path, aoa_config=statements)
