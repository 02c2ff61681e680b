"""Read checkpoints of torch.distributed.checkpoint (``.metadata``, ``.distcp``) without torch, not unpickled.

``.metadata`` has each tensor's chunks and the stretch of a file where each chunk is. Such a stretch is a zip archive of
``torch.save``: ``data.pkl`` has the strides, and the member ``data/0`` is the plain elements. So each chunk is a shard
that is read by byte ranges, which torch itself does not do. A chunk that is not in row-major order is several shards.

Tested in tests/foreign/test_torch_dcp.py and tests/foreign/test_dcp_chunks.py.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from paddle_flexckpt.algebra.rows import lexsort_packed
from paddle_flexckpt.catalog import (
    Catalog,
    CatalogBuilder,
    CorruptCheckpointError,
    Problem,
    ValidationError,
    concat,
    group_replicas,
    validate_coverage,
    validate_shards,
)
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.formats import ForeignCheckpoint, Listing, Reader
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.strided_boxes import MOST_BOXES, BoxBudget, boxes_of, count_boxes, row_major
from paddle_flexckpt.foreign.torch_archive import (
    DCP_METADATA,
    DCP_TENSOR,
    BytesEntry,
    DcpMetadata,
    SavedTensor,
    TensorEntry,
    open_archive,
    place_elements,
)
from paddle_flexckpt.foreign.zip_directory import Layout, Read, damaged
from paddle_flexckpt.media.backend import Backend, InputFile, map_files
from paddle_flexckpt.media.file_names import check_file_name
from paddle_flexckpt.native.manifest import Manifest

logger = logging.getLogger("paddle_flexckpt")

DCP_METADATA_FILE = ".metadata"
_MOST_PICKLE_BYTES = 1 << 16
# The bytes read at once of an archive's beginning: all of it except the elements, as torch writes it.
_HEAD_BYTES = 1024
# The most layouts of archives that chunks are compared with.
_MOST_LAYOUTS = 256
_DATA = re.compile(r"__(\d{1,9})_\d+\.distcp", re.ASCII)
_UNMADE = "load it in torch and save it by torch.distributed.checkpoint without that"


class _StoredChunk(NamedTuple):
    """A chunk of a tensor.

    Attributes:
        key: The tensor's name.
        dtype: The name of its element type.
        shape: The chunk's shape.
        begin: The first byte of the chunk's archive in the file.
        length: The number of bytes of the archive.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    length: int


class _Located(NamedTuple):
    """A chunk's place.

    Attributes:
        begin: The first byte of its elements in its archive.
        strides: Its strides, in elements.
        is_one: Whether it is one box.
        layout: The layout of its archive, if that was asked for.
    """

    begin: int
    strides: tuple[int, ...]
    is_one: bool
    layout: Layout | None


# Known archives of any file, by type, shape and bytes of their contents.
_Layouts = dict[tuple[str, tuple[int, ...], int], _Located]


def read_dcp_manifest(backend: Backend) -> Manifest:
    """Read a checkpoint of DCP as a manifest without checksums; the log names values that are not tensors.

    Raises:
        CorruptCheckpointError: A file is damaged, missing, or not what the metadata says; UnsafePickleError where a
            pickle is more than data.
        ValidationError: It cannot be read as it is: its chunks are transformed (compressed), or of a type that no
            catalog has. The text says what to do.
    """
    where = backend.where(DCP_METADATA_FILE)
    data = backend.read(DCP_METADATA_FILE)
    chunks = read_chunks(data, where)
    if chunks.others:
        logger.info("%s: left out, as they are no tensors: %s", where, listed(chunks.others))
    placed, files = chunks.catalog, chunks.catalog.files
    if not len(placed):
        raise ValidationError(f"{where} has no tensors in it. Remedy (FC301): correct the path")
    ends, known = np.searchsorted(placed.file, np.arange(len(files) + 1)), _Layouts()

    def read(number: int) -> tuple[Catalog, int]:
        rows = np.arange(ends[number], ends[number + 1])
        return _read_file(backend, files[number], placed.take(rows), chunks.lengths[rows], known)

    found = map_files(backend, read, range(len(files)))
    catalog = concat([each for each, _ in found])
    problems = validate_shards(catalog) or validate_coverage(catalog, group_replicas(catalog)).problems
    if problems:
        raise CorruptCheckpointError(str(ValidationError(problems, f"{where} contradicts itself or lacks chunks")))
    sizes = {name: size for name, (_, size) in zip(files, found)}
    size = 1 + max(catalog.rank.tolist(), default=0)
    return Manifest.of_foreign("torch_dcp", catalog, sizes, xxhash.xxh3_128_hexdigest(data), 0, size)


