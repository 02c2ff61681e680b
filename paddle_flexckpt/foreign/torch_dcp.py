"""Read checkpoints of torch.distributed.checkpoint (``.metadata``, ``.distcp``) without torch, not unpickled.

``.metadata`` has each tensor's chunks and the stretch of a file where each chunk is. Such a stretch is a zip archive of
``torch.save``: ``data.pkl`` tells the strides, and the member ``data/0`` is the elements as they are. So each chunk is
a shard that is read by byte ranges, which torch itself does not do. A chunk that is not in row-major order is several.

Tested in tests/foreign/test_torch_dcp.py.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import xxhash

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
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.strided_boxes import MOST_BOXES, BoxBudget, boxes_of, count_boxes, row_major
from paddle_flexckpt.foreign.torch_archive import open_archive, place_elements
from paddle_flexckpt.foreign.torch_values import (
    DCP_METADATA,
    DCP_TENSOR,
    BytesEntry,
    DcpMetadata,
    SavedTensor,
    TensorEntry,
)
from paddle_flexckpt.foreign.zip_directory import Layout, Read, damaged
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.media.file_names import check_file_name
from paddle_flexckpt.native.manifest import Manifest

logger = logging.getLogger("paddle_flexckpt")

DCP_METADATA_FILE = ".metadata"
_DATA = re.compile(r"__(\d{1,9})_\d+\.distcp", re.ASCII)
_MOST_PICKLE_BYTES = 1 << 16
# What is read at once of an archive's beginning: all of it but the elements, as torch writes it.
_HEAD_BYTES = 1024
# Layouts of archives that a file's chunks are compared with.
_MOST_LAYOUTS = 256
_UNMADE = "load it in torch and save it by torch.distributed.checkpoint without that"


class _Item(NamedTuple):
    """Describe a chunk: its tensor's name and entry, where it begins and its shape, and its stretch of the file."""

    key: str
    entry: TensorEntry
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    length: int


class _Located(NamedTuple):
    """Say where in its archive a chunk's first element is, its strides, whether it is one box, and its layout."""

    begin: int
    strides: tuple[int, ...]
    is_one: bool
    layout: Layout | None


def read_dcp_manifest(backend: Backend) -> Manifest:
    """Read a checkpoint of DCP as a manifest without checksums; what is no tensor is left out, and named in the log.

    Raises:
        CorruptCheckpointError: A file is damaged, missing, or not what the metadata says; UnsafePickleError where a
            pickle is more than data.
        ValidationError: It cannot be read as it is: its chunks are transformed (compressed), or of a type that no
            catalog has. The text says what to do.
    """
    where = backend.where(DCP_METADATA_FILE)
    data = backend.read(DCP_METADATA_FILE)
    metadata = load_pickle(data, where, DCP_METADATA)
    if type(metadata) is not DcpMetadata:
        raise CorruptCheckpointError(f"{where} has no metadata in it. Remedy: restore it")
    items = _items_by_file(metadata, where)
    others = [key for key, entry in metadata.state_dict_metadata.items() if type(entry) is BytesEntry]
    if others:
        logger.info("%s: left out, as they are no tensors: %s", where, listed(others))
    if not items:
        raise ValidationError(f"{where} has no tensors in it. Remedy: correct the path")
    read = map_files(backend, lambda name: _read_file(backend, name, items[name]), items)
    catalog = concat([each for each, _ in read])
    problems = validate_shards(catalog) or validate_coverage(catalog, group_replicas(catalog)).problems
    if problems:
        raise CorruptCheckpointError(str(ValidationError(problems, f"{where} contradicts itself or lacks chunks")))
    sizes = {name: size for name, (_, size) in zip(items, read)}
    size = 1 + max(catalog.rank.tolist(), default=0)
    return Manifest.of_foreign("torch_dcp", catalog, sizes, xxhash.xxh3_128_hexdigest(data), 0, size)


def _items_by_file(metadata: DcpMetadata, where: str) -> dict[str, list[_Item]]:
    """Return the chunks of each file, in the order of their bytes."""
    if metadata.mcore_data:
        raise ValidationError(
            f"{where}: Megatron-Core has stored {listed(sorted(metadata.mcore_data))} in another shape than they have "
            "(mcore_data), which is not read here. Remedy: save fully_reshardable optimizer states, or weights alone"
        )
    entries = metadata.state_dict_metadata
    shapes = {
        (key, chunk.offsets): chunk.sizes
        for key, entry in entries.items()
        if type(entry) is TensorEntry
        for chunk in entry.chunks
    }
    items: dict[str, list[_Item]] = {}
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
            raise ValidationError(Problem(what, index.fqn, file=where, remedy=_UNMADE))
        if entry.dtype not in DTYPES:
            what, remedy = "an element type is not supported", "cast the tensor, and save it in torch"
            raise ValidationError(
                Problem(what, index.fqn, file=where, expected=", ".join(DTYPES), got=entry.dtype, remedy=remedy)
            )
        of_file = items.setdefault(place.relative_path, [])
        of_file.append(_Item(index.fqn, entry, index.offset or (), shape, place.offset, place.length))
    if found != len(shapes):
        problems.append(f"the metadata describes {len(shapes)} chunks and places {found}")
    for name in items:
        try:
            check_file_name(name)
        except ValueError as error:
            problems.append(str(error))
        items[name].sort(key=lambda item: item.begin)
    if problems:
        raise CorruptCheckpointError(str(ValidationError(problems, f"{where} is damaged")) + ". Remedy: restore it")
    return items


