"""Strided copies: the one form that every movement of data takes.

A strided copy means: for every index below ``extents``, the element at ``source_base + index . source_strides`` goes to
``target_base + index . target_strides``. A cut is a smaller extent, a concatenation another base, a transpose a
permutation of strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra.flat import flat_range_to_boxes, strides_of_shape


@dataclass(frozen=True)
class StridedCopy:
    """One strided copy; all numbers are in elements.

    Attributes:
        extents: Number of elements along every axis.
        source_base: Position of the first element in the source's storage.
        source_strides: Step in the source for each axis.
        target_base: Position of the first element in the target's storage.
        target_strides: Step in the target for each axis.
    """

    extents: tuple[int, ...]
    source_base: int
    source_strides: tuple[int, ...]
    target_base: int
    target_strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return number of elements copied."""
        return math.prod(self.extents)

    def simplified(self) -> StridedCopy:
        """Return the same copy without unit axes, with axes joined that continue each other.

        The order of the elements stays the same.
        """
        extents: list[int] = []
        source: list[int] = []
        target: list[int] = []
        for extent, s, t in zip(self.extents, self.source_strides, self.target_strides):
            if extent == 1:
                continue
            if extents and source[-1] == s * extent and target[-1] == t * extent:
                extents[-1] *= extent
                source[-1], target[-1] = s, t
            else:
                extents.append(extent)
                source.append(s)
                target.append(t)
        return StridedCopy(tuple(extents), self.source_base, tuple(source), self.target_base, tuple(target))

    def in_target_order(self) -> StridedCopy:
        """Return a copy of the same elements in the order of the target."""
        axes = sorted(range(len(self.extents)), key=lambda axis: -self.target_strides[axis])
        if axes == [*range(len(axes))]:
            return self
        extents, source, target = (
            tuple([each[axis] for axis in axes]) for each in (self.extents, self.source_strides, self.target_strides)
        )
        return StridedCopy(extents, self.source_base, source, self.target_base, target).simplified()

    def target_runs(self) -> tuple[int, list[int]]:
        """Return the length of the target's contiguous runs (all alike), and their positions in the copy's order."""
        outer = len(self.extents) - _contiguous_tail(self.extents, self.target_strides)
        if not outer:
            return self.size, [self.target_base]
        start = np.full(1, self.target_base, dtype=np.int64)
        for extent, stride in zip(self.extents[:outer], self.target_strides[:outer]):
            start = (start[:, None] + np.arange(extent) * stride).reshape(-1)
        return math.prod(self.extents[outer:]), start.tolist()

    def along_axes(self, side: int, shape: tuple[int, ...]) -> StridedCopy:
        """Return the same copy, in the same order, with axes that each run along one axis of an array.

        Args:
            side: 0 for the source, 1 for the target.
            shape: Shape of the array whose elements that side counts in row-major order.
        """
        extents: list[int] = []
        strides: tuple[list[int], list[int]] = ([], [])
        for axis, extent in enumerate(self.extents):
            both = (self.source_strides[axis], self.target_strides[axis])
            inner = extent
            for count, _, _ in array_axes(both[side], extent, shape):
                inner //= count
                extents.append(count)
                for stride, out in zip(both, strides):
                    out.append(stride * inner)
        return StridedCopy(tuple(extents), self.source_base, tuple(strides[0]), self.target_base, tuple(strides[1]))

    def source_tail(self) -> int:
        """Return number of trailing axes that together are one contiguous stretch of the source."""
        return _contiguous_tail(self.extents, self.source_strides)

    def is_contiguous(self) -> tuple[bool, bool]:
        """Return whether the (source, target) side is one contiguous stretch, in the order of the copy."""
        ndim = len(self.extents)
        return self.source_tail() == ndim, _contiguous_tail(self.extents, self.target_strides) == ndim

    def is_ascending(self) -> bool:
        """Return whether the copy visits the source's elements in ascending order."""
        reach = 0
        for extent, stride in zip(reversed(self.extents), reversed(self.source_strides)):
            if stride < reach:
                return False
            reach += (extent - 1) * stride
        return True

    def count_before(self, position: int) -> int:
        """Count the elements before a position of the source; the copy has to be ascending."""
        rest = position - self.source_base
        reach = sum((extent - 1) * stride for extent, stride in zip(self.extents, self.source_strides))
        count, size = 0, self.size
        for extent, stride in zip(self.extents, self.source_strides):
            reach -= (extent - 1) * stride
            size //= extent
            # Steps along this axis whose elements are all before the position.
            steps = -((reach - rest) // stride) if stride else (extent if reach < rest else 0)
            steps = min(max(steps, 0), extent)
            count += steps * size
            if steps == extent:
                return count
            rest -= steps * stride
        return count + (rest > 0)

    def part(self, start: int, stop: int) -> Iterator[StridedCopy]:
        """Return the copies that move the elements ``[start, stop)`` of this one, counted in the order of the copy."""
        for box in flat_range_to_boxes(self.extents, start, stop):
            yield StridedCopy(
                box.shape,
                self.source_base + sum(o * s for o, s in zip(box.offset, self.source_strides)),
                self.source_strides,
                self.target_base + sum(o * s for o, s in zip(box.offset, self.target_strides)),
                self.target_strides,
            )

    def gather_from(self, storage: np.ndarray) -> np.ndarray:
        """View of the source elements in a flat storage array, shaped like ``extents``."""
        return _view(storage, self.source_base, self.extents, self.source_strides)

    def scatter_into(self, storage: np.ndarray) -> np.ndarray:
        """View of the target elements in a flat storage array, shaped like ``extents``."""
        return _view(storage, self.target_base, self.extents, self.target_strides)


def array_axes(stride: int, extent: int, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return the axes of a row-major array along which one axis of a strided view runs.

    An axis of a simplified copy may join axes that continue each other, so it may run along several of the array.

    Args:
        stride: Step of the view's axis, in elements in row-major order of the array.
        extent: Its extent.
        shape: The array's shape.

    Returns:
        ``(extent, axis of the array, steps along it)``, outermost first; the extents multiply to the view's. The axis
        is -1 where nothing moves.

    Raises:
        ValueError: The view's axis is along none of the array.
    """
    units = strides_of_shape(shape)
    parts: list[tuple[int, int, int]] = []
    while extent > 1 and stride:
        # The innermost axis that is long enough for one step.
        axis = next((a for a in reversed(range(len(shape))) if stride < units[a] * shape[a]), -1)
        if axis < 0 or stride % units[axis]:
            raise ValueError(f"a step of {stride} elements is along no axis of shape {shape}")
        steps = stride // units[axis]
        whole = -(-shape[axis] // steps)
        if extent > whole and (extent % whole or shape[axis] % steps):
            raise ValueError(f"{extent} steps of {stride} elements leave axis {axis} of shape {shape}")
        count = min(extent, whole)
        parts.insert(0, (count, axis, steps))
        extent, stride = extent // count, stride * count
    return parts or [(extent, -1, 0)]


def _contiguous_tail(extents: tuple[int, ...], strides: tuple[int, ...]) -> int:
    step = 1
    for count, (extent, stride) in enumerate(zip(reversed(extents), reversed(strides))):
        if extent != 1 and stride != step:
            return count
        step *= extent
    return len(extents)


def _view(storage: np.ndarray, base: int, extents: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    if math.prod(extents) == 0:
        return np.zeros(extents, dtype=storage.dtype)
    if storage.ndim != 1 or (storage.size > 1 and storage.strides[0] != storage.itemsize):
        raise ValueError(f"storage has to be flat and contiguous; got shape {storage.shape}, strides {storage.strides}")
    # numpy does not check bounds in as_strided: an element outside would be in other memory.
    reach = [stride * (extent - 1) for extent, stride in zip(extents, strides)]
    first = base + sum(r for r in reach if r < 0)
    last = base + sum(r for r in reach if r > 0)
    if first < 0 or last >= storage.size:
        raise IndexError(f"strided view [{first}, {last}] leaves its storage of {storage.size} elements")
    # Not as_strided: it goes through __array_interface__, which has no name for float8_e5m2 ("<f1" not understood).
    itemsize, raw = storage.itemsize, storage.view(np.uint8)
    return np.ndarray(extents, storage.dtype, raw, base * itemsize, [s * itemsize for s in strides])
