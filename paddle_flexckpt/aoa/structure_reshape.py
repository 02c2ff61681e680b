"""Reshape structures: old boxes become boxes of the new shape. Tested in tests/aoa/test_structure.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paddle_flexckpt.aoa.structure import NO_AXIS, Derived, Fragments, Structure, StructureError, assembled, unchanged


def reshape(structure: Structure, shape: Sequence[int]) -> Derived:
    """Change the shape; the elements stay in row-major order.

    Unchanged axes, and added or removed axes of extent 1, cost nothing. Where axes are split or merged, a fragment is
    split into the rows that both shapes have in common: ``[B * W, R]`` and ``[B, W, R]`` have B of them.

    Raises:
        StructureError: The number of elements differs, or there would be too many fragments.
    """
    new = _resolved(structure.shape, shape)
    if new == structure.shape:
        return unchanged(structure)
    fragments = structure.fragments
    if math.prod(new):
        fragments, merged_axes = _reshaped(fragments, structure.shape, new)
        # A single fragment was split only where necessary.
        for axis in reversed(merged_axes if len(structure) > 1 else ()):
            if len(fragments) > 1:
                fragments = coalesced(fragments, axis)
    else:
        fragments = replace(
            fragments.take(np.zeros(len(fragments), bool)),
            offset=np.zeros((0, len(new)), np.int64),
            extent=np.zeros((0, len(new)), np.int64),
        )
    return assembled(new, structure.dtype, structure.inputs, fragments, structure.chains, structure.nodes)


def _resolved(old: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...]:
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, (int, np.integer)) or extent < -1:
            raise StructureError(f"reshape takes extents >= 0, or -1 once; got {extent!r} in {list(shape)}")
    new = [int(extent) for extent in shape]
    total = math.prod(old)
    if new.count(-1) > 1:
        raise StructureError(f"reshape takes -1 at most once; got {new}")
    if -1 in new:
        rest = math.prod(extent for extent in new if extent != -1)
        if rest == 0 or total % rest:
            raise StructureError(
                f"reshape of {list(old)} ({total} elements) to {new}: the other extents make {rest}, of which {total} "
                "is no multiple"
            )
        new[new.index(-1)] = total // rest
    elif math.prod(new) != total:
        raise StructureError(
            f"reshape of {list(old)} to {new} changes the number of elements; expected {total}, got {math.prod(new)}"
        )
    return tuple(new)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of (old axes, new axes) of equal product, in order; axes of extent 1 are in none."""
    old_axes = [axis for axis, extent in enumerate(old) if extent != 1]
    new_axes = [axis for axis, extent in enumerate(new) if extent != 1]
    groups = []
    i = j = 0
    while i < len(old_axes):
        first, second = [old_axes[i]], [new_axes[j]]
        left, right = old[old_axes[i]], new[new_axes[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                first.append(old_axes[i])
                left *= old[old_axes[i]]
                i += 1
            else:
                second.append(new_axes[j])
                right *= new[new_axes[j]]
                j += 1
        groups.append((first, second))
    return groups


def _reshaped(fragments: Fragments, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Fragments, list[int]]:
    """Return the fragments in the new shape, and the new axes along which fragments may now be adjacent."""
    groups = _groups(old, new)
    # Within a group only the innermost axes have equal strides, so a box extends along these: one row at a time.
    for first, second in groups:
        if len(first) > 1 or len(second) > 1:
            for axis in first[:-1]:
                fragments = fragments.split_at_multiples(axis, 1)
    # From here a group is a single flat axis.
    count = len(fragments)
    offset = np.zeros((count, len(groups)), np.int64)
    extent = np.ones((count, len(groups)), np.int64)
    table = [NO_AXIS] * len(old)
    for number, (first, _) in enumerate(groups):
        stride = 1
        for axis in reversed(first):
            offset[:, number] += fragments.offset[:, axis] * stride
            stride *= old[axis]
        extent[:, number] = fragments.extent[:, first[-1]]
        table[first[-1]] = number
    fragments = fragments.with_axes(table, offset, extent)
    for number, (_, second) in enumerate(groups):
        if len(second) > 1:
            fragments = fragments.split_at_multiples(number, new[second[-1]])
    count = len(fragments)
    offset = np.zeros((count, len(new)), np.int64)
    extent = np.ones((count, len(new)), np.int64)
    table = [NO_AXIS] * len(groups)
    merged = []
    for number, (first, second) in enumerate(groups):
        flat = fragments.offset[:, number]
        for axis in reversed(second):
            offset[:, axis] = flat % new[axis]
            flat = flat // new[axis]
        extent[:, second[-1]] = fragments.extent[:, number]
        table[number] = second[-1]
        if len(first) > 1 or len(second) > 1:
            merged.extend(second)
    return fragments.with_axes(table, offset, extent), merged


def coalesced(fragments: Fragments, axis: int) -> Fragments:
    """Join the fragments that continue each other along an axis, in the value and in the leaf.

    So a reshape and its inverse give the original fragments.
    """
    others = [other for other in range(fragments.offset.shape[1]) if other != axis]
    order = np.lexsort([fragments.offset[:, axis], *(fragments.offset[:, other] for other in others)])
    fragments = fragments.take(order)
    offset, extent, value_axis = fragments.offset, fragments.extent, fragments.value_axis
    length = extent[:, axis]
    step = np.diff(fragments.leaf_offset, axis=0)
    moves = step != 0
    # The one leaf axis along which the second of two neighbours lies behind the first.
    leaf_axis = np.argmax(moves, axis=1) if fragments.width else np.zeros(len(step), np.int64)
    rows = np.arange(len(step))
    joins = (
        (fragments.leaf[1:] == fragments.leaf[:-1])
        & (fragments.chain[1:] == fragments.chain[:-1])
        & (offset[1:, axis] == offset[:-1, axis] + length[:-1])
        & (offset[1:, others] == offset[:-1, others]).all(axis=1)
        & (extent[1:, others] == extent[:-1, others]).all(axis=1)
        & (value_axis[1:] == value_axis[:-1]).all(axis=1)
        & (moves.sum(axis=1) == 1)
    )
    if not joins.any():
        return fragments
    along = value_axis[rows, leaf_axis]
    distance = step[rows, leaf_axis]
    continues = (along == axis) & (distance == length[:-1])
    # Neighbouring single indices of the leaf: joined, they run along an axis.
    unused = (value_axis[:-1] != axis).all(axis=1)
    gathers = (along == NO_AXIS) & unused & (distance == 1) & (length[:-1] == 1) & (length[1:] == 1)
    joins &= continues | gathers
    joins[1:] &= ~(joins[:-1] & (leaf_axis[1:] != leaf_axis[:-1]))
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    last = np.concatenate([first[1:], [len(fragments)]]) - 1
    result = fragments.take(first)
    result.extent[:, axis] = offset[last, axis] + length[last] - offset[first, axis]
    gathered = np.flatnonzero((last > first) & np.concatenate([gathers, [False]])[first])
    result.value_axis[gathered, leaf_axis[first[gathered]]] = axis
    return result
