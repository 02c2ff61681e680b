"""The names that parameters of a library's pipelines have in the model without a pipeline.

``add_sequential_layer(layer, name_prefix)`` of PaddleNLP's PipelinePretrainedModel gives the prefix of the names of
each layer. Paddle knows a weight that two stages share by a property of both layers, ``embedding_weight``. A stage that
has only one of the layers needs the name in the other. Tested in tests/trainer/test_model_rules_unit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paddle_flexckpt.sharded_weight import ShardedStateDict

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
                "that is. Remedy: paddle_flexckpt.trainer.model_rules.register_shared_attribute("
                f"{cls.__name__!r}, {attribute!r}, name of the parameter in the layer)"
            )
    return attribute
