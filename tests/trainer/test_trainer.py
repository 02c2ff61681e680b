"""The PaddleNLP trainer in one process: what it saves, keeps, resumes from, and refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddlenlp")

import paddle

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.native.directory import is_complete
from paddle_flexckpt.trainer import install, latest_checkpoint
from paddle_flexckpt.trainer.checkpointer import TrainerCheckpointer
from paddle_flexckpt.trainer.restoring import _note_on_padding, _note_on_sample_order
from tests.native.samples import flip
from tests.saved import data_file
from tests.trainer.matrix import differences, tensors
from tests.trainer.models import Sequences, build

install()  # the one line that a script needs

FLAGS = {
    "device": os.environ.get("REHEARSED_DEVICE", "cpu"),
    "max_steps": 6,
    "save_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "save_checkpoint_format": "flex_checkpoint",
    "load_checkpoint_format": "flex_checkpoint",
}


class Run:
    """One training."""

    def __init__(self, output_dir: Path, *, resume: Any = None, lora: bool = False, until: Any = None, **flags: Any):
        from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments

        self.losses: dict[int, float] = {}
        run = self

        class Note(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in logs:
                    run.losses[state.global_step] = logs["loss"]

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if until is not None:
                    until(state.global_step)

        self.args = TrainingArguments(output_dir=str(output_dir), **{**FLAGS, **flags})
        model = build("llama", self.args)
        if lora:
            from paddlenlp.peft import LoRAConfig, LoRAModel

            model = LoRAModel(model, LoRAConfig(target_modules=[".*q_proj.*"], r=4, lora_alpha=8, dtype="float32"))
            model.mark_only_lora_as_trainable()
        self.trainer = Trainer(
            model=model, args=self.args, train_dataset=Sequences(), eval_dataset=Sequences(8, 1), callbacks=[Note()]
        )
        self.trainer.train(resume_from_checkpoint=resume)

    @classmethod
    def alone(cls, *args: Any, **kwargs: Any) -> Run:
        """With the names that a process gives that does nothing else: the trainer's own format needs them."""
        with paddle.utils.unique_name.guard():
            return cls(*args, **kwargs)

    def weights(self) -> dict[str, np.ndarray]:
        return {key: value.numpy() for key, value in self.trainer.model.state_dict().items()}


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in directory.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Run]:
    directory = tmp_path_factory.mktemp("whole")
    return directory, Run(directory)


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(whole, tmp_path):
    directory, run = whole
    assert steps_in(directory) == [3, 6]
    assert not list(directory.glob("checkpoint-*/*.pdparams")), "no tensors outside the checkpoint"
    resumed = Run(tmp_path, resume=str(directory / "checkpoint-3"))
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 3}
    first, second = (tensors(each / "checkpoint-6/flex_checkpoint") for each in (directory, tmp_path))
    assert len(first) > 80
    assert differences(first, second) == []
    assert resumed.trainer.optimizer.get_lr() == run.trainer.optimizer.get_lr()


def test_generators_go_on_where_they_were(tmp_path):
    def draw(into: dict[int, Any]) -> Any:
        return lambda step: into.update({step: (float(np.random.rand()), paddle.rand([2]).tolist())})

    first: dict[int, Any] = {}
    second: dict[int, Any] = {}
    Run(tmp_path, until=draw(first))
    Run(tmp_path / "b", resume=str(tmp_path / "checkpoint-3"), until=draw(second))
    assert second == {step: drawn for step, drawn in first.items() if step > 3}


def test_true_resumes_from_the_last_that_is_complete(whole, tmp_path):
    from paddlenlp.trainer import trainer_utils

    _, run = whole
    Run(tmp_path, save_steps=2)
    assert steps_in(tmp_path) == [2, 4, 6]
    for step in (4, 6):
        (tmp_path / f"checkpoint-{step}/flex_checkpoint/0.manifest").unlink()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert trainer_utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint-4 is not complete.*resume from .*checkpoint-2"):
        Run(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    resumed = Run(tmp_path, resume=True, save_strategy="no")
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 2}
    resumed = Run(tmp_path, resume=str(tmp_path / "checkpoint-4"), flex_fallback=True, save_strategy="no")
    assert sorted(resumed.losses) == [3, 4, 5, 6]


def test_a_fall_back_takes_the_trainer_state_of_the_older_checkpoint_too(tmp_path, whole):
    _, run = whole
    Run(tmp_path, save_steps=2)
    (tmp_path / "checkpoint-6/flex_checkpoint/0.manifest").unlink()
    directory = tmp_path / "checkpoint-4/flex_checkpoint"
    data = directory / data_file(directory)
    flip(data, data.stat().st_size - 100)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        Run(tmp_path, resume=True, save_strategy="no")
    resumed = Run(tmp_path, resume=True, flex_fallback=True, save_strategy="no")
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 2}


