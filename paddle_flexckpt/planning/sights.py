"""Which ranks can read which stored shards, where nodes have storage of their own.

Ranks that can read the same files, as those of one node do, have the same *view*. The tables have a row for each view
that can read something, so that they grow with the copies of a shard and not with the ranks.

Tested in tests/planning/test_sights.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra.rows import lexsort_packed
from paddle_flexckpt.catalog import Catalog, ReplicaGroups


@dataclass(frozen=True, eq=False)
class Sight:
    """The replica groups that ranks can read.

    Attributes:
        view: int64 per rank, by position: the number of its view.
        key: int64, sorted: ``group * views + view`` of each replica group and each view that can read it.
        row: int64, by key: the first row of the group that this view can read.
    """

    view: np.ndarray
    key: np.ndarray
    row: np.ndarray

    @property
    def _views(self) -> int:
        return int(self.view.max()) + 1

    @property
    def groups(self) -> np.ndarray:
        """Return the replica groups that a rank can read."""
        return np.unique(self.key // self._views)

    def rows(self, group: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return int64: the row of each replica group that the rank at each place reads; -1 where it can read none."""
        wanted = group * self._views + self.view[place]
        at = np.searchsorted(self.key, wanted)
        there = at < len(self.key)
        there[there] = self.key[at[there]] == wanted[there]
        found = np.full(len(wanted), -1)
        found[there] = self.row[at[there]]
        return found

    def readers(self, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranks that can read each of some replica groups: index of the group and place, sorted."""
        views = self._views
        index, at = _ranges(np.searchsorted(self.key, group * views), np.searchsorted(self.key, (group + 1) * views))
        by_view = np.argsort(self.view, kind="stable")
        bounds = np.searchsorted(self.view[by_view], np.arange(views + 1))
        view = self.key[at] % views
        of, member = _ranges(bounds[view], bounds[view + 1])
        index, place = index[of], by_view[member]
        order = lexsort_packed([index, place], len(index))
        return index[order], place[order]


def find_sight(
    catalog: Catalog,
    groups: ReplicaGroups,
    view: np.ndarray,
    files: Sequence[np.ndarray],
    damaged: Mapping[int, Collection[int]],
) -> Sight:
    """Return which replica groups ranks can read.

    Args:
        catalog: The stored shards.
        groups: Their replica groups.
        view: As in :class:`Sight`.
        files: By view, the numbers of the files that it can read.
        damaged: By view, the rows of these files that it cannot read.
    """
    views = int(view.max()) + 1
    by_file = np.argsort(catalog.file, kind="stable")
    bounds = np.searchsorted(catalog.file[by_file], np.arange(len(catalog.files) + 1))
    file = np.concatenate([*files, np.empty(0, dtype=np.int64)]).astype(np.int64)
    of, member = _ranges(bounds[file], bounds[file + 1])
    row, seer = by_file[member], np.repeat(np.arange(len(files)), [len(each) for each in files])[of]
    lost = [one * views + each for each, rows in damaged.items() for one in rows]
    is_whole = ~np.isin(row * views + seer, np.asarray(lost, dtype=np.int64))
    row, seer = row[is_whole], seer[is_whole]
    key = groups.of_row[row] * views + seer
    order = lexsort_packed([key, row], len(key))
    key, first = np.unique(key[order], return_index=True)
    return Sight(view, key, row[order][first])


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all ranges, one range after the other: for each, the range's index and the number."""
    count = stop - start
    of = np.repeat(np.arange(len(count)), count)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(count) - count - start, count)
