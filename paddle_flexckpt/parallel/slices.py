"""Describe parameters of which this rank holds a slice: stage 3 of group sharding, and ``fully_shard``.

Stage 3, and ``fully_shard`` without a mesh, flatten a large parameter, pad it, split it evenly over the ranks and
release the rest: the parameter keeps its shape but has no memory, and its elements are in ``parameter.fw_storage``.
Around a layer's forward and backward, and after ``get_all_parameters()``, a parameter is gathered (``status`` is
"all"): then it has all of its memory and no slice. Small parameters are not sliced at all. So nothing is communicated
here: layers describe parameters by their shapes, and a released parameter is then described by its slice. The optimizer
steps on the slices, under the parameter's name with ``slice@`` in front.

``fully_shard`` on a mesh with fused parameters (its default) lays parameters of one kind end to end in a buffer, each
padded, and each rank holds an equal piece of the buffer. The parameters themselves have memory only while their layer
runs. The optimizer steps on the pieces: its states are those of a buffer, and here they are divided again into ranges
of parameters, without the padding. Without fusion parameters and states are plain DistTensors.

Tested in tests/parallel/test_sharding.py and tests/semi_auto/test_fully_shard.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.optimizer_states import HISTORY
from paddle_flexckpt.parallel.tensor_fusion import trainable_parameters
from paddle_flexckpt.sharded_weight import MasterSlice, ShardedWeight

_PREFIX = "slice@"
# The attribute in which a context has the identities of its parameters.
_MEMBERS = "_flexckpt_members"


def parameter_name(name: str) -> str:
    """Return the name of the parameter that a tensor of this name is a slice of; any other name unchanged."""
    return name[len(_PREFIX) :] if name.startswith(_PREFIX) else name


def identity(weight: ShardedWeight) -> Any:
    """Return an identity that is equal for two names of a tensor, or for two Python objects of a slice."""
    # Each access to a slice, and to the local value of a DistTensor, makes another object.
    dist, slice_of = getattr(weight, "dist_tensor", None), getattr(weight, "slice_of", None)
    return slice_of or id(weight.local_tensor if dist is None else dist)


def belongs_to(weight: ShardedWeight, parameter: Any) -> bool | None:
    """Return whether a shard belongs to a parameter, and not to another of its name.

    None if one of the two has no memory, so that it cannot be known.
    """
    if identity(weight) == id(parameter):
        return True
    tensor = weight.local_tensor
    if getattr(weight, "slice_of", None) or parameter.is_dist() or not hasattr(tensor, "data_ptr") or tensor.is_dist():
        return False
    if not (tensor._is_initialized() and parameter._is_initialized()):
        return None
    return bool(tensor.data_ptr() == parameter.data_ptr())  # a view, in another shape


def describe_sliced(layer: Any, weight: ShardedWeight) -> ShardedWeight:
    """Return a parameter's shard as it is stored: the slice of a released one, any other unchanged.

    A gathered parameter is described by its own memory, all of which every rank has; when Paddle releases it, it makes
    the slices from there. A released one may have copies (``get_all_parameters(convert2cpu=True)``, or gathered ahead
    for a layer that was not run). They would be stale after a load, so they are dropped; Paddle gathers them again when
    it needs them.

    Raises:
        ValueError: It is not known which slice this is; or a small parameter is still its offloaded master.
    """
    parameter = weight.local_tensor
    if is_small(parameter) and parameter._is_shared_buffer_with(parameter.master_weight):
        raise ValueError(
            f"key {weight.key!r}: under stage 3 with offload=True the parameter is in host memory between step() and "
            "clear_grad(). Remedy (FC806): ask for the state after clear_grad()"
        )
    master = getattr(parameter, "master_weight", None)
    if not hasattr(parameter, "fw_storage") or (parameter.fw_storage is None and master is None):
        return weight
    wrapper = _wrapper_of(layer, parameter.name)
    if wrapper is None:
        raise ValueError(
            f"key {weight.key!r}: the parameter is sliced, but no stage-3 or fully_shard wrapper runs its layer "
            f"{type(layer).__name__}, so the place of the slice is unknown"
        )
    _drop_copies(parameter, wrapper)
    if master is not None:
        # With offload the slice is its master; a forward leaves a copy in the parameter's own dtype in its place.
        parameter.fw_storage = storage_range(master, 0, int(master._numel()), parameter.name)
        parameter.status, parameter.use_count = "part", 0
    flat = _sliced_range(wrapper, parameter.name, weight)
    storage = storage_range(parameter.fw_storage, 0, flat.stop - flat.start, parameter.name)
    kind = ShardedWeight if storage.dtype == parameter.dtype else MasterSlice
    made = flat_shard(weight.key, storage, weight, flat, kind)
    if isinstance(made, MasterSlice):
        made.half = parameter.dtype
    made.slice_of = id(parameter)
    return made


def flat_shard(
    key: str, tensor: Any, reference: ShardedWeight, flat: slice, kind: type[ShardedWeight] = ShardedWeight
) -> ShardedWeight:
    """Return a shard that is one flattened range of a reference's box, with the reference's fused parts."""
    box = reference.local_shape, reference.global_shape, reference.global_offset
    rule = getattr(reference, "fused", None)
    return kind(key, tensor, *box, is_flattened=True, flattened_range=flat, fused=rule)


def is_small(parameter: Any) -> bool:
    """Return whether stage 3 with offload has a whole parameter's master in host memory."""
    return getattr(parameter, "unslice", False) and getattr(parameter, "master_weight", None) is not None


