"""The imitated trainer of PaddleFleet with this library in it: who is called when, what is there, what is refused."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.native.directory import is_complete
from paddle_flexckpt.trainer import (
    FlexTrainingArguments,
    PaddleFleetMixin,
    install,
    is_installed,
    options_of,
    uninstall,
)
from paddle_flexckpt.trainer.flags import LIBRARIES
from paddle_flexckpt.trainer.model_rules import library_models as model_rules
from paddle_flexckpt.trainer.restoring import dequant_transform
from paddle_flexckpt.trainer.run import _LIBRARIES, InstallOnImport
from tests.paddlefleet.library import INNER, INPUTS, OUTPUTS, everything, imitated, make_trainer, note_commits

pytest.importorskip("paddle.distributed.flex_checkpoint")


@pytest.fixture(autouse=True)
def library():
    with imitated():
        yield


@pytest.fixture
def whole(tmp_path):
    trainer = make_trainer(tmp_path / "whole")
    trainer.train()
    return tmp_path / "whole", trainer


def noted(monkeypatch, *args, **kwargs):
    trainer = make_trainer(*args, **kwargs)
    note_commits(trainer, monkeypatch)
    return trainer


# -- in and out --------------------------------------------------------------------------------------------------------


def test_every_list_of_libraries_has_it():
    assert LIBRARIES == _LIBRARIES == model_rules.LIBRARIES == ("paddlenlp", "paddleformers", "paddlefleet")
    with pytest.raises(ValueError, match="library has to be one of paddlenlp, paddleformers, paddlefleet; got 'fleet'"):
        install("fleet")


def test_uninstall_restores_every_attribute():
    uninstall("paddlefleet")
    modules = {
        name: importlib.import_module(f"paddlefleet.{name}")
        for name in ("trainer.trainer", "trainer.training_args", "trainer.trainer_utils", "transformers.model_utils")
    }
    owners = [*modules.values(), *(each for m in modules.values() for each in vars(m).values() if type(each) is type)]
    before = [dict(vars(owner)) for owner in owners]
    install("paddlefleet")
    install("paddlefleet")
    assert is_installed("paddlefleet")
    assert any(dict(vars(owner)) != was for owner, was in zip(owners, before))
    uninstall("paddlefleet")
    assert not is_installed("paddlefleet")
    for owner, was in zip(owners, before):
        now = dict(vars(owner))
        assert now.keys() == was.keys(), owner
        assert [name for name in was if now[name] is not was[name]] == [], owner


def test_the_launcher_installs_when_the_trainer_is_imported():
    uninstall("paddlefleet")
    for name in [name for name in sys.modules if name.startswith("paddlefleet")]:
        del sys.modules[name]
    finder = InstallOnImport()
    sys.meta_path.insert(0, finder)
    try:
        parsers = importlib.import_module("paddlefleet.trainer.argparser")
        arguments = importlib.import_module("paddlefleet.trainer.training_args").TrainingArguments
        assert not is_installed("paddlefleet")
        parser = parsers.PdArgumentParser((arguments,))
        assert is_installed("paddlefleet")
    finally:
        sys.meta_path.remove(finder)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--flex_async_save", "1"])
    assert args.flex_async_save == "1"


def test_its_own_flags_stay_and_ours_come():
    from paddlefleet.trainer.training_args import TrainingArguments

    fields = {each.name: each for each in dataclasses.fields(TrainingArguments)}
    assert fields.keys() > {each.name for each in dataclasses.fields(FlexTrainingArguments)}
    assert fields["aoa_config"].metadata["help"] == "AOA statements of the library."
    assert fields["save_checkpoint_format"].default == "flex_checkpoint"
    assert TrainingArguments().made


def test_another_format_leaves_the_trainer_as_it_was(tmp_path):
    flags = {"save_checkpoint_format": "sharding_io", "load_checkpoint_format": "sharding_io"}
    trainer = make_trainer(tmp_path, use_flex_async_save=True, max_steps=2, **flags)
    trainer._save_flex_optimizer_state = lambda output_dir: trainer.calls.append("optimizer")
    trainer.train()
    calls = ["_load_from_checkpoint", "FlexAsyncSaver.save_async", "state.save", "optimizer", "_rotate_checkpoints"]
    assert trainer.calls == calls


# -- the order of calls ------------------------------------------------------------------------------------------------


def test_a_save_is_one_commit_after_the_small_files_and_before_rotation(tmp_path, monkeypatch):
    trainer = noted(monkeypatch, tmp_path, save_total_limit=1)
    trainer.train()
    assert trainer.calls == ["small files", "state.save", "flex save", "flex rotate"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert names == {"flex_checkpoint.json", "flex_checkpoint", "trainer_state.bin"}
    assert is_complete(tmp_path / "checkpoint-4/flex_checkpoint")


def test_a_save_that_fails_removes_nothing(tmp_path, monkeypatch, whole):
    """PaddleFleet removes the older checkpoint before the new one is there."""
    directory, _ = whole
    from paddle_flexckpt.trainer import checkpointer

    trainer = make_trainer(directory, save_total_limit=1, max_steps=6)

    def refuse(*args, **kwargs):
        raise CheckpointError("no space left on device")

    monkeypatch.setattr(checkpointer, "save_state_dict", refuse)
    with pytest.raises(CheckpointError, match="no space left"):
        trainer.train(resume_from_checkpoint=str(directory / "checkpoint-4"))
    assert is_complete(directory / "checkpoint-2/flex_checkpoint")
    assert is_complete(directory / "checkpoint-4/flex_checkpoint")


@pytest.mark.parametrize("asked", ["a path", True])
def test_a_resume_goes_on_where_the_run_was(tmp_path, monkeypatch, whole, asked):
    """True as well, which PaddleFleet hands to its loader as it is."""
    directory, trainer = whole
    (directory / "checkpoint-4/flex_checkpoint/0.manifest").unlink()
    resumed = noted(monkeypatch, directory, salt="other")
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-2") if asked == "a path" else True)
    start = ["flex load", "trainer_state"]  # and not _load_rng_state: the generators are in the checkpoint
    assert resumed.calls == [*start, "small files", "state.save", "flex save"]
    assert everything(resumed) == everything(trainer)


def test_the_best_model_is_loaded_at_the_end(tmp_path, monkeypatch):
    trainer = noted(monkeypatch, tmp_path, load_best_model_at_end=True, best_at=2, save_total_limit=1)
    trainer.train()
    saved = ["small files", "state.save", "flex save", "flex rotate"]
    assert trainer.calls == [*saved, *saved, "flex load"]
    assert trainer.args.load_best_model_at_end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    alone = make_trainer(tmp_path / "alone", max_steps=2)
    alone.train()
    assert {name: everything(trainer)[name] for name in alone.model.state_dict()} == {
        name: everything(alone)[name] for name in alone.model.state_dict()
    }


def test_a_model_is_saved_outside_of_a_save_and_not_in_the_background(tmp_path, monkeypatch):
    flags = {"use_flex_async_save": True, "tensorwise_offload_optimizer": True}
    trainer = noted(monkeypatch, tmp_path, **flags)
    trainer.train()
    trainer.calls.clear()
    trainer.save_model(str(tmp_path / "model"))
    assert trainer.calls == ["flex save", "small files"]
    assert sorted(SourceDirectory(tmp_path / "model/flex_checkpoint").read_manifest().catalog.keys) == sorted(
        trainer.model.state_dict()
    )
    assert trainer.args.use_flex_async_save
    trainer.save_model(str(tmp_path / "hf"), last_fc_to_hf=True)
    assert trainer.calls[-1] == "model.save_pretrained"


def test_its_flag_of_a_background_save_is_ours(tmp_path, monkeypatch):
    from paddle_flexckpt.trainer import checkpointer

    handles, before = [], checkpointer.save_state_dict

    def save(*args, **kwargs):
        handles.append(before(*args, **kwargs))
        return handles[-1]

    monkeypatch.setattr(checkpointer, "save_state_dict", save)
    trainer = make_trainer(tmp_path, use_flex_async_save=True, save_total_limit=1)
    trainer.train()
    assert [type(handle) for handle in handles] == [SaveHandle] * 2
    assert "FlexAsyncSaver.save_async" not in trainer.calls
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert is_complete(tmp_path / "checkpoint-4/flex_checkpoint")


def test_the_mixin_does_it_without_install(tmp_path):
    uninstall("paddlefleet")
    from paddlefleet.trainer.trainer import Trainer

    trainer = make_trainer(tmp_path, use_flex_async_save=True)
    trainer.__class__ = type("MyTrainer", (PaddleFleetMixin, Trainer), {})
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    assert "FlexAsyncSaver.save_async" not in trainer.calls
    assert is_complete(tmp_path / "checkpoint-4/flex_checkpoint")
    assert is_complete(tmp_path / "model/flex_checkpoint")


# -- moving averages ---------------------------------------------------------------------------------------------------


def averages(trainer):
    buffer = trainer.callback_handler.callbacks[-1].buffer
    tables = {**buffer.master_weights, **buffer.model_params}
    return buffer, {name: tensor.numpy().tobytes() for name, tensor in tables.items()}


def test_averages_are_part_of_the_checkpoint_and_go_on(tmp_path):
    trainer = make_trainer(tmp_path / "a", zcc_save_ema_coef=0.5)
    trainer.train()
    assert not list(tmp_path.glob("a/*/ema_state"))
    resumed = make_trainer(tmp_path / "b", salt="other", zcc_save_ema_coef=0.5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    buffer, found = averages(resumed)
    assert buffer.resumed_from is None
    assert len(found) == 5
    assert found == averages(trainer)[1]
    assert any(found[name] != np.ascontiguousarray(value.numpy()).tobytes()
               for name, value in trainer.optimizer._master_weights.items())  # fmt: skip


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"enable_zero_cost_checkpoint": True}, "Remedy (FC905): --flex_async_save, not --enable_zero_cost_checkpoint"),
        ({"zcc_save_ema_coef": 0.5, "save_hf_steps": 10}, "--zcc_save_ema_coef with --save_hf_steps"),
        ({"sharded_model_from_ema": True}, "does not start a model from moving averages"),
        ({"pdc_download_ckpt": True}, "--pdc_download_ckpt brings the checkpoint when it has been chosen already"),
        ({"use_async_save": True}, "Remedy (FC905): --flex_async_save, not --use_async_save"),
        ({"unified_checkpoint": True}, "leave --unified_checkpoint out"),
        ({"enable_auto_parallel": True}, "does not serve PaddleFleet's semi-automatic trainer"),
        ({"load_from_hf": True}, "give --ignore_load_lr_and_optim as well"),
        ({"flex_staging_bytes": 1, "use_flex_async_save": True}, "--flex_async_save 1: staging_bytes=1"),
    ],
)
def test_flags_that_are_not_served_are_refused_by_name(flags, said):
    from paddlefleet.trainer.training_args import TrainingArguments

    with pytest.raises(ValidationError) as caught:
        TrainingArguments(output_dir="out", **flags)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["aoa_config_master_weight", "aoa_config_model_state"])
def test_programs_of_parts_are_refused_by_name(name):
    """They are no fields: scripts set them afterwards."""
    from paddlefleet.trainer.training_args import TrainingArguments

    args = TrainingArguments(output_dir="out")
    setattr(args, name, {"aoa_statements": ["a -> b"]})
    with pytest.raises(ValidationError, match=f"{name}: one program is for model, masters and states. Remedy"):
        options_of(args)


@pytest.mark.parametrize("name", ["HACK_CONVERT_CKPT", "HACK_CONVERT_CKPT_NOPP_TO_PP"])
def test_so_are_conversions_that_the_environment_asks_for(monkeypatch, name):
    from paddlefleet.trainer.training_args import TrainingArguments

    monkeypatch.setenv(name, "True")
    with pytest.raises(ValidationError, match=f"{name}=True of the environment: one program"):
        TrainingArguments(output_dir="out")
    TrainingArguments(output_dir="out", load_checkpoint_format="sharding_io")


def test_flags_without_meaning_are_taken(tmp_path):
    flags = {"load_via_cpu": False, "flex_ckpt_comm_method": "parallel_broadcast", "flex_ckpt_load_num_workers": 8}
    assert options_of(make_trainer(tmp_path, **flags).args) == options_of(make_trainer(tmp_path).args)
    assert options_of(make_trainer(tmp_path, replicate_saved_into_local=True).args).save_replicas


def test_the_optimizer_is_not_saved_alone(tmp_path):
    with pytest.raises(RuntimeError, match="it is saved with the model, by all ranks"):
        make_trainer(tmp_path)._save_flex_optimizer_state("out")


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def write_hugging_face(directory: Path, quantized: bool) -> dict[str, np.ndarray]:
    """Weights as codes and scales, with a config that says so or does not."""
    directory.mkdir()
    names = {
        "up.weight": (INPUTS, INNER), "up.bias": (INNER,), "down.weight": (INNER, OUTPUTS), "down.bias": (OUTPUTS,),
        "scale": (OUTPUTS,),
    }  # fmt: skip
    whole = {name: np.arange(np.prod(shape)).reshape(shape).astype(np.int8) for name, shape in names.items()}
    stored = {f"hf.{name}.codes": codes for name, codes in whole.items()}
    save_file(stored, directory / "model.safetensors")
    config = {"quantization_config": {"quant_method": "codes"}} if quantized else {}
    (directory / "config.json").write_text(json.dumps(config))
    return {name: codes * np.float32(0.5) for name, codes in whole.items()}


class Codes:
    def __init__(self, names):
        self.names = names

    def logical_metadata(self):
        return {
            f"hf.{name}": SimpleNamespace(global_shape=shape, dtype="float32" if name == "scale" else "bfloat16")
            for name, shape in self.names.items()
        }

    def source_keys(self, logical_key):
        return [f"{logical_key}.codes"]

    def apply(self, logical_key, source_tensors, output_dtype):
        return (source_tensors[f"{logical_key}.codes"].astype("float32") * 0.5).astype(output_dtype)


def test_quantized_weights_are_made_as_the_library_makes_them(tmp_path):
    expected = write_hugging_face(tmp_path / "hf", quantized=True)
    trainer = make_trainer(tmp_path / "out", max_steps=0, load_from_hf=True, ignore_load_lr_and_optim=True)
    (tmp_path / "hf/trainer_state.bin").write_text(json.dumps(vars(trainer.state)))
    kind = type(trainer.model)
    kind._gen_aoa_config = classmethod(
        lambda cls, config: {"aoa_statements": [f"hf.{name} -> {name}" for name in expected]}
    )
    with pytest.raises(
        ValidationError, match="Net has no _gen_hf_quan_config().*Remedy .FC208.: load dequantized weights"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "hf"))
    transform = Codes({name: array.shape for name, array in expected.items()})
    kind._gen_hf_quan_config = lambda self: transform
    trainer.train(resume_from_checkpoint=str(tmp_path / "hf"))
    for name, tensor in trainer.model.state_dict().items():
        assert np.array_equal(tensor.astype("float32").numpy(), expected[name]), name
    made = importlib.import_module("paddlefleet.quantization.hf_checkpoint").made
    assert made == [(str(tmp_path / "hf"), transform)]


@pytest.mark.parametrize("library", ["paddlenlp", "paddleformers", "paddlefleet"])
def test_quantized_weights_that_nobody_describes_are_refused(tmp_path, library):
    """Statements alone would take codes for numbers."""
    write_hugging_face(tmp_path / "hf", quantized=True)
    with pytest.raises(
        ValidationError, match="SimpleNamespace has no _gen_hf_quan_config.*Remedy .FC208.: load dequantized"
    ):
        dequant_transform(SimpleNamespace(), tmp_path / "hf", library)
    write_hugging_face(tmp_path / "plain", quantized=False)
    assert dequant_transform(SimpleNamespace(), tmp_path / "plain", library) is None


def test_a_directory_with_a_damaged_file_is_refused(tmp_path, whole):
    directory, _ = whole
    data = next((directory / "checkpoint-4/flex_checkpoint").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(CorruptCheckpointError):
        make_trainer(tmp_path / "b").train(resume_from_checkpoint=str(directory / "checkpoint-4"))
