"""Replica groups: which rows of a catalog are the same shard held more than once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra.rows import group_rows
from paddle_flexckpt.catalog.table import Catalog


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

    def without_others(self, rows: np.ndarray) -> ReplicaGroups:
        """Return the same groups; those of ``rows`` (at most one row each) have that row as their only member."""
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
