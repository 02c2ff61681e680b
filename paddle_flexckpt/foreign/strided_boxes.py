"""Cut an array that is not in row-major order in its file into boxes that are.

Tested in tests/foreign/test_npz.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# A box is a row of the catalog, some hundred bytes of memory: a transposed matrix has as many as it has columns. This
# is the most for all arrays of one file that are cut, whatever their shapes.
MOST_BOXES = 1 << 17


class StoredBox(NamedTuple):
    """A box of an array: where it begins in the array, its shape, and its first element in the storage."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in row-major order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


class BoxBudget:
    """A count of the boxes that a file's arrays are cut into, with a bound."""

    def __init__(self) -> None:
        """Begin with none."""
        self._left = MOST_BOXES

    def allows(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        """Return whether an array may be cut, and count its boxes; arrays that need no cut are free."""
        count = count_boxes(shape, strides)
        self._left -= count if count > 1 else 0
        return self._left >= 0


def count_boxes(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many boxes :func:`boxes_of` cuts an array into."""
    inner = _inner_axes(shape, strides)
    return math.prod(extent for axis, extent in enumerate(shape) if axis not in inner)


def boxes_of(shape: Sequence[int], strides: Sequence[int]) -> Iterator[StoredBox]:
    """Yield the largest boxes of an array, without negative strides, that are in row-major order in its storage."""
    inner = _inner_axes(shape, strides)
    box = tuple(extent if axis in inner else 1 for axis, extent in enumerate(shape))
    outer = [axis for axis in range(len(shape)) if axis not in inner]
    at = [0] * len(shape)
    for number in range(math.prod(shape[axis] for axis in outer)):
        for axis in reversed(outer):
            number, at[axis] = divmod(number, shape[axis])
        yield StoredBox(tuple(at), box, sum(a * b for a, b in zip(at, strides)))


def _inner_axes(shape: Sequence[int], strides: Sequence[int]) -> set[int]:
    """Return the axes along which elements are contiguous: each one's stride spans the axes behind it."""
    if 0 in shape:
        return set(range(len(shape)))
    inner = {axis for axis, extent in enumerate(shape) if extent == 1}
    size, last = 1, len(shape)
    for stride, axis in sorted((stride, -axis) for axis, stride in enumerate(strides) if axis not in inner):
        if stride != size or -axis > last:
            break
        inner.add(-axis)
        size, last = size * shape[-axis], -axis
    return inner
