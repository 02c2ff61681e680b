"""Reach a tensor's bytes: in place where the host can, through a copy or the device elsewhere.

A contiguous host tensor is used where it stands, through its address, whatever its dtype and without a copy. A strided
host view goes through a host copy of that one tensor: :class:`HostTensor` hides which. Device tensors are reached in
slices (:mod:`~paddle_flexckpt.live.device_memory`), and as a :class:`HostTensor` only where a load fills them.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.engine.copies import AnyStorage, copy_values

# "Place(gpu:0)" is a device; "Place(cpu)" and "Place(gpu_pinned)" are memory of the host.
_DEVICE = re.compile(r"Place\((\w+:\d+)\)")


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


def address_range(tensor: Any) -> tuple[int, int] | None:
    """Return first and last byte address (exclusive) that a tensor's elements span, or None if it has none."""
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

    # paddle.empty() takes memory on the current device, and only newer releases have an argument for another.
    return paddle._C_ops.empty([int(n) for n in shape], convert_np_dtype_to_dtype_(dtype), paddle.CPUPlace())


def open_storage(tensor: Any) -> AnyStorage:
    """Open a tensor to be read, element by element in row-major order, or to be written where it is not staged.

    Returns:
        The memory of a contiguous host tensor, a host copy of a strided one, or a
        :class:`~paddle_flexckpt.live.device_memory.DeviceMemory`.
    """
    if device_of(tensor) is None:
        return host_memory(tensor) if is_contiguous(tensor) else HostTensor(tensor).array
    from paddle_flexckpt.live.device_memory import DeviceMemory

    return DeviceMemory(tensor)


class HostTensor:
    """Show the elements of one tensor as a contiguous 1-D numpy array on the host.

    Attributes:
        array: The elements in row-major order. While ``staged`` is false it *is* the tensor's memory.
        staged: Whether ``array`` is a copy.
    """

    def __init__(self, tensor: Any, stage: bool = False, fresh: bool = False) -> None:
        """Open an initialised tensor or an array.

        ``stage`` copies even where the memory could be used directly. ``fresh``: all of the array will be written
        before :meth:`store`, so a copy starts without the tensor's values.
        """
        self._tensor = tensor
        direct = not stage and is_contiguous(tensor) and device_of(tensor) is None
        self.staged = not direct
        self._copy = None if direct else _host_copy(tensor, fresh)
        self.array = host_memory(tensor if direct else self._copy)

    def store(self) -> None:
        """Put a staged copy's elements back into the tensor, in place."""
        if not self.staged:
            return
        if isinstance(self._tensor, np.ndarray):
            self._tensor[...] = self._copy
        elif device_of(self._tensor) is None:
            # A strided view of host memory: written through its own strides, never through a Paddle view, whose
            # writes are lost when FLAGS_use_stride_kernel is off.
            _strided_memory(self._tensor)[...] = self.array.reshape([int(n) for n in self._tensor.shape])
        elif self.array.size:
            from paddle_flexckpt.live.device_memory import DeviceMemory

            DeviceMemory(self._tensor).fill(self._copy)


def is_contiguous(tensor: Any) -> bool:
    """Return whether a tensor's elements lie one after the other in row-major order."""
    if isinstance(tensor, np.ndarray):
        return bool(tensor.flags.c_contiguous)
    return bool(tensor.is_contiguous())


def _host_copy(tensor: Any, fresh: bool) -> Any:
    if isinstance(tensor, np.ndarray):
        return np.array(tensor, order="C")
    copy = empty_on_host(tensor.shape, dtype_name(tensor))
    if fresh:
        return copy
    if device_of(tensor) is None:
        # clone() of a strided view may keep its strides; a fresh row-major tensor is wanted.
        host_memory(copy).reshape([int(n) for n in tensor.shape])[...] = _strided_memory(tensor)
    elif element_count(tensor):
        from paddle_flexckpt.live.device_memory import DeviceMemory

        copy_values(DeviceMemory(tensor).whole(), DeviceMemory(tensor), host_memory(copy))
    return copy


def host_memory(tensor: Any) -> np.ndarray:
    """Return a contiguous host tensor's memory as a 1-D array."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1)
    dtype = dtype_of(dtype_name(tensor)).numpy
    count = element_count(tensor)
    if count == 0:
        return np.zeros(0, dtype=dtype)
    return np.frombuffer(_buffer(tensor, int(tensor.data_ptr()), count * dtype.itemsize), dtype=dtype)


def _buffer(tensor: Any, address: int, nbytes: int) -> Any:
    """Return host memory as a buffer that keeps its tensor alive for as long as an array uses it."""
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    buffer.owner = tensor
    return buffer


def _strided_memory(tensor: Any) -> np.ndarray:
    """Return a host tensor's memory as an array with the tensor's own shape and strides."""
    dtype = dtype_of(dtype_name(tensor)).numpy
    bounds = address_range(tensor)
    shape = [int(n) for n in tensor.shape]
    if bounds is None:
        return np.zeros(shape, dtype=dtype)
    buffer = _buffer(tensor, bounds[0], bounds[1] - bounds[0])
    strides = [int(stride) * dtype.itemsize for stride in tensor.strides]
    return np.ndarray(shape, dtype=dtype, buffer=buffer, strides=strides)
