"""The partition of each key of a manifest, and the manifest's description of its partitions.

A manifest of many rows has none of them itself. It lists *partitions*: files each of which has all rows of some keys,
so that a reader of few keys reads few files. The key's name alone determines its partition.

Tested in tests/native/test_partition_files.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

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


def to_arrays(partitions: Sequence[Partition]) -> dict[str, np.ndarray]:
    """Return the columns of a manifest that describe its partitions."""
    low = (1 << 64) - 1
    names = json.dumps([each.file for each in partitions], ensure_ascii=False)
    digests = [[each.digest >> 64, each.digest & low] for each in partitions]
    columns = {name: np.asarray([getattr(each, name) for each in partitions], dtype=np.int64) for name in _COUNTS}
    columns["files"] = np.frombuffer(names.encode(), dtype=np.uint8)
    columns["digest"] = np.asarray(digests, dtype=np.uint64)
    return {f"{_PREFIX}{name}": column for name, column in columns.items()}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[Partition, ...]:
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
