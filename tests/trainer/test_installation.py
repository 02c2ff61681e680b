"""install() and uninstall() for PaddleNLP, and the classes for those who want neither."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddlenlp")

from paddlenlp.trainer import (
    CompressionArguments,
    PdArgumentParser,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    trainer_utils,
)

from paddle_flexckpt.native.directory import is_complete
from paddle_flexckpt.trainer import FlexTrainerMixin, FlexTrainingArguments, install, is_installed, uninstall
from tests.trainer.models import Sequences, build
from tests.trainer.test_trainer import FLAGS

CLASSES = (Trainer, TrainingArguments, Seq2SeqTrainingArguments, CompressionArguments)


# The trainer pickles its arguments: their class has to have a place.
@dataclasses.dataclass
class MyArguments(FlexTrainingArguments, TrainingArguments):
    # The fields of the first class have defaults; so the one that PaddleNLP asks for has to have one here.
    output_dir: str = ""


class MyTrainer(FlexTrainerMixin, Trainer):
    pass


@pytest.fixture(autouse=True)
def plain():
    """Without this library, and with it again for other tests."""
    uninstall()
    yield
    install()


def test_the_semi_automatic_trainer_is_served_whenever_it_is_imported():
    sys.modules.pop("paddlenlp.trainer.auto_trainer", None)
    install()
    late = importlib.import_module("paddlenlp.trainer.auto_trainer").AutoTrainer
    for name in ("_save_checkpoint", "_load_from_checkpoint", "_inner_training_loop", "_wrap_for_auto"):
        assert vars(late)[name] is vars(FlexTrainerMixin)[name]
    uninstall()
    assert not set(vars(late).values()) & {each for each in vars(FlexTrainerMixin).values() if callable(each)}
    install()
    assert vars(late)["_save_checkpoint"] is vars(FlexTrainerMixin)["_save_checkpoint"]


def test_uninstall_leaves_everything_as_it_was():
    before = [dict(vars(cls)) for cls in CLASSES]
    last_checkpoint = trainer_utils.get_last_checkpoint
    assert not is_installed()
    install()
    install()
    assert is_installed()
    assert trainer_utils.get_last_checkpoint is not last_checkpoint
    assert all(dict(vars(cls)) != was for cls, was in zip(CLASSES, before))
    uninstall()
    assert trainer_utils.get_last_checkpoint is last_checkpoint
    for cls, was in zip(CLASSES, before):
        now = dict(vars(cls))
        assert now.keys() == was.keys()
        assert [name for name in was if now[name] is not was[name]] == [], cls
    with pytest.raises(TypeError, match="flex_strict"):
        TrainingArguments(output_dir="out", flex_strict="none")


@pytest.mark.parametrize("cls", CLASSES[1:])
def test_every_arguments_class_has_the_flags_and_keeps_its_own(cls, tmp_path):
    own = {each.name: each.metadata.get("help") for each in dataclasses.fields(cls)}
    install()
    now = {each.name: each.metadata.get("help") for each in dataclasses.fields(cls)}
    assert {name: now[name] for name in own} == own
    assert now.keys() - own.keys() == {each.name for each in dataclasses.fields(FlexTrainingArguments)}
    line = [
        "--output_dir",
        str(tmp_path),
        "--device",
        "cpu",
        "--flex_async_save",
        "1",
        "--flex_slice_bytes",
        "8192",
        "--flex_check_replicas",
        "first",
    ]
    (args,) = PdArgumentParser((cls,)).parse_args_into_dataclasses(line)
    assert (args.flex_async_save, args.flex_check_replicas, args.flex_verify) == (True, "first", "read")
    assert (args.flex_slice_bytes, args.flex_staging_bytes) == (8192, None)
    assert "flex_async_save" in PdArgumentParser((cls,)).format_help()


def test_the_classes_alone_save_and_resume(tmp_path):
    def train(output_dir: Path, resume: Any = None) -> dict[str, bytes]:
        args = MyArguments(**{**FLAGS, "output_dir": str(output_dir)})
        trainer = MyTrainer(model=build("llama", args), args=args, train_dataset=Sequences())
        trainer.train(resume_from_checkpoint=resume)
        return {name: value.numpy().tobytes() for name, value in trainer.model.state_dict().items()}

    whole = train(tmp_path / "whole")
    assert not is_installed()
    assert is_complete(tmp_path / "whole/checkpoint-3/flex_checkpoint")
    assert not list(tmp_path.glob("whole/checkpoint-*/*.pdparams"))
    assert train(tmp_path / "resumed", str(tmp_path / "whole/checkpoint-3")) == whole
