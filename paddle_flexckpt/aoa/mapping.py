"""What a compiled program is: where every element of every target comes from."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.algebra.box_maps import BoxMaps


class Step(Protocol):
    """An element-wise computation that can be carried out for any box of its result."""

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        """The box of every operand that a box of the result needs."""

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """The result's elements in a box.

        Args:
            box: The box of the result.
            operands: Arrays of the shapes and places that :meth:`operand_boxes` gave.

        Returns:
            Array of ``box.shape``.
        """


@dataclass(frozen=True)
class TensorInfo:
    """What a value is.

    Attributes:
        shape: Global shape.
        dtype: Paddle's name of the element type.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Node:
    """A computed tensor.

    Attributes:
        step: How to compute it.
        info: Its shape and dtype.
        operands: Names of its operands, each defined by the mapping as target keys are.
    """

    step: Step
    info: TensorInfo
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """A box of a target that is not moved from a source: it is computed, or keeps what it has.

    Attributes:
        offset: First element of the box in the target.
        shape: Extents of the box along the target's axes.
        node: Index of the node that computes it; None: the target keeps what it has.
        node_offset: First element of the box in the node's tensor.
        target_axis: For every axis of the node's tensor, the target's axis that runs along it, or -1 (extent 1).
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    node: int | None = None
    node_offset: tuple[int, ...] = ()
    target_axis: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Mapping:
    """A compiled program.

    Target keys that are not in ``tensors`` come from the source key of the same name. The elements of one that is are
    divided among the boxes of ``maps`` (moved, cast to the target's dtype if it differs) and its ``regions``.

    Attributes:
        maps: Moves, for target keys and operands.
        regions: What is not moved, by name of target key or operand.
        nodes: Computed tensors; an operand's regions refer to nodes with smaller indices only.
        tensors: Shape and dtype of every target key that the program defines, and of every operand.
        removed: Source keys that statements declare unused.
        unfed: Target keys that are fed by nothing, though the source has a key of the same name (it was removed).
        masters: Target keys that are fed by another kind of key (``master_weights="convert"``): a master weight by its
            parameter, or a parameter by its master weight; with the source key.
        outputs: Where the program was compiled without a destination: all keys of the result, each in ``tensors``.
        provenance: For target keys in ``tensors`` and ``unfed``: the statement that made it, or why nothing feeds it.
    """

    maps: BoxMaps
    regions: MappingType[str, tuple[Region, ...]]
    nodes: tuple[Node, ...]
    tensors: MappingType[str, TensorInfo]
    removed: frozenset[str] = frozenset()
    unfed: frozenset[str] = frozenset()
    masters: MappingType[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    provenance: MappingType[str, str] = field(default_factory=dict)
