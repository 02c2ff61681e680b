"""Helpers of requests; what requests mean is tested in test_matching.py and test_box_map_matching.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.planning.requests import portions, positions
from tests.property import examples


def test_positions_of_names():
    found = positions(["b", "x", "a", "b"], ["a", "b"])
    assert found.tolist() == [1, -1, 0, 1]
    assert found.dtype == np.int64
    assert positions([], ["a"]).tolist() == []


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=12), st.integers(1, 9))
def test_pairs_come_in_as_few_portions_as_the_limit_allows(ranges, at_once):
    first = np.asarray([low for low, _ in ranges], dtype=np.int64)
    count = np.asarray([length for _, length in ranges], dtype=np.int64)
    met, last = [], None
    for left, right in portions(first, count, at_once):
        assert (left.dtype, right.dtype) == (np.int64, np.int64)
        # One index may have more pairs than the limit.
        assert len(left) <= at_once or len(set(left.tolist())) == 1
        if last is not None and len(left):
            following = int((left == left[0]).sum())
            assert last + following > at_once
        last = len(left)
        met += zip(left.tolist(), right.tolist())
    assert met == [(i, low + j) for i, (low, length) in enumerate(ranges) for j in range(length)]