def _wrapper_of(layer: Any, parameter: str) -> Any:
    """Return the wrapper that slices a layer's parameter.

    The layer does not refer to it, but the hook that gathers its parameters before each forward does.
    """
    for hook in layer._forward_pre_hooks.values():
        code = getattr(hook, "__code__", None)
        if code is None:
            continue
        for name, cell in zip(code.co_freevars, hook.__closure__ or ()):
            if name == "self" and parameter in getattr(cell.cell_contents, "_param2buffer", ()):
                return cell.cell_contents
    return None


def _drop_copies(parameter: Any, wrapper: Any) -> None:
    ahead = wrapper._task_flow.full_param.pop(parameter.name, None)
    if ahead is not None and ahead[1] is not None:
        ahead[1].wait()  # pending communication into released memory would be lost on another tensor
    if parameter._is_initialized():
        parameter._clear_data()


def _sliced_range(wrapper: Any, parameter: str, weight: ShardedWeight) -> slice:
    """Return this rank's range of a parameter, without the padding behind it."""
    size = math.prod(weight.local_shape)
    begin, end = wrapper._param2buffer[parameter][wrapper._rank]
    return slice(min(int(begin), size), min(int(end), size))


def storage_range(storage: Any, begin: int, size: int, parameter: str) -> Any:
    """Return a range of a one-dimensional storage, sharing its memory, named as a slice of a parameter."""
    import paddle

    # _slice() shares whatever FLAGS_use_stride_kernel is, but it cannot return an empty slice.
    tensor = storage._slice(begin, begin + size) if size else paddle.empty([0], dtype=storage.dtype)
    tensor.name = _PREFIX + parameter  # storage that was gathered and split again has lost its name
    return tensor


