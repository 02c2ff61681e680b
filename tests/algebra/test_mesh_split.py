import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra.boxes import balanced_split, nested_piece

counts = st.integers(1, 9)


@pytest.mark.parametrize(
    ("extent", "pieces", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 2, [4, 3]),
        (5, 4, [2, 2, 1, 0]),  # Paddle's own function says [2, 2, 2, -1]
        (1, 3, [1, 0, 0]),
        (0, 2, [0, 0]),
    ],
)
def test_sizes(extent, pieces, sizes):
    assert balanced_split(extent, pieces) == sizes


@given(extent=st.integers(0, 200), mesh=st.lists(counts, max_size=3))
def test_nested_pieces_cover_the_axis_in_order(extent, mesh):
    end = 0
    for number in range(math.prod(mesh)):
        coordinate, rest = [], number
        for size in reversed(mesh):
            rest, index = divmod(rest, size)
            coordinate.insert(0, index)
        offset, size = nested_piece(extent, list(zip(mesh, coordinate)))
        assert offset == end
        assert size >= 0
        end = offset + size
    assert end == extent


@given(extent=st.integers(0, 200), pieces=counts)
def test_no_piece_is_larger_than_the_rounded_up_share(extent, pieces):
    sizes = balanced_split(extent, pieces)
    assert (len(sizes), sum(sizes), sizes) == (pieces, extent, sorted(sizes, reverse=True))
    assert max(sizes) == math.ceil(extent / pieces)


@pytest.mark.parametrize(("extent", "cuts"), [(-1, []), (4, [(2, 2)]), (4, [(2, -1)]), (4, [(0, 0)])])
def test_what_cannot_be_is_refused(extent, cuts):
    with pytest.raises(ValueError, match="negative extent|does not exist"):
        nested_piece(extent, cuts)
