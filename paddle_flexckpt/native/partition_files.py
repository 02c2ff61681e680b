"""Encode, decode and read the files of a manifest's partitions.

A partition is a container like a manifest, without the data files, which the manifest lists once for all partitions. A
row's data file is that of the rank that wrote the row. The manifest has size and digest of every partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem, concat
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.native.checksums import Checksums
from paddle_flexckpt.native.manifest import (
    CATALOG,
    DECODING_ERRORS,
    PARTITIONED,
    Manifest,
    catalog_of,
    checksums_of,
    encode_container,
    read_container,
)
from paddle_flexckpt.native.partitions import Partition, check_columns, partition_of

_FILES = (f"{CATALOG}file", f"{CATALOG}files")
_REMEDY = "restore the file from a copy, rebuild the manifest with repair_manifest(overwrite=True), or load another one"
_MAX_REPORTED = 300


def split_rows(manifest: Manifest, count: int) -> Iterator[tuple[int, Manifest]]:
    """Yield the rows of each of ``count`` partitions, with its number; those without rows too."""
    number = partition_of(manifest.catalog.keys, count)[manifest.catalog.key]
    order = np.argsort(number, kind="stable")
    edges = np.searchsorted(number[order], np.arange(count + 1)).tolist()
    for each, (first, last) in enumerate(zip(edges, edges[1:])):
        yield each, manifest.take(order[first:last])


def encode_partition(rows: Manifest, number: int, count: int) -> bytes:
    """Return the bytes of partition ``number`` of ``count``.

    Raises:
        ValueError: A row belongs to another partition, or is not in its rank's data file: readers would miss it.
    """
    catalog = rows.catalog
    if len(catalog) and (partition_of(catalog.keys, count) != number).any():
        raise ValueError(f"there are keys that are not of partition {number} of {count}")
    # There may be a hundred thousand files: only those with these rows are looked up.
    files = catalog.files
    pairs = np.unique(catalog.rank.astype(np.int64) * len(files) + catalog.file).tolist()
    if any(files[pair % len(files)].partition("_")[0] != str(pair // len(files)) for pair in pairs):
        raise ValueError(f"there are rows of partition {number} that are not in the data file of their rank")
    arrays = replace(rows, catalog=replace(catalog, files=())).to_arrays()
    arrays = {name: array for name, array in arrays.items() if name not in _FILES}
    info = rows.describe() | {"format_version": PARTITIONED}
    info |= {"partition": str(number), "partitions": str(count)}
    return encode_container(arrays, info)


def describe_partition(file: str, data: bytes, rows: Manifest) -> Partition:
    """Return the manifest's description of a partition file with these bytes."""
    digest = xxhash.xxh3_128_intdigest(data)
    return Partition(file, digest, len(data), len(rows.catalog), len(rows.catalog.keys), rows.data_bytes)


def decode_partition(data: bytes, file: str, manifest: Manifest, number: int) -> Manifest:
    """Return the rows of a partition of a manifest; ``file`` is its path, for errors.

    Raises:
        CorruptCheckpointError: The bytes are not those that the manifest describes.
    """
    expected, count = manifest.partitions[number], len(manifest.partitions)
    got = xxhash.xxh3_128_intdigest(data)
    if (len(data), got) != (expected.nbytes, expected.digest):
        raise CorruptCheckpointError(
            f"{file} is damaged, or of another save: expected {expected.nbytes} bytes with xxh3 "
            f"{expected.digest:032x}, got {len(data)} bytes with xxh3 {got:032x}. Remedy (FC306): {_REMEDY}"
        )
    info, arrays = read_container(data, file)
    try:
        found = info["save_token"], info["format_version"], int(info["partition"]), int(info["partitions"])
        expected_info = manifest.save_token, PARTITIONED, number, count
        if found != expected_info:
            raise ValueError(f"expected {expected_info}, got {found}")
        no_files = {"files": np.frombuffer(b"[]", dtype=np.uint8), "file": arrays[f"{CATALOG}rank"]}
        catalog = catalog_of(arrays | {f"{CATALOG}{name}": array for name, array in no_files.items()})
        files = manifest.catalog.files
        catalog = replace(catalog, files=files, file=manifest.files_of_ranks(catalog.rank))
        check_columns(catalog, manifest.file_bytes)
        if (len(catalog), len(catalog.keys), len(set(catalog.keys))) != (expected.rows, expected.keys, expected.keys):
            raise ValueError(f"expected {expected.rows} rows and {expected.keys} keys")
        if len(catalog.keys) and (partition_of(catalog.keys, count) != number).any():
            raise ValueError("there are keys of other partitions")
        return replace(manifest, catalog=catalog, checksums=checksums_of(arrays, info, catalog))
    except DECODING_ERRORS as error:
        raise CorruptCheckpointError(
            f"{file} is not a usable partition of a manifest: {repr(error)[:_MAX_REPORTED]}. Remedy (FC306): {_REMEDY}"
        ) from error


