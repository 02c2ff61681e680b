"""Checks of a catalog: every problem is listed, with key, rank, file, expected and got.

Well-formed states (grids of boxes, flattened ranges that continue each other) are recognised in columns; only other
keys are checked box by box. Tested in tests/catalog/test_validate_shards.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paddle_flexckpt.algebra import Box, flat_ranges_to_boxes, intersect_boxes, subtract_boxes
from paddle_flexckpt.algebra.rows import all_axes, any_axis, group_rows, product_axes
from paddle_flexckpt.catalog.errors import Problem
from paddle_flexckpt.catalog.table import EXTRA_STATE, NOT_FLATTENED, Catalog, extra_state_differs

# Rows reported per kind of problem, and holes per key.
MAX_ROWS = 50
MAX_HOLES = 3
# Bounds of the checks of a key that is not a grid, for files that are made to be slow: pairs of shards that share
# elements, pairs of boxes that are compared, in all and at a time, and boxes in the search for holes.
MAX_OVERLAPS = 100_000
MAX_COMPARED = 1 << 22
COMPARED_AT_ONCE = 1 << 19
MAX_PIECES = 100_000


@dataclass(frozen=True, eq=False)
class ReplicaGroups:
    """The rows of a catalog, grouped by identical shard.

    Attributes:
        order: int64 ``[n]``, the rows sorted by group, then by rank.
        start: int64 ``[g + 1]``, group ``i`` is ``order[start[i]:start[i + 1]]``.
    """

    order: np.ndarray
    start: np.ndarray

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def count(self) -> np.ndarray:
        """Return int64 ``[g]``, replicas in each group."""
        return self.start[1:] - self.start[:-1]

    @property
    def first(self) -> np.ndarray:
        """Return int64 ``[g]``, one row of each group (that of the lowest rank)."""
        return self.order[self.start[:-1]]

    @property
    def of_row(self) -> np.ndarray:
        """Return int64 ``[n]``, the group of each row."""
        group = np.empty(len(self.order), dtype=np.int64)
        group[self.order] = np.repeat(np.arange(len(self)), self.count)
        return group

    def narrowed_to(self, rows: np.ndarray) -> ReplicaGroups:
        """Narrow the groups of ``rows``, at most one of each group, to that row. Other groups stay as they are."""
        only = np.full(len(self), -1, dtype=np.int64)
        only[self.of_row[rows]] = rows
        only = np.repeat(only, self.count)
        keep = (only < 0) | (only == self.order)
        start = np.append(0, np.cumsum(keep))[self.start]
        return ReplicaGroups(self.order[keep], start)


def group_replicas(catalog: Catalog) -> ReplicaGroups:
    """Group the rows that have the same key, box and flattened range.

    Groups are numbered in the order of key, then offset, then flattened range.
    """
    columns = [catalog.key, *catalog.offset.T, *catalog.shape.T, catalog.flat_start, catalog.flat_stop]
    order, start = group_rows(columns, len(catalog), catalog.rank)
    return ReplicaGroups(order, start)


def validate_shards(catalog: Catalog) -> list[Problem]:
    """Check every shard by itself and against the other shards of its key.

    Checks that boxes are inside the global shape, flattened ranges are inside their box, and that all shards of a key
    agree on dtype and global shape. A rank that holds nothing of a tensor may have a shard with an extent of 0.
    """
    return [problem for problems in find_shard_problems(catalog) for _, problem in problems]


def find_shard_problems(catalog: Catalog) -> list[list[tuple[int, Problem]]]:
    """Return the problems of :func:`validate_shards`, for each kind with its rows, rising."""
    kinds: list[list[tuple[int, Problem]]] = []

    def report(bad: np.ndarray, what: str, expected: Callable[[int], str], remedy: str) -> None:
        rows = np.flatnonzero(bad)[:MAX_ROWS].tolist()
        kinds.append([(row, _row_problem(catalog, row, what, expected(row), remedy)) for row in rows])

    remedy = "correct global_shape, global_offset and local_shape of this ShardedWeight"
    negative = any_axis(catalog.shape < 0)
    report(negative, "shard with a negative extent", lambda row: "extents of 0 or more", remedy)
    outside = (catalog.offset < 0) | (catalog.offset + catalog.shape > catalog.global_shape)
    report(
        any_axis(outside),
        "shard outside its global shape",
        lambda row: "offset >= 0 and offset + shape <= global",
        remedy,
    )
    box_size = product_axes(catalog.shape)
    bad_range = (catalog.flat_start < 0) | (catalog.flat_stop < catalog.flat_start) | (catalog.flat_stop > box_size)
    report(
        np.where(catalog.is_flattened, bad_range, catalog.flat_stop != NOT_FLATTENED),
        "flattened range outside its box",
        lambda row: "0 <= start <= stop <= elements of local_shape",
        "correct flattened_range; it counts from the start of the local box",
    )
    # A shard has to have the dtype and the global shape of the first shard of its key.
    n = len(catalog)
    first = np.full(len(catalog.keys), n, dtype=np.int64)
    np.minimum.at(first, catalog.key, np.arange(n))
    reference = first[catalog.key]
    remedy = "two different tensors need two different keys; one tensor needs one description"

    def as_reference(row: int) -> str:
        return f"{catalog.describe(int(reference[row]))} as on rank {catalog.rank[reference[row]]}"

    report(catalog.dtype != catalog.dtype[reference], "shards of one key differ in dtype", as_reference, remedy)
    differs = any_axis(catalog.global_shape != catalog.global_shape[reference])
    differs |= catalog.ndim != catalog.ndim[reference]
    report(differs, "shards of one key differ in global shape", as_reference, remedy)
    return kinds


def _row_problem(catalog: Catalog, row: int, what: str, expected: str, remedy: str) -> Problem:
    """Return a problem of one shard, with its description."""
    key, rank, file, got = catalog.key_name(row), int(catalog.rank[row]), catalog.file_name(row), catalog.describe(row)
    if key.startswith(EXTRA_STATE) and " differ in " in what:
        return extra_state_differs(key=key, rank=rank, file=file, expected=expected, got=got)
    return Problem(what, key, rank, file, expected, got, code="FC105", remedy=remedy)


@dataclass
class Coverage:
    """The result of :func:`validate_coverage`.

    Attributes:
        problems: Holes, each with the box that no rank holds (of many the first ones), and keys with too many overlaps.
        overlaps: Pairs of rows that share elements without being the same shard. Whether that is a problem depends on
            whether their values agree, which geometry cannot tell.
        too_many_overlaps: Problems of keys with too many overlapping shards to check.
        pieces: Boxes that the search for holes has made.
    """

    problems: list[Problem] = field(default_factory=list)
    overlaps: list[tuple[int, int]] = field(default_factory=list)
    too_many_overlaps: list[Problem] = field(default_factory=list)
    pieces: int = 0


def validate_coverage(catalog: Catalog, groups: ReplicaGroups) -> Coverage:
    """Check that the shards of every key cover its whole tensor, and find those that overlap.

    Args:
        catalog: Shards without problems of :func:`validate_shards`.
        groups: Its replica groups.
    """
    rows = groups.first[catalog.size[groups.first] > 0]
    coverage = Coverage()
    # A key may have only empty shards, for instance of a rank that owns padding: then the whole tensor is a hole.
    held = np.zeros(len(catalog.keys), dtype=bool)
    held[catalog.key[rows]] = True
    unheld = groups.first[
        ~held[catalog.key[groups.first]] & all_axes(catalog.global_shape.take(groups.first, axis=0) > 0)
    ]
    suspects = [unheld[first : first + 1] for first in np.unique(catalog.key[unheld], return_index=True)[1]]
    if len(rows):
        suspects += _suspects(catalog, rows)
    for some in sorted(suspects, key=lambda some: int(catalog.key[some[0]])):
        _inspect_key(catalog, some, coverage)
    return coverage


def _suspects(catalog: Catalog, rows: np.ndarray) -> list[np.ndarray]:
    """Return the rows, one of each replica group, of each key that the fast checks do not accept."""
    key, offset, shape = catalog.key[rows], catalog.offset[rows], catalog.shape[rows]
    flattened, start, stop = catalog.is_flattened[rows], catalog.flat_start[rows], catalog.flat_stop[rows]
    box_size = product_axes(shape)

    # Groups are sorted by key, offset, shape and flattened range: the parts of one box are adjacent.
    new_key = np.append(True, key[1:] != key[:-1])
    new_box = new_key | np.append(True, any_axis(offset[1:] != offset[:-1]) | any_axis(shape[1:] != shape[:-1]))
    last_of_box = np.append(new_box[1:], True)
    begins = np.where(flattened, start, 0)
    ends = np.where(flattened, stop, box_size)
    expected_begin = np.where(new_box, 0, np.append(0, ends[:-1]))
    chained = (begins == expected_begin) & (~last_of_box | (ends == box_size))
    box_start = np.flatnonzero(new_box)
    box_complete = np.logical_and.reduceat(chained, box_start)

    box_key = key[box_start]
    key_start = np.flatnonzero(np.append(True, box_key[1:] != box_key[:-1]))
    key_complete = np.logical_and.reduceat(box_complete, key_start)
    boxes_of_key = np.diff(np.append(key_start, len(box_key)))
    first_row = rows[box_start[key_start]]
    whole = (catalog.shape[first_row] == catalog.global_shape[first_row]).all(axis=1)
    boxes_of_all = offset[box_start], shape[box_start], catalog.global_shape[rows[box_start]]
    fine = key_complete & ((boxes_of_key == 1) & whole | _are_slices(*boxes_of_all, key_start))

    row_stop = np.append(box_start, len(rows))
    found = []
    for index in np.flatnonzero(~fine):
        boxes = slice(key_start[index], key_start[index] + boxes_of_key[index])
        parts = box_start[boxes]
        if key_complete[index] and _is_grid(offset[parts], shape[parts], catalog.global_shape[first_row[index]]):
            continue
        found.append(rows[row_stop[boxes.start] : row_stop[boxes.stop]])
    return found


def _are_slices(offset: np.ndarray, shape: np.ndarray, whole: np.ndarray, key_start: np.ndarray) -> np.ndarray:
    """Return bool per key: whether its boxes, in the order of their offsets, are its whole tensor cut along one axis.

    Most keys are cut like this; they are recognised together.
    """
    cut = np.logical_or.reduceat(shape != whole, key_start, axis=0)
    axis = np.repeat(np.argmax(cut, axis=1), np.diff(np.append(key_start, len(shape))))[:, None]
    begin, extent, end = (np.take_along_axis(column, axis, axis=1)[:, 0] for column in (offset, shape, whole))
    first = np.zeros(len(shape), dtype=bool)
    first[key_start] = True
    follows = begin == np.where(first, 0, np.append(0, (begin + extent)[:-1]))
    ends = ~np.append(first[1:], True) | (begin + extent == end)
    return (cut.sum(axis=1) == 1) & np.logical_and.reduceat(follows & ends, key_start)


def _is_grid(offset: np.ndarray, shape: np.ndarray, global_shape: np.ndarray) -> bool:
    """Return whether boxes, no two of which are equal, are exactly the cells of a grid over the whole tensor."""
    cells = 1
    for axis in range(offset.shape[1]):
        cuts = np.unique(np.stack([offset[:, axis], shape[:, axis]], axis=1), axis=0)
        ends = cuts.sum(axis=1)
        if cuts[0, 0] != 0 or ends[-1] != global_shape[axis] or (cuts[1:, 0] != ends[:-1]).any():
            return False
        cells *= len(cuts)
    # As many distinct boxes as the product of the cuts has cells: every cell is there, once.
    return cells == len(offset)


def _inspect_key(catalog: Catalog, rows: np.ndarray, coverage: Coverage) -> None:
    """Find holes and overlaps of one key box by box."""
    part, offset, shape = row_boxes(catalog, rows)
    row = int(rows[0])
    pairs = _overlapping_pairs(part, offset, shape)
    if pairs is None:
        problem = tangled_problem(catalog.key_name(row))
        coverage.too_many_overlaps.append(problem)
        coverage.problems.append(problem)
        return
    coverage.overlaps.extend((int(rows[a]), int(rows[b])) for a, b in pairs)
    pad = catalog.width - int(catalog.ndim[row])
    whole = Box((0,) * catalog.width, tuple(catalog.global_shape[row].tolist()))
    held = sum(product_axes(shape).tolist())
    if (not pairs and held == whole.size) or len(coverage.problems) > MAX_ROWS:
        return
    boxes = (Box(tuple(o), tuple(s)) for o, s in zip(offset.tolist(), shape.tolist()))
    left = MAX_PIECES + 8 * len(catalog) - coverage.pieces
    holes = subtract_boxes(whole, boxes, left)
    coverage.pieces += left if holes is None else len(part)
    # Without overlaps the missing elements can be counted, however many holes they make.
    missing = whole.size - held if not pairs else None if holes is None else sum(hole.size for hole in holes)
    global_shape = list(catalog.unpadded(row, catalog.global_shape))
    named = [f"no rank holds {Box(hole.offset[pad:], hole.shape[pad:])}" for hole in (holes or [])[:MAX_HOLES]]
    for what in named if holes is not None else ["no rank holds some elements, or too many shards overlap to be told"]:
        coverage.problems.append(
            Problem(
                what,
                key=catalog.key_name(row),
                expected=f"shards that cover all {whole.size} elements of {global_shape}",
                got=f"{'some' if missing is None else missing} elements that nobody holds",
                code="FC105",
                remedy="every rank of the process group has to take part with all its shards",
            )
        )


def tangled_problem(key: str) -> Problem:
    """Return the problem of a key with too many overlapping shards to check."""
    return Problem(
        "too many shards overlap",
        key=key,
        expected=f"shards of which few share elements without being the same, in at most {MAX_OVERLAPS} pairs",
        code="FC105",
        remedy="describe replicas by the same offset and shape on every rank; or load another checkpoint",
    )


def _overlapping_pairs(part: np.ndarray, offset: np.ndarray, shape: np.ndarray) -> list[tuple[int, int]] | None:
    """Return the pairs of different parts whose boxes share elements; None above :data:`MAX_OVERLAPS` of them.

    A box is compared with those that begin inside it along one axis: the axis with the fewest of these.
    """
    if len(part) < 2:
        return []
    best: tuple[int, np.ndarray, np.ndarray] | None = None
    for axis in range(offset.shape[1]):
        order = np.argsort(offset[:, axis], kind="stable")
        begin = offset[order, axis]
        after = np.arange(len(order)) + 1
        count = np.searchsorted(begin, begin + shape[order, axis]) - after
        if best is None or int(count.sum()) < best[0]:
            best = int(count.sum()), order, count
    if best is None or best[0] > MAX_COMPARED:
        return [] if best is None else None
    _, order, count = best
    found: dict[tuple[int, int], None] = {}
    edges = np.append(0, np.cumsum(count))
    for first in range(0, best[0], COMPARED_AT_ONCE):
        pair = np.arange(first, min(first + COMPARED_AT_ONCE, best[0]))
        left = np.searchsorted(edges, pair, side="right") - 1
        a, b = order[left], order[left + 1 + pair - edges[left]]
        hit = intersect_boxes(offset[a], shape[a], offset[b], shape[b])[2] & (part[a] != part[b])
        low, high = np.minimum(part[a[hit]], part[b[hit]]), np.maximum(part[a[hit]], part[b[hit]])
        found.update(dict.fromkeys(zip(low.tolist(), high.tolist())))
        if len(found) > MAX_OVERLAPS:
            return None
    return sorted(found)


def row_boxes(catalog: Catalog, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the boxes, in global coordinates, that the shards of the given rows consist of.

    Returns:
        ``(part, offset, shape)``: index into ``rows`` (int64 ``[m]``), and the boxes (int64 ``[m, d]`` twice).
    """
    flattened = catalog.is_flattened[rows]
    whole, cut = np.flatnonzero(~flattened), np.flatnonzero(flattened)
    cut_rows = rows[cut]
    row, offset, shape, _ = flat_ranges_to_boxes(
        catalog.shape.take(cut_rows, axis=0), catalog.flat_start[cut_rows], catalog.flat_stop[cut_rows]
    )
    part = np.concatenate([whole, cut[row]])
    offsets = np.concatenate(
        [catalog.offset.take(rows[whole], axis=0), catalog.offset.take(cut_rows[row], axis=0) + offset]
    )
    shapes = np.concatenate([catalog.shape.take(rows[whole], axis=0), shape])
    keep = all_axes(shapes > 0)
    if keep.all():
        return part, offsets, shapes
    kept = np.flatnonzero(keep)
    return part[kept], offsets.take(kept, axis=0), shapes.take(kept, axis=0)
