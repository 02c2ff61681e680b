"""Small models in directories as Hugging Face has them: a llama, and a qwen2 whose head is tied."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

# The engine pads it, and each rank's part of it.
VOCABULARY = 510
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 256, 512, 2, 4, 2
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def make_model(path: Path, family: str, dtype: str, seed: int) -> str:
    """Write a model; return the path of its safetensors file. family: "llama" or "qwen2"."""
    path.mkdir(parents=True)
    tied = family == "qwen2"
    config = {
        "architectures": ["Qwen2ForCausalLM" if tied else "LlamaForCausalLM"],
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w3"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    file = path / "model.safetensors"
    save_file(_weights(tied, seed, _DTYPES[dtype]), file, {"format": "pt"})
    return str(file)


def _weights(tied: bool, seed: int, dtype: np.dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    head = HIDDEN // HEADS

    def random(*shape: int, scale: float = 0.05, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(shape)).astype(dtype)

    # With a larger one, a tied model would say the last token again, whatever its other weights are.
    weights = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN, scale=0.05 if tied else 1.0)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{norm}.weight"] = random(HIDDEN, mean=1.0)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{layer}self_attn.{part}_proj.weight"] = random(heads * head, HIDDEN)
            if tied:  # of qwen2, q, k and v have biases
                weights[f"{layer}self_attn.{part}_proj.bias"] = random(heads * head)
        weights[f"{layer}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * head)
        weights[f"{layer}mlp.gate_proj.weight"] = random(INNER, HIDDEN)
        weights[f"{layer}mlp.up_proj.weight"] = random(INNER, HIDDEN)
        weights[f"{layer}mlp.down_proj.weight"] = random(HIDDEN, INNER)
    weights["model.norm.weight"] = random(HIDDEN, mean=1.0)
    if not tied:
        weights["lm_head.weight"] = random(VOCABULARY, HIDDEN)
    return weights
