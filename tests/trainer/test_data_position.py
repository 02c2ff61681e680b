"""With ``--flex_data_position`` a resumed training takes the next sample, under any number of processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddlenlp")

import paddle
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.trainer import TrainSampler, install
from tests.remedies.following import provoked
from tests.trainer.launching import launch
from tests.trainer.matrix import TOLERANCE
from tests.trainer.models import Sequences, build
from tests.trainer.test_trainer import FLAGS

install()
COUNT = 22  # no multiple of a step's samples


class Run:
    """One training with the flag: its losses by step, the samples of its batches, and its trainer."""

    def __init__(self, output_dir: Path, *, resume: Any = None, data: Any = None, cls: Any = Trainer, **flags: Any):
        self.losses: dict[int, float] = {}
        self.epochs: dict[int, float] = {}
        self.samples: list[int] = []
        run = self

        class Note(TrainerCallback):
            def on_load_data_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **kwargs: Any) -> None:
                run.samples += inputs["input_ids"][:, 0].tolist()
                # A dropout of the model would draw likewise.
                inputs["input_ids"] = (inputs["input_ids"] + paddle.randint(0, 2, [1])) % 64

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in logs:
                    run.losses[state.global_step] = logs["loss"]
                    run.epochs[state.global_step] = state.epoch

        args = TrainingArguments(output_dir=str(output_dir), **{**FLAGS, "flex_data_position": 1, **flags})
        samples = Sequences(COUNT) if data is None else data
        self.trainer = cls(model=build("llama", args), args=args, train_dataset=samples, callbacks=[Note()])
        self.trainer.train(resume_from_checkpoint=resume)
        assert args.ignore_data_skip is False


def at(directory: Path, step: int) -> str:
    return str(directory / f"checkpoint-{step}")


def order(count: int) -> list[int]:
    """First tokens of the samples, in the order of all of them."""
    data = Sequences(COUNT)
    numbers = [i for e in range(count // COUNT + 1) for i in np.random.RandomState([42, e]).permutation(COUNT)]
    return [int(data[i]["input_ids"][0]) for i in numbers[:count]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Run]:
    """Two micro-steps in a step, and so 6 batches in an epoch of the trainer, which has 22 samples."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, Run(directory, max_steps=10, save_steps=1, gradient_accumulation_steps=2)


def test_each_pass_has_each_sample_once(whole):
    _, run = whole
    assert run.samples == order(80)
    assert sorted(run.losses) == [*range(1, 11)]
    assert run.epochs[10] == pytest.approx(80 / COUNT)


# Within an epoch of the trainer, at its end, and within a later one.
@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_resumed_training_goes_on_with_the_next_sample(whole, tmp_path, step, caplog):
    directory, run = whole
    with caplog.at_level(logging.WARNING, logger="paddle_flexckpt"):
        again = Run(
            tmp_path, resume=at(directory, step), max_steps=10, gradient_accumulation_steps=2, save_strategy="no"
        )
    assert again.samples == run.samples[8 * step :]
    assert again.losses == {each: loss for each, loss in run.losses.items() if each > step}, "bit-equal"
    assert again.epochs == {each: epoch for each, epoch in run.epochs.items() if each > step}
    assert not [record for record in caplog.records if "not restored" in record.message]


def test_another_batch_size_goes_on_with_the_next_sample(whole, tmp_path):
    directory, _ = whole
    flags = {"max_steps": 12, "per_device_train_batch_size": 3, "save_strategy": "no"}
    again = Run(tmp_path, resume=at(directory, 5), **flags)
    assert again.samples == order(40 + 7 * 3)[40:]


