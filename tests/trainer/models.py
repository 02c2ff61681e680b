"""Tiny models of PaddleNLP, and data that they can learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

VOCABULARY = 64
LENGTH = 16
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "seq_length": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_flash_attention": False,
}
_LLAMA = {"num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    # All of them: one without tokens has a zero gradient under some strategies and none under others, and so is or is
    # not stepped.
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.0,
}
# By name: family, and what its configuration has besides the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "llama tied": ("Llama", {**_LLAMA, "tie_word_embeddings": True}),
    "llama fused": ("Llama", {**_LLAMA, "fuse_attention_qkv": True, "fuse_attention_ffn": True}),
    # The simulated device has no kernel that repeats heads in half precision.
    "llama heads": ("Llama", {"num_key_value_heads": 4}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS),
    "gpt": ("GPT", _NO_DROPOUT),
}


class Sequences(paddle.io.Dataset):
    """Sequences that count in steps of three from a random start.

    Special tokens do not occur: a loss leaves them out, and then its mean depends on how a batch is divided.
    """

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        start = np.random.default_rng(seed).integers(0, VOCABULARY, (count, 1))
        self._ids = ((start + np.arange(LENGTH + 1) * 3) % (VOCABULARY - 3) + 3).astype(np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"input_ids": self._ids[i, :-1], "labels": self._ids[i, 1:]}


def mend_gate() -> None:
    """Lets PaddleNLP's MoE gate run: with Paddle 3.3 it multiplies an int64 sum by an int32 mask, which is an error."""
    from paddlenlp.transformers.moe_gate import PretrainedMoEGate

    def _priority(self: Any, topk_idx: Any, capacity: int) -> Any:
        one_hot = paddle.nn.functional.one_hot
        chosen = one_hot(topk_idx.transpose([1, 0]).reshape([-1]), self.num_experts).astype("int64")
        place = (paddle.cumsum(chosen, axis=0) * chosen - 1).reshape([self.top_k, -1, self.num_experts]).max(axis=0)
        fits = paddle.logical_and(place >= 0, place < capacity).astype("int64")
        return (one_hot(place * fits, capacity).astype("int64") * fits.unsqueeze(-1)).astype("int32")

    PretrainedMoEGate._priority = _priority


def build(name: str, args: Any, **overrides: Any) -> Any:
    """A model for the degrees of parallelism of some training arguments, with the same weights in every process."""
    from paddlenlp import transformers

    family, special = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **{**_SIZES, "tie_word_embeddings": False, **special, **overrides}
    )
    config.tensor_parallel_degree = max(args.tensor_parallel_degree, 1)
    config.tensor_parallel_rank = args.tensor_parallel_rank
    config.sequence_parallel = args.sequence_parallel
    if family == "Qwen2Moe":
        mend_gate()
    suffix = "ForCausalLMPipe" if args.pipeline_parallel_degree > 1 else "ForCausalLM"
    paddle.seed(args.seed)
    model = getattr(transformers, f"{family}{suffix}")._from_config(config, dtype="float32")
    # Gates begin as constants, and would stay so while all experts are alike to them.
    rng = np.random.default_rng(args.seed)
    for parameter in model.parameters():
        if getattr(parameter, "is_gate", False):
            parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32))
    return model


def build_auto(name: str, args: Any) -> tuple[Any, Any]:
    """A Llama for the semi-automatic trainer, and its loss."""
    from paddlenlp import transformers

    config = transformers.LlamaConfig(**{**_SIZES, "tie_word_embeddings": False, **MODELS[name][1]})
    config.tensor_parallel_degree = args.tensor_parallel_degree
    config.sequence_parallel = args.sequence_parallel
    paddle.seed(args.seed)
    model = transformers.LlamaForCausalLM3DAuto._from_config(config, dtype="float32")
    return model, transformers.LlamaPretrainingCriterion3DAuto(config)
