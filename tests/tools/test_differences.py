"""The differences of one tensor, with tolerances as numpy has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog.dtypes import dtype_of
from paddle_flexckpt.tools.differences import DifferenceSums, TensorDifference, Tolerances
from tests.property import examples


def sums(first: np.ndarray, second: np.ndarray, rtol: float, atol: float) -> DifferenceSums:
    found = DifferenceSums(TensorInfo(first.shape, first.dtype.name), Tolerances(rtol, atol))
    found.add(first.ravel(), second.ravel(), lambda element: element)
    return found


def measured(first: np.ndarray, second: np.ndarray, rtol: float = 0.0, atol: float = 0.0) -> TensorDifference:
    return sums(first, second, rtol, atol).result()


def allowed(first: np.ndarray, second: np.ndarray, rtol: float, atol: float) -> bool:
    found = sums(first, second, rtol, atol)
    return not found.changed or found.result().within_tolerance


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0])


@examples(200)
@given(
    arrays(np.float32, 6, elements=NUMBERS),
    arrays(np.float32, 6, elements=NUMBERS),
    st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    st.sampled_from([1e-9, 0.25, 3.0]),
)
def test_tolerances_are_those_of_numpy(first, second, rtol, atol):
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.allclose(first.astype(np.float64), second.astype(np.float64), rtol, atol, equal_nan=True)
    assert allowed(first, second, rtol, atol) == expected


@pytest.mark.parametrize(
    ("one", "other", "is_allowed"),
    [
        ([np.nan], [1.0], False),
        ([1.0], [np.nan], False),
        ([np.inf], [-np.inf], False),
        ([np.inf], [1e30], False),
        ([1e30], [np.inf], False),
        ([0.0], [-0.0], True),
    ],
)
def test_values_that_are_not_finite_are_allowed_by_no_tolerance(one, other, is_allowed):
    values = np.asarray(one, dtype=np.float32), np.asarray(other, dtype=np.float32)
    assert allowed(*values, 1.0, 1e38) == is_allowed
    assert not allowed(*values, 0.0, 0.0)


def test_one_nan_is_as_good_as_another():
    bits = np.asarray([0x7FC00000, 0x7FC00001, 0xFFC00000], dtype=np.uint32)
    first, second = bits.view(np.float32), bits[::-1].copy().view(np.float32)
    assert measured(first, second).beyond == 2
    found = measured(first, second, rtol=1e-9)
    assert (found.changed, found.not_finite, found.within_tolerance) == (2, 2, True)


def test_integers_and_complex_numbers_have_tolerances_too():
    assert allowed(np.asarray([100, 7]), np.asarray([101, 7]), 0.0, 1.0)
    assert not allowed(np.asarray([100, 7]), np.asarray([101, 9]), 0.0, 1.0)
    assert allowed(np.asarray([np.iinfo(np.int64).min]), np.asarray([np.iinfo(np.int64).max]), 2.1, 0.0)
    assert not allowed(np.asarray([True]), np.asarray([False]), 0.5, 0.5)
    assert allowed(np.asarray([3 + 4j]), np.asarray([3 + 4.1j]), 0.0, 0.11)


@pytest.mark.parametrize(
    ("dtype", "one", "other", "ulps"),
    [
        ("float32", 1.0, 1 + 2**-20, "8"),
        ("float32", 1.0, 1 + 2**-8, ">= 2^15"),
        ("float32", 1.0, -1.0, ""),
        ("float32", 0.0, 1e-21, ""),
        ("bfloat16", 1.0, 2.0, "128"),
        ("bfloat16", 1.0, 4.0, ""),
    ],
)
def test_ulps_are_shown_where_they_mean_something(dtype, one, other, ulps):
    numpy = dtype_of(dtype).numpy
    found = measured(np.asarray([one]).astype(numpy), np.asarray([other]).astype(numpy))
    assert found.ulps == ulps
    assert ("ULPs" in str(found)) == bool(ulps)


def test_the_relative_difference_is_that_of_the_tensor():
    first = np.asarray([4.0, 0.0, 1.0], dtype=np.float32)
    assert measured(first, np.asarray([4.0, 1.0, 1.0], dtype=np.float32)).max_relative == 0.25
    assert measured(first, np.asarray([4.0, -0.0, 1.0], dtype=np.float32)).max_relative == 0.0
    assert measured(np.asarray([0, 5]), np.asarray([0, -5])).max_relative == 2.0
