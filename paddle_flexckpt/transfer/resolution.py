"""Resolution: the sources of one rank's targets, the result of :mod:`paddle_flexckpt.transfer.resolver`.

A source fits a target if it has its global shape, and its dtype or one that can be cast. Keys of a source that no rank
asks for are unexpected, which may be an error.

Tested in tests/transfer/test_resolution.py, tests/transfer/test_unexpected.py and tests/loading/test_policies.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Problem, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES, castable, is_float
from paddle_flexckpt.catalog.layer_ranges import grouped
from paddle_flexckpt.optimizer_states import is_counter, is_torch_state, split_state
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.transfer.codes import CODE_DTYPES
from paddle_flexckpt.transfer.fused import FusedMismatch, mending_statements
from paddle_flexckpt.transfer.names import is_state, raw_meanings, split_raw
from paddle_flexckpt.transfer.options import TransferOptions
from paddle_flexckpt.transfer.targets import Targets

MASTER_END = ".w_0"

# The way a target is filled:
OWN = "own"  # from the source key of its own name
ALIAS = "alias"  # from that of a tied parameter's name
RAW_NAME = "raw name"  # from another name of Paddle's, with raw names among them
MASTER = "master"  # a master weight from its parameter, or the other way round
STATEMENT = "statement"  # by a statement
MISSING = "missing"  # not at all


class Resolved(NamedTuple):
    """The source of one target.

    Attributes:
        how: One of the words above.
        name: The key of the source, or of the mapping, that fills it; its own key if nothing does.
        alias: The name under which it was found, if it is another one.
        cast: ``float32 -> bfloat16``, if values are cast.
        master: The source key, if a master weight fills its parameter or the other way round.
        mismatch: The difference in fused parts: it is not filled until statements reorder them.
        maybe_fused: The source key, if it may be fused without a record of it, and is cut otherwise than the target.
        problem: Why it cannot be filled.
        completion: The statement that makes it from facts about the source; without that it is not filled.
    """

    how: str
    name: str
    alias: str = ""
    cast: str = ""
    master: str = ""
    mismatch: FusedMismatch | None = None
    maybe_fused: str = ""
    problem: Problem | None = None
    completion: str = ""


@dataclass(frozen=True, eq=False)
class Resolution:
    """The sources of one rank's targets.

    Attributes:
        targets: The targets.
        others: By row in rising order, all targets but those that the source's tensor of the same name fills.
        filled: int64, the rows to fill.
        same_memory: An earlier row, by row, for rows that share its memory and have another source. Such rows are
            compared, and not written.
    """

    targets: Targets
    others: dict[int, Resolved]
    filled: np.ndarray
    same_memory: dict[int, int]

    @cached_property
    def rows(self) -> tuple[Resolved, ...]:
        """Return the source of each target."""
        return tuple(self.others.get(row) or Resolved(OWN, key) for row, key in enumerate(self.targets.catalog.keys))

    @cached_property
    def catalog(self) -> Catalog:
        """Return the targets, with the mapping's or the source's name of every key."""
        names = list(self.targets.catalog.keys)
        for row, other in self.others.items():
            names[row] = other.name
        return replace(self.targets.catalog, keys=tuple(names))

    def by_key(self, column: str) -> dict[str, Any]:
        """Return a column by the targets' keys, without the rows in which it is empty."""
        number = Resolved._fields.index(column)
        keys = self.targets.catalog.keys
        return {keys[row]: other[number] for row, other in self.others.items() if other[number]}

    @property
    def missing(self) -> list[str]:
        """Return the keys that nothing fills."""
        return [self.targets.catalog.keys[row] for row, other in self.others.items() if other.how == MISSING]

    def untouched(self, source: Catalog) -> list[str]:
        """Return the parameters that nothing fills."""
        missing = self.missing
        known = {*self.targets.catalog.keys, *source.keys} if missing else set[str]()
        return [key for key in missing if not (key.startswith(EXTRA_STATE) or is_state(key, known))]

    @property
    def may_be_codes(self) -> bool:
        """Return whether values of a type for codes are cast; keys beside them in the source decide."""
        return any(other.cast.partition(" ")[0] in CODE_DTYPES for other in self.others.values())

    @property
    def mismatches(self) -> list[FusedMismatch]:
        """Return the fused targets that statements have to reorder first."""
        return [other.mismatch for other in self.others.values() if other.mismatch is not None]

    def statements(self, source: Catalog) -> tuple[str, ...]:
        """Return the statements that reorder fused targets, and those from facts about the source."""
        completions = tuple(sorted(self.by_key("completion").values()))
        if not self.mismatches:
            return completions
        keys = {*source.keys, *(one.key for one in self.mismatches), *self.catalog.keys}
        return (*mending_statements(self.mismatches, keys), *completions)

    def raw_meanings(self) -> dict[str, list[str]]:
        """Return parameters by those of their raw names that lead to keys of the source."""
        keys, known = self.targets.catalog.keys, self.targets.catalog.state_names
        columns = zip(keys, self.catalog.keys, self.targets.aliases, [known.get(key, ()) for key in keys])
        nothing = {row for row, other in self.others.items() if other.how in (STATEMENT, MISSING)}
        return raw_meanings([names for row, names in enumerate(columns) if row not in nothing])

    def used(self, source: Catalog, mapping: TensorMapping | None) -> np.ndarray:
        """Return bool per key of the source: whether this rank fills something from it."""
        index = {name: i for i, name in enumerate(source.keys)}
        used = np.zeros(len(source.keys), dtype=bool)
        masters = self.by_key("master")
        # All targets count, also those that share memory with one that is filled.
        names = {*self.catalog.keys, *masters}
        if mapping is not None:
            names = mapping.source_names(self.catalog.keys)
            # A parameter and its master weight have the same values: if one is used, the other is not left over.
            names |= {*masters, *(name[: -len(MASTER_END)] for name in masters.values() if name.endswith(MASTER_END))}
        # A tied parameter with two names has its states under one: those under the other are the same.
        tied = (row for row, others in enumerate(self.targets.aliases) if others and row not in self.others)
        same = {name for row in tied for name in self.targets.aliases[row] if name[-1:].isdigit()}
        names |= {name for name in same if name.rpartition(".")[0] in names}
        used[[index[name] for name in names if name in index]] = True
        return used

    def report(self) -> dict[str, Any]:
        """Return the fields of a LoadReport."""
        return {
            "keys": len(self.filled),
            "missing": self.missing,
            "aliases": self.by_key("alias"),
            "cast": self.by_key("cast"),
            "masters": self.by_key("master"),
            "fused": {one.key: one.summary() for one in self.mismatches},
            "maybe_fused": sorted({*self.by_key("maybe_fused").values()}),
        }


