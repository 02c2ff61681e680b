"""Write the names, shapes and kinds of tensors that Hugging Face's models save: paddle_flexckpt/aoa/families.json.

Needs torch and transformers (of 5.23 the file is), but nothing of this library::

    python tests/aoa/family_names.py paddle_flexckpt/aoa/families.json

With ``written`` behind the file, it is those of the families whose rules are written by hand, for a test to compare.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

# Sizes of a small model, by what configurations call them.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 8),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "shared_intermediate_size"), 12),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 6),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_group", "topk_group"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_dt_rank", "time_step_rank"), 3),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "max_seq_len"), 10),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_d_state", "state_size"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    "vocab_size": 14,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "tie_word_embeddings": False,
    "layer_types": None,
    "mlp_layer_types": None,
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
}
# What else a model needs to be small, or to have all kinds of its layers.
_OWN: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bloom": {},
    "codegen": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": {},
    "dots1": {"n_shared_experts": 1},
    "exaone4": {},
    "falcon": {"new_decoder_architecture": False, "bias": True},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"n_shared_experts": 1, "attention_bias": True, "use_qk_norm": True},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_oss": {},
    "gptj": {},
    "granite": {},
    "granitemoe": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "llama4_text": {"moe_layers": [1], "interleave_moe_layer_step": 2, "intermediate_size_mlp": 12},
    "mamba": {},
    "minicpm3": {},
    "minimax_m2": {},
    "mixtral": {},
    "mpt": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {"qk_layernorm": True},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "phimoe": {},
    "qwen3_next": {"num_hidden_layers": 4, "full_attention_interval": 4},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {},
}
# Families whose rules are written by hand, likewise.
_WRITTEN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_shared_experts": 1},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {},
    "gpt_neox": {},
    "llama": {},
    "qwen2": {},
    "qwen2_moe": {"mlp_only_layers": [0], "decoder_sparse_step": 1},
    "qwen3": {},
    "qwen3_moe": {},
}
# Models of texts and images, and what else their part for texts needs.
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "glm4v": {},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
}
_ROUTERS = re.compile(r"\.(gate|router|router\.layer)\.weight$")
# A number that counts layers or experts, and what comes before it.
_NUMBER = re.compile(r"\b(layers|blocks|h|experts|deepstack_merger_list)\.(\d+)(?=\.)")


def _small(config_class: Any, own: dict[str, Any]) -> dict[str, Any]:
    base = config_class()
    fixed = {name for name in _SIZES if isinstance(getattr(config_class, name, None), property)}
    made = {name: value for name, value in _SIZES.items() if hasattr(base, name) and name not in fixed}
    for name, value in made.items():
        if isinstance(getattr(base, name), list) and isinstance(value, int):
            made[name] = [value] * len(getattr(base, name))
    return made | own


def _model(kind: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    config_class = type(AutoConfig.for_model(kind))
    if kind not in _WITH_IMAGES:
        return AutoModelForCausalLM.from_config(config_class(**_small(config_class, {**_WRITTEN, **_OWN}[kind])))
    text, images = (type(getattr(config_class(), part)) for part in ("text_config", "vision_config"))
    of_images = {name: value for name, value in _OF_IMAGES.items() if hasattr(images(), name)}
    parts = {"text_config": _small(text, _WITH_IMAGES[kind]), "vision_config": _small(images, of_images)}
    return AutoModelForImageTextToText.from_config(config_class(**parts, tie_word_embeddings=False))


_OF_IMAGES: dict[str, Any] = {
    **dict.fromkeys(("embed_dim", "hidden_size", "out_hidden_size"), 8),
    **dict.fromkeys(("depth", "num_heads", "num_position_embeddings", "patch_size", "temporal_patch_size"), 2),
    "intermediate_size": 12,
    "image_size": 4,
}


def _tensors(kind: str) -> dict[str, Any]:
    """Return shape, layer's kind and numbers of each tensor of a saved model by its name without numbers."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    model = _model(kind)
    kinds = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            linear = isinstance(module, torch.nn.Linear) and name == "weight"
            kinds[f"{path}.{name}"] = "linear" if linear else "copy"
    found: dict[str, Any] = {}
    for name, tensor in revert_weight_conversion(model, dict(model.state_dict())).items():
        made = kinds.get(name) or _kind_of_renamed(name, tensor.dim(), kinds)
        if _ROUTERS.search(name) and tuple(tensor.shape) == (_SIZES["num_experts"], _SIZES["hidden_size"]):
            made = "router"
        entry = found.setdefault(_NUMBER.sub(r"\1.#", name), [made, list(tensor.shape), []])
        if entry[:2] != [made, list(tensor.shape)]:
            raise ValueError(f"{kind}: {name} is {made} {list(tensor.shape)}, and others of its name are {entry[:2]}")
        entry[2].append([int(number) for _, number in _NUMBER.findall(name)])
    return {"class": type(model).__name__, "tensors": found}


