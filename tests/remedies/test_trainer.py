"""Remedies of the trainers' flags and directories, each provoked and followed, without a trainer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.sharded_weight import make_replicated_sharded_weight
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.trainer import options_of
from paddle_flexckpt.trainer.contents import EMA_PREFIX, AverageState, model_shards
from paddle_flexckpt.trainer.directories import SUBDIRECTORY, TrainerDirectories, choose_checkpoint
from paddle_flexckpt.trainer.flags import TrainerOptions
from paddle_flexckpt.trainer.restoring import FLAGS as FLAGS_OF_LOADS
from paddle_flexckpt.trainer.restoring import _load, dequant_transform
from tests.remedies.following import Advice, provoked
from tests.trainer.test_flags import FLEX, options


class OfPaddleFleet(SimpleNamespace):
    __module__ = "paddlefleet.trainer"


AUTO = {**FLEX, "enable_auto_parallel": True}
POSITION = {**FLEX, "flex_data_position": True}
FLAGS = [
    (Advice("trainer/flags.py", "give --save_checkpoint_format "), {"flex_data_position": True}, POSITION),
    (
        Advice("trainer/flags.py", "leave one of the two out"),
        {**POSITION, "distributed_dataloader": True},
        {**FLEX, "distributed_dataloader": True},
    ),
    (Advice("trainer/flags.py", "leave one of the two out"), {**POSITION, "enable_auto_parallel": True}, AUTO),
    (
        Advice("trainer/flags.py", "leave --unified_checkpoint out; a unified checkpoint loads with"),
        {**FLEX, "unified_checkpoint": True},
        FLEX,
    ),
    (Advice("trainer/flags.py", "leave --"), {**FLEX, "save_sharded_model": True}, FLEX),
    (Advice("trainer/flags.py", "leave --"), {**FLEX, "load_sharded_model": True}, FLEX),
    (
        Advice("trainer/flags.py", "--flex_async_save, not --use_async_save"),
        {**FLEX, "use_async_save": True},
        {**FLEX, "flex_async_save": True},
    ),
    (
        Advice("trainer/flags.py", "--flex_async_save, not --enable_zero_cost_checkpoint"),
        {**FLEX, "enable_zero_cost_checkpoint": True},
        {**FLEX, "flex_async_save": True},
    ),
    (
        Advice("trainer/flags.py", "give --ignore_load_lr_and_optim as well"),
        {**FLEX, "load_from_hf": True},
        {**FLEX, "load_from_hf": True, "ignore_load_lr_and_optim": True},
    ),
    (
        Advice("trainer/flags.py", "leave it out; where a checkpoint is damaged, the error names it, and"),
        {**AUTO, "flex_fallback": True},
        AUTO,
    ),
    (
        Advice("trainer/flags.py", "leave it out"),
        {**AUTO, "flex_async_save": True, "flex_slice_bytes": 1 << 20},
        {**AUTO, "flex_async_save": True},
    ),
    (Advice("trainer/flags.py", "leave it out"), {**AUTO, "load_model_with_sharding_tensor_fusion": True}, AUTO),
    (
        Advice("trainer/flags.py", "leave --save_hf_steps out; the averages are in the checkpoint"),
        {**FLEX, "zcc_save_ema_coef": 0.9, "save_hf_steps": 5},
        {**FLEX, "zcc_save_ema_coef": 0.9},
    ),
    (
        Advice("trainer/flags.py", "give --aoa_config with the statements of parameters"),
        {**FLEX, "aoa_config_model_state": "x.json"},
        {**FLEX, "aoa_config": '["a -> b"]'},
    ),
]


@pytest.mark.parametrize(
    ("advice", "wrong", "right"), FLAGS, ids=[f"{i}-{f[0].words[:30]}" for i, f in enumerate(FLAGS)]
)
def test_a_flag_is_left_out_or_given(advice, wrong, right):
    fleet = "save_hf_steps" in wrong or "aoa_config_model_state" in wrong
    with provoked(*advice):
        options_of(OfPaddleFleet(**wrong)) if fleet else options(**wrong)
    asked = options_of(OfPaddleFleet(**right)) if fleet else options(**right)
    assert (asked.save, asked.load) == (True, True)
    assert asked.async_save == bool(right.get("flex_async_save"))


WEIGHT, HALF = np.ones((2, 2), np.float32), np.ones((2, 2), ml_dtypes.bfloat16)
STATES = {"w.moment1_0": WEIGHT, "w.moment2_0": WEIGHT}
LOADS = [  # saved, loaded, the remedy, the options by which it loads
    (
        {"w": WEIGHT},
        {"w": WEIGHT, **STATES},
        "give --flex_ignore_optimizer_states 1: weights and",
        {"ignore_optimizer_states": True},
    ),
    (
        {"w": WEIGHT, "w.velocity_0": WEIGHT},
        {"w": WEIGHT, **STATES},
        "give --flex_ignore_optimizer_states 1: weights and",
        {"ignore_optimizer_states": True},
    ),
    (
        {"w": WEIGHT, **STATES},
        {"w": WEIGHT},
        "give --flex_ignore_optimizer_states 1",
        {"ignore_optimizer_states": True},
    ),
    ({"w": WEIGHT}, {"w": HALF}, "load with --flex_cast 1 to convert the values", {"cast": True}),
    (
        {"w": HALF},
        {"w": HALF, "w.w_0": WEIGHT},
        "load with --flex_convert_master_weights 1, by which",
        {"convert_master_weights": True},
    ),
    ({"w": WEIGHT}, {"w": WEIGHT, "v": WEIGHT}, "or load with --flex_strict none to leave", {"strict": False}),
]


@pytest.mark.parametrize(("saved", "wanted", "remedy", "follows"), LOADS)
def test_errors_of_a_load_name_the_trainers_flags(tmp_path, saved, wanted, remedy, follows):
    """``follows``: the options that the flags set."""
    comm, trainer = communicator_for(None), SimpleNamespace(optimizer=object())
    fc.save_state_dict(saved, tmp_path)
    with pytest.raises(fc.ValidationError) as caught:
        _load(trainer, str(tmp_path), wanted, True, TrainerOptions(), comm)
    assert remedy in str(caught.value)
    _load(trainer, str(tmp_path), wanted, True, TrainerOptions(**follows), comm)
    assert (wanted["w"] == saved["w"].astype(np.float32)).all()


def test_the_words_for_which_there_are_flags_are_those_of_errors():
    package = Path(fc.__file__).parent
    paths = [*package.glob("transfer/*.py"), package / "catalog" / "texts.py"]
    texts = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert [words for words in FLAGS_OF_LOADS if words not in texts] == []


def test_a_checkpoint_that_is_not_complete(tmp_path):
    a = np.arange(4, dtype=np.float32)
    directories = TrainerDirectories(tmp_path)

    def save(step):
        directories.begin(step)
        fc.save_state_dict({"a": a + step}, tmp_path / f"checkpoint-{step}" / SUBDIRECTORY)

    def loaded(checkpoint):
        target = {"a": np.zeros_like(a)}
        fc.load_state_dict(target, Path(checkpoint) / SUBDIRECTORY)
        return target["a"].tolist()

    save(2)
    (manifest,) = (tmp_path / "checkpoint-2" / SUBDIRECTORY).glob("*.manifest")
    manifest.unlink()
    with provoked("trainer/directories.py", "there is none before it: "):
        choose_checkpoint(str(tmp_path / "checkpoint-2"), directories, False)
    with provoked(
        "trainer/directories.py", "rebuild a lost manifest by `flexckpt repair`; or begin anew, with another"
    ):
        choose_checkpoint("true", directories, False)
    assert not TrainerDirectories(tmp_path / "another").last()
    assert main(["repair", str(tmp_path / "checkpoint-2" / SUBDIRECTORY), "--id", "0"]) == 0
    for asked in (str(tmp_path / "checkpoint-2"), "true"):
        assert loaded(choose_checkpoint(asked, directories, False)) == (a + 2).tolist()
    save(4)
    (manifest,) = (tmp_path / "checkpoint-4" / SUBDIRECTORY).glob("*.manifest")
    manifest.unlink()
    broken = str(tmp_path / "checkpoint-4")
    with provoked("trainer/directories.py", "or give --flex_fallback 1") as caught:
        choose_checkpoint(broken, directories, False)
    named = str(caught.value).partition("resume from ")[2].partition(", or")[0]
    for checkpoint in (choose_checkpoint(named, directories, False), choose_checkpoint(broken, directories, True)):
        assert loaded(checkpoint) == (a + 2).tolist()


class Averages:
    """What is used of a buffer of averages."""

    def __init__(self, model):
        self.model, self.taken, self.master_weights, self.model_params = model, None, {}, {}
        self.save = self.ema_accumulate = lambda *_: None

    def _build_ema_save_sharded_state_dict(self):
        return {}

    def _fc_to_buffer_format(self, taken):
        self.taken = {key: weight.local_tensor.numpy().tolist() for key, weight in taken.items()}


def test_averages_of_a_checkpoint_that_statements_are_for(tmp_path):
    model = paddle.nn.Linear(2, 1, bias_attr=False)
    weights, averages = np.float32([[1], [2]]), np.float32([[3], [4]])
    fc.save_state_dict({"old": weights, f"{EMA_PREFIX}weight": averages}, tmp_path)
    buffer, comm = Averages(model), communicator_for("self")

    def describe():
        return {"weight": make_replicated_sharded_weight("weight", model.weight)}

    def restore(**flags):
        return AverageState(buffer).restore(str(tmp_path), EMA_PREFIX, describe, comm, options(**FLEX, **flags))

    statements = ["old -> weight"]
    with provoked(
        "trainer/contents.py", "resume without --aoa_config; or without --zcc_save_ema_coef, which leaves them"
    ):
        restore(aoa_config=json.dumps(statements))
    assert buffer.taken is None
    assert restore()
    assert buffer.taken == {"weight": averages.tolist()}
    # Without averages: the weights come by the statements, and the checkpoint has its averages still.
    fc.load_state_dict(describe(), tmp_path, aoa_config={"aoa_statements": statements})
    assert model.weight.numpy().tolist() == weights.tolist()
    assert restore()


def test_averages_of_an_unknown_kind():
    with provoked("trainer/contents.py", "leave --zcc_save_ema_coef out, and train without averages"):
        AverageState(object())
    assert AverageState(Averages(paddle.nn.Linear(2, 1))).shards({}) == {}


class LoRAModel(paddle.nn.Layer):
    """Train a few parameters beside a model, as PaddleNLP's does."""

    def __init__(self):
        super().__init__()
        self.frozen, self.lora_A = paddle.nn.Linear(2, 2), self.create_parameter([2, 1])
        for parameter in self.parameters():
            parameter.stop_gradient = True

    def mark_only_lora_as_trainable(self):
        self.lora_A.stop_gradient = False


