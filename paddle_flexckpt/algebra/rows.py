"""Rows of few columns, of which there may be millions: reduce, sort and group them, column by column.

numpy is tens of times slower along a short last axis than along a long first one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def all_axes(found: np.ndarray) -> np.ndarray:
    """Return ``found.all(axis=-1)`` of a bool column."""
    return _reduce(np.logical_and, found, True, bool)


def any_axis(found: np.ndarray) -> np.ndarray:
    """Return ``found.any(axis=-1)`` of a bool column."""
    return _reduce(np.logical_or, found, False, bool)


def sum_axes(values: np.ndarray) -> np.ndarray:
    """Return the sum of each row: ``values.sum(axis=-1)`` of an int64 column."""
    return _reduce(np.add, values, 0, np.int64)


def product_axes(values: np.ndarray) -> np.ndarray:
    """Return the product of each row: ``values.prod(axis=-1)`` of an int64 column."""
    return _reduce(np.multiply, values, 1, np.int64)


def _reduce(operation: np.ufunc, table: np.ndarray, nothing: int, dtype: type) -> np.ndarray:
    """Reduce the columns of a table to one; ``nothing`` is the result for no columns."""
    width = table.shape[-1]
    if not width:
        return np.full(table.shape[:-1], nothing, dtype=dtype)
    found: np.ndarray = table[..., 0].astype(dtype)
    for axis in range(1, width):
        operation(found, table[..., axis], out=found)
    return found[()]  # a number where the table is a single row


def lexsort_packed(columns: Sequence[np.ndarray], n: int) -> np.ndarray:
    """Sort as ``np.lexsort`` does, most significant column first.

    Columns of integers are packed into one integer with the row's number as the lowest bits: sorting values is faster
    than sorting row numbers.

    Args:
        columns: Integers, ``[n]`` each.
        n: Number of rows.
    """
    rows = np.arange(n, dtype=np.int64)
    bits = max(n - 1, 0).bit_length()
    packed: list[tuple[np.ndarray, int]] = []
    for column in columns if n else ():
        low = int(column.min())
        span = int(column.max()) - low + 1
        if span == 1:
            continue
        if packed and packed[-1][1] * span << bits < 1 << 62:
            values, room = packed[-1]
            packed[-1] = values * span + (column.astype(np.int64) - low), room * span
        else:
            packed.append((column.astype(np.int64) - low, span))
    order = None
    for values, room in reversed(packed):
        values = values if order is None else values[order]
        if room << bits < 1 << 62:
            step = values << bits | rows
            step.sort()
            step &= (1 << bits) - 1
        else:
            step = np.argsort(values, kind="stable")
        order = step if order is None else order[step]
    return rows if order is None else order


def group_rows(
    columns: Sequence[np.ndarray], n: int, within: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows sorted as by :func:`lexsort_packed`, and where equal ones begin.

    Args:
        columns: Integers, ``[n]`` each.
        n: Number of rows.
        within: Integers, ``[n]``, by which equal rows are sorted.

    Returns:
        ``(order, start)``: equal rows are ``order[start[i]:start[i + 1]]``; ``start`` ends with ``n``.
    """
    # Most columns are constant: an axis that nothing cuts.
    telling = [column for column in columns if n and (column != column[0]).any()]
    order = lexsort_packed(telling if within is None else [*telling, within], n)
    changed = np.zeros(max(n - 1, 0), dtype=bool)
    for column in telling:
        column = column[order]
        changed |= column[1:] != column[:-1]
    start = np.flatnonzero(changed) + 1
    return order, np.concatenate([[0], start, [n]] if n else [[0]]).astype(np.int64)


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values, sorted, as ``np.unique`` does, which hashes them first and is slower."""
    values = np.sort(values)
    return values[np.append(True, values[1:] != values[:-1])] if len(values) else values
