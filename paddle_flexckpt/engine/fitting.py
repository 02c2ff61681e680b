"""Fitting: whether what a target would be filled from has its shape and dtype, or can be cast, before anything is read.

Tested in tests/live/test_policies.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, dtype_of

_FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})
_COMPLEX = frozenset({"complex64", "complex128"})


@dataclass(frozen=True)
class Given:
    """What a target would be filled from: its shape and dtype, where it is, how to name it, and what to change."""

    shape: tuple[int, ...]
    dtype: str
    text: str
    file: str | None = None
    remedy: str = "load into a model of the saved size, or leave this key out"


def fit(target: Catalog, row: int, given: Given, casts: bool) -> tuple[str, Problem | None]:
    """Return how values are cast on the way from what is given to a target, and why they cannot get there."""
    where: dict[str, Any] = {"key": target.key_name(row), "rank": int(target.rank[row]), "file": given.file}
    shape, dtype = target.unpadded(row, target.global_shape), target.dtype_name(row)
    if shape != given.shape:
        got = given.text.format(list(given.shape))
        problem = Problem(
            "global shapes differ", **where, expected=f"{list(shape)} (target)", got=got, remedy=given.remedy
        )
        return "", problem
    if dtype == given.dtype:
        return "", None
    where.update(expected=f"{dtype} (target)", got=given.text.format(given.dtype))
    if not casts:
        return "", Problem("dtypes differ", **where, remedy='load with dtype="cast" to convert the values')
    if not _castable(given.dtype, dtype):
        remedy = "load into a target of the saved dtype"
        return "", Problem("a cast would lose what the values mean", **where, remedy=remedy)
    return f"{given.dtype} -> {dtype}", None


def _castable(source: str, target: str) -> bool:
    """Floats and complex numbers among themselves, integers to anything wider or floating; nothing to bool."""
    if source in _FLOATS:
        return target in _FLOATS or target in _COMPLEX
    if source in _COMPLEX:
        return target in _COMPLEX
    if target in _FLOATS or target in _COMPLEX:
        return True
    return np.can_cast(dtype_of(source).numpy, dtype_of(target).numpy, "safe")
