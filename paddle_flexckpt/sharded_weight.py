"""ShardedWeight: a live shard of a tensor, and the helpers that make shards.

Constructor, attributes and helper signatures are those of Paddle's own classes (3.2 and later), and where Paddle has
them ours are subclasses, so that either library's objects serve the other. Tested in tests/parallel/test_layers.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Union

from paddle_flexckpt.dist_tensor import is_dist_tensor, local_part

try:
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight as _PaddleShardedWeight
except ImportError:  # Paddle before 3.2 has no FlexCheckpoint of its own.
    _PaddleShardedWeight = object

MODEL_REMEDY = "call sharded_state_dict() of the model itself, after paddle_flexckpt.install()"


@dataclass(frozen=True)
class ShardedWeightDesc:
    """The description of a shard without its data."""

    key: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class FusedAxis:
    """The rule of a parameter that fuses several (q, k and v; gate and up) along the axis that is split.

    Every rank holds its parts of all of them side by side, so the whole tensor in rank order is another permutation for
    every degree of tensor parallelism. A save records rule and degree. Under that degree such a parameter loads as it
    is. Under any other the AOA statement ``"{key} -> {key}, {statement}"`` is applied to it and its states; with
    ``fused="exact"`` that is an error. A whole tensor or a DistTensor is in natural order: all of q, of k, of v.

    Attributes:
        axis: The axis that is split.
        statement: Tags and attributes of the AOA statement, e.g. ``"fused_ffn"`` or ``"fused_qkv_old, num_heads=8,
            num_key_value_groups=2"``; ``axis=`` may be left out. None: no statement is known, and another degree is
            an error.
        parts: Number of parts that lie side by side in the whole tensor: 1 for shards that are split out of the whole
            in natural order. None: as many as there are shards of this extent along the axis.
    """

    axis: int
    statement: str | None
    parts: int | None = None


class ShardedWeight(_PaddleShardedWeight):
    """The part of one tensor that this rank owns.

    ``local_tensor == global_tensor[offset : offset + local_shape]``, or, if flattened, the elements
    ``[flattened_range.start, flattened_range.stop)`` of that box in row-major order.

    Attributes:
        key: Name of the tensor.
        local_tensor: The live tensor (not a copy).
        local_shape: Shape of the local box.
        global_shape: Shape of the whole tensor.
        global_offset: First element of the local box in the whole tensor.
        is_flattened: Whether the shard is a flattened range of the box.
        flattened_range: That range, counted from the start of the box.
        aliases: Other names under which a checkpoint may hold the same tensor (tied parameters). They are tried in
            order when the key itself is not there.
        fused: The rule of a fused parameter, or None.
        raw_names: Of an optimizer's state: names that Paddle's plain ``optimizer.state_dict()`` may have for it.
        replicas: How replicas are compared if the caller of a save or reshard gives no ``check_replicas``:
            ``"first"`` for running statistics; None: the default.
        expert_ranks: For a tensor of an expert: the ranks that hold different experts; else empty.
        expert: For such a tensor: the expert's number and how many there are in the whole layer; else None.
        split_axis: The axis that a rule splits it along, in a job of one rank too; None without a rule.
        split_by: The group that splits it there: that of ``"tensor"`` parallelism, or the layer's ``"own"``.
        layers: In a pipeline: the positions of its layer in the description, several if it is shared; else empty.
        dist_tensor: The DistTensor whose local value ``local_tensor`` is, or None.
        slice_of: ``id()`` of the live parameter whose slice ``local_tensor`` is, or None.

    A DistTensor is described by its placements: ``local_tensor`` is then its local value, ``local_shape`` and
    ``global_offset`` are this rank's, and a rank that holds nothing of it has an empty flattened range.
    """

    # The parent's constructor is not called: it rejects a tensor that has no Paddle methods (a numpy array).
    def __init__(
        self,
        key: str,
        local_tensor: Any,
        local_shape: Sequence[int],
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        is_flattened: bool = False,
        flattened_range: slice | None = None,
        aliases: Iterable[str] = (),
        fused: FusedAxis | None = None,
        raw_names: Iterable[str] = (),
        replicas: Literal["equal", "close", "first"] | None = None,
    ) -> None:
        self.dist_tensor = None
        if is_dist_tensor(local_tensor):
            self.dist_tensor = local_tensor
            local_tensor, local_shape, global_offset, flat = _place_of(
                key, local_tensor, local_shape, global_shape, global_offset, flattened_range
            )
            is_flattened, flattened_range = flat is not None, flat
        self.key = key
        self.local_tensor = local_tensor
        self.local_shape = tuple(int(n) for n in local_shape)
        self.global_shape = tuple(int(n) for n in global_shape)
        self.global_offset = tuple(int(n) for n in global_offset)
        self.is_flattened = bool(is_flattened)
        self.flattened_range = flattened_range
        self.aliases = tuple(aliases)
        self.fused = fused
        self.raw_names = tuple(raw_names)
        self.expert_ranks: frozenset[int] = frozenset()
        self.expert: tuple[int, int] | None = None
        self.split_axis: int | None = None
        self.split_by: Literal["tensor", "own"] = "tensor"
        self.layers: tuple[int, ...] = ()
        self.slice_of: int | None = None
        self.replicas = replicas

    def __str__(self) -> str:
        shape = list(getattr(self.local_tensor, "shape", ()))
        text = (
            f"ShardedWeight(key={self.key!r}, local_tensor={type(self.local_tensor).__name__}{shape}, "
            f"local_shape={self.local_shape}, global_shape={self.global_shape}, global_offset={self.global_offset}"
        )
        if self.is_flattened:
            text += f", flattened_range={self.flattened_range}"
        return text + ")"

    __repr__ = __str__


class MasterSlice(ShardedWeight):
    """The float32 master of a half-precision parameter that a rank holds only as its master between steps.

    A save writes the parameter and its master, as ``.w_0``. A load reads the master.

    Attributes:
        half: The parameter's own dtype, of Paddle.
    """

    half: Any = None

    def as_pair(self) -> tuple[ShardedWeight, ShardedWeight]:
        """Return the parameter, rounded from the master now, and the master, as shards like any other."""
        parameter = self.local_tensor.astype(self.half)
        parameter.name = self.local_tensor.name
        pair = ShardedWeight.__new__(ShardedWeight), ShardedWeight.__new__(ShardedWeight)
        for made, tensor in zip(pair, (parameter, self.local_tensor)):
            made.__dict__.update(vars(self), local_tensor=tensor)
            del made.half  # type: ignore[attr-defined]
        return pair


# An older name of the same class.
ShardedTensor = ShardedWeight

ShardedStateDict = Union[dict[str, ShardedWeight], "OrderedDict[str, ShardedWeight]"]


def _place_of(
    key: str,
    tensor: Any,
    local_shape: Sequence[int],
    global_shape: Sequence[int],
    global_offset: Sequence[int],
    flattened_range: slice | None,
) -> tuple[Any, tuple[int, ...], tuple[int, ...], slice | None]:
    """Return local value, local shape, global offset and flattened range of a DistTensor, by its placements.

    Callers that do not know of DistTensors describe them as whole, which is put right here.

    Raises:
        ValueError: What the caller says is neither the whole tensor nor this rank's part.
    """
    whole = tuple(int(n) for n in tensor.shape)
    part = local_part(key, tensor)
    given = tuple(tuple(int(n) for n in values) for values in (local_shape, global_offset))
    known = [(whole, (0,) * len(whole)), (part.shape, part.offset)]
    if tuple(int(n) for n in global_shape) != whole or given not in known or flattened_range is not None:
        raise ValueError(
            f"key {key!r}: global_shape {tuple(global_shape)}, local_shape {given[0]}, global_offset {given[1]} and "
            f"flattened_range {flattened_range} are given for a DistTensor of shape {whole}, of which this rank holds "
            f"shape {part.shape} at {part.offset}. Remedy (FC105): make_replicated_sharded_weight(key, tensor) takes "
            "them from its placements; for a flattened range pass the local value"
        )
    if part.shape is None or part.offset is None:
        return part.tensor, whole, (0,) * len(whole), slice(0, 0)
    return part.tensor, part.shape, part.offset, None


def is_sharded_weight(value: Any) -> bool:
    """Return whether a value is a ShardedWeight, of this library or of Paddle."""
    return isinstance(value, ShardedWeight) or (
        _PaddleShardedWeight is not object and isinstance(value, _PaddleShardedWeight)
    )


def is_sharded_state_dict(o: Any) -> bool:
    """Return whether an object is a dict of ShardedWeights.

    Raises:
        TypeError: Some of its values are ShardedWeights and some are not.
    """
    if not isinstance(o, Mapping):
        return False
    sharded = [is_sharded_weight(value) for value in o.values()]
    if not any(sharded):
        return False
    if not all(sharded):
        other = next(key for key, is_sharded in zip(o, sharded) if not is_sharded)
        raise TypeError(
            f"all values must be ShardedWeight if any value is; the value of {other!r} is a {type(o[other]).__name__}"
        )
    return True


def shard_weight(key: str, weight: Any, axis: int, group: Any) -> ShardedWeight:
    """Describe a tensor as this rank's equal part, along one axis, of a tensor split over a process group.

    Args:
        key: Name of the tensor.
        weight: The local part.
        axis: The axis that is split; negative axes count from the end.
        group: Process group (``rank`` and ``nranks``) whose ranks hold the parts in order.

    Raises:
        ValueError: The axis does not exist, or this rank is not in the group.
    """
    shape = [int(n) for n in weight.shape]
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"key {key!r}: shard axis {axis} is invalid for a tensor of shape {shape}")
    axis %= len(shape)
    # Paddle gives the rank of a group of one as -1, member or not.
    rank = 0 if group.nranks == 1 else group.rank
    if not 0 <= rank < group.nranks:
        raise ValueError(f"key {key!r}: this rank is not in the group that splits the tensor ({group})")
    global_shape, offset = list(shape), [0] * len(shape)
    global_shape[axis] = shape[axis] * group.nranks
    offset[axis] = shape[axis] * rank
    made = ShardedWeight(key, weight, shape, global_shape, offset)
    made.split_axis = axis
    return made


def make_tp_sharded_weight_for_checkpoint(key: str, tensor: Any, tensor_parallel_axis: int = 0) -> ShardedWeight:
    """Describe a tensor as split over fleet's model-parallel group along an axis.

    Args:
        key: Name of the tensor.
        tensor: The local part.
        tensor_parallel_axis: The axis that is split.
    """
    return shard_weight(key, tensor, tensor_parallel_axis, model_parallel_group(key))


def model_parallel_group(key: str) -> Any:
    """Return fleet's model-parallel group; in one process without fleet, one that splits nothing.

    Raises:
        ValueError: ``fleet.init`` has not been called, in a job of several processes.
    """
    from paddle.distributed import get_world_size
    from paddle.distributed.fleet.base import topology

    hcg = topology._HYBRID_PARALLEL_GROUP
    if hcg is None and get_world_size() == 1:
        return SimpleNamespace(rank=0, nranks=1, ranks=[0])
    if hcg is None:
        raise ValueError(f"key {key!r} is split over the model-parallel group. Remedy (FC503): call fleet.init first")
    return hcg.get_model_parallel_group()


def make_replicated_sharded_weight(key: str, tensor: Any) -> ShardedWeight:
    """Describe a tensor of which every rank holds all; a DistTensor as its placements say."""
    shape = tuple(int(n) for n in tensor.shape)
    return ShardedWeight(key, tensor, shape, shape, (0,) * len(shape))


# Older names of the same functions.
make_tp_sharded_tensor_for_checkpoint = make_tp_sharded_weight_for_checkpoint
make_replicated_sharded_tensor = make_replicated_sharded_weight


def create_sharded_weight_with_new_local(
    new_key: str, new_local_tensor: Any, reference_tensor: ShardedWeight
) -> ShardedWeight:
    """Describe another tensor as split exactly like a reference (an optimizer's state like its parameter).

    A DistTensor is described by its own placements.

    Raises:
        ValueError: The tensor has not the reference's local shape; for a DistTensor, its global shape.
    """
    dist = is_dist_tensor(new_local_tensor)
    shape = tuple(int(n) for n in new_local_tensor.shape)
    expected = tuple(reference_tensor.global_shape if dist else reference_tensor.local_shape)
    if shape != expected:
        raise ValueError(
            f"Shape mismatch: {new_key!r} has {'global' if dist else 'local'} shape {shape}; expected {expected} as "
            f"{reference_tensor.key!r} has"
        )
    return ShardedWeight(
        new_key,
        new_local_tensor,
        expected,
        reference_tensor.global_shape,
        (0,) * len(expected) if dist else reference_tensor.global_offset,
        fused=getattr(reference_tensor, "fused", None),
    )


def build_sharded_state_dict(
    state_dict: Mapping[str, Any],
    shard_rules: Mapping[str, int | FusedAxis] | None = None,
    prefix: str = "",
    group: Any = None,
) -> dict[str, ShardedWeight]:
    """Describe the tensors of a state dict as shards.

    Args:
        state_dict: Names and local tensors.
        shard_rules: The axis of each tensor that is split, as a :class:`FusedAxis` if it fuses several; the others
            are replicated.
        prefix: Put in front of every name.
        group: The process group that splits them; fleet's model-parallel group by default.

    Raises:
        ValueError: A rule names no tensor, or a tensor that Paddle has marked ``is_distributed`` has no rule: taking
            it for replicated would save one rank's part as if it were the whole.
    """
    rules = dict(shard_rules or {})
    unknown = sorted(set(rules) - set(state_dict))
    if unknown:
        raise ValueError(f"shard rules for {unknown} name no tensor; there are {sorted(state_dict)}")
    sharded = {}
    for name, tensor in state_dict.items():
        key = f"{prefix}{name}"
        if name in rules:
            axis_group = model_parallel_group(key) if group is None else group
            rule = rules[name]
            axis = rule.axis if isinstance(rule, FusedAxis) else rule
            sharded[key] = shard_weight(key, tensor, axis, axis_group)
            sharded[key].fused = rule if isinstance(rule, FusedAxis) else None
            continue
        if getattr(tensor, "is_distributed", False):
            raise ValueError(
                f"key {key!r} is marked is_distributed, but no rule says along which axis it is split. Remedy (FC801): "
                "give its layer a _get_shard_rules() that returns {name: axis}"
            )
        sharded[key] = make_replicated_sharded_weight(key, tensor)
    return sharded


def build_shard_desc(val: ShardedWeight) -> ShardedWeightDesc:
    """Return the description of a shard without its data."""
    return ShardedWeightDesc(
        key=val.key,
        local_shape=tuple(val.local_shape),
        global_shape=tuple(val.global_shape),
        global_offset=tuple(val.global_offset),
        dtype=str(val.local_tensor.dtype).split(".")[-1],
    )


def merge_shard_info_list(list_of_dicts: Iterable[Mapping[str, Iterable[Any]]]) -> dict[str, list[Any]]:
    """Return one dict with the lists of all, joined per key in order."""
    merged: dict[str, list[Any]] = {}
    for info in list_of_dicts:
        for key, values in info.items():
            merged.setdefault(key, []).extend(values)
    return merged