def check_unexpected(
    keys: Sequence[str], used: np.ndarray, mapping: TensorMapping | None, options: TransferOptions, context: str
) -> list[str]:
    """Return the keys of a source that no rank uses, sorted; ``used`` has bool for each key.

    Extra state, and keys that AOA statements remove, do not count.

    Raises:
        ValidationError: They are not allowed; the same on every rank.
    """
    removed = frozenset() if mapping is None else mapping.removed
    unused = [keys[i] for i in np.flatnonzero(~used).tolist()]
    unexpected = sorted(key for key in unused if not key.startswith(EXTRA_STATE) and key not in removed)
    loaded = {keys[i] for i in np.flatnonzero(used).tolist() if not keys[i].startswith(EXTRA_STATE)}
    states = _states_of_loaded(unexpected, keys, loaded)
    if states and options.optimizer_states == "raise":
        masters = states if all(key.endswith(".w_0") for key in states) else []
        # If some states are asked for, there is an optimizer. It may not train the other parameters.
        everything = {*keys}
        given = {key for key in loaded if is_state(key, everything)}
        kinds = [{split_state(key, everything)[1] for key in each} - {"w_0"} for each in (states, given)]
        frozen = bool(given) and kinds[0] <= kinds[1]
        raise ValidationError(
            f"no rank asks for {len(states)} optimizer states that the source has of parameters that are loaded, "
            f"such as {', '.join(map(repr, states[:3]))}. Remedy (FC203): "
            + (
                "if their parameters were frozen since, load before that (stop_gradient=False), and freeze them then: "
                "the optimizer keeps their states; "
                if frozen and not masters
                else ""
                if given
                else "give the optimizer's too: before its first step it has states only after "
                "paddle_flexckpt.install(), or by optimizer_sharded_state_dict(); "
            )
            + ("to take float32 parameters from their masters, give master_weights='convert'; " if masters else "")
            + (
                "to go on without these states"
                if frozen and not masters
                else "to load weights alone, or for an optimizer of another kind, which has no such states"
            )
            + ", give optimizer_states='ignore'",
            context,
        )
    if options.unexpected_is_an_error:
        others = {*unexpected}.difference(states)
        problems = [
            f"no rank asks for {f'key {text!r}' if text in others else text}, which the source has. Remedy (FC203): "
            "load it too, or allow it with strict='missing'"
            for text in grouped(others)
        ]
        if problems:
            raise ValidationError(problems, context)
    return unexpected


