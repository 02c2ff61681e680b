"""Find in DCP's ``.metadata`` the tensor, file and stretch of each chunk, as columns.

Records that were read in runs stay columns: they are joined, sorted and checked together. A file that is not as torch
writes it is read record by record instead: this slower way finds the problem, and the fast way is tested against it.

Tested in tests/foreign/test_torch_records.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.algebra.rows import lexsort_packed
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, CorruptCheckpointError, Problem, ValidationError, concat
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.torch_records import ChunkColumns, IndexColumns, PlaceColumns, RecordTables
from paddle_flexckpt.foreign.torch_values import (
    DCP_METADATA,
    DCP_METADATA_ONE_BY_ONE,
    BytesEntry,
    Chunk,
    DcpMetadata,
    ItemPlace,
    TensorEntry,
)
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
    found = read_in_columns(data, where)
    return read_one_by_one(data, where) if found is None else found


def read_in_columns(data: bytes, where: str) -> PlacedChunks | None:
    """Do what :func:`read_one_by_one` does, in a fraction of the time; None if that is needed to find the problem."""
    try:
        metadata = load_pickle(data, where, DCP_METADATA)
    except CorruptCheckpointError:
        return None
    if type(metadata) is not DcpMetadata or metadata.mcore_data:
        return None
    return _Join(metadata).placed()


def read_one_by_one(data: bytes, where: str) -> PlacedChunks:
    """Read chunks record by record; arguments and errors of :func:`read_chunks`."""
    metadata = load_pickle(data, where, DCP_METADATA_ONE_BY_ONE)
    if type(metadata) is not DcpMetadata:
        raise CorruptCheckpointError(f"{where} has no metadata in it. Remedy: restore it")
    items = _items_by_file(metadata, where)
    tables, lengths = list[Catalog](), list[int]()
    for name, of_file in items.items():
        of_file.sort(key=lambda item: item.begin)
        builder = CatalogBuilder(rank_of(name), name)
        for item in of_file:
            builder.add(item.key, item.entry.dtype, item.entry.size, item.offset, item.shape)
        begins = np.asarray([item.begin for item in of_file], dtype=np.int64)
        tables.append(replace(builder.build(), byte_offset=begins))
        lengths += [item.length for item in of_file]
    return PlacedChunks(concat(tables), np.asarray(lengths, dtype=np.int64), _others(metadata))


def rank_of(name: str) -> int:
    """Return the rank that wrote a file, by its name."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else 0


def _others(metadata: DcpMetadata) -> tuple[str, ...]:
    return tuple(key for key, entry in metadata.state_dict_metadata.items() if type(entry) is BytesEntry)


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
        if isinstance(chunk, Chunk)
    }
    items: dict[str, list[_Item]] = {}
    problems: list[Problem | str] = []
    found = 0
    places: Mapping[Any, Any] = metadata.storage_data
    for index, place in places.items():
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


