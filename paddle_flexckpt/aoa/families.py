"""Make the rules of a family of models from the layers that its tensors belong to.

``families.json`` has the tensors of a small model of each family by their names in Hugging Face's files, with ``#`` for
the numbers of layers and experts: ``[kind, shape, numbers]``. The kind follows from the layer's class:

- ``linear``: the weight of a linear layer, which Paddle holds transposed;
- ``router``: the weight of a router of experts, which some models of Paddle hold transposed;
- ``copy``: everything else.

``python tests/aoa/family_names.py`` makes the file from the classes of the library transformers, and from tables of
what transformers lacks. Tested in tests/aoa/test_families.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

_HEAD = "lm_head.weight"
_VOCABULARY, _HEADS, _GROUPS = 14, 4, 2  # of the small models
_PARAMETERS: Mapping[str, dict[str, Any]] = {
    "prefix": {"description": "What the names of the Paddle model's body begin with, with its dot.", "type": "name"},
    "num_heads": {"description": "Number of attention heads.", "type": "integer"},
    "num_key_value_groups": {
        "description": "Number of key-value heads (num_key_value_heads of the configuration).",
        "type": "integer",
    },
    "num_experts": {"description": "Number of routed experts of a layer.", "type": "integer"},
    "router": {
        "description": "Layout of a router's weight: experts_first is [experts, hidden], linear is [hidden, experts].",
        "type": "choice",
        "texts": {"experts_first": "", "linear": "^T"},
        "default": "experts_first",
    },
    "tied": {
        "description": "Whether lm_head.weight is the word embedding (tie_word_embeddings of the configuration).",
        "type": "boolean",
        "default": False,
    },
    "lm_head": {
        "description": "Layout of an lm_head.weight of its own: linear is [hidden, vocabulary], embedding is "
        "[vocabulary, hidden], as PaddleFormers has it.",
        "type": "choice",
        "texts": {"linear": "^T", "embedding": ""},
        "default": "linear",
    },
    "dtype": {"description": "What dequantized weights are rounded to.", "type": "text", "default": "bfloat16"},
}
# Names in a family's files, and what transformers calls them.
_ALSO_CALLED = {"ernie4_5_vl_moe": ("vision_model.", "model.vision_model.")}
# Families whose files may have the experts of a layer in MXFP4: blocks [experts, outputs, groups, 16] and scales.
_IN_MXFP4 = frozenset({"gpt_oss"})
_VARIANTS = {
    "plain": "As in the HF checkpoint, linear weights transposed.",
    "fused": "q, k and v fused group by group (fused_qkv), gate and up fused (fused_ffn).",
    "stacked": "As fused, with the experts of a layer stacked: grouped_gemm_experts.weight1 [experts, hidden, "
    "2 * intermediate] (gate, then up) and weight2 [experts, intermediate, hidden].",
    "mxfp4": "As plain, from experts in MXFP4 (_blocks and _scales); the way back gives weights in the Paddle model's "
    "dtype, without scales.",
}


@functools.lru_cache(maxsize=1)
def small_models() -> Mapping[str, Any]:
    """Return the tensors of a small model of each family, as ``families.json`` has them."""
    text = resources.files("paddle_flexckpt.aoa").joinpath("families.json").read_text(encoding="utf-8")
    models: dict[str, Any] = json.loads(text)
    return models


def family_rules(name: str) -> dict[str, Any]:
    """Return the rules of a family of :func:`small_models`, in the form of a file of rules."""
    model = small_models()[name]
    found = {_with_macros(key): (kind, shape) for key, (kind, shape, _) in model["tensors"].items()}
    embedding = next(key for key, (kind, shape) in found.items() if kind == "copy" and shape[0] == _VOCABULARY)
    prefix = f"{embedding.partition('.')[0]}."
    packed = [key for key, (_, shape) in found.items() if name in _IN_MXFP4 and len(shape) == 3]
    blocks = _blocks(found, embedding, prefix, packed)
    blocks["aliases"] = _aliases(name, found)
    blocks = {block: spec for block, spec in blocks.items() if spec["aoa_statements"]}
    # A name that other statements read is assigned after they have read it.
    variants = {"plain": ["tied_head", "body", "packed", "split", "experts", "head"]}
    if "fused" in blocks or "fused_experts" in blocks:
        variants["fused"] = ["tied_head", "body", "packed", "fused", "fused_experts", "head"]
    if "stacked_experts" in blocks:
        variants["stacked"] = ["tied_head", "body", "fused", "stacked_experts", "head"]
    for used in variants.values():
        used.insert(0, "aliases")
    if packed:
        variants["mxfp4"] = ["tied_head", "body", "mxfp4", "split", "head"]
    text = json.dumps(blocks)
    return {
        "name": name,
        "description": f"Models of the class {model['class']} and those with the same names.",
        "parameters": {
            key: {**spec, "default": prefix} if key == "prefix" else spec
            for key, spec in _PARAMETERS.items()
            if f"{{{key}}}" in text or f"{{{key}*" in text or f'{{"{key}":' in text
        },
        "blocks": blocks,
        "variants": {
            variant: {"description": _VARIANTS[variant], "blocks": [block for block in used if block in blocks]}
            for variant, used in variants.items()
        },
    }


def _blocks(found: Mapping[str, Any], embedding: str, prefix: str, packed: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the blocks of statements; those that a family does not need are empty."""

    def paddle(key: str) -> str:
        return f"{{prefix}}{key[len(prefix) :]}" if key.startswith(prefix) else key

    attention = [path for path in _parents(found, "qkv") if _is_grouped(path, found)]
    gated = _parents(found, ("gate", "up"))
    experts = [path[: -len(".$EXPERT_ID")] for path in gated if path.endswith(".experts.$EXPERT_ID")]
    joined = {f"{path}.{part}_proj" for path in attention for part in "qkv"}
    joined |= {f"{path}.{part}_proj" for path in gated for part in ("gate", "up")}
    texts: dict[str, list[str]] = {
        block: [] for block in ("body", "packed", "split", "fused", "experts", "fused_experts")
    }
    for key, (kind, _) in found.items():
        path, _, leaf = key.rpartition(".")
        if path != "lm_head" and (leaf != "bias" or found.get(f"{path}.weight", _NONE)[0] != "linear"):
            made = [f"{key}{_TRANSPOSED[kind]} -> {paddle(key)}, optional"]
            if kind == "linear":
                made.append(f"{path}.bias -> {paddle(path)}.bias, optional")
            of_expert = any(key.startswith(f"{parent}.$EXPERT_ID.") for parent in experts)
            rest = "packed" if key in packed else "split" if path in joined else "body"
            texts["experts" if of_expert else rest] += made
            if of_expert and path not in joined:
                texts["fused_experts"] += made
    for path in attention:
        texts["fused"] += _fused([f"{path}.{part}_proj" for part in "qkv"], f"{paddle(path)}.qkv_proj", _QKV)
    for path in gated:
        parts = [f"{path}.{part}_proj" for part in ("gate", "up")]
        block = "fused_experts" if path.endswith(".$EXPERT_ID") else "fused"
        texts[block] += _fused(parts, f"{paddle(path)}.up_gate_proj", "fused_ffn")
    blocks: dict[str, dict[str, Any]] = {
        block: {"aoa_statements": made, "to_hf": "invert"} for block, made in texts.items()
    }
    quantized = [
        f'{key}_blocks, {key}_scales -> {paddle(key)}, dequant="mxfp4", permute="[0, 2, 1]", dtype="{{dtype}}"'
        for key in packed
    ]
    blocks["mxfp4"] = {"aoa_statements": quantized, "to_hf": "packed"}
    blocks["stacked_experts"] = _stacked(experts, paddle)
    if _HEAD in found:
        head = [f"{_HEAD}{{lm_head}} -> {_HEAD}", "lm_head.bias -> lm_head.bias, optional"]
        blocks["head"] = {"when": {"tied": False}, "aoa_statements": head, "to_hf": "invert"}
        tied = [f"{embedding} -> {_HEAD}"]
        blocks["tied_head"] = {"when": {"tied": True}, "aoa_statements": tied, "to_hf": [f"{_HEAD} -> _, optional"]}
    return blocks


