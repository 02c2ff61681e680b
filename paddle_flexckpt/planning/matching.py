"""Matching: the parts of source shards that target shards need, as strided copies in columns.

Both sides are broken into boxes in global coordinates (a flattened shard into at most ``2 n - 1`` of them), the boxes
of one key are intersected, and every intersection becomes one strided copy between the two shards' own storages. A
target that statements make of other sources is matched through its box maps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra import Box, BoxMaps, Columns, StridedCopy, intersect_boxes, subtract_boxes
from paddle_flexckpt.algebra.columns import pad_left
from paddle_flexckpt.algebra.rows import lexsort_packed, product_axes, sum_axes
from paddle_flexckpt.catalog import Catalog, Problem, ReplicaGroups, ValidationError, group_replicas, validate_coverage
from paddle_flexckpt.catalog.validate import MAX_PIECES, Coverage, row_boxes, tangled_problem
from paddle_flexckpt.planning.requests import Requests, addresses, find_requests, portions, positions

# Pairs of boxes intersected at once: bounds the memory of planning (about 150 bytes a pair for 2-D tensors).
PAIRS_AT_ONCE = 1 << 19


@dataclass(frozen=True, eq=False)
class Pieces(Columns):
    """Strided copies as columns; numbers are in elements of the shards' own (contiguous) storages.

    Attributes:
        source: int64 ``[p]``, row of the source catalog.
        target: int64 ``[p]``, row of the target catalog.
        extents: int64 ``[p, d]``, along the axes of the source.
        source_base: int64 ``[p]``.
        source_strides: int64 ``[p, d]``.
        target_base: int64 ``[p]``.
        target_strides: int64 ``[p, d]``.
    """

    source: np.ndarray
    target: np.ndarray
    extents: np.ndarray
    source_base: np.ndarray
    source_strides: np.ndarray
    target_base: np.ndarray
    target_strides: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """Return int64 ``[p]``, elements of each piece."""
        return product_axes(self.extents)

    @property
    def target_runs(self) -> np.ndarray:
        """Return int64 ``[p]``, the number of contiguous runs of each piece in its target; 0 without elements."""
        # Axes of extent 1 come first, and do not make a run longer.
        strides = np.where(self.extents == 1, 0, self.target_strides)
        order = np.argsort(strides, axis=1)
        strides, extents = (np.take_along_axis(each, order, axis=1) for each in (strides, self.extents))
        run = np.ones(len(self), dtype=np.int64)
        for stride, extent in zip(strides.T, extents.T):
            run = np.where(stride == run, run * extent, run)
        return self.size // np.maximum(run, 1)

    @property
    def is_straight(self) -> np.ndarray:
        """Return bool ``[p]``, whether each piece is one run on both sides, with its elements in the same order."""
        same = ((self.extents == 1) | (self.source_strides == self.target_strides)).all(axis=1)
        return same & (self.target_runs == 1)

    def copy(self, piece: int) -> StridedCopy:
        """Return one piece as a :class:`StridedCopy`, on as few axes as possible."""
        return StridedCopy(
            tuple(self.extents[piece].tolist()),
            int(self.source_base[piece]),
            tuple(self.source_strides[piece].tolist()),
            int(self.target_base[piece]),
            tuple(self.target_strides[piece].tolist()),
        ).simplified()

    def copies(self) -> Iterator[StridedCopy]:
        """Return all pieces, one after the other."""
        return (self.copy(piece) for piece in range(len(self)))


def concat_pieces(parts: list[Pieces], width: int) -> Pieces:
    """Return one table with the pieces of all; ``width`` is the number of axes if there are none."""
    if not parts:
        none, table = np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.int64)
        return Pieces(none, none, table, none, table, none, table)
    return Pieces.concat(parts)


class ShardMatcher:
    """An index of source shards that finds the pieces which fill each element of target shards exactly once.

    A source on the target's own rank is preferred to any other; among replicas elsewhere, target ranks are spread
    evenly. Built once per source catalog, for any number of targets.
    """

    def __init__(self, source: Catalog, groups: ReplicaGroups | None = None, coverage: Coverage | None = None) -> None:
        """Make the index of the source's boxes; groups and coverage are those of the source, if the caller has them."""
        self.source = source
        self.groups = group_replicas(source) if groups is None else groups
        coverage = validate_coverage(source, self.groups) if coverage is None else coverage
        if coverage.too_many_overlaps:
            raise ValidationError(coverage.too_many_overlaps)
        self._overlapping = np.zeros(len(source.keys), dtype=bool)
        self._overlapping[[source.key[row] for row, _ in coverage.overlaps]] = True
        rows = self.groups.first
        group_of = {row: group for group, row in enumerate(rows.tolist())} if coverage.overlaps else {}
        # The groups that share elements with a group.
        self._neighbours: dict[int, list[int]] = {}
        for pair in coverage.overlaps:
            a, b = (group_of[row] for row in pair)
            self._neighbours.setdefault(a, []).append(b)
            self._neighbours.setdefault(b, []).append(a)
        # Boxes of one replica per group; every replica has the same geometry.
        self._group, self._offset, self._shape = row_boxes(source, rows)
        key = source.key[rows[self._group]]
        order = np.argsort(key, kind="stable")
        self._group, self._offset, self._shape = self._group[order], self._offset[order], self._shape[order]
        self._key_start = np.searchsorted(key[order], np.arange(len(source.keys) + 1))

    def held_by(self, rank: int) -> ShardMatcher:
        """Return a matcher that has only the shards of one rank, and all shards of keys with overlaps.

        It finds all pieces that the rank has to send, and few others. So matching the targets of all ranks takes time
        in proportion to their number, not to its square.
        """
        part, groups = copy.copy(self), np.arange(len(self.groups))
        key = self.source.key[self.groups.first[self._group]]
        held = self._local_member(groups, np.full(len(groups), rank)) >= 0
        keep = held[self._group] | self._overlapping[key]
        part._group, part._offset, part._shape = self._group[keep], self._offset[keep], self._shape[keep]
        part._key_start = np.searchsorted(key[keep], np.arange(len(self.source.keys) + 1))
        return part

    def reaching(self, maps: BoxMaps) -> BoxMaps:
        """Return the maps whose sources are shards of this matcher; names stay as they are."""
        width = max(self.source.width, maps.width)
        maps = maps.widened(width)
        offset, shape = self._boxes(width)
        key = positions(maps.sources, self.source.keys)[maps.source]
        known = np.flatnonzero(key >= 0)
        first = self._key_start[key[known]]
        keep, map_offset, map_shape = np.zeros(len(maps), dtype=bool), maps.source_offset, maps.source_shape
        for left, right in portions(first, self._key_start[key[known] + 1] - first, PAIRS_AT_ONCE):
            row = known[left]
            keep[row[intersect_boxes(offset[right], shape[right], map_offset[row], map_shape[row])[2]]] = True
        return maps.take(keep)

    def match(self, target: Catalog, rows: np.ndarray | None = None, maps: BoxMaps | None = None) -> Pieces:
        """Return the pieces that fill the given target shards.

        Args:
            target: Target shards; keys are matched by name, and ranks by number.
            rows: Rows of ``target`` to fill; all by default.
            maps: What the keys that it defines are made of; every other key is made of the source of its name.

        Returns:
            Pieces sorted by target row. Elements that no source holds are missing: see
            :func:`uncovered_targets`.
        """
        width = max(self.source.width, target.width, 1 if maps is None else maps.width)
        rows = np.arange(len(target)) if rows is None else rows
        requests = find_requests(target.widened(width), rows, maps, self.source.keys, PAIRS_AT_ONCE)
        return self._answer(requests, target.rank[requests.row], width)

    def _boxes(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return offset and shape of the source's boxes on that many axes."""
        extra = width - self.source.width
        return pad_left(self._offset, extra, 0), pad_left(self._shape, extra, 1)

    def _answer(self, requests: Requests, rank: np.ndarray, width: int) -> Pieces:
        """Return the pieces that serve requests; ``rank`` is that of each request's target."""
        source_offset, source_shape = self._boxes(width)
        first = self._key_start[requests.key]
        found = []
        for t, s in portions(first, self._key_start[requests.key + 1] - first, PAIRS_AT_ONCE):
            sources = source_offset.take(s, axis=0), source_shape.take(s, axis=0)
            offset, shape, hit = intersect_boxes(
                *sources, requests.offset.take(t, axis=0), requests.shape.take(t, axis=0)
            )
            rows = np.flatnonzero(hit)
            found.append((self._group[s[rows]], t[rows], offset.take(rows, axis=0), shape.take(rows, axis=0)))
        if not found:
            return concat_pieces([], width)
        group, request, offset, shape = (np.concatenate(column) for column in zip(*found))
        group, request, offset, shape = self._without_overlaps(rank, group, request, offset, shape)
        source_row = self._choose_replica(group, rank[request])
        source_base, source_strides = addresses(self.source.widened(width), source_row, offset)
        strides = requests.strides.take(request, axis=0)
        base = requests.base[request] + sum_axes((offset - requests.offset.take(request, axis=0)) * strides)
        target_row = requests.row[request]
        order = lexsort_packed([target_row, base], len(base))
        return Pieces(source_row, target_row, shape, source_base, source_strides, base, strides).take(order)

    def _choose_replica(self, group: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Choose the row of each group to read: the target rank's own if it has one, else by the rank's number.

        The choice is the sum of the number's digits to the base ``count``, modulo ``count``. Ranks at equal distances,
        such as those of one tensor-parallel index, are spread as evenly as neighbours; ``rank % count`` would send all
        of them to one replica.
        """
        start, count = self.groups.start[:-1][group], self.groups.count[group]
        if (count == 1).all():
            return self.groups.order[start]
        turn = rest = np.maximum(rank, 0).astype(np.int64)
        while rest.any():
            rest = rest // np.maximum(count, 2)
            turn = turn + rest
        chosen = self.groups.order[start + turn % np.maximum(count, 1)]
        local = self._local_member(group, rank)
        return np.where(local >= 0, local, chosen)

    def _local_member(self, group: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return row of each group that is held by the given rank, or -1."""
        span = np.int64(max(int(self.source.rank.max(initial=0)), int(rank.max(initial=0))) + 1)
        member_group = np.repeat(np.arange(len(self.groups)), self.groups.count)
        # Members are sorted by group, then rank, so this code is sorted too.
        code = member_group * span + self.source.rank[self.groups.order]
        wanted = np.where(rank >= 0, group * span + rank, -1)
        position = np.minimum(np.searchsorted(code, wanted), max(len(code) - 1, 0))
        return np.where(code[position] == wanted, self.groups.order[position], -1)

    def _without_overlaps(
        self, rank: np.ndarray, group: np.ndarray, request: np.ndarray, offset: np.ndarray, shape: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Remove elements from intersections of shards that overlap, so that each has one source in a request."""
        suspect = self._overlapping[self.source.key[self.groups.first[group]]]
        if not suspect.any():
            return group, request, offset, shape
        kept: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        # Local shards first, then the rest in the order of their groups: the same on every rank.
        local = self._local_member(group, rank[request]) >= 0
        order = np.lexsort((group, ~local, request))
        order = order[suspect[order]]
        pieces = MAX_PIECES + len(order)
        for members in np.split(order, np.flatnonzero(np.diff(request[order])) + 1):
            number = int(request[members[0]])
            taken: dict[int, list[Box]] = {}
            for member in members:
                box, own = Box(tuple(offset[member].tolist()), tuple(shape[member].tolist())), int(group[member])
                earlier = (other for near in self._neighbours.get(own, ()) for other in taken.get(near, ()))
                rest = subtract_boxes(box, earlier, pieces)
                if rest is None:
                    raise ValidationError([tangled_problem(self.source.key_name(self.groups.first[own]))])
                pieces -= len(rest)
                kept += [(own, number, part.offset, part.shape) for part in rest]
                taken.setdefault(own, []).append(box)
        width = offset.shape[1]
        columns = [np.asarray([k[c] for k in kept], dtype=np.int64) for c in range(4)]
        return (
            np.concatenate([group[~suspect], columns[0]]),
            np.concatenate([request[~suspect], columns[1]]),
            np.concatenate([offset[~suspect], columns[2].reshape(-1, width)]),
            np.concatenate([shape[~suspect], columns[3].reshape(-1, width)]),
        )


def uncovered_targets(
    pieces: Pieces, target: Catalog, rows: np.ndarray, covered: np.ndarray | None = None
) -> list[Problem]:
    """Return the target shards that the pieces do not fill, each with an example of missing elements.

    ``covered`` is int64 per row of ``target``: elements that need no piece (they are computed, or stay as they are).
    """
    filled = np.zeros(len(target), dtype=np.int64) if covered is None else covered.astype(np.int64)
    np.add.at(filled, pieces.target, pieces.size)
    problems = []
    size = target.size
    for row in rows[filled[rows] != size[rows]]:
        problems.append(
            Problem(
                "the source does not hold all of a target shard",
                key=target.key_name(row),
                rank=int(target.rank[row]),
                expected=f"{size[row]} elements for {target.describe(row)}",
                got=f"{filled[row]} elements",
                code="FC105",
                remedy="save again with every rank taking part, or load only what the source holds",
            )
        )
    return problems
