"""Reach a tensor's bytes: in place where the host can, through a copy or the device elsewhere.

A contiguous host tensor is used where it stands, through its address, whatever its dtype and without a copy. A strided
host view goes through a host copy of that one tensor: :class:`HostTensor` hides which. Device tensors are reached in
slices (:mod:`~paddle_flexckpt.live.device_memory`), and as a :class:`HostTensor` only where a load fills them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_flexckpt.engine.copies import AnyStorage, copy_values
from paddle_flexckpt.live.device_memory import DeviceMemory
from paddle_flexckpt.live.tensor_memory import (
    device_of,
    dtype_name,
    element_count,
    empty_on_host,
    host_memory,
    is_contiguous,
    strided_memory,
)


def open_storage(tensor: Any) -> AnyStorage:
    """Open a tensor to be read, element by element in row-major order, or to be written where it is not staged.

    Returns:
        The memory of a contiguous host tensor, a host copy of a strided one, or a
        :class:`~paddle_flexckpt.live.device_memory.DeviceMemory`.
    """
    if device_of(tensor) is None:
        return host_memory(tensor) if is_contiguous(tensor) else HostTensor(tensor).array
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
            strided_memory(self._tensor)[...] = self.array.reshape([int(n) for n in self._tensor.shape])
        elif self.array.size:
            DeviceMemory(self._tensor).fill(self._copy)


def _host_copy(tensor: Any, fresh: bool) -> Any:
    if isinstance(tensor, np.ndarray):
        return np.array(tensor, order="C")
    copy = empty_on_host(tensor.shape, dtype_name(tensor))
    if fresh:
        return copy
    if device_of(tensor) is None:
        # clone() of a strided view may keep its strides; a fresh row-major tensor is wanted.
        host_memory(copy).reshape([int(n) for n in tensor.shape])[...] = strided_memory(tensor)
    elif element_count(tensor):
        copy_values(DeviceMemory(tensor).whole(), DeviceMemory(tensor), host_memory(copy))
    return copy
