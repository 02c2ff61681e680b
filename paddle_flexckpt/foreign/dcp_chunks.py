"""Find in DCP's ``.metadata`` the tensor, file and stretch of each chunk.

Tested in tests/foreign/test_dcp_chunks.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, CorruptCheckpointError, Problem, ValidationError, concat
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.torch_values import DCP_METADATA, BytesEntry, DcpMetadata, TensorEntry
from paddle_flexckpt.media.file_names import check_file_name

_DATA = re.compile(r"__(\d{1,9})_\d+\.distcp", re.ASCII)
_UNMADE = "load it in torch and save it by torch.distributed.checkpoint without that"


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
    """Read the chunks of ``.metadata``, whose text this is; ``where`` names it in errors.

    Raises:
        CorruptCheckpointError: It is damaged, or contradicts itself; UnsafePickleError if it is more than data.
        ValidationError: Chunks are transformed (compressed), or of a type that no catalog has.
    """
    metadata = load_pickle(data, where, DCP_METADATA)
    if type(metadata) is not DcpMetadata:
        raise CorruptCheckpointError(f"{where} has no metadata in it. Remedy: restore it")
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


class _Item(NamedTuple):
    """A chunk: its tensor's name and entry, where it begins and its shape, and its stretch of the file."""

    key: str
    entry: TensorEntry
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    length: int


def _items_by_file(metadata: DcpMetadata, where: str) -> dict[str, list[_Item]]:
    """Return the chunks of each file."""
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
    if problems:
        raise CorruptCheckpointError(str(ValidationError(problems, f"{where} is damaged")) + ". Remedy: restore it")
    return items
