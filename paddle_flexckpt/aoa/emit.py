"""Lower values to box maps, each structure once for all targets. Tested in tests/aoa/test_compile_scale.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra.box_maps import NO_AXIS, BoxMaps
from paddle_flexckpt.aoa.casts import COMPLEX, FLOATS, simplify_chain
from paddle_flexckpt.aoa.element_maps import Node, Region, TensorInfo
from paddle_flexckpt.aoa.operations import Value
from paddle_flexckpt.aoa.steps import Convert
from paddle_flexckpt.aoa.structure import Fragments, Structure, StructureNode
from paddle_flexckpt.aoa.structure_ops import source
from paddle_flexckpt.aoa.structure_reshape import coalesced
from paddle_flexckpt.catalog import dtype_of

_ROUNDED_TWICE = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A structure as rows of box maps (leaf is the input slot), and its regions that are not moved."""

    moves: Fragments
    ndim: int
    leaf_ndim: int
    others: Fragments
    nodes: tuple[StructureNode, ...]


class Emitter:
    """A collector of targets that makes the columns of their box maps."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.regions: dict[str, tuple[Region, ...]] = {}
        self.nodes: list[Node] = []
        self._lowered: dict[tuple[Structure, str], _Lowered] = {}
        self._groups: dict[_Lowered, list[tuple[int, tuple[str, ...]]]] = {}
        self._targets: list[str] = []

    def add(self, name: str, value: Value, dtype: str) -> None:
        """Add a target."""
        structure = value.structure
        self.tensors[name] = structure.info
        lowered = self._lowered.get((structure, dtype))
        if lowered is None:
            lowered = self._lowered[structure, dtype] = _lower(structure, dtype)
        self._targets.append(name)
        self._groups.setdefault(lowered, []).append((len(self._targets) - 1, value.inputs))
        if len(lowered.others):
            self._add_regions(name, lowered, value.inputs)

    def _add_regions(self, name: str, lowered: _Lowered, keys: tuple[str, ...]) -> None:
        numbers: dict[int, int | None] = {}
        regions = []
        others = lowered.others
        for row in range(len(others)):
            place = -1 - int(others.leaf[row])
            node = lowered.nodes[place]
            if place not in numbers:
                numbers[place] = None if node.step is None else self._add_node(name, node, keys)
            rank = len(node.info.shape)
            first = others.width - rank
            regions.append(
                Region(
                    tuple(others.offset[row].tolist()),
                    tuple(others.extent[row].tolist()),
                    numbers[place],
                    tuple(others.leaf_offset[row, first:].tolist()) if node.step is not None else (),
                    tuple(others.value_axis[row, first:].tolist()) if node.step is not None else (),
                )
            )
        self.regions[name] = tuple(regions)

    def _add_node(self, name: str, node: StructureNode, keys: tuple[str, ...]) -> int:
        operands = []
        for operand in node.operands:
            operands.append(f"{name} <operand {len(self._targets)}>")
            self.add(operands[-1], Value(operand, keys), operand.dtype)
        if node.step is None:
            raise ValueError("a node that keeps what the target has cannot be computed")
        self.nodes.append(Node(node.step, node.info, tuple(operands)))
        return len(self.nodes) - 1

    def maps(self) -> BoxMaps:
        """Return the box maps of all targets added so far."""
        width = max([1, *(max(low.ndim, low.leaf_ndim) for low in self._groups)])
        sources: dict[str, int] = {}
        columns: list[tuple[np.ndarray, ...]] = []
        for lowered, members in self._groups.items():
            moves, count = lowered.moves, len(members)
            if not len(moves):
                continue
            slots = np.asarray(
                [[sources.setdefault(key, len(sources)) for key in keys] for _, keys in members], dtype=np.int64
            ).reshape(count, -1)
            extra = width - lowered.ndim
            axes = np.where(moves.value_axis >= 0, moves.value_axis + extra, NO_AXIS)
            tiled = (
                _padded(moves.offset, width, 0),
                _padded(moves.extent, width, 1),
                _padded(moves.leaf_offset, width, 0),
                _padded(axes, width, NO_AXIS),
            )
            columns.append(
                (
                    np.repeat(np.asarray([number for number, _ in members], dtype=np.int64), len(moves)),
                    slots[:, moves.leaf].reshape(-1),
                    *(np.tile(column, (count, 1)) for column in tiled),
                )
            )
        if not columns:
            none, table = np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.int64)
            return BoxMaps(tuple(self._targets), (), none, none, table, table, table, table)
        target, source_number, offset, shape, origin, axes = (np.concatenate(parts) for parts in zip(*columns))
        order = np.argsort(target, kind="stable")
        return BoxMaps(
            tuple(self._targets),
            tuple(sources),
            target[order],
            source_number[order],
            offset[order],
            shape[order],
            origin[order],
            axes[order],
        )


def _padded(column: np.ndarray, width: int, fill: int) -> np.ndarray:
    return np.pad(column, ((0, 0), (width - column.shape[1], 0)), constant_values=fill)


def _lower(structure: Structure, dtype: str) -> _Lowered:
    """Return moves with at most one plain cast, and everything else as nodes."""
    fragments = structure.fragments
    for axis in range(len(structure.shape) - 1, -1, -1):
        if len(fragments) > 1:
            fragments = coalesced(fragments, axis)
    leaf = fragments.leaf.copy()
    nodes = list(structure.nodes)
    for old, number in sorted({*zip(fragments.leaf.tolist(), fragments.chain.tolist())}):
        if old < 0 and nodes[-1 - old].step is None:
            continue
        held = structure.leaf_info(old)
        chain = simplify_chain(held.dtype, (*structure.chains[number], dtype))
        if len(chain) < 2 and _is_plain((held.dtype, *chain)[0], (held.dtype, *chain)[-1]):
            continue
        operand = _leaf_alone(structure, old)
        nodes.append(StructureNode(Convert(chain), TensorInfo(held.shape, chain[-1]), (operand,)))
        leaf[(fragments.leaf == old) & (fragments.chain == number)] = -len(nodes)
    fragments = replace(fragments, leaf=leaf)
    moved = leaf >= 0
    return _Lowered(fragments.take(moved), len(structure.shape), fragments.width, fragments.take(~moved), tuple(nodes))


def _is_plain(before: str, after: str) -> bool:
    """Return whether numpy's assignment is the cast of :func:`~paddle_flexckpt.aoa.casts.converted`."""
    if before == after:
        return True
    if before in COMPLEX or after in COMPLEX or after == "bool":
        return False
    if before in FLOATS:
        return after in FLOATS and not (before == "float64" and after in _ROUNDED_TWICE)
    return after not in FLOATS or (after not in _ROUNDED_TWICE and dtype_of(before).itemsize < 4)


def _leaf_alone(structure: Structure, leaf: int) -> Structure:
    """Return the whole of a leaf as a structure over the same inputs."""
    info = structure.leaf_info(leaf)
    alone = source(info).structure
    shown = replace(alone.fragments, leaf=np.full(1, leaf if leaf >= 0 else -1, dtype=np.int64))
    nodes: Sequence[StructureNode] = () if leaf >= 0 else (structure.nodes[-1 - leaf],)
    return Structure(info.shape, info.dtype, structure.inputs, shown, alone.chains, tuple(nodes))
