"""Reading: exactly the bytes that strided copies need, from files into memory, verified where whole blocks pass.

Where the file side of a copy is contiguous, it is read with ``pread`` block by block, straight into the target where
that is contiguous too. Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a
system call per run.

With ``verify="full"`` no byte reaches a target unverified: a block of which only a part is needed is read whole, and
the part is copied out of it; the latest such blocks are kept, as the next run or the next target often goes on there.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError, dtype_of
from paddle_flexckpt.storage.checksums import VerifyMode, hash_block, verify_mode
from paddle_flexckpt.storage.data_file import TOKEN_WINDOW
from paddle_flexckpt.storage.file_names import open_inside
from paddle_flexckpt.storage.manifest import Manifest

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10
# Pages of a memory map count as resident until they are given back; this bounds them.
MAP_SPAN_BYTES = 16 << 20
# Blocks kept that were read whole for a part of them; bounds their memory to 16 MiB.
KEPT_BLOCKS = 16


@dataclass
class ReadCount:
    """What has been read.

    Attributes:
        bytes_read: Bytes of tensors copied out of files.
        bytes_verified: Bytes of these that were compared with their checksum (whole blocks).
        bytes_extra: Bytes of these that no target needed: the rest of blocks that were read whole to be verified.
        reads: Number of ``pread`` calls and mapped copies.
        files: Names of the files opened.
    """

    bytes_read: int = 0
    bytes_verified: int = 0
    bytes_extra: int = 0
    reads: int = 0
    files: set[str] = field(default_factory=set)


@dataclass
class _KeptBlock:
    """A whole, verified block.

    Attributes:
        memory: uint8, as long as the longest block.
        length: Bytes of the block.
        unused: Bytes of it that no target has needed so far.
    """

    memory: np.ndarray
    length: int
    unused: int


class FileReader:
    """Reads items of one checkpoint. Opens each file when first needed and keeps it open until closed."""

    def __init__(self, directory: str, manifest: Manifest, verify: bool | VerifyMode = "read") -> None:
        """Opens nothing yet.

        Args:
            directory: Where the files are.
            manifest: What they hold.
            verify: Which bytes are compared with their checksums; see :func:`verify_mode`.

        Raises:
            ValidationError: There is no such mode, or there are no checksums for it.
        """
        self._directory = directory
        self._manifest = manifest
        self._verify = verify_mode(verify)
        if manifest.foreign:
            if self._verify == "full":
                raise ValidationError(
                    [
                        f"{directory} is a checkpoint of Paddle's own, without checksums: verify='full' cannot be "
                        "kept. Remedy: load it with another mode, and save it again"
                    ]
                )
            self._verify = "off"
        self._byte_length = manifest.catalog.byte_length
        self._descriptors: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._staging = np.empty(manifest.checksums.block_bytes, dtype=np.uint8)
        self._kept: OrderedDict[tuple[int, int], _KeptBlock] = OrderedDict()
        self.count = ReadCount()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for mapped in self._maps.values():
            # The traceback of an error holds views of the map: it is closed with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._maps.clear()
        self._descriptors.clear()
        self._kept.clear()

    def check_files(self, items: np.ndarray) -> None:
        """Opens the files of the given items and checks their size and save token, before any target is touched.

        Raises:
            CorruptCheckpointError: A file is missing, of another size, or of another save.
        """
        for file in np.unique(self._manifest.catalog.file[items]):
            self._open(int(file))

    def _open(self, file: int) -> int:
        if file in self._descriptors:
            return self._descriptors[file]
        name = self._manifest.catalog.files[file]
        path = os.path.join(self._directory, name)
        remedy = "Remedy: restore the file or load another checkpoint"
        try:
            descriptor = open_inside(self._directory, name)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{path} is missing; the manifest names it. {remedy}") from error
        self._descriptors[file] = descriptor
        size, expected = os.fstat(descriptor).st_size, int(self._manifest.file_bytes[file])
        if size != expected:
            raise CorruptCheckpointError(f"{path} has {size} bytes; expected {expected} (truncated?). {remedy}")
        token = self._manifest.save_token.encode()
        if not self._manifest.foreign and token not in os.pread(descriptor, TOKEN_WINDOW, 0):
            raise CorruptCheckpointError(
                f"{path} belongs to another save: its save token is not the manifest's. {remedy}"
            )
        self.count.files.add(name)
        return descriptor

    def read(self, item: int, copy: StridedCopy, target: np.ndarray) -> None:
        """Carries out one strided copy from an item to memory.

        Args:
            item: Row of the manifest's catalog.
            copy: What to copy; positions count elements from the item's start and from the target's start.
            target: The target's storage, 1-D and contiguous. If its dtype differs from the item's, values are cast.

        Raises:
            CorruptCheckpointError: A block does not have its checksum, or the file ends early.
            OSError: The file system failed.
        """
        if copy.size == 0:
            return
        dtype = dtype_of(self._manifest.catalog.dtype_name(item)).numpy
        outer = len(copy.extents) - copy.source_tail()
        run_bytes = math.prod(copy.extents[outer:]) * dtype.itemsize
        if outer and run_bytes < MIN_PREAD_BYTES:
            if self._verify == "full":
                self._read_in_blocks(item, copy.simplified(), target, dtype)
            else:
                self._read_mapped(item, copy, target, dtype)
            return
        run = copy.size * dtype.itemsize // run_bytes
        per_run = run_bytes // dtype.itemsize
        for i in range(run):
            for part in copy.part(i * per_run, (i + 1) * per_run) if run > 1 else (copy,):
                self._read_contiguous(item, part.simplified(), target, dtype)

    def _read_contiguous(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Reads a copy whose file side is one stretch, in steps that end where the item's blocks end."""
        block_bytes = self._manifest.checksums.block_bytes
        begin = copy.source_base * dtype.itemsize
        end = begin + copy.size * dtype.itemsize
        straight = copy.is_contiguous()[1] and target.dtype == dtype
        raw_target = target.view(np.uint8) if straight else None
        shift = copy.target_base * dtype.itemsize - begin
        position = begin
        while position < end:
            stop = min(end, (position // block_bytes + 1) * block_bytes)
            if raw_target is not None:
                buffer = raw_target[position + shift : stop + shift]
            else:
                buffer = self._staging[: stop - position]
            self._fetch(item, position, buffer)
            if raw_target is None:
                first = (position - begin) // dtype.itemsize
                values = buffer.view(dtype)
                for part in copy.part(first, first + len(values)):
                    count = part.size
                    part.scatter_into(target)[...] = values[:count].reshape(part.extents)
                    values = values[count:]
            position = stop

    def _read_in_blocks(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Copies scattered runs out of whole, verified blocks, one block after the other."""
        if not copy.is_ascending():
            inner = copy.size // copy.extents[0]
            for i in range(copy.extents[0]):
                for part in copy.part(i * inner, (i + 1) * inner):
                    self._read_in_blocks(item, part.simplified(), target, dtype)
            return
        per_block = self._manifest.checksums.block_bytes // dtype.itemsize
        begin = 0
        while begin < copy.size:
            (first,) = copy.part(begin, begin + 1)
            block = first.source_base // per_block
            end = copy.count_before((block + 1) * per_block)
            storage = self._whole_block(item, block, (end - begin) * dtype.itemsize).view(dtype)
            for part in copy.part(begin, end):
                inside = replace(part, source_base=part.source_base - block * per_block)
                part.scatter_into(target)[...] = inside.gather_from(storage)
            begin = end

    def _fetch(self, item: int, position: int, buffer: np.ndarray) -> None:
        """Fills a buffer from byte ``position`` of an item, verified as far as that was asked for.

        The bytes are all of one block.
        """
        block, start = divmod(position, self._manifest.checksums.block_bytes)
        whole = len(buffer) == self._block_length(item, block)
        if self._verify == "full" and not whole:
            buffer[:] = self._whole_block(item, block, len(buffer))[start : start + len(buffer)]
            return
        self._pread(item, position, buffer)
        if whole and self._verify != "off":
            self._check_block(item, block, buffer)

    def _block_length(self, item: int, block: int) -> int:
        block_bytes = self._manifest.checksums.block_bytes
        return min(block_bytes, int(self._byte_length[item]) - block * block_bytes)

    def _whole_block(self, item: int, block: int, used: int) -> np.ndarray:
        """A verified block, valid until the next call; ``used`` says how many bytes of it will be."""
        kept = self._kept.pop((item, block), None)
        if kept is None:
            length = self._block_length(item, block)
            if len(self._kept) < KEPT_BLOCKS:
                memory = np.empty(self._manifest.checksums.block_bytes, dtype=np.uint8)
            else:
                memory = self._kept.popitem(last=False)[1].memory
            self._pread(item, block * self._manifest.checksums.block_bytes, memory[:length])
            self._check_block(item, block, memory[:length])
            kept = _KeptBlock(memory, length, length)
            self.count.bytes_extra += length
        self._kept[item, block] = kept
        # What several targets want was needed once.
        needed = min(kept.unused, used)
        kept.unused -= needed
        self.count.bytes_extra -= needed
        return kept.memory[: kept.length]

    def _pread(self, item: int, position: int, buffer: np.ndarray) -> None:
        """Fills a buffer from byte ``position`` of an item."""
        catalog = self._manifest.catalog
        descriptor = self._open(int(catalog.file[item]))
        offset = int(catalog.byte_offset[item]) + position
        view = memoryview(buffer)
        while len(view):
            got = os.preadv(descriptor, [view], offset)
            self.count.reads += 1
            if got == 0:
                raise CorruptCheckpointError(f"{self._where(item)}: the file ends at byte {offset}")
            self.count.bytes_read += got
            offset += got
            view = view[got:]

    def _check_block(self, item: int, block: int, buffer: np.ndarray) -> None:
        """Compares a whole block with its checksum."""
        checksums = self._manifest.checksums
        position = block * checksums.block_bytes
        expected, got = checksums.of_block(item, block), hash_block(buffer)
        if expected != got:
            raise CorruptCheckpointError(
                f"{self._where(item)}: bytes {position} to {position + len(buffer)} of the shard (byte "
                f"{int(self._manifest.catalog.byte_offset[item]) + position} of the file) are damaged: expected "
                f"xxh3 {expected:016x}, got {got:016x}. Targets are partly overwritten. Remedy: load another checkpoint"
            )
        self.count.bytes_verified += len(buffer)

    def _read_mapped(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Copies short scattered runs out of a memory map, a bounded span of the file at a time."""
        catalog = self._manifest.catalog
        file = int(catalog.file[item])
        descriptor = self._open(file)
        if file not in self._maps:
            self._maps[file] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        mapped = self._maps[file]
        start = int(catalog.byte_offset[item])
        length = int(self._byte_length[item])
        storage = np.frombuffer(mapped, dtype=np.uint8, count=length, offset=start).view(dtype)
        # Steps along the outermost axis keep the mapped span bounded; that axis has the largest stride of the file.
        step = max(1, MAP_SPAN_BYTES // max(1, copy.source_strides[0] * dtype.itemsize))
        inner = copy.size // copy.extents[0]
        for first in range(0, copy.extents[0], step):
            last = min(copy.extents[0], first + step)
            for part in copy.part(first * inner, last * inner):
                part.scatter_into(target)[...] = part.gather_from(storage)
            self.count.bytes_read += (last - first) * inner * dtype.itemsize
            self.count.reads += 1
            self._give_back(
                mapped,
                start + (copy.source_base + first * copy.source_strides[0]) * dtype.itemsize,
                start + (copy.source_base + last * copy.source_strides[0]) * dtype.itemsize,
            )

    @staticmethod
    def _give_back(mapped: mmap.mmap, begin: int, end: int) -> None:
        begin -= begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, begin, min(end, len(mapped)) - begin)

    def _where(self, item: int) -> str:
        catalog = self._manifest.catalog
        path = os.path.join(self._directory, catalog.file_name(item) or "")
        return f"file {path!r}, key {catalog.key_name(item)!r}, saved by rank {int(catalog.rank[item])}"
