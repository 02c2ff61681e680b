"""PaddleFormers' trainer in one process: what it saves, resumes from and refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddleformers")

import paddle
from paddleformers.trainer import Trainer as PaddleFormersTrainer
from paddleformers.trainer import TrainingArguments as PaddleFormersArguments
from safetensors.numpy import load_file

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.testing import cpu_world
from paddle_flexckpt.trainer import (
    FlexTrainingArguments,
    PaddleFormersMixin,
    install,
    is_installed,
    uninstall,
)
from tests.paddleformers.models import Sequences, build
from tests.trainer.matrix import differences, tensors

FLAGS = {
    "device": "cpu",
    "max_steps": 6,
    "save_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "amp_master_grad": False,
    "split_param": False,
    "max_grad_norm": 0,
}


class MyTrainer(PaddleFormersMixin, PaddleFormersTrainer):
    pass


@dataclass
class MyArguments(FlexTrainingArguments, PaddleFormersArguments):
    pass


@pytest.fixture(autouse=True, scope="module")
def installed():
    cpu_world.install()
    install("paddleformers")
    yield
    uninstall("paddleformers")
    cpu_world.uninstall()


class Run:
    """One training."""

    def __init__(
        self,
        output_dir: Path,
        *,
        resume: Any = None,
        lora: bool = False,
        model: str = "llama",
        classes: tuple[Any, Any] | None = None,
        **flags: Any,
    ):
        from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments

        if classes is not None:
            Trainer, TrainingArguments = classes
        self.losses: dict[int, float] = {}
        run = self

        class Note(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in logs:
                    run.losses[state.global_step] = logs["loss"]

        self.args = TrainingArguments(output_dir=str(output_dir), **{**FLAGS, **flags})
        built = build(model, self.args)
        if lora:
            from paddleformers.peft import LoRAConfig, LoRAModel

            built = LoRAModel(built, LoRAConfig(target_modules=[".*q_proj.*"], r=4, lora_alpha=8, dtype="float32"))
            built.mark_only_lora_as_trainable()
        self.trainer = Trainer(
            model=built, args=self.args, train_dataset=Sequences(), eval_dataset=Sequences(8, 1), callbacks=[Note()]
        )
        self.trainer.train(resume_from_checkpoint=resume)

    def weights(self) -> dict[str, np.ndarray]:
        return {key: value.numpy() for key, value in self.trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Run]:
    directory = tmp_path_factory.mktemp("whole")
    return directory, Run(directory)


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in directory.glob("checkpoint-*"))


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(whole, tmp_path):
    directory, run = whole
    names = {path.name for path in (directory / "checkpoint-3").iterdir()}
    assert {"flex_checkpoint", "flex_checkpoint.json", "config.json", "trainer_state.bin"} <= names
    assert not names & {"model_state", "optimizer_state", "master_weight", "scheduler.pdparams"}
    resumed = Run(tmp_path, resume=str(directory / "checkpoint-3"))
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 3}
    first, second = (tensors(each / "checkpoint-6/flex_checkpoint") for each in (directory, tmp_path))
    assert len(first) == 105
    assert differences(first, second) == []
    assert resumed.trainer.optimizer.get_lr() == run.trainer.optimizer.get_lr()


def test_true_resumes_from_the_last_that_is_complete(whole, tmp_path):
    _, run = whole
    Run(tmp_path, save_steps=2)
    (tmp_path / "checkpoint-6/flex_checkpoint/0.manifest").unlink()
    resumed = Run(tmp_path, resume=True, save_strategy="no")
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 4}


def test_saves_in_the_background_are_complete_when_the_training_is(whole, tmp_path):
    directory, run = whole
    again = Run(tmp_path, flex_async_save=True, save_steps=1, save_total_limit=2)
    assert again.losses == run.losses
    assert steps_in(tmp_path) == [5, 6]
    first, second = (tensors(each / "checkpoint-6/flex_checkpoint") for each in (directory, tmp_path))
    assert differences(first, second) == []


def test_the_best_model_is_kept_and_loaded(tmp_path):
    run = Run(
        tmp_path, save_steps=1, eval_steps=1, evaluation_strategy="steps", save_total_limit=2, learning_rate=0.5,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    best = Path(run.trainer.state.best_model_checkpoint)
    assert int(best.name.partition("-")[2]) < 6, "the highest loss is that of the highest learning rate"
    assert steps_in(tmp_path) == sorted({int(best.name.partition("-")[2]), 6})
    kept = tensors(best / "flex_checkpoint")
    for key, value in run.weights().items():
        assert kept[key].tobytes() == value.tobytes(), key


def test_lora_saves_what_it_trains(tmp_path):
    run = Run(tmp_path, lora=True)
    found = tensors(tmp_path / "checkpoint-3/flex_checkpoint")
    parameters = {name for name in found if "_acc_" not in name and "moment" not in name}
    assert {name.rpartition(".")[2] for name in parameters} == {"lora_A", "lora_B"}
    resumed = Run(tmp_path / "resumed", lora=True, resume=str(tmp_path / "checkpoint-3"))
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 3}


@pytest.mark.parametrize("model", ["llama tied", "ernie", "phi3", "gpt oss"])
def test_other_models_resume(model, tmp_path):
    run = Run(tmp_path, model=model, save_steps=2, max_steps=4)
    resumed = Run(tmp_path / "resumed", model=model, resume=str(tmp_path / "checkpoint-2"), max_steps=4, save_steps=2)
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 2}
    first, second = (tensors(each / "checkpoint-4/flex_checkpoint") for each in (tmp_path, tmp_path / "resumed"))
    assert differences(first, second) == []


@pytest.mark.parametrize("model", ["llama", "llama tied", "ernie", "phi3", "gpt oss"])
def test_weights_go_to_hugging_face_and_back(model, tmp_path):
    run = Run(tmp_path, model=model, max_steps=2, save_steps=2, flex_export_hf=True)
    exported = load_file(tmp_path / "checkpoint-2/huggingface/model.safetensors")
    assert {"model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight"} <= exported.keys()
    assert all(name.startswith(("model.", "lm_head.")) for name in exported)
    weights = run.weights()
    if model == "llama":
        linear = weights["model.layers.1.mlp.down_proj.weight"]
        assert np.array_equal(exported["model.layers.1.mlp.down_proj.weight"], linear.T)
    again = Run(
        tmp_path / "again", model=model, seed=7, max_steps=1, save_strategy="no", learning_rate=0.0,
        resume=str(tmp_path / "checkpoint-2/huggingface"), load_from_hf=True, ignore_load_lr_and_optim=True,
    )  # fmt: skip
    for key, value in again.weights().items():
        assert np.array_equal(value, weights[key]), key


@pytest.mark.parametrize("way", ["of the instance", "of the instance, reversed", "modular"])
def test_statements_of_the_live_model_go_before_those_of_its_class(way, tmp_path, monkeypatch):
    """As PaddleFleet's models say them: attached to the instance, or from an override of a method of layers."""
    make = build

    def said(model: Any, back: bool) -> dict[str, Any]:
        names = {name: "^T" if "_proj" in name or "lm_head" in name else "" for name in model.state_dict()}
        texts = [f"{n}{t} -> other.{n}" if back else f"other.{n}{t} -> {n}" for n, t in names.items()]
        return {"aoa_statements": texts}

    def build_other(*args: Any) -> Any:
        model = make(*args)
        if way == "modular":
            methods = {
                "gen_aoa_statements": lambda self, config=None: said(self, False),
                "gen_inv_aoa_statements": lambda self, config=None: said(self, True),
                "_gen_aoa_config": None,
                "_gen_inv_aoa_config": None,
            }
            model.__class__ = type("LlamaForCausalLM", (type(model),), methods)
        else:
            model._gen_aoa_config = lambda config: said(model, False)
            model._gen_inv_aoa_config = None if "reversed" in way else lambda config: said(model, True)
        return model

    monkeypatch.setattr("tests.paddleformers.test_trainer.build", build_other)
    weights = Run(tmp_path, max_steps=2, save_steps=2, flex_export_hf=True).weights()
    exported = load_file(tmp_path / "checkpoint-2/huggingface/model.safetensors")
    assert set(exported) == {f"other.{name}" for name in weights}
    again = Run(
        tmp_path / "again", seed=7, max_steps=1, save_strategy="no", learning_rate=0.0,
        resume=str(tmp_path / "checkpoint-2/huggingface"), load_from_hf=True, ignore_load_lr_and_optim=True,
    )  # fmt: skip
    assert all(value.tobytes() == weights[key].tobytes() for key, value in again.weights().items())