@pytest.mark.parametrize("wrong", ["nowhere", True])
def test_there_is_nothing_to_resume_from(tmp_path, wrong):
    resume = str(tmp_path / wrong) if isinstance(wrong, str) else wrong
    with pytest.raises(ValidationError, match="there is no"):
        Run(tmp_path / "out", resume=resume)


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    run = Run(tmp_path, max_steps=6, save_steps=1, save_total_limit=2)
    assert steps_in(tmp_path) == [5, 6]
    best_dir = tmp_path / "best"
    worse = Run(
        best_dir, save_steps=1, eval_steps=1, evaluation_strategy="steps", save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    best = Path(worse.trainer.state.best_model_checkpoint)
    assert steps_in(best_dir) == sorted({int(best.name.partition("-")[2]), 6})
    assert int(best.name.partition("-")[2]) < 6, "the losses fall"
    kept = tensors(best / "flex_checkpoint")
    for key, value in worse.weights().items():
        assert kept[key].tobytes() == value.tobytes(), key
    assert worse.args.load_best_model_at_end
    assert len(run.losses) == 6


def test_what_dead_saves_left_is_removed_and_what_lost_its_manifest_is_not(tmp_path):
    Run(tmp_path, max_steps=4, save_steps=1)
    (tmp_path / "checkpoint-1/flex_checkpoint/0.manifest").unlink()
    (tmp_path / "checkpoint-2/flex_checkpoint/0.manifest").unlink()
    (dead,) = (tmp_path / "checkpoint-2/flex_checkpoint").glob("0_0-*.safetensors")
    dead.with_name(f"{dead.stem[2:]}.saving").touch()
    (tmp_path / "checkpoint-3/flex_checkpoint.removing").touch()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    Run(tmp_path, resume=True, max_steps=5, save_steps=1, save_total_limit=5)
    assert steps_in(tmp_path) == [1, 4, 5]


def test_saves_in_the_background_are_complete_when_the_training_is(whole, tmp_path, monkeypatch):
    from paddle_flexckpt.trainer import checkpointer

    directory, run = whole
    background = []
    save = checkpointer.save_state_dict

    def spy(*args: Any, **options: Any) -> Any:
        handle = save(*args, **options)
        background.append(type(handle).__name__)
        return handle

    monkeypatch.setattr(checkpointer, "save_state_dict", spy)
    again = Run(tmp_path, flex_async_save=True, save_steps=1, save_total_limit=2)
    assert background == ["SaveHandle"] * 6
    assert again.losses == run.losses
    assert steps_in(tmp_path) == [5, 6]
    assert all(is_complete(tmp_path / f"checkpoint-{step}/flex_checkpoint") for step in (5, 6))
    first, second = (tensors(each / "checkpoint-6/flex_checkpoint") for each in (directory, tmp_path))
    assert differences(first, second) == []


def test_slices_are_copied_between_micro_steps_and_the_rest_before_the_optimizers_step(tmp_path, monkeypatch):
    from paddle_flexckpt.saving.sliced_saves import SlicedSave

    events = []

    def note(owner: Any, name: str, text: str) -> None:
        right = getattr(owner, name)

        def noted(self: Any, *args: Any, **options: Any) -> Any:
            events.append(text)
            return right(self, *args, **options)

        monkeypatch.setattr(owner, name, noted)

    once = Run(tmp_path / "at once", gradient_accumulation_steps=2)
    note(TrainerCheckpointer, "save", "save")
    note(SlicedSave, "stage_next", "slice")
    note(SlicedSave, "finish_staging", "rest")
    note(paddle.optimizer.AdamW, "step", "step")
    options = {"flex_async_save": True, "flex_slice_bytes": 8192}
    sliced = Run(tmp_path / "slices", gradient_accumulation_steps=2, **options)
    assert events == [*["step"] * 3, "save", "slice", "rest", *["step"] * 3, "save", "rest"]
    assert sliced.losses == once.losses
    for step in (3, 6):
        one, other = (tensors(tmp_path / f"{run}/checkpoint-{step}/flex_checkpoint") for run in ("at once", "slices"))
        assert differences(one, other) == []
    assert not [each for each in sliced.trainer.callback_handler.callbacks if type(each).__name__ == "Slices"]


@pytest.mark.parametrize("failing", [3, 6])
def test_a_save_that_fails_in_the_background_is_an_error_of_the_training(tmp_path, monkeypatch, failing):
    from paddle_flexckpt.background.pending import SaveHandle
    from paddle_flexckpt.catalog import CheckpointError
    from paddle_flexckpt.trainer import checkpointer

    save = checkpointer.save_state_dict

    def fail(shards: Any, path: Any, *args: Any, step: int, **options: Any) -> Any:
        if step != failing:
            return save(shards, path, *args, step=step, **options)
        handle = SaveHandle(str(path), 0)
        handle.finish(CheckpointError("the disk is full"))
        return handle

    monkeypatch.setattr(checkpointer, "save_state_dict", fail)
    with pytest.raises(CheckpointError, match=r"an earlier save failed: \[rank 0\] the disk is full"):
        Run(tmp_path, flex_async_save=True)


def test_optimizer_and_schedule_can_be_left_out(whole, tmp_path):
    directory, _ = whole
    Run(tmp_path / "without", ignore_save_lr_and_optim=True)
    found = tensors(tmp_path / "without/checkpoint-3/flex_checkpoint")
    assert not [name for name in found if "moment" in name]
    full = tensors(directory / "checkpoint-3/flex_checkpoint")
    assert differences(found, {name: full[name] for name in found}) == []
    resumed = Run(tmp_path / "model", resume=str(directory / "checkpoint-3"), ignore_load_lr_and_optim=True)
    assert sorted(resumed.losses) == [1, 2, 3, 4, 5, 6], "it starts anew, from the weights of step 3"
    with pytest.raises(ValidationError, match="the source has no optimizer states") as caught:
        Run(tmp_path / "error", resume=str(tmp_path / "without/checkpoint-3"))
    assert "Remedy (FC204): give --flex_ignore_optimizer_states 1: weights and schedule are loaded" in str(caught.value)
    ignored = Run(
        tmp_path / "ignored", resume=str(tmp_path / "without/checkpoint-3"), flex_ignore_optimizer_states=True
    )
    assert sorted(ignored.losses) == [4, 5, 6]
    Run(tmp_path / "alone", resume=str(tmp_path / "without/checkpoint-3"), ignore_load_lr_and_optim=True)


def test_lora_saves_what_it_trains(tmp_path):
    run = Run(tmp_path, lora=True)
    found = tensors(tmp_path / "checkpoint-3/flex_checkpoint")
    assert {name.rpartition(".")[2] for name in found if "_acc_" not in name and "moment" not in name} == {
        "lora_A",
        "lora_B",
    }
    assert (tmp_path / "checkpoint-3/lora_config.json").exists()
    resumed = Run(tmp_path / "resumed", lora=True, resume=str(tmp_path / "checkpoint-3"))
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 3}


