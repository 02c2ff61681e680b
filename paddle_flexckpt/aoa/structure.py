"""Structures: values composed of input slots, whatever keys are bound to the slots.

One statement makes thousands of layers from tensors of equal shapes and different names; all of them share one
structure. Operations on structures are pure, so a caller may memoise them by identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from paddle_flexckpt.algebra import Columns
from paddle_flexckpt.algebra.box_maps import NO_AXIS
from paddle_flexckpt.aoa.element_maps import Step, TensorInfo

# A fragment becomes a row of box maps on every rank; with more, planning would take minutes and gigabytes.
MAX_FRAGMENTS = 1_000_000


class StructureError(ValueError):
    """An error of an operation that does not fit its value."""


class TypedStep(Step, Protocol):
    """A computation with the shape and dtype of its result."""

    def result(self, infos: Sequence[TensorInfo]) -> TensorInfo:
        """Return shape and dtype of the result for operands of these shapes and dtypes.

        Raises:
            StructureError: The step has no meaning for such operands.
        """


@dataclass(frozen=True, eq=False)
class Fragments(Columns):
    """Disjoint boxes of a value, each with the box of a leaf that it comes from.

    Attributes:
        offset: int64 ``[p, n]``, first element of the box in the value of rank n.
        extent: int64 ``[p, n]``.
        leaf: int64 ``[p]``: an input slot if >= 0, else the node ``-1 - leaf``.
        leaf_offset: int64 ``[p, m]``, first element of the box in the leaf, whose axes are padded on the left to m.
        value_axis: int64 ``[p, m]``, the value's axis for each axis of the leaf, or NO_AXIS: extent 1 there. Axes of a
            leaf have different ones; an axis of the value without one has extent 1 in the fragment.
        chain: int64 ``[p]``, the index of the chain of casts that applies to the elements.
    """

    PADDED: ClassVar[Mapping[str, int]] = {"leaf_offset": 0, "value_axis": NO_AXIS}

    offset: np.ndarray
    extent: np.ndarray
    leaf: np.ndarray
    leaf_offset: np.ndarray
    value_axis: np.ndarray
    chain: np.ndarray

    def of_width(self, width: int) -> Fragments:
        """Return the same fragments with more, or fewer, padded leaf axes."""
        extra = width - self.width
        if extra >= 0:
            return self.widened(width)
        return replace(self, leaf_offset=self.leaf_offset[:, -extra:], value_axis=self.value_axis[:, -extra:])

    def clipped(self, start: np.ndarray, stop: np.ndarray) -> Fragments:
        """Return the parts between ``start`` and ``stop`` (int64, broadcast to ``[p, n]``); some may be empty."""
        low = np.maximum(self.offset, start)
        high = np.minimum(self.offset + self.extent, stop)
        # NO_AXIS (-1) picks the last column, of zeros.
        shift = np.zeros((len(self), low.shape[1] + 1), np.int64)
        np.subtract(low, self.offset, out=shift[:, :-1])
        moved = self.leaf_offset + shift[np.arange(len(self))[:, None], self.value_axis]
        return replace(self, offset=low, extent=np.maximum(high - low, 0), leaf_offset=moved)

    def with_axes(self, table: Sequence[int], offset: np.ndarray, extent: np.ndarray) -> Fragments:
        """Return the fragments with other axes: ``table`` has the new number of each (NO_AXIS: it is dropped)."""
        mapped = np.asarray([*table, NO_AXIS], np.int64)[self.value_axis]
        return replace(self, offset=offset, extent=extent, value_axis=mapped)

    def split_at_multiples(self, axis: int, block: int) -> Fragments:
        """Return the fragments, split along an axis wherever the value's index is a multiple of ``block``.

        Raises:
            StructureError: There would be more than MAX_FRAGMENTS.
        """
        first = self.offset[:, axis] // block
        count = (self.offset[:, axis] + self.extent[:, axis] - 1) // block - first + 1
        total = int(count.sum())
        if total == len(self):
            return self
        if total > MAX_FRAGMENTS:
            raise StructureError(
                f"the value would fall into {total:,} boxes or more; at most {MAX_FRAGMENTS:,} are supported. "
                "Remedy (FC603): split or merge only axes whose inner extents are long, and do it before axes are "
                "permuted or cut"
            )
        parts = self.take(np.repeat(np.arange(len(self)), count))
        block_index = np.arange(total) - np.repeat(np.cumsum(count) - count - first, count)
        start = parts.offset.copy()
        stop = parts.offset + parts.extent
        start[:, axis] = block_index * block
        stop[:, axis] = start[:, axis] + block
        return parts.clipped(start, stop)


@dataclass(frozen=True, eq=False)
class StructureNode:
    """A computed leaf.

    Attributes:
        step: How to compute it; None: the target keeps its values.
        info: Its shape and dtype.
        operands: Structures over the same inputs as the structure that has the node.
    """

    step: TypedStep | None
    info: TensorInfo
    operands: tuple[Structure, ...] = ()

    @cached_property
    def slots(self) -> frozenset[int]:
        """Return input slots that the node needs."""
        return frozenset().union(*(operand.slots for operand in self.operands))


@dataclass(frozen=True, eq=False)
class Structure:
    """A value, composed of input slots.

    Attributes:
        shape: Shape of the value.
        dtype: Paddle's name of the value's dtype, after casts.
        inputs: Shape and dtype of every input slot.
        fragments: The boxes of the value, disjoint and covering it. Leaf axes are padded to the largest rank among the
            leaves.
        chains: Dtypes that elements are cast to, in order, after they leave the leaf; ``()``: none.
        nodes: Computed leaves.
    """

    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[TensorInfo, ...]
    fragments: Fragments
    chains: tuple[tuple[str, ...], ...]
    nodes: tuple[StructureNode, ...] = ()

    def __len__(self) -> int:
        return len(self.fragments)

    @cached_property
    def info(self) -> TensorInfo:
        """Return shape and dtype of the value."""
        return TensorInfo(self.shape, self.dtype)

    @cached_property
    def slots(self) -> frozenset[int]:
        """Return input slots that the value needs."""
        leaves = distinct(self.fragments.leaf)
        own = frozenset(leaf for leaf in leaves if leaf >= 0)
        return own.union(*(self.nodes[-1 - leaf].slots for leaf in leaves if leaf < 0))

    def leaf_info(self, leaf: int) -> TensorInfo:
        """Return shape and dtype of a leaf."""
        return self.inputs[leaf] if leaf >= 0 else self.nodes[-1 - leaf].info


@dataclass(frozen=True)
class Derived:
    """The result of an operation.

    Attributes:
        structure: The new structure, with only the inputs that it needs.
        slots: For every input of it, the slot in the concatenated inputs of the operation's arguments.
    """

    structure: Structure
    slots: tuple[int, ...]

    def then(self, following: Derived) -> Derived:
        """Return an operation on ``self.structure`` in terms of the inputs of this one."""
        return Derived(following.structure, tuple(self.slots[slot] for slot in following.slots))


def distinct(column: np.ndarray) -> list[int]:
    """Return the distinct values of an int64 column, ascending."""
    # numpy's own takes longer than the rest of an operation on a few fragments.
    return sorted(set(column.tolist())) if len(column) < 256 else np.unique(column).tolist()


def unchanged(structure: Structure) -> Derived:
    """Return the structure itself."""
    return Derived(structure, tuple(range(len(structure.inputs))))


def assembled(
    shape: tuple[int, ...],
    dtype: str,
    inputs: tuple[TensorInfo, ...],
    fragments: Fragments,
    chains: Sequence[tuple[str, ...]],
    nodes: Sequence[StructureNode],
    shifts: Sequence[int] | None = None,
) -> Derived:
    """Return a structure without empty fragments and without inputs, nodes and chains that nothing needs.

    Args:
        shape: Shape of the value.
        dtype: Dtype of the value.
        inputs: All inputs that ``fragments`` and ``nodes`` may refer to.
        fragments: Fragments, with any number of padded leaf axes.
        chains: Chains of casts that ``fragments`` refers to; there may be duplicates.
        nodes: Nodes that ``fragments`` refers to.
        shifts: For every node whose operands have slots of their own, what to add to these (None: nothing).
    """
    filled = np.flatnonzero((fragments.extent > 0).all(axis=1))
    if len(filled) < len(fragments):
        fragments = fragments.take(filled)
    leaves = distinct(fragments.leaf)
    needed = sorted(-1 - leaf for leaf in leaves if leaf < 0)
    used = {leaf for leaf in leaves if leaf >= 0}
    for index in needed:
        used.update(slot + (shifts[index] if shifts else 0) for slot in nodes[index].slots)
    slots = tuple(sorted(used))
    needed_inputs = inputs if len(slots) == len(inputs) else tuple(inputs[slot] for slot in slots)
    if len(slots) != len(inputs) or len(needed) != len(nodes):
        # A node's leaf number is negative and so counts from the end of the table, where the nodes are.
        table = np.zeros(len(inputs) + len(nodes), np.int64)
        table[list(slots)] = np.arange(len(slots))
        table[[-1 - index for index in needed]] = -1 - np.arange(len(needed))
        fragments = replace(fragments, leaf=table[fragments.leaf])
    needed_nodes = []
    slot_table = np.zeros(len(inputs), np.int64)
    slot_table[list(slots)] = np.arange(len(slots))
    memo: dict[tuple[int, int], Structure] = {}
    for index in needed:
        node, shift = nodes[index], shifts[index] if shifts else 0
        operands = tuple(renumbered(o, slot_table, shift, needed_inputs, memo) for o in node.operands)
        same = all(new is old for new, old in zip(operands, node.operands))
        needed_nodes.append(node if same else StructureNode(node.step, node.info, operands))
    needed_chains, column = _needed_chains(fragments.chain, chains)
    ranks = [len(needed_inputs[leaf].shape) for leaf in distinct(fragments.leaf) if leaf >= 0]
    fragments = fragments.of_width(max(ranks + [len(node.info.shape) for node in needed_nodes], default=0))
    if column is not fragments.chain:
        fragments = replace(fragments, chain=column)
    structure = Structure(shape, dtype, needed_inputs, fragments, needed_chains, tuple(needed_nodes))
    return Derived(structure, slots)


def _needed_chains(
    column: np.ndarray, chains: Sequence[tuple[str, ...]]
) -> tuple[tuple[tuple[str, ...], ...], np.ndarray]:
    if len(chains) == 1:
        return tuple(chains), column
    numbers: dict[tuple[str, ...], int] = {}
    table = np.zeros(len(chains), np.int64)
    for index in distinct(column):
        table[index] = numbers.setdefault(chains[index], len(numbers))
    return tuple(numbers) or ((),), table[column]


def renumbered(
    structure: Structure,
    table: np.ndarray,
    shift: int,
    inputs: tuple[TensorInfo, ...],
    memo: dict[tuple[int, int], Structure],
) -> Structure:
    """Return an operand's structure over other inputs: slot s becomes ``table[s + shift]``.

    Args:
        structure: The operand's structure.
        table: int64, the new number of every slot.
        shift: Added to slots before they are looked up.
        inputs: Shape and dtype of the new slots.
        memo: Results of earlier calls with the same ``table``, so that nodes go on sharing operands.
    """
    if structure.inputs is inputs:
        return structure
    key = (id(structure), shift)
    if key not in memo:
        leaf = structure.fragments.leaf.copy()
        is_slot = leaf >= 0
        leaf[is_slot] = table[leaf[is_slot] + shift]
        nodes = tuple(
            StructureNode(node.step, node.info, tuple(renumbered(o, table, shift, inputs, memo) for o in node.operands))
            for node in structure.nodes
        )
        fragments = replace(structure.fragments, leaf=leaf)
        memo[key] = replace(structure, inputs=inputs, fragments=fragments, nodes=nodes)
    return memo[key]