def test_epochs_are_counted_in_whole_steps(whole, tmp_path):
    run = Run(tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2, save_strategy="epoch")
    assert run.samples == order(48)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    again = Run(tmp_path / "b", resume=at(tmp_path, 3), max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    assert again.samples == order(48)[24:]
    assert again.losses == {each: loss for each, loss in run.losses.items() if each > 3}


def test_a_checkpoint_without_a_position_is_an_error_and_so_is_a_run_without_the_flag(whole, tmp_path):
    Run(tmp_path, flex_data_position=0)
    with provoked("trainer/restoring.py", "give the flags of the saved run; --flex_ignore_schedule 1") as error:
        Run(tmp_path / "b", resume=at(tmp_path, 3))
    assert "data: the checkpoint was saved without --flex_data_position" in str(error.value)
    assert sorted(Run(tmp_path / "b", resume=at(tmp_path, 3), flex_data_position=0).losses) == [4, 5, 6]
    anew = Run(tmp_path / "c", resume=at(tmp_path, 3), flex_ignore_schedule=1)
    assert anew.samples == order(12)
    directory, _ = whole
    with pytest.raises(ValidationError, match="data: none was passed"):
        Run(tmp_path / "d", resume=at(directory, 3), flex_data_position=0)
    with pytest.raises(ValidationError, match=r"another number of samples: length was 22 when it was saved, and is 30"):
        Run(tmp_path / "d", resume=at(directory, 3), data=Sequences(30))


def test_data_without_numbers_is_refused(tmp_path):
    class Stream(paddle.io.IterableDataset):
        def __iter__(self) -> Any:
            data = Sequences(64)
            return iter([data[i] for i in range(64)])

    with provoked("trainer/train_sampler.py", "leave the flag out; a loop of your own can train on a fc.ElasticStream"):
        Run(tmp_path, data=Stream())
    assert len(Run(tmp_path, data=Stream(), flex_data_position=0).losses) == 6


def test_a_sampler_of_ones_own_is_refused_unless_it_has_the_position(tmp_path):
    class Own(Trainer):
        def _get_train_sampler(self) -> Any:
            return paddle.io.BatchSampler(self.train_dataset, batch_size=4)

    with provoked("trainer/train_sampler.py", "return paddle_flexckpt.trainer.TrainSampler(self) from") as error:
        Run(tmp_path, cls=Own)
    assert "the training batches come from a BatchSampler, which has no position" in str(error.value)

    class Following(Trainer):
        def _get_train_sampler(self) -> Any:
            return TrainSampler(self, shuffle=False)

    run = Run(tmp_path, cls=Following)
    assert run.samples == [int(Sequences(COUNT)[i % COUNT]["input_ids"][0]) for i in range(24)]
    again = Run(tmp_path / "b", cls=Following, resume=at(tmp_path, 3))
    assert again.samples == run.samples[12:]
    assert again.losses == {step: loss for step, loss in run.losses.items() if step > 3}

    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return paddle.io.DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)

    for resume in (None, at(tmp_path, 3)):
        with pytest.raises(ValidationError, match="which has no position"):
            Run(tmp_path / "c", cls=OwnLoader, resume=resume)


def test_data_that_begins_anew_is_refused(tmp_path):
    with provoked("trainer/mixin.py", "leave --ignore_data_skip out"):
        Run(tmp_path, ignore_data_skip=True)
    assert len(Run(tmp_path).losses) == 6


def test_without_the_flag_the_sampler_is_the_trainers_own(tmp_path):
    trainer = Run(tmp_path, flex_data_position=0).trainer
    assert type(trainer.get_train_dataloader().batch_sampler) is paddle.io.BatchSampler


def test_other_ranks_go_on_with_the_next_sample(tmp_path):
    flags = ["--flex_data_position", "1", "--max_grad_norm", "0"]
    job = {"name": "job", "model": "llama", "output_dir": str(tmp_path / "whole"), "flags": flags, "samples": COUNT}
    expected = launch("dp2", [job], tmp_path / "first")["job"]
    assert expected["samples"] == order(24)
    resume = {**job, "resume": at(tmp_path / "whole", 3)}
    for strategy in ("dp2", "single", "sharding2", "tp2"):
        again = launch(strategy, [{**resume, "output_dir": str(tmp_path / strategy)}], tmp_path / f"log-{strategy}")
        assert again["job"]["samples"] == expected["samples"][12:]
        losses = again["job"]["losses"]
        assert sorted(losses) == ["4", "5", "6"]
        limit = 0 if strategy == "dp2" else TOLERANCE
        assert all(abs(losses[step] - expected["losses"][step]) <= limit for step in losses)
