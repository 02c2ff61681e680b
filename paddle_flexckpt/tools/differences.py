"""The differences of one tensor between two checkpoints: how many elements, by how much, and whether that is allowed.

Tested in tests/tools/test_differences.py and tests/tools/test_comparison.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import ValidationError, dtype_of

# Elements to compare at once: bounds the memory of intermediate results.
COMPARED_AT_ONCE = 1 << 20
# A larger number of ULPs is shown as a power of two.
_MOST_ULPS = 4096
# From the number of an element in the compared arrays to its position in the whole tensor.
Position = Callable[[int], int]


class Tolerances(NamedTuple):
    """The tolerances of a comparison: ``|first - second| <= atol + rtol * |second|`` is allowed, as in numpy.

    With both 0 nothing is allowed: values are compared by their bits.

    Attributes:
        rtol: Relative to the second value.
        atol: Absolute.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def check(self) -> None:
        """Raise ValidationError if one is not a number from 0."""
        for name, value in self._asdict().items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValidationError([f"{name} has to be a finite number of at least 0; got {value!r}"])

    def allow(self, far: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return, for each element, whether a difference is allowed.

        Args:
            far: ``|first - second|``, float64.
            second: The second values.
        """
        if not any(self):
            return np.zeros(len(far), dtype=bool)
        size = np.abs(second) if second.dtype.kind == "c" else np.abs(second.astype(np.float64))
        return far <= self.atol + self.rtol * size


_EXACT = Tolerances()


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor between two checkpoints.

    Attributes:
        dtype: Name of its element type.
        shape: Its global shape.
        changed: Elements whose bits differ.
        share: Their share of all elements, from 0 to 1.
        max_difference: The largest difference of two finite values.
        mean_difference: The mean of these over all elements.
        max_ulps: The largest distance of two finite values in units in the last place; None if they are not floats.
        not_finite: Changed elements of which one value, or both, is not finite.
        first_index: The first element that differs, an index for each axis.
        max_relative: ``max_difference`` divided by the largest finite magnitude in either checkpoint, of the values
            that were read: those of blocks, or bands, that differ. From 0 to 2.
        beyond: Changed elements that the tolerances do not allow; all of them without tolerances. NaN is allowed
            against NaN of other bits, and no other value that is not finite.
    """

    dtype: str
    shape: list[int]
    changed: int
    share: float
    max_difference: float
    mean_difference: float
    max_ulps: int | None
    not_finite: int
    first_index: list[int]
    max_relative: float
    beyond: int

    derived = ("within_tolerance",)

    @property
    def within_tolerance(self) -> bool:
        """Return whether the tolerances allow all differences."""
        return not self.beyond

    @property
    def ulps(self) -> str:
        """Return ``max_ulps`` for people; empty where the number means nothing: beyond a factor of 2."""
        if self.max_ulps is None or self.max_ulps > 1 << ml_dtypes.finfo(dtype_of(self.dtype).numpy).nmant:
            return ""
        return str(self.max_ulps) if self.max_ulps <= _MOST_ULPS else f">= 2^{self.max_ulps.bit_length() - 1}"

    def __str__(self) -> str:
        """Return one line for people."""
        text = (
            f"{self.dtype} {self.shape}: {self.changed} elements differ ({self.share:.2%}), by "
            f"{self.max_difference:.3g} at most ({self.max_relative:.3g} relative) and {self.mean_difference:.3g} on "
            "average"
        )
        if self.ulps:
            text += f", {self.ulps} ULPs"
        if self.not_finite:
            text += f", {self.not_finite} not finite"
        if self.within_tolerance:
            text += ", within the tolerances"
        elif self.beyond < self.changed:
            text += f", {self.beyond} beyond the tolerances"
        return f"{text}; first at {self.first_index}"


class DifferenceSums:
    """The sums over one tensor's differences."""

    def __init__(self, info: TensorInfo, tolerances: Tolerances = _EXACT) -> None:
        self.info, self._tolerances = info, tolerances
        self.dtype = dtype_of(info.dtype).numpy
        self.changed = self._beyond = 0
        self._sum = self._largest = self._magnitude = 0.0
        self._ulps: int | None = None
        self._not_finite = 0
        self._first = -1

    def add(self, first: np.ndarray, second: np.ndarray, position: Position, base: int = 0) -> None:
        """Add the differences of two runs of elements, both 1-D and contiguous.

        ``base`` is the number of the first element, and ``position`` maps numbers to positions in the tensor.
        """
        itemsize, before = self.dtype.itemsize, self.changed
        parts = [slice(begin, begin + COMPARED_AT_ONCE) for begin in range(0, len(first), COMPARED_AT_ONCE)]
        for part in parts:
            raw = [each[part].view(np.uint8).reshape(-1, itemsize) for each in (first, second)]
            changed = np.flatnonzero((raw[0] != raw[1]).any(axis=1))
            if not len(changed):
                continue
            self.changed += len(changed)
            # Elements of a shard ascend in the tensor too, so the first in the shard is the first in the tensor.
            at = position(base + part.start + int(changed[0]))
            self._first = at if self._first < 0 else min(self._first, at)
            with np.errstate(invalid="ignore"):  # signalling NaN
                self._measure(first[part][changed], second[part][changed])
        if self.changed > before:
            self._magnitude = max(
                self._magnitude, *(_magnitude(each[part]) for part in parts for each in (first, second))
            )

    def _measure(self, first: np.ndarray, second: np.ndarray) -> None:
        if self.dtype.kind in "iu":
            # Exact for 64 bits too: the larger less the smaller, modulo 2 ** 64.
            high, low = np.maximum(first, second).astype(np.uint64), np.minimum(first, second).astype(np.uint64)
            far = (high - low).astype(np.float64)
            allowed = self._tolerances.allow(far, second)
        else:
            kind = np.complex128 if self.dtype.kind == "c" else np.float64
            one, two = first.astype(kind), second.astype(kind)
            finite = np.isfinite(one) & np.isfinite(two)
            self._not_finite += int((~finite).sum())
            far = np.abs(one[finite] - two[finite])
            allowed = np.isnan(one) & np.isnan(two) & any(self._tolerances)
            allowed[finite] = self._tolerances.allow(far, two[finite])
            if self.dtype.kind not in "cb":
                self._count_ulps(first[finite], second[finite])
        self._beyond += int((~allowed).sum())
        if len(far):
            self._largest = max(self._largest, float(far.max()))
            self._sum += float(far.sum())

    def _count_ulps(self, first: np.ndarray, second: np.ndarray) -> None:
        if not len(first):
            return
        bits = [each.view(f"i{self.dtype.itemsize}").astype(np.int64) for each in (first, second)]
        lowest = -(1 << (8 * self.dtype.itemsize - 1))
        # Integers in the order of the floats: negative ones count down from 0.
        one, two = (np.where(each < 0, lowest - each, each) for each in bits)
        ulps = int((np.maximum(one, two).astype(np.uint64) - np.minimum(one, two).astype(np.uint64)).max())
        self._ulps = max(self._ulps or 0, ulps)

    def result(self) -> TensorDifference:
        """Return the difference."""
        elements = math.prod(self.info.shape)
        index = [int(each) for each in np.unravel_index(self._first, self.info.shape)] if self.info.shape else []
        return TensorDifference(
            dtype=self.info.dtype,
            shape=list(self.info.shape),
            changed=self.changed,
            share=self.changed / elements,
            max_difference=self._largest,
            mean_difference=self._sum / elements,
            max_ulps=self._ulps,
            not_finite=self._not_finite,
            first_index=index,
            max_relative=self._largest / self._magnitude if self._magnitude else 0.0,
            beyond=self._beyond,
        )


def _magnitude(values: np.ndarray) -> float:
    """Return the largest magnitude of finite values; 0 without any."""
    if values.dtype.kind in "iu":
        return max(abs(float(values.min())), abs(float(values.max())))
    with np.errstate(invalid="ignore"):  # signalling NaN
        sizes = np.abs(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64))
    return float(sizes.max(where=np.isfinite(sizes), initial=0.0))
