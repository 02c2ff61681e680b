"""Formats that a conversion can write: their files, the contents of these, and the commit.

A format is a subclass of :class:`ConversionTarget` in :data:`TARGETS`. Tested in tests/tools/test_conversion.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.backend import Backend, InputFile
from paddle_flexckpt.native.checksums import BLOCK_BYTES, hash_block
from paddle_flexckpt.native.data_file import check_data_file, encode_header
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.partitions import count_partitions
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.planning.write_plan import plan_write
from paddle_flexckpt.tools.conversion_content import (
    MOST_TENSORS,
    Content,
    ConversionTarget,
    PlannedFile,
    WholeFiles,
    parts_of,
    rows_of,
)
from paddle_flexckpt.tools.dcp_target import TorchDcpTarget
from paddle_flexckpt.tools.paddle_target import PaddleTarget
from paddle_flexckpt.tools.tensor_files import INDEX_FILE, divide, make_index
from paddle_flexckpt.tools.whole_tensors import whole_parts


class HuggingFaceTarget(WholeFiles):
    """Whole tensors as safetensors files in the style of Hugging Face, the index last."""

    last = INDEX_FILE

    def __init__(self, sink: Backend, content: Content) -> None:
        """Divide tensors among files, as an export does."""
        super().__init__(sink, content)
        self._files = divide(content.infos, content.max_file_bytes)
        self.files = []
        for file in self._files:
            parts = whole_parts({name: content.infos[name] for name in file.names})
            self.files.append(PlannedFile(file.name, parts, file.data_bytes, file.nbytes))

    def arrays(self, number: int, data: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
        """Implement the base class."""
        return self._files[number].arrays(data)

    def last_content(self) -> bytes:
        """Implement the base class."""
        return make_index(self._files)

    def is_committed(self) -> bool:
        """Implement the base class; a single file needs no index, and is replaced as a whole."""
        return len(self._files) > 1 and super().is_committed()

    def commit(self, records: Sequence[bytes]) -> None:
        """Implement the base class."""
        if len(self._files) > 1:
            super().commit(records)
        else:
            self.sink.sync()


class NativeTarget(ConversionTarget):
    """A checkpoint of this library: whole tensors, or the shards that each rank of a strategy would have saved."""

    by_safetensors = False
    states = True
    has_layout = True

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan each rank's items, as a save does."""
        super().__init__(sink, content)
        catalog, self.notes = rows_of(content)
        # Not random, as a resumed conversion writes the same files. It is the first save of its directory.
        self._save, self._directory = SaveNames(0, f"{1:08x}{content.token[8:]}"), open_to_save(sink)
        self._catalog = plan_write(catalog, self._save.data_file).catalog
        self._ranks = np.unique(self._catalog.rank).tolist()
        world = content.strategy.ranks if content.strategy is not None else len(self._ranks)
        self._info = SaveInfo(self._save.token, 0, world, content.step)
        self._items = [self._catalog.take(self._catalog.rank == rank) for rank in self._ranks]
        problems = [problem for items in self._items for problem in self._header_problems(items)]
        if problems:
            raise ValidationError(problems)
        self.files = [
            PlannedFile(self._save.data_file(rank), parts_of(items), int(items.byte_length.sum()))
            for rank, items in zip(self._ranks, self._items)
        ]

    def _header_problems(self, items: Catalog) -> Iterator[str]:
        """Yield why a rank's file cannot have a header."""
        if len(items) <= MOST_TENSORS:
            return
        length = len(encode_header(items, self._info)) - 8
        if length > MAX_HEADER_BYTES:
            yield (
                f"the header of {items.file_name(0)} would have {length} bytes; safetensors allows {MAX_HEADER_BYTES}. "
                "Remedy: a strategy with more stages or replicas, or whole tensors (without --to)"
            )

    def names(self) -> list[str]:
        """Implement the base class."""
        save, count = self._save, count_partitions(len(self._catalog))
        small = [save.marker_file, f"{save.unique_id}.manifest", self._directory.companion.name]
        return [*(file.name for file in self.files), *map(save.partition_file, range(count)), *small]

    def begin(self) -> None:
        """Implement the base class."""
        self._directory.mark_save(self._save, self._info.world_size)

    def write(self, number: int, data: Iterable[np.ndarray]) -> bytes:
        """Implement the base class."""
        items = self._items[number]
        self.sink.remove(self.files[number].name)  # left by a process that died
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

    def is_committed(self) -> bool:
        """Implement the base class."""
        return self._directory.is_committed(self._save)

    def commit(self, records: Sequence[bytes]) -> None:
        """Implement the base class."""
        directory, save = self._directory, self._save
        if self.is_committed():
            directory.finish(save)
            return
        for name in [each for each in filter(save.owns, self.sink.names()) if each.endswith(".partition")]:
            self.sink.remove(name)
        directory.commit(save, [Manifest.decode(record, "a note of it") for record in records])


TARGETS: Mapping[str, type[ConversionTarget]] = MappingProxyType(
    {
        "native": NativeTarget,
        "huggingface": HuggingFaceTarget,
        "torch_dcp": TorchDcpTarget,
        "paddle": PaddleTarget,
    }
)


def in_blocks(lengths: Iterable[int], data: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the bytes of items for a data file: each array but the last of an item has whole blocks.

    Args:
        lengths: Bytes of each item.
        data: Their elements, in any number of arrays, none with elements of two items; none for an empty item.

    Raises:
        ValueError: The data does not end with an item.
    """
    arrays = iter(data)
    for length in lengths:
        # Bytes that do not fill a block yet.
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


def _has(file: InputFile, head: bytes) -> bool:
    return file.read(0, len(head)) == head


def _blocks_are_right(file: InputFile, part: Manifest) -> bool:
    """Return whether all blocks of a data file match their checksums."""
    catalog, block_bytes = part.catalog, part.checksums.block_bytes
    for row, (begin, length) in enumerate(zip(catalog.byte_offset.tolist(), catalog.byte_length.tolist())):
        for number, expected in enumerate(part.checksums.of_item(row).tolist()):
            first = number * block_bytes
            if hash_block(file.read(begin + first, min(block_bytes, length - first))) != expected:
                return False
    return True
