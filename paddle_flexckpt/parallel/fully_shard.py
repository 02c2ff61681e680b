"""Describe ``fully_shard`` on a process mesh, with fused parameters (its default): slices of buffers.

Parameters of one kind stand end to end in a buffer, each padded, and each rank holds an equal piece of the buffer. The
parameters themselves have memory only while their layer runs. The optimizer steps on the pieces: its states are those
of a buffer, and here they are taken apart again into ranges of parameters, without the padding.

Without fusion parameters and states are plain DistTensors, and nothing here is needed.
Tested in tests/semi_auto/test_fully_shard.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.parallel.sharding_stage3 import storage_range
from paddle_flexckpt.parallel.tensor_fusion import trainable_parameters
from paddle_flexckpt.sharded_weight import ShardedWeight

# Where a context keeps the identities of its parameters.
_MEMBERS = "_flexckpt_members"


@dataclass
class StateTables:
    """Hold an optimizer's tables, named as Paddle's are, by names of parameters in place of names of buffers."""

    _multi_precision: bool  # whether the master weights are in use
    _name: str | None
    _accumulators: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name of accumulator, and of parameter
    _master_weights: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, slice] = field(default_factory=dict)  # what this rank holds of each parameter

    def add_buffer(self, optimizer: Any, buffer: Any, master: Any, slots: Mapping[str, BufferSlot]) -> None:
        """Add the states of a buffer that an optimizer steps on.

        Every parameter of it has the same number for what is kept per buffer (powers of beta): one and the same
        tensor, so that a load into it needs equal numbers. States of a buffer with a master weight are kept under the
        master's name.
        """
        self.ranges.update({parameter: flat.elements for parameter, flat in slots.items()})
        if master is not None:
            for parameter, flat in slots.items():
                self._master_weights[parameter] = _slice(master, flat, f"{parameter}_fp32_master")
        for accumulator, tensors in optimizer._accumulators.items():
            tensor = tensors.get((buffer if master is None else master).name)
            if tensor is None:
                continue
            scalar = int(tensor.shape[0]) != int(buffer.shape[0])
            by_parameter = self._accumulators.setdefault(accumulator, {})
            for parameter, flat in slots.items():
                by_parameter[parameter] = tensor if scalar else _slice(tensor, flat, parameter)


@dataclass(frozen=True)
class BufferSlot:
    """Describe what this rank's piece of a buffer has of one parameter."""

    elements: slice  # the range of the parameter
    begin: int  # where the piece holds it


def fused_context() -> Any:
    """Return what ``fully_shard`` with fused parameters has registered, or None."""
    try:
        from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context
    except ImportError:  # Paddle before 3.3
        return None
    return get_fsdp_context()


def steps_on_buffers(parameters: Iterable[Any]) -> bool:
    """Return whether an optimizer of these parameters steps on the buffers of ``fully_shard``.

    An optimizer that was made before ``fully_shard`` has the dense parameters of before: the names of what is fused
    since are theirs with ``.dist`` behind. Another model's parameters may have names that are fused, too.
    """
    context = fused_context()
    if context is None:
        return False
    fused = _members(context)
    names = context.buffer_manager.param_to_buffer_id
    return any(id(p) in fused or (not p.is_dist() and f"{p.name}.dist" in names) for p in parameters)


def describe_fused(weight: ShardedWeight) -> ShardedWeight:
    """Return a parameter's shard as it is stored: a range of a buffer for a fused one, any other unchanged.

    What has been gathered of it is dropped. What a later forward gathers is not: so describe anew for each load.

    Raises:
        ValueError: The buffer has another size than this rank's piece, or is spread over more than one mesh axis.
    """
    parameter, context = weight.dist_tensor, fused_context()
    # By identity: another model's may have its name.
    if parameter is None or context is None or id(parameter) not in _members(context):
        return weight
    group = context.buffer_manager.param_to_buffer_id[parameter.name]
    buffer = context.buffer_manager.buffer_groups[group].params_buffer
    _drop_gathered(context, buffer)
    flat = _slot(buffer, _piece(context, buffer), parameter)
    shape = tuple(int(n) for n in parameter.shape)
    box = shape, shape, (0,) * len(shape)
    storage = _slice(buffer.data_buffer, flat, parameter.name)
    return ShardedWeight(weight.key, storage, *box, is_flattened=True, flattened_range=flat.elements)


