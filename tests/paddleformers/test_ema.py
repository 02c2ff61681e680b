"""PaddleFormers' moving averages of the weights: part of the checkpoint, back where they were after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddleformers")

import paddle
from paddleformers.trainer import Trainer
from paddleformers.trainer.utils.zero_cost_checkpoint import EMABufferFcBased

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.trainer.contents import EMA_PREFIX, AverageState
from tests.paddleformers.test_trainer import Run, installed  # noqa: F401

EMA = {"zcc_save_ema_coef": 0.5}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """The averages are kept for GPUs alone: what they ask of one is what a CPU can answer."""
    monkeypatch.setenv("FLAGS_selected_gpus", "0")
    for name in ("cpu", "cuda", "pin_memory"):
        monkeypatch.setattr(paddle.Tensor, name, lambda tensor, *_: tensor.clone())
    monkeypatch.setattr(Trainer, "hcg", object(), raising=False)
    # The losses of the ranks are compared with a threshold together, and there is no group of one.
    monkeypatch.setattr(paddle.distributed, "all_reduce", lambda *_, **__: None)
    state_dict = paddle.optimizer.AdamW.state_dict
    monkeypatch.setattr(
        paddle.optimizer.AdamW, "state_dict", lambda optimizer: {"master_weights": {}, **state_dict(optimizer)}
    )


def averages(run: Run) -> dict[str, np.ndarray]:
    buffer: Any = next(each.buffer for each in run.trainer.callback_handler.callbacks if hasattr(each, "buffer"))
    return {key: value.numpy() for key, value in buffer.model_params.items()}


def keys_of(directory: Path) -> list[str]:
    return [
        key for key in SourceDirectory(directory / "flex_checkpoint").read_manifest().catalog.keys if EMA_PREFIX in key
    ]


def test_averages_go_on_where_they_were(tmp_path):
    run = Run(tmp_path, **EMA)
    assert not (tmp_path / "checkpoint-3/ema_state").exists()
    assert len(keys_of(tmp_path / "checkpoint-3")) == 21
    expected, weights = averages(run), run.weights()
    assert any(not np.array_equal(expected[key], weights[key]) for key in expected)
    resumed = Run(tmp_path / "resumed", resume=str(tmp_path / "checkpoint-3"), **EMA)
    found = averages(resumed)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert np.array_equal(value, expected[key]), key


def test_a_run_without_averages_does_not_see_them_and_one_with_them_begins_anew(tmp_path):
    run = Run(tmp_path, **EMA)
    without = Run(tmp_path / "without", resume=str(tmp_path / "checkpoint-3"), flex_strict="both")
    assert without.losses == {step: loss for step, loss in run.losses.items() if step > 3}
    assert keys_of(tmp_path / "without/checkpoint-6") == []
    again = Run(tmp_path / "again", resume=str(tmp_path / "without/checkpoint-6"), max_steps=7, **EMA)
    weights = again.weights()
    for key, value in averages(again).items():
        assert np.array_equal(value, weights[key]), key


def test_statements_do_not_apply_to_averages(tmp_path):
    Run(tmp_path, max_steps=3, **EMA)
    statement = '["model.norm.weight -> model.norm.weight"]'
    with pytest.raises(ValidationError, match="does not apply to moving averages"):
        Run(tmp_path / "b", resume=str(tmp_path / "checkpoint-3"), aoa_config=statement, **EMA)


def test_averages_of_an_unknown_kind_are_refused():
    with pytest.raises(ValidationError, match="_fc_to_buffer_format.*Remedy .FC905.: leave --zcc_save_ema_coef out"):
        AverageState(object())
    assert callable(EMABufferFcBased._fc_to_buffer_format)