def shaped_view(what: str, tensor: Any, shape: Sequence[int]) -> Any:
    """Return a dense tensor's memory in another shape, under the tensor's name; ``what`` it is, for errors.

    Raises:
        ValueError: The tensor has no memory, its elements are not contiguous, or their number differs.
    """
    import paddle

    given, wanted = [int(n) for n in tensor.shape], [int(n) for n in shape]
    if math.prod(given) != math.prod(wanted) or not tensor._is_initialized() or not tensor.is_contiguous():
        raise ValueError(
            f"{what} of shape {given} cannot be seen as {wanted}: expected as many elements, one after the other in "
            f"memory; got strides {[int(n) for n in tensor.strides]}, memory: {bool(tensor._is_initialized())}. "
            "Remedy (FC107): keep it contiguous, in place of a transposed or cut view of something else"
        )
    # As in storage_range(). reshape() would copy what it cannot view, and record it for a backward.
    view = tensor._slice(0, given[0]) if given and 0 not in given else paddle.empty(given, dtype=tensor.dtype)
    view.get_tensor()._set_dims(wanted)
    view.name = tensor.name
    return view


# -- the optimizer -----------------------------------------------------------------------------------------------------


def stepped_parameters(optimizer: Any, parameters: Iterable[Any]) -> Iterator[Any]:
    """Yield, for each parameter, a tensor like the one that the step updates, for the creation of states.

    It is the slice of a sliced parameter, another parameter itself.

    Raises:
        ValueError: A gathered parameter's slice cannot be found.
    """
    from paddle.base.framework import EagerParamBase

    for parameter in parameters:
        if is_small(parameter):
            yield EagerParamBase(shape=parameter.shape, dtype=parameter.master_weight.dtype, name=parameter.name)
            continue
        if not hasattr(parameter, "fw_storage"):
            yield parameter
            continue
        storage = getattr(parameter, "master_weight", None)  # with offload
        storage = parameter.fw_storage if storage is None else storage
        if storage is None:
            storage = _slice_of_gathered(optimizer, parameter.name)
        # It lives while the states are created: Paddle makes another for every step.
        tensor = EagerParamBase(shape=storage.shape, dtype=storage.dtype, name=_PREFIX + parameter.name)
        storage._share_buffer_to(tensor)
        yield tensor


def slice_ranges(
    optimizer: Any, model: Mapping[str, ShardedWeight], names: Mapping[str, list[str]]
) -> dict[str, slice]:
    """Return, by parameter name, the flattened range of its local box that this rank has states of."""
    ranges: dict[str, slice] = {}
    wrapper = wrapper_of_optimizer(optimizer)
    for name, keys in names.items():
        weight = model[keys[0]]
        if weight.is_flattened and weight.flattened_range is not None:
            ranges[name] = weight.flattened_range
        elif name in getattr(wrapper, "_param2buffer", ()):  # gathered at the moment
            ranges[name] = _sliced_range(wrapper, name, weight)
    return ranges


def wrapper_of_optimizer(optimizer: Any) -> Any:
    """Return the stage-3 wrapper whose slices the optimizer steps on, if it has one."""
    return getattr(getattr(optimizer, "update_slice", None), "__self__", None)


def _slice_of_gathered(optimizer: Any, parameter: str) -> Any:
    wrapper = wrapper_of_optimizer(optimizer)
    if parameter not in getattr(wrapper, "_param2buffer", ()):
        raise ValueError(
            f"parameter {parameter!r} is gathered and {type(optimizer).__name__} does not know its slice. "
            "Remedy (FC806): use the optimizer that group_sharded_parallel() returned, outside of forward and backward"
        )
    begin, end = wrapper._param2buffer[parameter][wrapper._rank]
    return wrapper._task_flow.full_param[parameter][0]._slice(begin, end)


# -- fully_shard on a mesh ---------------------------------------------------------------------------------------------


def refuse_history(optimizer: Any) -> None:
    """Raise ValueError for an ASGD that steps slices: its history has an axis of its own before that of the slice."""
    if getattr(optimizer, "_y_acc_str", None) == HISTORY:
        raise ValueError(
            "ASGD keeps a history of gradients, which cannot be described where ranks step slices of parameters "
            "(sharding V2, stage 3, fused buffers). Remedy (FC805): use stage 2, or sharding V1 without tensor_fusion; "
            "or another optimizer"
        )


