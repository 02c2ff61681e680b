"""Rules of models without a model library: the registry, and what a model's tables say of fused parameters."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")
import paddle
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.sharded_weight import make_replicated_sharded_weight
from paddle_flexckpt.trainer.model_rules import register_model_rule, unregister_model_rule
from paddle_flexckpt.trainer.model_rules.axes import (
    complete_rules,
    fused_layers,
    gemma_axes,
    mark_fused,
    qualified_name,
    registered_axes,
    vocabulary_axes,
)


class Table(nn.Layer):
    """A layer of somebody else's."""

    def __init__(self, shape=(4, 3)):
        super().__init__()
        self.weight = self.create_parameter(list(shape))
        self.weight.is_distributed = True


class Child(Table):
    """Without anything of its own."""


class Says(Table):
    """Says itself what is cut."""

    def _get_shard_rules(self):
        return {"weight": 0}


@pytest.fixture
def rule():
    yield register_model_rule
    for layer_class in (Table, Child, Says):
        unregister_model_rule(layer_class)


def test_a_rule_is_found_by_name_and_for_subclasses(rule):
    rule(qualified_name(Table), {"weight": 1})
    assert registered_axes(Table(), nn.Layer) == registered_axes(Child(), nn.Layer) == {"weight": 1}
    rule(Child, lambda layer: {"weight": len(layer.weight.shape) - 2})
    assert registered_axes(Child(), nn.Layer) == {"weight": 0}
    assert registered_axes(nn.Linear(2, 2), nn.Layer) is None


def test_what_a_class_says_itself_goes_before_the_rule_of_a_class_behind_it(rule):
    rule(Table, {"weight": 1})
    assert registered_axes(Says(), nn.Layer) is None
    rule(Says, {"weight": 1})
    assert registered_axes(Says(), nn.Layer) == {"weight": 1}
    layer = Table()
    layer._get_shard_rules = lambda: {"weight": 0}
    assert registered_axes(layer, nn.Layer) is None


def test_rules_that_are_none_are_refused(rule):
    with pytest.raises(TypeError, match="layer_class has to be a class"):
        register_model_rule("Table", {"weight": 0})
    with pytest.raises(TypeError, match="rule has to be a dict of axes"):
        register_model_rule(Table, 0)
    rule(Table, lambda layer: 1)
    with pytest.raises(TypeError, match="has to give a dict of axes; got 1"):
        registered_axes(Table(), nn.Layer)


def test_split_axis_is_the_rule_of_what_has_no_other():
    layer = Table()
    assert complete_rules(layer, {}, nn.Layer) == {}
    layer.weight.split_axis = 1
    assert complete_rules(layer, {}, nn.Layer) == {"weight": 1}
    assert complete_rules(layer, {"weight": 0}, nn.Layer) == {"weight": 0}
    layer.weight.is_distributed = False
    assert complete_rules(layer, {}, nn.Layer) == {}


def test_a_split_axis_that_is_none_is_an_error():
    layer = Table()
    layer.weight.split_axis = 2
    with pytest.raises(ValueError, match=r"has split_axis 2, and the shape \[4, 3\]"):
        complete_rules(layer, {}, nn.Layer)


@pytest.mark.parametrize(
    ("shape", "attributes", "config", "axis"),
    [
        ((32, 8), {}, {}, 0),
        ((8, 32), {}, {}, 1),
        ((32, 8), {"transpose_y": False}, {}, 0),  # the shape says it
        ((32, 32), {"transpose_y": True}, {}, 0),
        ((32, 32), {"transpose_y": False}, {}, 1),
        ((32, 32), {}, {"tie_word_embeddings": True}, 0),
        ((32, 32), {}, {"tie_word_embeddings": False}, 1),
    ],
)
def test_the_axis_of_the_vocabulary(shape, attributes, config, axis):
    head = Table(shape)
    head.config = SimpleNamespace(vocab_size=64, tensor_parallel_degree=2, **config)
    for name, value in attributes.items():
        setattr(head, name, value)
    assert vocabulary_axes(head) == {"weight": axis}


def test_a_head_that_does_not_fit_its_configuration_is_an_error():
    head = Table((8, 16))
    head.config = SimpleNamespace(vocab_size=33, tensor_parallel_degree=2)
    with pytest.raises(ValueError, match=r"expected one axis of 33 \(vocab_size\) / 2"):
        vocabulary_axes(head)


def test_a_tied_head_of_gemma_has_its_vocabulary_first_whatever_it_says():
    head = Table((32, 32))
    head.weight.split_axis = 1
    head.config = SimpleNamespace(vocab_size=64, tensor_parallel_degree=2, tie_word_embeddings=True)
    assert gemma_axes(head) == {"weight": 0}


def get_tensor_parallel_split_func():
    """A function that passes for PaddleNLP's."""

    def fn(x, is_column=True, is_old_qkv=False, is_naive_2fuse=False, is_naive_3fuse=False):
        return x

    return fn


