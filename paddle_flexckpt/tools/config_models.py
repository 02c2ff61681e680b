"""Describe a model by its ``config.json``, for families with model rules.

The tensors of the model's Hugging Face checkpoint follow from the configuration. The rules of the family map them to
the Paddle model's, which tensor parallelism cuts along the usual axes.

Tested in tests/tools/test_config_models.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_flexckpt.aoa import AoaError, TensorInfo
from paddle_flexckpt.aoa.model_rules import describe_model_rules, model_rules
from paddle_flexckpt.catalog import CatalogBuilder, ValidationError, dtype_of
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping

Shapes = Iterator[tuple[str, tuple[int, ...]]]
# The axis along which layers of a Paddle model cut their tensors, by name, for all families.
_CUTS: tuple[tuple[str, int | None], ...] = (
    ("*norm*", None),
    ("*embed_tokens.weight", 0),
    ("*embed_in.weight", 0),
    *((f"*.{name}.weight", 1) for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj")),
    *((f"*.{name}.weight", 1) for name in ("gate_proj", "up_proj", "up_gate_proj", "query_key_value")),
    *((f"*.{name}.bias", 0) for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")),
    *((f"*.{name}.bias", 0) for name in ("gate_proj", "up_proj", "up_gate_proj", "dense_h_to_4h")),
    *((f"*.{name}.weight", 0) for name in ("o_proj", "down_proj", "dense", "dense_4h_to_h")),
    ("*.dense_h_to_4h.weight", 1),
    ("*lm_head.weight", 1),
    ("*embed_out.weight", 1),
)
_HEADS = ("lm_head.weight", "embed_out.weight")
# Variants with stacked experts, which are cut otherwise, and with FP8, which only checkpoints have, are not described.
_VARIANTS = ("plain", "fused")
# A fused tensor has the place of its first part.
_FUSED = {".qkv_proj.": ".q_proj.", ".up_gate_proj.": ".gate_proj."}


def is_config(path: object) -> bool:
    """Return whether a path is a configuration, not a checkpoint."""
    return isinstance(path, (str, Path)) and str(path).endswith(".json")


@dataclass(frozen=True)
class ConfigModel:
    """The tensors of a Paddle model, from a configuration.

    Attributes:
        infos: Shape and dtype by name.
        cuts: Globs of names and the axis along which tensor parallelism usually cuts these.
        is_tied: Whether the embedding is the head too; then the model has only the embedding's name.
        is_half: Whether parameters are in half precision.
        note: Assumptions, as text.
    """

    infos: dict[str, TensorInfo]
    cuts: tuple[tuple[str, int | None], ...]
    is_tied: bool
    is_half: bool
    note: str


def read_config_model(path: str | Path, variant: str = "plain") -> ConfigModel:
    """Describe the Paddle model of a configuration.

    Args:
        path: The ``config.json``.
        variant: What the Paddle model fuses, as of :func:`~paddle_flexckpt.aoa.model_rules.model_rules`.

    Raises:
        ValidationError: The file is not a configuration, or its family or the variant is not known.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValidationError([f"cannot read the configuration {str(path)!r}: {error}"]) from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ValidationError(
            [
                f"{str(path)!r} has the model_type {family!r}, and shapes are known of {known}. Remedy (FC704): give a "
                "checkpoint"
            ]
        )
    if variant not in _VARIANTS:
        raise ValidationError([f"a model is described in the variants {', '.join(_VARIANTS)}; got {variant!r}"])
    sizes, dtype = _Sizes(config, str(path)), str(config.get("torch_dtype") or config.get("dtype") or "float32")
    builder = CatalogBuilder(0)
    for name, shape in _FAMILIES[family](sizes):
        builder.add(name, dtype_of(dtype).name, shape, (0,) * len(shape), shape)
    stored, tied = builder.build(), sizes.has("tie_word_embeddings")
    made = tensor_infos(stored, whole_mapping(_rules(family, sizes, variant), stored))
    place = {name: number for number, name in enumerate(stored.keys)}
    names = sorted(made, key=lambda name: place[functools.reduce(lambda a, b: a.replace(*b), _FUSED.items(), name)])
    infos = {name: made[name] for name in names if not (tied and name in _HEADS)}
    note = f"the model is that of {family}, variant {variant}, in {dtype}, as {Path(path).name} says"
    return ConfigModel(infos, _CUTS, tied, dtype in ("float16", "bfloat16"), note)


