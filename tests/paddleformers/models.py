"""Small models of PaddleFormers, and the data that they learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

VOCABULARY, LENGTH = 64, 16
# A model makes it itself where it has none; a pipeline does not, and would look ahead.
CAUSAL = np.tril(np.ones((1, LENGTH, LENGTH), dtype=bool))

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# Name in PaddleFormers, and what is not as in _SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "ernie": ("Ernie4_5", {}),
    "phi3": ("Phi3", {}),
    "gpt oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}
# What has no kernel on a CPU.
_ON_A_CPU = {"fuse_rms_norm": False, "apply_rope_fusion": False, "_attn_implementation": "eager"}


class Sequences(paddle.io.Dataset):  # type: ignore[misc]
    """Token sequences of constant difference."""

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        """Args: count: of sequences. seed: of their beginnings."""
        starts = np.random.RandomState(seed).randint(0, VOCABULARY, size=(count, 1))
        # Token 0 is the padding: a cut embedding has a row for it that is trained, a whole one has not.
        self._tokens = (starts + 3 * np.arange(LENGTH + 1)) % (VOCABULARY - 1) + 1

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._tokens[index].astype("int64")
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "attention_mask": CAUSAL}


def build(name: str, args: Any) -> Any:
    """Makes a model with the weights of its seed, cut as training arguments say.

    Args:
        name: Of MODELS.
        args: TrainingArguments.
    """
    from paddleformers import transformers

    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **more})
    for attribute, value in {**_ON_A_CPU, **more}.items():
        setattr(config, attribute, value)
    config.tensor_model_parallel_size = args.tensor_model_parallel_size
    config.tensor_parallel_rank = args.tensor_parallel_rank
    config.sequence_parallel = args.sequence_parallel
    pipeline = "Pipe" if args.pipeline_model_parallel_size > 1 else ""
    paddle.seed(args.seed)
    return getattr(transformers, f"{kind}ForCausalLM{pipeline}")._from_config(config, dtype="float32")
