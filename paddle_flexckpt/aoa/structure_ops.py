"""Operations on structures: cut, join, permute and all others of the language.

Axes may be negative everywhere. Every function gives a :class:`~paddle_flexckpt.aoa.structure.Derived` and raises
:class:`~paddle_flexckpt.aoa.structure.StructureError` where the operation does not fit the value.
Tested in tests/aoa/test_structure.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Union

import numpy as np

from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.structure import (
    MAX_FRAGMENTS,
    NO_AXIS,
    Derived,
    Fragments,
    Structure,
    StructureError,
    StructureNode,
    assembled,
    unchanged,
)
from paddle_flexckpt.aoa.structure_values import (
    boxes_of,
    cast,
    computed,
    constant,
    fill_step,
    keep,
    reshape,
    source,
    with_inputs,
)

__all__ = [
    "KEEP",
    "Fill",
    "axis_of",
    "cast",
    "computed",
    "constant",
    "cut",
    "index",
    "join",
    "keep",
    "pad",
    "permute",
    "repeat",
    "reshape",
    "resize",
    "slice_",
    "source",
    "stack",
    "with_inputs",
]

# Elements of which the target keeps its values.
KEEP: Literal["keep"] = "keep"
Fill = Union[int, float, Literal["keep"]]


def axis_of(axis: int, rank: int) -> int:
    """Return the number of an axis from 0; a negative one counts from the end."""
    axis = _integer(axis, "axis")
    if not -rank <= axis < rank:
        allowed = f"expected {-rank} to {rank - 1}" if rank else "there is no axis"
        raise StructureError(f"axis {axis} is out of range for a value of {rank} axes; {allowed}")
    return axis % rank


def cut(structure: Structure, axis: int, start: int, stop: int) -> Derived:
    """Cut out the elements from ``start`` to before ``stop`` along an axis."""
    axis = axis_of(axis, len(structure.shape))
    extent = structure.shape[axis]
    start, stop = _integer(start, "start"), _integer(stop, "stop")
    if not 0 <= start <= stop <= extent:
        raise StructureError(
            f"cut of [{start}, {stop}) along axis {axis} of shape {list(structure.shape)}; "
            f"expected 0 <= start <= stop <= {extent}"
        )
    starts, stops = [0] * len(structure.shape), list(structure.shape)
    starts[axis], stops[axis] = start, stop
    return _window(structure, starts, stops)


def index(structure: Structure, axis: int, i: int) -> Derived:
    """Cut out index ``i`` of an axis, without that axis; a negative ``i`` counts from the end."""
    axis = axis_of(axis, len(structure.shape))
    items: list[tuple[int | None, int | None] | int] = [(None, None)] * axis
    return slice_(structure, [*items, i])


def slice_(structure: Structure, items: Sequence[tuple[int | None, int | None] | int]) -> Derived:
    """Cut out parts of all axes at once.

    An item is start and stop of an axis (None: its end), or an index that drops the axis. Negative numbers count from
    the end; axes without an item stay whole.
    """
    shape = structure.shape
    if len(items) > len(shape):
        raise StructureError(f"slice of {len(items)} axes; the value has shape {list(shape)}")
    starts, stops, dropped = [0] * len(shape), list(shape), []
    for axis, item in enumerate(items):
        extent = shape[axis]
        if isinstance(item, tuple):
            low, high = item
            first = 0 if low is None else _from_end(_integer(low, "start"), extent)
            last = extent if high is None else _from_end(_integer(high, "stop"), extent)
            if not 0 <= first <= last <= extent:
                raise StructureError(
                    f"slice {_bound(low)}:{_bound(high)} of axis {axis} of shape {list(shape)}; expected "
                    f"bounds in ascending order within 0:{extent}"
                )
        else:
            first = _from_end(_integer(item, "index"), extent)
            if not 0 <= first < extent:
                raise StructureError(f"index {item} is out of range for axis {axis} of shape {list(shape)}")
            last = first + 1
            dropped.append(axis)
        starts[axis], stops[axis] = first, last
    return _window(structure, starts, stops, dropped)


def join(structures: Sequence[Structure], axis: int) -> Derived:
    """Put values one after the other along an axis; dtypes and all other extents have to be equal."""
    return _joined(structures, axis_of(axis, len(_first_of(structures, "join").shape)))


def stack(structures: Sequence[Structure], axis: int) -> Derived:
    """Put values one after the other along a new axis; shapes and dtypes have to be equal."""
    first = _first_of(structures, "stack")
    axis = axis_of(axis, len(first.shape) + 1)
    return _joined(structures, axis, new_axis=True)


def permute(structure: Structure, axes: Sequence[int]) -> Derived:
    """Permute axes: axis i of the result is axis ``axes[i]``."""
    rank = len(structure.shape)
    order = [_integer(axis, "axis") for axis in axes]
    order = [axis + rank if axis < 0 else axis for axis in order]
    if sorted(order) != list(range(rank)):
        raise StructureError(
            f"permute of shape {list(structure.shape)} takes every axis from 0 to {rank - 1} once; got {list(axes)}"
        )
    if order == list(range(rank)):
        return unchanged(structure)
    fragments = structure.fragments
    table = np.argsort(np.asarray(order, np.int64)).tolist()
    fragments = fragments.with_axes(table, fragments.offset[:, order], fragments.extent[:, order])
    shape = tuple(structure.shape[axis] for axis in order)
    return _moved(structure, shape, fragments)


def pad(structure: Structure, before: Sequence[int], after: Sequence[int], fill: Fill) -> Derived:
    """Add elements before and after the value along every axis; they are ``fill``, or KEEP the target's values."""
    rank = len(structure.shape)
    for name, widths in (("before", before), ("after", after)):
        if len(widths) != rank:
            raise StructureError(
                f"pad takes one number for each axis of shape {list(structure.shape)}; got {list(widths)} ({name})"
            )
        if any(_integer(width, "pad") < 0 for width in widths):
            raise StructureError(f"pad takes numbers >= 0; got {list(widths)} ({name})")
    if not any(before) and not any(after):
        return unchanged(structure)
    shape = tuple(b + extent + a for b, extent, a in zip(before, structure.shape, after))
    step = None if fill == KEEP else fill_step(fill, structure.dtype)
    offsets, extents = [], []
    for axis in range(rank):
        end = before[axis] + structure.shape[axis]
        for start, width in ((0, before[axis]), (end, after[axis])):
            if width:
                # Whole along later axes, and like the value along earlier ones: so the boxes are disjoint.
                offsets.append([*before[:axis], start, *[0] * (rank - axis - 1)])
                extents.append([*structure.shape[:axis], width, *shape[axis + 1 :]])
    chains = (*structure.chains, ())
    added = boxes_of(np.asarray(offsets, np.int64), np.asarray(extents, np.int64), -1 - len(structure.nodes))
    added.chain[:] = len(structure.chains)
    moved = replace(structure.fragments, offset=structure.fragments.offset + np.asarray(before, np.int64))
    nodes = (*structure.nodes, StructureNode(step, TensorInfo(shape, structure.dtype)))
    return assembled(shape, structure.dtype, structure.inputs, _concatenated([moved, added]), chains, nodes)


