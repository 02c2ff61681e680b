"""Targets: what a load has to fill, checked against the source before anything is touched."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, dtype_of, unordered, validate_shards
from paddle_flexckpt.engine.names import CompatibleNames, Unfound, find_compatible, raw_meanings
from paddle_flexckpt.engine.options import TransferOptions
from paddle_flexckpt.engine.remedies import resized, untied
from paddle_flexckpt.live.fused import OtherOrder, completion, other_order
from paddle_flexckpt.live.shared_memory import refuse_targets_in_one_memory
from paddle_flexckpt.live.state import LocalState

_FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})
_COMPLEX = frozenset({"complex64", "complex128"})
_HALVES = frozenset({"float16", "bfloat16"})
MASTER = ".w_0"


@dataclass(frozen=True, eq=False)
class Wanted:
    """What one rank's load will fill.

    Attributes:
        catalog: The rank's targets, with every key under the name that the mapping or the source has for it.
        rows: The rows to fill.
        same_memory: For rows that share their memory with an earlier row but are made of something else: that earlier
            row. They are compared, not written.
        missing: Keys that the source does not have.
        aliases: Keys found under another name.
        cast: Keys whose values are cast, with the dtypes.
        masters: Master weights that start from their parameters, and parameters taken from their master weights.
        reordered: Fused targets that are not among the rows, as their parts have to be put right first.
        fused: Fused targets whose parts are put right, with the numbers of parts.
        maybe_fused: Source keys that may be fused, for all that the source says, and are not as the target is cut.
        raw_meanings: Parameters by the raw names of them that lead to keys of the source.
    """

    catalog: Catalog
    rows: np.ndarray
    same_memory: dict[int, int]
    missing: list[str]
    aliases: dict[str, str] = field(default_factory=dict)
    cast: dict[str, str] = field(default_factory=dict)
    masters: dict[str, str] = field(default_factory=dict)
    reordered: list[OtherOrder] = field(default_factory=list)
    fused: dict[str, str] = field(default_factory=dict)
    maybe_fused: list[str] = field(default_factory=list)
    raw_meanings: dict[str, list[str]] = field(default_factory=dict)

    def completion(self, source: Catalog) -> tuple[str, ...]:
        """The statements that put the parts of fused targets right."""
        if not self.reordered:
            return ()
        return completion(self.reordered, {*source.keys, *(one.key for one in self.reordered), *self.catalog.keys})


def resolve(
    state: LocalState,
    source: Catalog,
    policy: TransferOptions,
    mapping: TensorMapping | None = None,
    complete: bool = False,
) -> Wanted:
    """Finds what every target is made of and checks that it fits.

    Args:
        state: This rank's targets.
        source: All source shards.
        policy: What is allowed.
        mapping: What the keys that it defines are made of; every other target is the source's tensor of its name.
        complete: Whether nothing can be added to the mapping: what it renames is in the order that it shall have.

    Raises:
        ValidationError: A target is malformed, its key is missing, or dtype or global shape differ; all are listed.
    """
    target = state.catalog
    index = numbers = {name: i for i, name in enumerate(source.keys)}
    defined = {} if mapping is None else mapping.tensors
    if mapping is not None:
        # What a statement defines or removes is not the source's tensor of that name.
        index = {name: i for name, i in index.items() if name not in defined}
        index = {name: i for name, i in index.items() if name not in mapping.removed and name not in mapping.unfed}
    first_row = np.full(len(source.keys), -1, dtype=np.int64)
    # Written back to front: the first row of each key stays.
    first_row[source.key[::-1]] = np.arange(len(source))[::-1]
    names, missing = list(target.keys), []
    aliases: dict[str, str] = {}
    cast: dict[str, str] = {}
    masters: dict[str, str] = {}
    reordered: list[OtherOrder] = []
    unsaid, maybe_fused = unordered(source), set[str]()
    ruled = any(order.axis is not None for order in (*target.orders, *source.orders))
    copied = mapping.copied_keys(mapping.tensors) if mapping is not None and ruled and not complete else {}
    problems = validate_shards(target)
    rows = []
    own_names = []
    found_keys: list[tuple[str, str, tuple[str, ...]]] = []
    for row, weight in enumerate(state.weights):
        key = target.key_name(row)
        # Where nothing feeds the own name, what the source has under others is not meant either: a tied parameter's
        # states stand under one of its names, and statements speak of that one.
        removed = mapping is not None and key in mapping.unfed
        own_names.append(_find(key, weight, (defined,) if removed else (index, defined), policy))
    compatible = CompatibleNames()
    if policy.mw_name_compatibility and None in own_names:
        compatible = _compatible(state, own_names, index, policy, mapping)
        problems.extend(compatible.problems)
    for row, weight in enumerate(state.weights):
        key = target.key_name(row)
        removed = mapping is not None and key in mapping.unfed
        found = own_names[row] or compatible.names.get(key)
        if mapping is not None and found is not None and found in defined:
            if found != key:
                names[target.key[row]] = aliases[key] = found
            if found in mapping.masters:
                masters[key] = mapping.masters[found]
            allowed = replace(policy, dtype="cast") if found in mapping.masters else policy
            given, own = _made(mapping, found), copied.get(found, found)
            # A new name changes no order; a statement that makes a key of itself takes it as it is.
            number = numbers[own] if own != found else None
        else:
            master = _master(key, weight, found, target.dtype_name(row), source, index, first_row, policy)
            if master is not None and not removed:
                found = masters[key] = master
            if found is None:
                missing.append(key)
                if policy.missing_is_an_error:
                    problems.append(_missing(target, row, source, mapping, compatible))
                continue
            if found != key:
                names[target.key[row]] = found
                if master is None:
                    aliases[key] = found
            found_keys.append((key, found, tuple(getattr(weight, "aliases", ()))))
            allowed = policy if master is None else replace(policy, dtype="cast")
            number = index[found]
            given = _stored(source, int(first_row[number]), target, row)
        problem = _unfit(target, row, given, allowed, cast)
        if problem is None and number is not None:
            other = other_order(target, row, source, number)
            if isinstance(other, OtherOrder):
                other, other_name = replace(other, found=found), key in compatible.names
                if other.assumed:
                    maybe_fused.add(source.keys[number])
                if policy.fused == "convert" and other.statement is not None and not other_name:
                    reordered.append(other)
                    continue
                other = other.problem(other_name)
            elif unsaid[number] and _cut_otherwise(target, row, source, int(first_row[number])):
                maybe_fused.add(source.keys[number])
            problem = other
        if problem is not None:
            problems.append(problem)
            continue
        rows.append(row)
    if problems:
        raise ValidationError(problems)
    rows, same_memory = _share_memory(state, names, rows, mapping)
    renamed = replace(target, keys=tuple(names))
    return Wanted(
        renamed,
        np.asarray(rows, dtype=np.int64),
        same_memory,
        missing,
        aliases,
        cast,
        masters,
        reordered,
        maybe_fused=sorted(maybe_fused),
        raw_meanings=raw_meanings(found_keys, state.names_by_tensor),
    )


def _cut_otherwise(target: Catalog, row: int, source: Catalog, source_row: int) -> bool:
    """Return whether a target without a rule is cut otherwise, along its last axis, than the source's shards."""
    order = target.order(int(target.key[row]))
    ruled = order is not None and order.axis is not None
    return not ruled and bool(target.shape[row, -1] != source.shape[source_row, -1])


