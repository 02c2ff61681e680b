"""Remedies about the rules of model libraries, each provoked and followed with imitations of their models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import SharedLayerDesc

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.aoa_statements import gen_aoa_statements
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.trainer.model_rules import (
    aoa_config_of,
    export_config_of,
    hf_rules,
    register_model_rule,
    register_shared_attribute,
    unregister_model_rule,
)
from paddle_flexckpt.trainer.model_rules.axes import complete_rules, qualified_name, vocabulary_axes
from paddle_flexckpt.trainer.model_rules.library_models import pipeline_names
from tests.parallel.conftest import installed  # noqa: F401 - each test runs with the mixins
from tests.remedies.following import provoked
from tests.trainer.test_live_rules import FIVE, HandWritten, Model, Rank, Root, context_module

WEIGHT, BIAS = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(2, dtype=np.float32)


class Own(nn.Layer):
    """A model of somebody else's, whose class says nothing of Hugging Face."""

    config = SimpleNamespace()

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)


@pytest.fixture
def hugging_face(tmp_path):
    fc.save_state_dict({"fc.weight": WEIGHT.T.copy(), "fc.bias": BIAS}, tmp_path / "hf")
    return tmp_path / "hf"


def follow_by_statements(path):
    """Load by statements of one's own, by those of a model, and by the rules of a family."""
    written = {"aoa_statements": ["fc.weight^T -> fc.weight"]}
    for config in (written, {"aoa_statements": gen_aoa_statements(Own())}):
        model = Own()
        fc.load_state_dict(model.sharded_state_dict(), path, aoa_config=config, strict=True)
        assert (model.fc.weight.numpy().tolist(), model.fc.bias.numpy().tolist()) == (WEIGHT.tolist(), BIAS.tolist())
    assert "aoa_statements" in fc.model_rules("llama", num_heads=4)


def test_a_table_that_does_not_say_how_names_correspond(hugging_face):
    with provoked("trainer/model_rules/hf.py", "write the AOA statements yourself (paddle_flexckpt.model_rules has"):
        hf_rules(Own, Own.config)
    follow_by_statements(hugging_face)


def test_a_model_that_says_nothing(hugging_face):
    class Wrapped(nn.Layer):
        config = Own.config

    wrapper = Wrapped()
    wrapper.model = HandWritten()
    with provoked("trainer/model_rules/live.py", "pass the model itself where this is a wrapper; or write the AOA"):
        aoa_config_of(wrapper)
    assert aoa_config_of(wrapper.model)["aoa_statements"]
    with provoked("trainer/model_rules/live.py", "pass the model itself where this is a wrapper; or write the AOA"):
        aoa_config_of(Own())
    follow_by_statements(hugging_face)


def test_ranks_with_models_of_different_classes():
    model = Model()
    model._gen_aoa_config = lambda config: {"aoa_statements": ["a -> w"]}
    models = [Rank(["a -> w"]), model]
    with provoked("trainer/model_rules/live.py", "build the model by the same class on all ranks"):
        SimulatedWorld(2).run(lambda comm: aoa_config_of(models[comm.rank], process_group=comm))
    models = [Rank(["a -> w"]), Rank(["a -> w"])]
    found = SimulatedWorld(2).run(lambda comm: aoa_config_of(models[comm.rank], process_group=comm))
    assert found == [{"aoa_statements": ["a -> w"]}] * 2


class Answering(Root):
    def _gen_aoa_config(self, config):
        return {"aoa_statements": ["a -> w"]}


def test_a_paddle_without_the_context_or_with_another_one(monkeypatch):
    with provoked("trainer/model_rules/live.py", "install a version of Paddle that has it, or give the model a method"):
        aoa_config_of(Root())
    assert aoa_config_of(Answering()) == {"aoa_statements": ["a -> w"]}
    context_module(monkeypatch, *FIVE, "tower")
    with provoked("trainer/model_rules/live.py", "give the model a method ") as caught:
        aoa_config_of(Root())
    assert str(caught.value).endswith("Remedy (FC808): give the model a method _gen_aoa_config(config)")
    assert aoa_config_of(Answering()) == {"aoa_statements": ["a -> w"]}
    context_module(monkeypatch, *FIVE)  # the version that has it
    assert len(aoa_config_of(Root())["aoa_statements"]) == 2


class Joined(Model):
    text = "hf.0, hf.1 -> up, axis=0"

    def gen_aoa_statements(self, config=None):
        return [self.text]


class Sized(Joined):
    text = 'hf.0, hf.1 -> up, axis=0, sizes="[1, 2]"'


class Told(Joined):
    def _gen_inv_aoa_config(self, config):
        return {"aoa_statements": ['up -> hf.0, hf.1, axis=0, sizes="[1, 2]"']}


def test_statements_that_do_not_tell_the_way_back(tmp_path):
    with provoked("trainer/model_rules/live.py", "(config), or the joins among its statements sizes="):
        export_config_of(Joined())
    fc.save_state_dict({"up": WEIGHT}, tmp_path / "native")
    for model in (Sized(), Told()):
        output = tmp_path / type(model).__name__
        fc.export_safetensors(tmp_path / "native", output, export_config_of(model))
        found = fc.load_merged_state_dict(output)
        assert {key: value.numpy().tolist() for key, value in found.items()} == {
            "hf.0": WEIGHT[:1].tolist(),
            "hf.1": WEIGHT[1:].tolist(),
        }


class Head(nn.Layer):
    """The half of a head that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([8, 16])
        self.weight.is_distributed = True


@pytest.fixture
def rule():
    yield register_model_rule
    unregister_model_rule(Head)


def test_a_vocabulary_that_the_degree_does_not_divide(rule):
    head = Head()
    rule(qualified_name(Head), vocabulary_axes)
    head.config = SimpleNamespace(vocab_size=33, tensor_parallel_degree=2)
    with provoked("trainer/model_rules/axes.py", "choose a vocab_size that is a multiple of the degree, or say what"):
        complete_rules(head, {}, nn.Layer)
    head.config.vocab_size = 32
    assert complete_rules(head, {}, nn.Layer) == {"weight": 1}
    head.config.vocab_size = 33
    rule(Head, {"weight": 1})
    assert complete_rules(head, {}, nn.Layer) == {"weight": 1}


def test_a_split_axis_that_is_none(rule):
    head = Head()
    head.weight.split_axis = 2
    with provoked("trainer/model_rules/axes.py", "say what is split with register_model_rule()"):
        complete_rules(head, {}, nn.Layer)
    rule(Head, {"weight": 0})
    assert complete_rules(head, {}, nn.Layer) == {"weight": 0}


def test_a_property_by_which_stages_share_a_weight():
    class OwnEmbedding(nn.Layer):
        @property
        def shared(self):
            return self.table

    desc = SharedLayerDesc("emb", OwnEmbedding, shared_weight_attr="shared")
    pipeline = SimpleNamespace(_layers_desc=[desc], get_sequential_name_prefixes=lambda: {"0": "model"})
    with provoked(
        "trainer/model_rules/library_models.py", "paddle_flexckpt.trainer.model_rules.register_shared_attribute("
    ):
        pipeline_names(pipeline)
    register_shared_attribute("OwnEmbedding", "shared", "table")
    assert pipeline_names(pipeline)["0.shared"] == "model.table"
