"""Flattened ranges: ``[start, stop)`` in the row-major order of a box, as optimizers of the ZeRO family cut tensors.

A flattened range of an n-dimensional box is at most ``2 n - 1`` boxes: a head and a tail per axis and one middle part.
So a flattened shard is moved without a gather and without an enclosing box: it is a short list of boxes, each
contiguous in the flattened storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paddle_flexckpt.algebra.boxes import Box
from paddle_flexckpt.algebra.rows import lexsort_packed


def ravel_index(indices: Sequence[int], shape: Sequence[int]) -> int:
    """Return linear (row-major) index of a multi-dimensional index."""
    index = 0
    for i, extent in zip(indices, shape):
        index = index * extent + i
    return index


def unravel_index(idx: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return multi-dimensional index of a linear (row-major) index."""
    indices = []
    for extent in reversed(shape):
        indices.append(idx % extent)
        idx //= extent
    return tuple(reversed(indices))


def row_major_strides(shape: np.ndarray) -> np.ndarray:
    """Return row-major strides, in elements, of each row of an int64 ``[n, ndim]`` column of shapes."""
    strides = np.ones_like(shape)
    for axis in range(shape.shape[-1] - 1, 0, -1):
        np.multiply(strides[..., axis], shape[..., axis], out=strides[..., axis - 1])
    return strides


def strides_of_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major strides of one shape, in elements."""
    return tuple(row_major_strides(np.asarray([shape], dtype=np.int64))[0].tolist()) if shape else ()


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes, in row-major order, that make up the flattened range ``[start, stop)`` of a tensor.

    Args:
        shape: Shape of the tensor; a 0-d tensor has one element.
        start: First element of the range.
        stop: First element beyond it; ``0 <= start <= stop <= prod(shape)``.

    Returns:
        At most ``2 * ndim - 1`` disjoint boxes. Laid end to end they are the range: each of them is contiguous in it.

    Raises:
        ValueError: The range is not inside the tensor.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"flattened range [{start}, {stop}) is not inside a tensor of shape {tuple(shape)}")
    if not shape:
        return [Box((), ())] if stop > start else []
    _, offset, extent, _ = flat_ranges_to_boxes(
        np.asarray([shape], dtype=np.int64), np.asarray([start]), np.asarray([stop])
    )
    return [Box(tuple(o), tuple(e)) for o, e in zip(offset.tolist(), extent.tolist())]


def flat_ranges_to_boxes(
    shape: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Do as :func:`flat_range_to_boxes` for many ranges at once, in columns.

    Args:
        shape: int64 ``[n, ndim]``, ndim >= 1.
        start: int64 ``[n]``.
        stop: int64 ``[n]``.

    Returns:
        ``(row, offset, extent, position)``: the row each box comes from (int64 ``[m]``), the boxes (int64
        ``[m, ndim]`` twice), and the flattened index of each box's first element (int64 ``[m]``). Sorted by row, then
        by position.
    """
    ndim = shape.shape[1]
    strides = row_major_strides(shape)
    low, high = start.astype(np.int64), stop.astype(np.int64)
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def emit(rows: np.ndarray, first: np.ndarray, last: np.ndarray, axis: int) -> None:
        keep = first < last
        if keep.any():
            pieces.append((rows[keep], first[keep], last[keep], np.full(int(keep.sum()), axis)))

    live = np.flatnonzero(low < high)
    for axis in range(ndim - 1, 0, -1):
        # Here low and high are multiples of strides[axis]; `block` is the row-major size of one index of axis - 1.
        block = strides[live, axis - 1]
        first, last = low[live], high[live]
        next_block = -(-first // block) * block
        last_block = last // block * block
        same = next_block > last_block
        emit(live[same], first[same], last[same], axis)
        rest = ~same
        emit(live[rest], first[rest], next_block[rest], axis)
        emit(live[rest], last_block[rest], last[rest], axis)
        low[live[rest]], high[live[rest]] = next_block[rest], last_block[rest]
        live = live[rest]
    emit(live, low[live], high[live], 0)

    if not pieces:
        empty = np.zeros((0, ndim), dtype=np.int64)
        return np.zeros(0, dtype=np.int64), empty, empty, np.zeros(0, dtype=np.int64)
    row, first, last, axis_of = (np.concatenate(column) for column in zip(*pieces))
    order = lexsort_packed([row, first], len(row))
    row, first, last, axis_of = row[order], first[order], last[order], axis_of[order]
    row_shape, row_strides = shape.take(row, axis=0), strides.take(row, axis=0)
    axes = np.arange(ndim)[None, :]
    offset = first[:, None] // row_strides % row_shape
    count = (last - first) // np.take_along_axis(row_strides, axis_of[:, None], axis=1)[:, 0]
    extent = np.where(axes < axis_of[:, None], 1, np.where(axes == axis_of[:, None], count[:, None], row_shape))
    return row, offset, extent, first


def minimal_nd_slice(
    shape: Sequence[int], flat_start: int, flat_end: int
) -> tuple[list[tuple[int, int]], tuple[int, ...], tuple[int, ...]]:
    """Return the smallest box that contains the flattened range ``[flat_start, flat_end)``.

    An axis is narrowed to the range only while all axes before it are fixed to a single index; from the first axis
    that varies on, the axes after it are taken whole.

    Returns:
        ``(slices, first_index, last_index)``: one ``(start, stop)`` per axis, and the indices of the first and the
        last element of the range. For an empty range every slice is empty.

    Raises:
        ValueError: The range is not inside the tensor.
    """
    size = math.prod(shape)
    if not 0 <= flat_start <= flat_end <= size:
        raise ValueError(f"flattened range [{flat_start}, {flat_end}) is not inside a tensor of shape {tuple(shape)}")
    if flat_start == flat_end:
        index = unravel_index(min(flat_start, max(size - 1, 0)), [max(extent, 1) for extent in shape])
        return [(i, i) for i in index], index, index
    first, last = unravel_index(flat_start, shape), unravel_index(flat_end - 1, shape)
    slices: list[tuple[int, int]] = []
    fixed = True
    for axis, extent in enumerate(shape):
        slices.append((first[axis], last[axis] + 1) if fixed else (0, extent))
        fixed = fixed and first[axis] == last[axis]
    return slices, first, last


def flat_range_in_min_slice(
    shape: Sequence[int], min_slices: Sequence[tuple[int, int]], flat_start: int, flat_end: int
) -> tuple[int, int]:
    """Return where ``[flat_start, flat_end)`` of a tensor lies in the flattened order of its minimal slice.

    Args:
        shape: Shape of the tensor.
        min_slices: The slices that :func:`minimal_nd_slice` gave for the range.
        flat_start: Start of the range in the tensor.
        flat_end: End of the range in the tensor.
    """
    starts = [low for low, _ in min_slices]
    inner = [high - low for low, high in min_slices]
    first = [i - low for i, low in zip(unravel_index(flat_start, shape), starts)]
    begin = ravel_index(first, inner) if flat_start < flat_end else 0
    return begin, begin + flat_end - flat_start