def dropped_parameters(unexpected: Sequence[str], keys: Sequence[str], used: np.ndarray) -> list[str]:
    """Return the keys, of unexpected ones, of parameters in layers like those of parameters that are used.

    A key's layer is all before its last dot; layers whose paths differ in numbers alone are alike.

    Args:
        unexpected: Keys of the source that no rank uses.
        keys: All keys of the source.
        used: Whether a rank uses each.
    """
    everything = {*keys} if unexpected else set[str]()
    dropped = [key for key in unexpected if not (is_state(key, everything) or is_counter(key))]
    if not dropped:
        return []
    loaded = (keys[i] for i in np.flatnonzero(used).tolist())
    layers = {_layer(key) for key in loaded if not is_state(key, everything)} - {""}
    return [key for key in dropped if _layer(key) in layers]


def left_behind(load: LoadReport, options: TransferOptions) -> list[str]:
    """Return the keys that a load of a whole run should not leave out without a word.

    Where the model alone is wanted, only parameters in layers like its own count: it may lack a head.
    """
    if options.strict is False or options.optimizer_states == "ignore":
        return [] if options.strict is False else load.dropped
    everything = {*load.unexpected}
    return [key for key in load.unexpected if not (is_state(key, everything) or is_counter(key))]


def _layer(key: str) -> str:
    """Return the path of a key's layer, with ``#`` for each number."""
    return re.sub(r"\d+", "#", key.rpartition(".")[0])


def refuse_nothing(asked: int, unexpected: Sequence[str], context: str) -> None:
    """Raise ValidationError for a transfer that fills none of its targets.

    ``asked`` is the number of all ranks' targets, ``unexpected`` has the keys that no rank asks for.
    """
    if asked:
        there = f"{len(unexpected)} keys, such as {', '.join(map(repr, unexpected[:3]))}" if unexpected else "no key"
        raise ValidationError(
            f"nothing was filled: none of the {asked} targets has a name that the source knows, which has {there}. "
            "Remedy (FC201): correct the targets' names, or give the source's keys these names by AOA statements",
            context,
        )


