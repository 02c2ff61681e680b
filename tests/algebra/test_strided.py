"""Strided copies and byte runs against index arrays and boolean masks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import StridedCopy, array_axes, row_major_strides
from tests.property import examples


def addresses(base, extents, strides):
    """The oracle: position of every element, shaped like extents."""
    position = np.full(extents, base, dtype=np.int64)
    for axis, (extent, stride) in enumerate(zip(extents, strides)):
        along = [1] * len(extents)
        along[axis] = extent
        position = position + (np.arange(extent) * stride).reshape(along)
    return position


def stream(copies):
    """(source, target) position of every element moved, in order."""
    pairs = []
    for copy in copies:
        source = addresses(copy.source_base, copy.extents, copy.source_strides).reshape(-1).tolist()
        target = addresses(copy.target_base, copy.extents, copy.target_strides).reshape(-1).tolist()
        pairs += zip(source, target)
    return pairs


@st.composite
def side(draw, extents, injective):
    """Base and strides: those of a permuted (perhaps padded) array, or anything where elements may coincide."""
    ndim = len(extents)
    if injective or draw(st.booleans()):
        strides = [0] * ndim
        step = 1
        for axis in draw(st.permutations(range(ndim))):
            strides[axis] = step * draw(st.sampled_from((1, 1, -1)))
            step *= extents[axis] + draw(st.sampled_from((0, 0, 1)))
    else:
        strides = [draw(st.integers(-4, 9)) for _ in extents]
    below = -sum(s * (e - 1) for s, e in zip(strides, extents) if s < 0)
    return below + draw(st.integers(0, 3)), tuple(strides)


@st.composite
def copies(draw):
    extents = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    source_base, source_strides = draw(side(extents, injective=False))
    target_base, target_strides = draw(side(extents, injective=True))
    return StridedCopy(extents, source_base, source_strides, target_base, target_strides)


def reach(base, extents, strides):
    return base + sum(max(s, 0) * (e - 1) for s, e in zip(strides, extents)) + 1


@examples(200)
@given(copies())
def test_gather_and_scatter_move_the_elements_that_the_numbers_say(copy):
    source = np.arange(reach(copy.source_base, copy.extents, copy.source_strides), dtype=np.int64) * 7 + 1
    target = np.full(reach(copy.target_base, copy.extents, copy.target_strides), -1, dtype=np.int64)
    gathered = copy.gather_from(source)
    assert gathered.shape == copy.extents
    assert np.shares_memory(gathered, source)
    assert (gathered == source[addresses(copy.source_base, copy.extents, copy.source_strides)]).all()
    expected = target.copy()
    for s, t in stream([copy]):
        expected[t] = source[s]
    copy.scatter_into(target)[...] = gathered
    assert (target == expected).all()
    assert copy.size == gathered.size


@examples(100)
@given(copies())
def test_a_view_that_leaves_its_storage_is_an_index_error(copy):
    enough = reach(copy.source_base, copy.extents, copy.source_strides)
    copy.gather_from(np.zeros(enough, dtype=np.int16))
    with pytest.raises(IndexError, match="leaves its storage"):
        copy.gather_from(np.zeros(enough - 1, dtype=np.int16))
    least = min(s for s, _ in stream([copy]))
    below = StridedCopy(copy.extents, copy.source_base - least - 1, copy.source_strides, 0, copy.target_strides)
    with pytest.raises(IndexError, match="leaves its storage"):
        below.gather_from(np.zeros(enough, dtype=np.int16))
    enough = reach(copy.target_base, copy.extents, copy.target_strides)
    with pytest.raises(IndexError, match="leaves its storage"):
        copy.scatter_into(np.zeros(enough - 1, dtype=np.int16))


@pytest.mark.parametrize(
    "storage",
    [np.zeros(24)[::2], np.zeros((3, 4)), np.zeros(12)[::-1], np.zeros(4)[::2]],
    ids=["step", "2-d", "reverse", "two"],
)
def test_a_storage_that_is_not_one_flat_stretch_is_refused(storage):
    copy = StridedCopy((2, 4), 4, (4, 1), 4, (4, 1))
    with pytest.raises(ValueError, match="flat"):
        copy.gather_from(storage)
    with pytest.raises(ValueError, match="flat"):
        copy.scatter_into(storage)


def test_a_single_element_has_no_step():
    assert StridedCopy((1,), 0, (1,), 0, (1,)).gather_from(np.arange(4.0)[2::2]).tolist() == [2]


def test_a_copy_without_elements_touches_nothing():
    copy = StridedCopy((3, 0, 2), 99, (5, 5, 1), 99, (5, 5, 1))
    assert copy.size == 0
    assert copy.gather_from(np.zeros(1)).shape == (3, 0, 2)
    assert copy.gather_from(np.zeros(1, dtype=np.int16)).dtype == np.int16
    copy.scatter_into(np.zeros(1))[...] = 1
    assert copy.simplified().size == 0
    assert list(copy.part(0, 0)) == []


def test_a_scalar_copy():
    copy = StridedCopy((), 3, (), 1, ())
    target = np.zeros(2)
    copy.scatter_into(target)[...] = copy.gather_from(np.arange(4.0))
    assert target.tolist() == [0, 3]
    assert copy.simplified() == copy
    assert copy.is_contiguous() == (True, True)
    assert list(copy.part(0, 1)) == [copy]


@examples(200)
@given(copies())
def test_simplified_moves_the_same_elements_in_the_same_order(copy):
    simple = copy.simplified()
    assert stream([simple]) == stream([copy])
    assert 1 not in simple.extents
    assert len(simple.extents) <= len(copy.extents)
    assert simple.simplified() == simple
    for axis in range(len(simple.extents) - 1):
        joins = [
            strides[axis] == strides[axis + 1] * simple.extents[axis + 1]
            for strides in (simple.source_strides, simple.target_strides)
        ]
        assert not all(joins)


def test_simplified_makes_one_axis_of_a_contiguous_copy():
    copy = StridedCopy((2, 1, 3, 4), 5, (12, 77, 4, 1), 6, (12, -3, 4, 1))
    assert copy.simplified() == StridedCopy((24,), 5, (1,), 6, (1,))


def test_trailing_axes_that_continue_each_other_are_one_stretch():
    for strides, tail in (((12, 4, 1), 3), ((13, 4, 1), 2), ((12, 5, 1), 1), ((12, 4, 2), 0)):
        copy = StridedCopy((2, 3, 4), 0, strides, 0, (12, 4, 1))
        assert (copy.source_tail(), copy.is_contiguous()) == (tail, (tail == 3, True))


def test_simplified_keeps_the_axes_of_a_transpose():
    copy = StridedCopy((3, 4), 0, (1, 3), 0, (4, 1))
    assert copy.simplified() == copy
    assert copy.is_contiguous() == (False, True)
    assert copy.source_tail() == 0


@examples(200)
@given(copies(), st.data())
def test_part_moves_the_elements_of_its_range(copy, data):
    start = data.draw(st.integers(0, copy.size))
    stop = data.draw(st.integers(start, copy.size))
    assert stream(copy.part(start, stop)) == stream([copy])[start:stop]
    assert stream(copy.simplified().part(start, stop)) == stream([copy])[start:stop]


def test_part_outside_the_copy_is_refused():
    copy = StridedCopy((2, 3), 0, (3, 1), 0, (3, 1))
    with pytest.raises(ValueError, match="not inside"):
        list(copy.part(2, 7))


@examples(200)
@given(copies())
def test_a_copy_is_contiguous_where_its_elements_follow_each_other(copy):
    is_one = [s for s, _ in stream([copy])] == list(range(copy.source_base, copy.source_base + copy.size))
    assert copy.is_contiguous()[0] == is_one
    # The trailing axes of each outer index are one stretch.
    tail = math.prod(copy.extents[len(copy.extents) - copy.source_tail() :])
    places = [s for s, _ in stream([copy])]
    for first in range(0, len(places), tail or 1):
        assert places[first : first + tail] == list(range(places[first], places[first] + tail))


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))), ids=str)
def test_every_transpose_of_a_cut_of_an_array(axes):
    """source[1:, :, 2:4].transpose(axes) into the middle of a larger target."""
    source = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    cut = source[1:, :, 2:4]
    expected = cut.transpose(axes)
    target = np.zeros([extent + 2 for extent in expected.shape], dtype=np.int64)
    copy = StridedCopy(
        expected.shape,
        1 * 15 + 2,
        tuple((15, 5, 1)[axis] for axis in axes),
        sum(stride // 8 for stride in target.strides),
        tuple(stride // 8 for stride in target.strides),
    )
    for step in (copy, copy.simplified()):
        flat = np.zeros(target.size, dtype=np.int64)
        step.scatter_into(flat)[...] = step.gather_from(source.reshape(-1))
        inner = flat.reshape(target.shape)[1:-1, 1:-1, 1:-1]
        assert (inner == expected).all()
        assert np.count_nonzero(flat) == np.count_nonzero(expected)


@st.composite
def boxes_of_arrays(draw):
    """A shape, and a copy of a box of such an array with its axes in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offset = [draw(st.integers(0, extent - 1)) for extent in shape]
    step = [draw(st.sampled_from((1, 1, 2))) for _ in shape]
    count = [draw(st.integers(1, (n - o + s - 1) // s)) for n, o, s in zip(shape, offset, step)]
    order = draw(st.permutations(range(len(shape))))
    units = row_major_strides(np.asarray([shape]))[0].tolist()
    base = sum(o * unit for o, unit in zip(offset, units))
    extents = tuple(count[axis] for axis in order)
    target = tuple(row_major_strides(np.asarray([extents]))[0].tolist())
    return shape, StridedCopy(extents, base, tuple(units[axis] * step[axis] for axis in order), 0, target)


@examples(300)
@given(boxes_of_arrays(), st.sampled_from((0, 1)))
def test_axes_of_an_array_are_found_again_after_simplification(made, side):
    shape, copy = made
    if side:
        copy = StridedCopy(copy.extents, copy.target_base, copy.target_strides, copy.source_base, copy.source_strides)
    found = copy.simplified().along_axes(side, shape)
    assert stream([found]) == stream([copy])
    strides = found.target_strides if side else found.source_strides
    base = found.target_base if side else found.source_base
    index = np.unravel_index(base, shape)
    for extent, stride in zip(found.extents, strides):
        ((count, axis, steps),) = array_axes(stride, extent, shape)
        assert count == extent
        if axis >= 0:
            # All of it is within that one axis.
            assert index[axis] + (extent - 1) * steps < shape[axis]
            assert stride == steps * math.prod(shape[axis + 1 :])


def test_a_step_along_no_axis_is_an_error():
    with pytest.raises(ValueError, match=r"5 elements is along no axis of shape \(3, 4\)"):
        array_axes(5, 2, (3, 4))
    with pytest.raises(ValueError, match="12 elements is along no axis"):
        array_axes(12, 2, (3, 4))
    with pytest.raises(ValueError, match="3 steps of 2 elements leave axis 1"):
        array_axes(2, 3, (3, 4))


def test_axes_of_an_array_are_told_with_the_steps_along_them():
    for found, expected in (
        (array_axes(1, 24, (2, 3, 4)), [(2, 0, 1), (3, 1, 1), (4, 2, 1)]),
        (array_axes(2, 6, (3, 4)), [(3, 0, 1), (2, 1, 2)]),
        (array_axes(4, 2, (3, 4)), [(2, 0, 1)]),
        (array_axes(0, 5, (3, 4)), [(5, -1, 0)]),
        (array_axes(7, 1, (3, 4)), [(1, -1, 0)]),
        (array_axes(3, 2, (4,)), [(2, 0, 3)]),
    ):
        # Whole numbers: a quotient is no float.
        assert repr(found) == repr(expected)


@pytest.mark.parametrize("side", [0, 1])
def test_an_axis_that_joins_several_of_an_array_is_split_again(side):
    strides = [(1, 0), (2, 0)]
    copy = StridedCopy((24, 5), 3, strides[side], 4, strides[1 - side])
    one, other = ((12, 4, 1, 0), (24, 8, 2, 0))[:: 1 if not side else -1]
    found = copy.along_axes(side, (2, 3, 4))
    assert repr(found) == repr(StridedCopy((2, 3, 4, 5), 3, one, 4, other))


@st.composite
def forward_copies(draw):
    """Copies that do not step backwards along any axis, simplified."""
    extents = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    strides = tuple(draw(st.integers(0, 12)) for _ in extents)
    return StridedCopy(extents, draw(st.integers(0, 3)), strides, 0, tuple(range(len(extents)))).simplified()


@examples(300)
@given(st.one_of(forward_copies(), copies().map(StridedCopy.simplified)))
def test_a_copy_is_ascending_where_no_element_comes_before_the_one_before_it(copy):
    places = [source for source, _ in stream([copy])]
    assert copy.is_ascending() == (places == sorted(places))


@examples(300)
@given(forward_copies().filter(StridedCopy.is_ascending))
def test_elements_before_a_position_are_counted(copy):
    places = [source for source, _ in stream([copy])]
    for position in range(places[0] - 2, places[-1] + 3):
        count = copy.count_before(position)
        assert (type(count), count) == (int, sum(place < position for place in places))


def test_elements_before_a_position_are_counted_in_a_copy_of_nested_axes():
    copy = StridedCopy((2, 3, 2), 5, (20, 5, 1), 0, (6, 2, 1))
    places = [5, 6, 10, 11, 15, 16, 25, 26, 30, 31, 35, 36]
    assert copy.is_ascending()
    assert [copy.count_before(place) for place in range(40)] == [
        sum(other < place for other in places) for place in range(40)
    ]
    repeated = StridedCopy((2, 3), 1, (4, 0), 0, (3, 1))
    assert repeated.is_ascending()
    assert [repeated.count_before(place) for place in range(8)] == [0, 0, 3, 3, 3, 3, 6, 6]
    assert not StridedCopy((2, 2), 0, (1, 2), 0, (2, 1)).is_ascending()
    assert not StridedCopy((3,), 2, (-1,), 0, (1,)).is_ascending()
    # What ends where the next begins does not go back.
    assert StridedCopy((2, 2, 2), 0, (3, 2, 1), 0, (4, 2, 1)).is_ascending()
    assert not StridedCopy((2, 2, 2), 0, (2, 2, 1), 0, (4, 2, 1)).is_ascending()
