"""Fitting: check, before any read, that the source of a target has its shape and dtype, or can be cast.

Tested in tests/load/test_policies.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.catalog.dtypes import castable, is_float
from paddle_flexckpt.optimizer_states import is_counter


@dataclass(frozen=True)
class Given:
    """The source of a target: its shape and dtype, its place and name for errors, and the remedy."""

    shape: tuple[int, ...]
    dtype: str
    text: str
    file: str | None = None
    remedy: str = "load into a model of the saved size, or leave this key out"


def fit(target: Catalog, row: int, given: Given, casts: bool) -> tuple[str, Problem | None]:
    """Return the cast from a source to its target, and the problem if they do not fit."""
    where: dict[str, Any] = {"key": target.key_name(row), "rank": int(target.rank[row]), "file": given.file}
    shape, dtype = target.unpadded(row, target.global_shape), target.dtype_name(row)
    if shape != given.shape:
        where.update(expected=f"{list(shape)} (target)", got=given.text.format(list(given.shape)))
        return "", Problem("global shapes differ", **where, remedy=given.remedy)
    if dtype == given.dtype:
        return "", None
    where.update(expected=f"{dtype} (target)", got=given.text.format(given.dtype))
    # Floats are a count only if there is a single one: a parameter may be called log_step.
    counts = is_counter(target.key_name(row)) and (prod(shape) == 1 or not is_float(given.dtype))
    if not castable(given.dtype, dtype) or (counts and not _is_exact(given.dtype, dtype)):
        remedy = "load into a target of the saved dtype"
        what = "a cast would lose what the values mean" if casts else "dtypes differ"
        return "", Problem(what, **where, remedy=remedy)
    if not casts:
        return "", Problem("dtypes differ", **where, remedy='load with dtype="cast" to convert the values')
    return f"{given.dtype} -> {dtype}", None


def _is_exact(before: str, after: str) -> bool:
    from paddle_flexckpt.aoa.casts import is_exact  # with the compiler, which most loads do not need

    return is_exact(before, after)


def are_alike(target: Catalog, rows: np.ndarray, source: Catalog, stored: np.ndarray) -> np.ndarray:
    """Return bool per pair of a target and a stored row: whether they have the same global shape and dtype."""
    if not len(rows):
        return np.zeros(0, dtype=bool)
    width = max(target.width, source.width)
    shape, whole = source.widened(width).global_shape[stored], target.widened(width).global_shape[rows]
    names = {name: i for i, name in enumerate(source.dtypes)}
    dtype = np.asarray([names.get(name, -1) for name in target.dtypes], dtype=np.int64)[target.dtype[rows]]
    same = (shape == whole).all(axis=1) & (source.ndim[stored] == target.ndim[rows])
    return same & (source.dtype[stored] == dtype)


def are_ruled(catalog: Catalog) -> np.ndarray:
    """Return bool per key: whether the tensor is fused by a rule."""
    ruled = np.asarray([*(order.axis is not None for order in catalog.orders), False])
    return ruled[catalog.key_order] if len(catalog.key_order) else np.zeros(len(catalog.keys), dtype=bool)
