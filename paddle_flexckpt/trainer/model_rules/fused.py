"""The parameters of a library's model that fuse several side by side on every rank.

``_get_tensor_parallel_mappings`` of PaddleNLP's models has a function that splits each whole parameter:
``is_naive_2fuse`` gives every rank its parts of two that are fused, ``is_naive_3fuse`` of three. A plain split (grouped
q, k and v too) is the same under every degree. A table has the parameters that the mappings lack or name otherwise.
For PaddleFormers' models, AOA statements from Hugging Face's weights are used: ``fused_ffn`` or ``fused_qkv_old`` makes
a parameter whose parts every rank holds side by side; with ``fused_qkv`` they are in the order of the key and value
heads.
Tested in tests/trainer/test_model_rules_unit.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.sharded_weight import FusedAxis, ShardedStateDict, ShardedWeight

# In which axis the outputs of a linear layer run, by the parameter's name; None: those of its last axis.
_OUTPUTS: Mapping[str, int | None] = {"weight": None, "bias": 0, "lora_B": None, "quant_weight": 0, "quant_scale": 0}
_FFN, _QKV = "fused_ffn", "fused_qkv_old"
# The parameter that a statement makes, by its name within a layer of the model.
_TARGET = re.compile(r"layers\.(?:\$LAYER_ID|\d+)\.(?P<path>.+)\.(?:weight|bias)$")


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