class Model:
    """A model with PaddleNLP's table."""

    config = SimpleNamespace(num_attention_heads=4)
    actions: dict = {}

    @classmethod
    def _get_tensor_parallel_mappings(cls, config, is_split=True):
        return cls.actions


Model.__module__ = "paddlenlp.transformers.made_up.modeling"


def test_what_the_tables_say_of_fused_parameters(monkeypatch):
    fn = get_tensor_parallel_split_func()
    actions = {
        "h.0.two.weight": partial(fn, is_naive_2fuse=True),
        "h.0.three.weight": partial(fn, is_naive_3fuse=True),
        "h.0.old.weight": partial(fn, is_old_qkv=True),
        "h.0.own.weight": lambda x: x,
        "h.0.plain.weight": partial(fn),
        "h.0.rows.weight": partial(fn, is_column=False),
    }
    monkeypatch.setattr(Model, "actions", actions)
    found = {layer.path: layer.statement for layer in fused_layers(Model())}
    heads = "fused_qkv_old, num_heads=4, num_key_value_groups=4"
    expected = {"h.0.two": "fused_ffn", "h.0.three": heads, "h.0.old": None, "h.0.own": None}
    assert expected.items() <= found.items()
    assert "h.0.plain" not in found and "h.0.rows" not in found

    keys = [f"base.{name}" for name in actions] + ["base.h.0.two.bias", "base.h.0.two.lora_A", "base.h.10.two.weight"]
    keys += ["base.h.7.mlp.gate_up_fused_proj.weight", "base.h.7.mlp.gate_up_fused_proj.lora_B"]
    tensors = {key: paddle.zeros([4] if key.endswith("bias") else [4, 4]) for key in keys}
    sharded = {key: make_replicated_sharded_weight(key, tensor) for key, tensor in tensors.items()}
    mark_fused(Model(), sharded)
    marks = {key: weight.fused for key, weight in sharded.items() if weight.fused is not None}
    assert marks == {
        "base.h.0.two.weight": fc.FusedAxis(1, "fused_ffn"),
        "base.h.0.two.bias": fc.FusedAxis(0, "fused_ffn"),
        "base.h.0.three.weight": fc.FusedAxis(1, heads),
        "base.h.0.old.weight": fc.FusedAxis(1, None),
        "base.h.0.own.weight": fc.FusedAxis(1, None),
        "base.h.7.mlp.gate_up_fused_proj.weight": fc.FusedAxis(1, "fused_ffn"),
        "base.h.7.mlp.gate_up_fused_proj.lora_B": fc.FusedAxis(1, "fused_ffn"),
    }


class Fuses(nn.Layer):
    """A model of PaddleFormers whose class says that gate and up are fused."""

    config = SimpleNamespace(num_attention_heads=4)

    @classmethod
    def _gen_aoa_config(cls, config):
        return {"aoa_statements": ["g^T, u^T -> model.layers.0.mlp.of_class.weight, fused_ffn"]}


Fuses.__module__ = "paddleformers.transformers.made_up.modeling"


class OfAScript(Fuses):
    """A class of a script's own, derived from the library's."""


def fused_paths(model):
    found = {layer.path: layer.statement for layer in fused_layers(model)}
    return {path: statement for path, statement in found.items() if path.startswith("mlp.")}


def test_statements_of_the_instance_go_before_those_of_its_class():
    qkv = "fused_qkv_old, num_heads=4, num_key_value_groups=2"
    model = Fuses()
    assert fused_paths(model) == {"mlp.of_class": "fused_ffn"}
    model._gen_aoa_config = lambda config: {
        "aoa_statements": [f"q^T -> model.layers.$LAYER_ID.mlp.of_instance.weight, {qkv}"]
    }
    assert fused_paths(model) == {"mlp.of_instance": qkv}
    model._gen_aoa_config = None  # as PaddleFleet has it of models whose layers say it
    assert fused_paths(model) == {}


def test_a_class_of_a_script_fuses_what_the_library_s_does():
    assert fused_paths(OfAScript()) == {"mlp.of_class": "fused_ffn"}


class ModelOfAScript(Model):
    """Likewise, of PaddleNLP."""


def test_a_class_of_a_script_has_the_library_s_table(monkeypatch):
    actions = {"h.0.mlp.two.weight": partial(get_tensor_parallel_split_func(), is_naive_2fuse=True)}
    monkeypatch.setattr(Model, "actions", actions)
    assert {layer.path for layer in fused_layers(ModelOfAScript())} > {"h.0.mlp.two"}


class Asks(Model):
    """As PaddleNLP's OPT, which asks the model inside for what it lacks, and that may not be there yet."""

    def __getattr__(self, name):
        raise RecursionError(name)


def test_a_model_of_tables_is_not_asked_for_statements():
    assert {layer.path for layer in fused_layers(Asks())} == {"gate_up_fused_proj", "up_gate_proj"}
