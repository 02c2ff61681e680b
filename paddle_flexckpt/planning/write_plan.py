"""The write plan: every distinct shard is written once, and every rank writes about the same number of bytes.

Shards held by the same set of ranks are laid end to end and the line is cut where each rank has its share (McNaughton's
wrap-around rule); a large shard that lies across a cut is split there, along its rows or its flattened range. Small
sets come first, so that a load that only one rank can take is counted before loads that can be shifted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.catalog import Catalog, ReplicaGroups, group_replicas
from paddle_flexckpt.planning.holder_sets import HolderSets, find_sets, share_out

# A shard below this is given to one rank whole: splitting it saves less than another item costs.
MIN_SPLIT_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class WritePlan:
    """The items that each rank writes.

    Attributes:
        catalog: What the files will hold: one row per stored item, with ``rank``, ``file`` and ``byte_offset`` set.
            Byte offsets count from the start of the file's data.
        source: int64 ``[m]``, for each item, the row of the planned catalog that it is (a part of) as held by the
            writing rank.
        source_start: int64 ``[m]``, first element of the item in that shard's own storage.
        rank_bytes: int64 ``[number of ranks]``, bytes that each rank writes.
    """

    catalog: Catalog
    source: np.ndarray
    source_start: np.ndarray
    rank_bytes: np.ndarray

    @property
    def total_bytes(self) -> int:
        """Return bytes in all files together, without headers."""
        return int(self.rank_bytes.sum())

    @property
    def imbalance(self) -> float:
        """Return the most loaded rank's bytes over the mean; 1.0 is perfect."""
        mean = self.rank_bytes.mean() if len(self.rank_bytes) else 0
        return float(self.rank_bytes.max() / mean) if mean else 1.0


def plan_write(
    catalog: Catalog,
    file_name: Callable[[int], str],
    save_replicas: bool = False,
    min_split_bytes: int = MIN_SPLIT_BYTES,
    groups: ReplicaGroups | None = None,
    indivisible: np.ndarray | None = None,
) -> WritePlan:
    """Plan who writes which shard.

    Args:
        catalog: The validated shards of all ranks.
        file_name: Returns the data file's name for a rank.
        save_replicas: Write every shard that every rank holds, replicas included.
        min_split_bytes: Smallest shard that may be split among its replicas, in bytes.
        groups: The catalog's replica groups, if the caller has them already. Shards in none of them are not written:
            a group that was narrowed to one member has that rank's values.
        indivisible: bool ``[n]``, rows of shards that one rank has to write whole.
    """
    ranks = np.unique(catalog.rank)
    groups = group_replicas(catalog) if groups is None else groups
    if save_replicas:
        items = every_replica(catalog, groups)
    else:
        lines = lay_lines(catalog, groups, np.searchsorted(ranks, catalog.rank), indivisible)
        items = lines.cut(share_out(lines.sets, lines.amount, len(ranks)), min_split_bytes)
    return lay_out(catalog, ranks, items, file_name)


@dataclass(frozen=True, eq=False)
class Items:
    """Parts of shards to write, in no order, each with the row of its writer.

    Attributes:
        row: int64 ``[m]``, the row of the shard, as its writer owns it.
        start: int64 ``[m]``, the first element of it that is written.
        stop: int64 ``[m]``, the first element beyond.
    """

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def bytes_in(self, catalog: Catalog) -> int:
        """Return the bytes of all parts, given the table of the shards."""
        return int(((self.stop - self.start) * catalog.itemsize[self.row]).sum())


def every_replica(catalog: Catalog, groups: ReplicaGroups) -> Items:
    """Return all shards in the groups: every rank writes each of its shards whole."""
    held = (catalog.size > 0) | (catalog.global_shape == 0).any(axis=1)
    row = np.sort(groups.order[held[groups.order]])
    return Items(row, np.zeros(len(row), dtype=np.int64), catalog.size[row])