@dataclass
class StateTables:
    """An optimizer's tables, named as Paddle's are, keyed by parameter names in place of buffer names."""

    _multi_precision: bool  # whether the master weights are in use
    _name: str | None
    _accumulators: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name of accumulator, and of parameter
    _master_weights: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, slice] = field(default_factory=dict)  # this rank's range of each parameter

    def add_buffer(self, optimizer: Any, buffer: Any, master: Any, slots: Mapping[str, BufferSlot]) -> None:
        """Add the states of a buffer that an optimizer steps on.

        All its parameters share one tensor for the numbers of a buffer (powers of beta), so that a load into it needs
        equal numbers. States of a buffer with a master weight are under the master's name.
        """
        refuse_history(optimizer)
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
    """The range of one parameter in this rank's piece of a buffer."""

    elements: slice  # the range of the parameter
    begin: int  # its place in the piece


# Modules that may have ``get_fsdp_context``, the newest first: Paddle after 3.3 moved it. The last two fuse parameters.
_FUSION_MODULES = ("paddle.distributed.fsdp.fully_shard_fusion", "paddle.distributed.auto_parallel.fully_shard_fusion")
_CONTEXT_MODULES = ("paddle.distributed.fsdp._fsdp_context", *_FUSION_MODULES)


def buffer_context(has_dist_tensors: bool = True) -> Any:
    """Return the context that ``fully_shard`` with fused parameters has registered, or None.

    Args:
        has_dist_tensors: Whether there are parameters that ``fully_shard`` may have fused.

    Raises:
        RuntimeError: There are, and this Paddle has no known way to find them.
    """
    # The module that fuses parameters has been imported.
    finds = [getattr(sys.modules.get(name), "get_fsdp_context", None) for name in _CONTEXT_MODULES]
    if has_dist_tensors and not any(finds) and any(name in sys.modules for name in _FUSION_MODULES):
        import paddle

        raise RuntimeError(
            "cannot tell which parameters fully_shard has fused: expected get_fsdp_context in one of "
            f"{', '.join(_CONTEXT_MODULES)}, got none in Paddle {paddle.__version__}. Remedy (FC808): use a version of "
            "Paddle that this version of paddle_flexckpt knows, 3.0 to 3.3"
        )
    return next((context for context in (find() for find in finds if find) if context is not None), None)


def steps_on_buffers(parameters: Iterable[Any]) -> bool:
    """Return whether an optimizer of these parameters steps on the buffers of ``fully_shard``.

    An optimizer that was made before ``fully_shard`` has the earlier, dense parameters: the names of the fused ones are
    theirs with ``.dist`` behind. Another model's parameters may have the names of fused ones, too.
    """
    parameters = list(parameters)
    context = buffer_context(any(parameter.is_dist() for parameter in parameters))
    if context is None:
        return False
    fused = _members(context)
    names = context.buffer_manager.param_to_buffer_id
    return any(id(p) in fused or (not p.is_dist() and f"{p.name}.dist" in names) for p in parameters)


def describe_buffered(weight: ShardedWeight) -> ShardedWeight:
    """Return a parameter's shard as it is stored: a range of a buffer for a fused one, any other unchanged.

    Its gathered copies are dropped. Those of a later forward are not, so describe it anew for each load.

    Raises:
        RuntimeError: It is not known what this Paddle has fused.
        ValueError: The buffer has another size than this rank's piece, or is spread over more than one mesh axis.
    """
    parameter = weight.dist_tensor
    context = None if parameter is None else buffer_context()
    # By identity: another model's parameter may have its name.
    if parameter is None or context is None or id(parameter) not in _members(context):
        return weight
    group = context.buffer_manager.param_to_buffer_id[parameter.name]
    buffer = context.buffer_manager.buffer_groups[group].params_buffer
    _drop_gathered(context, buffer)
    flat = _slot_in_piece(buffer, _held_piece(context, buffer), parameter)
    shape = tuple(int(n) for n in parameter.shape)
    box = shape, shape, (0,) * len(shape)
    storage = _slice(buffer.data_buffer, flat, parameter.name)
    made = ShardedWeight(weight.key, storage, *box, is_flattened=True, flattened_range=flat.elements)
    made.slice_of = id(parameter)
    return made


