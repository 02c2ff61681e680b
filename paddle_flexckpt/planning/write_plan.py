"""The write plan: every distinct shard is written once, and every rank writes about the same number of bytes.

Shards held by the same set of ranks are laid end to end and the line is cut where each rank has its share (McNaughton's
wrap-around rule); a large shard that lies across a cut is split there, along its rows or its flattened range. Sets are
taken smallest first, so that what only one rank can write is counted before what can be shifted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.catalog import Catalog, ReplicaGroups, group_replicas

# A shard below this is given to one rank whole: splitting it saves less than another item costs.
MIN_SPLIT_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Plan which rank writes what.

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
        """Most loaded rank's bytes over the mean; 1.0 is perfect."""
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
        file_name: Gives the data file's name for a rank.
        save_replicas: Write every shard that every rank holds, replicas included.
        min_split_bytes: Smallest shard that may be split among its replicas, in bytes.
        groups: The catalog's replica groups, where the caller has them already. What is in none of them is not written:
            groups that were narrowed to one member have that rank's values.
        indivisible: bool ``[n]``, rows of shards that one rank has to write whole.
    """
    ranks = np.unique(catalog.rank)
    rank_index = np.searchsorted(ranks, catalog.rank)
    if save_replicas:
        held = (catalog.size > 0) | (catalog.global_shape == 0).any(axis=1)
        row = np.flatnonzero(held) if groups is None else np.sort(groups.order[held[groups.order]])
        writer = rank_index[row]
        start, stop = np.zeros(len(row), dtype=np.int64), catalog.size[row]
    else:
        groups = group_replicas(catalog) if groups is None else groups
        row, writer, start, stop = _assign(catalog, groups, rank_index, len(ranks), min_split_bytes, indivisible)
    return _lay_out(catalog, ranks, row, writer, start, stop, file_name)


def _assign(
    catalog: Catalog,
    groups: ReplicaGroups,
    rank_index: np.ndarray,
    world: int,
    min_split_bytes: int,
    indivisible: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Give every group's elements to its holders; return (row, writer, start, stop) per item."""
    first_rows = groups.first
    distinct = catalog.take(first_rows)
    group_size, itemsize, unit = distinct.size, distinct.itemsize, _row_elements(distinct)
    if indivisible is not None and len(groups):
        # The smallest unit is all of it where any replica says so.
        unit = np.where(np.logical_or.reduceat(indivisible[groups.order], groups.start[:-1]), group_size, unit)
    load = np.zeros(world, dtype=np.int64)
    parts = []
    for members, holders in holder_sets(groups, rank_index):
        size, width = group_size[members], itemsize[members]
        if len(holders) == 1:
            position, which = np.zeros(len(members), dtype=np.int64), np.arange(len(members))
            start, stop = np.zeros(len(members), dtype=np.int64), size
        else:
            share = water_fill(load[holders], int((size * width).sum()))
            which, position, start, stop = _cut_line(size, width, unit[members], share, min_split_bytes)
        np.add.at(load, holders[position], (stop - start) * width[which])
        # Groups are sorted by rank and this set's holders too, so a holder's position is its replica's number.
        parts.append((groups.order[groups.start[members[which]] + position], holders[position], start, stop))
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty, empty
    row, writer, start, stop = (np.concatenate(column) for column in zip(*parts))
    # An empty tensor has no bytes, but its key must not vanish from the checkpoint.
    empty = (catalog.global_shape[row] == 0).any(axis=1)
    _, first_of_key = np.unique(np.where(empty, catalog.key[row], -1), return_index=True)
    keep = stop > start
    keep[first_of_key] |= empty[first_of_key]
    return row[keep], writer[keep], start[keep], stop[keep]


