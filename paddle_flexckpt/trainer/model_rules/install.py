"""Installing the rules for a library's models, and describing models. Tested in tests/trainer/test_model_rules.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

from paddle_flexckpt import parallel
from paddle_flexckpt.parallel import ExpertParallelMixin
from paddle_flexckpt.parallel.layers import COMPLETE_RULES, LayerMixin, own_state
from paddle_flexckpt.sharded_weight import ShardedStateDict
from paddle_flexckpt.trainer.model_rules.fused import mark_fused
from paddle_flexckpt.trainer.model_rules.layers import complete_rules
from paddle_flexckpt.trainer.model_rules.pipeline import pipeline_names, with_tied_names
from paddle_flexckpt.undo import Undo

LIBRARIES = ("paddlenlp", "paddleformers", "paddlefleet")
_installed: dict[str, Undo] = {}
# Wrappers without a name of their own in the keys, which are those of the model inside.
_ADAPTERS = ("LoRAModel", "LoKrModel", "VeRAModel")


def install_model_rules(library: str) -> None:
    """Make ``sharded_state_dict()`` of a library's models correct: split heads, fused parameters, pipelines, experts.

    A second call does nothing. It calls ``paddle_flexckpt.install()``.

    Args:
        library: ``"paddlenlp"``, ``"paddleformers"`` or ``"paddlefleet"``.

    Raises:
        ValueError: There is no such library.
        ImportError: It is not installed.
    """
    import paddle

    check_library(library)
    parallel.install()
    if library in _installed:
        return
    assignments, undo = _assignments(library), Undo()
    for owner, methods in assignments:
        for name, method in methods.items():
            undo.set(owner, name, method)
    _installed[library] = undo

    def _complete_shard_rules(self: Any, own: dict[str, Any]) -> dict[str, Any]:
        return complete_rules(self, own, paddle.nn.Layer)

    setattr(paddle.nn.Layer, COMPLETE_RULES, _complete_shard_rules)


def uninstall_model_rules(library: str) -> None:
    """Undo :func:`install_model_rules`; the library's classes are as before.

    Raises:
        ValueError: There is no such library.
    """
    import paddle

    check_library(library)
    if library in _installed:
        _installed.pop(library).put_back()
        if not _installed:
            delattr(paddle.nn.Layer, COMPLETE_RULES)


def describe_model(model: Any) -> ShardedStateDict:
    """Describe a model of a library, whatever is wrapped around it, as shards.

    Args:
        model: The model, or a wrapper of fleet, DataParallel, group-sharded or LoRA.

    Returns:
        Names to ShardedWeights; the same names for every layout.

    Raises:
        ValueError: A split parameter has no rule, or the model has no state.
    """
    sharded: ShardedStateDict = model.sharded_state_dict()
    if not sharded:
        raise ValueError(f"{type(model).__name__} has no parameters and no buffers on this rank: nothing to describe")
    return sharded


def check_library(library: str) -> None:
    """Raise ValueError unless it is one of :data:`LIBRARIES`."""
    if library not in LIBRARIES:
        raise ValueError(f"library has to be one of {', '.join(LIBRARIES)}; got {library!r}")


def _assignments(library: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return the library's classes and the methods that each of them gets."""
    models = importlib.import_module(f"{library}.transformers.model_utils")
    made: list[tuple[Any, dict[str, Any]]] = [
        (models.PretrainedModel, {"sharded_state_dict": _marking(models.PretrainedModel)})
    ]
    if library == "paddlenlp":
        made.append((models.PipelinePretrainedModel, {"_get_pipeline_names": pipeline_names}))
        experts = importlib.import_module("paddlenlp.transformers.moe_layer")
        methods = {name: value for name, value in vars(ExpertParallelMixin).items() if isinstance(value, FunctionType)}
        made.append((experts.MoELayer, {**methods, "_get_expert_count": _expert_count}))
        adapters = importlib.import_module("paddlenlp.peft")
        found = (getattr(adapters, name, None) for name in _ADAPTERS)
        made += [(adapter, {"sharded_state_dict": _of_adapter}) for adapter in found if adapter is not None]
    else:
        pipeline = models.PipelinePretrainedModel
        made.append((pipeline, {"sharded_state_dict": with_tied_names(pipeline.sharded_state_dict)}))
    return made


def _marking(owner: Any) -> Callable[..., ShardedStateDict]:
    """Return a method of PretrainedModel that marks fused parameters in what the class behind it returns."""

    def sharded_state_dict(self: Any, structured_name_prefix: str = "") -> ShardedStateDict:
        """Describe the model as shards, with the rules of fused parameters."""
        sharded: ShardedStateDict = super(owner, self).sharded_state_dict(structured_name_prefix)
        mark_fused(self, sharded)
        return sharded

    return sharded_state_dict


def _expert_count(self: Any) -> int | None:
    count = getattr(self, "moe_num_experts", None)
    return count if isinstance(count, int) else None


def _of_adapter(self: Any, structured_name_prefix: str = "") -> ShardedStateDict:
    """Describe the model inside; a wrapper with state of its own is described as any layer."""
    inside = self._sub_layers.get("model")
    known = {id(tensor) for layer in inside.sublayers(include_self=True) for tensor in own_state(layer).values()}
    for layer in self.sublayers(include_self=True):
        if any(id(tensor) not in known for tensor in own_state(layer).values()):
            return LayerMixin.sharded_state_dict(self, structured_name_prefix)
    inner: ShardedStateDict = inside.sharded_state_dict(structured_name_prefix=structured_name_prefix)
    return inner
