"""Find the rules of model libraries' layers: heads over a split vocabulary, and what tells its ``split_axis``.

Tested in tests/trainer/test_model_rules_unit.py.
"""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.parallel.layers import own_state
from paddle_flexckpt.sharded_weight import FusedAxis
from paddle_flexckpt.trainer.model_rules.registry import qualified_name, register_model_rule, registered_axes

_TRANSFORMERS = "paddlenlp.transformers"
# Heads that hold a part of the vocabulary under tensor parallelism, or are tied to an embedding that does.
VOCABULARY_HEADS = (
    f"{_TRANSFORMERS}.bloom.modeling.BloomLMHead",
    f"{_TRANSFORMERS}.chatglm.modeling.ChatGLMHead",
    f"{_TRANSFORMERS}.chatglm_v2.modeling.Chatglmv2LMHead",
    f"{_TRANSFORMERS}.deepseek_v2.modeling.DeepseekV2LMHead",
    f"{_TRANSFORMERS}.gpt.modeling.GPTLMHead",
    f"{_TRANSFORMERS}.jamba.modeling.JambaLMHead",
    f"{_TRANSFORMERS}.llama.modeling.LlamaLMHead",
    f"{_TRANSFORMERS}.mistral.modeling.MistralLMHead",
    f"{_TRANSFORMERS}.mixtral.modeling.MixtralLMHead",
    f"{_TRANSFORMERS}.opt.modeling.OPTLMHead",
    f"{_TRANSFORMERS}.qwen.modeling.QWenLMHead",
    f"{_TRANSFORMERS}.qwen2.modeling.Qwen2LMHead",
    f"{_TRANSFORMERS}.qwen2_moe.modeling.Qwen2MoeLMHead",
)


def vocabulary_axes(layer: Any) -> dict[str, int | FusedAxis]:
    """Return the axis of the vocabulary in a head's own parameters.

    It is told by the shape, ``[hidden, vocabulary part]`` or, tied or transposed, ``[vocabulary part, hidden]``. Where
    both axes have the extent of a part, the head's ``transpose_y``, the parameter's ``split_axis`` or whether the
    configuration ties the embeddings decides, the first of them that is there.

    Raises:
        ValueError: The shape fits neither.
    """
    transposed = getattr(layer, "transpose_y", None)
    return _axes(layer, None if transposed is None else int(not transposed))


def gemma_axes(layer: Any) -> dict[str, int | FusedAxis]:
    """Do as :func:`vocabulary_axes`, for a head whose ``split_axis`` is wrong where the embeddings are tied."""
    return _axes(layer, 0 if layer.config.tie_word_embeddings else 1)


def _axes(layer: Any, preferred: int | None) -> dict[str, int | FusedAxis]:
    return {
        name: _vocabulary_axis(layer, name, tensor, preferred)
        for name, tensor in own_state(layer).items()
        if getattr(tensor, "is_distributed", False)
    }


def _vocabulary_axis(layer: Any, name: str, tensor: Any, preferred: int | None) -> int:
    shape = [int(extent) for extent in tensor.shape]
    config = layer.config
    vocabulary, degree = int(config.vocab_size), int(getattr(config, "tensor_parallel_degree", 1) or 1)
    fitting = [axis for axis, extent in enumerate(shape) if extent * degree == vocabulary]
    if not fitting:
        raise ValueError(
            f"{name} of {qualified_name(type(layer))} is marked is_distributed, and has the shape {shape}: expected "
            f"one axis of {vocabulary} (vocab_size) / {degree} (tensor_parallel_degree) elements. Remedy: choose a "
            "vocab_size that is a multiple of the degree, or say what is split with register_model_rule()"
        )
    if len(fitting) == 1:
        return fitting[0]
    if preferred is None:
        tied = name == "decoder_weight" or getattr(config, "tie_word_embeddings", False)
        preferred = getattr(tensor, "split_axis", 0 if tied else 1)
    return int(preferred)


def complete_rules(layer: Any, own: dict[str, Any], stop: type) -> dict[str, Any]:
    """Return the rules of a layer: the registry's, or else its own, and then what parameters tell themselves.

    Raises:
        ValueError: A ``split_axis`` is no axis.
    """
    registered = registered_axes(layer, stop)
    rules = dict(own if registered is None else registered)
    for name, tensor in own_state(layer).items():
        axis = getattr(tensor, "split_axis", None)
        if name in rules or axis is None or not getattr(tensor, "is_distributed", False):
            continue
        if not isinstance(axis, int) or not -len(tensor.shape) <= axis < len(tensor.shape):
            raise ValueError(
                f"{name} of {qualified_name(type(layer))} has split_axis {axis!r}, and the shape {list(tensor.shape)}. "
                "Remedy: say what is split with register_model_rule()"
            )
        rules[name] = axis
    return rules


for _head in VOCABULARY_HEADS:
    register_model_rule(_head, vocabulary_axes)
register_model_rule(f"{_TRANSFORMERS}.gemma.modeling.GemmaLMHead", gemma_axes)
