"""Problems of targets that need a closer look: nothing fills a target, its source has another shape or is a guess.

Each has a remedy without loss, which names the AOA statement if there is one.

Tested in tests/transfer/test_resolution.py, tests/transfer/test_remedies.py, tests/transfer/test_raw_names.py,
tests/loading/test_policies.py, tests/loading/test_masters_and_fused.py and tests/remedies/test_frozen.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.aoa.parser import quoted
from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.catalog.errors import MAX_LISTED
from paddle_flexckpt.optimizer_states import MASTER, split_state
from paddle_flexckpt.transfer.name_fits import MovedParameters
from paddle_flexckpt.transfer.names import (
    HINT,
    CompatibleNames,
    SourceKeys,
    Unresolved,
    bare,
    is_counted,
    is_state,
    split_raw,
)
from paddle_flexckpt.transfer.powers import Facts

# A target that nothing fills.
NO_KEY = "the source has no such key"
# The layer in the names of embeddings, and of the heads that models tie to them.
_TIED = re.compile(r"(?:embed|wte|head|decoder)[^.]*\.[^.]+$", re.IGNORECASE)

# The products of NAdam and RAdam begin with 1; Adam's powers begin with beta itself.
_FROM_ONE = re.compile(r"(?:beta[12]_pow|mu_product|momentum_decay_pow|rho)_\d+$")
_PARAMETER_REMEDY = 'load with master_weights="convert", by which a master that is missing starts from its parameter'
_MOST_PAIRS = 8
# A search for the nearest names compares a key with each of them.
_MOST_NAMES = 2000
# The path before a parameter's raw name, and its shape.
_Kind = tuple[str, tuple[int, ...]]


class Missing:
    """The reasons why nothing fills a target: AOA statements, or a wrong name."""

    def __init__(
        self, targets: Catalog, source: Catalog, mapping: TensorMapping | None, compatible: CompatibleNames
    ) -> None:
        """Take targets, source and mapping, and the result of a search by other names."""
        self._catalog, self._source, self._mapping, self._compatible = targets, source, mapping, compatible
        self._searches = MAX_LISTED

    def problem(self, row: int, has_parameter: bool, beta: float | None = None) -> Problem:
        """Return the problem of a target.

        Args:
            row: The target.
            has_parameter: Whether it is a master that may be made of its parameter.
            beta: The beta of which it is a power; None if it is not known.
        """
        catalog, names, compatible = self._catalog, self._sorted_names, self._compatible
        key = catalog.keys[row]
        where: dict[str, Any] = {"key": key, "rank": int(catalog.rank[row]), "expected": catalog.describe(row)}
        if self._mapping is not None and (key in self._mapping.unfed or key in self._mapping.removed):
            why, remedy = self._not_made(key, self._mapping, beta)
            # A reason may have its own remedy.
            return Problem(
                "nothing feeds a target", **where, got=why, code="FC604", remedy=None if "Remedy (" in why else remedy
            )
        nearest = self._nearest(key)
        alike, layers = self._by_tail.get(_tail(key), []), re.findall(r"\d+", key)
        if alike and self._searches:  # those of the same layer come first
            self._searches -= 1
            alike = sorted(alike, key=lambda name: re.findall(r"\d+", name) != layers)
        got = f"{len(names)} keys, among them {(alike or names)[:3]}"
        if nearest:
            got = f"{len(names)} keys, the nearest of them {nearest}"
        if key in compatible.taken:
            got += f"; what might be meant is taken by target {compatible.taken[key]!r}"
        unread = "" if self._mapping is None else next(iter(self._mapping.unread.items()), "")
        if unread:
            got += f"; no target has {unread[0]!r}, which a statement makes ({unread[1]})"
        if key in compatible.of_others:
            got += f"; the one of its raw name is {compatible.of_others[key]!r}, as the source says"
        remedy = "correct the name, or load with strict=False to leave this target as it is"
        if unread:
            remedy = f"correct the name on the right of that statement; or {remedy}"
        code = "FC201"
        if is_state(key, self.known):
            code, remedy = "FC204", f"correct the state's name{first_value(key, beta)}"
        if has_parameter:
            code, remedy = "FC204", _PARAMETER_REMEDY
        elif key in compatible.lost_by_raw_name and self._has_states:
            # One side has raw names of states, which count layers, and the other side counts others.
            code = "FC202"
            remedy = "give its name by an AOA statement (plain_state_statements() makes them); or correct the name"
        else:
            other = self._renamed + untied(catalog, row, self._source) or self._moved(row)
            # A state whose parameter has another name in the source has its value there.
            code = "FC201" if other else code
            remedy = other.removesuffix("; or ") if other and is_state(key, self.known) else other + remedy
        return Problem(NO_KEY, **where, got=got, code=code, remedy=remedy)

    def _moved(self, row: int) -> str:
        """Return the statement for a parameter that the source may have under another name; "" without a candidate."""
        key = self._catalog.keys[row]
        if is_state(key, self.known):
            return ""
        return self._moved_parameters.statement(key, self._catalog.unpadded(row, self._catalog.global_shape))

    @cached_property
    def _moved_parameters(self) -> MovedParameters:
        mapping, compatible, source = self._mapping, self._compatible, self._source
        keys = [key for key in self._catalog.keys if not is_state(key, self.known)]
        numbers = np.unique(source.key, return_index=True)
        pairs = ((source.keys[number], row) for number, row in zip(*(each.tolist() for each in numbers)))
        shapes = {
            name: source.unpadded(row, source.global_shape) for name, row in pairs if not is_state(name, self.known)
        }
        filled, used = self._there | {*compatible.names}, {*compatible.taken, *compatible.names.values()}
        if mapping is not None:
            filled, used = filled | {*mapping.tensors}, used | {*mapping.maps.sources, *mapping.removed}
        return MovedParameters(keys, filled, shapes, used)

    def _nearest(self, key: str) -> list[str]:
        """Return the nearest of the source's keys; none if there are keys of the same end, or too many to compare."""
        names = self._sorted_names
        if not self._searches or len(names) > _MOST_NAMES or _tail(key) in self._by_tail:
            return []
        self._searches -= 1
        of_kind = [name for name in names if is_state(name, self.known) == is_state(key, self.known)]
        return get_close_matches(key, of_kind, 3)

    def _not_made(self, key: str, mapping: TensorMapping, beta: float | None) -> tuple[str, str]:
        """Return why statements leave a target without a value, and the remedy."""
        why = mapping.provenance.get(key, "a statement removes the source key of that name, and none makes another")
        base, _, state = key.rpartition(".")
        is_there = base in self._there and not (base in mapping.unfed or base in mapping.removed)
        remedy = "add a statement that makes it, or load with strict=False to leave this target as it is"
        if state == MASTER and (base in mapping.tensors or is_there):
            remedy = _PARAMETER_REMEDY
        elif is_state(key, self.known):
            remedy = f"add a statement that makes the state{first_value(key, beta)}"
        return why, remedy

    @cached_property
    def known(self) -> set[str]:
        """Return the keys of both sides."""
        return {*self._source.keys, *self._catalog.keys}

    @cached_property
    def _there(self) -> set[str]:
        return {*self._source.keys}

    @cached_property
    def _has_states(self) -> bool:
        return any(is_state(name, self.known) for name in self._source.keys)

    @cached_property
    def _by_tail(self) -> dict[str, list[str]]:
        """Return the source's keys, sorted, by their last two parts."""
        found: dict[str, list[str]] = {}
        for name in self._sorted_names:
            found.setdefault(_tail(name), []).append(name)
        return found

    @cached_property
    def _renamed(self) -> str:
        return renamed(self._catalog.keys, self._there)

    @cached_property
    def _sorted_names(self) -> list[str]:
        return sorted(self._source.keys)


