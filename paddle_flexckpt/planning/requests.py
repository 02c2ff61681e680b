"""Requests: the boxes of source tensors of which target shards are made. Tested in tests/planning/test_matching.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra import BoxMaps, Columns, intersect_boxes, row_major_strides
from paddle_flexckpt.algebra.rows import sum_axes
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.validate import row_boxes


@dataclass(frozen=True, eq=False)
class Requests(Columns):
    """Boxes of source tensors with the places of their elements in targets, as columns.

    Attributes:
        row: int64 ``[n]``, row of the target catalog.
        key: int64 ``[n]``, index of the source tensor.
        offset: int64 ``[n, d]``, first element of the box in the source tensor.
        shape: int64 ``[n, d]``, extents of the box along the source's axes.
        base: int64 ``[n]``, position of its first element in the target shard's own storage.
        strides: int64 ``[n, d]``, steps in that storage along the source's axes; 0 along axes without a match in the
            target.
    """

    row: np.ndarray
    key: np.ndarray
    offset: np.ndarray
    shape: np.ndarray
    base: np.ndarray
    strides: np.ndarray


def find_requests(
    target: Catalog, rows: np.ndarray, maps: BoxMaps | None, source_keys: Sequence[str], at_once: int
) -> Requests:
    """Return the boxes that target shards need, in the coordinates of the source tensors.

    A key in ``maps`` is made of their boxes, any other of the source tensor of its own name.

    Args:
        target: The target catalog, at least as wide as the source catalog and the maps.
        rows: Rows of it to fill.
        maps: Box maps, or None.
        source_keys: Names of the source tensors.
        at_once: Pairs of boxes to intersect at once.
    """
    part, offset, shape = row_boxes(target, rows)
    row = rows[part]
    base, strides = addresses(target, row, offset)
    own = positions(target.keys, source_keys)[target.key[row]]
    found = Requests(row, own, offset, shape, base, strides)
    if maps is None:
        return found if (own >= 0).all() else found.take(own >= 0)
    defined = positions(target.keys, maps.targets)[target.key[row]]
    parts = [found.take((defined < 0) & (own >= 0))]
    maps = maps.widened(target.width)
    source_key = positions(maps.sources, source_keys)[maps.source]
    start = np.searchsorted(maps.target, np.arange(len(maps.targets) + 1))
    boxes = np.flatnonzero(defined >= 0)
    first = start[defined[boxes]]
    count = start[defined[boxes] + 1] - first
    for left, right in portions(first, count, at_once):
        box = boxes[left]
        both, extent, hit = intersect_boxes(
            maps.target_offset[right], maps.target_shape[right], offset[box], shape[box]
        )
        hit &= source_key[right] >= 0
        box, right, both, extent = box[hit], right[hit], both[hit], extent[hit]
        along, axis = maps.target_axis[right] >= 0, np.maximum(maps.target_axis[right], 0)

        def turned(column: np.ndarray, other: int, axis: np.ndarray = axis, along: np.ndarray = along) -> np.ndarray:
            """Return a column by the source's axes for one by the target's axes."""
            return np.where(along, np.take_along_axis(column, axis, axis=1), other)

        parts.append(
            Requests(
                row[box],
                source_key[right],
                maps.source_offset[right] + turned(both - maps.target_offset[right], 0),
                turned(extent, 1),
                base[box] + sum_axes((both - offset[box]) * strides[box]),
                turned(strides[box], 0),
            )
        )
    return Requests.concat(parts)


def addresses(catalog: Catalog, rows: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of global index ``offset`` in each shard's own storage, and the storage's strides."""
    strides = row_major_strides(catalog.shape.take(rows, axis=0))
    base = sum_axes((offset - catalog.offset.take(rows, axis=0)) * strides)
    # The storage of a flattened shard begins at its range's start.
    base -= np.where(catalog.is_flattened[rows], catalog.flat_start[rows], 0)
    return base, strides


def positions(names: Sequence[str], among: Sequence[str]) -> np.ndarray:
    """Return int64: for every name its index in ``among``, or -1."""
    index = {name: i for i, name in enumerate(among)}
    return np.asarray([index.get(name, -1) for name in names], dtype=np.int64)


def portions(first: np.ndarray, count: np.ndarray, at_once: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all pairs of i and one of ``[first[i], first[i] + count[i])``, about ``at_once`` at a time.

    Yields:
        ``(left, right)``, int64 each, sorted.
    """
    low, ends = 0, np.cumsum(count)
    while low < len(count):
        done = ends[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(ends, done + at_once, side="right")))
        pairs = count[low:high]
        left = np.repeat(np.arange(low, high), pairs)
        right = np.arange(len(left)) - np.repeat(np.cumsum(pairs) - pairs, pairs) + np.repeat(first[low:high], pairs)
        yield left, right
        low = high
