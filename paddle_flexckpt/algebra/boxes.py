"""Boxes: axis-aligned parts of a tensor, one at a time and in columns.

A box is an ``offset`` and a ``shape`` in the index space of the global tensor. The single-box functions are for small
numbers and clear errors; the column functions work on ``[n, ndim]`` arrays, where there may be a million of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from paddle_flexckpt.algebra.rows import all_axes


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor.

    Attributes:
        offset: First index along every axis.
        shape: Extent along every axis, in elements.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return number of elements (1 for a 0-d box)."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """Return first index beyond the box along every axis."""
        return tuple(o + s for o, s in zip(self.offset, self.shape))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of two boxes, or None where they have no element in common."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop))
        shape = tuple(b - a for a, b in zip(offset, stop))
        if any(extent <= 0 for extent in shape):
            return None
        return Box(offset, shape)

    def subtract(self, other: Box) -> list[Box]:
        """Return the part of this box outside the other, as at most ``2 * ndim`` disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.size else []
        rest: list[Box] = []
        offset, stop = list(self.offset), list(self.stop)
        for axis, (low, high) in enumerate(zip(common.offset, common.stop)):
            if offset[axis] < low:
                shape = [b - a for a, b in zip(offset, stop)]
                shape[axis] = low - offset[axis]
                rest.append(Box(tuple(offset), tuple(shape)))
            if high < stop[axis]:
                start = list(offset)
                start[axis] = high
                rest.append(Box(tuple(start), tuple(b - a for a, b in zip(start, stop))))
            offset[axis], stop[axis] = low, high
        return rest

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.stop)) + "]"


@overload
def subtract_boxes(box: Box, others: Iterable[Box]) -> list[Box]: ...


@overload
def subtract_boxes(box: Box, others: Iterable[Box], most: int) -> list[Box] | None: ...


def subtract_boxes(box: Box, others: Iterable[Box], most: int | None = None) -> list[Box] | None:
    """Return the part of ``box`` that none of ``others`` covers, as disjoint boxes.

    Args:
        box: The box to subtract from.
        others: The boxes to subtract.
        most: The most boxes to make on the way; with more, the result is None.
    """
    rest = [box] if box.size else []
    made = 0
    for other in others:
        if not rest:
            break
        rest = [piece for part in rest for piece in part.subtract(other)]
        made += len(rest)
        if most is not None and made > most:
            return None
    return rest


def intersect_boxes(
    offset_a: np.ndarray, shape_a: np.ndarray, offset_b: np.ndarray, shape_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intersect two columns of boxes row by row.

    Args:
        offset_a: int64 ``[n, ndim]``; the other three alike (or broadcastable).

    Returns:
        ``(offset, shape, hit)``: int64 ``[n, ndim]`` twice and bool ``[n]``, true where the boxes share an element.
        Rows without a hit have meaningless offset and shape.
    """
    offset = np.maximum(offset_a, offset_b)
    shape = np.minimum(offset_a + shape_a, offset_b + shape_b) - offset
    return offset, shape, all_axes(shape > 0)


def get_overlap_region(
    desc_offset: Sequence[int], desc_shape: Sequence[int], shard_offset: Sequence[int], shard_shape: Sequence[int]
) -> tuple[bool, list[int] | None, list[int] | None, list[int] | None, list[int] | None]:
    """Return the overlap of two boxes, in global coordinates and relative to each.

    Returns:
        ``(True, overlap_offset, overlap_shape, start_in_desc, start_in_shard)``, or ``(False, None, None, None,
        None)`` where the boxes do not overlap.

    Raises:
        ValueError: The four arguments differ in length.
    """
    lengths = {len(desc_offset), len(desc_shape), len(shard_offset), len(shard_shape)}
    if len(lengths) != 1:
        raise ValueError(f"boxes of different rank: {desc_offset}, {desc_shape}, {shard_offset}, {shard_shape}")
    common = Box(tuple(desc_offset), tuple(desc_shape)).intersect(Box(tuple(shard_offset), tuple(shard_shape)))
    if common is None:
        return False, None, None, None, None
    return (
        True,
        list(common.offset),
        list(common.shape),
        [a - b for a, b in zip(common.offset, desc_offset)],
        [a - b for a, b in zip(common.offset, shard_offset)],
    )


def balanced_split(total_nums: int, num_of_pieces: int) -> list[int]:
    """Return the sizes of the pieces that Paddle splits an axis into: equal, rounded up, the rest last.

    Five over four pieces are ``[2, 2, 1, 0]``: where pieces of the rounded size are too many, the last are short or
    empty. (The rule is that of ``BalancedSplit`` in Paddle's reshard_utils.cc, which has a negative piece there.)

    Raises:
        ValueError: There are no pieces, or the extent is negative.
    """
    return [size for _, size in (nested_piece(total_nums, [(num_of_pieces, i)]) for i in range(num_of_pieces))]


def nested_piece(extent: int, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return one piece of an axis that several mesh axes split, each of them the piece of the one before it.

    Args:
        extent: Extent of the axis.
        cuts: Per mesh axis, in the order in which they split: the number of pieces and the index of the wanted one.

    Returns:
        ``(offset, size)`` of the piece. An empty piece is at the end of the piece that it was split from.

    Raises:
        ValueError: The extent is negative, or an index is not one of the pieces.
    """
    if extent < 0:
        raise ValueError(f"an axis of negative extent ({extent}) cannot be split")
    offset, size = 0, extent
    for pieces, index in cuts:
        if not 0 <= index < pieces:
            raise ValueError(f"piece {index} of {pieces} does not exist")
        each = -(-size // pieces)
        begin = min(each * index, size)
        offset, size = offset + begin, min(each, size - begin)
    return offset, size