def _kind_of_renamed(name: str, axes: int, kinds: dict[str, str]) -> str:
    """Return the kind of a tensor that the model calls otherwise: that of the names with the longest common end."""
    parts = name.split(".")
    for start in range(1, len(parts) - 1):
        found = {made for other, made in kinds.items() if other.endswith("." + ".".join(parts[start:]))}
        if len(found) == 1:
            return found.pop()
    # Of its own in files, whereas the model holds those of all experts in one tensor; or of a numbered sequence.
    return "linear" if axes == 2 and (".experts." in name or "_linear." in name) else "copy"


def _add_next_token_layers(families: dict[str, Any]) -> None:
    """Add the layers that predict further tokens, which transformers leaves out, as public files name them."""
    vocabulary, hidden = _SIZES["vocab_size"], _SIZES["hidden_size"]
    glm = families["glm4_moe"]["tensors"]
    for key, (_, _, numbers) in glm.items():
        if key.startswith("model.layers.#"):
            numbers += [[2, *number[1:]] for number in numbers if number[0] == 1]
    own = {
        "eh_proj.weight": ["linear", [hidden, 2 * hidden]],
        "enorm.weight": ["copy", [hidden]],
        "hnorm.weight": ["copy", [hidden]],
        "embed_tokens.weight": ["copy", [vocabulary, hidden]],
        "shared_head.norm.weight": ["copy", [hidden]],
        "shared_head.head.weight": ["linear", [vocabulary, hidden]],
    }
    glm |= {f"model.layers.#.{name}": [*entry, [[2]]] for name, entry in own.items()}
    qwen = families["qwen3_next"]["tensors"]
    for key, (kind, shape, numbers) in list(qwen.items()):
        # Of the kind of the last layer, which has full attention.
        last = [[0, *number[1:]] for number in numbers if number and number[0] == 3]
        if key.startswith("model.layers.#") and last:
            qwen[key.replace("model.", "mtp.", 1)] = [kind, shape, last]
    qwen["mtp.fc.weight"] = ["linear", [hidden, 2 * hidden], [[]]]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        qwen[f"mtp.{name}.weight"] = ["copy", [hidden], [[]]]


def _layers(path: str, entries: dict[str, Any]) -> dict[str, Any]:
    return {f"{path}.#.{name}": [*entry, [[0], [1]]] for name, entry in entries.items()}


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Any]:
    biases = {f"{name}.bias": ["copy", [rows]]} if bias else {}
    return {f"{name}.weight": ["linear", [rows, columns]], **biases}


def _by_hand() -> dict[str, Any]:
    """Return families whose classes stand beside the files at the hub, not in transformers."""
    chatglm = _layers(
        "transformer.encoder.layers",
        {
            "input_layernorm.weight": ["copy", [8]],
            **_linear("self_attention.query_key_value", 16, 8, True),
            **_linear("self_attention.dense", 8, 8, False),
            "post_attention_layernorm.weight": ["copy", [8]],
            **_linear("mlp.dense_h_to_4h", 24, 8, False),
            **_linear("mlp.dense_4h_to_h", 8, 12, False),
        },
    )
    norms = {f"{name}.{leaf}": ["copy", [8]] for name in ("input_layernorm", "post_attention_layernorm")
             for leaf in ("weight", "bias")}  # fmt: skip
    glm = _layers(
        "glm.transformer.layers",
        {
            **norms,
            **_linear("attention.query_key_value", 24, 8, True),
            **_linear("attention.dense", 8, 8, True),
            **_linear("mlp.dense_h_to_4h", 12, 8, True),
            **_linear("mlp.dense_4h_to_h", 8, 12, True),
        },
    )
    whole: list[Any] = [[[]]]
    return {
        "chatglm2": {
            "class": "ChatGLMForConditionalGeneration of ChatGLM2 and ChatGLM3",
            "tensors": {
                "transformer.embedding.word_embeddings.weight": ["copy", [14, 8], *whole],
                "transformer.rotary_pos_emb.inv_freq": ["copy", [1], *whole],
                **chatglm,
                "transformer.encoder.final_layernorm.weight": ["copy", [8], *whole],
                "transformer.output_layer.weight": ["linear", [14, 8], *whole],
            },
        },
        "glm1": {
            "class": "GLMForConditionalGeneration of GLM-10B and smaller ones",
            "tensors": {
                "glm.word_embeddings.weight": ["copy", [14, 8], *whole],
                "glm.transformer.position_embeddings.weight": ["copy", [10, 8], *whole],
                "glm.transformer.block_position_embeddings.weight": ["copy", [10, 8], *whole],
                **glm,
                "glm.transformer.final_layernorm.weight": ["copy", [8], *whole],
                "glm.transformer.final_layernorm.bias": ["copy", [8], *whole],
            },
        },
    }


def main() -> None:
    """Write the file."""
    import transformers

    transformers.logging.set_verbosity_error()
    if sys.argv[2:] == ["written"]:
        families = {kind: _tensors(kind) for kind in _WRITTEN}
    else:
        families = {kind: _tensors(kind) for kind in sorted([*_OWN, *_WITH_IMAGES])} | _by_hand()
        _add_next_token_layers(families)
    lines = []
    for kind, family in families.items():
        tensors = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in family["tensors"].items())
        lines.append(f'{json.dumps(kind)}: {{"class": {json.dumps(family["class"])}, "tensors": {{\n{tensors}\n}}}}')
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
