"""Encode and decode manifests: safetensors containers with the columns of a checkpoint's catalog.

A rank's *part* has the same form and has the rows of that rank's data file; the manifest is the parts, one after the
other. It has a checksum of its own, so that a flipped bit in it cannot send a reader to wrong bytes. The rows of a very
large one are in :mod:`partitions <paddle_flexckpt.native.partitions>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import xxhash
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError, ValidationError, concat, dtype_of
from paddle_flexckpt.catalog.dtypes import CODES
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.catalog.texts import printable
from paddle_flexckpt.media.backend import InputFile
from paddle_flexckpt.media.file_names import check_file_name
from paddle_flexckpt.native.checksums import ALGORITHM, BLOCK_BYTES, Checksums
from paddle_flexckpt.native.partitions import Partition, check_columns, partitions_from_arrays, partitions_to_arrays
from paddle_flexckpt.native.safetensors_header import header_bytes, parse_header, read_header

# Version 2 has tensors whose elements lie part by part: a reader of version 1 would assume natural order.
FORMAT_VERSIONS = ("1", "2", "3")
FORMAT_VERSION = int(FORMAT_VERSIONS[-1])
PARTITIONED = FORMAT_VERSIONS[-1]
# Errors that decoding a container with unexpected contents may raise.
DECODING_ERRORS = (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)
# It describes some 20 columns, however many items there are.
_MAX_HEADER_BYTES = 1 << 16
# A reader allocates memory for some blocks; the writer's blocks have 1 MiB.
_MAX_BLOCK_BYTES = 1 << 26
_MAX_REPORTED = 300
_CREATOR = "paddle_flexckpt"
CATALOG = "catalog."
_NARROW = tuple((np.dtype(each), int(np.iinfo(each).max)) for each in (np.int8, np.int16, np.int32))
_TYPES = {code: dtype.numpy for code, dtype in CODES.items()}

NATIVE = "native"


@dataclass(frozen=True)
class SaveInfo:
    """The save that files belong to. :class:`Manifest` describes the attributes."""

    save_token: str
    unique_id: int
    world_size: int
    step: int | None = None

    def texts(self) -> dict[str, str]:
        """Return the numbers as a file has them; ValueError if one could not be read again."""
        numbers: dict[str, object] = {"unique_id": self.unique_id, "world_size": self.world_size}
        numbers |= {} if self.step is None else {"step": self.step}
        for name, value in numbers.items():
            if type(value) is not int:
                raise ValueError(f"{name} of a manifest is an int; got {value!r}")
        return {name: str(value) for name, value in numbers.items()}


@dataclass(frozen=True, eq=False)
class Manifest:
    """The description of a checkpoint, or of one rank's part of it.

    Attributes:
        catalog: One row per stored item; ``byte_offset`` counts from the start of the file.
        checksums: Block checksums of the items.
        file_bytes: int64 ``[number of files]``, size of each file.
        save_token: Random text that is also in the header of every data file of this save.
        unique_id: The checkpoint's id in its directory.
        world_size: Number of ranks that took part in the save.
        step: Training step, if the caller gave one.
        origin: The format of the files: ``"native"``, or that of another program. Another program's have no
            checksums, and a digest for a save token; they may be in a directory right below the checkpoint's.
        nodes: Where nodes share no storage: by name of a node, the data files and parity files that it has.
        partitions: Where the rows are in files of their own: these. The catalog and the checksums have the rows of
            those that have been read, and the catalog's table of files has all files.
        partial: A text that names the data files without which a repair has rebuilt the manifest; "" if it is whole.
        progress: Of another program's, by key of an optimizer's moment: the steps that it has taken, and its betas.
    """

    catalog: Catalog
    checksums: Checksums
    file_bytes: np.ndarray
    save_token: str
    unique_id: int
    world_size: int
    step: int | None = None
    origin: str = NATIVE
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    partial: str = ""
    progress: Mapping[str, tuple[float, tuple[float, ...]]] = field(default_factory=dict)

    @classmethod
    def of_save(
        cls,
        info: SaveInfo,
        catalog: Catalog,
        checksums: np.ndarray | Sequence[int],
        sizes: Mapping[str, int],
        block_bytes: int = BLOCK_BYTES,
    ) -> Manifest:
        """Make the manifest of data files: their items, the checksums of these in order, and the files' sizes."""
        values = Checksums.of_items(np.asarray(checksums, dtype=np.uint64), catalog.byte_length, block_bytes)
        file_bytes = np.asarray([sizes[name] for name in catalog.files], dtype=np.int64)
        return cls(catalog, values, file_bytes, info.save_token, info.unique_id, info.world_size, info.step)

    @classmethod
    def of_foreign(
        cls, origin: str, catalog: Catalog, sizes: Mapping[str, int], digest: str, unique_id: int, world_size: int
    ) -> Manifest:
        """Make the manifest of another program's files; ranks compare the digest of their descriptions."""
        file_bytes = np.asarray([sizes[name] for name in catalog.files], dtype=np.int64)
        return cls(catalog, Checksums.none(len(catalog)), file_bytes, digest, unique_id, world_size, origin=origin)

    @classmethod
    def of_partitions(cls, info: SaveInfo, sizes: Mapping[str, int], partitions: Sequence[Partition]) -> Manifest:
        """Make a manifest whose rows are in partitions; ``sizes`` has all data files, by name."""
        catalog = replace(concat([]), files=tuple(sizes))
        return replace(cls.of_save(info, catalog, (), sizes), partitions=tuple(partitions))

    @property
    def info(self) -> SaveInfo:
        """Return the save of the manifest."""
        return SaveInfo(self.save_token, self.unique_id, self.world_size, self.step)

    def nodes_of(self, file: str) -> list[str]:
        """Return the nodes that have a data file; none where all ranks shared one directory."""
        return [node for node, files in self.nodes.items() if file in files]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the data files by name."""
        return dict(zip(self.catalog.files, self.file_bytes.tolist()))

    @property
    def files(self) -> list[str]:
        """Return the names of all files of the checkpoint, except the manifest's own."""
        return [*self.catalog.files, *(each.file for each in self.partitions), *self.parity_files]

    @cached_property
    def parity_files(self) -> frozenset[str]:
        """Return the names of the parity files."""
        return frozenset(name for files in self.nodes.values() for name in files if name.endswith(".parity"))

    @cached_property
    def _ranks(self) -> tuple[np.ndarray, np.ndarray]:
        owner = np.asarray([int(name.partition("_")[0]) for name in self.catalog.files], dtype=np.int64)
        order = np.argsort(owner, kind="stable").astype(np.int32)
        return owner[order], order

    def files_of_ranks(self, ranks: np.ndarray) -> np.ndarray:
        """Return int32 per rank, the number of its data file: the one whose name begins with the rank.

        Raises:
            ValueError: A rank has none.
        """
        owner, order = self._ranks
        place = np.searchsorted(owner, ranks)
        if len(ranks) and (place.max() >= len(owner) or (owner[place] != ranks).any()):
            raise ValueError("there are rows of a rank without a data file")
        return order[place]

    @property
    def has_rows(self) -> bool:
        """Return whether all rows have been read."""
        return len(self.catalog) == self.rows

    @property
    def rows(self) -> int:
        """Return the number of rows, read or not."""
        return sum(each.rows for each in self.partitions) or len(self.catalog)

    @property
    def key_count(self) -> int:
        """Return the number of keys, whether their rows have been read or not."""
        return sum(each.keys for each in self.partitions) or len(np.unique(self.catalog.key))

    @property
    def data_bytes(self) -> int:
        """Return the bytes of all shards, whether their rows have been read or not."""
        return sum(each.data_bytes for each in self.partitions) or int(self.catalog.byte_length.sum())

    def take(self, rows: np.ndarray) -> Manifest:
        """Return the manifest of some rows, by their numbers, with the names that they use and all files."""
        return replace(self, catalog=self.catalog.take(rows).compact(), checksums=self.checksums.take(rows))

    @property
    def foreign(self) -> bool:
        """Return whether the files are another program's."""
        return self.origin != NATIVE

    @property
    def format_version(self) -> str:
        """Return the oldest version whose readers understand all of the manifest."""
        return PARTITIONED if self.partitions else format_version(self.catalog)

    def encode(self) -> bytes:
        """Return the container's bytes; without rows if these are in partitions."""
        kept = self
        if self.partitions:
            kept = replace(self.of_partitions(self.info, self.sizes, self.partitions), nodes=self.nodes)
        arrays = kept.to_arrays()
        arrays["file_bytes"] = self.file_bytes.astype(np.int64)
        arrays.update(partitions_to_arrays(self.partitions) if self.partitions else {})
        if self.nodes:
            # Not in the header, which is small.
            arrays["nodes"] = np.frombuffer(json.dumps(self.nodes).encode(), dtype=np.uint8)
        info = self.describe() | self.info.texts()
        if self.partial:
            info["partial"] = self.partial
        info["digest"] = _digest(arrays, info)
        return encode_container(arrays, info)

    def describe(self) -> dict[str, str]:
        """Return the fields of every container's ``__metadata__``."""
        return {
            "format": "flexckpt",
            "format_version": self.format_version,
            "creator": _CREATOR,
            "save_token": self.save_token,
            "checksum": ALGORITHM,
            "block_bytes": str(self.checksums.block_bytes),
        }

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the rows as the arrays of a container."""
        arrays = {f"{CATALOG}{name}": _narrow(array) for name, array in self.catalog.to_arrays().items()}
        return {**arrays, "checksums": self.checksums.values}

    @classmethod
    def decode(cls, data: bytes, file: str) -> Manifest:
        """Read a container's bytes; ``file`` is its name, for errors.

        Raises:
            CorruptCheckpointError: The bytes are not a manifest, or have been changed.
            ValidationError: The manifest is of a newer format version.
        """
        try:
            return cls._decode(data, file)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{without_remedy(error)}. Remedy (FC306): restore the file from a copy, rebuild it with "
                "repair_manifest(overwrite=True), or load another checkpoint"
            ) from error

    @classmethod
    def _decode(cls, data: bytes, file: str) -> Manifest:
        info, arrays = read_container(data, file)
        version = info["format_version"]
        digest = info.pop("digest", None)
        if version not in FORMAT_VERSIONS:
            # A changed digit of the version must not send the user to look for a newer library. So the content is
            # checked with one of this library's versions in its place.
            if all(digest != _digest(arrays, info | {"format_version": known}) for known in FORMAT_VERSIONS):
                raise ValidationError(
                    f"{file} has format version {version!r}; this library reads versions "
                    f"{', '.join(FORMAT_VERSIONS[:-1])} and {FORMAT_VERSIONS[-1]}. Remedy (FC307): update "
                    "paddle-flexckpt"
                )
            digest = None
        if digest is None or digest != _digest(arrays, info):
            raise CorruptCheckpointError(f"{file} is damaged: its content has not the checksum it was written with")
        return cls._from_arrays(arrays, info, file)

    @classmethod
    def _from_arrays(cls, arrays: dict[str, np.ndarray], info: dict[str, str], file: str) -> Manifest:
        try:
            catalog = catalog_of(arrays)
            for name in catalog.files:
                check_file_name(name)
            check_columns(catalog, arrays["file_bytes"])
            partitions = partitions_from_arrays(arrays)
            if bool(partitions) != (info["format_version"] == PARTITIONED) or (partitions and len(catalog)):
                raise ValueError(f"version {info['format_version']}, {len(catalog)} rows, {len(partitions)} partitions")
            return cls(
                catalog=catalog,
                checksums=checksums_of(arrays, info, catalog),
                file_bytes=arrays["file_bytes"],
                save_token=info["save_token"],
                unique_id=int(info["unique_id"]),
                world_size=int(info["world_size"]),
                step=int(info["step"]) if "step" in info else None,
                nodes=_decode_nodes(arrays.get("nodes")),
                partitions=partitions,
                partial=printable(info.get("partial", "")),
            )
        except DECODING_ERRORS as error:
            raise CorruptCheckpointError(f"{file} is not a usable manifest: {repr(error)[:_MAX_REPORTED]}") from error


def encode_container(arrays: dict[str, np.ndarray], info: Mapping[str, str]) -> bytes:
    """Return the bytes of a container, the same each time: safetensors itself has ``__metadata__`` in any order."""
    data = safetensors_numpy.save(arrays, metadata=dict(info))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def read_container(data: bytes, file: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return ``__metadata__`` and arrays of a container of this library.

    Raises:
        CorruptCheckpointError: The bytes are not a container.
    """
    try:
        length = header_bytes(data[:8], len(data), file, _MAX_HEADER_BYTES)
        tensors, metadata, _ = parse_header(data[8 : 8 + length], len(data), file)
        info = dict(metadata)
        arrays = {
            name: np.frombuffer(data[each.begin : each.end], dtype=_TYPES[each.code]).reshape(each.shape)
            for name, each in tensors.items()
        }
    except CorruptCheckpointError:
        raise  # its text has the problem of the file, and the remedy
    except (ValueError, KeyError) as error:
        raise CorruptCheckpointError(f"{file} is damaged or not a manifest: {error}") from error
    if info.get("format") != "flexckpt" or "format_version" not in info:
        got = info.get("format")
        raise CorruptCheckpointError(f"{file} is damaged or not a manifest of this library (format {got!r})")
    return info, arrays


