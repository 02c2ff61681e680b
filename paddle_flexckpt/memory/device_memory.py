"""Reach the elements of device tensors: in bounded slices to and from the host, or within the device.

Only calls that all accelerators of Paddle have are used (views, ``copy_``, ``_copy_to``, ``paddle.device``), so a GPU,
an NPU and an XPU take the same path. Elements are moved as integers of their width: a copy needs no kernel for a dtype.

Tested in tests/device/test_device_memory.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import StridedCopy, array_axes, strides_of_shape
from paddle_flexckpt.catalog import CheckpointError, dtype_of
from paddle_flexckpt.memory.tensor_memory import device_of, dtype_name, element_count, empty_on_host, host_memory
from paddle_flexckpt.transfer.copies import DEVICE_CHUNK_BYTES, DeviceStorage

# The integer type of Paddle and numpy in which an element is moved, by its bytes; 16 bytes are moved as two of 8.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}


def has_views(dtypes: Iterable[str]) -> bool:
    """Return whether Paddle can view device memory of some dtypes as integers.

    It does not with ``FLAGS_use_stride_kernel=0``, and Paddle 3.0 divides by the width of float8, which is 0 there.
    """
    import paddle

    flag = "FLAGS_use_stride_kernel"
    if not paddle.get_flags(flag)[flag]:
        return False
    return not paddle.__version__.startswith("3.0.") or not any(dtype.startswith("float8") for dtype in dtypes)


def devices_of(tensors: Iterable[Any]) -> list[str]:
    """Return the names of the devices that hold some tensors, each once, sorted."""
    # Nearly all tensors are on the host. They are tested here, as a call for each would take longer.
    others = [each for each in tensors if not isinstance(each, np.ndarray) and not each.place.is_cpu_place()]
    return sorted({device for tensor in others if (device := device_of(tensor)) is not None})


def wait_for_devices(devices: Iterable[str]) -> None:
    """Wait until all work on some devices is done, whichever stream it is on.

    A copy waits for the current stream only, but Paddle itself leaves work on others: overlapped broadcasts of
    sharding, and collectives that were not waited for. Without this call, a save could read a tensor that is still
    being written.
    """
    for device in devices:
        import paddle  # not earlier: arrays can be saved without it

        paddle.device.synchronize(device)


def use_current_device() -> None:
    """Make this thread use the current device, as the main thread does; a new thread uses the first one."""
    import paddle

    paddle.set_device(paddle.get_device())


@contextlib.contextmanager
def current_device(device: str) -> Iterator[None]:
    """Make a device, on whose stream Paddle works, the current one for the time of a with statement."""
    import paddle

    before = paddle.get_device()
    if before == device:
        yield
        return
    paddle.set_device(device)
    try:
        yield
    finally:
        paddle.set_device(before)


class DeviceMemory:
    """The elements of one device tensor; see :class:`~paddle_flexckpt.transfer.copies.DeviceStorage`.

    Attributes:
        dtype: The elements' type on the host.
        device: Name of the device, such as ``gpu:0``.
        size: Number of elements.
        has_views: Whether its elements can be viewed as integers; if not, they are accessed in contiguous runs.
    """

    def __init__(self, tensor: Any, dtype: np.dtype | None = None) -> None:
        """Open an initialised tensor; nothing is copied. A contiguous one can be viewed with another dtype."""
        self.dtype = dtype_of(dtype_name(tensor)).numpy if dtype is None else dtype
        self.device = device_of(tensor) or ""
        self._tensor = tensor
        width = dtype_of(dtype_name(tensor)).itemsize
        self.size = element_count(tensor) * width // self.dtype.itemsize
        self._shape = (self.size,) if dtype is not None else tuple(int(extent) for extent in tensor.shape)
        self._strides = None if tensor.is_contiguous() else [int(stride) for stride in tensor.strides]
        self._words = max(1, self.dtype.itemsize // 8)
        self.has_views = has_views([dtype_name(tensor)])
        self._anchor, self._offset = self._anchored() if self.has_views and self.size else (tensor, 0)

    def _anchored(self) -> tuple[Any, int]:
        """Return a tensor of integers in the same allocation, and the first element's byte offset in that."""
        import paddle

        with paddle.no_grad(), current_device(self.device):
            # as_strided() counts from the start of the allocation, whatever the offset of the tensor that it is given.
            # 16 bytes, so that a view of any width is possible; nothing reads them.
            start = paddle.as_strided(self._tensor, [16 // dtype_of(dtype_name(self._tensor)).itemsize], [1], 0)
            anchor = start.view(_BITS[self.dtype.itemsize])
        return anchor, int(self._tensor.data_ptr()) - int(start.data_ptr())

    @property
    def place(self) -> Any:
        """Return Paddle's place of the device."""
        return self._tensor.place

    def along_axes(self, copy: StridedCopy, side: int) -> StridedCopy:
        """Implement :class:`~paddle_flexckpt.transfer.copies.DeviceStorage`."""
        return copy if self._strides is None else copy.along_axes(side, self._shape)

    def read(self, copy: StridedCopy) -> np.ndarray:
        """Implement :class:`~paddle_flexckpt.transfer.copies.DeviceStorage`."""
        import paddle

        host = paddle.CPUPlace()
        if not copy.size:
            return np.empty(copy.extents, self.dtype)
        with paddle.no_grad(), current_device(self.device):
            if self.has_views:
                part = self._view(copy.extents, copy.source_base, copy.source_strides)
                return host_memory(part._copy_to(host, True)).view(self.dtype).reshape(copy.extents)
            values = np.empty(copy.size, self.dtype)
            for source, target, count in _runs(
                replace(copy, target_base=0, target_strides=strides_of_shape(copy.extents))
            ):
                values[target : target + count] = host_memory(self._run(source, count)._copy_to(host, True))
        return values.reshape(copy.extents)

    def write(self, copy: StridedCopy, values: np.ndarray) -> None:
        """Implement :class:`~paddle_flexckpt.transfer.copies.DeviceStorage`."""
        import paddle

        values = np.ascontiguousarray(values).reshape(-1)
        with paddle.no_grad(), current_device(self.device):
            if self.has_views:
                part = self._view(copy.extents, copy.target_base, copy.target_strides)
                source = on_host(values.view(_BITS[self.dtype.itemsize]).reshape([int(n) for n in part.shape]))
                # Only a copy within the device can write to a strided view: from the host Paddle would use a kernel of
                # the host on the device's address.
                part.copy_(source if part.is_contiguous() else source._copy_to(part.place, True), True)
                return
            for source, target, count in _runs(
                replace(copy, source_base=0, source_strides=strides_of_shape(copy.extents))
            ):
                part = self._run(target, count)
                chunk = empty_on_host([count], dtype_name(self._tensor))
                host_memory(chunk)[...] = values[source : source + count]
                part.copy_(chunk, True)

    def copy_from(self, source: DeviceStorage, copy: StridedCopy) -> None:
        """Implement :class:`~paddle_flexckpt.transfer.copies.DeviceStorage`."""
        import paddle

        if not isinstance(source, DeviceMemory):
            raise TypeError(f"a device is copied from a device, not from {type(source).__name__}")
        with paddle.no_grad(), current_device(self.device):
            if self.has_views:
                part = source._view(copy.extents, copy.source_base, copy.source_strides)
                if source.device != self.device:
                    part = part._copy_to(self._tensor.place, True)
                self._view(copy.extents, copy.target_base, copy.target_strides).copy_(part, False)
                return
            for begin, target, count in _runs(copy):
                self._run(target, count).copy_(source._run(begin, count)._copy_to(self._tensor.place, True), False)

    def read_range(self, start: int, stop: int) -> np.ndarray:
        """Return the elements ``[start, stop)`` in row-major order, as a host array."""
        if self._strides is None or stop <= start:
            return self.read(StridedCopy((stop - start,), start, (1,), 0, (1,)))
        parts = [self.read(part).reshape(-1) for part in self.whole().part(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_into(self, start: int, target: np.ndarray, wait: bool = True) -> None:
        """Copy the bytes from ``start`` on, in row-major order, straight into host memory.

        Other threads run meanwhile. A strided tensor is gathered on the device first, which takes memory there.

        Args:
            start: First byte; a whole element's.
            target: uint8 ``[n]``, so many bytes of whole elements.
            wait: Whether the copy is complete when this returns. If not, it completes with the current stream's work,
                if the memory is page-locked and the tensor contiguous.
        """
        import paddle

        width = self.dtype.itemsize
        straight = self.has_views and self._strides is None
        step = max(1, target.nbytes if straight else DEVICE_CHUNK_BYTES // width * width)
        for begin in range(0, target.nbytes, step):
            piece = target[begin : begin + step]
            first, last = (start + begin) // width, (start + begin + piece.nbytes) // width
            if not self.has_views:
                piece[...] = self.read_range(first, last).view(np.uint8)
                continue
            part = self.contiguous_range(first, last)
            host = on_host(piece.view(_BITS[width]).reshape([int(n) for n in part.shape]))
            with paddle.no_grad(), current_device(self.device):
                host.copy_(part, wait or not straight)
            if int(host.data_ptr()) != piece.ctypes.data:
                raise CheckpointError(
                    f"Paddle {paddle.__version__} copies from {self.device} to other memory than it was given. "
                    "Remedy (FC808): report this"
                )

    def fill(self, source: Any) -> None:
        """Overwrite all elements with those of a contiguous host tensor of the same shape and dtype."""
        import paddle

        if self._strides is None:
            with paddle.no_grad(), current_device(self.device):
                self._tensor.copy_(source, True)
            return
        values, step = host_memory(source), max(1, DEVICE_CHUNK_BYTES // self.dtype.itemsize)
        for start in range(0, self.size, step):
            for part in self.whole().part(start, min(start + step, self.size)):
                self.write(part, part.gather_from(values))

    def contiguous_range(self, start: int, stop: int) -> Any:
        """Return the elements ``[start, stop)`` as a contiguous tensor of integers on the device.

        It is a view of the memory where that is contiguous, and a copy elsewhere.
        """
        import paddle

        with paddle.no_grad(), current_device(self.device):
            if self._strides is None:
                return self._view((stop - start,), start, (1,))
            flat = paddle.empty([(stop - start) * self._words], dtype=self._anchor.dtype)
            copy = DeviceMemory(flat, self.dtype)
            position = 0
            for part in self.whole().part(start, stop):
                units = strides_of_shape(part.extents)
                copy.copy_from(self, replace(part, target_base=position, target_strides=units))
                position += part.size
            return flat

    def words(self, start: int, stop: int) -> Any:
        """Return the bytes of the elements ``[start, stop)``, whole words, as an int32 tensor ``[n]`` on the device.

        It is a view of the memory, or a copy.
        """
        import paddle

        with paddle.no_grad(), current_device(self.device):
            begin, count = start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize // 4
            if self._strides is None and begin % 4 == 0 and self._tensor.data_ptr() % 4 == 0:
                return DeviceMemory(self._tensor, np.dtype(np.int32))._view((count,), begin // 4, (1,))
            part = self.contiguous_range(start, stop)
            # Viewed as another type, the tensor's offset would be counted in that type's width.
            alone = paddle.empty(part.shape, dtype=part.dtype)
            alone.copy_(part, False)
            return alone.view("int32").reshape([-1])

    def whole(self) -> StridedCopy:
        """Return the copy of all elements to a storage of the same shape."""
        units = strides_of_shape(self._shape)
        return StridedCopy(self._shape, 0, units, 0, units)

    def _view(self, extents: tuple[int, ...], base: int, strides: tuple[int, ...]) -> Any:
        """Return a view of integers on elements that are counted in row-major order."""
        import paddle

        if self._strides is not None:
            index = np.unravel_index(base, self._shape)
            base = sum(int(i) * stride for i, stride in zip(index, self._strides))
            axes = [array_axes(stride, extent, self._shape) for extent, stride in zip(extents, strides)]
            strides = tuple(steps * self._strides[axis] if axis >= 0 else 0 for ((_, axis, steps),) in axes)
        offset = base * self.dtype.itemsize
        if self._words > 1:
            extents, strides = (*extents, self._words), (*(stride * self._words for stride in strides), 1)
        view = paddle.as_strided(self._anchor, list(extents), list(strides), self._offset + offset)
        if int(view.data_ptr()) != int(self._tensor.data_ptr()) + offset:
            raise CheckpointError(
                f"a view of {self.device} memory is not where it should be: Paddle {paddle.__version__} counts the "
                "offset of as_strided() in another way. Remedy (FC808): report this; set FLAGS_use_stride_kernel=0 "
                "until then"
            )
        return view

    def _run(self, start: int, count: int) -> Any:
        """Return a stretch of a contiguous tensor, where there are no views."""
        if self._strides is not None:
            raise CheckpointError(
                f"this Paddle cannot reach a strided {dtype_name(self._tensor)} tensor on {self.device}. "
                "Remedy (FC808): make it contiguous, or use Paddle 3.1"
            )
        return self._tensor.detach().reshape([-1])._slice(start, start + count)


def on_host(values: np.ndarray) -> Any:
    """Return a host tensor that is the memory of an array of integers."""
    import paddle
    from paddle.base import core

    # Paddle accepts only writable memory, though nothing writes here.
    values = values if values.flags.writeable else values.copy()
    return core.eager.Tensor(value=values, place=paddle.CPUPlace(), zero_copy=True)


def _runs(copy: StridedCopy) -> Iterator[tuple[int, int, int]]:
    """Yield ``(source position, target position, count)`` of stretches that are contiguous on both sides."""
    copy = copy.simplified()
    last = bool(copy.extents) and copy.source_strides[-1] == 1 == copy.target_strides[-1]
    outer, count = (copy.extents[:-1], copy.extents[-1]) if last else (copy.extents, 1)
    for index in np.ndindex(*outer):
        source = sum(i * stride for i, stride in zip(index, copy.source_strides))
        target = sum(i * stride for i, stride in zip(index, copy.target_strides))
        yield copy.source_base + source, copy.target_base + target, count