def read_partition(backend: Backend, manifest: Manifest, number: int) -> Manifest:
    """Read the rows of one partition.

    Raises:
        CorruptCheckpointError: The file is missing, or not the one that the manifest describes.
        OSError: It cannot be read.
    """
    expected = manifest.partitions[number]
    file = backend.where(expected.file)
    try:
        data = backend.read(expected.file)
    except FileNotFoundError as error:
        raise _missing(backend, expected) from error
    return decode_partition(data, file, manifest, number)


def check_partition(backend: Backend, partition: Partition) -> None:
    """Check that a partition file exists and has its size; nothing of it is read.

    Raises:
        CorruptCheckpointError: It is not.
    """
    try:
        with backend.open(partition.file) as file:
            size = file.size
    except FileNotFoundError as error:
        raise _missing(backend, partition) from error
    if size != partition.nbytes:
        raise CorruptCheckpointError(
            f"{backend.where(partition.file)} is damaged: expected {partition.nbytes} bytes, got {size}. "
            f"Remedy (FC306): {_REMEDY}"
        )


def _missing(backend: Backend, partition: Partition) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{backend.where(partition.file)} is missing: expected a partition of the manifest of {partition.rows} rows, "
        f"got no such file. Remedy (FC306): {_REMEDY}"
    )


def read_rows(backend: Backend, manifest: Manifest, keys: Sequence[str] | None = None) -> Manifest:
    """Return a manifest with the rows of some keys (None: of all), and perhaps of others; errors as of one partition.

    A manifest that has all rows itself is returned as it is.
    """
    if not manifest.partitions:
        return manifest
    count = len(manifest.partitions)
    wanted = range(count) if keys is None else np.unique(partition_of(keys, count)).tolist()
    read = map_files(backend, lambda number: read_partition(backend, manifest, number), wanted)
    return merge_rows(manifest, read)


def merge_rows(manifest: Manifest, read: Sequence[Manifest]) -> Manifest:
    """Return a manifest with rows of its partitions, in their order."""
    if not read:
        return manifest
    values = np.concatenate([each.checksums.values for each in read])
    catalog, block_bytes = concat([each.catalog for each in read]), read[0].checksums.block_bytes
    return replace(manifest, catalog=catalog, checksums=Checksums.of_items(values, catalog.byte_length, block_bytes))


def partition_problems(backend: Backend, manifest: Manifest) -> list[Problem]:
    """Return what is wrong with each partition of a manifest."""

    def problem(number: int) -> Problem | None:
        try:
            read_partition(backend, manifest, number)
        except (CorruptCheckpointError, OSError) as error:
            return Problem(
                without_remedy(error),
                file=backend.where(manifest.partitions[number].file),
                code="FC306",
                remedy=_REMEDY,
            )
        return None

    return [each for each in map_files(backend, problem, range(len(manifest.partitions))) if each is not None]
