"""Boxes against boolean masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import Box, get_overlap_region, intersect_boxes, subtract_boxes
from tests.property import examples

SPACE = 6


def mask(box: Box) -> np.ndarray:
    out = np.zeros((SPACE,) * len(box.shape), dtype=np.int64)
    out[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape))] = 1
    return out


@st.composite
def boxes(draw, ndim: int, least: int = 0) -> Box:
    offset = tuple(draw(st.integers(0, SPACE - least)) for _ in range(ndim))
    return Box(offset, tuple(draw(st.integers(least, SPACE - o)) for o in offset))


def box_lists(count: int):
    return st.integers(0, 3).flatmap(lambda n: st.lists(boxes(n), min_size=count, max_size=count))


def test_size_and_stop_of_a_box():
    assert Box((1, 2), (3, 4)).size == 12
    assert Box((1, 2), (3, 4)).stop == (4, 6)
    assert Box((), ()).size == 1
    assert Box((), ()).stop == ()
    assert str(Box((1, 2), (3, 4))) == "[1:4, 2:6]"


@examples(200)
@given(box_lists(2))
def test_intersect_is_the_common_part(pair):
    a, b = pair
    common = a.intersect(b)
    expected = mask(a) * mask(b)
    if common is None:
        assert not expected.any()
    else:
        assert common.size > 0
        assert (mask(common) == expected).all()
    assert common == b.intersect(a)


@examples(200)
@given(box_lists(2))
def test_subtract_and_intersect_partition_the_box(pair):
    a, b = pair
    rest = a.subtract(b)
    common = a.intersect(b)
    assert len(rest) <= 2 * len(a.shape) or not common
    assert all(piece.size > 0 for piece in rest)
    painted = sum((mask(piece) for piece in rest), np.zeros_like(mask(a)))
    assert (painted + (mask(common) if common else 0) == mask(a)).all()


@examples(150)
@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), st.lists(boxes(n), max_size=6))))
def test_subtract_boxes_leaves_what_none_of_the_others_covers(case):
    box, others = case
    rest = subtract_boxes(box, others)
    covered = sum((mask(other) for other in others), np.zeros_like(mask(box))) > 0
    painted = sum((mask(piece) for piece in rest), np.zeros_like(mask(box)))
    assert (painted == mask(box) * ~covered).all()


def test_subtract_of_zero_dimensional_boxes():
    scalar = Box((), ())
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == []
    assert subtract_boxes(scalar, []) == [scalar]


def test_an_empty_box_meets_nothing_and_leaves_nothing():
    empty, full = Box((2, 0), (0, 3)), Box((0, 0), (4, 4))
    assert empty.intersect(full) is None
    assert empty.subtract(full) == []
    assert subtract_boxes(empty, []) == []
    assert full.subtract(empty) == [full]


@examples(150)
@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(boxes(n), boxes(n)), min_size=1, max_size=8)))
def test_columns_of_boxes_intersect_as_single_boxes_do(pairs):
    columns = [
        np.asarray([getattr(pair[side], name) for pair in pairs], dtype=np.int64)
        for side in (0, 1)
        for name in ("offset", "shape")
    ]
    offset, shape, hit = intersect_boxes(*columns)
    for i, (a, b) in enumerate(pairs):
        common = a.intersect(b)
        assert bool(hit[i]) == (common is not None)
        if common is not None:
            assert (tuple(offset[i].tolist()), tuple(shape[i].tolist())) == (common.offset, common.shape)


def test_one_box_intersects_a_column_by_broadcasting():
    offsets, shapes = np.asarray([[0, 0], [2, 2], [4, 4]]), np.full((3, 2), 2)
    offset, shape, hit = intersect_boxes(np.asarray([1, 1]), np.asarray([2, 2]), offsets, shapes)
    assert hit.tolist() == [True, True, False]
    assert offset[:2].tolist() == [[1, 1], [2, 2]]
    assert shape[:2].tolist() == [[1, 1], [1, 1]]


@examples(200)
@given(box_lists(2))
def test_overlap_region_agrees_with_numpy(pair):
    desc, shard = pair
    found, offset, shape, in_desc, in_shard = get_overlap_region(desc.offset, desc.shape, shard.offset, shard.shape)
    both = mask(desc) * mask(shard)
    assert found == bool(both.any())
    if not found:
        assert (offset, shape, in_desc, in_shard) == (None, None, None, None)
        return
    indices = np.arange(both.size).reshape(both.shape)

    def cut(array, start):
        return array[tuple(slice(o, o + s) for o, s in zip(start, shape))]

    def view(box):
        return indices[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape))]

    expected = indices[both > 0].tolist()
    assert cut(indices, offset).reshape(-1).tolist() == expected
    assert cut(view(desc), in_desc).reshape(-1).tolist() == expected
    assert cut(view(shard), in_shard).reshape(-1).tolist() == expected


def test_overlap_region_is_made_of_lists_as_in_tree():
    assert get_overlap_region((0, 2), (4, 4), (2, 0), (4, 4)) == (True, [2, 2], [2, 2], [2, 0], [0, 2])
    assert get_overlap_region((0,), (2,), (2,), (2,)) == (False, None, None, None, None)


@pytest.mark.parametrize("longer", range(4))
def test_overlap_region_refuses_boxes_of_different_rank(longer):
    arguments = [(0, 0), (2, 2), (0, 0), (2, 2)]
    arguments[longer] = (*arguments[longer], 1)
    with pytest.raises(ValueError, match="different rank"):
        get_overlap_region(*arguments)


def test_every_pair_of_intervals_on_a_short_line():
    intervals = [Box((a,), (b - a,)) for a, b in itertools.combinations_with_replacement(range(6), 2)]
    for a, b in itertools.product(intervals, intervals):
        expected = set(range(a.offset[0], a.stop[0])) - set(range(b.offset[0], b.stop[0]))
        left = [i for piece in a.subtract(b) for i in range(piece.offset[0], piece.stop[0])]
        assert sorted(left) == sorted(expected)


def test_no_more_boxes_are_made_than_allowed():
    line, others = Box((0,), (10,)), [Box((4,), (1,)), Box((7,), (1,))]
    # Two boxes are made by the first, three by the second.
    assert subtract_boxes(line, others, 5) == subtract_boxes(line, others) == [
        Box((0,), (4,)), Box((5,), (2,)), Box((8,), (2,))
    ]  # fmt: skip
    assert subtract_boxes(line, others, 4) is None
    assert subtract_boxes(line, [], 0) == [line]