def test_save_model_saves_the_model_alone(whole, tmp_path):
    directory, run = whole
    run.trainer.save_model(str(tmp_path))
    found = tensors(tmp_path / "flex_checkpoint")
    full = tensors(directory / "checkpoint-6/flex_checkpoint")
    assert len(found) == 21
    assert differences(found, {name: full[name] for name in found}) == []
    other = Run(tmp_path / "other", max_steps=1, save_strategy="no")
    other.trainer._load_from_checkpoint(str(tmp_path))
    for key, value in other.weights().items():
        assert found[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"enable_zero_cost_checkpoint": True, "fuse_optimizer_states": True}, "Remedy (FC905): --flex_async_save"),
        ({"sharded_model_from_ema": True}, "sharded_model_from_ema"),
        ({"load_from_hf": True}, "--ignore_load_lr_and_optim"),
    ],
)
def test_what_cannot_be_kept_together_is_refused_at_once(flags, message, tmp_path):
    from paddleformers.trainer import TrainingArguments

    with pytest.raises(ValidationError, match=message):
        TrainingArguments(output_dir=str(tmp_path), **{**FLAGS, **flags})


def test_with_another_format_the_trainer_is_as_it_was(tmp_path):
    Run(tmp_path, save_checkpoint_format="unified_checkpoint", load_checkpoint_format="unified_checkpoint", max_steps=3)
    names = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert {"model.safetensors.index.json", "optimizer.safetensors.index.json"} <= names
    assert not [name for name in names if "flex" in name]


def test_classes_of_ones_own_do_without_installing(whole, tmp_path):
    directory, run = whole
    uninstall("paddleformers")
    try:
        flags = {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}
        classes = (MyTrainer, MyArguments)
        resumed = Run(tmp_path, resume=str(directory / "checkpoint-3"), classes=classes, flex_export_hf=True, **flags)
    finally:
        install("paddleformers")
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 3}
    assert (tmp_path / "checkpoint-6/huggingface/model.safetensors").is_file()


def test_uninstalling_leaves_nothing_behind():
    from paddleformers.trainer import Trainer, TrainingArguments

    uninstall("paddleformers")
    try:
        assert not is_installed("paddleformers")
        assert not [name for name in vars(Trainer) if "flexckpt" in name or name.startswith("_flex_")]
        assert Trainer._load_flex_checkpoint.__module__ == "paddleformers.trainer.trainer"
        assert "flex_async_save" not in TrainingArguments.__dataclass_fields__
    finally:
        install("paddleformers")
    assert paddle.distributed.save_state_dict.__module__.startswith("paddle.")