def _rules(family: str, sizes: _Sizes, variant: str) -> dict[str, list[str]]:
    """Return the statements of a family, with its parameters from a configuration."""
    known = describe_model_rules(family)["parameters"]
    getters: dict[str, Callable[[], Any]] = {
        "num_heads": lambda: sizes["num_attention_heads"],
        "num_key_value_groups": lambda: sizes.get("num_key_value_heads", sizes["num_attention_heads"]),
        "num_experts": lambda: sizes.experts,
        "num_layers": lambda: sizes["num_hidden_layers"],
    }
    given = {name: getter() for name, getter in getters.items() if name in known}
    if not sizes.experts:
        given.pop("num_experts", None)
    try:
        return model_rules(family, variant, **given)
    except AoaError as error:
        raise ValidationError([str(error)]) from None


class _Sizes:
    """The numbers of a configuration."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._config, self._path = config, path

    def __getitem__(self, name: str) -> int:
        """Return a number."""
        value = self._config.get(name)
        if type(value) is not int or value < 0:
            raise ValidationError([f"{self._path!r} has to say {name}, a whole number; got {value!r}"])
        return value

    def get(self, name: str, default: int) -> int:
        """Return a number; a default if it is missing."""
        return default if self._config.get(name) is None else self[name]

    def has(self, name: str, default: bool = False) -> bool:
        """Return whether a switch is on."""
        return bool(self._config.get(name, default))

    def numbers(self, name: str) -> list[int]:
        """Return a list of numbers; empty if it is missing."""
        return list(self._config.get(name) or ())

    @property
    def experts(self) -> int:
        """Return the number of routed experts of a layer; 0 if there are none."""
        return next((self[name] for name in ("n_routed_experts", "num_experts") if self._config.get(name)), 0)


def _decoder(
    sizes: _Sizes, attention: Callable[[_Sizes, str], Shapes], mlp: Callable[[_Sizes, str, int], Shapes]
) -> Shapes:
    """Yield the tensors of a Llama-like decoder."""
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(sizes["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield from attention(sizes, f"{name}.self_attn")
        yield from mlp(sizes, f"{name}.mlp", layer)
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _attention(norms: bool, qkv_bias: str | bool, o_bias: str | bool) -> Callable[[_Sizes, str], Shapes]:
    """Return the tensors of attention with q, k and v; a bias is a bool, or the configuration's switch for it."""

    def shapes(sizes: _Sizes, name: str) -> Shapes:
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        groups = sizes.get("num_key_value_heads", heads)
        width = sizes.get("head_dim", hidden // max(heads, 1))
        inner, outer = (each if isinstance(each, bool) else sizes.has(each) for each in (qkv_bias, o_bias))
        yield from _linear(f"{name}.q_proj", heads * width, hidden, inner)
        yield from _linear(f"{name}.k_proj", groups * width, hidden, inner)
        yield from _linear(f"{name}.v_proj", groups * width, hidden, inner)
        yield from _linear(f"{name}.o_proj", hidden, heads * width, outer)
        if norms:
            yield f"{name}.q_norm.weight", (width,)
            yield f"{name}.k_norm.weight", (width,)

    return shapes


def _latent_attention(sizes: _Sizes, name: str) -> Shapes:
    """Yield multi-head latent attention."""
    hidden, heads, rank = sizes["hidden_size"], sizes["num_attention_heads"], sizes["kv_lora_rank"]
    rope, nope, value = sizes["qk_rope_head_dim"], sizes["qk_nope_head_dim"], sizes["v_head_dim"]
    low = sizes.get("q_lora_rank", 0)
    if low:
        yield f"{name}.q_a_proj.weight", (low, hidden)
        yield f"{name}.q_a_layernorm.weight", (low,)
        yield f"{name}.q_b_proj.weight", (heads * (nope + rope), low)
    else:
        yield f"{name}.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{name}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{name}.kv_a_layernorm.weight", (rank,)
    yield f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{name}.o_proj.weight", (hidden, heads * value)


def _gated(name: str, hidden: int, inner: int, bias: bool = False) -> Shapes:
    yield from _linear(f"{name}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{name}.up_proj", inner, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias)


def _dense(bias: str) -> Callable[[_Sizes, str, int], Shapes]:
    return lambda sizes, name, _: _gated(name, sizes["hidden_size"], sizes["intermediate_size"], sizes.has(bias))


def _qwen_experts(sizes: _Sizes, name: str, layer: int) -> Shapes:
    hidden, count = sizes["hidden_size"], sizes.experts
    if not count or layer in sizes.numbers("mlp_only_layers") or (layer + 1) % sizes.get("decoder_sparse_step", 1):
        yield from _gated(name, hidden, sizes["intermediate_size"])
        return
    yield f"{name}.gate.weight", (count, hidden)
    for number in range(count):
        yield from _gated(f"{name}.experts.{number}", hidden, sizes["moe_intermediate_size"])
    shared = sizes.get("shared_expert_intermediate_size", 0)
    if shared:
        yield from _gated(f"{name}.shared_expert", hidden, shared)
        yield f"{name}.shared_expert_gate.weight", (1, hidden)


def _deepseek_experts(sizes: _Sizes, name: str, layer: int) -> Shapes:
    hidden, count = sizes["hidden_size"], sizes.experts
    if layer < sizes.get("first_k_dense_replace", 0) or layer % sizes.get("moe_layer_freq", 1):
        yield from _gated(name, hidden, sizes["intermediate_size"])
        return
    inner, shared = sizes["moe_intermediate_size"], sizes.get("n_shared_experts", 0)
    yield f"{name}.gate.weight", (count, hidden)
    yield f"{name}.gate.e_score_correction_bias", (count,)
    for number in range(count):
        yield from _gated(f"{name}.experts.{number}", hidden, inner)
    if shared:
        yield from _gated(f"{name}.shared_experts", hidden, inner * shared)


def _deepseek(sizes: _Sizes) -> Shapes:
    if sizes.get("num_nextn_predict_layers", 0):
        raise ValidationError(
            [
                "multi-token prediction layers are not described. Remedy (FC704): give a copy of the configuration "
                "with num_nextn_predict_layers 0, which describes the model without them; or a checkpoint of the model"
            ]
        )
    yield from _decoder(sizes, _latent_attention, _deepseek_experts)


def _gpt_neox(sizes: _Sizes) -> Shapes:
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    yield "gpt_neox.embed_in.weight", (vocabulary, hidden)
    for layer in range(sizes["num_hidden_layers"]):
        name, bias = f"gpt_neox.layers.{layer}", sizes.has("attention_bias", True)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", (hidden,)
            yield f"{name}.{norm}.bias", (hidden,)
        yield from _linear(f"{name}.attention.query_key_value", 3 * hidden, hidden, bias)
        yield from _linear(f"{name}.attention.dense", hidden, hidden, bias)
        yield from _linear(f"{name}.mlp.dense_h_to_4h", sizes["intermediate_size"], hidden, True)
        yield from _linear(f"{name}.mlp.dense_4h_to_h", hidden, sizes["intermediate_size"], True)
    yield "gpt_neox.final_layer_norm.weight", (hidden,)
    yield "gpt_neox.final_layer_norm.bias", (hidden,)
    yield "embed_out.weight", (vocabulary, hidden)


_FAMILIES: dict[str, Callable[[_Sizes], Shapes]] = {
    "llama": lambda sizes: _decoder(sizes, _attention(False, "attention_bias", "attention_bias"), _dense("mlp_bias")),
    "qwen2": lambda sizes: _decoder(sizes, _attention(False, True, False), _dense("")),
    "qwen3": lambda sizes: _decoder(sizes, _attention(True, "attention_bias", "attention_bias"), _dense("")),
    "qwen2_moe": lambda sizes: _decoder(sizes, _attention(False, True, False), _qwen_experts),
    "qwen3_moe": lambda sizes: _decoder(sizes, _attention(True, "attention_bias", "attention_bias"), _qwen_experts),
    "ernie4_5": lambda sizes: _decoder(sizes, _attention(False, "use_bias", "use_bias"), _dense("use_bias")),
    "deepseek_v3": _deepseek,
    "gpt_neox": _gpt_neox,
}
