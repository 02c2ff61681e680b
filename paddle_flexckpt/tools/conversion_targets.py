"""Formats that a conversion can write: their files, the contents of these, and the commit.

A format is a subclass of :class:`ConversionTarget` in :data:`TARGETS`. Neither torch nor Paddle is needed.

Tested in tests/tools/test_conversion.py, tests/tools/test_dcp_target.py, tests/tools/test_paddle_target.py and
tests/distributed/test_paddle_format.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.catalog import (
    EXTRA_STATE,
    Catalog,
    CorruptCheckpointError,
    Problem,
    ValidationError,
    group_replicas,
)
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.paddle_files import (
    DISTCP_DTYPES,
    PARAMETER_NAMES,
    StateFile,
    encode_metadata,
    misread_range,
    open_to_save,
)
from paddle_flexckpt.foreign.torch_dcp import DCP_METADATA_FILE
from paddle_flexckpt.foreign.torch_saving import (
    DcpChunk,
    DcpTensor,
    TensorArchive,
    encode_dcp_metadata,
    head_of,
    plan_archive,
    tail_of,
)
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
    shards_of_ranks,
)
from paddle_flexckpt.tools.tensor_files import INDEX_FILE, divide, make_index, no_such_dtype
from paddle_flexckpt.tools.whole_tensors import whole_parts

# Paddle looks for a rank's own file under this id alone.
_ID = 0
# Small pieces are written together.
_BUFFER_BYTES = 1 << 20


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
        catalog, self.notes = shards_of_ranks(content)
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
                "Remedy (FC705): a strategy with more stages or replicas, or whole tensors (without --to)"
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


class TorchDcpTarget(WholeFiles):
    """A checkpoint of torch.distributed.checkpoint (DCP): ``__{rank}_{n}.distcp``, and ``.metadata`` last.

    It has whole tensors, or the shards that each rank of a strategy would save, replicas once. Each chunk is a box, in
    an archive as ``torch.save`` writes it.
    """

    by_safetensors = False
    states = True
    has_layout = True
    last = DCP_METADATA_FILE

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan the archives of all chunks: their places, and all bytes but the elements."""
        super().__init__(sink, content)
        rows, self.notes = shards_of_ranks(content)
        items = plan_write(rows, str).catalog
        kinds = {key: info.dtype for key, info in content.infos.items() if info.dtype not in DTYPES}
        if kinds:
            raise ValidationError([no_such_dtype("torch's format lacks this dtype", *kind) for kind in kinds.items()])
        infos, chunks = content.infos, {name: list[DcpChunk]() for name in sorted(content.infos)}
        empty = [(name, Box((0,) * len(info.shape), info.shape)) for name, info in infos.items() if not info.nbytes]
        self.files: list[PlannedFile] = []
        self._archives: list[list[TensorArchive]] = []
        for number, rank in enumerate(np.unique(items.rank).tolist() or [0]):
            # Whole tensors belong to one rank, in several files.
            name = f"__{rank}_0.distcp" if content.strategy is not None else f"__0_{number}.distcp"
            parts = parts_of(items.take(items.rank == rank))
            archives, begin = list[TensorArchive](), 0
            # A tensor without elements has one archive too.
            for key, box in [*parts, *(empty if not number else ())]:
                archives.append(plan_archive(infos[key].dtype, box.shape))
                chunks[key].append(DcpChunk(box.offset, box.shape, name, begin, archives[-1].nbytes))
                begin += archives[-1].nbytes
            self.files.append(PlannedFile(name, parts, sum(archive.data_bytes for archive in archives), begin))
            self._archives.append(archives)
        self._tensors = [DcpTensor(key, infos[key].dtype, infos[key].shape, found) for key, found in chunks.items()]

    def arrays(self, number: int, data: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
        """Implement the base class."""
        return _with_archives(self._archives[number], data)

    def last_content(self) -> bytes:
        """Implement the base class."""
        return encode_dcp_metadata(self._tensors)


class PaddleTarget(WholeFiles):
    """Paddle's format: ``{rank}_0.distcp`` for each rank of a strategy, or of whole tensors, then ``0.metadata``."""

    by_safetensors = False
    states = True
    has_layout = True
    has_replicas = True
    last = f"{_ID}.metadata"

    def __init__(self, sink: Backend, content: Content) -> None:
        """Plan each rank's file: shards are never divided; a shard is in one file unless replicas are wanted."""
        super().__init__(sink, content)
        table, self.notes = shards_of_ranks(content)
        problems = [*_paddle_problems(table), *_paddle_order_problems(table)]
        if problems:
            raise ValidationError(problems, "Paddle's format cannot hold this")
        world = content.strategy.ranks if content.strategy is not None else int(table.rank.max(initial=0)) + 1
        self._catalog = _paddle_shards(table, content.save_replicas, world)
        self._check_ranges(content.save_replicas)
        self._items = [self._catalog.take(self._catalog.rank == rank) for rank in range(world)]
        self.files = []
        for rank, items in enumerate(self._items):
            nbytes = StateFile(items).nbytes
            self.files.append(PlannedFile(_paddle_file(rank), parts_of(items), int(items.byte_length.sum()), nbytes))
        empty = [key for key, info in content.infos.items() if not info.nbytes]
        if empty:
            self.notes.append(
                f"Paddle reads {listed(empty, 3)}, without elements, where it moves nothing; else it fails"
            )
        if any(key.startswith(EXTRA_STATE) for key in self._catalog.keys):
            self.notes.append("Paddle's loader leaves extra state aside, which is there as tensors")

    def _check_ranges(self, save_replicas: bool) -> None:
        """Refuse flattened ranges that Paddle would join wrongly, or note that it must not have to join them."""
        table = self._catalog
        rows = group_replicas(table).first
        reason, key = misread_range(table, rows[table.is_flattened[rows] & (table.size[rows] > 0)])
        if reason and not save_replicas:
            remedy = (
                "give save_replicas (--save-replicas), by which a rank's file has all that the rank has; or convert to "
                "whole tensors, or for a strategy without sharding v2 and stage 3"
            )
            raise ValidationError([Problem(f"Paddle reads this wrong: {reason}", key=key, code="FC705", remedy=remedy)])
        if reason:
            self.notes.append(f"Paddle reads this right under the same layout alone, as {reason}")

    def arrays(self, number: int, data: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
        """Implement the base class."""
        return StateFile(self._items[number]).pieces(iter(data))

    def last_content(self) -> bytes:
        """Implement the base class."""
        return encode_metadata(self._catalog, flat_mapping=True)


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


def _with_archives(archives: Iterable[TensorArchive], data: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the bytes of archives as arrays: small pieces joined, and large arrays unchanged."""
    arrays = iter(data)
    small = bytearray()
    for archive in archives:
        small += head_of(archive)
        checksum, left = 0, archive.data_bytes
        while left:
            part = next(arrays, None)
            if part is None or part.nbytes > left:
                raise ValueError(
                    f"the data does not end with a chunk: {left} of {archive.data_bytes} bytes are missing"
                )
            view = part.ravel().view(np.uint8)
            del part
            checksum = zlib.crc32(view, checksum)
            left -= view.nbytes
            if len(small) + view.nbytes <= _BUFFER_BYTES:
                small += memoryview(view)
                continue
            yield np.frombuffer(bytes(small), dtype=np.uint8)
            small.clear()
            yield view
            del view
        small += tail_of(archive, checksum)
        if len(small) >= _BUFFER_BYTES:
            yield np.frombuffer(bytes(small), dtype=np.uint8)
            small.clear()
    if small:
        yield np.frombuffer(bytes(small), dtype=np.uint8)


def _paddle_file(rank: int) -> str:
    return f"{rank}_{_ID}.distcp"


def _paddle_shards(table: Catalog, save_replicas: bool, world: int) -> Catalog:
    """Return the stored shards, each with its file; ranks store about the same number of bytes."""
    rows = np.arange(len(table))
    if not save_replicas:
        whole = np.ones(len(table), dtype=bool)
        rows = np.sort(plan_write(table, _paddle_file, indivisible=whole).source)
    kept = table.take(rows)
    return replace(kept, files=tuple(map(_paddle_file, range(world))), file=kept.rank.astype(np.int32))


def _paddle_problems(table: Catalog) -> Iterator[Problem]:
    """Yield the problems of content that the format cannot hold."""
    kinds = np.unique(np.stack([table.key.astype(np.int64), table.dtype.astype(np.int64)], axis=1), axis=0)
    for key, dtype in kinds.tolist():
        if table.dtypes[dtype] not in DISTCP_DTYPES:
            yield no_such_dtype("Paddle does not read this dtype back", table.keys[key], table.dtypes[dtype])
    if PARAMETER_NAMES in table.keys:
        yield Problem(
            "Paddle has another use for this name",
            PARAMETER_NAMES,
            code="FC705",
            remedy="rename it with an AOA statement",
        )
    _, first, count = np.unique(
        table.rank * np.int64(len(table.keys)) + table.key, return_index=True, return_counts=True
    )
    for row in first[count > 1].tolist():
        what = "a rank has several shards of one tensor, and its file has room for one"
        yield Problem(what, table.key_name(row), rank=int(table.rank[row]), got=table.describe(row))


def _paddle_order_problems(table: Catalog) -> Iterator[Problem]:
    """Yield the problems of fused parameters whose order has other parts than the cut."""
    orders = {key: table.order(key) for key in range(len(table.keys))}
    fused = {key: order for key, order in orders.items() if order is not None and order.axis is not None}
    rows = np.flatnonzero(np.isin(table.key, [*fused]))
    rows = rows[np.argsort(table.key[rows], kind="stable")]
    begins = np.searchsorted(table.key[rows], [*fused])
    for (key, order), mine in zip(fused.items(), np.split(rows, begins)[1:]):
        axis = table.width - int(table.ndim[mine[0]]) + (order.axis or 0)
        parts = len(np.unique(table.offset[mine, axis]))
        if parts != order.parts:
            yield Problem(
                "a fused parameter lies in another order than the ranks that load it expect, which Paddle cannot know",
                table.keys[key],
                expected=f"{parts} parts",
                got=order.describe(),
                code="FC705",
                remedy="convert to whole tensors or for tp=1, or split it with an AOA statement",
            )
