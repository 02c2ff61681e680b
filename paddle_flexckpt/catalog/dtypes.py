"""Element types: one table from Paddle's names to numpy and to safetensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from paddle_flexckpt.catalog.errors import OverflowingCastError, ValidationError
from paddle_flexckpt.catalog.texts import meant


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: Paddle's name for it, e.g. ``"bfloat16"``.
        numpy: The numpy type with the same bytes and meaning (ml_dtypes supplies those that numpy lacks).
        safetensors: Its code in a safetensors header.
        trailing: Extra trailing extent in a safetensors header: complex128 has no code there and is stored as pairs
            of F64.
    """

    name: str
    numpy: np.dtype
    safetensors: str
    trailing: int = 1

    @property
    def itemsize(self) -> int:
        """Return bytes per element."""
        return self.numpy.itemsize


# Codes: https://github.com/huggingface/safetensors (enum Dtype); names: paddle.dtype.
_TABLE = (
    DType("bool", np.dtype(np.bool_), "BOOL"),
    DType("uint8", np.dtype(np.uint8), "U8"),
    DType("int8", np.dtype(np.int8), "I8"),
    DType("uint16", np.dtype(np.uint16), "U16"),
    DType("int16", np.dtype(np.int16), "I16"),
    DType("uint32", np.dtype(np.uint32), "U32"),
    DType("int32", np.dtype(np.int32), "I32"),
    DType("uint64", np.dtype(np.uint64), "U64"),
    DType("int64", np.dtype(np.int64), "I64"),
    DType("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3"),
    DType("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2), "F8_E5M2"),
    DType("float16", np.dtype(np.float16), "F16"),
    DType("bfloat16", np.dtype(ml_dtypes.bfloat16), "BF16"),
    DType("float32", np.dtype(np.float32), "F32"),
    DType("float64", np.dtype(np.float64), "F64"),
    DType("complex64", np.dtype(np.complex64), "C64"),
    DType("complex128", np.dtype(np.complex128), "F64", trailing=2),
)
DTYPES = MappingProxyType({dtype.name: dtype for dtype in _TABLE})
# Types of files alone, such as the exponents of scales: neither numpy nor Paddle has them, and their bytes are kept.
BYTES = tuple(
    DType(name, np.dtype(np.uint8), code)
    for name, code in (
        ("float8_e8m0fnu", "F8_E8M0"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    )
)
_ALL = {dtype.name: dtype for dtype in (*_TABLE, *BYTES)}
# By their codes in headers of safetensors files; complex128 has none of its own.
CODES = MappingProxyType({dtype.safetensors: dtype for dtype in _ALL.values() if dtype.trailing == 1})
_FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})
_COMPLEX = frozenset({"complex64", "complex128"})
_BY_FLOAT32 = frozenset({"float8_e4m3fn", "float8_e5m2", "bfloat16"})


@functools.lru_cache(maxsize=256)
def dtype_of(name: str) -> DType:
    """Return the element type of that name.

    Args:
        name: Paddle's name, with or without ``"paddle."`` in front; numpy's names are the same.

    Raises:
        ValidationError: The name is not known.
    """
    dtype = _ALL.get(name.rsplit(".", 1)[-1])
    if dtype is None:
        near = meant(name, DTYPES, 0.5) if name not in ("float", "float8") else ""
        raise ValidationError([f"dtype {name!r} is not supported{near}; supported are {', '.join(DTYPES)}"])
    return dtype


def is_float(name: str) -> bool:
    """Return whether an element type, by its name, is a floating-point type, and not a complex one."""
    return name in _FLOATS