def holder_sets(groups: ReplicaGroups, rank_index: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (group numbers, sorted distinct holders) for each set of ranks that hold groups, smallest first."""
    if not len(groups):
        return []
    holder = rank_index[groups.order]
    # Two sets are told apart by the sum of a random-looking 64-bit number per rank, then compared for real.
    mixed = holder.astype(np.uint64) + np.uint64(1)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    signature = np.add.reduceat(mixed, groups.start[:-1])
    count = groups.count
    order = np.lexsort((signature, count))
    changed = np.append(True, (count[order][1:] != count[order][:-1]) | (signature[order][1:] != signature[order][:-1]))
    bounds = np.append(np.flatnonzero(changed), len(order))
    sets = []
    for low, high in zip(bounds[:-1], bounds[1:]):
        members = np.sort(order[low:high])
        width = int(count[members[0]])
        held = holder[groups.start[members][:, None] + np.arange(width)[None, :]]
        while len(members):
            same = (held == held[0]).all(axis=1)
            sets.append((members[same], held[0].astype(np.int64)))
            members, held = members[~same], held[~same]
    return sets


def water_fill(load: np.ndarray, amount: int) -> np.ndarray:
    """Pour ``amount`` onto ``load`` so that the highest level is lowest; int64, sums to amount."""
    order = np.argsort(load, kind="stable")
    level = load[order]
    below = np.arange(1, len(level) + 1)
    # After raising the k lowest to the level of the (k+1)-th, this much is used up.
    used = np.append(level[1:] * below[:-1] - np.cumsum(level)[:-1], np.iinfo(np.int64).max)
    k = int(np.searchsorted(used, amount, side="left")) + 1
    share = np.zeros(len(load), dtype=np.int64)
    total = int(level[:k].sum()) + amount
    target = total // k + (np.arange(k) < total % k)
    share[order[:k]] = np.maximum(target - level[:k], 0)
    return share


def _row_elements(catalog: Catalog) -> np.ndarray:
    """Return elements per index of the first axis that has more than one: where a shard may be cut."""
    shape = catalog.shape
    axis = np.argmax(shape > 1, axis=1)
    extent = np.take_along_axis(shape, axis[:, None], axis=1)[:, 0]
    per_row = shape.prod(axis=1, dtype=np.int64) // np.maximum(extent, 1)
    return np.where(catalog.is_flattened, 1, np.maximum(per_row, 1))


def _cut_line(
    size: np.ndarray, itemsize: np.ndarray, unit: np.ndarray, share: np.ndarray, min_split_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay shards end to end and cut the line after each share.

    Args:
        size: Elements of each shard.
        itemsize: Bytes per element of each.
        unit: Elements that must stay together in each.
        share: Bytes for each holder; sums to the bytes of all shards.
        min_split_bytes: Shards below this stay whole.

    Returns:
        ``(shard, holder, start, stop)`` per item; start and stop in elements of the shard.
    """
    length = size * itemsize
    end = np.cumsum(length)
    begin = end - length
    cut = np.cumsum(share)[:-1]
    # A cut inside a small shard moves to the nearer end of it; inside a large one, to the nearest row.
    shard = np.minimum(np.searchsorted(end, cut, side="right"), len(size) - 1)
    inside = np.clip(cut - begin[shard], 0, length[shard])
    step = np.where(length[shard] < min_split_bytes, length[shard], unit[shard] * itemsize[shard])
    step = np.maximum(step, 1)
    inside = np.minimum((inside + step // 2) // step * step, length[shard])
    cut = np.maximum.accumulate(begin[shard] + inside)
    low, high = np.append(0, cut), np.append(cut, end[-1] if len(end) else 0)
    first = np.searchsorted(end, low, side="right")
    last = np.searchsorted(begin, high, side="left")
    count = np.where(high > low, np.maximum(last - first, 0), 0)
    holder = np.repeat(np.arange(len(share)), count)
    item = np.arange(len(holder)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    start = np.maximum(low[holder] - begin[item], 0) // itemsize[item]
    stop = np.minimum(high[holder] - begin[item], length[item]) // itemsize[item]
    # Shards without elements are on no part of the line; the first holder gets them.
    empty = np.flatnonzero(size == 0)
    zero = np.zeros(len(empty), dtype=np.int64)
    full = stop > start
    item, holder = np.concatenate([item[full], empty]), np.concatenate([holder[full], zero])
    return item, holder, np.concatenate([start[full], zero]), np.concatenate([stop[full], zero])


def _lay_out(
    catalog: Catalog,
    ranks: np.ndarray,
    row: np.ndarray,
    writer: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    file_name: Callable[[int], str],
) -> WritePlan:
    """Order the items of each file and compute their boxes and byte offsets."""
    itemsize = catalog.itemsize[row]
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
