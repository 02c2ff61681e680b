"""Describe a (nested) state dict of one rank as a catalog, or list every problem it has."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.aoa.sides import split_state
from paddle_flexckpt.catalog import CUT, NATURAL, Catalog, CatalogBuilder, Order, Problem, ValidationError
from paddle_flexckpt.dist_tensor import is_dist_tensor
from paddle_flexckpt.live.tensor_memory import dtype_name, element_count, is_contiguous, is_initialized
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight, is_sharded_weight, make_replicated_sharded_weight

_SCHEDULER = "LR_Scheduler"  # where Paddle's optimizer.state_dict() has the state of its scheduler
# Paddle's name of a rank's range of a parameter in a buffer, and of the states of it.
_SLICE = re.compile(r"(?:^|\.)slice@")


def order_of(key: str, weight: Any, rank: int) -> Order | Problem | None:
    """Return the order of a tensor's elements, as one of its shards says; None where it says nothing."""
    fused = getattr(weight, "fused", None)
    shape, whole = tuple(weight.local_shape), tuple(weight.global_shape)
    natural = getattr(weight, "dist_tensor", None) is not None or is_dist_tensor(weight.local_tensor)
    if fused is None:
        return NATURAL if natural or shape == whole else CUT
    if not -len(whole) <= fused.axis < len(whole):
        return Problem("a FusedAxis has an axis that the tensor has not", key, rank, None, f"{len(whole)} axes", fused)
    axis = fused.axis % len(whole)
    parts = fused.parts
    if parts is None and not natural and shape[axis] == 0:
        return None
    if parts is None:
        parts = 1 if natural else whole[axis] // shape[axis]
        fits = natural or parts * shape[axis] == whole[axis]
    else:
        fits = parts >= 1 and whole[axis] % parts == 0
    if not fits:
        return Problem(
            "the parts of a fused parameter have to be equal",
            key,
            rank,
            expected=f"equal parts of {whole[axis]} along axis {axis}",
            got=f"{fused.parts} parts" if fused.parts is not None else f"a shard of {shape[axis]}",
            remedy="correct the FusedAxis, or the shard's shape",
        )
    return Order(parts, axis, fused.statement)


def with_orders_of_states(described: Mapping[str, tuple[Any, Order | None]]) -> dict[str, Order | None]:
    """Return the order by key: a state that has no rule of its own, and is cut, lies like its parameter."""
    keys, orders = set(described), {key: order for key, (_, order) in described.items()}
    for key in [key for key, order in orders.items() if order is CUT]:
        base, state = split_state(key, keys)
        if not state or base not in described:
            continue
        (weight, _), (parameter, order) = described[key], described[base]
        if order is None or tuple(weight.global_shape) != tuple(parameter.global_shape):
            continue
        if order.axis is None or weight.local_shape[order.axis] == parameter.local_shape[order.axis]:
            orders[key] = order
    return orders


def indivisible_rows(catalog: Catalog, rules: Iterable[FusedAxis | None]) -> np.ndarray:
    """Return bool per row: whether a save has to write this shard whole, not split among its replicas.

    A shard is split along its first axis of more than one element. Where that is the axis of a fused parameter, the
    pieces would look like parts of a higher degree of tensor parallelism to versions that know no orders.
    """
    whole, flattened = np.zeros(len(catalog), dtype=bool), catalog.is_flattened
    for row, fused in enumerate(rules):
        if fused is None or flattened[row]:
            continue
        ndim = int(catalog.ndim[row])
        shape = catalog.shape[row, catalog.width - ndim :]
        whole[row] = ndim > 0 and fused.axis % ndim == int(np.argmax(shape > 1))
    return whole


@dataclass(frozen=True, eq=False)
class LocalState:
    """Hold one rank's shards, and the catalog that has a row for each."""

    weights: list[Any]
    catalog: Catalog

    def tensor(self, row: int) -> Any:
        """Return the live tensor of a row."""
        return self.weights[row].local_tensor


