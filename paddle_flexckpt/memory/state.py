"""Describe a (nested) state dict of one rank as a catalog, or list every problem it has."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.catalog import CUT, NATURAL, Catalog, CatalogBuilder, Order, Problem, ValidationError
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.dist_tensor import is_dist_tensor
from paddle_flexckpt.memory.state_names import StateNames, order_of, state_names, with_orders_of_states
from paddle_flexckpt.memory.tensor_memory import (
    dtype_name,
    element_count,
    is_contiguous,
    is_initialized,
    refuse_stale,
    unusable_tensor,
)
from paddle_flexckpt.sharded_weight import MasterSlice, ShardedWeight, is_sharded_weight, make_replicated_sharded_weight

_SCHEDULER = "LR_Scheduler"  # the key under which Paddle's optimizer.state_dict() has the state of its scheduler
# Paddle's name of a rank's range of a parameter in a buffer, and of its states.
_SLICE = re.compile(r"(?:^|\.)slice@")
_SHAPES = ("local_shape", "global_shape", "global_offset")
_TENSORS = ("local_tensor", "dist_tensor")
# In a name that is refused, or refused for a plain tensor.
_SUSPECT = re.compile("slice@|[\ud800-\udfff]")


@dataclass(frozen=True, eq=False)
class LocalState:
    """One rank's shards, with a catalog row for each.

    Attributes:
        weights: The ShardedWeight of each row; None for a plain tensor, which every rank holds all of.
        tensors: The live tensor of each row.
        catalog: The catalog.
    """

    weights: list[Any]
    tensors: list[Any]
    catalog: Catalog


class _Row(NamedTuple):
    """One shard of a state.

    ``weight`` is None for a plain tensor, all of which each rank holds; ``flat`` is None if the shard is the whole box.
    """

    key: str
    weight: Any
    tensor: Any
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    order: Order | None


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return a nested state dict as one level, names joined by dots.

    Args:
        state_dict: Names to values of any kind, or to dicts of the same kind. An empty dict leaves no trace.

    Returns:
        The values by joined name, and the names that were joined, for :func:`unflatten_state_dict`.

    Raises:
        ValidationError: This is no dict, a name is not a string, or two paths lead to the same name; all are listed.
    """
    flat: dict[str, Any] = {}
    mapping: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []

    is_nested: dict[type, bool] = {}  # isinstance() of an abstract class is slow

    def visit(values: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for name, value in values.items():
            kind = type(value)
            if kind not in is_nested:
                is_nested[kind] = isinstance(value, Mapping)
            if not isinstance(name, str):
                where = "".join(f"{outer}." for outer in path)
                problems.append(Problem("a state dict needs names that are strings", key=where, got=repr(name)))
                continue
            names, key = ((*path, name), ".".join((*path, name))) if path else ((name,), name)
            if is_nested[kind]:
                visit(value, names)
            elif key in flat:
                problems.append(Problem("two entries of the nested state dict have the same name", key=key))
            else:
                flat[key], mapping[key] = value, names

    if not isinstance(state_dict, Mapping):
        raise ValidationError([f"the state has to be a dict of shards or tensors; got a {type(state_dict).__name__}"])
    visit(state_dict, ())
    if problems:
        raise ValidationError(problems)
    return flat, mapping


def unflatten_state_dict(flat_state_dict: Mapping[str, Any], mapping: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the nested state dict that :func:`flatten_state_dict` has flattened.

    Args:
        flat_state_dict: Values by joined name.
        mapping: The names that were joined, by joined name; those of other keys are not used.

    Raises:
        ValidationError: The mapping lacks a key, does not have names for it, or gives two keys the same place or one a
            place inside another's value; all are listed.
    """
    nested: dict[str, Any] = {}
    places: dict[tuple[str, ...], str] = {}
    problems: list[Problem] = []
    for key in flat_state_dict:
        names = mapping.get(key)
        if names is None:
            problems.append(Problem("the mapping has no names for a key of the flat state dict", key=key))
        elif not isinstance(names, (tuple, list)) or not names or not all(isinstance(name, str) for name in names):
            problems.append(Problem("the mapping needs a tuple of names for each key", key=key, got=repr(names)))
        elif places.setdefault(tuple(names), key) != key:
            problems.append(Problem(f"the mapping has the names of key {places[tuple(names)]!r} again", key=key))
    for names, key in places.items():
        above = next((names[:end] for end in range(1, len(names)) if names[:end] in places), None)
        if above is not None:
            problems.append(Problem(f"the mapping puts a key into the value of key {places[above]!r}", key=key))
    if problems:
        raise ValidationError(problems)
    for names, key in places.items():
        inner = nested
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = flat_state_dict[key]
    return nested


@without_collector()
def open_state(
    state_dict: Mapping[str, Any], rank: int, file: str | None = None, *, is_source: bool = True
) -> LocalState:
    """Describe a rank's state as a catalog.

    Args:
        state_dict: Names to ShardedWeights (of this library or Paddle), DistTensors (described by their placements),
            and tensors or arrays (taken as replicated), nested as deep as one likes.
        rank: This rank's number.
        file: Name of the (virtual) file that the state stands for.
        is_source: Whether values are read from the state. A MasterSlice then gives two rows: the parameter, rounded
            from the master, and the master.

    Raises:
        ValidationError: Some value is not a usable shard; all of them are listed.
    """
    flat_state, paths = flatten_state_dict(state_dict)
    if is_source and MasterSlice in set(map(type, flat_state.values())):
        flat_state = _with_parameters(flat_state)
        paths = {key: paths.get(key, (key,)) for key in flat_state}
    rows: list[Any] = _usual_rows(flat_state, rank)
    problems: list[Problem] = []
    if not all(rows):
        rows = [row or _described(key, value, rank, paths[key]) for row, (key, value) in zip(rows, flat_state.items())]
        for problem in rows:
            if isinstance(problem, Problem) and problem not in problems:  # a scheduler's state has several values
                problems.append(problem)
    named = state_names(flat_state, rank) if not problems else StateNames({}, problems)
    if named.problems:
        raise ValidationError([*named.problems])
    builder = CatalogBuilder(rank, file)
    if not rows:
        return LocalState([], [], builder.build())
    keys, weights, tensors, global_shapes, offsets, shapes, flats, orders = map(list, zip(*rows))
    refuse_stale(keys, tensors, rank)
    dtypes = [tensor.dtype for tensor in tensors]
    numbers = list(map(id, dtypes))  # Paddle's are slow to hash
    names = {number: dtype_name(tensor) for number, tensor in dict(zip(numbers, tensors)).items()}
    unsupported = {number for number, name in names.items() if name not in DTYPES}
    if unsupported:
        pairs = ((keys[row], tensors[row]) for row, number in enumerate(numbers) if number in unsupported)
        found = (unusable_tensor(tensor, functools.partial(Problem, key=key, rank=rank)) for key, tensor in pairs)
        raise ValidationError(list(filter(None, found)))
    orders = with_orders_of_states(keys, orders, global_shapes, shapes)
    builder.add_many(keys, [names[number] for number in numbers], global_shapes, offsets, shapes, flats, orders)
    return LocalState(weights, tensors, replace(builder.build(), state_names=named.names))


def _with_parameters(flat_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with each parameter that its master describes, rounded from the master, and the master itself."""
    state: dict[str, Any] = {}
    for key, value in flat_state.items():
        if type(value) is MasterSlice:
            state[key], state[f"{key}.w_0"] = value.as_pair()
        else:
            state[key] = value
    return state


def _usual_rows(flat_state: Mapping[str, Any], rank: int) -> list[_Row | None]:
    """Describe usual values without a call for each; return None for those that need :func:`_described`.

    A value is usual if it is a shard, a tensor or an array whose rules can be checked by a few attributes. The rules
    are those of :func:`_unusable` and :func:`_malformed`, which find out what is wrong with the others.
    """
    kinds, suspect, new = _kinds(flat_state.values()), _suspect_names(flat_state), tuple.__new__
    found: list[_Row | None] = [None] * len(flat_state)
    origins: dict[int, tuple[int, ...]] = {}
    for number, (key, value) in enumerate(flat_state.items()):
        weight, tensor, kind = None, value, kinds[type(value)]
        if kind == _SHARD:
            weight, tensor = value, value.local_tensor
            kind = kinds[type(tensor)]
        if kind == _OTHER or key in suspect:
            continue
        extents = tuple(tensor.shape)
        if kind == _TENSOR and not (tensor.is_dense() and (tensor._is_initialized() or 0 in extents)):
            continue
        if weight is None:
            if not getattr(value, "is_distributed", False):
                offset = origins.get(len(extents)) or origins.setdefault(len(extents), (0,) * len(extents))
                found[number] = new(_Row, (key, None, tensor, extents, offset, extents, None, NATURAL))
            continue
        whole, offset, shape = tuple(weight.global_shape), tuple(weight.global_offset), tuple(weight.local_shape)
        flat = None
        if not len(whole) == len(offset) == len(shape):
            continue
        if weight.is_flattened:
            span = weight.flattened_range
            if not (type(span) is slice and type(span.start) is type(span.stop) is int and span.step is None):
                continue
            flat = (span.start, span.stop)
            contiguous = tensor.flags.c_contiguous if kind == _ARRAY else tensor.is_contiguous()
            if extents != (span.stop - span.start,) or not contiguous:
                continue
        elif extents != shape:
            continue
        order: Order | Problem | None = CUT
        if getattr(weight, "fused", None) is not None:
            order = order_of(key, weight, rank)
        elif shape == whole or getattr(weight, "dist_tensor", None) is not None:
            order = NATURAL
        if not isinstance(order, Problem):
            found[number] = new(_Row, (key, weight, tensor, whole, offset, shape, flat, order))
    return found


def _described(key: str, value: Any, rank: int, path: tuple[str, ...]) -> _Row | Problem:
    """Describe any value, or return why it cannot be a shard."""
    problem = _unusable(key, value, rank, path)
    if problem is not None:
        return problem
    try:
        weight = value if is_sharded_weight(value) else make_replicated_sharded_weight(key, value)
    except ValueError as error:  # the placements of a DistTensor
        return Problem(str(error).removeprefix(f"key {key!r}: "), key=key, rank=rank)
    order = _malformed(key, weight, rank) or order_of(key, weight, rank)
    if isinstance(order, Problem):
        return order
    span: Any = weight.flattened_range
    flat = (int(span.start), int(span.stop)) if weight.is_flattened else None
    whole, offset, shape = map(tuple, (weight.global_shape, weight.global_offset, weight.local_shape))
    return _Row(key, weight, weight.local_tensor, whole, offset, shape, flat, order)


# The kinds of types. Values of the kind _OTHER are described one by one.
_SHARD, _ARRAY, _TENSOR, _OTHER = range(4)


def _kinds(values: Collection[Any]) -> dict[type, int]:
    """Return the kind of each type of the values, and of the types of the shards' tensors."""
    examples = {type(value): value for value in values}
    kinds = {kind: _SHARD for kind, example in examples.items() if is_sharded_weight(example)}
    if kinds:
        held = [value.local_tensor for value in values if type(value) in kinds]
        examples.update({type(tensor): tensor for tensor in held})
    for kind, example in examples.items():
        tensor = _TENSOR if is_tensor(example) and hasattr(example, "is_dist") else _OTHER
        kinds.setdefault(kind, _ARRAY if kind in (np.ndarray, np.memmap) else tensor)
    return kinds


def _suspect_names(names: Collection[str]) -> set[str]:
    """Return the names that :func:`_unusable` may refuse."""
    text = "\n".join(names)
    if "" not in names and (("slice@" not in text) if text.isascii() else not _SUSPECT.search(text)):
        return set()
    return {name for name in names if not name or _SUSPECT.search(name)}


def state_fingerprint(state_dict: Mapping[str, Any], same_tensors: bool = True) -> list[Any]:
    """Return a value that is equal for two states with the same shards, of the same tensors, in the same memory.

    With ``same_tensors=False`` other objects may stand for the same memory, while the caller holds one of the states.

    It takes a few microseconds a tensor, without a call for each: nothing is checked.
    """
    flat = flatten_state_dict(state_dict)[0]
    kinds = _kinds(flat.values())
    shards = [value for value in flat.values() if kinds[type(value)] == _SHARD]
    layout: list[Any] = [list(flat), [type(value) for value in flat.values()]]
    if MasterSlice in kinds:
        layout.append(object())  # a parameter rounded from a master is another tensor each time
    for kind in dict.fromkeys(map(type, shards)):
        alike = [shard for shard in shards if type(shard) is kind]
        names = [name for name in vars(alike[0]) if name not in (*_TENSORS, *_SHAPES)]
        layout.append(list(map(attrgetter(*names, *_SHAPES), alike)))
        for name in _SHAPES:
            column = list(map(attrgetter(name), alike))
            if set(map(type, column)) != {tuple}:
                layout.append(list(map(tuple, column)))  # lists could be changed in place
        layout.append(_memory([getattr(shard, "dist_tensor", None) for shard in alike], kinds, same_tensors))
    tensors = [value.local_tensor if kinds[type(value)] == _SHARD else value for value in flat.values()]
    return [*layout, _memory(tensors, kinds, same_tensors)]


def _memory(tensors: Collection[Any], kinds: Mapping[type, int], same_tensors: bool) -> list[tuple[Any, ...]]:
    """Return the identities of these tensors, and the addresses of their elements; ``kinds`` has their types' kinds."""
    found: list[tuple[Any, ...]] = []
    for tensor in tensors:
        kind, identity = kinds.get(type(tensor), _OTHER), id(tensor) if same_tensors else None
        if kind == _ARRAY:
            found.append((identity, tensor.__array_interface__["data"], tensor.shape, tensor.strides, tensor.dtype))
        elif kind == _TENSOR and not tensor.is_dist():
            place = (tensor.data_ptr(), tensor.strides, tensor.shape) if tensor._is_initialized() else tensor.shape
            name = tensor.name if same_tensors else None
            found.append((identity, place, tensor.dtype, name, getattr(tensor, "is_distributed", None)))
        elif tensor is None:
            found.append(())
        else:
            found.append((id(tensor), *_other_memory(tensor)))
    return found


def _other_memory(tensor: Any) -> tuple[Any, ...]:
    if not is_dist_tensor(tensor):
        return (repr(tensor),)
    local = tensor._local_value()
    place = (local.data_ptr(), *local.strides) if is_initialized(local) else None
    return (
        place,
        *local.shape,
        local.dtype,
        tensor.name,
        str(tensor.placements),
        str(tensor.process_mesh),
        *tensor.shape,
    )


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of Paddle, or an array of numpy."""
    if isinstance(value, np.ndarray):
        return True
    # Looked up on the class: the place of a tensor without memory raises.
    return all(hasattr(type(value), name) for name in ("data_ptr", "is_contiguous", "place"))


def _unusable(key: str, value: Any, rank: int, path: tuple[str, ...]) -> Problem | None:
    """Return why a value cannot be a shard, or None."""
    problem = functools.partial(Problem, key=key, rank=rank)
    if not key or any("\ud800" <= letter <= "\udfff" for letter in key):
        what = "a name is empty" if not key else "a name has lone surrogates, which are no text"
        return problem(what, key=ascii(key)[1:-1], code="FC103", remedy="give the entry another name")
    if is_sharded_weight(value):
        if not is_tensor(value.local_tensor):
            return problem(
                "the local_tensor of a ShardedWeight has to be a tensor", got=type(value.local_tensor).__name__
            )
        return unusable_tensor(value.local_tensor, problem)
    if not is_tensor(value) and _SCHEDULER in path:
        return problem(
            "the state of an LR scheduler, which optimizer.state_dict() has in it, is not made of tensors",
            key=".".join(path[: path.index(_SCHEDULER) + 1]),
            code="FC108",
            remedy=f"take it out, optimizer_state.pop({_SCHEDULER!r}), and save {{**state, "
            "**collect_extra_state(scheduler)}; after the load, restore_extra_state(load_extra_state(path), scheduler)",
        )
    if not is_tensor(value):
        return problem(
            "a state dict holds tensors and ShardedWeights only",
            got=f"{value!r} ({type(value).__name__})",
            code="FC103",
            remedy="make it a tensor, or take it out and save it as extra state, collect_extra_state(name=value)",
        )
    if _SLICE.search(key):
        return problem(
            "a plain tensor whose name has slice@ is one rank's range of a fused buffer, of unknown place (Paddle's "
            "placements say that every rank has all of it)",
            got=f"shape {list(value.shape)}",
            code="FC104",
            remedy="save and load dist_model.sharded_state_dict() instead of dist_model.state_dict(); in dynamic mode "
            "the sharded_state_dict() of model and optimizer",
        )
    if getattr(value, "is_distributed", False):
        return problem(
            "a plain tensor that is marked is_distributed is one rank's part of a whole, of unknown place",
            code="FC104",
            remedy="use model.sharded_state_dict() instead of model.state_dict()",
        )
    return unusable_tensor(value, problem)


def _malformed(key: str, weight: ShardedWeight, rank: int) -> Problem | None:
    """Return what is wrong with a shard by itself, which a catalog could not even hold; None if nothing is."""
    problem = functools.partial(Problem, key=key, rank=rank)
    tensor = weight.local_tensor
    lengths = [len(weight.global_shape), len(weight.global_offset), len(weight.local_shape)]
    if len(set(lengths)) != 1:
        return problem(
            "global_shape, global_offset and local_shape differ in length",
            got=f"{weight.global_shape}, {weight.global_offset}, {weight.local_shape}",
        )
    if not is_initialized(tensor):
        return problem(
            "the tensor is not initialised: it has no memory",
            got=f"shape {list(tensor.shape)}",
            code="FC103",
            remedy="initialise it (released or lazily created parameters have to be materialised) first",
        )
    local_shape = tuple(weight.local_shape)
    if not weight.is_flattened:
        if tuple(int(n) for n in tensor.shape) != local_shape:
            return problem(
                "the tensor has not the local shape of its ShardedWeight", expected=local_shape, got=tuple(tensor.shape)
            )
        return None
    flat = weight.flattened_range
    if flat is None or flat.start is None or flat.stop is None or flat.step not in (None, 1):
        return problem("a flattened shard needs a flattened_range with start and stop", got=repr(flat))
    if element_count(tensor) != flat.stop - flat.start:
        return problem(
            "the tensor has not as many elements as its flattened_range",
            expected=int(flat.stop - flat.start),
            got=element_count(tensor),
            code="FC105",
            remedy="strip the padding from the shard",
        )
    if not is_contiguous(tensor):
        return problem("a flattened shard has to be contiguous")
    return None
