"""The imitated trainer of PaddleFleet with a modular model: what it says goes to Hugging Face's files and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open

from paddle_flexckpt.catalog import AoaError, ValidationError
from tests.paddlefleet.library import imitated, make_trainer

pytest.importorskip("paddle.distributed.flex_checkpoint")


@pytest.fixture(autouse=True)
def library():
    with imitated():
        yield


def speaking(trainer, **methods):
    """A trainer whose model has these methods; the class is made anew for each trainer."""
    for name, method in methods.items():
        setattr(type(trainer.model), name, method)
    return trainer


def forward(self, config=None):
    return {"aoa_statements": [f"hf.{name}{mark(name)} -> {name}" for name in self.state_dict()]}


def inverse(self, config=None):
    return {"aoa_statements": [f"{name}{mark(name)} -> hf.{name}" for name in self.state_dict()]}


def mark(name: str) -> str:
    return "^T" if name.endswith(".weight") else ""


@pytest.mark.parametrize("methods", [{"gen_inv_aoa_statements": inverse}, {}], ids=["an inverse", "reversed"])
def test_a_modular_model_is_exported_and_loaded(tmp_path, methods):
    methods = {"gen_aoa_statements": forward, **methods}
    trainer = speaking(make_trainer(tmp_path / "out", flex_export_hf=True), **methods)
    trainer.train()
    (step,) = sorted((tmp_path / "out").glob("checkpoint-*"))[-1:]
    weights = {name: tensor.astype("float32").numpy() for name, tensor in trainer.model.state_dict().items()}
    with safe_open(step / "huggingface/model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no iterator
    assert shapes == {f"hf.{n}": list(w.T.shape if mark(n) else w.shape) for n, w in weights.items()}
    flags = {"max_steps": 0, "load_from_hf": True, "ignore_load_lr_and_optim": True}
    again = speaking(make_trainer(tmp_path / "again", "other", **flags), **methods)
    source = step / "huggingface"
    (source / "trainer_state.bin").write_bytes((step / "trainer_state.bin").read_bytes())
    statements = json.dumps(forward(again.model)["aoa_statements"])
    silent = make_trainer(tmp_path / "silent", "third", aoa_config=statements, **flags)
    for each in (again, silent):  # what the model says; or else what it is given
        each.train(resume_from_checkpoint=str(source))
        for name, tensor in each.model.state_dict().items():
            assert np.array_equal(tensor.astype("float32").numpy(), weights[name]), name


def test_an_export_that_the_model_cannot_tell_is_refused_before_the_training(tmp_path):
    trainer = make_trainer(tmp_path / "a", flex_export_hf=True)
    with pytest.raises(ValidationError, match="does not say how Hugging Face's weights become its own"):
        trainer.train()
    trainer = speaking(
        make_trainer(tmp_path / "b", flex_export_hf=True),
        gen_aoa_statements=lambda self, config=None: ["hf.0,hf.1 -> up.weight, axis=0"],
    )
    with pytest.raises(AoaError, match="reversed, take shapes from a destination, and an export has none"):
        trainer.train()
    assert not list(tmp_path.glob("*/checkpoint-*"))