def test_without_the_flags_the_trainer_is_as_it_was(tmp_path):
    run = Run.alone(tmp_path, save_checkpoint_format=None, load_checkpoint_format=None)
    assert "_comm" not in vars(run.trainer._flex_instance), "nothing is set up"
    names = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert {"model_state.pdparams", "optimizer.pdopt", "scheduler.pdparams"} <= names
    assert not [name for name in names if "flex" in name]
    resumed = Run.alone(
        tmp_path / "b", resume=str(tmp_path / "checkpoint-3"), save_checkpoint_format=None, load_checkpoint_format=None
    )
    assert resumed.losses == {step: loss for step, loss in run.losses.items() if step > 3}


def test_the_scheduler_of_the_job_is_told_after_the_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAG_LLM_PDC", "true")
    seen = []
    write_text = Path.write_text

    def spy(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == ".checkpoint_done":
            seen.append(is_complete(path.parent / "flex_checkpoint"))
        return write_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", spy)
    Run(tmp_path)
    assert seen == [True, True]
    assert os.environ["FLAG_LLM_PDC"] == "true"
    assert (tmp_path / "checkpoint-3/.checkpoint_done").read_text() == "3\n"


def test_aoa_statements_rename_on_the_way(whole, tmp_path):
    directory, run = whole
    swap = '["llama.layers.0.mlp.gate_proj.weight -> llama.layers.0.mlp.up_proj.weight", '
    swap += '"llama.layers.0.mlp.up_proj.weight -> llama.layers.0.mlp.gate_proj.weight"]'
    resumed = Run(tmp_path, resume=str(directory / "checkpoint-3"), aoa_config=swap, max_steps=4, save_steps=4)
    assert resumed.losses[4] != run.losses[4]
    with pytest.raises(ValidationError, match="aoa"):
        Run(tmp_path / "b", resume=str(directory / "checkpoint-3"), aoa_config="[no json")


def test_the_export_opens_with_safetensors_alone_and_has_the_weights(tmp_path):
    from safetensors.numpy import load_file

    run = Run(tmp_path, flex_export_hf=True, flex_async_save=True)
    for step in (3, 6):
        exported = load_file(tmp_path / f"checkpoint-{step}/huggingface/model.safetensors")
        weights = tensors(tmp_path / f"checkpoint-{step}/flex_checkpoint")
        expected = {
            name.replace("llama.", "model."): value.T if name.split(".")[-2].endswith(("_proj", "lm_head")) else value
            for name, value in weights.items()
            if name.endswith("weight")
        }
        assert differences(expected, {name: np.ascontiguousarray(value) for name, value in exported.items()}) == []
    assert len(exported) == len(run.weights()) == 21
    assert (tmp_path / "checkpoint-3/huggingface/config.json").exists()


def test_weights_of_hugging_face_can_be_resumed_from(tmp_path):
    from paddle_flexckpt.trainer.model_rules import hf_rules

    run = Run(tmp_path, flex_export_hf=True)
    rules = hf_rules(type(run.trainer.model), run.trainer.model.config)["from_hf"]
    again = Run(
        tmp_path / "b", resume=str(tmp_path / "checkpoint-6/huggingface"), ignore_load_lr_and_optim=True,
        aoa_config=json.dumps(rules), max_steps=1, learning_rate=0.0,
    )  # fmt: skip
    weights = run.weights()
    assert all(value.tobytes() == weights[name].tobytes() for name, value in again.weights().items())


def test_an_export_that_cannot_be_is_an_error_before_the_training(tmp_path, monkeypatch):
    from paddle_flexckpt.trainer import checkpointer

    def no_rules(*args: Any, **options: Any) -> Any:
        raise ValidationError(["there are no rules for this model"])

    monkeypatch.setattr(checkpointer, "export_config_of", no_rules)
    with pytest.raises(ValidationError, match="no rules for this model"):
        Run(tmp_path, flex_export_hf=True)
    assert steps_in(tmp_path) == []


def test_what_cannot_be_saved_is_said_before_the_first_step(tmp_path, monkeypatch):
    model_of = build

    def unruly(*args: Any) -> Any:
        model = model_of(*args)
        model.llama.norm.weight.is_distributed = True
        return model

    monkeypatch.setattr("tests.trainer.test_trainer.build", unruly)
    steps: list[int] = []
    with pytest.raises(CheckpointError, match=r"cannot save: .*'llama\.norm\.weight' is marked is_distributed"):
        Run(tmp_path, until=steps.append)
    assert steps == []
    assert steps_in(tmp_path) == []


def test_a_check_before_the_training_changes_nothing_of_it(whole, tmp_path, monkeypatch):
    _, run = whole
    monkeypatch.setattr(TrainerCheckpointer, "check", lambda self: None)
    assert Run(tmp_path).losses == run.losses


def test_a_resume_says_what_it_did(whole, tmp_path, caplog):
    directory, _ = whole
    with caplog.at_level("INFO", logger="paddle_flexckpt"):
        Run(tmp_path, resume=str(directory / "checkpoint-3"), max_steps=4, save_steps=100)
    told, line = [record.message for record in caplog.records if record.name == "paddle_flexckpt"]
    assert "lr_lambda gave a rate of 0.0005, and gives 0.00025 here" in told  # as the run has fewer steps
    assert line.startswith(f"resumed from {directory / 'checkpoint-3'}: loaded ")


@pytest.mark.parametrize(("before", "now", "differs"), [(1, 1, False), (2, 4, False), (1, 2, True), (4, 1, True)])
def test_other_samples_are_said(before, now, differs):
    found = _note_on_sample_order(before, now)
    assert bool(found) == differs
    if differs:
        assert f"saved by {before} process" in found["order of samples"]


@pytest.mark.parametrize(
    ("length", "before", "now", "differs"),
    [(103, 2, 4, False), (102, 2, 4, True), (104, 2, 4, False), (103, 4, 2, False), (102, 4, 2, True),
     (101, 2, 2, False), (101, 1, 2, True), (None, 2, 4, False), (102, 3, 6, False)],
)  # fmt: skip
def test_padding_that_changes_the_shuffle_is_said(length, before, now, differs):
    found = _note_on_padding(length, before, now)
    assert bool(found) == differs
    if differs:
        assert f"has {length} samples" in found["order of samples over ranks"]
