"""The axes along which a library's parameters are split, and those along which several are fused.

Rules for classes of layers are in a registry, by the qualified name of the class. So a rule can be registered for a
class whose module nobody has imported yet, and finding one imports nothing.

Parameters that are fused side by side on every rank are known in three ways. ``_get_tensor_parallel_mappings`` of
PaddleNLP's models has a function that splits each whole parameter: ``is_naive_2fuse`` gives every rank its parts of
two that are fused, ``is_naive_3fuse`` of three. A plain split (grouped q, k and v too) is the same under every degree.
A table has the parameters that the mappings lack or name otherwise. For PaddleFormers' models, AOA statements from
Hugging Face's weights are used: ``fused_ffn`` or ``fused_qkv_old`` makes a parameter whose parts every rank holds side
by side; with ``fused_qkv`` they are in the order of the key and value heads.
Tested in tests/trainer/test_model_rules_unit.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

from paddle_flexckpt.parallel.layers import own_state
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedStateDict, ShardedWeight

Axes = Mapping[str, Union[int, FusedAxis]]
# The axes by the name of the layer's own parameter; or a function that is given the layer and returns them.
ModelRule = Union[Axes, Callable[[Any], Axes]]

_RULES: dict[str, ModelRule] = {}
_TRANSFORMERS = "paddlenlp.transformers"
# Heads that hold a part of the vocabulary under tensor parallelism, or are tied to an embedding that does.
VOCABULARY_HEADS = (
    f"{_TRANSFORMERS}.bloom.modeling.BloomLMHead",
    f"{_TRANSFORMERS}.chatglm.modeling.ChatGLMHead",
    f"{_TRANSFORMERS}.chatglm_v2.modeling.Chatglmv2LMHead",
    f"{_TRANSFORMERS}.deepseek_v2.modeling.DeepseekV2LMHead",
    f"{_TRANSFORMERS}.gpt.modeling.GPTLMHead",
    f"{_TRANSFORMERS}.jamba.modeling.JambaLMHead",
    f"{_TRANSFORMERS}.llama.modeling.LlamaLMHead",
    f"{_TRANSFORMERS}.mistral.modeling.MistralLMHead",
    f"{_TRANSFORMERS}.mixtral.modeling.MixtralLMHead",
    f"{_TRANSFORMERS}.opt.modeling.OPTLMHead",
    f"{_TRANSFORMERS}.qwen.modeling.QWenLMHead",
    f"{_TRANSFORMERS}.qwen2.modeling.Qwen2LMHead",
    f"{_TRANSFORMERS}.qwen2_moe.modeling.Qwen2MoeLMHead",
)
# In which axis the outputs of a linear layer run, by the parameter's name; None: those of its last axis.
_OUTPUTS: Mapping[str, int | None] = {"weight": None, "bias": 0, "lora_B": None, "quant_weight": 0, "quant_scale": 0}
_FFN, _QKV = "fused_ffn", "fused_qkv_old"
# The parameter that a statement makes, by its name within a layer of the model.
_TARGET = re.compile(r"layers\.(?:\$LAYER_ID|\d+)\.(?P<path>.+)\.(?:weight|bias)$")


def register_model_rule(layer_class: type | str, rule: ModelRule) -> None:
    """Register the axes along which tensor parallelism splits a layer's own parameters, for a class of another library.

    The rule holds for subclasses too, unless they or a class between have a rule of their own here or a
    ``_get_shard_rules()``. A later rule for the same class replaces an earlier one.

    Args:
        layer_class: The class, or ``"package.module.Class"``; then nothing is imported.
        rule: ``{name of the parameter: axis}``, with a :class:`FusedAxis` for one that fuses several; or a function
            that is given the layer and returns that. Parameters that it does not name are not split, or tell their
            ``split_axis``.

    Raises:
        TypeError: The class or the rule is none.
    """
    if not isinstance(layer_class, type) and not (isinstance(layer_class, str) and "." in layer_class):
        raise TypeError(f"layer_class has to be a class, or its name with its module; got {layer_class!r}")
    if not callable(rule) and not isinstance(rule, Mapping):
        raise TypeError(f"rule has to be a dict of axes, or a function that gives one; got {rule!r}")
    _RULES[layer_class if isinstance(layer_class, str) else qualified_name(layer_class)] = rule


def unregister_model_rule(layer_class: type | str) -> None:
    """Remove a rule; without it, do nothing."""
    _RULES.pop(layer_class if isinstance(layer_class, str) else qualified_name(layer_class), None)


def qualified_name(layer_class: type) -> str:
    """Return ``package.module.Class``."""
    return f"{layer_class.__module__}.{layer_class.__qualname__}"


def registered_axes(layer: Any, stop: type) -> dict[str, int | FusedAxis] | None:
    """Return the registered axes of a layer's own parameters.

    Args:
        layer: The layer.
        stop: The class whose ``_get_shard_rules`` every layer has, ``paddle.nn.Layer``.

    Returns:
        The axes; None where no rule is registered, or the layer itself or a class nearer to it than the rule's has a
        ``_get_shard_rules()``.

    Raises:
        TypeError: The rule's function returned something else.
    """
    if "_get_shard_rules" in vars(layer):
        return None
    for cls in type(layer).__mro__:
        if cls is stop:
            return None
        rule = _RULES.get(qualified_name(cls))
        if rule is not None:
            axes = rule(layer) if callable(rule) else rule
            if not isinstance(axes, Mapping):
                raise TypeError(f"the rule of {qualified_name(cls)} has to give a dict of axes; got {axes!r}")
            return dict(axes)
        if "_get_shard_rules" in vars(cls):
            return None
    return None


def vocabulary_axes(layer: Any) -> dict[str, int | FusedAxis]:
    """Return the axis of the vocabulary in a head's own parameters.

    The shape is ``[hidden, vocabulary part]`` or, tied or transposed, ``[vocabulary part, hidden]``. If both axes have
    the extent of a part, the first of these that exists decides: the head's ``transpose_y``, the parameter's
    ``split_axis``, the configuration's tied embeddings.

    Raises:
        ValueError: The shape fits neither.
    """
    transposed = getattr(layer, "transpose_y", None)
    return _axes(layer, None if transposed is None else int(not transposed))


def gemma_axes(layer: Any) -> dict[str, int | FusedAxis]:
    """Return the same as :func:`vocabulary_axes`, for a head whose ``split_axis`` is wrong if embeddings are tied."""
    return _axes(layer, 0 if layer.config.tie_word_embeddings else 1)


def _axes(layer: Any, preferred: int | None) -> dict[str, int | FusedAxis]:
    return {
        name: _vocabulary_axis(layer, name, tensor, preferred)
        for name, tensor in own_state(layer).items()
        if getattr(tensor, "is_distributed", False)
    }


def _vocabulary_axis(layer: Any, name: str, tensor: Any, preferred: int | None) -> int:
    shape = [int(extent) for extent in tensor.shape]
    config = layer.config
    vocabulary, degree = int(config.vocab_size), int(getattr(config, "tensor_parallel_degree", 1) or 1)
    fitting = [axis for axis, extent in enumerate(shape) if extent * degree == vocabulary]
    if not fitting:
        raise ValueError(
            f"{name} of {qualified_name(type(layer))} is marked is_distributed, and has the shape {shape}: expected "
            f"one axis of {vocabulary} (vocab_size) / {degree} (tensor_parallel_degree) elements. Remedy (FC801): "
            "choose a vocab_size that is a multiple of the degree, or say what is split with register_model_rule()"
        )
    if len(fitting) == 1:
        return fitting[0]
    if preferred is None:
        tied = name == "decoder_weight" or getattr(config, "tie_word_embeddings", False)
        preferred = getattr(tensor, "split_axis", 0 if tied else 1)
    return int(preferred)


def complete_rules(layer: Any, own: dict[str, Any], stop: type) -> dict[str, Any]:
    """Return the rules of a layer: the registry's, or else its own, and then those that its parameters have.

    Raises:
        ValueError: A ``split_axis`` is no axis.
    """
    registered = registered_axes(layer, stop)
    rules = dict(own if registered is None else registered)
    for name, tensor in own_state(layer).items():
        axis = getattr(tensor, "split_axis", None)
        if name in rules or axis is None or not getattr(tensor, "is_distributed", False):
            continue
        if not isinstance(axis, int) or not -len(tensor.shape) <= axis < len(tensor.shape):
            raise ValueError(
                f"{name} of {qualified_name(type(layer))} has split_axis {axis!r}, and the shape {list(tensor.shape)}. "
                "Remedy (FC801): say what is split with register_model_rule()"
            )
        rules[name] = axis
    return rules


def _sinks_axes(layer: Any) -> dict[str, int | FusedAxis]:
    """Return the axis of the sinks: every rank has those of its heads, and the model does not mark them."""
    return {"sinks": 0} if layer.config.tensor_model_parallel_size > 1 else {}


for _head in VOCABULARY_HEADS:
    register_model_rule(_head, vocabulary_axes)
register_model_rule(f"{_TRANSFORMERS}.gemma.modeling.GemmaLMHead", gemma_axes)
register_model_rule("paddleformers.transformers.gpt_oss.modeling.GptOssAttention", _sinks_axes)


@dataclass(frozen=True)
class FusedLayer:
    """A linear layer whose outputs are fused: its name, or the end of it, and the statement of its FusedAxis."""

    path: str
    statement: str | None


def fused_layers(model: Any) -> list[FusedLayer]:
    """Return the layers of a model whose outputs every rank holds side by side."""
    config = getattr(model, "config", None)
    layers = [FusedLayer("gate_up_fused_proj", _FFN), FusedLayer("up_gate_proj", _FFN)]
    if _is_of(model, "paddlenlp.transformers.chatglm_v2."):
        groups = int(config.multi_query_group_num)  # type: ignore[union-attr]
        layers.append(FusedLayer("self_attention.query_key_value", _qkv(config, groups)))
        layers.append(FusedLayer("mlp.dense_h_to_4h", _FFN))
        return layers
    for name, action in _mappings(model, config).items():
        flags = getattr(action, "keywords", {})
        path, _, parameter = name.rpartition(".")
        if parameter not in _OUTPUTS:
            continue
        if flags.get("is_naive_2fuse"):
            layers.append(FusedLayer(path, _FFN))
        elif flags.get("is_naive_3fuse"):
            layers.append(FusedLayer(path, _qkv(config, int(config.num_attention_heads))))  # type: ignore[union-attr]
        elif flags.get("is_old_qkv"):
            # One rank keeps q, k and v side by side, several ranks head by head: no statement knows both.
            layers.append(FusedLayer(path, None))
        elif flags.get("is_column", True) and not _is_plain(action):
            layers.append(FusedLayer(path, None))
    return list(dict.fromkeys([*layers, *_fused_by_statements(model)]))


def _fused_by_statements(model: Any) -> list[FusedLayer]:
    """Return the fused layers of a PaddleFormers or PaddleFleet model, by its hand-written AOA statements.

    These are from Hugging Face's weights. PaddleFleet attaches them to some models, which take precedence over those of
    the class.
    """
    # The method of other libraries' models may fail.
    method = getattr(model, "_gen_aoa_config", None) if _is_of(model, "paddleformers.", "paddlefleet.") else None
    if method is None:
        return []
    found: dict[str, str] = {}
    for statement in method(model.config)["aoa_statements"]:
        if _FFN not in statement and _QKV not in statement:
            continue
        target, *attributes = (part.strip() for part in statement.partition("->")[2].split(","))
        match = _TARGET.search(target)
        if match is None:
            continue
        if _FFN in attributes:
            found[match["path"]] = _FFN
        elif _QKV in attributes:
            heads = [each for each in attributes if each.startswith(("num_heads", "num_key_value_groups"))]
            found[match["path"]] = ", ".join([_QKV, *heads])
    return [FusedLayer(path, statement) for path, statement in found.items()]


def _is_of(model: Any, *packages: str) -> bool:
    """Return whether a model's class, or one that it is derived from, is of one of the packages."""
    return any(each.__module__.startswith(packages) for each in type(model).__mro__)