def _find(key: str, weight: Any, known: Iterable[Collection[str]], policy: TransferOptions) -> str | None:
    """The name under which a target is known to the source or to the mapping: its own, or that of a tied parameter."""
    for name in (key, *(getattr(weight, "aliases", ()) if policy.tied_names else ())):
        if any(name in names for names in known):
            return str(name)
    return None


def _compatible(
    state: LocalState,
    own_names: list[str | None],
    index: dict[str, int],
    policy: TransferOptions,
    mapping: TensorMapping | None,
) -> CompatibleNames:
    """The names under which the source has targets that it lacks under their own."""
    catalog = state.catalog
    # What statements take away or leave unfed is not looked for elsewhere.
    gone = frozenset() if mapping is None else {*mapping.unfed, *mapping.removed}
    targets: list[Unfound] = []
    claimed: dict[str, list[tuple[str, object]]] = {}
    for row, (weight, name) in enumerate(zip(state.weights, own_names)):
        key = catalog.key_name(row)
        if name is not None:
            claimed.setdefault(name, []).append((key, state.place(row)))
        elif key not in gone:
            aliases = tuple(getattr(weight, "aliases", ())) if policy.tied_names else ()
            raw_names = tuple(getattr(weight, "raw_names", ()))
            targets.append(Unfound(key, int(catalog.rank[row]), aliases, raw_names, state.place(row)))
    return find_compatible(targets, index, claimed, state.names_by_tensor())