@dataclass(frozen=True, eq=False)
class Lines:
    """Replica groups on the lines of the sets of ranks that own them.

    Attributes:
        catalog: The shards.
        groups: Their replica groups.
        sets: The sets of ranks, by places.
        amount: int64 ``[s]``, bytes on each line.
        order: int64 ``[g]``, the groups by set; those of a set in the order of their numbers.
        of_set: int64 ``[g]``, the set of each, in that order.
        unit: int64 ``[g]``, the elements of each that must stay together, in that order.
    """

    catalog: Catalog
    groups: ReplicaGroups
    sets: HolderSets
    amount: np.ndarray
    order: np.ndarray
    of_set: np.ndarray
    unit: np.ndarray

    def cut(self, share: np.ndarray, min_split_bytes: int = MIN_SPLIT_BYTES, before: np.ndarray | None = None) -> Items:
        """Cut the lines after each share, and return the items of each member of a set.

        Args:
            share: int64, bytes for each member of each set; on whole lines they sum to the lines' bytes.
            min_split_bytes: Shards below this stay whole.
            before: int64 ``[s]``, if lines are stretches of longer ones: the bytes in front of each.
        """
        catalog, groups, sets = self.catalog, self.groups, self.sets
        first = groups.first[self.order]
        size, itemsize = catalog.size[first], catalog.itemsize[first]
        length = size * itemsize
        end = np.cumsum(length)
        begin = end - length
        # All lines, one after the other.
        base = np.cumsum(self.amount) - self.amount
        of_member = np.repeat(np.arange(len(sets)), sets.count)
        cut = np.cumsum(share)
        cut -= np.append(0, cut)[sets.start[:-1]][of_member]
        if before is not None:
            cut = np.clip(cut - before[of_member], 0, self.amount[of_member])
        cut += base[of_member]
        # So far a cut may lie anywhere in a shard, as after member a in: |--shard 0--|--sha|rd 1--|. A cut inside a
        # small shard moves to the nearer end of it, and a cut inside a large one to the nearest row.
        shard = np.minimum(np.searchsorted(end, cut, side="right"), len(size) - 1)
        inside = np.clip(cut - begin[shard], 0, length[shard])
        step = np.where(length[shard] < min_split_bytes, length[shard], self.unit[shard] * itemsize[shard])
        step = np.maximum(step, 1)
        inside = np.minimum((inside + step // 2) // step * step, length[shard])
        # Each member has the bytes from low to high, which may be of several shards: an item for each.
        high = np.maximum.accumulate(begin[shard] + inside)
        low = np.append(0, high[:-1])
        count = np.searchsorted(begin, high, side="left") - np.searchsorted(end, low, side="right")
        count = np.where(high > low, np.maximum(count, 0), 0)
        member = np.repeat(np.arange(len(share)), count)
        within = np.arange(len(member)) - np.repeat(np.cumsum(count) - count, count)
        item = within + np.searchsorted(end, low, side="right")[member]
        start = np.maximum(low[member] - begin[item], 0) // itemsize[item]
        stop = np.minimum(high[member] - begin[item], length[item]) // itemsize[item]
        full = stop > start
        item, member, start, stop = item[full], member[full], start[full], stop[full]
        # Groups are sorted by rank and a set's members too, so a member's position is its replica's number.
        row = groups.order[groups.start[self.order[item]] + member - sets.start[self.of_set[item]]]
        # An empty tensor is on no line, but the checkpoint needs its key: its first owner writes it.
        empty = groups.first[(catalog.global_shape[groups.first] == 0).any(axis=1)]
        empty = empty[np.unique(catalog.key[empty], return_index=True)[1]]
        zero = np.zeros(len(empty), dtype=np.int64)
        return Items(np.append(row, empty), np.append(start, zero), np.append(stop, zero))


def lay_lines(
    catalog: Catalog, groups: ReplicaGroups, place: np.ndarray, indivisible: np.ndarray | None = None
) -> Lines:
    """Lay the shards of each set of ranks end to end.

    Args:
        catalog: The shards.
        groups: Their replica groups; shards in none of them are on no line.
        place: int64 ``[n]``, the place of each row's rank.
        indivisible: bool ``[n]``, rows of shards that one rank has to write whole.
    """
    sets, of_group = find_sets(groups, place)
    order = np.argsort(of_group, kind="stable")
    distinct = catalog.take(groups.first)
    unit, size = _row_elements(distinct), distinct.size
    if indivisible is not None and len(groups):
        # A group is one unit if any of its replicas is indivisible.
        unit = np.where(np.logical_or.reduceat(indivisible[groups.order], groups.start[:-1]), size, unit)
    amount = np.zeros(len(sets), dtype=np.int64)
    np.add.at(amount, of_group, size * distinct.itemsize)
    return Lines(catalog, groups, sets, amount, order, of_group[order], unit[order])


def _row_elements(catalog: Catalog) -> np.ndarray:
    """Return elements per index of the first axis that has more than one: where a shard may be cut."""
    shape = catalog.shape
    axis = np.argmax(shape > 1, axis=1)
    extent = np.take_along_axis(shape, axis[:, None], axis=1)[:, 0]
    per_row = shape.prod(axis=1, dtype=np.int64) // np.maximum(extent, 1)
    return np.where(catalog.is_flattened, 1, np.maximum(per_row, 1))


def lay_out(catalog: Catalog, ranks: np.ndarray, items: Items, file_name: Callable[[int], str]) -> WritePlan:
    """Order the items of each file, and compute their boxes and byte offsets.

    Args:
        catalog: The shards, those of the items among them.
        ranks: int64, the ranks of the files, rising.
        items: The items to write.
        file_name: Gives the data file's name for a rank.
    """
    row, start, stop = items.row, items.start, items.stop
    writer, itemsize = np.searchsorted(ranks, catalog.rank[row]), catalog.itemsize[row]
    # Widest elements first keeps every item aligned to its own element size without padding.
    order = np.lexsort(
        (start, catalog.flat_start[row], *catalog.offset[row].T[::-1], catalog.key[row], -itemsize, writer)
    )
    row, writer, start, stop, itemsize = row[order], writer[order], start[order], stop[order], itemsize[order]
    stored = catalog.take(row)
    part = (stop - start) < stored.size
    flattened = stored.is_flattened
    unit = _row_elements(stored)
    offset, shape = stored.offset.copy(), stored.shape.copy()
    cut = np.flatnonzero(part & ~flattened)
    axis = np.argmax(shape[cut] > 1, axis=1)
    offset[cut, axis] += start[cut] // unit[cut]
    shape[cut, axis] = (stop[cut] - start[cut]) // unit[cut]
    length = (stop - start) * itemsize
    ends = np.cumsum(length)
    rank_bytes = np.zeros(len(ranks), dtype=np.int64)
    np.add.at(rank_bytes, writer, length)
    before = np.cumsum(rank_bytes) - rank_bytes
    stored = replace(
        stored,
        files=tuple(file_name(int(rank)) for rank in ranks),
        offset=offset,
        shape=shape,
        flat_start=np.where(flattened, stored.flat_start + start, stored.flat_start),
        flat_stop=np.where(flattened, stored.flat_start + stop, stored.flat_stop),
        rank=ranks[writer].astype(np.int32),
        file=writer.astype(np.int32),
        byte_offset=ends - length - before[writer] if len(row) else np.zeros(0, dtype=np.int64),
    )
    return WritePlan(stored, row, start, rank_bytes)