def _read_file(backend: Backend, name: str, items: Sequence[_Item]) -> tuple[Catalog, int]:
    """Locate the chunks of a file; return their catalog and the file's size."""
    path = backend.where(name)
    match = _DATA.fullmatch(name)
    builder = CatalogBuilder(int(match[1]) if match else 0, name)
    rows: list[tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]] = []
    places: list[int] = []
    budget = BoxBudget()
    pickles: dict[bytes, Any] = {}
    # Chunks of one shape are mostly saved in the same way, one after the other.
    layouts: dict[tuple[str, tuple[int, ...], int], _Located] = {}
    try:
        opened = backend.open(name)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path} is missing; the metadata names it. Remedy: restore the file or load another checkpoint"
        ) from error
    with opened as file:
        mapped = file.memory_map()
        try:
            for item in items:
                alike = (item.entry.dtype, item.shape, item.length)
                found = layouts.get(alike) if item.begin + item.length <= file.size else None
                if (
                    found is None
                    or found.layout is None
                    or mapped is None
                    or not found.layout.is_at(mapped, item.begin)
                ):
                    where = f"{path}, bytes {item.begin} to {item.begin + item.length} (key {item.key[:80]!r})"
                    if item.begin + item.length > file.size:
                        raise damaged(where, f"the file has {file.size} bytes")
                    again = found is None and len(layouts) < _MOST_LAYOUTS and mapped is not None
                    found = _locate(_reader(mapped, file.read, item), item, pickles, where, again)
                    if again:
                        layouts[alike] = found
                begin, strides = found.begin, found.strides
                if found.is_one:
                    rows.append((item.key, item.entry.dtype, item.entry.size, item.offset, item.shape))
                    places.append(item.begin + begin)
                    continue
                if not budget.allows(item.shape, strides):
                    what = f"chunks not in row-major order of more than {MOST_BOXES} pieces in all are not read"
                    remedy = "make the tensor contiguous, and save it in torch"
                    raise ValidationError(Problem(what, item.key, file=path, got=list(strides), remedy=remedy))
                itemsize = DTYPES[item.entry.dtype].itemsize
                for box in boxes_of(item.shape, strides):
                    offset = tuple(a + b for a, b in zip(item.offset, box.offset))
                    rows.append((item.key, item.entry.dtype, item.entry.size, offset, box.shape))
                    places.append(item.begin + begin + box.begin * itemsize)
        finally:
            if mapped is not None:
                mapped.close()
        size = file.size
    keys, dtypes, wholes, offsets, shapes = (list(column) for column in zip(*rows)) if rows else ([],) * 5
    builder.add_many(keys, dtypes, wholes, offsets, shapes, [None] * len(rows), [None] * len(rows))
    return replace(builder.build(), byte_offset=np.asarray(places, dtype=np.int64)), size


def _reader(mapped: mmap.mmap | None, read: Callable[[int, int], bytes], item: _Item) -> Read:
    """Return what reads from an item; without a memory map its two ends are read once."""

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


def _locate(read: Read, item: _Item, pickles: dict[bytes, Any], where: str, again: bool) -> _Located:
    """Return where in its archive a chunk's first element is, and its strides; ``pickles`` has what has been read.

    ``again``: the layout is wanted too.
    """
    archive = open_archive(read, item.length, where, DCP_TENSOR, _MOST_PICKLE_BYTES, pickles)
    tensor = archive.value
    if type(tensor) is not SavedTensor:
        raise damaged(where, "data.pkl has no tensor in it")
    if (tensor.dtype, tensor.size) != (item.entry.dtype, item.shape):
        expected, got = f"{item.entry.dtype} {list(item.shape)}", f"{tensor.dtype} {list(tensor.size)}"
        raise damaged(where, f"a chunk is not what the metadata says: expected {expected}, got {got}")
    begin, member = place_elements(read, archive, tensor, where)
    strides = row_major(tensor.size) if 0 in tensor.size else tensor.stride
    layout = Layout(read, item.length, where, [*archive.texts, member], archive.texts) if again else None
    return _Located(begin, strides, count_boxes(item.shape, strides) == 1, layout)
