"""A compiled program: where every element of every target comes from. Tested in tests/aoa/test_structure.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.algebra.box_maps import BoxMaps
from paddle_flexckpt.catalog import EXTRA_STATE, Problem, ValidationError, dtype_of


class Step(Protocol):
    """An element-wise computation, for any box of the result."""

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the box of every operand that a box of the result needs."""

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the result's elements in a box.

        Args:
            box: The box of the result.
            operands: Arrays, one for each of :meth:`operand_boxes`.

        Returns:
            Array of ``box.shape``.
        """


@dataclass(frozen=True)
class TensorInfo:
    """The global shape of a value and Paddle's name of its element type."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Node:
    """A computed tensor; its operands are names that the mapping defines, as target keys are."""

    step: Step
    info: TensorInfo
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """A box of a target that is not moved from a source: it is computed, or keeps its values.

    Attributes:
        offset: First element of the box in the target.
        shape: Extents of the box along the target's axes.
        node: Index of the node that computes it; None: the target keeps its values.
        node_offset: First element of the box in the node's tensor.
        target_axis: For every axis of the node's tensor, the target's axis that runs along it, or -1 (extent 1).
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    node: int | None = None
    node_offset: tuple[int, ...] = ()
    target_axis: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class TensorMapping:
    """A compiled program.

    Target keys that are not in ``tensors`` come from the source key of the same name. The elements of a key in
    ``tensors`` are divided among the boxes of ``maps`` (moved, and cast to the target's dtype) and its ``regions``.

    Attributes:
        maps: Moves, for target keys and operands.
        regions: The boxes that are not moved, by target key or operand.
        nodes: Computed tensors; an operand's regions refer to nodes with smaller indices only.
        tensors: Shape and dtype of every target key that the program defines, and of every operand.
        removed: Source keys that statements declare unused.
        unfed: Target keys that get no values, although the source has a key of that name: a statement removed it, or
            its value does not determine the state.
        masters: The source key by target key, where ``master_weights="convert"`` feeds a master weight by its
            parameter, or a parameter by its master weight.
        outputs: Where the program was compiled without a destination: all keys of the result, each in ``tensors``.
        provenance: For target keys in ``tensors`` and ``unfed``: the statement that made it, or why nothing feeds it.
        unread: A name of each statement that makes nothing but names that no target has, and the statement.
    """

    maps: BoxMaps
    regions: Mapping[str, tuple[Region, ...]]
    nodes: tuple[Node, ...]
    tensors: Mapping[str, TensorInfo]
    removed: frozenset[str] = frozenset()
    unfed: frozenset[str] = frozenset()
    masters: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    def source_names(self, names: Iterable[str]) -> set[str]:
        """Return the source keys that tensors are made of, directly or through what they are computed from."""
        rows = self.maps.rows_by_target
        todo, seen, found = list(names), set(), set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            if name not in self.tensors:
                found.add(name)
                continue
            sources = np.unique(self.maps.source[rows.get(name, slice(0, 0))])
            found.update(self.maps.sources[source] for source in sources.tolist())
            for region in self.regions.get(name, ()):
                if region.node is not None:
                    todo += self.nodes[region.node].operands
        return found

    def copied_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Return the source key of each name that is one source tensor, element by element; values may be cast."""
        maps, rows, copied = self.maps, self.maps.rows_by_target, {}
        for name in names:
            if name not in self.tensors:
                continue
            shape = self.tensors[name].shape
            row, first = rows.get(name, slice(0, 0)), maps.width - len(shape)
            if row.stop - row.start != 1 or self.regions.get(name):
                continue
            # The match of axes of extent 1, padding included, does not matter.
            long = np.flatnonzero(maps.target_shape[row.start] > 1)
            whole = maps.target_shape[row.start, first:].tolist() == list(shape)
            straight = (maps.target_axis[row.start, long] == long).all()
            if whole and straight and not maps.source_offset[row.start].any():
                copied[name] = maps.sources[maps.source[row.start]]
        return copied

    def moved_keys(self, names: Iterable[str]) -> set[str]:
        """Return the names that are not, element by element, the source key of the same name, or have another dtype."""
        names = list(names)
        copied = self.copied_keys(names)
        return {name for name in names if name in self.tensors and copied.get(name) != name}

    def output_infos(self, extra_state: bool = False) -> dict[str, TensorInfo]:
        """Return shape and dtype of everything that a program without a destination makes.

        Args:
            extra_state: Whether a run's extra state is wanted too.

        Raises:
            ValidationError: A statement keeps what a target has, and there is none.
        """
        names = [name for name in self.outputs if extra_state or not name.startswith(EXTRA_STATE)]
        problems = [
            Problem(
                "statements keep what a target has, but here are no targets that have anything",
                key=name,
                got=self.provenance.get(name),
                code="FC603",
                remedy="say what new elements hold, as with fill=0",
            )
            for name in names
            if any(region.node is None for region in self.regions.get(name, ()))
        ]
        if problems:
            raise ValidationError(problems)
        return {name: self.tensors[name] for name in names}

    def made_by(self, name: str) -> str:
        """Return `` (AOA statement 1: ...)``, the statement that made a target; empty where none is known."""
        text = self.provenance.get(name)
        return f" ({text})" if text else ""