def _aliases(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block of statements that rename tensors of some files; the way back gives the new names."""
    alias, written = _ALSO_CALLED.get(name, ("", ""))
    keys = [key for key in found if alias and key.startswith(written)]
    texts = [f"{alias}{key[len(written) :]} -> {key}, optional" for key in keys]
    return {"aoa_statements": texts, "to_hf": []}


_NONE = ("", ())
_TRANSPOSED = {"linear": "^T", "router": "{router}", "copy": ""}
_QKV = "fused_qkv, num_heads={num_heads}, num_key_value_groups={num_key_value_groups}"


def _with_macros(key: str) -> str:
    return key.replace(".experts.#.", ".experts.$EXPERT_ID.").replace(".#.", ".$LAYER_ID.")


def _parents(found: Mapping[str, Any], parts: Iterable[str]) -> list[str]:
    """Return the paths in a decoder's layers below which there are linear layers of these names."""
    paths = dict.fromkeys(key.rpartition(".")[0].rpartition(".")[0] for key in found if ".layers.$LAYER_ID." in key)
    wanted = [f"{part}_proj.weight" for part in parts]
    return [path for path in paths if all(found.get(f"{path}.{name}", _NONE)[0] == "linear" for name in wanted)]


def _is_grouped(path: str, found: Mapping[str, Any]) -> bool:
    """Return whether the rows of q, k and v are heads and nothing else; those of a gate may stand among them."""
    rows = [found[f"{path}.{part}_proj.weight"][1][0] for part in "qkv"]
    return rows[1] == rows[2] and rows[0] in (rows[1], rows[1] * _HEADS // _GROUPS)


def _fused(parts: Sequence[str], whole: str, tag: str) -> list[str]:
    weights, biases = (", ".join(f"{part}.{leaf}" for part in parts) for leaf in ("weight^T", "bias"))
    return [f"{weights} -> {whole}.weight, {tag}, optional", f"{biases} -> {whole}.bias, {tag}, axis=0, optional"]


def _stacked(experts: Sequence[str], paddle: Callable[[str], str]) -> dict[str, Any]:
    """Return the block of statements that stack the experts of a layer."""
    there, back = [], []
    for path in experts:
        made = paddle(path)
        first, second = (f"{made.rpartition('.')[0]}.grouped_gemm_experts.weight{number}" for number in (1, 2))
        each = {part: f"{{num_experts*{path}.#.{part}_proj.weight%s}}" for part in ("gate", "up", "down")}
        there += [f"{each[part] % '^T'} -> {made}.{part}_proj, stack, axis=0, optional" for part in ("gate", "up")]
        there.append(f"{made}.gate_proj, {made}.up_proj -> {first}, axis=2, optional")
        there.append(f"{each['down'] % '^T'} -> {second}, stack, axis=0, optional")
        back.append(f"{first} -> {made}.gate_proj, {made}.up_proj, axis=2, optional")
        for part, source in (("gate", f"{made}.gate_proj"), ("up", f"{made}.up_proj"), ("down", second)):
            back.append(f'{source} -> {each[part] % ""}, unstack, axis=0, permute="[]", optional')
    return {"aoa_statements": there, "to_hf": back}
