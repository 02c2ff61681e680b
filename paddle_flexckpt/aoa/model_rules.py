"""Rules for common models: AOA statements from Hugging Face checkpoints to Paddle models and back.

:func:`model_rules` takes a family of models by name, :func:`rules_of_config` by a configuration, the ``config.json``
beside Hugging Face's weights.

Some families' rules are made from names of tensors (:mod:`~paddle_flexckpt.aoa.families`). The others are data files in
``rules/``, one per family of models::

    {
      "name", "description",
      "parameters": {NAME: {"description", "type", "default"}},  # or "texts", what each choice stands for
      "blocks": {BLOCK: {"when": {NAME: VALUE}, "aoa_statements": [...], "to_hf": ...}},
      "variants": {VARIANT: {"description", "blocks": [BLOCK, ...]}}
    }

In statements ``{NAME}`` is the value of a parameter. ``{NAME*TEXT}`` is TEXT, repeated that many times and separated by
commas, with the numbers from 0 for ``#``. ``to_hf`` is the list of statements of the way back, or ``"invert"``, or the
name of a block with the same way back.
Tested in tests/aoa/test_model_rules.py and tests/aoa/test_config_rules.py.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, cast

from paddle_flexckpt.aoa.families import family_rules, small_models
from paddle_flexckpt.aoa.head_counts import check_heads
from paddle_flexckpt.aoa.invert import invert
from paddle_flexckpt.aoa.placeholders import EMBEDDING, HEADS
from paddle_flexckpt.aoa.statements import AoaError, FamilyRules
from paddle_flexckpt.catalog.dtypes import plain_integer

logger = logging.getLogger("paddle_flexckpt")

_DIRECTIONS = ("from_hf", "to_hf")
# Names of parameters are in small letters, so ${LAYER_ID+1} is not one.
_PARAMETER = re.compile(r"\{([a-z_]+)\}")
_REPEATED = re.compile(r"\{([a-z_]+)\*([^{}]*)\}")
# Of more names only the nearest are listed.
_LISTED = 12
_NAME = re.compile(r"[A-Za-z0-9_.]*")
# Families by their name in configurations, where that differs from the family's own.
_MODEL_TYPES = MappingProxyType(
    {
        "mistral": "llama",
        "internlm3": "llama",
        "deepseek_v2": "deepseek_v3",
        "ernie4_5_moe": "ernie4_5",
        "chatglm": "chatglm2",
    }
)
# Names of the rules' parameters in configurations; the first that is there counts.
_ENTRIES = MappingProxyType(
    {
        "num_heads": ("num_attention_heads", "n_head"),
        "num_key_value_groups": ("num_key_value_heads", "num_attention_heads"),
        "num_experts": ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts"),
        "num_layers": ("num_hidden_layers",),
        "tied": ("tie_word_embeddings",),
    }
)


def rule_names() -> list[str]:
    """Return the names of the families of models with rules, sorted."""
    return sorted([*_written(), *small_models()])


def _written() -> list[str]:
    files = (file.name for file in resources.files("paddle_flexckpt.aoa").joinpath("rules").iterdir())
    return [name[: -len(".json")] for name in files if name.endswith(".json")]


def describe_model_rules(name: str) -> dict[str, Any]:
    """Return the rules of a family of models in the form of a file: parameters, variants, blocks of statements.

    Raises:
        AoaError: There are no rules of that name.
    """
    _check_known("model rules", name, rule_names())
    if name in small_models():
        return family_rules(name)
    file = resources.files("paddle_flexckpt.aoa").joinpath("rules").joinpath(f"{name}.json")
    rules: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return rules


def model_rules(
    name: str | None = None,
    variant: str = "plain",
    direction: str = "from_hf",
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **parameters: Any,
) -> dict[str, list[str]]:
    """Return the ``aoa_config`` that loads a Hugging Face checkpoint into a Paddle model, or the other way round.

    ::

        rules = fc.model_rules("qwen2", "fused", num_heads=14, num_key_value_groups=2, tied=True)
        config = {"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2}
        back = fc.model_rules(variant="fused", direction="to_hf", config=config)  # or "hf/config.json"

    Args:
        name: The family of models; ``flexckpt rules`` lists all. None: that of ``config``.
        variant: Which parameters the Paddle model fuses: ``"plain"`` (none), ``"fused"`` or ``"stacked"`` in most
            families; ``flexckpt rules FAMILY`` lists a family's, with their parameters.
        direction: ``"from_hf"`` or ``"to_hf"``.
        config: The model's ``config.json``, or its contents, for the family, ``num_heads``, ``num_key_value_groups``,
            ``num_experts``, ``num_layers`` and ``tied``.
        **parameters: Values in the statements, such as these and ``prefix``, ``lm_head`` (``"linear"`` or
            ``"embedding"``) and ``router``. One without a default has to be given where the variant uses it.

    Returns:
        ``{"aoa_statements": [...]}``, to be passed on, printed or edited.

    Raises:
        AoaError: There is no such family, variant, direction or parameter, or a parameter is missing, of another type,
            or not that of the configuration.
    """
    if config is not None:
        settings = config if isinstance(config, Mapping) else _read_settings(config)
        return rules_of_config(settings, direction, None, name, variant, **parameters)
    if name is None:
        raise AoaError(["nothing says which family's rules are wanted. Remedy (FC606): give its name, or config="])
    rules = describe_model_rules(name)
    if variant in _DIRECTIONS:
        raise AoaError([f"no variant of {name} {variant!r}. Remedy (FC606): give it by name, direction={variant!r}"])
    _check_known(f"variant of {name}", variant, list(rules["variants"]))
    _check_known("direction", direction, list(_DIRECTIONS))
    for given in parameters:
        _check_known(f"parameter of {name}", given, list(rules["parameters"]))
    values = {key: spec["default"] for key, spec in rules["parameters"].items() if "default" in spec}
    values.update(parameters)
    for key, value in values.items():
        _check_value(name, key, rules["parameters"][key], value)
    blocks = [
        block
        for block in rules["variants"][variant]["blocks"]
        if all(values[key] == value for key, value in rules["blocks"][block].get("when", {}).items())
    ]
    specs = rules["parameters"]
    texts = {key: str(specs[key]["texts"][v] if specs[key]["type"] == "choice" else v) for key, v in values.items()}
    context = f"{name}, variant {variant}, direction {direction}"
    if direction == "from_hf":
        statements = [text for block in blocks for text in rules["blocks"][block]["aoa_statements"]]
        return FamilyRules(_filled(context, specs, statements, texts), name, variant, direction, values)
    written, forward = _way_back(rules["blocks"], blocks)
    inverse = invert({"aoa_statements": _filled(context, rules["parameters"], forward, texts)})["aoa_statements"]
    # Written statements come first: they read the Paddle model's tensors, whose names may be HF's too.
    return FamilyRules(_filled(context, specs, written, texts) + inverse, name, variant, direction, values)


def _read_settings(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        text = f"config {os.fspath(path)!r} cannot be read: {error}. Remedy (FC606): give the model's config.json"
        raise AoaError([text]) from error
    return settings


def _way_back(blocks: Mapping[str, Any], names: list[str]) -> tuple[list[str], list[str]]:
    """Return the written statements to HF, and the statements from HF to invert."""
    written: list[str] = []
    forward: list[str] = []
    for name in names:
        back = blocks[name]["to_hf"]
        while isinstance(back, str) and back != "invert":
            name, back = back, blocks[back]["to_hf"]
        if back == "invert":
            forward += blocks[name]["aoa_statements"]
        else:
            written += back
    return written, forward


def _check_known(what: str, got: str, known: list[str]) -> None:
    if got in known:
        return
    near = difflib.get_close_matches(got, known) if len(known) > _LISTED else []
    remedy = f"use one of {', '.join(known)}"
    if near:
        remedy = f"use {' or '.join(map(repr, near))}, the nearest of {len(known)}; `flexckpt rules` lists all"
    raise AoaError([f"no {what} {got!r}. Remedy (FC606): {remedy}"])


def _check_value(name: str, key: str, spec: Mapping[str, Any], value: Any) -> None:
    """Raise AoaError if a parameter's value is not of its type."""
    kind = spec["type"]
    if kind == "integer":
        fits, expected = type(plain_integer(value)) is int and value > 0, "a positive whole number"
    elif kind == "boolean":
        fits, expected = isinstance(value, bool), "True or False"
    elif kind == "choice":
        fits, expected = value in list(spec["texts"]), f"one of {', '.join(spec['texts'])}"
    elif kind == "name":
        fits = isinstance(value, str) and _NAME.fullmatch(value) is not None and not value[:1].isdigit()
        expected = "a text of letters, digits, '_' and '.' that does not begin with a digit"
    else:
        fits, expected = isinstance(value, str), "a text"
    if not fits:
        raise AoaError(
            [f"parameter {key!r} of the rules for {name} ({spec['description']}) has to be {expected}; got {value!r}"]
        )


def _filled(context: str, specs: Mapping[str, Any], statements: list[str], texts: Mapping[str, str]) -> list[str]:
    """Fill statements with their parameters' values; a missing one is an error."""
    used = {found[1] for text in statements for pattern in (_PARAMETER, _REPEATED) for found in pattern.finditer(text)}
    missing = [key for key in specs if key in used - set(texts)]
    if missing:
        listed = "; ".join(f"{key}: {specs[key]['description']}" for key in missing)
        raise AoaError(
            [f"the rules for {context} need parameters that are missing ({listed}). Remedy (FC606): pass them by name"]
        )
    return [_repeated(_PARAMETER.sub(lambda found: texts[found.group(1)], text), texts) for text in statements]


def _repeated(statement: str, texts: Mapping[str, str]) -> str:
    def numbered(found: re.Match[str]) -> str:
        return ", ".join(found.group(2).replace("#", str(i)) for i in range(int(texts[found.group(1)])))

    return _REPEATED.sub(numbered, statement)


def family_of(config: Mapping[str, Any]) -> str:
    """Return the family of models whose rules are those of a configuration.

    Raises:
        AoaError: There are none.
    """
    family = known_family(config)
    if not family:
        known = ", ".join(sorted({*rule_names(), *_MODEL_TYPES}))
        raise AoaError(
            [
                f"there are no rules for the model_type {config.get('model_type')!r} of the configuration; there are "
                f"for {known}. Remedy (FC606): name a family whose tensors have the same names, or give AOA statements"
            ]
        )
    return family


def known_family(config: Mapping[str, Any]) -> str:
    """Return the family of models whose rules are those of a configuration; "" if there are none."""
    kind = str(config.get("model_type"))
    family = _MODEL_TYPES.get(kind, kind)
    return family if family in rule_names() else ""


def rules_of_config(
    config: Mapping[str, Any],
    direction: str,
    keys: Collection[str] | None,
    family: str | None = None,
    variant: str = "plain",
    **given: Any,
) -> dict[str, list[str]]:
    """Return the ``aoa_config`` for a model by its configuration, of which the ``text_config`` counts likewise.

    Where the configuration does not say whether the embeddings are tied, they are if the keys of the source, where they
    are known, have no head. Where it says both, they are. ``given`` are parameters of the rules, which override the
    configuration but for numbers of heads; the others are those of :func:`model_rules`.

    Raises:
        AoaError: There are no rules, the configuration lacks what they need, or it says that weights are quantized and
            the rules do not dequantize them.
    """
    chosen = family_of(config) if family is None else family
    if direction == "from_hf":
        _check_quantized(config, chosen, variant)
    parameters: dict[str, Any] = {}
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    for name in describe_model_rules(chosen)["parameters"]:
        found = [part[entry] for part in parts for entry in _ENTRIES.get(name, ()) if part.get(entry) is not None]
        if found:
            parameters[name] = found[0] if name != "tied" else any(found)
        elif name == "tied" and keys is not None:
            parameters[name] = not any(key.endswith(HEADS) for key in keys)
    rules = model_rules(chosen, variant, direction, **{**parameters, **given})
    check_heads(rules, config)
    return rules


def with_head_of(
    source: Mapping[str, tuple[int, ...]], rules: FamilyRules, target: Mapping[str, tuple[int, ...]] | None
) -> FamilyRules:
    """Return the rules for the head that a source has, by the shapes of its tensors, and of the targets if known.

    What tied rules say is for a source without a head, or one whose head has the values of the embedding.
    """
    head, wanted = (next(filter(_is_head, names), "") for names in (source, source if target is None else target))
    if not head or not wanted or "tied" not in rules.parameters or rules.is_compared:
        return rules
    parameters = {**rules.parameters, "tied": False}
    shape = source[head] if rules.direction == "to_hf" else target[wanted] if target is not None else ()
    embeddings = {source[name] for name in source if EMBEDDING.search(name)}
    # In Paddle a head has the layout of the embedding, or is transposed; a square one may be both.
    if (shape in embeddings) != (shape[::-1] in embeddings):
        parameters["lm_head"] = "embedding" if shape in embeddings else "linear"
    before, made = (
        model_rules(rules.family, rules.variant, rules.direction, **p) for p in (rules.parameters, parameters)
    )
    if rules == made or rules != before:  # or edited
        return rules
    if target is None and rules.parameters["tied"]:
        text = "the configuration ties %r to the embedding, and it is another tensor, which is kept; programs that "
        logger.warning(text + "read the configuration may tie it, unless that says tie_word_embeddings: false", head)
    return cast(FamilyRules, made)


def _is_head(name: str) -> bool:
    return name.endswith(HEADS)


def _check_quantized(config: Mapping[str, Any], family: str, variant: str) -> None:
    """Raise AoaError where rules would take quantized weights for plain numbers.

    A variant that dequantizes has the name of the method in configurations.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if variant == method:
        return
    variants = describe_model_rules(family)["variants"]
    remedy = (
        f"take the variant {method!r}"
        if method in variants
        else "write them out dequantized first, by the library that quantized them; or give AOA statements with dequant"
    )
    by = "by a method that it does not name" if method is None else f"by {method!r}"
    raise AoaError(
        [
            f"the configuration says that weights are quantized, {by}, and the rules for {family}, {variant!r}, take "
            f"them for plain numbers. Remedy (FC208): {remedy}"
        ]
    )