def tensor_name(value: Any) -> str | None:
    """Return Paddle's own name of a tensor, or of the tensor of a shard; None if it has none."""
    tensor = getattr(value, "local_tensor", value)
    if getattr(value, "dist_tensor", None) is not None:
        tensor = value.dist_tensor  # its local value has another name, or none
    name = getattr(tensor, "name", None)
    return name if isinstance(name, str) and name else None


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

    def visit(values: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for name, value in values.items():
            if not isinstance(name, str):
                where = "".join(f"{outer}." for outer in path)
                problems.append(Problem("a state dict needs names that are strings", key=where, got=repr(name)))
                continue
            names = (*path, name)
            key = ".".join(names)
            if isinstance(value, Mapping):
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
    """Return the nested state dict that :func:`flatten_state_dict` made one level of.

    Args:
        flat_state_dict: Values by joined name.
        mapping: The names that were joined, by joined name; those of other keys are not used.

    Raises:
        ValidationError: The mapping lacks a key, has something else than names for it, or leads two keys to one place
            or one into another's value; all are listed.
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


def open_state(state_dict: Mapping[str, Any], rank: int, file: str | None = None) -> LocalState:
    """Describe a rank's state as a catalog.

    Args:
        state_dict: Names to ShardedWeights (of this library or Paddle), DistTensors (described by their placements),
            and tensors or arrays (taken as replicated), nested as deep as one likes.
        rank: This rank's number.
        file: Name of the (virtual) file that the state stands for.

    Raises:
        ValidationError: Some value is not a usable shard; all of them are listed.
    """
    flat_state, paths = flatten_state_dict(state_dict)
    described: dict[str, tuple[Any, Order | None]] = {}
    problems: list[Problem] = []
    for key, value in flat_state.items():
        problem = _unusable(key, value, rank, paths[key])
        if problem is not None:
            if problem not in problems:  # a scheduler's state has several values
                problems.append(problem)
            continue
        try:
            weight = value if is_sharded_weight(value) else make_replicated_sharded_weight(key, value)
        except ValueError as error:  # the placements of a DistTensor
            problems.append(Problem(str(error).removeprefix(f"key {key!r}: "), key=key, rank=rank))
            continue
        problem = _malformed(key, weight, rank)
        said = problem or order_of(key, weight, rank)
        if isinstance(said, Problem):
            problems.append(said)
            continue
        described[key] = weight, said
    if problems:
        raise ValidationError(problems)
    builder = CatalogBuilder(rank, file)
    orders = with_orders_of_states(described)
    for key, (weight, _) in described.items():
        flat: Any = weight.flattened_range
        builder.add(
            key,
            dtype_name(weight.local_tensor),
            weight.global_shape,
            weight.global_offset,
            weight.local_shape,
            (int(flat.start), int(flat.stop)) if weight.is_flattened else None,
            order=orders[key],
        )
    return LocalState([weight for weight, _ in described.values()], builder.build())


def layout_of(state_dict: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return what :func:`open_state` makes of a state but its values, to be compared with that of another time.

    It costs a few microseconds a tensor: nothing is checked. Two states of which it is equal have the same shards, of
    the same tensors, in the same memory.
    """
    return [(key, *_layout_of_value(value)) for key, value in flatten_state_dict(state_dict)[0].items()]


def _layout_of_value(value: Any) -> tuple[Any, ...]:
    if not is_sharded_weight(value):
        return (_memory_of(value),)
    fields = dict(vars(value))
    tensors = _memory_of(fields.pop("local_tensor")), _memory_of(fields.pop("dist_tensor", None))
    for name in ("local_shape", "global_shape", "global_offset"):
        fields[name] = tuple(fields[name])  # a list could be changed where it is
    return (*tensors, fields)


def _memory_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return which tensor this is, and where its elements are."""
    if isinstance(tensor, np.ndarray):
        return id(tensor), tensor.__array_interface__["data"], tensor.shape, tensor.strides, tensor.dtype
    if not is_tensor(tensor):
        return None if tensor is None else (id(tensor), repr(tensor))
    local, spread = tensor, None
    if is_dist_tensor(tensor):
        local, spread = tensor._local_value(), (str(tensor.placements), str(tensor.process_mesh), tuple(tensor.shape))
    place = (int(local.data_ptr()), tuple(local.strides)) if is_initialized(local) else None
    marked = getattr(tensor, "is_distributed", False)
    return id(tensor), place, tuple(local.shape), local.dtype, tensor.name, marked, spread


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of Paddle, or an array of numpy."""
    if isinstance(value, np.ndarray):
        return True
    # Asked of the class: the place of a tensor without memory raises.
    return all(hasattr(type(value), name) for name in ("data_ptr", "is_contiguous", "place"))


def _unusable(key: str, value: Any, rank: int, path: tuple[str, ...]) -> Problem | None:
    """Return why a value cannot be a shard, if it cannot."""
    problem = functools.partial(Problem, key=key, rank=rank)
    if not key or any("\ud800" <= letter <= "\udfff" for letter in key):
        what = "a name is not empty" if not key else "a name is text, without lone surrogates"
        return problem(what, key=ascii(key)[1:-1], remedy="give the entry another name")
    if is_sharded_weight(value):
        if not is_tensor(value.local_tensor):
            return problem(
                "the local_tensor of a ShardedWeight has to be a tensor", got=type(value.local_tensor).__name__
            )
        return None
    if not is_tensor(value) and _SCHEDULER in path:
        return problem(
            "the state of an LR scheduler, which optimizer.state_dict() has in it, is not made of tensors",
            key=".".join(path[: path.index(_SCHEDULER) + 1]),
            remedy=f"take it out, optimizer_state.pop({_SCHEDULER!r}), and save {{**state, "
            "**collect_extra_state(scheduler)}; after the load, restore_extra_state(load_extra_state(path), scheduler)",
        )
    if not is_tensor(value):
        return problem(
            "a state dict holds tensors and ShardedWeights only",
            got=f"{value!r} ({type(value).__name__})",
            remedy="make it a tensor, or take it out and save it as extra state, collect_extra_state(name=value)",
        )
    if _SLICE.search(key):
        return problem(
            "a plain tensor whose name has slice@ is one rank's range of a fused buffer, of unknown place (Paddle's "
            "placements say that every rank has all of it)",
            got=f"shape {list(value.shape)}",
            remedy="save and load dist_model.sharded_state_dict() instead of dist_model.state_dict(); in dynamic mode "
            "the sharded_state_dict() of model and optimizer",
        )
    if getattr(value, "is_distributed", False):
        return problem(
            "a plain tensor that is marked is_distributed is one rank's part of a whole, of unknown place",
            remedy="use model.sharded_state_dict() instead of model.state_dict()",
        )
    return None


def _malformed(key: str, weight: ShardedWeight, rank: int) -> Problem | None:
    """Return what is wrong with a shard by itself, if anything is (what columns could not even hold)."""
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
            remedy="strip the padding from the shard",
        )
    if not is_contiguous(tensor):
        return problem("a flattened shard has to be contiguous")
    return None
