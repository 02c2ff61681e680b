"""Random mappings, and the numpy oracle of what they make.

Whole arrays are made by slicing and transposing whole arrays, and computed in one go: nothing here knows of shards,
flattened ranges or tiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from paddle_flexckpt import aoa
from paddle_flexckpt.algebra import Box, BoxMaps
from paddle_flexckpt.aoa import Node, Region, TensorInfo, TensorMapping
from paddle_flexckpt.catalog import dtype_of
from tests.property.layouts import Pick, grid


@dataclass(frozen=True)
class Move:
    """A box of a target that is a box of a source."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    source: str
    source_offset: tuple[int, ...]
    target_axis: tuple[int, ...]


@dataclass(frozen=True)
class Weighted:
    """``w0 * A + w1 * B + ... + 0.5``, in float32, then rounded to ``dtype``; a constant without operands."""

    weights: tuple[float, ...]
    dtype: str = "float32"

    def operand_boxes(self, box: Box) -> tuple[Box, ...]:
        return (box,) * len(self.weights)

    def run(self, box: Box, operands: Sequence[np.ndarray]) -> np.ndarray:
        result = np.full(box.shape, 0.5, dtype=np.float32)
        for weight, operand in zip(self.weights, operands):
            assert operand.shape == box.shape
            result = result + np.float32(weight) * operand.astype(np.float32)
        return result.astype(dtype_of(self.dtype).numpy)


@contextlib.contextmanager
def statements_of(mapping: TensorMapping) -> Iterator[dict]:
    """Gives an ``aoa_config`` that means this mapping."""
    with mock.patch.object(aoa, "compile_program", lambda *_args, **_options: mapping):
        yield {"aoa_statements": []}


@dataclass
class Program:
    """A mapping as plain data."""

    sources: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    moves: dict[str, list[Move]] = field(default_factory=dict)
    regions: dict[str, list[Region]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def mapping(self, **extra) -> TensorMapping:
        return TensorMapping(
            box_maps(self.tensors, self.moves),
            {name: tuple(regions) for name, regions in self.regions.items()},
            tuple(self.nodes),
            dict(self.tensors),
            **extra,
        )

    def fold(
        self,
        name: str,
        leaf: Callable[[str], np.ndarray],
        compute: Callable[[Node, list[np.ndarray]], np.ndarray],
        kept: np.ndarray | None = None,
        dtype: np.dtype | None = None,
    ) -> np.ndarray:
        """A tensor, from whole sources."""
        info = self.tensors[name]
        out = np.zeros(info.shape, dtype=dtype or dtype_of(info.dtype).numpy)
        for move in self.moves.get(name, ()):
            extents = [move.shape[t] if t >= 0 else 1 for t in move.target_axis]
            out[window(move.offset, move.shape)] = turned(
                leaf(move.source)[window(move.source_offset, extents)], move.target_axis, move.shape
            )
        for region in self.regions.get(name, ()):
            here = window(region.offset, region.shape)
            if region.node is None:
                assert kept is not None
                out[here] = kept[here]
                continue
            node = self.nodes[region.node]
            value = compute(node, [self.fold(operand, leaf, compute, dtype=dtype) for operand in node.operands])
            extents = [region.shape[t] if t >= 0 else 1 for t in region.target_axis]
            out[here] = turned(value[window(region.node_offset, extents)], region.target_axis, region.shape)
        return out

    def value(self, name: str, values: dict[str, np.ndarray], kept: np.ndarray | None = None) -> np.ndarray:
        return self.fold(name, values.__getitem__, run_whole, kept)

    def costs(self, name: str, held: dict[str, np.ndarray] | None = None) -> np.ndarray:
        """Bytes of sources that each element needs, all of them or those that are not ``held`` (bool per source).

        Right for steps that work element by element, on operands that differ.
        """

        def leaf(source: str) -> np.ndarray:
            dtype, shape = self.sources[source]
            missing = np.ones(shape, dtype=bool) if held is None else ~held[source]
            return missing * dtype_of(dtype).itemsize

        def compute(node: Node, operands: list[np.ndarray]) -> np.ndarray:
            return sum(operands, np.zeros(node.info.shape, dtype=np.int64))

        nothing = np.zeros(self.tensors[name].shape, dtype=np.int64)
        return self.fold(name, leaf, compute, nothing, np.dtype(np.int64))


def run_whole(node: Node, operands: list[np.ndarray]) -> np.ndarray:
    return node.step.run(Box((0,) * len(node.info.shape), node.info.shape), operands)


def window(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offset, shape))