def _read_file(
    backend: Backend, name: str, chunks: Catalog, lengths: np.ndarray, known: _Layouts
) -> tuple[Catalog, int]:
    """Locate the elements of a file's chunks, given their archives; return their catalog and the file's size."""
    path = backend.where(name)
    try:
        opened = backend.open(name)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path} is missing; the metadata names it. Remedy (FC304): restore the file or load another checkpoint"
        ) from error
    with opened as file:
        mapped = file.memory_map()
        try:
            locator = _Locator(path, file, mapped, chunks, lengths, known)
            for rows in _group_by_form(chunks, lengths) if mapped is not None else [np.arange(len(chunks))]:
                locator.locate(rows)
        finally:
            if mapped is not None:
                mapped.close()
        return locator.catalog(name), file.size


def _group_by_form(chunks: Catalog, lengths: np.ndarray) -> list[np.ndarray]:
    """Return the rows of chunks with equal type, shape and archive length, which are mostly saved in one way."""
    columns = [chunks.dtype, chunks.ndim, *chunks.shape.T, lengths]
    order = lexsort_packed([column.astype(np.int64) for column in columns], len(chunks))
    changed = np.zeros(len(chunks), dtype=bool)
    for column in columns:
        changed[1:] |= column[order][1:] != column[order][:-1]
    return np.split(order, np.flatnonzero(changed))


class _Locator:
    """A search for the elements of a file's chunks."""

    def __init__(
        self,
        path: str,
        file: InputFile,
        mapped: mmap.mmap | None,
        chunks: Catalog,
        lengths: np.ndarray,
        known: _Layouts,
    ) -> None:
        self._layouts = known
        self._path, self._file, self._mapped, self._chunks, self._lengths = path, file, mapped, chunks, lengths
        self._places = chunks.byte_offset.copy()
        # Rows that are several boxes, and these boxes: key, type, whole shape, offset, shape, place.
        self._cut = np.zeros(len(chunks), dtype=bool)
        self._boxes: list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = []
        self._budget = BoxBudget()
        self._pickles: dict[bytes, Any] = {}

    def locate(self, rows: np.ndarray) -> None:
        """Find the elements of some chunks: together, if the file is mapped. Errors name the first invalid one."""
        begins, lengths = self._chunks.byte_offset[rows], self._lengths[rows]
        outside = np.flatnonzero(begins + lengths > self._file.size)
        count = int(outside[0]) if len(outside) else len(rows)
        first: _Located | None = None
        same = np.zeros(count, dtype=bool)
        if count and self._mapped is not None:
            item, layouts = self._item(int(rows[0])), self._layouts
            form = (item.dtype, item.shape, item.length)
            first = layouts.get(form)
            if first is None and len(layouts) < _MOST_LAYOUTS:
                first = layouts[form] = self._locate(int(rows[0]), with_layout=True)
            if first is not None and first.layout is not None:
                same = first.layout.match_at(self._mapped, begins[:count])
        if first is not None and first.is_one:
            self._places[rows[:count][same]] += first.begin
            rest = np.flatnonzero(~same).tolist()
        else:
            rest = list(range(count))
        for number in rest:
            row = int(rows[number])
            found = first if first is not None and same[number] else self._locate(row)
            if found.is_one:
                self._places[row] += found.begin
            else:
                self._add_boxes(row, found)
        if count < len(rows):
            raise damaged(self._where(int(rows[count])), f"the file has {self._file.size} bytes")

    def _item(self, row: int) -> _StoredChunk:
        table = self._chunks
        shape, begin = table.unpadded(row, table.shape), int(table.byte_offset[row])
        return _StoredChunk(table.key_name(row), table.dtype_name(row), shape, begin, int(self._lengths[row]))

    def _where(self, row: int) -> str:
        item = self._item(row)
        return f"{self._path}, bytes {item.begin} to {item.begin + item.length} (key {item.key[:80]!r})"

    def _locate(self, row: int, with_layout: bool = False) -> _Located:
        item, where = self._item(row), self._where(row)
        read = _reader(self._mapped, self._file.read, item)
        return _find_in_archive(read, item, self._pickles, where, with_layout)

    def _add_boxes(self, row: int, found: _Located) -> None:
        """Add the boxes of a chunk that is not in row-major order."""
        table, item = self._chunks, self._item(row)
        if not self._budget.allows(item.shape, found.strides):
            what = f"chunks not in row-major order of more than {MOST_BOXES} pieces in all are not read"
            remedy = "make the tensor contiguous, and save it in torch"
            raise ValidationError(
                Problem(what, item.key, file=self._path, got=list(found.strides), code="FC701", remedy=remedy)
            )
        itemsize = DTYPES[item.dtype].itemsize
        first, whole = table.unpadded(row, table.offset), table.unpadded(row, table.global_shape)
        self._cut[row] = True
        for box in boxes_of(item.shape, found.strides):
            offset = tuple(a + b for a, b in zip(first, box.offset))
            place = item.begin + found.begin + box.begin * itemsize
            self._boxes.append((item.key, item.dtype, whole, offset, box.shape, place))

    def catalog(self, name: str) -> Catalog:
        """Return the rows, in the order of their bytes."""
        table = replace(self._chunks, byte_offset=self._places)
        if not self._boxes:
            return table
        keys, dtypes, wholes, offsets, shapes, places = (list(column) for column in zip(*self._boxes))
        builder = CatalogBuilder(rank_of(name), name)
        builder.add_many(keys, dtypes, wholes, offsets, shapes, [None] * len(keys), [None] * len(keys))
        boxes = replace(builder.build(), byte_offset=np.asarray(places, dtype=np.int64))
        table = concat([table.take(~self._cut), boxes])
        return table.take(np.argsort(table.byte_offset, kind="stable"))


