"""Cast numbers, and drop the casts of a chain that change nothing. Tested in tests/aoa/test_steps.py."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Union

import numpy as np

from paddle_flexckpt.aoa.structure import StructureError
from paddle_flexckpt.catalog import CheckpointError, dtype_of
from paddle_flexckpt.catalog.dtypes import rounded_to_odd

Number = Union[int, float]

FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
# Dtypes whose numbers all exist in the other dtype too.
_EXACT = {
    "float8_e4m3fn": ("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    "float8_e5m2": ("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    "float16": ("float32", "float64", "complex64", "complex128"),
    "bfloat16": ("float32", "float64", "complex64", "complex128"),
    "float32": ("float64", "complex64", "complex128"),
    "float64": ("complex128",),
    "complex64": ("complex128",),
}


def converted(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return an array cast to another dtype.

    Floating-point numbers are rounded once, to nearest and ties to even. What does not fit becomes infinity, or NaN
    where there is none; integers that do not fit wrap around, as in numpy.

    Raises:
        CheckpointError: The numbers have no meaning in that dtype: NaN, infinity or too large for an integer (what C
            and numpy make of them depends on the machine and on the place in the array), or complex to real.
    """
    if array.dtype == dtype_of(dtype).numpy:
        return array
    # The processor reports signalling NaNs as "invalid"; they are NaN before and after.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return _converted(array, dtype)


def _converted(array: np.ndarray, dtype: str) -> np.ndarray:
    source, target = array.dtype, dtype_of(dtype).numpy
    if source.kind == "c" and target.kind not in "cb":
        raise CheckpointError(f"a cast of {source.name} to {dtype} would drop the imaginary parts")
    is_float = source.name in FLOATS
    if is_float and target.kind in "iu":
        return _to_integer(array, target)
    return rounded_to_odd(array, target).astype(target)


def _to_integer(array: np.ndarray, target: np.dtype) -> np.ndarray:
    wide = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    whole = np.trunc(wide)
    limits = np.iinfo(target)
    # The upper limit plus one is a power of two and so exact in every float; NaN fails both comparisons.
    fits = (whole >= float(limits.min)) & (whole < 2.0 * float(limits.max // 2 + 1))
    if not np.all(fits):
        worst = np.atleast_1d(wide)[~np.atleast_1d(fits)][0]
        raise CheckpointError(
            f"a cast of {array.dtype.name} to {target.name} met {worst}; expected numbers from {limits.min} to "
            f"{limits.max}. Remedy (FC206): scale the values first, or cast to a floating-point dtype"
        )
    return whole.astype(target)


def number_in(value: Number, dtype: str) -> np.ndarray:
    """Return a number as a 0-d array.

    Raises:
        StructureError: There is no such number in the dtype (floating-point numbers may be rounded).
    """
    target = dtype_of(dtype).numpy
    if not isinstance(value, (bool, int, float, np.number)):
        raise StructureError(f"fill= takes a number; got {value!r}")
    problem = StructureError(f"fill={value} is no number of dtype {dtype}")
    if target.kind in "biu":
        low, high = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:
            raise problem
        return np.asarray(int(value), target)
    try:
        array = converted(np.asarray(float(value), np.float64), dtype)
    except OverflowError:
        raise problem from None
    if math.isfinite(value) and not np.isfinite(array.astype(np.complex128)):
        raise problem
    return array


@lru_cache(maxsize=4096)
def simplify_chain(source_dtype: str, chain: tuple[str, ...]) -> tuple[str, ...]:
    """Return the casts of a chain without those that cannot change any number."""
    dtypes = [source_dtype]
    for following in chain:
        while len(dtypes) > 1 and _is_transparent(dtypes[-2], dtypes[-1], following):
            dtypes.pop()
        if dtypes[-1] != following:
            dtypes.append(following)
    return tuple(dtypes[1:])


def _is_transparent(before: str, between: str, after: str) -> bool:
    """Return whether ``before -> between -> after`` equals ``before -> after`` for every number."""
    if before in _EXACT:
        if between not in _EXACT[before]:
            return False
        # A real number may become complex on the way, but it must not be made real again.
        return after in COMPLEX or (after in FLOATS and between in FLOATS)
    if before in ("complex128", *FLOATS):
        return False
    source, middle = dtype_of(before).numpy, dtype_of(between).numpy
    if middle.kind in "iu":
        return bool(np.can_cast(source, middle, "safe"))
    # Integers of at most 16 bits are exact in float32; wider ones may be rounded twice on the way.
    return middle.kind == "f" and middle.itemsize >= 4 and source.itemsize <= 2 and after in FLOATS


# Whole numbers up to this are floating-point numbers of the dtype: 2 to the number of significant bits.
_WHOLE = {
    "float8_e4m3fn": 2**4,
    "float8_e5m2": 2**3,
    "float16": 2**11,
    "bfloat16": 2**8,
    "float32": 2**24,
    "float64": 2**53,
    "complex64": 2**24,
    "complex128": 2**53,
}


def is_exact(before: str, after: str) -> bool:
    """Return whether every number of one dtype is a number of the other."""
    if before == after or after in _EXACT.get(before, ()):
        return True
    if before == "bool":
        return True
    if before in _EXACT or before in COMPLEX or after == "bool":
        return False
    limits = np.iinfo(dtype_of(before).numpy)
    if after in _WHOLE:
        return max(-limits.min, limits.max) <= _WHOLE[after]
    room = np.iinfo(dtype_of(after).numpy)
    return bool(room.min <= limits.min and limits.max <= room.max)
