"""Whole leaves as structures, and structures of another dtype or shape. Tested in tests/aoa/test_structure.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paddle_flexckpt.aoa.casts import COMPLEX, Number, number_in, simplify_chain
from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.steps import Constant, Convert, bound
from paddle_flexckpt.aoa.structure import (
    NO_AXIS,
    Derived,
    Fragments,
    Structure,
    StructureError,
    StructureNode,
    TypedStep,
    assembled,
    distinct,
    renumbered,
    unchanged,
)
from paddle_flexckpt.catalog import ValidationError, dtype_of
from paddle_flexckpt.catalog.dtypes import DTYPES, castable

_UNCAST: tuple[tuple[str, ...], ...] = ((),)


def source(info: TensorInfo) -> Derived:
    """Return the tensor bound to one input slot."""
    return assembled(info.shape, info.dtype, (info,), _whole(info.shape, 0), _UNCAST, ())


def computed(step: TypedStep, info: TensorInfo | None, operands: Sequence[Structure]) -> Derived:
    """Return the result of a step, as one node; its operands have the extents that :func:`bound` needs."""
    infos = [operand.info for operand in operands]
    step = bound(step, infos)
    result = step.result(infos)
    if info is not None and info != result:
        raise StructureError(f"the step {step} gives {_text(result)}; expected {_text(info)}")
    for number, operand in enumerate(operands, 1):
        if any(leaf < 0 and operand.nodes[-1 - leaf].step is None for leaf in distinct(operand.fragments.leaf)):
            raise StructureError(
                f"operand {number} has elements that keep what the target has, with which nothing can be computed. "
                "Remedy (FC603): give them a number with fill="
            )
    inputs = tuple(slot for operand in operands for slot in operand.inputs)
    table = np.arange(len(inputs))
    memo: dict[tuple[int, int], Structure] = {}
    shared, shift = [], 0
    for operand in operands:
        shared.append(renumbered(operand, table, shift, inputs, memo))
        shift += len(operand.inputs)
    node = StructureNode(step, result, tuple(shared))
    return assembled(result.shape, result.dtype, inputs, _whole(result.shape, -1), _UNCAST, (node,))


def constant(info: TensorInfo, fill: Number) -> Derived:
    """Return a value of which every element is ``fill``."""
    return _leaf_alone(info, fill_step(fill, info.dtype))


def keep(info: TensorInfo) -> Derived:
    """Return a value of which the target keeps its own elements."""
    return _leaf_alone(info, None)


def cast(structure: Structure, dtype: str) -> Derived:
    """Cast the value to another dtype."""
    try:
        dtype = dtype_of(dtype).name
    except ValidationError as error:
        raise StructureError(str(error)) from None
    if dtype == structure.dtype:
        return unchanged(structure)
    if structure.dtype in COMPLEX and dtype not in (*COMPLEX, "bool"):
        raise StructureError(f"a cast of {structure.dtype} to {dtype} would drop the imaginary parts")
    if not {structure.dtype, dtype} <= DTYPES.keys() and not castable(structure.dtype, dtype):
        raise StructureError(f"there is no cast of {structure.dtype} to {dtype}")
    # The casts that may be dropped depend on the leaf's own dtype.
    numbers: dict[tuple[str, ...], int] = {}
    column = np.zeros(len(structure), np.int64)
    nodes = list(structure.nodes)
    for leaf in distinct(structure.fragments.leaf):
        keeps = leaf < 0 and nodes[-1 - leaf].step is None
        if keeps:
            # The target's own values have its dtype: there is nothing to cast.
            nodes[-1 - leaf] = StructureNode(None, TensorInfo(nodes[-1 - leaf].info.shape, dtype))
        rows = np.flatnonzero(structure.fragments.leaf == leaf) if len(structure) > 1 else np.zeros(1, np.int64)
        for old in distinct(structure.fragments.chain[rows]):
            casts = () if keeps else (*structure.chains[old], dtype)
            chain = simplify_chain(structure.leaf_info(leaf).dtype, casts)
            number = numbers.setdefault(chain, len(numbers))
            column[rows[structure.fragments.chain[rows] == old]] = number
    fragments = replace(structure.fragments, chain=column)
    chains = tuple(numbers) or _UNCAST
    return assembled(structure.shape, dtype, structure.inputs, fragments, chains, nodes)


def with_inputs(structure: Structure, infos: Sequence[TensorInfo], casts: bool = False) -> Structure:
    """Apply the same moves and steps to inputs of other dtypes, as for an optimizer's states.

    Filled-in numbers take the dtype of the value that they were added to.

    Args:
        structure: A structure.
        infos: Shape and dtype of every input slot; shapes have to be those of ``structure.inputs``.
        casts: Whether casts are carried out too; else every element keeps its leaf's dtype.

    Raises:
        StructureError: A shape differs, a step has no meaning for these dtypes, or elements of the value would have
            different dtypes.
    """
    if len(infos) != len(structure.inputs):
        raise StructureError(f"expected {len(structure.inputs)} inputs; got {len(infos)}")
    for number, (old, new) in enumerate(zip(structure.inputs, infos), 1):
        if old.shape != new.shape:
            raise StructureError(f"input {number}: expected shape {list(old.shape)}, got {list(new.shape)}")
    return _rebuilt(structure, tuple(infos), casts, {}, {})


def _rebuilt(
    structure: Structure,
    infos: tuple[TensorInfo, ...],
    casts: bool,
    structures: dict[int, Structure],
    nodes: dict[int, StructureNode],
) -> Structure:
    if id(structure) in structures:
        return structures[id(structure)]
    new_nodes = []
    for node in structure.nodes:
        if node.operands and id(node) not in nodes:
            operands = tuple(_rebuilt(operand, infos, casts, structures, nodes) for operand in node.operands)
            step = Convert(()) if isinstance(node.step, Convert) and not casts else node.step
            info = step.result([operand.info for operand in operands]) if step else node.info
            nodes[id(node)] = StructureNode(step, info, operands)
        new_nodes.append(nodes.get(id(node), node))
    found: dict[str, None] = {}
    flexible = []  # nodes whose dtype follows from the rest
    pairs = np.unique(np.stack([structure.fragments.leaf, structure.fragments.chain], axis=1), axis=0).tolist()
    for leaf, number in pairs:
        chain = structure.chains[number] if casts else ()
        if leaf < 0 and not new_nodes[-1 - leaf].operands and not chain:
            flexible.append(-1 - leaf)
        else:
            info = infos[leaf] if leaf >= 0 else new_nodes[-1 - leaf].info
            found[(info.dtype, *chain)[-1]] = None
    dtypes = list(found) or [structure.dtype]
    if len(dtypes) > 1:
        raise StructureError(
            f"parts of the value would have different dtypes: {' and '.join(dtypes)}; expected one. Remedy (FC604): "
            "say in statements for these states where they come from, with dtype= for those of another"
        )
    for position in flexible:
        node = new_nodes[position]
        step = fill_step(node.step.fill, dtypes[0]) if isinstance(node.step, Constant) else node.step
        new_nodes[position] = StructureNode(step, TensorInfo(node.info.shape, dtypes[0]))
    rebuilt = replace(
        structure,
        dtype=dtypes[0],
        inputs=infos,
        nodes=tuple(new_nodes),
        chains=structure.chains if casts else _UNCAST,
        fragments=structure.fragments if casts else uncast(structure.fragments),
    )
    structures[id(structure)] = rebuilt
    return rebuilt


def uncast(fragments: Fragments) -> Fragments:
    """Return the same fragments with the first chain of casts, which is empty."""
    return replace(fragments, chain=np.zeros(len(fragments), np.int64))


def _text(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def fill_step(fill: Number, dtype: str) -> Constant:
    """Return the step that fills with a number, which has to exist in the dtype."""
    number_in(fill, dtype)
    return Constant(fill, dtype)


def boxes_of(offset: np.ndarray, extent: np.ndarray, leaf: int) -> Fragments:
    """Return the fragments of a leaf of the value's own shape."""
    count, rank = offset.shape
    axes = np.broadcast_to(np.arange(rank, dtype=np.int64), (count, rank))
    return Fragments(offset, extent, np.full(count, leaf, np.int64), offset, axes, np.zeros(count, np.int64))


def _whole(shape: tuple[int, ...], leaf: int) -> Fragments:
    extent = np.asarray([shape], np.int64).reshape(1, len(shape))
    return boxes_of(np.zeros_like(extent), extent, leaf)


def _leaf_alone(info: TensorInfo, step: TypedStep | None) -> Derived:
    node = StructureNode(step, info)
    return assembled(info.shape, info.dtype, (), _whole(info.shape, -1), _UNCAST, (node,))


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
    # Within a group, a box is contiguous in both shapes along the innermost axis alone. So it is split into rows along
    # all other axes of the group.
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
