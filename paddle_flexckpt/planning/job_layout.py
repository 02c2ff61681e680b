"""Hold what layouts of all kinds have in common: columns of a model's tensors, catalogs of rows, buffers.

Tested in tests/planning/test_layouts.py and tests/planning/test_mesh_layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, dtype_of
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.planning.models import Model
from paddle_flexckpt.planning.strategy import aligned

# Bytes of a buffer of sharding V2: `comm_buffer_size_MB`.
BUFFER_BYTES = 256 << 20
_HALF = ("float16", "bfloat16")


class _Ranks(Protocol):
    """Say of how many ranks a job is; its text is what a user would write."""

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""


class JobLayout:
    """Make the catalogs of a job's ranks: what all kinds of layouts have in common.

    Attributes:
        strategy: The strategy.
        keys: Names of all tensors and states of the job.
    """

    strategy: _Ranks

    def __init__(self, model: Model) -> None:
        """Lay the model's tensors out in columns."""
        self._model = model
        count, width = len(model.tensors), max((len(each.shape) for each in model.tensors), default=1) or 1
        self._width = width
        self._ndim = np.asarray([len(each.shape) for each in model.tensors], dtype=np.int16)
        self._shape = np.ones((count, width), dtype=np.int64)
        for row, each in enumerate(model.tensors):
            self._shape[row, width - len(each.shape) :] = each.shape
        self._is_half = np.asarray([each.dtype in _HALF for each in model.tensors], dtype=bool)
        self._dtypes = tuple(dict.fromkeys([*(each.dtype for each in model.tensors), model.state_dtype, "float32"]))
        self._dtype = np.asarray([self._dtypes.index(each.dtype) for each in model.tensors], dtype=np.int16)
        states = [f"{each.name}.{state.suffix}" for state in model.states for each in model.tensors]
        self.keys = (*(each.name for each in model.tensors), *states)

    def kind(self, rank: int) -> tuple[int, ...]:
        """Return what a rank's catalog follows from: ranks of one kind have the same, but for their number."""
        raise NotImplementedError

    def catalog(self, rank: int) -> Catalog:
        """Return what a rank has: first the model's tensors, then the states, state by state."""
        raise NotImplementedError

    def _repeated(self) -> list[Problem | str]:
        """Return the names that several tensors have."""
        names = [each.name for each in self._model.tensors]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        return [Problem("two tensors have one name", key=name) for name in repeated]

    def _catalog_of(self, rank: int, parts: Sequence[tuple[np.ndarray, ...]]) -> Catalog:
        """Return the catalog of rows that :meth:`_box_rows` and :meth:`_scalar_rows` made."""
        key, dtype, ndim, global_shape, offset, shape, start, stop = (np.concatenate(each) for each in zip(*parts))
        count = len(key)
        return Catalog(
            keys=self.keys,
            dtypes=self._dtypes,
            files=(),
            key=key.astype(np.int32),
            dtype=dtype,
            ndim=ndim,
            global_shape=global_shape,
            offset=offset,
            shape=shape,
            flat_start=start,
            flat_stop=stop,
            rank=np.full(count, rank, dtype=np.int32),
            file=np.full(count, -1, dtype=np.int32),
            byte_offset=np.zeros(count, dtype=np.int64),
        )

    def _box_rows(
        self, tensor: np.ndarray, boxes: tuple[np.ndarray, np.ndarray], flat: tuple[np.ndarray, np.ndarray], state: int
    ) -> tuple[np.ndarray, ...]:
        """Return columns of tensors (state 0) or of states of them: offset and shape of boxes, ranges of these."""
        key = tensor + state * len(self._model.tensors)
        return (key, self._dtype_of(tensor, state), self._ndim[tensor], self._shape[tensor], *boxes, *flat)

    def _scalar_rows(self, tensor: np.ndarray, state: int) -> tuple[np.ndarray, ...]:
        ones, whole = np.ones((len(tensor), self._width), dtype=np.int64), np.full(len(tensor), NOT_FLATTENED)
        key, ndim = tensor + state * len(self._model.tensors), np.ones(len(tensor), dtype=np.int16)
        return key, self._dtype_of(tensor, state), ndim, ones, ones * 0, ones, whole, whole

    def _dtype_of(self, tensor: np.ndarray, state: int) -> np.ndarray:
        if not state:
            return self._dtype[tensor]
        is_master = self._model.states[state - 1].is_master
        name = "float32" if is_master else self._model.state_dtype
        return np.full(len(tensor), self._dtypes.index(name), dtype=np.int16)


def buffer_ranges(
    sizes: np.ndarray, dtypes: Sequence[str], alignment: int, degree: int, member: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a member gets of parameters that lie end to end in buffers, each split evenly: ranges of elements.

    Args:
        sizes: Elements of each parameter, int64 ``[n]``.
        dtypes: Their types; a buffer has parameters of one.
        alignment: Bytes to which each parameter is padded, for each of the ranks.
        degree: Ranks that share the buffers.
        member: Which of them.
    """
    begin, end = np.zeros((2, len(sizes)), dtype=np.int64)
    for dtype in dict.fromkeys(dtypes):
        itemsize = dtype_of(dtype).itemsize
        rows = np.asarray([row for row, name in enumerate(dtypes) if name == dtype])
        for group in _groups(sizes[rows] * itemsize, BUFFER_BYTES):
            members = rows[group]
            padded = aligned(sizes[members], itemsize, alignment, degree)
            index = np.cumsum(padded) - padded
            each = int(padded.sum()) // degree
            begin[members] = np.clip(each * member - index, 0, sizes[members])
            end[members] = np.clip(each * (member + 1) - index, 0, sizes[members])
    return begin, end


def _groups(sizes: np.ndarray, limit: int) -> list[np.ndarray]:
    """Return the tensors of each buffer: a buffer is closed when it has reached the limit.

    As ``eager_assign_group_by_size`` does (``EagerGroupBySize`` in paddle/fluid/distributed/collective/reducer.cc).
    """
    groups: list[list[int]] = [[]]
    total = 0
    for row, size in enumerate(sizes.tolist()):
        groups[-1].append(row)
        total += size
        if total >= limit:
            groups.append([])
            total = 0
    return [np.asarray(group) for group in groups if group]
