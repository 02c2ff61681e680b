"""Make the catalog of one rank: shards come one by one or many at once, and become columns at the end.

Tested in tests/catalog/test_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from paddle_flexckpt.catalog.dtypes import dtype_of
from paddle_flexckpt.catalog.errors import Problem, ValidationError
from paddle_flexckpt.catalog.orders import Order
from paddle_flexckpt.catalog.table import NOT_FLATTENED, Catalog, order_columns


class CatalogBuilder:
    """A collector of one rank's shards, row by row or many at once, that makes their catalog."""

    def __init__(self, rank: int, file: str | None = None) -> None:
        """Begin without shards; ``file`` is the file of all of them, if they are in one."""
        self._rank = rank
        self._file = file
        self._keys: dict[str, int] = {}
        self._dtypes: dict[str, int] = {}
        self._orders: dict[int, Order] = {}
        # Of each row: the numbers of its key and dtype, its three shapes, its flattened range, its place in the file.
        self._key: list[int] = []
        self._dtype: list[int] = []
        self._shapes: dict[str, list[Sequence[int]]] = {name: [] for name in Catalog.PADDED}
        self._flat: list[tuple[int, int]] = []
        self._byte_offset: list[int] = []

    def add(
        self,
        key: str,
        dtype: str,
        global_shape: Sequence[int],
        offset: Sequence[int],
        shape: Sequence[int],
        flat_range: tuple[int, int] | None = None,
        byte_offset: int = 0,
        order: Order | None = None,
    ) -> int:
        """Add a shard and return its row.

        Args:
            key: The tensor's name.
            dtype: Name of its element type.
            global_shape: In elements, like all arguments below but ``byte_offset``.
            offset: The first element of the shard's box.
            shape: The box.
            flat_range: The flattened range in the box; None: all of it.
            byte_offset: Where the shard begins in its file.
            order: The order of the whole tensor's elements, as far as it is known.

        Raises:
            ValidationError: The shapes differ in their number of axes, or the flattened range is negative.
        """
        self.add_many([key], [dtype], [global_shape], [offset], [shape], [flat_range], [order])
        self._byte_offset[-1] = int(byte_offset)
        return len(self._key) - 1

    def add_many(
        self,
        keys: Sequence[str],
        dtypes: Sequence[str],
        global_shapes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
        shapes: Sequence[Sequence[int]],
        flat_ranges: Sequence[tuple[int, int] | None],
        orders: Sequence[Order | None],
    ) -> None:
        """Add shards, each as :meth:`add` does; arguments and errors as there, with an entry for each shard."""
        axes = [list(map(len, column)) for column in (global_shapes, offsets, shapes)]
        if not axes[0] == axes[1] == axes[2]:
            row = next(row for row, (a, b, c) in enumerate(zip(*axes)) if not a == b == c)
            what = "global shape, offset and shape of a shard differ in their number of axes"
            got = f"{axes[0][row]}, {axes[1][row]} and {axes[2][row]}"
            raise ValidationError([Problem(what, keys[row], self._rank, self._file, "the same number of axes", got)])
        whole = (NOT_FLATTENED, NOT_FLATTENED)
        flat = [whole] * len(flat_ranges)
        for row, each in enumerate(flat_ranges) if any(flat_ranges) else ():
            if each is not None:
                flat[row] = int(each[0]), int(each[1])
                if min(flat[row]) < 0:
                    what = "negative flattened range"
                    raise ValidationError([Problem(what, keys[row], self._rank, self._file, ">= 0", str(each))])
        names = {name: dtype_of(name).name for name in dict.fromkeys(dtypes)}
        numbers = [self._keys.setdefault(key, len(self._keys)) for key in keys]
        for number, order in zip(numbers, orders):
            if order is not None:
                self._orders.setdefault(number, order)
        self._key += numbers
        self._dtype += [self._dtypes.setdefault(names[name], len(self._dtypes)) for name in dtypes]
        for column, values in zip(Catalog.PADDED, (global_shapes, offsets, shapes)):
            self._shapes[column] += values
        self._flat += flat
        self._byte_offset += [0] * len(keys)

    def build(self) -> Catalog:
        """Return the catalog of all shards added so far."""
        n = len(self._key)
        ndim = np.asarray(list(map(len, self._shapes["shape"])), dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(self._flat), dtype=np.int64, count=2 * n).reshape(n, 2)
        boxes: dict[str, Any] = {name: _padded(self._shapes[name], fill, ndim) for name, fill in Catalog.PADDED.items()}
        return Catalog(
            keys=tuple(self._keys),
            dtypes=tuple(self._dtypes),
            files=(self._file,) if self._file is not None else (),
            key=np.asarray(self._key, dtype=np.int32),
            dtype=np.asarray(self._dtype, dtype=np.int16),
            ndim=ndim.astype(np.int16),
            **boxes,
            flat_start=np.ascontiguousarray(flat[:, 0]),
            flat_stop=np.ascontiguousarray(flat[:, 1]),
            rank=np.full(n, self._rank, dtype=np.int32),
            file=np.full(n, 0 if self._file is not None else -1, dtype=np.int32),
            byte_offset=np.asarray(self._byte_offset, dtype=np.int64),
            **order_columns(self._orders, len(self._keys)),
        )


def _padded(values: Sequence[Sequence[int]], fill: int, ndim: np.ndarray) -> np.ndarray:
    """Return sequences of ``ndim`` integers each as int64 ``[n, d]``, padded on the left."""
    width = int(ndim.max(initial=1))
    out = np.full((len(values), width), fill, dtype=np.int64)
    numbers = np.fromiter(chain.from_iterable(values), dtype=np.int64, count=int(ndim.sum()))
    out[np.arange(width) >= width - ndim[:, None]] = numbers
    return out
