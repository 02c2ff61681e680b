"""Box maps: this box of a target tensor is that box of a source tensor, with its axes permuted.

Every transformation that only moves elements (renames, cuts, joins, transposes, stacks, copies) is a table of these.
Shapes of different rank share the ``[n, d]`` columns by being padded on the left, as in a catalog.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

NO_AXIS = -1


@dataclass(frozen=True, eq=False)
class BoxMaps:
    """Box maps as columns, sorted by target; the boxes of one target are disjoint.

    Attributes:
        targets: Names of the target tensors that the maps define; ``target`` indexes it. A name may have no rows.
        sources: Names of source tensors; ``source`` indexes it.
        target: int64 ``[n]``.
        source: int64 ``[n]``.
        target_offset: int64 ``[n, d]``, first element of the box in the target.
        target_shape: int64 ``[n, d]``, extents of the box along the target's axes.
        source_offset: int64 ``[n, d]``, first element of the box in the source.
        target_axis: int64 ``[n, d]``, for every (padded) axis of the source, the (padded) axis of the target that runs
            along it, or NO_AXIS: the box has extent 1 there. Axes of the target that none runs along have extent 1.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    target: np.ndarray
    source: np.ndarray
    target_offset: np.ndarray
    target_shape: np.ndarray
    source_offset: np.ndarray
    target_axis: np.ndarray

    def __len__(self) -> int:
        return len(self.target)

    @property
    def width(self) -> int:
        """Number of padded axes."""
        return int(self.target_shape.shape[1])

    @property
    def source_shape(self) -> np.ndarray:
        """int64 ``[n, d]``, extents of the boxes along the sources' axes."""
        taken = np.take_along_axis(self.target_shape, np.maximum(self.target_axis, 0), axis=1)
        return np.where(self.target_axis >= 0, taken, 1)

    def rows_by_target(self) -> dict[str, slice]:
        """The rows of every name that the maps define."""
        start = np.searchsorted(self.target, np.arange(len(self.targets) + 1)).tolist()
        return {name: slice(low, high) for name, low, high in zip(self.targets, start[:-1], start[1:])}

    def take(self, rows: np.ndarray) -> BoxMaps:
        """The given maps (ascending indices or a mask); the names stay as they are."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def widened(self, width: int) -> BoxMaps:
        """The same maps with more padded axes."""
        extra = width - self.width
        if extra <= 0:
            return self
        pad = ((0, 0), (extra, 0))
        return BoxMaps(
            self.targets,
            self.sources,
            self.target,
            self.source,
            np.pad(self.target_offset, pad),
            np.pad(self.target_shape, pad, constant_values=1),
            np.pad(self.source_offset, pad),
            np.pad(np.where(self.target_axis >= 0, self.target_axis + extra, NO_AXIS), pad, constant_values=NO_AXIS),
        )


_COLUMNS = tuple(field.name for field in fields(BoxMaps) if field.name not in ("targets", "sources"))
