"""Whether the rules of a family of models are those of a source: its configuration, and its weights.

Most statements of rules are optional, so the rules of another family would leave weights as they are, without an error,
and a source without some layers would become a model without them.
Tested in tests/aoa/test_rule_fits.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from paddle_flexckpt.aoa.compile import compile_program, explain
from paddle_flexckpt.aoa.element_maps import TensorMapping
from paddle_flexckpt.aoa.families import small_models
from paddle_flexckpt.aoa.macros import array_names
from paddle_flexckpt.aoa.model_rules import describe_model_rules, known_family, model_rules, rule_names
from paddle_flexckpt.aoa.parser import parse_program
from paddle_flexckpt.aoa.placeholders import HEADS, KeyIndex, parse_name
from paddle_flexckpt.aoa.statements import AoaError, FamilyRules
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.layer_ranges import grouped
from paddle_flexckpt.optimizer_states import PARAMETER, split_state, unwrapped

# The first number in a name is that of a layer.
_LAYER = re.compile(r"(?:.*?\.)??(\d+)\.")
# Buffers of two axes and more, which some files have: attn.bias and attn.masked_bias, the mask.
_BUFFER = "bias"
_LISTED = 4
# Names of the number of layers in configurations, and a tensor that only layers have which predict further tokens.
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PREDICTOR = "eh_proj.weight"

logger = logging.getLogger("paddle_flexckpt")


def check_family(rules: FamilyRules, source: Catalog, settings: Mapping[str, Any]) -> None:
    """Check that rules are those of the family in a configuration, or do the same.

    Raises:
        AoaError: They are not.
    """
    known = known_family(settings)
    if known in ("", rules.family):
        return
    small = _sample(source)
    if _outcome(rules, small) in (None, *_others(rules, small, [known])):
        return  # without an outcome, the call fails by itself, with the reason
    raise AoaError(
        [
            f"config.json says that the model_type is {settings['model_type']!r}, and the rules are those for "
            f"{rules.family}. Remedy (FC606): take the rules for {known}; if those for {rules.family} are meant, give "
            f"their statements as your own: {_printed(rules)}"
        ]
    )


def _printed(rules: FamilyRules) -> str:
    command = f"`flexckpt rules {rules.family} --variant {rules.variant} --direction {rules.direction}`"
    return f"fc.model_rules(...)['aoa_statements'], or --aoa with what {command} prints"


def check_layers(rules: FamilyRules, source: Catalog, settings: Mapping[str, Any]) -> None:
    """Check that a source has all layers of a model, all that layers like them have, and what stands beside them.

    First layers alone may be missing in a part for a stage of a pipeline: without a configuration, that is a warning.

    Raises:
        AoaError: It lacks some.
    """
    names, lost = {name for name, _ in _parameters(source)}, list[str]()
    stacks, known = dict[str, dict[int, set[str]]](), {*names}
    for each in parse_program(rules["aoa_statements"]):
        for name in array_names(each.left):
            if "$LAYER_ID" in name:
                stacks[name.partition("$LAYER_ID")[0]] = {}
            elif name not in known and not each.has("optional") and not name.endswith(HEADS):
                lost.append(name)
        known.update(array_names(each.right))
    for name in names:
        found = _LAYER.match(name)
        if found is not None and name[: found.start(1)] in stacks:
            stacks[name[: found.start(1)]].setdefault(int(found[1]), set()).add(name[found.end() :])
    if not any(stacks.values()) and any(map(_LAYER.match, names)):
        return  # the layers have other names
    count = _layer_count(settings)
    main = max((start for start in stacks if "vis" not in start), key=lambda start: len(stacks[start]), default="")
    absent: dict[str, int] = {}  # texts, by the first layer
    for start, layers in stacks.items():
        ends = [-1, *sorted(layers), max([*(number + 1 for number in layers), count * (start == main)])]
        gaps = [(low + 1, high - 1) for low, high in zip(ends, ends[1:]) if high > low + 1]
        absent |= {f"layer{f's {low} to' * (low < high)} {high} of {start}*": low for low, high in gaps}
        kinds = {frozenset(layer) for layer in layers.values() if _PREDICTOR not in layer}
        for number, layer in layers.items():
            lacking = min((kind - layer for kind in kinds if kind > layer), key=len, default=())
            lost += [f"{start}{number}.{name}" for name in lacking]
    if not absent and not lost:
        return
    text = f"the rules for {rules.family} make a whole model, and the source lacks {listed([*absent, *grouped(lost)])}"
    text += f" (config.json says that there are {count} layers)" * bool(count)
    text += (
        ". Remedy (FC304): restore the files with these tensors; if a part of the model is meant, give the rules' "
        f"statements as your own: {_printed(rules)}"
    )
    if lost or count or any(absent.values()):
        raise AoaError([text])
    logger.warning(text)


def _layer_count(settings: Mapping[str, Any]) -> int:
    """Return the number of layers of a model, or of its part for texts, by its configuration; 0 if it has none."""
    parts = [part for part in (settings, settings.get("text_config")) if isinstance(part, Mapping)]
    counts = (part.get(entry) for part in parts for entry in _COUNTS)
    return next((count for count in counts if type(count) is int), 0)


def check_touched(rules: FamilyRules, mapping: TensorMapping, source: Catalog, target: Catalog | None) -> None:
    """Check that rules have a statement for all weights that the result takes.

    Raises:
        AoaError: They leave some as they are.
    """
    left = _untouched(mapping, source, target)
    if left:
        alike = {re.sub(r"\d+", "#", name): repr(name) for name in reversed(left)}  # one of each kind
        text = f"the rules for {rules.family}, variant {rules.variant!r}, have no statement for {len(left)} weights"
        text += f", such as {listed(sorted(alike.values()), _LISTED)}: these would stay as they are, not transposed"
        remedy = _fitting(rules, source) or (
            "Remedy (FC606): name the family of these weights; where none has their names, give AOA statements, such "
            f"as those that `flexckpt rules {rules.family}` prints, edited"
        )
        raise AoaError([f"{text}. {remedy}"])


def check_others(rules: FamilyRules, error: AoaError, source: Catalog) -> None:
    """Raise the error of rules that do not fit a source, where the rules of another variant or family do.

    Raises:
        AoaError: Others do; it names them.
    """
    small = _sample(source)
    found = "" if _outcome(rules, small) is not None else _fitting(rules, source)
    if not found:
        return
    unnamed = _unnamed(rules, small)
    why = f"they do not name {listed(unnamed, _LISTED)}" if unnamed else str(error.problems[0]).partition(". Remedy")[0]
    text = f"the rules for {rules.family}, variant {rules.variant!r}, do not fit the source: {why}"
    raise AoaError([f"{text}. {found}"]) from error


def _unnamed(rules: FamilyRules, source: Catalog) -> list[str]:
    """Return the source's weights that no statement names, in quotes."""
    index, named = KeyIndex(source.keys), set[str]()
    for statement in parse_program(rules["aoa_statements"]):
        for template in map(parse_name, array_names(statement.left)):
            named.update(map(template.formatter(template.placeholders), index.bindings(template)))
    return [repr(name) for name in _weights(source) if name not in named]