class _Column:
    """A column of numbers, which come one by one and in arrays."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._single: list[int] = []

    def add(self, number: int) -> None:
        self._single.append(number)

    def extend(self, numbers: np.ndarray) -> None:
        self._flush()
        self._arrays.append(numbers)

    def _flush(self) -> None:
        if self._single:
            self._arrays.append(np.asarray(self._single, dtype=np.int64))
            self._single = []

    def whole(self) -> np.ndarray:
        self._flush()
        return np.concatenate([*self._arrays, np.zeros(0, dtype=np.int64)])


class _Join:
    """A join of the chunks of tensors with their places."""

    def __init__(self, metadata: DcpMetadata) -> None:
        self._metadata = metadata
        columns = (index for index in metadata.storage_data if type(index) is IndexColumns)
        chunks = (
            chunk
            for entry in metadata.state_dict_metadata.values()
            if type(entry) is TensorEntry
            for chunk in entry.chunks
            if type(chunk) is ChunkColumns
        )
        known = next(columns, None) or next(chunks, None)
        self._tables = known.tables if known is not None else RecordTables()
        self._keys: list[str] = []
        self._entries: list[TensorEntry] = []
        for key, entry in metadata.state_dict_metadata.items():
            if type(entry) is TensorEntry:
                self._keys.append(key)
                self._entries.append(entry)

    def placed(self) -> PlacedChunks | None:
        """Return all of them; None if there is a problem."""
        of_chunk, offset_of_chunk, size = self._chunks()
        read = self._places()
        if read is None:
            return None
        key, offset, file, begin, length, files = read
        flat = self._tables.flat_sizes()
        axes = np.asarray([len(entry.size) for entry in self._entries], dtype=np.int64)
        agree = flat[offset_of_chunk] == axes[of_chunk]
        if not len(key) or not (agree & (flat[size] == axes[of_chunk])).all() or (flat[offset] != axes[key]).any():
            return None
        used = np.zeros(len(axes), dtype=bool)
        used[key] = True
        if not {self._entries[number].dtype for number in np.flatnonzero(used).tolist()} <= DTYPES.keys():
            return None
        width = max(1, int(axes.max()))
        offsets = _padded(flat, offset, axes[key], width, 0)
        source = _match(
            np.concatenate([of_chunk, key]),
            np.concatenate([_padded(flat, offset_of_chunk, axes[of_chunk], width, 0), offsets]),
            len(of_chunk),
        )
        if source is None:
            return None
        order = np.lexsort((begin, file))
        shapes = _padded(flat, size[source], axes[key], width, 1)
        return PlacedChunks(
            self._catalog(key[order], axes, offsets[order], shapes[order], file[order], begin[order], files),
            length[order],
            _others(self._metadata),
        )

    def _chunks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each chunk, the number of its tensor, and those of its offset and size."""
        key, offset, size = _Column(), _Column(), _Column()
        for number, entry in enumerate(self._entries):
            for chunk in entry.chunks:
                if isinstance(chunk, ChunkColumns):
                    key.extend(np.full(len(chunk.offsets), number, dtype=np.int64))
                    offset.extend(chunk.offsets)
                    size.extend(chunk.sizes)
                else:
                    key.add(number)
                    offset.add(self._tables.size(chunk.offsets))
                    size.add(self._tables.size(chunk.sizes))
        return key.whole(), offset.whole(), size.whole()

    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[str]] | None:
        """Return, for each place, the numbers of its tensor, offset and file, and its stretch; and the files.

        None: a place does not belong to a tensor's chunk, its chunk is transformed, or its file's name is invalid.
        """
        numbers = {key: number for number, key in enumerate(self._keys)}
        numbers.update(dict.fromkeys(_others(self._metadata), -1))  # left out
        key, offset, file, begin, length = (_Column() for _ in range(5))
        texts = self._tables.texts
        of_texts = np.asarray([numbers.get(text, -2) for text in texts], dtype=np.int64)
        for index, place in self._metadata.storage_data.items():
            if isinstance(index, IndexColumns) and isinstance(place, PlaceColumns):
                key.extend(of_texts[index.text])
                offset.extend(index.offset)
                file.extend(place.file)
                begin.extend(place.begin)
                length.extend(place.length)
            elif isinstance(index, IndexColumns) or not isinstance(place, ItemPlace) or place.transform_descriptors:
                return None
            else:
                key.add(numbers.get(index.fqn, -2))
                offset.add(-1 if index.offset is None else self._tables.size(index.offset))
                file.add(self._tables.numbers[place.relative_path.encode()])
                begin.add(place.offset)
                length.add(place.length)
        of_key = key.whole()
        rows = np.flatnonzero(of_key != -1)
        of_key, of_offset, of_file = of_key[rows], offset.whole()[rows], file.whole()[rows]
        if (of_key < 0).any() or (of_offset < 0).any():
            return None
        used, of_file = _in_order(of_file)
        files = [texts[number] for number in used.tolist()]
        try:
            for name in files:
                check_file_name(name)
        except ValueError:
            return None
        return of_key, of_offset, of_file, begin.whole()[rows], length.whole()[rows], files

    def _catalog(
        self,
        key: np.ndarray,
        axes: np.ndarray,
        offset: np.ndarray,
        shape: np.ndarray,
        file: np.ndarray,
        begin: np.ndarray,
        files: Sequence[str],
    ) -> Catalog:
        """Return the rows; keys and types have the numbers that a builder would assign."""
        used, number = _in_order(key)
        entries = [self._entries[each] for each in used.tolist()]
        names = list(dict.fromkeys(entry.dtype for entry in entries))
        whole = np.ones((len(entries), offset.shape[1]), dtype=np.int64)
        for row, entry in enumerate(entries):
            whole[row, whole.shape[1] - len(entry.size) :] = entry.size
        dtypes = np.asarray([names.index(entry.dtype) for entry in entries], dtype=np.int16)
        nothing = np.full(len(key), NOT_FLATTENED, dtype=np.int64)
        return Catalog(
            keys=tuple(self._keys[each] for each in used.tolist()),
            dtypes=tuple(names),
            files=tuple(files),
            key=number.astype(np.int32),
            dtype=dtypes[number],
            ndim=axes[key].astype(np.int16),
            global_shape=whole[number],
            offset=offset,
            shape=shape,
            flat_start=nothing,
            flat_stop=nothing.copy(),
            rank=np.asarray([rank_of(name) for name in files], dtype=np.int32)[file],
            file=file.astype(np.int32),
            byte_offset=begin,
        )


def _in_order(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct numbers in the order of their first occurrence, and the place of each there."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(order)]
    first = order[is_first]
    by_place = np.argsort(first)
    place = np.empty(len(first), dtype=np.int64)
    place[by_place] = np.arange(len(first))
    found = np.empty(len(order), dtype=np.int64)
    found[order] = place[np.cumsum(is_first) - 1]
    return numbers[first[by_place]], found


def _padded(flat: np.ndarray, begin: np.ndarray, axes: np.ndarray, width: int, fill: int) -> np.ndarray:
    """Return sizes as int64 ``[n, width]``, padded on the left."""
    out = np.full((len(begin), width), fill, dtype=np.int64)
    for axis in range(width):
        rows = np.flatnonzero(axes > axis)
        out[rows, width - 1 - axis] = flat[begin[rows] + axes[rows] - axis]
    return out


def _match(key: np.ndarray, offset: np.ndarray, chunks: int) -> np.ndarray | None:
    """Return, for each place, the chunk with the same key and offset, the last of several; chunks come first.

    None: a place or a chunk has no partner, or two places have the same chunk.
    """
    columns = [key, *offset.T]
    order = lexsort_packed(columns, len(key))
    first = np.zeros(len(key), dtype=bool)
    first[0] = True
    for column in columns:
        ordered = column[order]
        first[1:] |= ordered[1:] != ordered[:-1]
    last = np.append(first[1:], True)
    ends = np.flatnonzero(last)
    if len(ends) != len(key) - chunks or first[ends].any():
        return None
    place, chunk = order[ends], order[ends - 1]
    if (place < chunks).any() or (chunk >= chunks).any():
        return None
    found = np.empty(len(key) - chunks, dtype=np.int64)
    found[place - chunks] = chunk
    return found
