"""The partition of each key of a manifest, and the manifest's description of its partitions.

A manifest of many rows has none of them itself. It lists *partitions*: files each of which has all rows of some keys,
so that a reader of few keys reads few files. The key's name alone determines its partition.

:func:`check_columns` checks the rows of a manifest or of a partition.

Tested in tests/native/test_partition_files.py and tests/native/test_manifest.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.table import EXTRA_STATE
from paddle_flexckpt.media.file_names import check_file_name

# A manifest of more rows than this is written in partitions of about so many rows: one is read in a millisecond or two.
MOST_ROWS_IN_ONE_FILE = 100_000
ROWS_PER_PARTITION = 4096

_PREFIX = "partitions."
_COUNTS = ("nbytes", "rows", "keys", "data_bytes")


@dataclass(frozen=True)
class Partition:
    """One partition file of a manifest.

    Attributes:
        file: Its name.
        digest: xxh3-128 of its bytes.
        nbytes: Its size.
        rows: The number of rows in it.
        keys: The number of keys that have these rows.
        data_bytes: Bytes of the shards that the rows describe.
    """

    file: str
    digest: int
    nbytes: int
    rows: int
    keys: int
    data_bytes: int


def count_partitions(rows: int) -> int:
    """Return how many partitions one process makes of a manifest of so many rows; 0: one file has all rows."""
    return 0 if rows <= MOST_ROWS_IN_ONE_FILE else partitions_for(rows)


def partitions_for(rows: int) -> int:
    """Return the number of partitions for so many rows where they have to be in partitions."""
    return max(1, -(-rows // ROWS_PER_PARTITION))


def partition_of(keys: Sequence[str], count: int) -> np.ndarray:
    """Return int64 per key, the number of its partition of ``count``: xxh3-64 of its name, modulo the count.

    All of a run's extra state is in the partition of its prefix, because it is read together.
    """
    names = (EXTRA_STATE if key.startswith(EXTRA_STATE) else key for key in keys)
    numbers = (xxhash.xxh3_64_intdigest(name.encode()) % count for name in names)
    return np.fromiter(numbers, dtype=np.int64, count=len(keys))


def partitions_to_arrays(partitions: Sequence[Partition]) -> dict[str, np.ndarray]:
    """Return the columns of a manifest that describe its partitions."""
    low = (1 << 64) - 1
    names = json.dumps([each.file for each in partitions], ensure_ascii=False)
    digests = [[each.digest >> 64, each.digest & low] for each in partitions]
    columns = {name: np.asarray([getattr(each, name) for each in partitions], dtype=np.int64) for name in _COUNTS}
    columns["files"] = np.frombuffer(names.encode(), dtype=np.uint8)
    columns["digest"] = np.asarray(digests, dtype=np.uint64)
    return {f"{_PREFIX}{name}": column for name, column in columns.items()}


def partitions_from_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[Partition, ...]:
    """Return the partitions that columns describe; none where there are no such columns.

    Raises:
        ValueError: The columns do not fit together, or a name leads out of the directory.
        KeyError: A column is not there.
    """
    if f"{_PREFIX}files" not in arrays:
        return ()
    names = json.loads(arrays[f"{_PREFIX}files"].tobytes())
    if not isinstance(names, list) or not names or not set(map(type, names)) <= {str}:
        raise ValueError("the partitions are not a list of names")
    columns = [arrays[f"{_PREFIX}{name}"] for name in _COUNTS]
    digest = arrays[f"{_PREFIX}digest"]
    if any(column.shape != (len(names),) for column in columns) or digest.shape != (len(names), 2):
        raise ValueError(f"{len(names)} partitions, and columns of {[len(each) for each in (*columns, digest)]}")
    if len(set(names)) != len(names) or any(int(column.min()) < 0 for column in columns):
        raise ValueError("two partitions in one file, or a negative count")
    for name in names:
        check_file_name(name)
    digests = [(high << 64) | low for high, low in digest.tolist()]
    return tuple(map(Partition, names, digests, *(column.tolist() for column in columns)))


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
