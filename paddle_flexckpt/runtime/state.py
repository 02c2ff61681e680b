"""Local states: a (nested) state dict of one rank as a catalog, with every problem it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, Problem, ValidationError
from paddle_flexckpt.runtime.tensors import dtype_name, element_count, is_contiguous, is_initialized
from paddle_flexckpt.sharded_weight import ShardedWeight, is_sharded_weight, make_replicated_sharded_weight


@dataclass(frozen=True, eq=False)
class LocalState:
    """One rank's shards.

    Attributes:
        weights: The shards, in the order of the catalog's rows.
        catalog: Their catalog.
    """

    weights: list[Any]
    catalog: Catalog

    def tensor(self, row: int) -> Any:
        """The live tensor of a row."""
        return self.weights[row].local_tensor


def flatten(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested state dict as one level, names joined by dots.

    Raises:
        ValidationError: A name is not a string, or two paths lead to the same name.
    """
    flat: dict[str, Any] = {}
    problems: list[Problem] = []

    def visit(mapping: Mapping[str, Any], path: str) -> None:
        for name, value in mapping.items():
            if not isinstance(name, str):
                problems.append(Problem("a state dict needs names that are strings", key=path, got=repr(name)))
                continue
            key = f"{path}{name}"
            if isinstance(value, Mapping):
                visit(value, f"{key}.")
            elif key in flat:
                problems.append(Problem("two entries of the nested state dict have the same name", key=key))
            else:
                flat[key] = value

    visit(state_dict, prefix)
    if problems:
        raise ValidationError(problems)
    return flat


def open_state(state_dict: Mapping[str, Any], rank: int, file: str | None = None) -> LocalState:
    """Describes a rank's state.

    Args:
        state_dict: Names to ShardedWeights (of this library or Paddle), DistTensors (described by their placements),
            and tensors or arrays (taken as replicated), nested as deep as one likes.
        rank: This rank's number.
        file: Name of the (virtual) file that the state stands for.

    Raises:
        ValidationError: Some value is not a usable shard; all of them are listed.
    """
    if not isinstance(state_dict, Mapping):
        raise ValidationError([f"the state has to be a dict of shards or tensors; got a {type(state_dict).__name__}"])
    builder = CatalogBuilder(rank, file)
    weights: list[Any] = []
    problems: list[Problem] = []
    for key, value in flatten(state_dict).items():
        problem = _unusable(key, value, rank)
        if problem is not None:
            problems.append(problem)
            continue
        try:
            weight = value if is_sharded_weight(value) else make_replicated_sharded_weight(key, value)
        except ValueError as error:  # the placements of a DistTensor
            problems.append(Problem(str(error).removeprefix(f"key {key!r}: "), key=key, rank=rank))
            continue
        problem = _malformed(key, weight, rank)
        if problem is not None:
            problems.append(problem)
            continue
        flat: Any = weight.flattened_range
        builder.add(
            key,
            dtype_name(weight.local_tensor),
            weight.global_shape,
            weight.global_offset,
            weight.local_shape,
            (int(flat.start), int(flat.stop)) if weight.is_flattened else None,
        )
        weights.append(weight)
    if problems:
        raise ValidationError(problems)
    return LocalState(weights, builder.build())


def _is_tensor(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    # Asked of the class: the place of a tensor without memory raises.
    return all(hasattr(type(value), name) for name in ("data_ptr", "is_contiguous", "place"))


def _unusable(key: str, value: Any, rank: int) -> Problem | None:
    """Why a value cannot be a shard, if it cannot."""
    if is_sharded_weight(value):
        if not _is_tensor(value.local_tensor):
            return Problem(
                "the local_tensor of a ShardedWeight has to be a tensor",
                key=key,
                rank=rank,
                got=type(value.local_tensor).__name__,
            )
        return None
    if not _is_tensor(value):
        return Problem(
            "a state dict holds tensors and ShardedWeights only",
            key=key,
            rank=rank,
            got=f"{value!r} ({type(value).__name__})",
            remedy="make it a tensor, or keep it outside the state dict",
        )
    if getattr(value, "is_distributed", False):
        return Problem(
            "a plain tensor that is marked is_distributed is one rank's part of a whole, of unknown place",
            key=key,
            rank=rank,
            remedy="use model.sharded_state_dict() instead of model.state_dict()",
        )
    return None


def _malformed(key: str, weight: ShardedWeight, rank: int) -> Problem | None:
    """What is wrong with a shard by itself, if anything is (what columns could not even hold)."""
    tensor = weight.local_tensor
    lengths = [len(weight.global_shape), len(weight.global_offset), len(weight.local_shape)]
    if len(set(lengths)) != 1:
        return Problem(
            "global_shape, global_offset and local_shape differ in length",
            key=key,
            rank=rank,
            got=f"{weight.global_shape}, {weight.global_offset}, {weight.local_shape}",
        )
    if not is_initialized(tensor):
        return Problem(
            "the tensor is not initialised: it has no memory",
            key=key,
            rank=rank,
            got=f"shape {list(tensor.shape)}",
            remedy="initialise it (released or lazily created parameters have to be materialised) first",
        )
    local_shape = tuple(weight.local_shape)
    if not weight.is_flattened:
        if tuple(int(n) for n in tensor.shape) != local_shape:
            return Problem(
                "the tensor has not the local shape of its ShardedWeight",
                key=key,
                rank=rank,
                expected=local_shape,
                got=tuple(tensor.shape),
            )
        return None
    flat = weight.flattened_range
    if flat is None or flat.start is None or flat.stop is None or flat.step not in (None, 1):
        return Problem(
            "a flattened shard needs a flattened_range with start and stop", key=key, rank=rank, got=repr(flat)
        )
    if element_count(tensor) != flat.stop - flat.start:
        return Problem(
            "the tensor has not as many elements as its flattened_range",
            key=key,
            rank=rank,
            expected=int(flat.stop - flat.start),
            got=element_count(tensor),
            remedy="strip the padding from the shard",
        )
    if not is_contiguous(tensor):
        return Problem("a flattened shard has to be contiguous", key=key, rank=rank)
    return None