def plain_integer(value: Any) -> Any:
    """Return an integer of numpy as Python's own; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def check_integer(name: str, value: object, least: int = 0) -> None:
    """Raise ValidationError where an argument is not an integer of Python, or too small."""
    if type(value) is not int or value < least:
        got = " ".join(repr(value).split())
        raise ValidationError([f"{name} has to be an integer >= {least}; got {got}. Remedy (FC101): give an int"])


def castable(source: str, target: str) -> bool:
    """Return whether a load may cast: floats and complex numbers among themselves, integers to wider or floating types.

    Nothing becomes a bool, and types of files alone are bytes.
    """
    if not {source, target} <= DTYPES.keys():
        return dtype_of(source).numpy == dtype_of(target).numpy
    if source in _FLOATS:
        return target in _FLOATS or target in _COMPLEX
    if source in _COMPLEX:
        return target in _COMPLEX
    if target in _FLOATS or target in _COMPLEX:
        return True
    return np.can_cast(dtype_of(source).numpy, dtype_of(target).numpy, "safe")


def assign(target: np.ndarray, values: np.ndarray, row: int = -1) -> None:
    """Assign values to an array, cast to its element type.

    Args:
        target: The array.
        values: Of its shape.
        row: Number of the row that is filled, for the error; -1 if there is none.

    Raises:
        OverflowingCastError: Numbers are too large for the type; the target has been written.
    """
    if values.dtype == target.dtype or target.dtype.name not in _FLOATS | _COMPLEX:
        target[...] = values
        return
    # numpy reports a signalling NaN that is cast or compared; it stays NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = rounded_to_odd(values, target.dtype)
        check_range(values, target, row)


def check_range(values: np.ndarray, cast: np.ndarray, row: int = -1) -> None:
    """Raise OverflowingCastError if the cast made finite numbers infinite, or infinity NaN."""
    if not _is_narrower(values.dtype, cast.dtype) or np.isfinite(cast).all():
        return
    pair = f"a cast from {values.dtype.name} to {cast.dtype.name} met"
    where = f"of {cast.size} that are cast at a time"
    lost = np.isfinite(values) & ~np.isfinite(cast)
    if lost.any():
        raise OverflowingCastError(
            f"{pair} {np.count_nonzero(lost)} finite numbers, {where}, which are too large, such as {values[lost][0]}; "
            f"targets are partly overwritten. Remedy (FC206): take {values.dtype.name} or another dtype with its "
            "range, or scale the values first",
            row,
        )
    lost = np.isinf(values) & np.isnan(cast)
    if lost.any():
        raise OverflowingCastError(
            f"{pair} infinity {np.count_nonzero(lost)} times, {where}, which that dtype lacks; targets are partly "
            f"overwritten. Remedy (FC206): take {values.dtype.name} or another dtype that has infinity",
            row,
        )


def rounded_to_odd(values: np.ndarray, target: np.dtype) -> np.ndarray:
    """Round numbers to odd float32, so that a later cast from float32 gives what one rounding would give.

    Casts to the types of ml_dtypes go through float32, and so would round twice. So float64 and wide integers are
    rounded to odd first: an inexact number becomes the one of its two neighbours in float32 whose last bit is 1.
    """
    if target.name not in _BY_FLOAT32 or values.dtype.kind not in "iuf" or values.dtype.itemsize < 4:
        return values
    if values.dtype == np.float32:
        return values
    if values.dtype.itemsize == 8 and values.dtype.kind in "iu":
        # float64 is exact up to 2 ** 53. Beyond, the last 11 bits are reduced to one: whether any of them is set.
        rest, wide = values & 2047, (values >= 1 << 53) | (values <= -(1 << 53) if values.dtype.kind == "i" else False)
        values = np.where(wide & (rest != 0), (values - rest) | 2048, values)
    exact = values.astype(np.float64)
    near = exact.astype(np.float32)
    wide, bits = near.astype(np.float64), np.atleast_1d(near).view(np.int32)
    # An inexact number with an even last bit moves to its odd neighbour on the other side of the exact value.
    inexact = np.atleast_1d((wide != exact) & ~np.isnan(exact)) & (bits & 1 == 0)
    outward = np.atleast_1d(np.abs(wide) < np.abs(exact))
    # A number that became 0 kept its sign in the bits: bits of magnitude count upwards for both signs.
    moved = np.where(inexact, bits + np.where(outward, 1, -1).astype(np.int32), bits)
    return moved.astype(np.int32).view(np.float32).reshape(exact.shape)


@functools.lru_cache(maxsize=1024)
def _is_narrower(source: np.dtype, target: np.dtype) -> bool:
    """Return whether a floating-point or complex type's largest number is smaller than another type's."""
    return target.name in _FLOATS | _COMPLEX and _largest(source) > _largest(target)


def _largest(dtype: np.dtype) -> float:
    if dtype.kind == "b":
        return 1
    return int(np.iinfo(dtype).max) if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).max)