def _master(
    key: str,
    weight: Any,
    found: str | None,
    dtype: str,
    source: Catalog,
    index: dict[str, int],
    first_row: np.ndarray,
    policy: TransferOptions,
) -> str | None:
    """The source key to convert from, where the policy allows it: a master's parameter, or a parameter's master."""
    if policy.master_weights == "exact":
        return None
    if found is None:
        candidates = (key, *getattr(weight, "aliases", ()))
        parameters = [name[: -len(MASTER)] for name in candidates if name.endswith(MASTER)]
        return next((name for name in parameters if name in index), None)
    stored = source.dtype_name(int(first_row[index[found]]))
    if dtype == "float32" and stored in _HALVES and found + MASTER in index:
        return found + MASTER
    return None


def _missing(
    target: Catalog, row: int, source: Catalog, mapping: TensorMapping | None, compatible: CompatibleNames
) -> Problem:
    """The problem of a target that nothing feeds: AOA statements say so, or else the name is wrong.

    Args:
        target: The targets.
        row: The row of the one.
        source: The source's shards.
        mapping: What statements say.
        compatible: What was found under other names.
    """
    key, names = target.key_name(row), source.keys
    where: dict[str, Any] = {"key": key, "rank": int(target.rank[row]), "expected": target.describe(row)}
    if mapping is not None and (key in mapping.unfed or key in mapping.removed):
        why = mapping.provenance.get(key, "a statement removes the source key of that name, and none makes another")
        # A reason that knows what to do says it.
        remedy = "add a statement that makes it, or load with strict=False to leave this target as it is"
        return Problem("nothing feeds a target", **where, got=why, remedy=None if "Remedy:" in why else remedy)
    tail = key.rsplit(".", 2)[-2:]
    alike = [name for name in names if name.rsplit(".", 2)[-2:] == tail][:3]
    got = f"{len(names)} keys, among them {alike or list(names[:3])}"
    if key in compatible.taken:
        got += f"; what might be meant is taken by target {compatible.taken[key]!r}"
    remedy = "correct the name, or load with strict=False to leave this target as it is"
    if key in compatible.lost_by_raw_name:
        # One side names states after parameters as Paddle counts them, and the other counts others.
        remedy = f"give its name by an AOA statement (plain_state_statements() makes them); or {remedy}"
    else:
        remedy = untied(target, row, source) + remedy
    return Problem("the source has no such key", **where, got=got, remedy=remedy)


@dataclass(frozen=True)
class _Given:
    """What a target would be filled from: its shape and dtype, where it is, how to name it, and what to change."""

    shape: tuple[int, ...]
    dtype: str
    text: str
    file: str | None = None
    remedy: str = "load into a model of the saved size, or leave this key out"


