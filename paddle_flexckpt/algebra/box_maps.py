"""Box maps: this box of a target tensor is that box of a source tensor, with its axes permuted.

Every transformation that only moves elements (renames, cuts, joins, transposes, stacks, copies) is a table of these.
Shapes of different rank share the ``[n, d]`` columns by being padded on the left, as in a catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from paddle_flexckpt.algebra.columns import Columns

NO_AXIS = -1


@dataclass(frozen=True, eq=False)
class BoxMaps(Columns):
    """Box maps as columns, sorted by target; the boxes of one target are disjoint.

    Attributes:
        targets: Names of the target tensors that the maps define; ``target`` indexes it. A name may have no rows.
        sources: Names of source tensors; ``source`` indexes it.
        target: int64 ``[n]``.
        source: int64 ``[n]``.
        target_offset: int64 ``[n, d]``, first element of the box in the target.
        target_shape: int64 ``[n, d]``, extents of the box along the target's axes.
        source_offset: int64 ``[n, d]``, first element of the box in the source.
        target_axis: int64 ``[n, d]``, for every (padded) axis of the source, the matching (padded) axis of the
            target, or NO_AXIS: the box has extent 1 there. Axes of the target without a match have extent 1.
    """

    PADDED: ClassVar[Mapping[str, int]] = {
        "target_offset": 0,
        "target_shape": 1,
        "source_offset": 0,
        "target_axis": NO_AXIS,
    }

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    target: np.ndarray
    source: np.ndarray
    target_offset: np.ndarray
    target_shape: np.ndarray
    source_offset: np.ndarray
    target_axis: np.ndarray

    @property
    def source_shape(self) -> np.ndarray:
        """Return int64 ``[n, d]``, extents of the boxes along the sources' axes."""
        taken = np.take_along_axis(self.target_shape, np.maximum(self.target_axis, 0), axis=1)
        return np.where(self.target_axis >= 0, taken, 1)

    @cached_property
    def rows_by_target(self) -> dict[str, slice]:
        """Return the rows of every name that the maps define."""
        start = np.searchsorted(self.target, np.arange(len(self.targets) + 1)).tolist()
        return {name: slice(low, high) for name, low, high in zip(self.targets, start[:-1], start[1:])}

    def widened(self, width: int) -> BoxMaps:
        """Return the same maps with more padded axes."""
        extra = width - self.width
        if extra <= 0:
            return self
        wide = super().widened(width)
        return replace(wide, target_axis=np.where(wide.target_axis >= 0, wide.target_axis + extra, NO_AXIS))
