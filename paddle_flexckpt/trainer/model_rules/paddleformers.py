"""Read what PaddleFormers' models say of themselves: which parameters are fused, and what else is split.

Their ``_get_tensor_parallel_mappings`` do not tell it. Their AOA statements from Hugging Face's weights do: one with
``fused_ffn`` or ``fused_qkv_old`` makes a parameter whose parts every rank holds side by side. With ``fused_qkv`` they
are in the order of the key and value heads, and a plain split is the same under every degree.
Tested in tests/trainer/test_model_rules_paddleformers.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from paddle_flexckpt.sharded_weight import FusedAxis, ShardedStateDict
from paddle_flexckpt.trainer.model_rules.pipeline import register_shared_attribute, shared_names
from paddle_flexckpt.trainer.model_rules.registry import register_model_rule

# The parameter that a statement makes, by its name within a layer of the model.
_TARGET = re.compile(r"layers\.(?:\$LAYER_ID|\d+)\.(?P<path>.+)\.(?:weight|bias)$")
_FFN, _QKV = "fused_ffn", "fused_qkv_old"


def fused_by_statements(model: Any) -> list[tuple[str, str]]:
    """Return the layers with fused outputs, and the statements of their :class:`FusedAxis`.

    Args:
        model: A model. One of another library, or without statements, has none.
    """
    method = getattr(type(model), "_gen_aoa_config", None)
    if method is None or not type(model).__module__.startswith("paddleformers."):
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
    return list(found.items())


def with_tied_names(described: Callable[..., ShardedStateDict]) -> Callable[..., ShardedStateDict]:
    """Wrap the ``sharded_state_dict`` of PaddleFormers' pipelines: add a tied weight's names on other stages.

    Without a pipeline the state of a tied weight stands under one of its names, which a stage may not have.
    """

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> ShardedStateDict:
        sharded = described(self, *args, **kwargs)
        for names in shared_names(self):
            for name in names:
                weight: Any = sharded.get(name)
                if weight is not None:
                    others = (*getattr(weight, "aliases", ()), *(other for other in names if other != name))
                    weight.aliases = tuple(dict.fromkeys(others))
        return sharded

    return sharded_state_dict


def _sinks_axes(layer: Any) -> dict[str, int | FusedAxis]:
    """Return the axis of the sinks: every rank has those of its heads, and the model does not mark them."""
    return {"sinks": 0} if layer.config.tensor_model_parallel_size > 1 else {}


register_model_rule("paddleformers.transformers.gpt_oss.modeling.GptOssAttention", _sinks_axes)
register_shared_attribute("EmbeddingPipe", "embedding_weight", "embed_tokens.weight")
register_shared_attribute("LMHeadPipe", "embedding_weight", "weight")
