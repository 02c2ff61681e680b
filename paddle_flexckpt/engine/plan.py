"""Work: everything one rank has to fill, with room for what computed values are computed from.

A computed box of a target is cut into tiles. What a tile needs of each operand is a *scratch* row, planned, read and
received like a target of the rank. Rows stand in the order in which a load fills them: a target, then the scratch of
its first tile, then that of the next, so that few tiles are open at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from paddle_flexckpt.algebra import Box, StridedCopy, row_major_strides
from paddle_flexckpt.aoa import Region, Step, TensorMapping
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, Problem, ValidationError, concat, dtype_of
from paddle_flexckpt.catalog.validate import row_boxes
from paddle_flexckpt.planning.requests import addresses

# Elements of a result that are computed at once: bounds the memory of operands and result.
TILE_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Tile:
    """A box of a computed tensor.

    Attributes:
        row: The row that it is a part of.
        step: How to compute it.
        box: The box in the computed tensor.
        dtype: The result's element type; stored in another one it is cast once more.
        copy: From the result (row-major) to the storage of ``row``.
        operands: Scratch rows that hold its operands.
        shapes: Their shapes.
        freed: Scratch rows that no later tile needs.
        after: The last row that has to be filled before.
    """

    row: int
    step: Step
    box: Box
    dtype: np.dtype
    copy: StridedCopy
    operands: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    freed: tuple[int, ...]
    after: int


@dataclass(frozen=True, eq=False)
class Work:
    """What one rank has to fill.

    Attributes:
        catalog: Targets and scratch.
        origin: int64 per row: the row of the rank's state, or -1 for scratch.
        tiles: In the order in which they are computed.
        kept: By row: what stays as it is, as copies onto itself.
        covered: int64 per row: elements that come from tiles or stay as they are.
    """

    catalog: Catalog
    origin: np.ndarray
    tiles: tuple[Tile, ...] = ()
    kept: dict[int, list[StridedCopy]] = field(default_factory=dict)
    covered: np.ndarray | None = None

    def kept_keys(self, state: Catalog) -> list[str]:
        """Names of the targets, rows of ``state``, that keep something of what they have."""
        return sorted({state.key_name(int(self.origin[row])) for row in self.kept})

    def computed_keys(self, state: Catalog) -> list[str]:
        """Names of the targets, rows of ``state``, of which something is computed."""
        rows = {int(self.origin[tile.row]) for tile in self.tiles}
        return sorted({state.key_name(row) for row in rows if row >= 0})


def plan_work(catalog: Catalog, rows: np.ndarray, mapping: TensorMapping | None) -> Work:
    """What has to be filled for some of a rank's targets.

    Args:
        catalog: The rank's targets, under the names that the mapping or the source has for them.
        rows: The rows to fill.
        mapping: What the keys that it defines are made of.

    Raises:
        ValidationError: A value is to be computed from what a target has.
    """
    # What is planned is boxes: renamed targets may have one name and two orders.
    own = catalog.take(rows).with_orders({})
    if mapping is None:
        return Work(own, rows)
    return _Builder(own, rows, mapping).build()


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a row stands in its tensor.

    Attributes:
        row: The row of the work.
        name: Name of the tensor.
        offset: First element of the box that ``base`` belongs to.
        base: Position of that element in the row's storage.
        strides: Steps of the storage.
    """

    row: int
    name: str
    offset: tuple[int, ...]
    base: int
    strides: tuple[int, ...]

    def at(self, offset: tuple[int, ...]) -> int:
        """Position of an element of the tensor in the row's storage."""
        return self.base + sum((o - first) * s for o, first, s in zip(offset, self.offset, self.strides))


@dataclass(frozen=True, eq=False)
class _Regions:
    """The regions of one tensor, and in columns where they are."""

    regions: tuple[Region, ...]
    offset: np.ndarray
    stop: np.ndarray

    def meeting(self, box: Box) -> Iterator[tuple[Region, Box]]:
        """Every region that has elements of a box, with these."""
        low = np.maximum(self.offset, box.offset)
        shape = np.minimum(self.stop, box.stop) - low
        for i in np.flatnonzero((shape > 0).all(axis=1)).tolist():
            yield self.regions[i], Box(tuple(low[i].tolist()), tuple(shape[i].tolist()))


