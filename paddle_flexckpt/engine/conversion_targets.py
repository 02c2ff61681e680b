"""Formats that a conversion can write: which files, what each of them holds, and how they become a checkpoint.

A format is a subclass of :class:`ConversionTarget` in :data:`TARGETS`. Tested in tests/engine/test_conversion.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import xxhash

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.algebra.flat import flat_range_to_boxes
from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import (
    EXTRA_STATE,
    Catalog,
    CatalogBuilder,
    CorruptCheckpointError,
    Order,
    ValidationError,
    concat,
    group_replicas,
    validate_coverage,
)
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.engine.models import layout_for
from paddle_flexckpt.engine.tensor_files import INDEX_FILE, divide, group, make_index, write_tensor_file
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.media.backend import Backend, InputFile, publish
from paddle_flexckpt.native.checksums import BLOCK_BYTES, hash_block
from paddle_flexckpt.native.data_file import check_data_file
from paddle_flexckpt.native.directory import SaveNames
from paddle_flexckpt.native.header import encode_header
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.partitions import count_partitions
from paddle_flexckpt.planning import plan_write
from paddle_flexckpt.planning.strategy import Strategy

# A header of 100 MB, the most that safetensors allows, has more than twice as many.
MOST_TENSORS = 100_000
_READ_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class Content:
    """Describe what a conversion writes, whatever the format is.

    Attributes:
        infos: Shape and dtype of each tensor by its name.
        orders: In which order the elements of tensors lie, as far as it is known.
        stored: The source's shards of tensors that are written as they are, by the same names.
        token: Hexadecimal digits that are the same for the same conversion, and for no other.
        step: Training step, if it is known.
        strategy: The layout; None: whole tensors.
        cuts: Which axis tensor parallelism cuts, as of :func:`~paddle_flexckpt.engine.models.model_of`.
        max_file_bytes: Bytes of tensors in one file, where they are whole.
    """

    infos: Mapping[str, TensorInfo]
    orders: Mapping[str, Order]
    stored: Catalog
    token: str
    step: int | None = None
    strategy: Strategy | None = None
    cuts: Sequence[tuple[str, int | None]] = ()
    max_file_bytes: int = 5 << 30


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """Describe a file of tensors.

    Attributes:
        name: Its name.
        parts: Name and box of what it holds, in the order of its data.
        data_bytes: Bytes of these.
    """

    name: str
    parts: Sequence[tuple[str, Box]]
    data_bytes: int


class ConversionTarget(ABC):
    """Write a checkpoint in one format, file by file.

    :meth:`begin`, then :meth:`write` for each file that :meth:`holds` does not find as it was written, then
    :meth:`commit`; a process may die at any point, and another one begins anew with the same content.

    Attributes:
        by_safetensors: Whether its files can hold only what safetensors itself knows.
        states: Whether optimizer states and extra state are written, unless the caller says otherwise.
        has_layout: Whether tensors may be cut.
        files: What is to be written.
        notes: What is taken for granted.
    """

    by_safetensors: ClassVar[bool] = True
    states: ClassVar[bool] = False
    has_layout: ClassVar[bool] = False
    files: list[PlannedFile]

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan the files; touch nothing.

        Raises:
            ValidationError: The format cannot hold the content.
        """
        self.sink, self.content = sink, content
        self.notes: list[str] = []

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files that may be there, from the first to the last moment."""

    def begin(self) -> None:  # noqa: B027
        """Write what has to be there before the first file of tensors; to do so again is fine."""

    @abstractmethod
    def write(self, number: int, data: Iterable[np.ndarray]) -> bytes:
        """Write a file, durably, and return what :meth:`holds` and :meth:`commit` need to know of it.

        Args:
            number: Which of ``files``.
            data: The elements of its parts in their order, in any number of arrays.
        """

    @abstractmethod
    def holds(self, number: int, record: bytes) -> bool:
        """Return whether a file is there, byte for byte as :meth:`write` has left it."""

    @abstractmethod
    def commit(self, records: Sequence[bytes]) -> None:
        """Make the checkpoint exist, with what :meth:`write` returned of all files; to do so again is fine."""


class HuggingFaceTarget(ConversionTarget):
    """Write whole tensors as safetensors files in the style of Hugging Face, the index last."""

    def __init__(self, sink: Backend, content: Content) -> None:
        """Divide tensors among files, as an export does."""
        super().__init__(sink, content)
        self._files = divide(content.infos, content.max_file_bytes)
        self.files = [
            PlannedFile(file.name, list(_whole({name: content.infos[name] for name in file.names})), file.data_bytes)
            for file in self._files
        ]

    def names(self) -> list[str]:
        """Implement the base class."""
        return [*(file.name for file in self.files), INDEX_FILE]

    def write(self, number: int, data: Iterable[np.ndarray]) -> bytes:
        """Implement the base class."""
        file = self._files[number]
        digest = write_tensor_file(self.sink, file, data)
        return json.dumps({"bytes": file.nbytes, "xxh3_128": digest}).encode()

    def holds(self, number: int, record: bytes) -> bool:
        """Implement the base class."""
        file = self._files[number]
        try:
            with self.sink.open(file.name) as found:
                said = {"bytes": found.size, "xxh3_128": _digest_of(found)}
        except (FileNotFoundError, CorruptCheckpointError):
            return False
        return json.dumps(said).encode() == record and said["bytes"] == file.nbytes

    def commit(self, records: Sequence[bytes]) -> None:
        """Implement the base class."""
        if len(self._files) > 1:
            publish(self.sink, INDEX_FILE, make_index(self._files))
        else:
            self.sink.sync()


class NativeTarget(ConversionTarget):
    """Write a checkpoint of this library: whole tensors, or what each rank of a strategy would have saved."""

    by_safetensors = False
    states = True
    has_layout = True

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan what each rank writes, as a save does."""
        super().__init__(sink, content)
        catalog = self._whole() if content.strategy is None else self._cut(content.strategy)
        # No random text: a conversion that goes on writes the same files.
        self._save, self._directory = SaveNames(0, 0, content.token), open_to_save(sink)
        self._catalog = plan_write(catalog, self._save.data_file).catalog
        self._ranks = np.unique(self._catalog.rank).tolist()
        world = content.strategy.ranks if content.strategy is not None else len(self._ranks)
        self._info = SaveInfo(content.token, 0, world, content.step)
        self._items = [self._catalog.take(self._catalog.rank == rank) for rank in self._ranks]
        self.files = [
            PlannedFile(self._save.data_file(rank), _parts(items), int(items.byte_length.sum()))
            for rank, items in zip(self._ranks, self._items)
        ]

    def _whole(self) -> Catalog:
        content, tables = self.content, []
        for rank, names in enumerate(group(content.infos, content.max_file_bytes, MOST_TENSORS)):
            tables.append(_whole_rows(rank, {name: content.infos[name] for name in names}))
        return concat(tables).with_orders(content.orders)

    def _cut(self, strategy: Strategy) -> Catalog:
        """Return what all ranks of a strategy have; rank 0 has what the strategy says nothing of."""
        infos = self.content.infos
        model = {name: info for name, info in infos.items() if not name.startswith(EXTRA_STATE)}
        layout, notes = layout_for(strategy, model, self.content.stored, self.content.cuts)
        self.notes += notes
        table = concat([layout.catalog(rank) for rank in range(strategy.ranks)])
        first = dict(zip(*(column.tolist() for column in np.unique(table.key, return_index=True))))
        known = np.asarray(
            [
                number in first
                and name in infos
                and table.unpadded(first[number], table.global_shape) == infos[name].shape
                for number, name in enumerate(table.keys)
            ],
            dtype=bool,
        )
        table = table.take(known[table.key]).compact()
        dtypes = tuple(dict.fromkeys(info.dtype for info in infos.values()))
        numbers = np.asarray([dtypes.index(infos[name].dtype) for name in table.keys], dtype=np.int16)
        table = replace(table, dtypes=dtypes, dtype=numbers[table.key])
        problems = validate_coverage(table, group_replicas(table)).problems
        if problems:
            raise ValidationError(problems, f"{strategy} does not fit the model")
        rest = {name: infos[name] for name in infos.keys() - set(table.keys)}
        others = sorted(name for name in rest if not name.startswith(EXTRA_STATE))
        if others:
            self.notes.append(f"rank 0 stores all of {listed(others, 3)}, of which the strategy says nothing")
        tables = [table, _whole_rows(0, dict(sorted(rest.items())))] if rest else [table]
        return concat(tables).with_orders(self.content.orders)

    def names(self) -> list[str]:
        """Implement the base class."""
        save, count = self._save, count_partitions(len(self._catalog))
        small = [save.marker_file, f"{save.unique_id}.manifest", self._directory.companion.name]
        return [*(file.name for file in self.files), *map(save.partition_file, range(count)), *small]

    def begin(self) -> None:
        """Implement the base class."""
        if not self._directory.is_committed(self._save):
            self._directory.mark_save(self._save, self._info.world_size)

    def write(self, number: int, data: Iterable[np.ndarray]) -> bytes:
        """Implement the base class."""
        items = self._items[number]
        self.sink.remove(self.files[number].name)  # what a process that died had of it
        blocks = in_blocks(items.byte_length.tolist(), data)
        world, step = self._info.world_size, self._info.step
        return self._directory.write_data(self._save, items, blocks, world_size=world, step=step).encode()

    def holds(self, number: int, record: bytes) -> bool:
        """Implement the base class."""
        name, items = self.files[number].name, self._items[number]
        try:
            part = Manifest.decode(record, name)
            (size,) = part.file_bytes.tolist()
            with check_data_file(self.sink, part, name, size) as file:
                return _has(file, encode_header(items, self._info)) and _blocks_are_right(file, part)
        except (CorruptCheckpointError, ValidationError):
            return False

    def commit(self, records: Sequence[bytes]) -> None:
        """Implement the base class."""
        directory, save = self._directory, self._save
        if directory.is_committed(save):
            directory.finish(save)
            return
        for name in filter(save.owns_partition, self.sink.names()):
            self.sink.remove(name)
        parts = {rank: Manifest.decode(record, "a note of it") for rank, record in zip(self._ranks, records)}
        directory.commit(save, self._ranks, parts)


