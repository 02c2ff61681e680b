"""Plan one rank's rows: its targets, and memory for the operands of computed values.

A computed box of a target is split into tiles. A tile's part of each operand is a *scratch* row, planned, read and
received like a target of the rank. A plan numbers the rows of its catalog: first the rank's targets, by their own
numbers, then scratch. The order of filling is another one: a target, then the scratch of its first tile, then that
of the next, so that few tiles are open at a time.

Tested in tests/transfer/test_plan.py and tests/loading/test_aoa_tiles.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from paddle_flexckpt.algebra import Box, StridedCopy, strides_of_shape
from paddle_flexckpt.aoa import Region, Step, TensorMapping
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, Problem, ValidationError, concat, dtype_of
from paddle_flexckpt.catalog.validate import row_boxes
from paddle_flexckpt.planning.requests import addresses

# Elements of a result to compute at once: bounds the memory of operands and result.
TILE_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Tile:
    """The computation of a box of a tensor.

    Attributes:
        row: The row of which it is a part.
        step: How to compute it.
        box: The box in the computed tensor.
        dtype: The result's element type; it is cast again to the type of ``row``.
        copy: From the result (row-major) to the storage of ``row``.
        operands: Scratch rows that hold its operands.
        shapes: Their shapes.
        freed: Scratch rows that no later tile needs.
        after: The turn of the last row that it needs.
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
class FillPlan:
    """The rows that one rank fills.

    A row is a number in ``catalog``; a turn is a number in ``order``. Requests and other ranks count by turns.

    Attributes:
        targets: Number of rows that are targets; scratch follows.
        catalog: Targets and scratch.
        order: int64, the rows to fill, in the order of filling.
        tiles: In the order in which they are computed.
        kept: By row: the elements that stay unchanged, as copies onto themselves.
        covered: int64 per row: elements that come from tiles or stay unchanged.
        band_of: If rows are bands of targets: int64 per row that is one, its target.
    """

    targets: int
    catalog: Catalog
    order: np.ndarray
    tiles: tuple[Tile, ...] = ()
    kept: dict[int, list[StridedCopy]] = field(default_factory=dict)
    covered: np.ndarray | None = None
    band_of: np.ndarray | None = None

    def is_target(self, row: int) -> bool:
        """Return whether a row is a target, not scratch."""
        return row < self.targets

    @cached_property
    def in_order(self) -> Catalog:
        """Return the rows to fill, in order: the part of the plan that other ranks need."""
        return self.catalog.take(self.order)

    @cached_property
    def turn(self) -> np.ndarray:
        """Return int64 per row: its place in the order."""
        turn = np.zeros(len(self.catalog), dtype=np.int64)
        turn[self.order] = np.arange(len(self.order))
        return turn

    @cached_property
    def size(self) -> np.ndarray:
        """Return int64 per row: its elements."""
        return self.catalog.size

    @cached_property
    def covered_in_order(self) -> np.ndarray | None:
        """Return ``covered`` by turn."""
        return None if self.covered is None else self.covered[self.order]

    @property
    def computed(self) -> set[int]:
        """Return the targets with computed elements."""
        return {tile.row for tile in self.tiles if self.is_target(tile.row)}


def plan_fill(
    catalog: Catalog,
    rows: np.ndarray,
    mapping: TensorMapping | None,
    bands: Sequence[tuple[int, Box]] = (),
) -> FillPlan:
    """Plan the rows for some of a rank's targets.

    Args:
        catalog: All targets.
        rows: Those to fill.
        mapping: The mapping of the statements.
        bands: If targets, without shared memory, are filled in bands: target and box of each band of all targets, in
            the order of filling. The plan's rows are then the bands.

    Raises:
        ValidationError: A computed value needs a target's own values.
    """
    # Orders do not matter for boxes: renamed targets may have one name and two orders.
    plain = FillPlan(len(catalog), catalog.with_orders({}), rows)
    if bands:
        plain = _in_bands(plain, bands)
    return plain if mapping is None else _Builder(plain, mapping).build()


def _in_bands(plan: FillPlan, bands: Sequence[tuple[int, Box]]) -> FillPlan:
    band_of = np.asarray([row for row, _ in bands], dtype=np.int64)
    catalog = plan.catalog.take(band_of)
    offset, shape = catalog.offset.copy(), catalog.shape.copy()
    for number, (_, box) in enumerate(bands):
        first = catalog.width - len(box.shape)
        offset[number, first:], shape[number, first:] = box.offset, box.shape
    order = np.flatnonzero(np.isin(band_of, plan.order))
    return FillPlan(len(bands), replace(catalog, offset=offset, shape=shape), order, band_of=band_of)


@dataclass(frozen=True, eq=False)
class _Place:
    """The place of a row in its tensor.

    Attributes:
        row: The row of the plan.
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
        """Return the position of an element of the tensor in the row's storage."""
        return self.base + sum((o - first) * s for o, first, s in zip(offset, self.offset, self.strides))


@dataclass(frozen=True, eq=False)
class _Regions:
    """An index of one tensor's regions by box."""

    regions: tuple[Region, ...]
    offset: np.ndarray
    stop: np.ndarray

    def meeting(self, box: Box) -> Iterator[tuple[Region, Box]]:
        """Yield every region with elements of a box, with their common box."""
        low = np.maximum(self.offset, box.offset)
        shape = np.minimum(self.stop, box.stop) - low
        for i in np.flatnonzero((shape > 0).all(axis=1)).tolist():
            yield self.regions[i], Box(tuple(low[i].tolist()), tuple(shape[i].tolist()))