def _qkv(config: Any, groups: int) -> str:
    return f"{_QKV}, num_heads={int(config.num_attention_heads)}, num_key_value_groups={groups}"


def _mappings(model: Any, config: Any) -> Mapping[str, Any]:
    """Return the model's own functions that split whole parameters; empty if it has none."""
    method = getattr(type(model), "_get_tensor_parallel_mappings", None)
    if method is None or config is None or not _is_of(model, "paddlenlp."):
        return {}
    try:
        found: Mapping[str, Any] = method(config, is_split=True)
    except NotImplementedError:  # a model without tensor parallelism
        return {}
    return found


def _is_plain(action: Any) -> bool:
    """Return whether a split is one of the library's own, whose flags are known."""
    function = getattr(action, "func", action)
    return getattr(function, "__qualname__", "").startswith(
        ("get_tensor_parallel_split_func.", "get_tensor_parallel_merge_func.")
    )


def layer_of(layers: Mapping[str, FusedLayer], path: str) -> FusedLayer | None:
    """Return the fused layer of a path: the one whose own path is its longest end; None where there is none."""
    parts = path.split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    return next((layers[end] for end in ends if end in layers), None)


def mark_fused(model: Any, sharded: ShardedStateDict) -> None:
    """Give the shards of a model's fused parameters their :class:`FusedAxis`; a shard with a rule keeps it."""
    layers = {layer.path: layer for layer in reversed(fused_layers(model))}
    for key, weight in sharded.items():
        path, _, parameter = key.rpartition(".")
        if parameter not in _OUTPUTS or not isinstance(weight, ShardedWeight) or weight.fused is not None:
            continue
        layer = layer_of(layers, path)
        if layer is None:
            continue
        axis = _OUTPUTS[parameter]
        weight.fused = FusedAxis(len(weight.global_shape) - 1 if axis is None else axis, layer.statement)
