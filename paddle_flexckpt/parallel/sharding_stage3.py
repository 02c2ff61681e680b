"""Stage 3 of group sharding, and ``fully_shard``: parameters of which this rank holds a slice.

Both flatten a large parameter, pad it, split it evenly over the ranks and release the rest: it keeps its shape
but has no memory, and its elements stand in ``parameter.fw_storage``. Around a layer's forward and backward, and after
``get_all_parameters()``, a parameter is gathered (``status`` is "all"): then it has all of its memory and no slice.
Small parameters are not sliced at all.

So nothing is communicated here: layers describe parameters by their shapes, and what is released is then described by
its slice. The optimizer steps on the slices, under the parameter's name with ``slice@`` in front.
Tested in tests/parallel/test_sharding.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paddle_flexckpt.sharded_weight import ShardedWeight

_PREFIX = "slice@"


def parameter_name(name: str) -> str:
    """Return the name of the parameter that a tensor of this name is a slice of; any other name as it is."""
    return name[len(_PREFIX) :] if name.startswith(_PREFIX) else name


def identity(weight: ShardedWeight) -> Any:
    """Equal for two names of the same tensor, or of two looks at the same slice."""
    name = getattr(weight.local_tensor, "name", None)
    if isinstance(name, str) and name.startswith(_PREFIX):
        return name
    # Each look at the local value of a DistTensor is another object.
    dist = getattr(weight, "dist_tensor", None)
    return id(weight.local_tensor if dist is None else dist)


def describe_sliced(layer: Any, weight: ShardedWeight) -> ShardedWeight:
    """Return a parameter's shard as it is stored: the slice of a released one, any other unchanged.

    A gathered parameter is described by its own memory, of which every rank has all; when Paddle releases it, it takes
    the slices from there. Of a released one there may be copies (``get_all_parameters(convert2cpu=True)``, or gathered
    ahead for a layer that was not run). They would be stale after a load, so they are dropped; Paddle gathers them
    again when it needs them.

    Raises:
        ValueError: Nothing says which slice this is; or a small parameter is still its offloaded master.
    """
    parameter = weight.local_tensor
    if is_small(parameter) and parameter._is_shared_buffer_with(parameter.master_weight):
        raise ValueError(
            f"key {weight.key!r}: under stage 3 with offload=True the parameter is in host memory between step() and "
            "clear_grad(). Remedy: ask for the state after clear_grad()"
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
    flat = _range_of(wrapper, parameter.name, weight)
    storage = storage_range(parameter.fw_storage, 0, flat.stop - flat.start, parameter.name)
    return flat_shard(weight.key, storage, weight, flat)


def flat_shard(key: str, tensor: Any, reference: ShardedWeight, flat: slice) -> ShardedWeight:
    """Return a shard that is one flattened range of the box of a reference, and as fused as that."""
    box = reference.local_shape, reference.global_shape, reference.global_offset
    rule = getattr(reference, "fused", None)
    return ShardedWeight(key, tensor, *box, is_flattened=True, flattened_range=flat, fused=rule)


def is_small(parameter: Any) -> bool:
    """Return whether stage 3 with offload keeps a whole parameter's master in host memory."""
    return getattr(parameter, "unslice", False) and getattr(parameter, "master_weight", None) is not None


def _wrapper_of(layer: Any, parameter: str) -> Any:
    """Return the wrapper that slices a layer's parameter.

    The layer does not know it, but the hook that gathers its parameters before each forward does.
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
        ahead[1].wait()  # communication into memory that is given back would be lost on another tensor
    if parameter._is_initialized():
        parameter._clear_data()


def _range_of(wrapper: Any, parameter: str, weight: ShardedWeight) -> slice:
    """Return this rank's range of a parameter, without the padding behind it."""
    size = math.prod(weight.local_shape)
    begin, end = wrapper._param2buffer[parameter][wrapper._rank]
    return slice(min(int(begin), size), min(int(end), size))


def storage_range(storage: Any, begin: int, size: int, parameter: str) -> Any:
    """Return a range of a one-dimensional storage, sharing its memory, named as a slice of a parameter."""
    import paddle

    # _slice() shares whatever FLAGS_use_stride_kernel says, but it cannot give nothing.
    tensor = storage._slice(begin, begin + size) if size else paddle.empty([0], dtype=storage.dtype)
    tensor.name = _PREFIX + parameter  # storage that was gathered and split again has lost its name
    return tensor


# -- the optimizer -----------------------------------------------------------------------------------------------------


def stepped_parameters(optimizer: Any, parameters: Iterable[Any]) -> Iterator[Any]:
    """Return what the optimizer's step works on: the slices of sliced parameters, other parameters as they are.

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
        # It lives for as long as the states are created: Paddle makes another for every step.
        tensor = EagerParamBase(shape=storage.shape, dtype=storage.dtype, name=_PREFIX + parameter.name)
        storage._share_buffer_to(tensor)
        yield tensor


def slice_ranges(
    optimizer: Any, model: Mapping[str, ShardedWeight], names: Mapping[str, list[str]]
) -> dict[str, slice]:
    """Return, by name of parameter, the flattened range of its local box that this rank's states are of."""
    ranges: dict[str, slice] = {}
    wrapper = wrapper_of_optimizer(optimizer)
    for name, keys in names.items():
        weight = model[keys[0]]
        if weight.is_flattened and weight.flattened_range is not None:
            ranges[name] = weight.flattened_range
        elif name in getattr(wrapper, "_param2buffer", ()):  # gathered at the moment
            ranges[name] = _range_of(wrapper, name, weight)
    return ranges


def wrapper_of_optimizer(optimizer: Any) -> Any:
    """Return the stage-3 wrapper whose slices the optimizer steps on, if it has one."""
    return getattr(getattr(optimizer, "update_slice", None), "__self__", None)


def _slice_of_gathered(optimizer: Any, parameter: str) -> Any:
    wrapper = wrapper_of_optimizer(optimizer)
    if parameter not in getattr(wrapper, "_param2buffer", ()):
        raise ValueError(
            f"parameter {parameter!r} is gathered and {type(optimizer).__name__} does not know its slice. Remedy: use "
            "the optimizer that group_sharded_parallel() returned, outside of forward and backward"
        )
    begin, end = wrapper._param2buffer[parameter][wrapper._rank]
    return wrapper._task_flow.full_param[parameter][0]._slice(begin, end)
