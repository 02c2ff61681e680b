"""Access to a tensor's bytes: in place where the host can, through a copy or the device elsewhere.

A contiguous host tensor is accessed in place, through its address, whatever its dtype. A strided host view goes through
a host copy of that one tensor: :class:`HostTensor` hides which. Device tensors are accessed in slices
(:mod:`~paddle_flexckpt.memory.device_memory`), and as a :class:`HostTensor` only where a load fills them.

Tested in tests/memory/test_tensors.py and tests/loading/test_assign.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import Box, StridedCopy, row_major_strides
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.memory.tensor_memory import (
    device_of,
    dtype_name,
    element_count,
    empty_on_host,
    host_memory,
    is_contiguous,
    strided_memory,
)
from paddle_flexckpt.transfer.copies import AnyStorage, copy_values


def open_storage(tensor: Any) -> AnyStorage:
    """Open a tensor, element by element in row-major order. Writing changes the tensor unless the result is a copy.

    The result is the memory of a contiguous host tensor, a host copy of a strided one, or a DeviceMemory.
    """
    if device_of(tensor) is None:
        return host_memory(tensor) if is_contiguous(tensor) else HostTensor(tensor).array
    return DeviceMemory(tensor)


class HostTensor:
    """The elements of one tensor as a contiguous 1-D numpy array on the host.

    Attributes:
        array: The elements in row-major order. While ``staged`` is false it *is* the tensor's memory.
        staged: Whether ``array`` is a copy.
    """

    def __init__(self, tensor: Any, fresh: bool = False) -> None:
        """Open an initialised tensor or an array.

        ``fresh``: all of the array will be written before :meth:`store`, so a copy starts without the tensor's values.
        """
        self._tensor = tensor
        direct = is_contiguous(tensor) and device_of(tensor) is None
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
        # clone() of a strided view may have the same strides, but a new row-major tensor is needed.
        host_memory(copy).reshape([int(n) for n in tensor.shape])[...] = strided_memory(tensor)
    elif element_count(tensor):
        copy_values(DeviceMemory(tensor).whole(), DeviceMemory(tensor), host_memory(copy))
    return copy


def assign_sharded_slice(
    src_desc: Any,
    src_shard: Any,
    dst_desc: Any,
    dst_shard: Any,
    postprocess_list: Sequence[Callable[[Any], Any]] | None = None,
) -> None:
    """Copy the part of ``src_shard`` inside ``src_desc`` to the part of ``dst_shard`` inside ``dst_desc``.

    Args:
        src_desc: Box (``global_offset``, ``local_shape``) in the source's coordinates.
        src_shard: The source shard, not flattened.
        dst_desc: Box in the target's coordinates.
        dst_shard: The target shard, not flattened; its tensor is written in place.
        postprocess_list: Not available; use AOA statements for transformations.

    Raises:
        ValidationError: A box does not overlap its shard, the two overlaps differ in shape, the dtypes differ, or a
            shard is flattened.
    """
    if postprocess_list:
        raise ValidationError(["postprocess_list is not available in this version"])
    overlaps = []
    for side, desc, shard in (("source", src_desc, src_shard), ("target", dst_desc, dst_shard)):
        if getattr(shard, "is_flattened", False):
            raise ValidationError([f"the {side} shard {shard.key!r} is flattened; a slice of it is not one box"])
        box = Box(tuple(shard.global_offset), tuple(shard.local_shape))
        common = box.intersect(Box(tuple(desc.global_offset), tuple(desc.local_shape)))
        if common is None:
            raise ValidationError([f"the {side} shard {shard.key!r} {box} has no overlap with its description"])
        overlaps.append((box, common))
    (src_box, src_part), (dst_box, dst_part) = overlaps
    if src_part.shape != dst_part.shape:
        raise ValidationError(
            [f"overlap shape mismatch between {src_shard.key!r} {src_part} and {dst_shard.key!r} {dst_part}"]
        )
    if dtype_name(src_shard.local_tensor) != dtype_name(dst_shard.local_tensor):
        raise ValidationError(
            f"dtype of {src_shard.key!r} is {dtype_name(src_shard.local_tensor)}, "
            f"that of {dst_shard.key!r} is {dtype_name(dst_shard.local_tensor)}"
        )
    copy = StridedCopy(src_part.shape, *_place(src_box, src_part), *_place(dst_box, dst_part))
    source = open_storage(src_shard.local_tensor)
    if device_of(dst_shard.local_tensor) is not None:
        copy_values(copy, source, open_storage(dst_shard.local_tensor))
        return
    target = HostTensor(dst_shard.local_tensor)
    copy_values(copy, source, target.array)
    target.store()


def _place(box: Box, part: Box) -> tuple[int, tuple[int, ...]]:
    """Return the position of a part's first element in the storage of a box, and that storage's strides."""
    strides = row_major_strides(np.asarray([box.shape], dtype=np.int64).reshape(1, -1))[0].tolist()
    return sum((p - b) * s for p, b, s in zip(part.offset, box.offset, strides)), tuple(strides)