def _reader(mapped: mmap.mmap | None, read: Callable[[int, int], bytes], item: _StoredChunk) -> Read:
    """Return a function that reads from an item; without a memory map its two ends are read once."""

    def piece(offset: int, length: int) -> bytes:
        length = max(0, min(length, item.length - offset))
        begin = item.begin + offset
        return mapped[begin : begin + length] if mapped is not None else read(begin, length)

    if mapped is not None:
        return piece
    head = piece(0, _HEAD_BYTES)

    def cached(offset: int, length: int) -> bytes:
        return head[offset : offset + length] if offset + length <= len(head) else piece(offset, length)

    return cached


def _find_in_archive(
    read: Read, item: _StoredChunk, pickles: dict[bytes, Any], where: str, with_layout: bool
) -> _Located:
    """Return the place of a chunk's first element in its archive, and its strides; ``pickles`` has those already read.

    ``with_layout``: return the layout too.
    """
    archive = open_archive(read, item.length, where, DCP_TENSOR, _MOST_PICKLE_BYTES, pickles)
    tensor = archive.value
    if type(tensor) is not SavedTensor:
        raise damaged(where, "data.pkl has no tensor in it")
    if (tensor.dtype, tensor.size) != (item.dtype, item.shape):
        expected, got = f"{item.dtype} {list(item.shape)}", f"{tensor.dtype} {list(tensor.size)}"
        raise damaged(where, f"a chunk is not what the metadata says: expected {expected}, got {got}")
    begin, member = place_elements(read, archive, tensor, where)
    strides = row_major(tensor.size) if 0 in tensor.size else tensor.stride
    layout = Layout(read, item.length, where, [*archive.texts, member], archive.texts) if with_layout else None
    return _Located(begin, strides, count_boxes(item.shape, strides) == 1, layout)


class PlacedChunks(NamedTuple):
    """The places of chunks' archives, file by file and in the order of their bytes.

    Attributes:
        catalog: A row for each chunk; ``byte_offset`` is where its archive begins, not its elements.
        lengths: int64 ``[n]``, bytes of the archives.
        others: Keys that are no tensors.
    """

    catalog: Catalog
    lengths: np.ndarray
    others: tuple[str, ...]