def turned(values: np.ndarray, target_axis: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """A box in the axes of its source as one in the axes of its target."""
    along = [t for t in target_axis if t >= 0]
    values = values.reshape([n for n, t in zip(values.shape, target_axis) if t >= 0])
    return values.transpose(np.argsort(np.asarray(along, dtype=np.int64))).reshape(tuple(shape))


def box_maps(names: Sequence[str], moves: dict[str, list[Move]]) -> BoxMaps:
    """Moves as columns."""
    sources: dict[str, int] = {}
    names = tuple(names)
    flat = [(target, move) for target, name in enumerate(names) for move in moves.get(name, ())]
    width = max([1, *(max(len(m.shape), len(m.target_axis)) for _, m in flat)])
    columns: list = [np.zeros(len(flat), dtype=np.int64) for _ in range(2)]
    columns += [np.full((len(flat), width), fill, dtype=np.int64) for fill in (0, 1, 0, -1)]
    for i, (target, move) in enumerate(flat):
        columns[0][i] = target
        columns[1][i] = sources.setdefault(move.source, len(sources))
        tail, source_tail = width - len(move.shape), width - len(move.target_axis)
        columns[2][i, tail:] = move.offset
        columns[3][i, tail:] = move.shape
        columns[4][i, source_tail:] = move.source_offset
        columns[5][i, source_tail:] = [t + tail if t >= 0 else -1 for t in move.target_axis]
    return BoxMaps(names, tuple(sources), *columns)


DTYPES = ("float32", "bfloat16", "float64")


class Maker:
    """Draws programs."""

    def __init__(self, pick: Pick, computed: bool, keep: bool, max_extent: int = 5, dtypes: Sequence[str] = DTYPES):
        self.pick, self.computed, self.keep, self.max_extent = pick, computed, keep, max_extent
        self.dtypes = dtypes
        self.program = Program()

    def target(self, name: str, shape: tuple[int, ...], dtype: str, depth: int = 2, keep: bool = True) -> None:
        pick, program = self.pick, self.program
        program.moves[name], program.regions[name] = [], []
        for offset, extents in grid(pick, shape, 2):
            kind = pick.integer(0, 5)
            if self.computed and depth and kind in (0, 1):
                self.compute(name, offset, extents, depth)
            elif self.keep and keep and kind == 2:
                program.regions[name].append(Region(offset, extents))
            else:
                self.move(name, offset, extents, dtype)
        program.tensors[name] = TensorInfo(shape, dtype)

    def axes(self, extents: tuple[int, ...]) -> list[int]:
        """Axes of a source for a box: the target's in any order, without some unit axes, with some new ones."""
        pick = self.pick
        rest = [i for i, extent in enumerate(extents) if extent > 1 or pick.integer(0, 1)]
        if pick.integer(0, 1):
            rest = [rest.pop(pick.integer(0, len(rest) - 1)) for _ in range(len(rest))]
        if pick.integer(0, 3) == 0 and len(rest) < 4:
            rest.insert(pick.integer(0, len(rest)), -1)
        return rest

    def around(self, extents: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of a box of these extents in a tensor that may be larger."""
        before = tuple(self.pick.integer(0, 1) for _ in extents)
        return before, tuple(b + e + self.pick.integer(0, 1) for b, e in zip(before, extents))

    def move(self, name: str, offset: tuple[int, ...], extents: tuple[int, ...], dtype: str) -> None:
        pick, axes = self.pick, self.axes(extents)
        box = [extents[t] if t >= 0 else 1 for t in axes]
        fitting = [
            source
            for source, (_, shape) in self.program.sources.items()
            if len(shape) == len(box) and all(a >= b for a, b in zip(shape, box))
        ]
        if fitting and pick.integer(0, 2):
            source = pick.choice(fitting)
            shape = self.program.sources[source][1]
            first = tuple(pick.integer(0, a - b) for a, b in zip(shape, box))
        else:
            source = f"s{len(self.program.sources)}"
            first, shape = self.around(box)
            same = pick.integer(0, 1)
            self.program.sources[source] = (dtype if same else pick.choice(self.dtypes), shape)
        self.program.moves[name].append(Move(offset, extents, source, first, tuple(axes)))

    def compute(self, name: str, offset: tuple[int, ...], extents: tuple[int, ...], depth: int) -> None:
        axes = self.axes(extents)
        first, shape = self.around([extents[t] if t >= 0 else 1 for t in axes])
        operands = []
        for i in range(self.pick.integer(0, 2)):
            operands.append(f"{name}/{len(self.program.regions[name])}.{i}")
            self.target(operands[-1], shape, self.pick.choice(DTYPES), depth - 1, keep=False)
        result = self.pick.choice(("float32", "bfloat16"))
        step = Weighted(tuple(float(self.pick.integer(1, 7)) / 4 for _ in operands), result)
        self.program.nodes.append(Node(step, TensorInfo(shape, result), tuple(operands)))
        self.program.regions[name].append(Region(offset, extents, len(self.program.nodes) - 1, first, tuple(axes)))


def random_program(pick: Pick, targets: int, computed: bool = False, keep: bool = False, **options) -> Program:
    """A program for targets ``t0``, ``t1`` ...; other names in ``tensors`` are operands."""
    maker = Maker(pick, computed, keep, **options)
    for i in range(targets):
        maker.target(f"t{i}", pick.shape(4, maker.max_extent), pick.choice(maker.dtypes))
    return maker.program


def random_values(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random numbers that a cast to a shorter dtype has to round."""
    values = np.random.default_rng(seed).standard_normal(math.prod(shape)).reshape(shape)
    return values.astype(dtype_of(dtype).numpy)