def catalog_of(arrays: Mapping[str, np.ndarray]) -> Catalog:
    """Return the catalog of a container's arrays; raise one of :data:`DECODING_ERRORS` if they have none."""
    catalog = Catalog.from_arrays(
        {name[len(CATALOG) :]: array for name, array in arrays.items() if name.startswith(CATALOG)}
    )
    for name in catalog.dtypes:
        dtype_of(name)
    return catalog


def checksums_of(arrays: Mapping[str, np.ndarray], info: Mapping[str, str], catalog: Catalog) -> Checksums:
    """Return the checksums of a container; raise one of :data:`DECODING_ERRORS` if they are not the catalog's."""
    if info["checksum"] != ALGORITHM:
        raise ValueError(f"unknown checksum algorithm {info['checksum']!r}")
    block_bytes = int(info["block_bytes"])
    if not 1 <= block_bytes <= _MAX_BLOCK_BYTES:
        raise ValueError(f"blocks of {block_bytes} bytes")
    return Checksums.of_items(arrays["checksums"], catalog.byte_length, block_bytes)


def _decode_nodes(column: np.ndarray | None) -> dict[str, tuple[str, ...]]:
    """Decode the files by node; ValueError, TypeError or AttributeError if they are malformed."""
    if column is None:
        return {}
    nodes = {str(node): tuple(files) for node, files in json.loads(column.tobytes()).items()}
    for files in nodes.values():
        for name in files:
            check_file_name(name)
    return nodes