def with_family(problems: Sequence[Problem], has_statements: bool, facts: Facts) -> list[Problem]:
    """Return the problems, where the source's configuration names a family with rules, with a way to these in one.

    Args:
        problems: All problems of a rank.
        has_statements: Whether the call has statements.
        facts: Facts about the source.
    """
    found = [*problems]
    lacking = [number for number, each in enumerate(found) if each.what.startswith(NO_KEY) and each.code == "FC201"]
    family, config = facts.family() if lacking else ("", "")
    if family:
        first = found[lacking[0]]
        found[lacking[0]] = replace(
            first, remedy=f"{_of_family(family, config, has_statements)}{first.remedy}", code="FC201"
        )
    return found


def _of_family(family: str, config: str, has_statements: bool) -> str:
    if has_statements:
        return (
            f"if the statements are rules of {family}, the model may be another variant, which fuses other parameters "
            f"(`flexckpt rules {family}` lists them): take its rules; or "
        )
    return (
        f"give the rules of the family, aoa_config=fc.model_rules({family!r}, VARIANT, config={config!r}), where "
        f"VARIANT says what the model fuses (`flexckpt rules {family}` lists them); or "
    )


def _tail(key: str) -> str:
    return ".".join(key.rsplit(".", 2)[-2:])


def find_guesses(targets: Sequence[Unresolved], source: SourceKeys, found: CompatibleNames) -> list[Problem]:
    """Return the problems of states whose raw name alone chooses between several parameters of one shape.

    Args:
        targets: The targets of one rank that :func:`.find_compatible` looked for.
        source: The source's keys.
        found: The result of the search.
    """
    guessed = {target: key for target, key in found.by_raw_name.items() if is_counted(key)}
    if not guessed:
        return []
    decided = {key for target, key in found.names.items() if target not in found.by_raw_name}
    theirs = _kinds((key, shape) for key, shape in source.shapes.items() if key not in decided)
    open_targets = [each for each in targets if each.key not in found.names or each.key in found.by_raw_name]
    ours = _kinds((each.raw_name, each.shape) for each in open_targets)
    alike, own_alike = _by_kind(theirs), _by_kind(ours)
    pairs: dict[_Kind, dict[str, tuple[Unresolved, str]]] = {}
    for target in targets:
        key = guessed.get(target.key)
        if key is None:
            continue
        there = _parameter(key)
        kind = theirs[there]
        if len(alike[kind]) > 1 or len(own_alike[ours[_parameter(target.raw_name)]]) > 1:
            pairs.setdefault(kind, {}).setdefault(there, (target, key))
    return [_problem(kind[1], alike[kind], pairs[kind], source) for kind in pairs]


