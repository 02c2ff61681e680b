"""Pieces in columns: which go there, in what form, and that none leaves its memory."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.transfer.piece_columns import PieceColumns
from tests.native.samples import whole
from tests.property.layouts import catalog_of

SOURCE = catalog_of([whole("a", "float32", (6, 8)), whole("b", "float32", (6, 8)), whole("c", "int8", (6, 8))])
TARGET = catalog_of([whole("x", "float32", (6, 8)), whole("y", "float32", (6, 8)), whole("z", "bfloat16", (6, 8))])
ALL = ((6, 8), 0, (8, 1), 0, (8, 1))
CUT = ((6, 3), 2, (8, 1), 0, (3, 1))


def pieces(*rows) -> Pieces:
    return Pieces(*(np.asarray(column, dtype=np.int64) for column in zip(*rows)))


def test_contiguous_pieces_are_stretches_and_the_others_go_by_their_form():
    table = pieces(
        (0, 0, *ALL), (0, 1, *CUT), (1, 1, (6, 3), 5, (8, 1), 18, (3, 1)), (1, 0, (1, 4), 8, (1, 1), 4, (9, 1))
    )
    found = PieceColumns.of(table, SOURCE, TARGET, np.asarray([1000, 2000, -1])[table.target])
    assert found.direct.tolist() == [True] * 4
    straight = found.stretches
    assert (straight.item.tolist(), straight.position.tolist()) == ([0, 1], [0, 32])
    assert (straight.length.tolist(), straight.address.tolist()) == ([192, 16], [1000, 1016])
    (alike,) = found.alike
    assert alike.copy == StridedCopy((6, 3), 0, (8, 1), 0, (3, 1))
    assert alike.dtype == np.float32
    assert (alike.item.tolist(), alike.position.tolist()) == ([0, 1], [8, 20])
    assert alike.address.tolist() == [2000, 2000 + 18 * 4]


def test_what_has_to_be_opened_or_cast_is_left():
    table = pieces((0, 0, *ALL), (2, 1, *ALL), (0, 2, *ALL), (2, 2, *ALL), (1, 1, (0, 8), 0, (8, 1), 0, (8, 1)))
    found = PieceColumns.of(table, SOURCE, TARGET, np.asarray([-1, 2000, 3000])[table.target])
    assert not found.direct.any()
    assert not len(found.stretches)
    assert found.alike == []


@pytest.mark.parametrize(("piece", "what"), [
    (((6, 8), 1, (8, 1), 0, (8, 1)), "item"),
    (((6, 8), 0, (8, 1), -1, (8, 1)), "target"),
    (((6, 3), 0, (10, 1), 0, (3, 1)), "item"),
    (((6, 8), 0, (8, 1), 0, (-8, 1)), "target"),
])  # fmt: skip
def test_a_piece_that_leaves_its_memory_is_an_error(piece, what):
    with pytest.raises(IndexError, match=f"a piece leaves its {what}"):
        PieceColumns.of(pieces((0, 0, *piece)), SOURCE, TARGET, np.asarray([1000]))


def test_pieces_that_run_backwards_stay_inside_each_for_itself():
    backwards = ((6, 8), 0, (8, 1), 40, (-8, 1))
    table = pieces((0, 0, *backwards), (1, 1, *backwards))
    found = PieceColumns.of(table, SOURCE, TARGET, np.asarray([1000, 2000]))
    (alike,) = found.alike
    assert alike.copy == StridedCopy((6, 8), 0, (8, 1), 0, (-8, 1))
    assert alike.address.tolist() == [1160, 2160]