def format_version(catalog: Catalog) -> str:
    """Return the oldest format version whose readers understand all of a catalog."""
    used = np.unique(catalog.key_order[catalog.key]).tolist() if len(catalog.key_order) else []
    return FORMAT_VERSIONS[any(number >= 0 and catalog.orders[number].is_permuted for number in used)]


def read_save_token(file: InputFile, name: str) -> str:
    """Read the save token of a manifest, of which only the header is read; CorruptCheckpointError if it has none."""
    token = read_header(file, name).metadata.get("save_token")
    if token is None:
        raise CorruptCheckpointError(f"{name} is damaged or not a manifest: it has no save token")
    return token


def merge_parts(parts: Sequence[Manifest]) -> Manifest:
    """Merge the parts of ranks, in rank order, into the manifest of a checkpoint.

    Raises:
        ValidationError: There is no part, or the parts come from different saves.
    """
    tokens = sorted({part.save_token for part in parts})
    if len(tokens) != 1:
        raise ValidationError(f"parts of different saves cannot be merged: tokens {tokens}")
    catalog = concat([part.catalog for part in parts])
    values = np.concatenate([part.checksums.values for part in parts])
    sizes = {name: size for part in parts for name, size in part.sizes.items()}
    return Manifest.of_save(parts[0].info, catalog, values, sizes, parts[0].checksums.block_bytes)


def _narrow(column: np.ndarray) -> np.ndarray:
    """Return a column in the smallest integer type that holds its values: most offsets and extents are small."""
    if column.dtype == np.uint8:
        return column
    low, high = int(column.min(initial=0)), int(column.max(initial=0))
    for dtype, most in _NARROW:
        if -most - 1 <= low and high <= most:
            return np.ascontiguousarray(column, dtype=dtype)
    return np.ascontiguousarray(column, dtype=np.int64)


def _digest(arrays: dict[str, np.ndarray], info: dict[str, str]) -> str:
    hasher = xxhash.xxh3_128(json.dumps(info, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        hasher.update(f"{name} {array.dtype.str} {array.shape};".encode())
        hasher.update(array.reshape(-1).view(np.uint8))
    return hasher.hexdigest()
