"""Hugging Face's weights: AOA statements from a model's own tables of names.

PaddleNLP's models say for every parameter of a Hugging Face checkpoint which parameter it becomes, transposed or split
(``_get_name_mappings``), and which of these are fused then (``_get_fuse_or_split_param_mappings``). PaddleFormers'
models have AOA statements of their own. Tested in tests/trainer/test_model_rules.py.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paddle_flexckpt.aoa.invert import invert
from paddle_flexckpt.aoa.model_rules import model_rules
from paddle_flexckpt.aoa.parser import Statement, parse_program
from paddle_flexckpt.aoa.placeholders import parse_name
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.trainer.model_rules.axes import FusedLayer, fused_layers, layer_of, qualified_name

AoaConfig = dict[str, list[str]]
# Parameters that are computed and not stored. Models with a prefix of their own are the exception.
_COMPUTED = ("inv_freq",)
# Names in the configuration of a checkpoint of classes that the library has renamed.
_ARCHITECTURES = {"GPTModel": "GPT2Model"}
# Names that a table has for a parameter that the model ties to another.
_TIED_HEADS = frozenset({"lm_head.weight", "lm_head.decoder.weight", "lm_head.decoder_weight"})
# Prefixes of names in a checkpoint that the library's table leaves out on both sides.
_PREFIXES = {"ChatGLMv2ForCausalLM": "transformer."}
# Heads that the library holds beside the embedding, which in the checkpoint are the embedding.
_HEADS_OF_THEIR_OWN = {"OPTForCausalLM": ("model.decoder.embed_tokens.weight", "lm_head.decoder_weight")}
# Classes for which the library has no table: the family of rules, and the prefix of the model's names.
_FAMILIES = {"GLMForConditionalGeneration": ("glm1", "glm."), "GLMForMultipleChoice": ("glm1", "glm.")}
_PLACEHOLDERS = ("$LAYER_ID", "$EXPERT_ID")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def hf_rules(model_class: type, config: Any) -> dict[str, AoaConfig]:
    """Return the statements from Hugging Face's weights to a model's, and back.

    Args:
        model_class: A class of models of PaddleNLP or PaddleFormers, with or without a pipeline.
        config: Its configuration. Degrees of parallelism in it do not matter.

    Returns:
        ``{"from_hf": aoa_config, "to_hf": aoa_config}``: the first for ``load_state_dict`` from a Hugging Face
        checkpoint into the model under any layout, the second for ``export_safetensors`` of the model's checkpoint.

    Raises:
        ValidationError: The library does not know the names, or a step on the way is not one of AOA's.
    """
    model_class = without_pipeline(model_class)
    if hasattr(model_class, "_gen_aoa_config"):
        given = _as_in_paddle(model_class._gen_aoa_config(config))
        back_again = getattr(model_class, "_gen_inv_aoa_config", None)
        return {"from_hf": given, "to_hf": invert(given) if back_again is None else _as_in_paddle(back_again(config))}
    if model_class.__name__ in _FAMILIES:
        family, prefix = _FAMILIES[model_class.__name__]
        return {way: model_rules(family, "plain", way, prefix=prefix) for way in ("from_hf", "to_hf")}
    config = copy.deepcopy(config)
    config.architectures = [_ARCHITECTURES.get(model_class.__name__, model_class.__name__)]
    config.tensor_parallel_degree, config.tensor_parallel_rank = 1, 0
    tied = bool(getattr(config, "tie_word_embeddings", False))
    statements = [*_renames(model_class, config, tied), *_fusions(model_class, config)]
    forward = list(dict.fromkeys(_folded(names, template) for names, template in statements))
    back = list(invert({"aoa_statements": forward})["aoa_statements"])
    if tied:
        # Hugging Face's checkpoints have a tied parameter under the embedding's name alone.
        back += [f"{head} -> _, optional" for head in sorted(_TIED_HEADS)]
    if model_class.__name__ in _HEADS_OF_THEIR_OWN:
        embedding, head = _HEADS_OF_THEIR_OWN[model_class.__name__]
        forward.append(f"{embedding} -> {head}")
        back.append(f"{head} -> _, optional")
    return {"from_hf": {"aoa_statements": forward}, "to_hf": {"aoa_statements": back}}


def without_pipeline(model_class: type) -> type:
    """Return the class of the same model without a pipeline: ``LlamaForCausalLM`` of ``LlamaForCausalLMPipe``."""
    if not model_class.__name__.endswith("Pipe") or not model_class.__module__.endswith("modeling_pp"):
        return model_class
    module = importlib.import_module(model_class.__module__[: -len("_pp")])
    found: type = getattr(module, model_class.__name__[: -len("Pipe")], model_class)
    return found


def _as_in_paddle(given: AoaConfig) -> AoaConfig:
    return {**given, "aoa_statements": list(with_optional_patterns(given["aoa_statements"]))}


def with_optional_patterns(texts: Sequence[str]) -> Iterator[str]:
    """Yield a library's statements, such that a pattern without a match is no error, as in Paddle's own engine.

    Libraries have one list for models with and without biases, experts and further layers. A target without a source is
    an error of the load all the same.
    """
    for number, text in enumerate(texts, start=1):
        statements = parse_program([text], number) if "$" in text else []
        if not any(map(_lacks_optional, statements)):
            yield text
            continue
        for statement in statements:
            written, end = statement.place.text, statement.tokens[-1].end - 1
            tag = ", optional" if _lacks_optional(statement) else ""
            yield f"{written[:end]}{tag}{written[end:]}"


def _lacks_optional(statement: Statement) -> bool:
    names = (*statement.left, *statement.right)
    return not statement.has("optional") and any(parse_name(each.name).placeholders for each in names)


_Statement = tuple[tuple[str, ...], str]


def _renames(model_class: Any, config: Any, tied: bool) -> Iterable[_Statement]:
    """Yield statements from every name of the checkpoint to the model's, before fusing."""
    try:
        mappings = model_class._get_name_mappings(config)
    except (AttributeError, NotImplementedError) as error:
        raise _unknown(model_class, "the library has no table of names for it") from error
    base = getattr(model_class, "base_model_prefix", "")
    if base and not model_class.__name__.endswith("Model"):
        inside = [mapping.target_name for mapping in mappings if mapping.target_name.startswith(f"{base}.")]
        if not inside and model_class.__name__ in _PREFIXES:
            for mapping in mappings:
                mapping.source_name = _PREFIXES[model_class.__name__] + mapping.source_name
                mapping.target_name = f"{base}.{mapping.target_name}"
        elif not inside:
            raise _unknown(model_class, f"none of the names in its table begins with {base!r}, as those in it do")
    fused = {layer.path: layer for layer in _fused(model_class, config)}
    splits: dict[str, dict[int, str]] = {}
    for mapping in mappings:
        source, target, action = mapping.source_name, mapping.target_name, mapping.action
        if (target.endswith(_COMPUTED) and model_class.__name__ not in _PREFIXES) or (tied and target in _TIED_HEADS):
            continue
        if action == "split":
            splits.setdefault(source, {})[mapping.index] = target
            continue
        if action not in (None, "transpose"):
            raise _unknown(model_class, f"{source!r} becomes {target!r} by {action!r}, which is no AOA statement")
        # Tables list parameters that some configurations lack; the load raises an error for a target without a source.
        tags = f"{_tags(fused, target)}, optional"
        yield (source, target), f"{{0}}{'^T' if action else ''} -> {{1}}{tags}"
    for source, targets in splits.items():
        if sorted(targets) != list(range(len(targets))):
            raise _unknown(model_class, f"{source!r} is split, and the table lacks some of its parts: {targets}")
        names = tuple(targets[index] for index in sorted(targets))
        right = ", ".join(f"{{{number}}}" for number in range(1, len(names) + 1))
        yield (source, *names), f"{{0}} -> {right}, axis={0 if source.endswith('.bias') else 1}"


