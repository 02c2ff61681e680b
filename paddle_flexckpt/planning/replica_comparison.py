"""Plan the byte-by-byte comparison of replicas: of written items on two ranks, or of all items on all ranks.

A save compares each item on its writer and one other rank of the replica group. Pairs form a ring through all ranks of
the group, so wherever ranks differ as groups, the ring crosses between them. Each save increases a number that
turns the ring: in time every rank is compared with every other. All ranks also compare a sample of every replica. So
different tensors under one name, and ranks at different steps, are found even if two neighbours have the same error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.catalog import Catalog, ReplicaGroups
from paddle_flexckpt.planning.write_plan import Items

# Bytes of the sample of each replica that more than two ranks have.
SAMPLE_BYTES = 64


@dataclass(frozen=True, eq=False)
class Stretches:
    """Stretches of shards of which ranks compute digests.

    Attributes:
        row: int64 ``[n]``, the shard: a row of its rank's table.
        start: int64 ``[n]``, the stretch's first element in that shard's own storage.
        stop: int64 ``[n]``, the element after its last.
    """

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class Comparison(Stretches):
    """Stretches of replicas, in the order in which every rank sends its digests.

    Attributes:
        first: int64 ``[n]``, the number of the stretch to which each has to be equal; its own for the first of a group.
    """

    first: np.ndarray

    def take(self, which: np.ndarray) -> Comparison:
        """Return the chosen stretches. ``which`` has a bool per stretch, the same for all of one ``first``."""
        first = (np.cumsum(which) - 1)[self.first[which]]
        return Comparison(self.row[which], self.start[which], self.stop[which], first)

    def of_rank(self, catalog: Catalog, rank: int) -> Stretches:
        """Return the stretches of one rank."""
        mine = catalog.rank[self.row] == rank
        return Stretches(self.row[mine], self.start[mine], self.stop[mine])

    def concat(self, other: Comparison) -> Comparison:
        """Return the stretches of both comparisons."""
        return Comparison(
            np.concatenate([self.row, other.row]),
            np.concatenate([self.start, other.start]),
            np.concatenate([self.stop, other.stop]),
            np.concatenate([self.first, other.first + len(self)]),
        )


def compare_whole(catalog: Catalog, groups: ReplicaGroups, which: np.ndarray | None = None) -> Comparison:
    """Compare all replicas of some groups, bool ``[g]``, completely; of all groups by default."""
    rows, first = _members(catalog, groups, which)
    return Comparison(rows, np.zeros(len(rows), dtype=np.int64), catalog.size[rows], first)


def compare_written(items: Items, catalog: Catalog, groups: ReplicaGroups, which: np.ndarray, turn: int) -> Comparison:
    """Compare each written item of some groups on its writer and on one other rank of its group.

    Args:
        items: What is written.
        catalog: The shards of all ranks.
        groups: Its replica groups.
        which: bool ``[g]``, the groups.
        turn: A number that is the same on all ranks, and another one for each save.
    """
    item = np.flatnonzero((which & (groups.count > 1))[groups.of_row[items.row]] & (items.stop > items.start))
    writer = items.row[item]
    group, position = groups.of_row[writer], np.empty(len(catalog), dtype=np.int64)
    position[groups.order] = np.arange(len(catalog)) - np.repeat(groups.start[:-1], groups.count)
    neighbour = groups.order[groups.start[group] + ring_neighbour(position[writer], groups.count[group], turn)]
    return Comparison(
        np.stack([writer, neighbour], axis=1).reshape(-1),
        np.repeat(items.start[item], 2),
        np.repeat(items.stop[item], 2),
        np.repeat(2 * np.arange(len(item)), 2),
    )


def compare_samples(catalog: Catalog, groups: ReplicaGroups, which: np.ndarray, turn: int) -> Comparison:
    """Compare a few bytes of all replicas of some groups, at another place in each save; arguments as above.

    Groups of two are left out: their written items are compared on both ranks already.
    """
    rows, first = _members(catalog, groups, which & (groups.count > 2))
    size, count = catalog.size[rows], np.maximum(SAMPLE_BYTES // np.maximum(catalog.itemsize[rows], 1), 1)
    start = turn % np.maximum(-(-size // count), 1) * count
    return Comparison(rows, start, np.minimum(start + count, size), first)


def _members(catalog: Catalog, groups: ReplicaGroups, which: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of groups of several rows, and for each the position of its group's first row among them."""
    several = (groups.count > 1) & (catalog.size[groups.first] > 0)
    several = several if which is None else several & which
    count = groups.count[several]
    return groups.order[np.repeat(several, groups.count)], np.repeat(np.cumsum(count) - count, count)


def ring_neighbour(position: np.ndarray, count: np.ndarray, turn: int) -> np.ndarray:
    """Return each rank's next rank in a turn's ring of ``count`` ranks (at least 2), as positions in the group.

    The ring goes through all ranks: 0, 1, -1, 2, -2 and so on, counted from a rank that the turn chooses, modulo the
    count. The differences are 1, 2, 3 and so on. So after ``2 * count`` turns each rank has been next to every other.
    """
    place = (position - turn) % count
    order = np.where(place == 0, 0, np.where(place <= count // 2, 2 * place - 1, 2 * (count - place)))
    order = (order + 1 - 2 * (turn // count % 2)) % count
    place = np.where(order % 2 == 1, (order + 1) // 2, -(order // 2))
    return (place + turn) % count
