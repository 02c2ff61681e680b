"""Check that the columns of a stored catalog fit together. Tested in tests/native/test_manifest.py."""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog import Catalog

# Numpy's own limit.
_MAX_AXES = 64
_FLAT_COLUMNS = ("key", "dtype", "ndim", "flat_start", "flat_stop", "rank", "file", "byte_offset")


def check_columns(catalog: Catalog, file_bytes: np.ndarray) -> None:
    """Check that columns index their tables and that every item lies in its file.

    Raises:
        ValueError: They do not.
    """
    count = len(catalog)
    wide = (catalog.global_shape, catalog.offset, catalog.shape)
    if any(getattr(catalog, name).shape != (count,) for name in _FLAT_COLUMNS):
        raise ValueError("a column has another shape than [n]")
    if any(column.ndim != 2 or column.shape != wide[0].shape for column in wide) or len(wide[0]) != count:
        raise ValueError("the columns of boxes differ in shape")
    if not 1 <= wide[0].shape[1] <= _MAX_AXES:
        raise ValueError(f"tensors of {wide[0].shape[1]} axes")
    for name, table in (("key", catalog.keys), ("dtype", catalog.dtypes), ("file", catalog.files)):
        column = getattr(catalog, name)
        if count and not (column.min() >= 0 and column.max() < len(table)):
            raise ValueError(f"column {name} points beyond its table")
    if file_bytes.shape != (len(catalog.files),) or (count and (min(map(np.min, wide), default=0) < 0)):
        raise ValueError("a file without a size, or a negative extent or offset")
    # In floating point: products of extents that no tensor has must not wrap around.
    if count and float(catalog.shape.astype(np.float64).prod(axis=1).max()) >= float(1 << 62):
        raise ValueError("a shard has more elements than a file can have bytes")
    if count and not ((catalog.ndim >= 0) & (catalog.ndim <= wide[0].shape[1])).all():
        raise ValueError("a tensor has more axes than its columns")
    for number, order in enumerate(catalog.orders if count else ()):
        rows = np.flatnonzero(catalog.key_order[catalog.key] == number)
        if order.axis is None or not len(rows):
            continue
        if order.axis >= catalog.ndim[rows].min():
            raise ValueError("an order along an axis that a tensor does not have")
        extent = catalog.global_shape[rows, wide[0].shape[1] - catalog.ndim[rows] + order.axis]
        if (extent % (order.parts or 1)).any():
            raise ValueError("an order in parts that are not equal")
    begin, length = catalog.byte_offset, catalog.byte_length
    if count and not ((begin >= 0) & (length >= 0) & (length <= file_bytes[catalog.file] - begin)).all():
        raise ValueError("a shard lies outside its file")