def _stored(source: Catalog, row: int, target: Catalog, target_row: int) -> _Given:
    shape = source.unpadded(row, source.global_shape)
    given = _Given(shape, source.dtype_name(row), "{} (source)", source.file_name(row))
    if shape == target.unpadded(target_row, target.global_shape):
        return given
    return replace(given, remedy=given.remedy + resized(target, target_row, source, row))


def _made(mapping: TensorMapping, name: str) -> _Given:
    info = mapping.tensors[name]
    # Braces of the statement are its own.
    origin = mapping.made_by(name).replace("{", "{{").replace("}", "}}")
    return _Given(info.shape, info.dtype, f"AOA gives {{}}{origin}", remedy="correct the statement, or the target")


def _unfit(target: Catalog, row: int, given: _Given, policy: TransferOptions, cast: dict[str, str]) -> Problem | None:
    """Why a target cannot be filled from what is given, if it cannot; notes a cast."""
    key, rank = target.key_name(row), int(target.rank[row])
    where: dict[str, Any] = {"key": key, "rank": rank, "file": given.file}
    target_shape = target.unpadded(row, target.global_shape)
    if target_shape != given.shape:
        return Problem(
            "global shapes differ",
            **where,
            expected=f"{list(target_shape)} (target)",
            got=given.text.format(list(given.shape)),
            remedy=given.remedy,
        )
    to_dtype, from_dtype = target.dtype_name(row), given.dtype
    if to_dtype == from_dtype:
        return None
    if policy.dtype == "raise":
        return Problem(
            "dtypes differ",
            **where,
            expected=f"{to_dtype} (target)",
            got=given.text.format(from_dtype),
            remedy='load with dtype="cast" to convert the values',
        )
    if not _castable(from_dtype, to_dtype):
        return Problem(
            "a cast would lose what the values mean",
            **where,
            expected=f"{to_dtype} (target)",
            got=given.text.format(from_dtype),
            remedy="load into a target of the saved dtype",
        )
    cast[key] = f"{from_dtype} -> {to_dtype}"
    return None


def _castable(source: str, target: str) -> bool:
    """Floats and complex numbers among themselves, integers to anything wider or floating; nothing to bool."""
    if source in _FLOATS:
        return target in _FLOATS or target in _COMPLEX
    if source in _COMPLEX:
        return target in _COMPLEX
    if target in _FLOATS or target in _COMPLEX:
        return True
    return np.can_cast(dtype_of(source).numpy, dtype_of(target).numpy, "safe")


def _share_memory(
    state: LocalState, names: list[str], rows: list[int], mapping: TensorMapping | None
) -> tuple[list[int], dict[int, int]]:
    """Sort out tied targets: which rows to fill, and which of these only to compare with an earlier one.

    Raises:
        ValidationError: Targets share memory without being the same part of a tensor.
    """
    catalog = state.catalog
    map_rows = {} if mapping is None else mapping.maps.rows_by_target()

    def made_of(row: int) -> object:
        """Equal for targets that get the same values: their source's name, or what a mapping says of them."""
        name = names[catalog.key[row]]
        if mapping is None or name not in mapping.tensors:
            return name
        own = map_rows.get(name, slice(0, 0))
        maps = mapping.maps.take(np.arange(own.start, own.stop))
        columns = (maps.source, maps.target_offset, maps.target_shape, maps.source_offset, maps.target_axis)
        moved = tuple(column.tobytes() for column in columns)
        return mapping.tensors[name], moved, tuple(mapping.regions.get(name, ()))

    seen: dict[object, list[int]] = {}
    spans: dict[int, tuple[int, int]] = {}
    keep, same_memory = [], {}
    for row in rows:
        place = state.place(row)
        if place is None:
            keep.append(row)
            continue
        earlier = seen.setdefault(place, [])
        if any(made_of(row) == made_of(other) for other in earlier):
            continue  # the same memory from the same source: filled already
        if earlier:
            same_memory[row] = earlier[0]
        else:
            spans[row] = place[0]
        earlier.append(row)
        keep.append(row)
    refuse_targets_in_one_memory(state, spans)
    return keep, same_memory