def _fused(model_class: Any, config: Any) -> list[FusedLayer]:
    """Return the fused layers of a class that have a statement; no model is built."""
    shell = model_class.__new__(model_class)
    object.__setattr__(shell, "config", config)
    return [layer for layer in fused_layers(shell) if layer.statement is not None]


def _tags(fused: dict[str, FusedLayer], target: str) -> str:
    """Return the tags of a statement for a parameter that every rank holds as parts side by side, else ""."""
    layer = layer_of(fused, target.rpartition(".")[0])
    return "" if layer is None else f", {layer.statement}" + (", axis=0" if target.endswith(".bias") else "")


def _fusions(model_class: Any, config: Any) -> Iterable[_Statement]:
    """Yield statements from the model's names of single parameters to those of fused ones."""
    if not hasattr(model_class, "_get_fuse_or_split_param_mappings"):
        return
    try:
        fusions = model_class._get_fuse_or_split_param_mappings(config, is_fuse=True)
    except NotImplementedError:
        return
    # The tables have no base name in front; the model's own names do.
    prefix = "" if model_class.__name__.endswith("Model") else f"{getattr(model_class, 'base_model_prefix', '')}."
    for names, action in fusions.items():
        *singles, whole = (f"{prefix}{name}" for name in names)
        flags = getattr(action, "keywords", {})
        left = ", ".join(f"{{{number}}}" for number in range(len(singles)))
        if flags.get("is_qkv"):
            tag = f"fused_qkv, num_heads={flags['num_heads']}, num_key_value_groups={flags['num_key_value_heads']}"
        else:
            tag = "fused_ffn"
        axis = ", axis=0" if whole.endswith(".bias") else ""
        yield (*singles, whole), f"{left} -> {{{len(singles)}}}, {tag}{axis}"


def _folded(names: Sequence[str], template: str) -> str:
    """Return the statement, with placeholders for numbers of layer and expert where all its names have the same."""
    numbers = {tuple(_NUMBER.findall(name)) for name in names}
    if len(numbers) == 1 and 0 < len(next(iter(numbers))) <= len(_PLACEHOLDERS):
        placeholders = itertools.cycle(_PLACEHOLDERS[: len(next(iter(numbers)))])
        names = [_NUMBER.sub(lambda _: next(placeholders), name) for name in names]
    return template.format(*names)


def _unknown(model_class: type, why: str) -> ValidationError:
    return ValidationError(
        Problem(
            f"it is not known how Hugging Face's weights become those of {qualified_name(model_class)}",
            got=why,
            code="FC606",
            remedy="write the AOA statements yourself (paddle_flexckpt.model_rules has them for some families, "
            "paddle_flexckpt.gen_aoa_statements makes them from a model), and pass them as aoa_config",
        )
    )