class _Builder:
    """The builder of a plan with computed elements, from the plain plan, which has none."""

    def __init__(self, plain: FillPlan, mapping: TensorMapping) -> None:
        self._plain, self._mapping = plain, mapping
        catalog = plain.catalog
        self._scratch = CatalogBuilder(int(catalog.rank[0]) if len(catalog) else 0)
        self._scratches = 0
        self._order: list[int] = []
        self._tiles: list[Tile] = []
        self._kept: dict[int, list[StridedCopy]] = {}
        self._covered: dict[int, int] = {}
        self._known: dict[str, _Regions] = {}

    def build(self) -> FillPlan:
        catalog, rows, mapping = self._plain.catalog, self._plain.order, self._mapping
        touched = [bool(mapping.regions.get(name)) for name in catalog.keys]
        busy = rows[np.asarray(touched, dtype=bool)[catalog.key[rows]]]
        part, offset, shape = row_boxes(catalog, busy)
        base, strides = addresses(catalog, busy[part], offset)
        order = np.argsort(part, kind="stable")
        start = np.searchsorted(part[order], np.arange(len(busy) + 1))
        numbers = {row: number for number, row in enumerate(busy.tolist())}
        for row in rows.tolist():
            self._order.append(row)
            if row not in numbers:
                continue
            name, pad, number = catalog.key_name(row), catalog.width - int(catalog.ndim[row]), numbers[row]
            for i in order[start[number] : start[number + 1]].tolist():
                box = Box(tuple(offset[i, pad:].tolist()), tuple(shape[i, pad:].tolist()))
                place = _Place(row, name, box.offset, int(base[i]), tuple(strides[i, pad:].tolist()))
                self._visit(place, box)
        return self._finished()

    def _add_scratch(self, name: str, box: Box) -> int:
        """Add a row for a box of an operand, and after it the rows that it is computed from."""
        info = self._mapping.tensors[name]
        self._scratch.add(name, info.dtype, info.shape, box.offset, box.shape)
        row = self._plain.targets + self._scratches
        self._scratches += 1
        self._order.append(row)
        if box.size and self._mapping.regions.get(name):
            self._visit(_Place(row, name, box.offset, 0, strides_of_shape(box.shape)), box)
        return row

    def _regions(self, name: str) -> _Regions:
        known = self._known.get(name)
        if known is None:
            ndim, regions = len(self._mapping.tensors[name].shape), self._mapping.regions[name]
            offset = np.asarray([r.offset for r in regions], dtype=np.int64).reshape(len(regions), ndim)
            shape = np.asarray([r.shape for r in regions], dtype=np.int64).reshape(len(regions), ndim)
            known = self._known[name] = _Regions(regions, offset, offset + shape)
        return known

    def _visit(self, place: _Place, box: Box) -> None:
        """Plan the computed and kept elements in a box of a row."""
        for region, common in self._regions(place.name).meeting(box):
            self._covered[place.row] = self._covered.get(place.row, 0) + common.size
            if region.node is not None:
                self._compute(place, region, common)
                continue
            if not self._plain.is_target(place.row):
                raise ValidationError(
                    Problem(
                        f"a value is computed from what a target has, which statements cannot do"
                        f"{self._mapping.made_by(place.name)}",
                        key=place.name,
                        code="FC603",
                        remedy="say what new elements hold, as with fill=0",
                    )
                )
            base = place.at(common.offset)
            copy = StridedCopy(common.shape, base, place.strides, base, place.strides)
            self._kept.setdefault(place.row, []).append(copy)

    def _compute(self, place: _Place, region: Region, common: Box) -> None:
        """Plan the tiles of a computed box."""
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
        for box in split_tiles(Box(offset, shape), TILE_ELEMENTS):
            wanted = list(zip(names, step.operand_boxes(box)))
            unused = [row for need, row in open_rows.items() if need not in wanted]
            if unused:
                self._tiles[-1] = replace(self._tiles[-1], freed=tuple(unused))
            # A box that the tile before needs too (a factor, say) is moved once.
            open_rows = {need: row for need, row in open_rows.items() if need in wanted}
            for need in wanted:
                if need not in open_rows:
                    open_rows[need] = self._add_scratch(*need)
            inner = strides_of_shape(box.shape)
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

    def _finished(self) -> FillPlan:
        catalog = self._plain.catalog
        if self._scratches:
            catalog = concat([catalog, self._scratch.build()])
        covered = np.zeros(len(catalog), dtype=np.int64)
        for row, count in self._covered.items():
            covered[row] = count
        order = np.asarray(self._order, dtype=np.int64)
        return replace(
            self._plain, catalog=catalog, order=order, tiles=tuple(self._tiles), kept=self._kept, covered=covered
        )


def split_tiles(box: Box, limit: int, aligned: bool = True) -> Iterator[Box]:
    """Split a box into boxes of at most ``limit`` elements, in row-major order.

    If ``aligned``, splits are at multiples of a power of two, where the blocks of block-wise formats end too; else the
    boxes are as large as possible.
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
    step = max(1, limit // inner)
    if aligned:
        step = 1 << (step.bit_length() - 1)
    low, stop = box.offset[axis], box.stop[axis]
    edges = [low, *range((low // step + 1) * step, stop, step), stop]
    for index in np.ndindex(*box.shape[:axis]):
        outer = tuple(first + i for first, i in zip(box.offset, index))
        for begin, end in zip(edges[:-1], edges[1:]):
            yield Box((*outer, begin, *box.offset[axis + 1 :]), (*(1,) * axis, end - begin, *box.shape[axis + 1 :]))
