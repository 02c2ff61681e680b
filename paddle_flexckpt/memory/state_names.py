"""Names of optimizer states in a plain state dict. ``optimizer.state_dict()`` uses names with Paddle's numbers.

The same number means another layer in another process. But parameters know their raw names. If the model's parameters
are in the same state dict, the states get structured names from them, which a save records and a load compares. States
also have the order of their parameter's elements, where that is cut and they have no rule of their own.

Tested in tests/memory/test_state_names.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.catalog import CUT, NATURAL, Catalog, Order, Problem
from paddle_flexckpt.dist_tensor import is_dist_tensor
from paddle_flexckpt.optimizer_states import ACCUMULATORS, split_state
from paddle_flexckpt.sharded_weight import FusedAxis, is_sharded_weight
from paddle_flexckpt.transfer.names import bare, raw_parameter, split_raw

# A cheap test of all keys at once.
_STATE = re.compile(rf"_(?:{'|'.join(ACCUMULATORS)}|fp32_master)_\d+$|(?:^|\.)master_weights\.", re.MULTILINE)
_UNNAMED = re.compile(rf"_((?:{'|'.join(ACCUMULATORS)})_\d+)$")
# One number per parameter, whatever the parameter's shape.
_POWERS = re.compile(r"beta[12]_pow(?:_acc)?_\d+$")
_REMEDY = (
    "use optimizer.sharded_state_dict(model_state) instead of optimizer.state_dict(), where model_state is the model's "
    "sharded_state_dict()"
)


def tensor_name(value: Any) -> str | None:
    """Return Paddle's own name of a tensor, or of the tensor of a shard; None if it has none."""
    name = getattr(_tensor_of(value), "name", None)
    return name if isinstance(name, str) and name else None


def keys_by_name(state: Mapping[str, Any]) -> dict[str, dict[Any, list[str]]]:
    """Return keys, sorted, by the raw name of the tensor behind them, and by the tensor's identity.

    Networks that are made under ``unique_name.guard()`` have tensors of the same names. Then only parameters count: the
    tensors of ``paddle.load`` have the names of the parameters that were saved.
    """
    found: dict[str, dict[Any, list[str]]] = {}
    parameters: dict[str, set[Any]] = {}
    for key in sorted(state):
        name = tensor_name(state[key])
        if name is None:
            continue
        place, name = _identity(state[key]), raw_parameter(name)
        found.setdefault(name, {}).setdefault(place, []).append(key)
        if hasattr(_tensor_of(state[key]), "trainable"):
            parameters.setdefault(name, set()).add(place)
    for name, places in parameters.items():
        found[name] = {place: keys for place, keys in found[name].items() if place in places}
    return found


class StateNames(NamedTuple):
    """The names of the states in a state dict, and problems with them.

    Attributes:
        names: As ``state_names`` of a catalog.
        problems: States that may belong to any of several parameters, and parts of states that look like whole ones.
    """

    names: dict[str, tuple[str, ...]]
    problems: list[Problem]


def state_names(flat_state: Mapping[str, Any], rank: int, *, are_placed: bool = False) -> StateNames:
    """Return the structured names of the optimizer states that a flat state dict has under raw names.

    States whose parameter is not in the dict are left out. If the metadata has the place of each plain tensor in its
    whole (``are_placed``), no part is refused.
    """
    found = StateNames({}, [])
    if not _STATE.search("\n".join(flat_state)):
        return found
    states = {key: value for key, value in flat_state.items() if _STATE.search(key)}
    holders = keys_by_name({key: value for key, value in flat_state.items() if key not in states})
    for key, value in states.items():
        owner = _owner(key, holders)
        if owner is None:
            problem = None if are_placed else _unknown_part_problem(key, value, rank)
        elif len(holders[owner.parameter]) > 1:
            problem = ambiguous_name(owner.parameter, holders[owner.parameter], key, rank)
        else:
            ((keys),) = holders[owner.parameter].values()
            # An optimizer with a name prefixes it to the names of its accumulators.
            suffixes = {owner.suffix, *_UNNAMED.findall(owner.suffix)}
            owners = {name for each in keys for name in (each, bare(each))}
            names = {f"{owner.path}{name}.{suffix}" for name in owners for suffix in suffixes}
            found.names[key] = tuple(sorted(names))
            problem = None if are_placed else _part_problem(key, value, rank, keys[0], flat_state[keys[0]])
        if problem is not None:
            found.problems.append(problem)
    return found


class _Owner(NamedTuple):
    """The parameter that an optimizer state belongs to.

    Attributes:
        path: What precedes the parameter's raw name in the key.
        parameter: The raw name.
        suffix: What follows it: the name of the state.
    """

    path: str
    parameter: str
    suffix: str


