"""Rows reduced, sorted and grouped column by column, as numpy does it row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import rows
from tests.property import examples

NUMBERS = st.one_of(st.integers(-3, 3), st.integers(-(2**40), 2**40), st.integers(0, 2**61))


def tables(numbers):
    """Tables of up to five columns, also without rows."""
    widths = st.integers(1, 5)
    return widths.flatmap(
        lambda width: st.lists(st.tuples(*[numbers] * width), max_size=12).map(
            lambda found: np.asarray(found, dtype=np.int64).reshape(-1, width)
        )
    )


@examples(150)
@given(tables(NUMBERS))
def test_packed_sorting_is_numpys_sorting(table):
    columns = [*table.T]
    assert rows.lexsort_packed(columns, len(table)).tolist() == np.lexsort(columns[::-1]).tolist()


def test_many_rows_are_sorted_as_numpy_sorts_them():
    """So many that their numbers take more bits than the values leave, and types that are short."""
    generator = np.random.default_rng(3)
    for spans in ((1 << 50, 1 << 40, 5), (2, 3, 1 << 61), (9, 1, 70_000)):
        columns = [generator.integers(-(span // 2), span - span // 2, 5000) for span in spans]
        columns.append(generator.integers(-(1 << 15), 1 << 15, 5000).astype(np.int16))
        assert (rows.lexsort_packed(columns, 5000) == np.lexsort(columns[::-1])).all()


@examples(100)
@given(tables(st.integers(0, 2)))
def test_equal_rows_are_grouped(table):
    order, start = rows.group_rows([*table.T], len(table))
    found = [table[order[first:last]].tolist() for first, last in zip(start[:-1], start[1:])]
    expected, count = np.unique(table, axis=0, return_counts=True)
    assert found == [[row] * n for row, n in zip(expected.tolist(), count.tolist())]
    assert sorted(order.tolist()) == [*range(len(table))]
    last = -np.arange(len(table))
    order, again = rows.group_rows([*table.T], len(table), last)
    assert again.tolist() == start.tolist()
    assert all((np.diff(order[first:end]) < 0).all() for first, end in zip(start[:-1], start[1:]))
    assert rows.distinct(table[:, 0]).tolist() == np.unique(table[:, 0]).tolist()


@examples(50)
@given(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), st.randoms(use_true_random=False))
def test_rows_are_reduced(shape, random):
    for table in (np.zeros(shape, np.int64), np.zeros(shape[1:], np.int64)):
        table.reshape(-1)[:] = [random.randrange(-3, 4) for _ in range(table.size)]
        assert rows.sum_axes(table).tolist() == table.sum(axis=-1).tolist()
        assert rows.product_axes(table).tolist() == table.prod(axis=-1).tolist()
        assert rows.all_axes(table > 0).tolist() == (table > 0).all(axis=-1).tolist()
        assert rows.any_axis(table > 0).tolist() == (table > 0).any(axis=-1).tolist()