def buffer_tables(optimizer: Any) -> StateTables | None:
    """Return an optimizer's tables by parameter, if it steps on buffers; None otherwise."""
    if not steps_on_buffers(trainable_parameters(optimizer._parameter_list or [])):
        return None
    context = buffer_context()
    masters = getattr(optimizer, "_master_weights", None) or {}
    tables = StateTables(bool(getattr(optimizer, "_multi_precision", True)), getattr(optimizer, "_name", None))
    for group in context.buffer_manager.buffer_groups:
        buffer = group.params_buffer
        piece = _held_piece(context, buffer)
        slots = {parameter.name: _slot_in_piece(buffer, piece, parameter) for parameter in group.params}
        tables.add_buffer(optimizer, buffer.data_buffer, masters.get(buffer.data_buffer.name), slots)
    return tables


def _members(context: Any) -> frozenset[int]:
    """Return the identities of the fused parameters, cached in the context: they are needed per parameter."""
    members: frozenset[int] | None = getattr(context, _MEMBERS, None)
    if members is None:
        groups = context.buffer_manager.buffer_groups
        members = frozenset(id(parameter) for group in groups for parameter in group.params)
        setattr(context, _MEMBERS, members)
    return members


def _held_piece(context: Any, buffer: Any) -> slice:
    """Return the elements of a buffer that this rank holds."""
    group = context.buffer_manager._fsdp_group
    total, owned = int(buffer.total_buffer_size), int(buffer.data_buffer.shape[0])
    if owned * group.nranks != total or len(context.mesh.process_ids) != group.nranks:
        # Paddle splits by a rank's number in the whole mesh and gathers over its axis "dp".
        raise ValueError(
            f"fully_shard: buffer {buffer.data_buffer.name!r} of {total} elements, of which this rank holds {owned}, "
            f"is spread over {group.nranks} of the {len(context.mesh.process_ids)} ranks of {context.mesh}. Fused "
            "parameters can be described on meshes of one axis only. Remedy (FC802): fully_shard(..., "
            "enable_tensor_fusion_and_overlap=False)"
        )
    begin = (0 if group.nranks == 1 else group.rank) * owned
    return slice(begin, begin + owned)


def _slot_in_piece(buffer: Any, piece: slice, parameter: Any) -> BufferSlot:
    """Return the range of one of the buffer's parameters in a piece of the buffer."""
    offset = int(buffer.param_offsets[parameter.name])
    size = math.prod(int(n) for n in parameter.shape)
    first, last = min(max(piece.start - offset, 0), size), min(max(piece.stop - offset, 0), size)
    return BufferSlot(slice(first, last), offset + first - piece.start if last > first else 0)


def _slice(buffer: Any, flat: BufferSlot, parameter: str) -> Any:
    return storage_range(buffer, flat.begin, flat.elements.stop - flat.elements.start, parameter)


def _drop_gathered(context: Any, buffer: Any) -> None:
    """Free the whole buffers that Paddle has for the next layer or forward, if one of them exists.

    They would be used again after a load, with the values from before it. Paddle gathers them anew when it needs them.
    """
    from paddle.distributed.auto_parallel.fully_shard_fusion import BufferState

    if buffer.status == BufferState.FREED:
        return
    for group in context.buffer_manager.buffer_groups:
        other = group.params_buffer
        if other.status == BufferState.SYNCING:
            other.comm_task.wait()  # pending communication into released memory would be lost on another tensor
            other.comm_task = None
            other.status = BufferState.READY
    context.comm_manager.reset_params_buffer_status()
