"""Trainers of the models of tests/rollout/models.py: real parallel layers, under several strategies."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing.cpu_world import init_fleet
from tests.rollout.models import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCABULARY

# By strategy, its ranks and degrees.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 v2": (4, {"mp": 2, "sharding": 2, "split_param": True}),
    "pp2": (2, {"pp": 2}),
    "stage3": (2, {"sharding": 2}),
}


class Norm(paddle.nn.Layer):
    """The weight of an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([HIDDEN])


class Words(paddle.nn.Layer):
    """The embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = fleet.meta_parallel.VocabParallelEmbedding(VOCABULARY, HIDDEN)


class Block(paddle.nn.Layer):
    """A decoder layer's parameters."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        column, row = fleet.meta_parallel.ColumnParallelLinear, fleet.meta_parallel.RowParallelLinear
        head = HIDDEN // HEADS
        sizes = {"q_proj": HEADS * head, "k_proj": KV_HEADS * head, "v_proj": KV_HEADS * head}
        joined = {name: column(HIDDEN, size, has_bias=has_bias, gather_output=False) for name, size in sizes.items()}
        joined["o_proj"] = row(HEADS * head, HIDDEN, has_bias=False, input_is_parallel=True)
        self.self_attn = paddle.nn.LayerDict(joined)
        halves = {name: column(HIDDEN, INNER, has_bias=False, gather_output=False) for name in ("gate_proj", "up_proj")}
        halves["down_proj"] = row(INNER, HIDDEN, has_bias=False, input_is_parallel=True)
        self.mlp = paddle.nn.LayerDict(halves)
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()


class Head(paddle.nn.Layer):
    """The last norm, and the head unless it is the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.norm = Norm()
        if not tied:
            self.lm_head = fleet.meta_parallel.ColumnParallelLinear(
                HIDDEN, VOCABULARY, has_bias=False, gather_output=False
            )


class Model(paddle.nn.Layer):
    """All of it, with the names that PaddleNLP gives."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        head = Head(tied)
        self.model = Words()
        self.model.layers = paddle.nn.LayerList([Block(tied) for _ in range(LAYERS)])
        self.model.norm = head.norm
        if not tied:
            self.lm_head = head.lm_head


def build(strategy: str, family: str, dtype: str) -> tuple[Any, dict[str, list[str]]]:
    """Return a model and the statements that give its parameters the engine's names."""
    _, degrees = STRATEGIES[strategy]
    init_fleet(**degrees)
    fc.install()
    paddle.set_default_dtype(dtype)
    tied = family == "qwen2"
    rules = fc.model_rules(family, "plain", "to_hf", **({"tied": True} if tied else {}))
    try:
        if strategy == "pp2":
            description = fleet.meta_parallel.LayerDesc
            layers = [description(Words), *[description(Block, tied)] * LAYERS, description(Head, tied)]
            model = fleet.meta_parallel.PipelineLayer(layers, num_stages=2, loss_fn=paddle.nn.MSELoss())
            return model, _of_pipeline(rules)
        model = Model(tied)
        if strategy == "stage3":
            optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
            model = paddle.distributed.sharding.group_sharded_parallel(model, optimizer, "p_g_os", segment_size=1)[0]
        else:
            fleet.distributed_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters()))
        return model, rules
    finally:
        paddle.set_default_dtype("float32")


def _of_pipeline(rules: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the statements for a pipeline, whose keys begin with the number of a layer's description."""
    names = {
        "model.embed_tokens": "0.embed_tokens",
        "model.norm": f"{LAYERS + 1}.norm",
        "lm_head": f"{LAYERS + 1}.lm_head",
    }
    names |= {f"model.layers.{number}.": f"{number + 1}." for number in range(LAYERS)}
    statements = []
    for statement in rules["aoa_statements"]:
        for number in range(LAYERS if "$LAYER_ID" in statement else 1):
            left, arrow, right = statement.replace("$LAYER_ID", str(number)).partition(" -> ")
            for name, stage in names.items():
                left = stage + left[len(name) :] if left.startswith(name) else left
            name, transposed, _ = left.partition("^T")
            statements.append(f'"{name}"{transposed}{arrow}{right}')
    return {"aoa_statements": statements}


def push(strategy: str, family: str, dtype: str, source: str, url: str, version: str, exported: str) -> dict[str, Any]:
    """Load a model of Hugging Face's under a strategy, export it, push it, and compare; return what was counted."""
    model, rules = build(strategy, family, dtype)
    shards = model.sharded_state_dict()
    fc.load_state_dict(shards, source, aoa_config={**rules, "aoa_config_reverse": True})
    fc.publish(model, exported, aoa_config=rules)
    channel = fc.WeightChannel(url, aoa_config=rules)
    report = channel.push(model, version=version)
    compared = channel.verify(model)
    channel.close()
    held = sum(math.prod(each.local_tensor.shape) for each in shards.values())
    return {
        "written": report.bytes_written,
        "total": report.total_bytes,
        "held": held,
        "equal": compared.is_equal,
        "live": compared.live_compared,
        "unreadable": compared.live_unreadable,
    }
