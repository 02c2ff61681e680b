"""Properties and memory of a tensor, and the check that no parameter is stale.

Tested in tests/memory/test_tensors.py, tests/memory/test_odd_tensors.py and tests/distributed/test_overlaps.py.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Problem, ValidationError, dtype_of
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.native.stretches import ADDRESSES, FIRST_ADDRESS
from paddle_flexckpt.overlaps import stale_parameters

# "Place(gpu:0)" is a device; "Place(cpu)" and "Place(gpu_pinned)" are memory of the host.
_DEVICE = re.compile(r"Place\((\w+:\d+)\)")
# A slice of this array costs less than a new one.
_MEMORY = np.frombuffer(ADDRESSES, dtype=np.uint8)


def dtype_name(tensor: Any) -> str:
    """Return Paddle's name of a tensor's (or array's) element type."""
    return str(tensor.dtype).rsplit(".", 1)[-1]


def is_initialized(tensor: Any) -> bool:
    """Return whether a tensor has memory. A tensor without elements needs none."""
    if isinstance(tensor, np.ndarray) or 0 in tensor.shape:
        return True
    return bool(tensor._is_initialized())


def element_count(tensor: Any) -> int:
    """Return the number of elements of a tensor or array."""
    return math.prod(int(n) for n in tensor.shape)


def unusable_tensor(tensor: Any, problem: Callable[..., Problem]) -> Problem | None:
    """Return why a tensor or an array cannot be a shard: its elements are not all in memory, or not as they seem."""
    if isinstance(tensor, np.ndarray) and type(tensor) not in (np.ndarray, np.memmap):
        return problem(
            "an array of numpy has to be a plain one, as others may show other elements than their memory has",
            got=f"{type(tensor).__module__}.{type(tensor).__name__}",
            code="FC103",
            remedy="give numpy.asarray() of it; of a masked array its filled(), and its mask as another tensor",
        )
    if not isinstance(tensor, np.ndarray) and not (tensor.is_dense() or tensor.is_dist()):
        return problem(
            "a tensor has to be dense",
            got=f"a sparse one of shape {list(tensor.shape)}",
            code="FC103",
            remedy="give its to_dense(); or save its indices() and values(), and load into tensors of their shapes",
        )
    if dtype_name(tensor) not in DTYPES:
        expected = f"one of {', '.join(DTYPES)}"
        remedy = "cast it, or take it out and save it as extra state, collect_extra_state(name=value)"
        return problem(
            "the dtype of a tensor is not supported",
            expected=expected,
            got=dtype_name(tensor),
            code="FC103",
            remedy=remedy,
        )
    return None


def address_range(tensor: Any) -> tuple[int, int] | None:
    """Return the byte address of a tensor's first element, and the one behind its last; None if it has none."""
    if element_count(tensor) == 0:
        return None
    itemsize = dtype_of(dtype_name(tensor)).itemsize
    if isinstance(tensor, np.ndarray):
        # numpy 2 moved it.
        byte_bounds = getattr(np, "byte_bounds", None) or np.lib.array_utils.byte_bounds
        return byte_bounds(tensor)
    begin = int(tensor.data_ptr())
    span = sum((int(extent) - 1) * int(stride) for extent, stride in zip(tensor.shape, tensor.strides))
    return begin, begin + (span + 1) * itemsize


def odd_strides(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's strides in bytes, or nothing if its elements are contiguous in row-major order."""
    size = dtype_of(dtype_name(tensor)).itemsize
    unit = 1 if isinstance(tensor, np.ndarray) else size
    strides = tuple(int(stride) * unit for stride in tensor.strides)
    step, usual = size, True
    for extent, stride in zip(reversed(tensor.shape), reversed(strides)):
        usual &= stride == step or int(extent) == 1
        step *= int(extent)
    return () if usual else strides


def device_of(tensor: Any) -> str | None:
    """Return the name of the device that holds a tensor, such as ``gpu:0``, or None for host memory."""
    if isinstance(tensor, np.ndarray):
        return None
    place = tensor.place
    found = None if place.is_cpu_place() else _DEVICE.fullmatch(str(place))
    return found[1] if found else None


def empty_on_host(shape: Sequence[int], dtype: str) -> Any:
    """Return a fresh, uninitialised host tensor, whatever the current device is."""
    import paddle
    from paddle.base.framework import convert_np_dtype_to_dtype_

    name = dtype if dtype in DTYPES else dtype_of(dtype).numpy.name
    # paddle.empty() allocates memory on the current device, and only newer releases have an argument for another.
    return paddle._C_ops.empty([int(n) for n in shape], convert_np_dtype_to_dtype_(name), paddle.CPUPlace())


def is_contiguous(tensor: Any) -> bool:
    """Return whether a tensor's elements lie one after the other in row-major order."""
    if isinstance(tensor, np.ndarray):
        return bool(tensor.flags.c_contiguous)
    return bool(tensor.is_contiguous())


def host_memory(tensor: Any) -> np.ndarray:
    """Return a contiguous host tensor's memory as a 1-D array."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1)
    dtype = dtype_of(dtype_name(tensor)).numpy
    count = element_count(tensor)
    if count == 0:
        return np.zeros(0, dtype=dtype)
    return np.frombuffer(_buffer(tensor, int(tensor.data_ptr()), count * dtype.itemsize), dtype=dtype)


def host_bytes(
    tensors: Sequence[Any], starts: Sequence[int], stops: Sequence[int], any_device: bool = True
) -> list[np.ndarray | None]:
    """Return the bytes ``[start, stop)`` of each contiguous host tensor as they stand in memory; None for the others.

    This makes no call for each tensor, and keeps none of them alive: the arrays are valid as long as the tensors live.
    ``any_device``: whether some may be on a device; finding out takes long.
    """
    found: list[np.ndarray | None] = []
    for tensor, start, stop in zip(tensors, starts, stops):
        if isinstance(tensor, np.ndarray):
            found.append(tensor.reshape(-1).view(np.uint8)[start:stop] if tensor.flags.c_contiguous else None)
        elif not tensor.is_contiguous() or (any_device and device_of(tensor) is not None):
            found.append(None)
        else:
            address = tensor.data_ptr() - FIRST_ADDRESS if stop > start else 0
            found.append(_MEMORY[address + start : address + stop])
    return found


def _buffer(tensor: Any, address: int, nbytes: int) -> Any:
    """Return host memory as a buffer that keeps its tensor alive for as long as an array uses it."""
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    buffer.owner = tensor
    return buffer


def strided_memory(tensor: Any) -> np.ndarray:
    """Return a host tensor's memory as an array with the tensor's own shape and strides."""
    dtype = dtype_of(dtype_name(tensor)).numpy
    bounds = address_range(tensor)
    shape = [int(n) for n in tensor.shape]
    if bounds is None:
        return np.zeros(shape, dtype=dtype)
    buffer = _buffer(tensor, bounds[0], bounds[1] - bounds[0])
    strides = [int(stride) * dtype.itemsize for stride in tensor.strides]
    return np.ndarray(shape, dtype=dtype, buffer=buffer, strides=strides)


def refuse_stale(keys: Sequence[str], tensors: Sequence[Any], rank: int) -> None:
    """Raise if a tensor is a parameter whose new value only other ranks have.

    Raises:
        ValidationError: There are such parameters; the text has their keys, and the ranks that have to gather them.
    """
    stale = {_address(parameter): ranks for parameter, ranks in stale_parameters()}
    stale.pop(None, None)  # some have no memory
    if not stale:
        return
    found = [(key, ranks) for key, ranks in zip(keys, (stale.get(_address(tensor)) for tensor in tensors)) if ranks]
    problems = [
        Problem(
            "with its overlap Paddle leaves the parameter stale after step(), until the next forward",
            key=key,
            rank=rank,
            expected=f"a call of ranks {[int(each) for each in ranks]} together, who have parts of the new values",
            code="FC806",
            remedy="call the model's sharded_state_dict() on all of these ranks first",
        )
        for key, ranks in found
    ]
    if problems:
        raise ValidationError(problems)


def _address(tensor: Any) -> int | None:
    local = tensor._local_value() if hasattr(tensor, "is_dist") and tensor.is_dist() else tensor
    return int(local.data_ptr()) if hasattr(local, "_is_initialized") and local._is_initialized() else None