class _Builder:
    def __init__(self, own: Catalog, rows: np.ndarray, mapping: TensorMapping) -> None:
        self._own, self._rows, self._mapping = own, rows, mapping
        self._scratch = CatalogBuilder(int(own.rank[0]) if len(own) else 0)
        self._scratches = 0
        # Where each row comes from: the targets count from 0, scratch rows from -1 downwards.
        self._order: list[int] = []
        self._tiles: list[Tile] = []
        self._kept: dict[int, list[StridedCopy]] = {}
        self._covered: dict[int, int] = {}
        self._known: dict[str, _Regions] = {}

    def build(self) -> Work:
        own, mapping = self._own, self._mapping
        touched = [bool(mapping.regions.get(name)) for name in own.keys]
        busy = np.asarray(touched, dtype=bool)[own.key]
        part, offset, shape = row_boxes(own, np.flatnonzero(busy))
        base, strides = addresses(own, np.flatnonzero(busy)[part], offset)
        order = np.argsort(part, kind="stable")
        start = np.searchsorted(part[order], np.arange(int(busy.sum()) + 1))
        number = -1
        for row in range(len(own)):
            here = self._add_row(row)
            if not busy[row]:
                continue
            number += 1
            name, pad = own.key_name(row), own.width - int(own.ndim[row])
            for i in order[start[number] : start[number + 1]].tolist():
                box = Box(tuple(offset[i, pad:].tolist()), tuple(shape[i, pad:].tolist()))
                place = _Place(here, name, box.offset, int(base[i]), tuple(strides[i, pad:].tolist()))
                self._visit(place, box)
        return self._finished()

    def _add_row(self, number: int) -> int:
        self._order.append(number)
        return len(self._order) - 1

    def _add_scratch(self, name: str, box: Box) -> int:
        """A new row for a box of an operand, and after it the rows that it is computed from."""
        info = self._mapping.tensors[name]
        self._scratch.add(name, info.dtype, info.shape, box.offset, box.shape)
        self._scratches += 1
        row = self._add_row(-self._scratches)
        if box.size and self._mapping.regions.get(name):
            strides = tuple(row_major_strides(np.asarray([box.shape], dtype=np.int64))[0].tolist())
            self._visit(_Place(row, name, box.offset, 0, strides), box)
        return row

    def _regions(self, name: str) -> _Regions:
        known = self._known.get(name)
        if known is None:
            ndim, regions = len(self._mapping.tensors[name].shape), self._mapping.regions.get(name, ())
            offset = np.asarray([r.offset for r in regions], dtype=np.int64).reshape(len(regions), ndim)
            shape = np.asarray([r.shape for r in regions], dtype=np.int64).reshape(len(regions), ndim)
            known = self._known[name] = _Regions(regions, offset, offset + shape)
        return known

    def _visit(self, place: _Place, box: Box) -> None:
        """Plans what a box of a row has of computed and kept elements."""
        for region, common in self._regions(place.name).meeting(box):
            self._covered[place.row] = self._covered.get(place.row, 0) + common.size
            if region.node is not None:
                self._compute(place, region, common)
                continue
            if self._order[place.row] < 0:
                raise ValidationError(
                    [
                        Problem(
                            f"a value is computed from what a target has, which statements cannot do"
                            f"{self._mapping.made_by(place.name)}",
                            key=place.name,
                            remedy="say what new elements hold, as with fill=0",
                        )
                    ]
                )
            base = place.at(common.offset)
            copy = StridedCopy(common.shape, base, place.strides, base, place.strides)
            self._kept.setdefault(place.row, []).append(copy)

    def _compute(self, place: _Place, region: Region, common: Box) -> None:
        """Plans the tiles of a computed box."""
        node = self._mapping.nodes[region.node or 0]
        step, names, dtype = node.step, node.operands, dtype_of(node.info.dtype).numpy
        axes = region.target_axis
        offset = tuple(
            first + (common.offset[t] - region.offset[t] if t >= 0 else 0) for first, t in zip(region.node_offset, axes)
        )
        shape = tuple(common.shape[t] if t >= 0 else 1 for t in axes)
        strides = tuple(place.strides[t] if t >= 0 else 0 for t in axes)
        base = place.at(common.offset)
        open_rows: dict[tuple[str, Box], int] = {}
        for box in cut_tiles(Box(offset, shape), TILE_ELEMENTS):
            wanted = list(zip(names, step.operand_boxes(box)))
            unused = [row for need, row in open_rows.items() if need not in wanted]
            if unused:
                self._tiles[-1] = replace(self._tiles[-1], freed=tuple(unused))
            # A box that the tile before needed too (a factor, say) is moved once.
            open_rows = {need: row for need, row in open_rows.items() if need in wanted}
            for need in wanted:
                if need not in open_rows:
                    open_rows[need] = self._add_scratch(*need)
            inner = tuple(row_major_strides(np.asarray([box.shape], dtype=np.int64))[0].tolist()) if shape else ()
            target = base + sum((o - first) * s for o, first, s in zip(box.offset, offset, strides))
            self._tiles.append(
                Tile(
                    place.row,
                    step,
                    box,
                    dtype,
                    StridedCopy(box.shape, 0, inner, target, strides),
                    tuple(open_rows[need] for need in wanted),
                    tuple(needed.shape for _, needed in wanted),
                    (),
                    len(self._order) - 1,
                )
            )
        self._tiles[-1] = replace(self._tiles[-1], freed=tuple(open_rows.values()))

    def _finished(self) -> Work:
        order = np.asarray(self._order, dtype=np.int64)
        is_own = order >= 0
        catalog = self._own
        if self._scratches:
            catalog = concat([self._own, self._scratch.build()])
            catalog = catalog.take(np.where(is_own, order, len(self._own) - 1 - order))
        covered = np.zeros(len(order), dtype=np.int64)
        for row, count in self._covered.items():
            covered[row] = count
        # Scratch is there for targets, so where there are no targets the order is empty too.
        origin = np.where(is_own, self._rows[np.maximum(order, 0)], -1) if len(order) else order
        return Work(catalog, origin, tuple(self._tiles), self._kept, covered)


def cut_tiles(box: Box, limit: int) -> Iterator[Box]:
    """A box in parts of at most ``limit`` elements, in row-major order.

    Cuts are at multiples of a power of two, where the blocks of block-wise formats end too.
    """
    ndim, inner = len(box.shape), 1
    axis = ndim
    while axis and inner * box.shape[axis - 1] <= limit:
        axis -= 1
        inner *= box.shape[axis]
    if not axis:
        yield box
        return
    axis -= 1
    step = 1 << ((max(1, limit // inner)).bit_length() - 1)
    low, stop = box.offset[axis], box.stop[axis]
    edges = [low, *range((low // step + 1) * step, stop, step), stop]
    for index in np.ndindex(*box.shape[:axis]):
        outer = tuple(first + i for first, i in zip(box.offset, index))
        for begin, end in zip(edges[:-1], edges[1:]):
            yield Box((*outer, begin, *box.offset[axis + 1 :]), (*(1,) * axis, end - begin, *box.shape[axis + 1 :]))