TARGETS: Mapping[str, type[ConversionTarget]] = MappingProxyType(
    {"native": NativeTarget, "huggingface": HuggingFaceTarget}
)


def in_blocks(lengths: Iterable[int], data: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the bytes of items as a data file takes them: each array but the last of an item is of whole blocks.

    Args:
        lengths: Bytes of each item.
        data: Their elements, in any number of arrays, none of which has elements of two items; none for an empty item.

    Raises:
        ValueError: It does not end where an item ends.
    """
    arrays = iter(data)
    for length in lengths:
        # What does not fill a block yet.
        rest, left = np.empty(0, dtype=np.uint8), length
        if not left:
            yield rest
        while left:
            part = next(arrays, None)
            if part is None or part.nbytes > left:
                raise ValueError(f"the data does not end with an item: {left} of {length} bytes are missing")
            view = part.ravel().view(np.uint8)
            del part
            left -= view.nbytes
            if rest.nbytes:
                head = BLOCK_BYTES - rest.nbytes
                rest, view = np.concatenate([rest, view[:head]]), view[head:]
                if left and rest.nbytes < BLOCK_BYTES:
                    continue
                yield rest
            whole = view.nbytes // BLOCK_BYTES * BLOCK_BYTES if left else view.nbytes
            rest = view[whole:].copy()
            if whole:
                yield view[:whole]
            del view


def _whole(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Box]]:
    """Yield name and box of tensors that have elements."""
    for name, info in infos.items():
        box = Box((0,) * len(info.shape), info.shape)
        if box.size:
            yield name, box


def _whole_rows(rank: int, infos: Mapping[str, TensorInfo]) -> Catalog:
    builder = CatalogBuilder(rank)
    for name, info in infos.items():
        builder.add(name, info.dtype, info.shape, (0,) * len(info.shape), info.shape)
    return builder.build()


def _parts(items: Catalog) -> list[tuple[str, Box]]:
    """Return name and boxes of items, in the order of their data; nothing for those without elements."""
    parts: list[tuple[str, Box]] = []
    lengths = items.byte_length
    for row in range(len(items)):
        name, offset, shape = items.key_name(row), items.unpadded(row, items.offset), items.unpadded(row, items.shape)
        if not lengths[row]:
            continue
        if items.flat_start[row] == NOT_FLATTENED:
            parts.append((name, Box(offset, shape)))
            continue
        boxes = flat_range_to_boxes(shape, int(items.flat_start[row]), int(items.flat_stop[row]))
        parts += [(name, Box(tuple(map(sum, zip(offset, box.offset))), box.shape)) for box in boxes]
    return parts


def _has(file: InputFile, head: bytes) -> bool:
    return file.read(0, len(head)) == head


def _digest_of(file: InputFile) -> str:
    digest = xxhash.xxh3_128()
    for begin in range(0, file.size, _READ_BYTES):
        digest.update(file.read(begin, _READ_BYTES))
    return digest.hexdigest()


def _blocks_are_right(file: InputFile, part: Manifest) -> bool:
    """Return whether all blocks of a data file have their checksums."""
    catalog, block_bytes = part.catalog, part.checksums.block_bytes
    for row, (begin, length) in enumerate(zip(catalog.byte_offset.tolist(), catalog.byte_length.tolist())):
        for number, expected in enumerate(part.checksums.of_item(row).tolist()):
            first = number * block_bytes
            if hash_block(file.read(begin + first, min(block_bytes, length - first))) != expected:
                return False
    return True