def resize(structure: Structure, extents: Sequence[int], fill: Fill | None) -> Derived:
    """Cut or extend the value at the end of every axis; an extent of -1 stays as it is.

    New elements are ``fill``, or KEEP the target's values; without ``fill`` there must not be any.
    """
    shape = structure.shape
    if len(extents) != len(shape):
        raise StructureError(f"resize takes one extent for each axis of shape {list(shape)}; got {list(extents)}")
    if any(_integer(extent, "extent") < -1 for extent in extents):
        raise StructureError(f"resize takes extents >= 0, or -1; got {list(extents)}")
    wanted = [old if extent == -1 else extent for old, extent in zip(shape, extents)]
    smaller = [min(old, new) for old, new in zip(shape, wanted)]
    if smaller != wanted and fill is None:
        raise StructureError(f"resize of {list(shape)} to {wanted} adds elements; expected fill= to say what they hold")
    derived = _window(structure, [0] * len(shape), smaller)
    if smaller == wanted or fill is None:
        return derived
    grown = [new - old for old, new in zip(smaller, wanted)]
    return derived.then(pad(derived.structure, [0] * len(shape), grown, fill))


def repeat(structure: Structure, axis: int, times: int, block: int | None = None) -> Derived:
    """Repeat the value, or every block of it in place, along an axis."""
    axis = axis_of(axis, len(structure.shape))
    extent = structure.shape[axis]
    block = max(extent, 1) if block is None else _integer(block, "block")
    if _integer(times, "repeat") < 1:
        raise StructureError(f"repeat takes a number of copies >= 1; got {times}")
    if block < 1 or extent % block:
        raise StructureError(
            f"repeat of blocks of {block} along axis {axis} of shape {list(structure.shape)}: {extent} is no "
            "multiple of the block"
        )
    if times == 1:
        return unchanged(structure)
    fragments = structure.fragments.split_at_multiples(axis, block)
    count = len(fragments)
    if count * times > MAX_FRAGMENTS:
        raise StructureError(
            f"repeat makes {count * times:,} boxes; at most {MAX_FRAGMENTS:,} are supported. "
            "Remedy (FC603): repeat larger blocks"
        )
    number = fragments.offset[:, axis] // block
    fragments = fragments.take(np.tile(np.arange(count), times))
    copy = np.repeat(np.arange(times), count)
    fragments.offset[:, axis] += (np.tile(number, times) * (times - 1) + copy) * block
    shape = (*structure.shape[:axis], extent * times, *structure.shape[axis + 1 :])
    return _moved(structure, shape, fragments)


