"""Tensors as host memory: the only place that knows how a tensor's bytes are reached.

A contiguous CPU tensor is used where it stands, through its address, whatever its dtype and without a copy. Everything
else (device tensors, strided views) goes through a host copy of that one tensor: :class:`HostTensor` hides which.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import dtype_of


def dtype_name(tensor: Any) -> str:
    """Paddle's name of a tensor's (or array's) element type."""
    return str(tensor.dtype).rsplit(".", 1)[-1]


def is_initialized(tensor: Any) -> bool:
    """Whether a tensor has memory. A tensor without elements needs none."""
    if isinstance(tensor, np.ndarray) or 0 in tensor.shape:
        return True
    return bool(tensor._is_initialized())


def element_count(tensor: Any) -> int:
    """Number of elements of a tensor or array."""
    return math.prod(int(n) for n in tensor.shape)


def address_range(tensor: Any) -> tuple[int, int] | None:
    """First and last byte address (exclusive) that a tensor's elements span, or None if it has none."""
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


class HostTensor:
    """The elements of one tensor as a contiguous 1-D numpy array on the host.

    Attributes:
        array: The elements in row-major order. While ``staged`` is false it *is* the tensor's memory.
        staged: Whether ``array`` is a copy.
    """

    def __init__(self, tensor: Any, stage: bool = False) -> None:
        """Opens a tensor.

        Args:
            tensor: A Paddle tensor (initialised) or numpy array.
            stage: Copy even where the memory could be used directly.
        """
        self._tensor = tensor
        direct = not stage and is_contiguous(tensor) and (isinstance(tensor, np.ndarray) or _on_host(tensor))
        self.staged = not direct
        self._copy = None if direct else _host_copy(tensor)
        self.array = _memory(tensor if direct else self._copy)

    def store(self) -> None:
        """Puts a staged copy's elements back into the tensor, in place."""
        if not self.staged:
            return
        if isinstance(self._tensor, np.ndarray):
            self._tensor[...] = self._copy
            return
        if _on_host(self._tensor):
            # A strided view of host memory: written through its own strides, never through a Paddle view, whose
            # writes are lost when FLAGS_use_stride_kernel is off.
            _strided_memory(self._tensor)[...] = self.array.reshape([int(n) for n in self._tensor.shape])
            return
        import paddle

        with paddle.no_grad():
            self._tensor.copy_(self._copy, True)


def is_contiguous(tensor: Any) -> bool:
    """Whether a tensor's elements lie one after the other in row-major order."""
    if isinstance(tensor, np.ndarray):
        return bool(tensor.flags.c_contiguous)
    return bool(tensor.is_contiguous())


def _on_host(tensor: Any) -> bool:
    place = tensor.place
    return bool(place.is_cpu_place() or place.is_cuda_pinned_place())


def _host_copy(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return np.array(tensor, order="C")
    import paddle

    with paddle.no_grad():
        if _on_host(tensor):
            # clone() of a strided view may keep its strides; a fresh row-major tensor is wanted.
            copy = paddle.empty([int(n) for n in tensor.shape], dtype=tensor.dtype)
            _memory(copy).reshape([int(n) for n in tensor.shape])[...] = _strided_memory(tensor)
            return copy
        return tensor.detach().contiguous().cpu()


def _memory(tensor: Any) -> np.ndarray:
    """A contiguous host tensor's memory as a 1-D array."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1)
    dtype = dtype_of(dtype_name(tensor)).numpy
    count = element_count(tensor)
    if count == 0:
        return np.zeros(0, dtype=dtype)
    return np.frombuffer(_buffer(tensor, int(tensor.data_ptr()), count * dtype.itemsize), dtype=dtype)


def _buffer(tensor: Any, address: int, nbytes: int) -> Any:
    """Host memory as a buffer that keeps its tensor alive for as long as an array uses it."""
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    buffer.owner = tensor
    return buffer


def _strided_memory(tensor: Any) -> np.ndarray:
    """A host tensor's memory as an array with the tensor's own shape and strides."""
    dtype = dtype_of(dtype_name(tensor)).numpy
    bounds = address_range(tensor)
    shape = [int(n) for n in tensor.shape]
    if bounds is None:
        return np.zeros(shape, dtype=dtype)
    buffer = _buffer(tensor, bounds[0], bounds[1] - bounds[0])
    strides = [int(stride) * dtype.itemsize for stride in tensor.strides]
    return np.ndarray(shape, dtype=dtype, buffer=buffer, strides=strides)