def fused_tables(optimizer: Any) -> StateTables | None:
    """Return an optimizer's tables by parameter, if it steps on buffers; None otherwise."""
    if not steps_on_buffers(trainable_parameters(optimizer._parameter_list or [])):
        return None
    context = fused_context()
    masters = getattr(optimizer, "_master_weights", None) or {}
    tables = StateTables(bool(getattr(optimizer, "_multi_precision", True)), getattr(optimizer, "_name", None))
    for group in context.buffer_manager.buffer_groups:
        buffer = group.params_buffer
        piece = _piece(context, buffer)
        slots = {parameter.name: _slot(buffer, piece, parameter) for parameter in group.params}
        tables.add_buffer(optimizer, buffer.data_buffer, masters.get(buffer.data_buffer.name), slots)
    return tables


def _members(context: Any) -> frozenset[int]:
    """Return what is fused, by identity. It never changes, and is asked per parameter: so the context keeps it."""
    members: frozenset[int] | None = getattr(context, _MEMBERS, None)
    if members is None:
        groups = context.buffer_manager.buffer_groups
        members = frozenset(id(parameter) for group in groups for parameter in group.params)
        setattr(context, _MEMBERS, members)
    return members


def _piece(context: Any, buffer: Any) -> slice:
    """Return the elements of a buffer that this rank holds.

    Raises:
        ValueError: It holds something else than an equal piece.
    """
    group = context.buffer_manager._fsdp_group
    total, owned = int(buffer.total_buffer_size), int(buffer.data_buffer.shape[0])
    if owned * group.nranks != total or len(context.mesh.process_ids) != group.nranks:
        # Paddle splits by a rank's number in the whole mesh and gathers over its axis "dp".
        raise ValueError(
            f"fully_shard: buffer {buffer.data_buffer.name!r} of {total} elements, of which this rank holds {owned}, "
            f"is spread over {group.nranks} of the {len(context.mesh.process_ids)} ranks of {context.mesh}. Fused "
            "parameters can be described on meshes of one axis only. Remedy: fully_shard(..., "
            "enable_tensor_fusion_and_overlap=False)"
        )
    begin = (0 if group.nranks == 1 else group.rank) * owned
    return slice(begin, begin + owned)


def _slot(buffer: Any, piece: slice, parameter: Any) -> BufferSlot:
    """Return what a piece of a buffer has of one of the buffer's parameters."""
    offset = int(buffer.param_offsets[parameter.name])
    size = math.prod(int(n) for n in parameter.shape)
    first, last = min(max(piece.start - offset, 0), size), min(max(piece.stop - offset, 0), size)
    return BufferSlot(slice(first, last), offset + first - piece.start if last > first else 0)


def _slice(buffer: Any, flat: BufferSlot, parameter: str) -> Any:
    return storage_range(buffer, flat.begin, flat.elements.stop - flat.elements.start, parameter)


def _drop_gathered(context: Any, buffer: Any) -> None:
    """Free the whole buffers that Paddle keeps for the next layer or forward, if one of them is there.

    They would be used again after a load, with the values from before it. Paddle gathers them anew when it needs them.
    """
    from paddle.distributed.auto_parallel.fully_shard_fusion import BufferState

    if buffer.status == BufferState.FREED:
        return
    for group in context.buffer_manager.buffer_groups:
        other = group.params_buffer
        if other.status == BufferState.SYNCING:
            other.comm_task.wait()  # communication into memory that is given back would be lost on another tensor
            other.comm_task = None
            other.status = BufferState.READY
    context.comm_manager.reset_params_buffer_status()