def read_chunks(data: bytes, where: str) -> PlacedChunks:
    """Parse the chunks from the bytes of ``.metadata``. ``where`` is its path, for errors.

    Raises:
        CorruptCheckpointError: It is damaged, or contradicts itself; UnsafePickleError if it is more than data.
        ValidationError: Chunks are transformed (compressed), or of a type that no catalog has.
    """
    metadata = load_pickle(data, where, DCP_METADATA)
    if type(metadata) is not DcpMetadata:
        raise CorruptCheckpointError(f"{where} has no metadata in it. Remedy (FC305): restore it")
    items = _items_by_file(metadata, where)
    others = tuple(key for key, entry in metadata.state_dict_metadata.items() if type(entry) is BytesEntry)
    tables, lengths = list[Catalog](), list[int]()
    for name, of_file in items.items():
        of_file.sort(key=lambda item: item.begin)
        builder = CatalogBuilder(rank_of(name), name)
        for item in of_file:
            builder.add(item.key, item.entry.dtype, item.entry.size, item.offset, item.shape)
        begins = np.asarray([item.begin for item in of_file], dtype=np.int64)
        tables.append(replace(builder.build(), byte_offset=begins))
        lengths += [item.length for item in of_file]
    return PlacedChunks(concat(tables), np.asarray(lengths, dtype=np.int64), others)


def rank_of(name: str) -> int:
    """Return the rank that wrote a file, by its name."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else 0


class _StoredItem(NamedTuple):
    """A chunk: its tensor's name and entry, where it begins and its shape, and its stretch of the file."""

    key: str
    entry: TensorEntry
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    length: int


def _items_by_file(metadata: DcpMetadata, where: str) -> dict[str, list[_StoredItem]]:
    """Return the chunks of each file."""
    if metadata.mcore_data:
        raise ValidationError(
            f"{where}: Megatron-Core has stored {listed(sorted(metadata.mcore_data))} in another shape than they have "
            "(mcore_data), which is not read here. Remedy (FC701): save fully_reshardable optimizer states, or weights "
            "alone"
        )
    entries = metadata.state_dict_metadata
    shapes = {
        (key, chunk.offsets): chunk.sizes
        for key, entry in entries.items()
        if type(entry) is TensorEntry
        for chunk in entry.chunks
    }
    items: dict[str, list[_StoredItem]] = {}
    problems: list[Problem | str] = []
    found = 0
    for index, place in metadata.storage_data.items():
        entry = entries.get(index.fqn)
        if isinstance(entry, BytesEntry):
            continue
        shape = None if index.offset is None else shapes.get((index.fqn, index.offset))
        if not isinstance(entry, TensorEntry) or shape is None:
            problems.append(Problem("the metadata has a chunk of no tensor", index.fqn, file=where, got=index.offset))
            continue
        found += 1
        if place.transform_descriptors:
            what = f"chunks have been transformed ({', '.join(place.transform_descriptors)[:80]}), which is not read"
            raise ValidationError(Problem(what, index.fqn, file=where, code="FC701", remedy=_UNMADE))
        if entry.dtype not in DTYPES:
            what, remedy = "an element type is not supported", "cast the tensor, and save it in torch"
            raise ValidationError(
                Problem(
                    what,
                    index.fqn,
                    file=where,
                    expected=", ".join(DTYPES),
                    got=entry.dtype,
                    code="FC701",
                    remedy=remedy,
                )
            )
        of_file = items.setdefault(place.relative_path, [])
        of_file.append(_StoredItem(index.fqn, entry, index.offset or (), shape, place.offset, place.length))
    if found != len(shapes):
        problems.append(f"the metadata describes {len(shapes)} chunks and places {found}")
    for name in items:
        try:
            check_file_name(name)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise CorruptCheckpointError(
            str(ValidationError(problems, f"{where} is damaged")) + ". Remedy (FC305): restore it"
        )
    return items


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    found = DCP_METADATA_FILE in listing.names
    return ForeignCheckpoint("torch_dcp", partial(read_dcp_manifest, listing.backend)) if found else None


TORCH_DCP = Reader(_detect)