def _states_of_loaded(unused: list[str], keys: Sequence[str], used: set[str]) -> list[str]:
    """Return the keys, of some, that are optimizer states of used ones.

    Raw names (of a plain ``optimizer.state_dict()``) and torch's do not contain the parameter: they count as states of
    loaded parameters, if any parameter is loaded.
    """
    # Steps and settings of torch's optimizers have no tensors in Paddle's.
    torch = {key for key in unused if is_torch_state(key) and not is_counter(key) and "param_groups." not in key}
    candidates = [key for key in unused if key[-1:].isdigit() or key in torch]
    if not candidates or not used:
        return []
    everything = set(keys)
    # If only an optimizer is loaded, no raw name counts as a state of a loaded parameter.
    parameters = any(not is_state(key, everything) for key in used)

    def is_one(key: str) -> bool:
        is_other = split_raw(key) is not None or key in torch
        return split_state(key, everything)[0] in used or (parameters and is_other)

    return [key for key in candidates if is_one(key)]


@dataclass(frozen=True)
class Given:
    """The source of a target.

    Attributes:
        shape: Its global shape.
        dtype: Its dtype.
        text: A template of what an error got: ``{}`` stands for the shape or the dtype.
        file: Its file, for errors.
        shape_remedy: The remedy if the shapes differ.
    """

    shape: tuple[int, ...]
    dtype: str
    text: str
    file: str | None = None
    shape_remedy: str = (
        "load into a model of the saved size, or leave this key out (by aoa_config, KEY -> _, and strict=False)"
    )


def fit(target: Catalog, row: int, given: Given, casts: bool) -> tuple[str, Problem | None]:
    """Return the cast from a source to its target, and the problem if they do not fit."""
    where: dict[str, Any] = {"key": target.key_name(row), "rank": int(target.rank[row]), "file": given.file}
    shape, dtype = target.unpadded(row, target.global_shape), target.dtype_name(row)
    if shape != given.shape:
        where.update(expected=f"{list(shape)} (target)", got=given.text.format(list(given.shape)))
        return "", Problem("global shapes differ", **where, code="FC205", remedy=given.shape_remedy)
    if dtype == given.dtype or (given.dtype not in DTYPES and castable(given.dtype, dtype)):
        return "", None
    where.update(expected=f"{dtype} (target)", got=given.text.format(given.dtype))
    # Floats are a count only if there is a single one: a parameter may be called log_step.
    counts = is_counter(target.key_name(row)) and (math.prod(shape) == 1 or not is_float(given.dtype))
    if not castable(given.dtype, dtype) or (counts and not _is_exact(given.dtype, dtype)):
        remedy = "load into a target of the saved dtype"
        what = "a cast would lose what the values mean" if casts else "dtypes differ"
        return "", Problem(what, **where, code="FC206", remedy=remedy)
    if not casts:
        return "", Problem(
            "dtypes differ", **where, code="FC206", remedy='load with dtype="cast" to convert the values'
        )
    return f"{given.dtype} -> {dtype}", None


def _is_exact(before: str, after: str) -> bool:
    from paddle_flexckpt.aoa.casts import is_exact  # with the compiler, which most loads do not need

    return is_exact(before, after)


def have_same_form(target: Catalog, rows: np.ndarray, source: Catalog, stored: np.ndarray) -> np.ndarray:
    """Return bool per pair of a target and a stored row: whether they have the same global shape and dtype."""
    if not len(rows):
        return np.zeros(0, dtype=bool)
    width = max(target.width, source.width)
    shape, whole = source.widened(width).global_shape[stored], target.widened(width).global_shape[rows]
    names = {name: i for i, name in enumerate(source.dtypes)}
    dtype = np.asarray([names.get(name, -1) for name in target.dtypes], dtype=np.int64)[target.dtype[rows]]
    same = (shape == whole).all(axis=1) & (source.ndim[stored] == target.ndim[rows])
    return same & (source.dtype[stored] == dtype)


def are_ruled(catalog: Catalog) -> np.ndarray:
    """Return bool per key: whether the tensor is fused by a rule."""
    ruled = np.asarray([*(order.axis is not None for order in catalog.orders), False])
    return ruled[catalog.key_order] if len(catalog.key_order) else np.zeros(len(catalog.keys), dtype=bool)
