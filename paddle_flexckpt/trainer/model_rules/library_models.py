"""The models of a library with their rules: installed and removed, described, named without a pipeline.

``add_sequential_layer(layer, name_prefix)`` of PaddleNLP's PipelinePretrainedModel gives the prefix of the names of
each layer. Paddle knows a weight that two stages share by a property of both layers, ``embedding_weight``. A stage that
has only one of the layers needs the name in the other.
Tested in tests/trainer/test_model_rules.py and tests/trainer/test_model_rules_unit.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from paddle_flexckpt.parallel.experts import ExpertParallelMixin
from paddle_flexckpt.parallel.install import install
from paddle_flexckpt.parallel.layers import COMPLETE_RULES, LayerMixin, own_state
from paddle_flexckpt.sharded_weight import ShardedStateDict
from paddle_flexckpt.trainer.flags import LIBRARIES
from paddle_flexckpt.trainer.model_rules.axes import complete_rules, mark_fused
from paddle_flexckpt.undo import Undo

_installed: dict[str, Undo] = {}
# Wrappers without a name of their own in the keys, which are those of the model inside.
_ADAPTERS = ("LoRAModel", "LoKrModel", "VeRAModel")
# The parameter behind a property by which stages share a weight, by class of layer. PaddleFormers' have no family.
_SHARED_ATTRIBUTES = {
    **{
        (f"{family}LMHeadPipe", "embedding_weight"): "weight"
        for family in ("", "DeepseekV2", "GPT", "Gemma", "Llama", "Qwen2", "Qwen2Moe")
    },
    **{
        (f"{family}EmbeddingPipe", "embedding_weight"): "embed_tokens.weight"
        for family in ("", "DeepseekV2", "Gemma", "Llama", "Qwen2", "Qwen2Moe")
    },
    ("GPTEmbeddingPipe", "embedding_weight"): "word_embeddings.weight",
}


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
    install()
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


def register_shared_attribute(layer_class: str, attribute: str, name: str) -> None:
    """Register the parameter behind an attribute by which the stages of a pipeline share a weight.

    Args:
        layer_class: Name of the class of a layer that has it.
        attribute: The ``shared_weight_attr`` of the SharedLayerDesc.
        name: Name of the parameter in that layer.
    """
    _SHARED_ATTRIBUTES[layer_class, attribute] = name


class PipelineNames(Mapping[str, str]):
    """The names in the model without a pipeline, by ``{index in the list of LayerDescs}.{name in the layer}``.

    Every key that begins with the index of a layer has a name, whether it is a parameter or not.
    """

    def __init__(self, prefixes: Mapping[str, str], shared: Mapping[str, str]) -> None:
        """Take the prefixes of names, by index, and the names of shared weights, by numbered name."""
        self._prefixes, self._shared = prefixes, shared

    def __getitem__(self, key: str) -> str:
        key = self._shared.get(key, key)
        index, _, name = key.partition(".")
        prefix = self._prefixes[index]
        return f"{prefix}.{name}" if prefix else name

    def __iter__(self) -> Iterator[str]:
        return iter(self._prefixes)

    def __len__(self) -> int:
        return len(self._prefixes)


def pipeline_names(pipeline: Any) -> PipelineNames:
    """Return the names of a PipelinePretrainedModel's parameters.

    A stage that holds only one of the layers that share a weight needs the name in the other.

    Raises:
        ValueError: It is not known what a property stands for by which stages share a weight.
    """
    shared = {
        f"{index}.{attribute}": f"{index}.{_parameter_name(desc.layer_func, attribute)}"
        for index, desc, attribute in _shared_attributes(pipeline)
    }
    return PipelineNames(pipeline.get_sequential_name_prefixes(), shared)


def shared_names(pipeline: Any) -> list[list[str]]:
    """Return the names of each weight that stages share, one for every layer that has it."""
    names = pipeline_names(pipeline)
    found: dict[tuple[str, str], list[str]] = {}
    for index, desc, attribute in _shared_attributes(pipeline):
        found.setdefault((desc.layer_name, attribute), []).append(names[f"{index}.{attribute}"])
    return list(found.values())


def with_tied_names(described: Callable[..., ShardedStateDict]) -> Callable[..., ShardedStateDict]:
    """Wrap the ``sharded_state_dict`` of PaddleFormers' pipelines: add a tied weight's names on other stages.

    Without a pipeline the state of a tied weight has one of its names, which a stage may not have.
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


def _shared_attributes(pipeline: Any) -> Iterator[tuple[int, Any, str]]:
    """Return ``(index, desc, attribute)`` of everything that a layer shares with layers of other stages."""
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SharedLayerDesc

    for index, desc in enumerate(pipeline._layers_desc):
        if isinstance(desc, SharedLayerDesc):
            attributes = desc.shared_weight_attr
            for attribute in [attributes] if isinstance(attributes, str) else attributes:
                yield index, desc, attribute


def _parameter_name(layer_class: Any, attribute: str) -> str:
    """Return the name of a parameter in a layer, by the attribute that stages share it by."""
    for cls in getattr(layer_class, "__mro__", ()):
        if (cls.__name__, attribute) in _SHARED_ATTRIBUTES:
            return _SHARED_ATTRIBUTES[cls.__name__, attribute]
        # A plain attribute is the parameter's own name; a property stands for another.
        if attribute in vars(cls):
            raise ValueError(
                f"stages share {attribute} of {cls.__module__}.{cls.__qualname__}, and it is not known which parameter "
                "that is. Remedy (FC804): paddle_flexckpt.trainer.model_rules.register_shared_attribute("
                f"{cls.__name__!r}, {attribute!r}, name of the parameter in the layer)"
            )
    return attribute
