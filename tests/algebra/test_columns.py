"""Columns: rows are taken, put together and padded in every column at once; the rest of a table stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest

from paddle_flexckpt.algebra import Columns
from paddle_flexckpt.algebra.columns import WHOLE


@dataclass(frozen=True, eq=False)
class Table(Columns):
    """A table with one column of each kind."""

    PADDED: ClassVar[Mapping[str, int]] = {"shape": 1, "offset": 0}

    names: tuple[str, ...]
    name: np.ndarray
    shape: np.ndarray
    offset: np.ndarray
    sizes: np.ndarray = field(default_factory=lambda: np.asarray([7, 8]), metadata=WHOLE)


def table(*names: int) -> Table:
    shape = np.asarray([[number, 2] for number in names]).reshape(-1, 2)
    return Table(("a", "b"), np.asarray(names), shape, shape * 10)


def test_arrays_are_columns_but_for_those_of_the_whole_table():
    assert Table.COLUMNS == ("name", "shape", "offset")

    class Made(Columns):
        names: tuple[str, ...]
        first: np.ndarray
        sizes: np.ndarray = field(default_factory=lambda: np.zeros(1), metadata=WHOLE)
        second: np.ndarray = field(default_factory=lambda: np.zeros(1))

    assert Made.COLUMNS == ("first", "second")
    assert (len(table(0, 1, 0)), table(1).width) == (3, 2)


@pytest.mark.parametrize("rows", [[2, 0], [True, False, True]])
def test_rows_are_taken_from_every_column(rows):
    whole = table(0, 1, 5)
    taken = whole.take(np.asarray(rows))
    for name in Table.COLUMNS:
        assert (getattr(taken, name) == getattr(whole, name)[np.asarray(rows)]).all()
    assert (taken.names, taken.sizes.tolist()) == (("a", "b"), [7, 8])


def test_tables_are_put_one_after_the_other():
    both = Table.concat([table(0, 1), table(), table(4)])
    assert both.name.tolist() == [0, 1, 4]
    assert both.offset.tolist() == [[0, 20], [10, 20], [40, 20]]
    assert both.names == ("a", "b")
    assert Table.concat([replace(table(1), names=("first",)), table(2)]).names == ("first",)


def test_wider_tables_are_padded_on_the_left():
    wide = table(3).widened(4)
    assert (wide.shape.tolist(), wide.offset.tolist()) == ([[1, 1, 3, 2]], [[0, 0, 30, 20]])
    same = table(3)
    assert same.widened(2) is same.widened(1) is same
    assert same.widened(3).shape.tolist() == [[1, 3, 2]]