def test_adapters_that_are_not_trained():
    fc.install()
    trainer = SimpleNamespace(args=SimpleNamespace(), model=LoRAModel())
    trainer.model_wrapped = trainer.model
    with provoked("trainer/contents.py", "call its mark_only_..._as_trainable() before the training"):
        model_shards(trainer)
    trainer.model.mark_only_lora_as_trainable()
    assert list(model_shards(trainer)) == ["lora_A"]
    fc.uninstall()


def test_quantized_weights_of_a_model_that_does_not_say_how(tmp_path):
    codes = np.arange(-8, 8).reshape(4, 4).astype(ml_dtypes.float8_e4m3fn)
    source, output = tmp_path / "hf", tmp_path / "numbers"
    fc.save_state_dict({"w": codes, "w_scale_inv": np.float32([[0.5]])}, source)
    config = {"model_type": "own", "quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(config))
    model = SimpleNamespace()
    with provoked("trainer/restoring.py", "load dequantized weights, beside a config.json without quantization_config"):
        dequant_transform(model, source, "paddlefleet")
    statements = 'w, w_scale_inv -> w, dequant="fp8", block="[4, 4]"'
    report = convert_checkpoint(source, output, {"aoa_statements": [statements]}, format="huggingface")
    assert "has a quantization_config; statements dequantize: take it out" in report.summary()
    with provoked("trainer/restoring.py", "of FP8 and MXFP4 flexckpt convert --format huggingface makes them by AOA"):
        dequant_transform(model, output, "paddlefleet")
    (output / "config.json").write_text(json.dumps({"model_type": "own"}))
    assert dequant_transform(model, output, "paddlefleet") is None
    target = {"w": np.zeros((4, 4), np.float32)}
    fc.load_state_dict(target, output)
    assert target["w"].tolist() == (codes.astype(np.float32) * 0.5).tolist()
