"""A small Llama as Hugging Face has it."""

from __future__ import annotations

import numpy as np

HIDDEN, HEADS, GROUPS, LAYERS, VOCABULARY, INNER = 16, 4, 2, 2, 10, 24
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
}


def llama() -> dict[str, np.ndarray]:
    """A small model under Hugging Face's names, weights as they lie there."""
    rows = {"q_proj": HIDDEN, "k_proj": HIDDEN * GROUPS // HEADS, "v_proj": HIDDEN * GROUPS // HEADS, "o_proj": HIDDEN}
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.self_attn.{name}.weight": (count, HIDDEN) for name, count in rows.items()}
        shapes |= {f"{start}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{start}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{start}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