def _untouched(mapping: TensorMapping, source: Catalog, target: Catalog | None) -> list[str]:
    """Return the source's weights that become the result's without a statement."""
    names = mapping.outputs if target is None else [target.keys[key] for key in np.unique(target.key)]
    weights = set(_weights(source))
    return [name for name in names if name not in mapping.provenance and unwrapped(name) in weights]


def _weights(source: Catalog) -> Iterator[str]:
    """Return the names of the source's weights, without wrappers."""
    return (name for name, ndim in _parameters(source) if ndim > 1 and not name.endswith(_BUFFER))


def _parameters(source: Catalog) -> Iterator[tuple[str, int]]:
    """Yield the names of the source's parameters and buffers, without wrappers, with their numbers of axes."""
    keys = {*source.keys}
    for key, row in zip(*np.unique(source.key, return_index=True)):
        name = source.keys[key]
        if not name.startswith(EXTRA_STATE) and split_state(name, keys)[1] == PARAMETER:
            yield unwrapped(name), int(source.ndim[row])


def _fitting(rules: FamilyRules, source: Catalog) -> str:
    """Return the remedy for rules that do not fit: the variant, or the families, that do; "" where none does."""
    small, wanted = _sample(source), describe_model_rules(rules.family)["variants"]
    own = [variant for variant in wanted if _outcome(_like(rules, rules.family, variant), small) is not None]
    if own:
        options = " or ".join(f"--variant {variant} (variant={variant!r} in Python)" for variant in own)
        return f"Remedy (FC606): take the variant that fits, {options}"
    names = sorted(rule_names(), key=lambda name: name in small_models())  # those written for a family are first
    fits = [name for name, outcome in zip(names, _others(rules, small, names)) if outcome is not None]
    if fits:
        return f"Remedy (FC606): take the rules for the model's family; those for {' or '.join(fits[:_LISTED])} fit"
    return ""


def _others(rules: FamilyRules, small: Catalog, families: Iterable[str]) -> Iterator[str | None]:
    return (_outcome(_like(rules, family, rules.variant), small) for family in families)


def _like(rules: FamilyRules, family: str, variant: str) -> FamilyRules | None:
    """Return the rules of another family or variant with the same parameters; None where there are none."""
    description = describe_model_rules(family)
    if variant not in description["variants"]:
        return None
    counts = {name: 1 for name, spec in description["parameters"].items() if spec["type"] == "integer"}
    given = {name: value for name, value in rules.parameters.items() if name in description["parameters"]}
    return cast(FamilyRules, model_rules(family, variant, rules.direction, **{**counts, **given}))


def _outcome(rules: FamilyRules | None, small: Catalog) -> str | None:
    """Return what rules make of a source, as text; None if they do not fit it, or leave a weight as it is."""
    if rules is None:
        return None
    try:
        if _untouched(compile_program(rules, small, None), small, None):
            return None
        lines = explain(rules, small).splitlines()
    except AoaError:
        return None
    return "\n".join(line for line in lines if not line.startswith("  by "))


def _sample(source: Catalog) -> Catalog:
    """Return the rows of a source without layers, and of one layer of each kind."""
    layers: dict[tuple[str, str], set[str]] = {}
    for key in source.keys:
        found = _LAYER.match(key)
        if found is not None:
            layers.setdefault((key[: found.start(1)], found[1]), set()).add(key[found.end(1) :])
    kinds = {(stack, frozenset(rest)): (stack, number) for (stack, number), rest in reversed(layers.items())}
    kept = set(kinds.values())
    chosen = []
    for number, key in enumerate(source.keys):
        found = _LAYER.match(key)
        if found is None or (key[: found.start(1)], found[1]) in kept:
            chosen.append(number)
    return source.take(np.isin(source.key, chosen)).compact()
