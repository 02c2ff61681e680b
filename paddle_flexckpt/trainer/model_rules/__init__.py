"""How models of PaddleNLP and PaddleFormers are cut and named."""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.sharded_weight import ShardedStateDict


def install_model_rules(library: str) -> None:
    """Gives the library's layers their shard rules."""


def uninstall_model_rules(library: str) -> None:
    """Takes them back."""


def describe_model(model: Any) -> ShardedStateDict:
    """The shards of a model."""
    shards: ShardedStateDict = model.sharded_state_dict()
    return shards


def hf_rules(model_class: type, config: Any) -> dict[str, Any]:
    """The AOA rules between Hugging Face's names and the model's."""
    raise NotImplementedError