def _owner(key: str, holders: Mapping[str, Any]) -> _Owner | None:
    """Return the parameter, among those with a known name, whose state a key is."""
    start = 0
    while True:
        raw = split_raw(key[start:], holders)
        path, parameter = key[:start], raw.parameter if raw else ""
        while raw is not None and parameter:
            if parameter in holders:
                return _Owner(path, parameter, raw.state)
            head, dot, parameter = parameter.partition(".")
            path += head + dot
        start = key.find(".", start) + 1
        if not start:
            return None


def ambiguous_name(
    name: str, places: Mapping[Any, list[str]], key: str | None = None, rank: int | None = None
) -> Problem:
    """Return the problem that a state may belong to any of several parameters with the same raw name."""
    return Problem(
        f"the states of several parameters cannot be told apart, as all have the name {name!r}",
        key=key,
        rank=rank,
        got=f"{sorted(keys[0] for keys in places.values())[:5]}",
        code="FC104",
        remedy=_REMEDY,
    )


def _part_problem(key: str, state: Any, rank: int, name: str, parameter: Any) -> Problem | None:
    """Return the problem that a plain state is one rank's part of a whole, if its parameter shows it."""
    if is_sharded_weight(state) or is_dist_tensor(state) or _POWERS.search(key) or "int" in str(state.dtype):
        return None
    tensor, is_part = _tensor_of(parameter), bool(getattr(parameter, "is_distributed", False))
    if is_sharded_weight(parameter):
        is_part = parameter.is_flattened or tuple(parameter.local_shape) != tuple(parameter.global_shape)
        tensor = parameter.local_tensor
    size, whole = prod(state.shape), prod(tensor.shape)
    if not is_part and (size == 1 or not whole or size % whole == 0):
        return None
    return Problem(
        f"a plain state is one rank's part of a whole, of unknown place: its parameter {name!r} is, or is larger",
        key=key,
        rank=rank,
        expected="all of it",
        got=f"shape {[int(n) for n in state.shape]}",
        code="FC104",
        remedy=_REMEDY,
    )


def _unknown_part_problem(key: str, state: Any, rank: int) -> Problem | None:
    """Return the problem that a plain state may be an unknown part, in a job whose ranks have parts of parameters."""
    topology = sys.modules.get("paddle.distributed.fleet.base.topology")
    hcg = getattr(topology, "_HYBRID_PARALLEL_GROUP", None)
    if hcg is None or is_sharded_weight(state) or is_dist_tensor(state) or split_raw(bare(key)) is None:
        return None
    degrees = {
        "tensor": hcg.get_model_parallel_world_size(),
        "pipeline": hcg.get_pipe_parallel_world_size(),
        "sharding": hcg.get_sharding_parallel_world_size(),
    }
    divided = [name for name, degree in degrees.items() if degree > 1]
    if not divided:
        return None
    return Problem(
        f"a plain state without its parameter, in a job with {' and '.join(divided)} parallelism: each rank may have "
        "another part, or another parameter of that name",
        key=key,
        rank=rank,
        code="FC104",
        remedy=_REMEDY,
    )


def _tensor_of(value: Any) -> Any:
    dist = getattr(value, "dist_tensor", None)  # its local value has another name, or none
    return getattr(value, "local_tensor", value) if dist is None else dist


def _identity(value: Any) -> Any:
    """Return the identity of a tensor, the same for every Python object that shows it."""
    tensor, slice_of = _tensor_of(value), getattr(value, "slice_of", None)
    if slice_of is not None or tensor.is_dist() or not tensor._is_initialized():
        return slice_of or id(tensor)
    return tensor.data_ptr() or id(tensor)


def order_of(key: str, weight: Any, rank: int) -> Order | Problem | None:
    """Return the order of a tensor's elements that one of its shards defines; None if it defines none."""
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
            code="FC207",
            remedy="correct the FusedAxis, or the shard's shape",
        )
    return Order(parts, axis, fused.statement)


def with_orders_of_states(
    keys: Sequence[str],
    orders: Sequence[Order | None],
    global_shapes: Sequence[tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
) -> list[Order | None]:
    """Return the order of each row. A state that is sharded and has no rule of its own has its parameter's order."""
    found = list(orders)
    cut = [row for row, order in enumerate(orders) if order is CUT and keys[row][-1:].isdigit()]
    if not cut:
        return found
    rows = {key: row for row, key in enumerate(keys)}
    for row in cut:
        base, state = split_state(keys[row], rows)
        parameter = rows.get(base) if state else None
        order = None if parameter is None else orders[parameter]
        if parameter is None or order is None or global_shapes[row] != global_shapes[parameter]:
            continue
        if order.axis is None or shapes[row][order.axis] == shapes[parameter][order.axis]:
            found[row] = order
    return found


def indivisible_rows(catalog: Catalog, rules: Sequence[FusedAxis | None]) -> np.ndarray:
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