def _integer(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise StructureError(f"{what} has to be an integer; got {value!r}")
    return int(value)


def _from_end(value: int, extent: int) -> int:
    return value + extent if value < 0 else value


def _bound(value: int | None) -> str:
    return "" if value is None else str(value)


def _first_of(structures: Sequence[Structure], what: str) -> Structure:
    if not structures:
        raise StructureError(f"{what} takes at least one value")
    return structures[0]


def _moved(structure: Structure, shape: tuple[int, ...], fragments: Fragments) -> Derived:
    return assembled(shape, structure.dtype, structure.inputs, fragments, structure.chains, structure.nodes)


def _window(structure: Structure, starts: Sequence[int], stops: Sequence[int], dropped: Sequence[int] = ()) -> Derived:
    """Return what is between ``starts`` and ``stops``, without the dropped axes, of extent 1 there."""
    if not any(starts) and tuple(stops) == structure.shape and not dropped:
        return unchanged(structure)
    first = np.asarray(starts, np.int64)
    fragments = structure.fragments.clipped(first, np.asarray(stops, np.int64))
    # Empty fragments are removed before their axes are.
    fragments = fragments.take(np.flatnonzero((fragments.extent > 0).all(axis=1)))
    fragments = replace(fragments, offset=fragments.offset - first)
    shape = tuple(stop - start for start, stop in zip(starts, stops))
    if dropped:
        left = [axis for axis in range(len(shape)) if axis not in dropped]
        table = [left.index(axis) if axis in left else NO_AXIS for axis in range(len(shape))]
        fragments = fragments.with_axes(table, fragments.offset[:, left], fragments.extent[:, left])
        shape = tuple(shape[axis] for axis in left)
    return _moved(structure, shape, fragments)


def _concatenated(parts: Sequence[Fragments]) -> Fragments:
    width = max(part.width for part in parts)
    parts = [part.of_width(width) for part in parts]
    return Fragments.concat(parts)


def _joined(structures: Sequence[Structure], axis: int, new_axis: bool = False) -> Derived:
    what, first = "stack" if new_axis else "join", structures[0]
    for number, structure in enumerate(structures, 1):
        if structure.dtype != first.dtype:
            raise StructureError(
                f"{what} takes values of equal dtype; expected {first.dtype} as value 1 has, got {structure.dtype} "
                f"(value {number})"
            )
        expected = first.shape
        if not new_axis and len(structure.shape) == len(expected):
            expected = (*expected[:axis], structure.shape[axis], *expected[axis + 1 :])
        if structure.shape != expected:
            others = "with all other extents equal" if not new_axis else "of equal shape"
            raise StructureError(
                f"{what} along axis {axis} takes values {others}; expected as {list(first.shape)} (value 1), "
                f"got {list(structure.shape)} (value {number})"
            )
    if len(structures) == 1 and not new_axis:
        return unchanged(first)
    counts = [len(structure) for structure in structures]
    fragments = _concatenated([structure.fragments for structure in structures])
    extents = [1 if new_axis else structure.shape[axis] for structure in structures]
    shape = (*first.shape[:axis], sum(extents), *first.shape[axis + (not new_axis) :])
    if new_axis:
        table = [old + (old >= axis) for old in range(len(first.shape))]
        offset, extent = np.insert(fragments.offset, axis, 0, axis=1), np.insert(fragments.extent, axis, 1, axis=1)
        fragments = fragments.with_axes(table, offset, extent)

    def running(numbers: Sequence[int]) -> np.ndarray:
        return np.repeat(np.cumsum([0, *numbers[:-1]]), counts)

    fragments.offset[:, axis] += running(extents)
    slot_shift = running([len(structure.inputs) for structure in structures])
    node_shift = running([len(structure.nodes) for structure in structures])
    fragments = replace(
        fragments,
        leaf=np.where(fragments.leaf >= 0, fragments.leaf + slot_shift, fragments.leaf - node_shift),
        chain=fragments.chain + running([len(structure.chains) for structure in structures]),
    )
    shifts, start = [], 0
    for structure in structures:
        shifts.extend([start] * len(structure.nodes))
        start += len(structure.inputs)
    return assembled(
        shape,
        first.dtype,
        tuple(info for structure in structures for info in structure.inputs),
        fragments,
        [chain for structure in structures for chain in structure.chains],
        [node for structure in structures for node in structure.nodes],
        shifts,
    )