def _kinds(states: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, _Kind]:
    """Return path and shape of each parameter that has states under counted names: the shape of its largest state."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in states:
        if is_counted(name):
            parameter = _parameter(name)
            shapes[parameter] = max(shapes.get(parameter, ()), shape, key=lambda each: (math.prod(each), each))
    # The path, as in a nested state dict, distinguishes parameters.
    return {parameter: (".".join(parameter.split(".")[:-2]), shape) for parameter, shape in shapes.items()}


def _by_kind(kinds: Mapping[str, _Kind]) -> dict[_Kind, list[str]]:
    """Return the parameters of each path and shape."""
    alike: dict[_Kind, list[str]] = {}
    for parameter, kind in kinds.items():
        alike.setdefault(kind, []).append(parameter)
    return alike


def _parameter(name: str) -> str:
    raw = split_raw(bare(name))
    return raw.parameter if raw else name


def _problem(
    shape: tuple[int, ...], rivals: Sequence[str], pairs: Mapping[str, tuple[Unresolved, str]], source: SourceKeys
) -> Problem:
    target, key = next(iter(pairs.values()))
    listed = [f"{_meant(target)!r} from {there!r}" for there, (target, _) in pairs.items()]
    listed += [f"nothing from {there!r}" for there in rivals if there not in pairs]
    more = f" and {len(listed) - _MOST_PAIRS} more" if len(listed) > _MOST_PAIRS else ""
    recorded = source.state_names.get(key)
    remedy = (
        "load with raw_names='trusted' if this process makes the same networks in the same order as the one that "
        f"saved; else {HINT}"
    )
    if recorded:
        remedy = "load the model's state in the same state dict: the source says whose states these are"
    return Problem(
        f"states are named after Paddle's count of layers, and several parameters have the shape {list(shape)}: "
        "nothing says whose they are",
        key=target.key,
        rank=target.rank,
        expected="a record of whose they are, or one parameter of the shape",
        got=", ".join(listed[:_MOST_PAIRS]) + more,
        code="FC202",
        remedy=remedy,
    )


def _meant(target: Unresolved) -> str:
    """Return the parameter whose state a target is, by its best name."""
    names = target.state_names or (target.key,) * bool(target.raw_names)
    return bare(names[0].rpartition(".")[0]) if names else _parameter(target.key)


def reshaped(target: Catalog, row: int, source: Catalog, source_row: int, keys: set[str]) -> str:
    """Return the remedy for a target of another shape, with the statement if there is only one candidate; else "".

    ``keys`` are those of both sides.
    """
    old = source.unpadded(source_row, source.global_shape)
    new = target.unpadded(row, target.global_shape)
    found, wanted = map(quoted, _moved_names(target, row, source, source_row, keys))
    size = "load into a model of the saved size, or leave this key out (by aoa_config, KEY -> _, and strict=False)"
    if len(old) == len(new):
        differ = [(narrow, wide) for narrow, wide in zip(old, new) if narrow != wide]
        if len(differ) == 1:
            ((narrow, wide),) = differ
            text = f'{found} -> {wanted}, resize="auto"' + (', fill="keep"' if wide > narrow else "")
            return (
                f"{size}, or, if elements were added or removed at the end, as in a vocabulary, cut or extend it by "
                f"the AOA statement '{text}'"
            )
        # Axes of equal size cannot be distinguished.
        if sorted(old) == sorted(new) and len({*old}) == len(old):
            axes = [old.index(extent) for extent in new]
            text = f"{found}^T -> {wanted}" if len(axes) == 2 else f'{found} -> {wanted}, permute="{axes}"'
            return (
                f"if the source has its axes in another order (torch's Linear is transposed), add the AOA statement "
                f"'{text}'; also square tensors, whose shapes do not tell, need such a statement"
            )
        return ""
    # The order is row-major if axes were only joined or split, or have one element.
    edges = [{math.prod(shape[:axis]) for axis in range(len(shape) + 1)} for shape in (old, new)]
    if math.prod(old) == math.prod(new) > 0 and (edges[0] <= edges[1] or edges[1] <= edges[0]):
        text = f'{found} -> {wanted}, reshape="auto"'
        return f"if the values are the same in row-major order, add the AOA statement '{text}'; or {size}"
    return ""


def _moved_names(target: Catalog, row: int, source: Catalog, source_row: int, keys: set[str]) -> tuple[str, str]:
    """Return the names for a statement: of parameters, whose states follow, or of states of another shape."""
    names = source.key_name(source_row), target.key_name(row)
    parameters = split_state(names[0], keys)[0], split_state(names[1], keys)[0]
    for catalog, own, name, parameter in zip((source, target), (source_row, row), names, parameters):
        if parameter != name and parameter in catalog.keys:
            first = int(np.argmax(catalog.key == catalog.keys.index(parameter)))
            if catalog.unpadded(first, catalog.global_shape) != catalog.unpadded(own, catalog.global_shape):
                return names
    return parameters


def renamed(keys: Sequence[str], names: Collection[str]) -> str:
    """Return the statements for targets that the source has, all of them, under a prefix or without theirs; else ""."""
    key = next((key for key in keys if key not in names), "")
    longer = [name[: -len(key)] for name in names if key and name.endswith(f".{key}")]
    longer = [prefix for prefix in longer if all(prefix + each in names for each in keys)]
    shorter = [key[: found.end()] for found in re.finditer(r"\.", key)]
    shorter = [p for p in shorter if all(each.startswith(p) and each[len(p) :] in names for each in keys)]
    if len(longer) + len(shorter) != 1:
        return ""
    side, (prefix,) = ("the source's", longer) if longer else ("only the targets'", shorter)
    pair = f'"{prefix}{{key}}" -> "{{key}}"' if longer else f'"{{key[{len(prefix)}:]}}" -> "{{key}}"'
    return (
        f"as {side} keys begin with {prefix!r}, give the AOA statements [f'{pair}' for key in state_dict], where "
        "state_dict stands for model.state_dict(), or for that of the call; or "
    )


def first_value(key: str, beta: float | None = None) -> str:
    """Return the remedy by which a state that the source lacks gets its value before the first step.

    A master starts as its parameter: zeros in it would become the parameter's at the next step. ``beta`` is that of a
    power of it, if it is known.
    """
    raw, (parameter, _, state) = split_raw(bare(key)), key.rpartition(".")
    if MASTER in (state, raw and raw.state):
        way = f"'PARAMETER -> {quoted(parameter)}' and master_weights='convert'"
        if raw is not None:
            way = f"'PARAMETER -> {quoted(key)}, dtype=\"float32\"'"
        return (
            "; or start it from its parameter, whose name in the source is to stand for PARAMETER, by the AOA "
            f"statement {way}"
        )
    power = re.search(r"beta([12])_pow_acc_\d+$", key)
    value, of = (f"BETA{power[1]}", f", with the optimizer's beta{power[1]}") if power else ("0", "")
    if power and beta is not None:
        value, of = repr(beta), ""
    if _FROM_ONE.search(key):
        value = "1"
    if re.search(r"learning_rates_\d+$", key):
        value, of = "LEARNING_RATE", ", with the optimizer's learning rate"
    return (
        "; or, if it was not trained when the source was saved, give it the value that an optimizer begins with by "
        f"the AOA statement '_ -> {quoted(key)}, fill={value}'{of}; with strict=False it would stay what steps have "
        "made of it"
    )


def untied(target: Catalog, row: int, source: Catalog) -> str:
    """Return the statement for a head or embedding that the saved model tied to the other; "" for other targets."""
    keys = {*source.keys, *target.keys}
    key, shape = target.key_name(row), target.unpadded(row, target.global_shape)
    parameter = split_state(key, keys)[0]
    if len(shape) != 2 or _TIED.search(parameter) is None:
        return ""
    for number in np.unique(source.key):
        name = source.keys[number]
        if _TIED.search(name) is None or split_state(name, keys)[0] != name:
            continue
        first = int(np.argmax(source.key == number))
        stored = source.unpadded(first, source.global_shape)
        if shape in (stored, stored[::-1]):
            transposed = "^T" if shape != stored else ""
            text = f"{name}{transposed} -> {parameter}"
            return f"if the saved model tied it to {name!r}, add the AOA statement '{text}'; or "
    return ""
