"""Reading: exactly the bytes that strided copies need, from files into memory, verified where whole blocks pass.

Where the file side of a copy is contiguous, it is read with ``pread`` block by block, straight into the target where
that is contiguous too. Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a
system call per run.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, dtype_of
from paddle_flexckpt.storage.checksums import hash_block
from paddle_flexckpt.storage.data_file import TOKEN_WINDOW
from paddle_flexckpt.storage.file_names import open_inside
from paddle_flexckpt.storage.manifest import Manifest

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10
# Pages of a memory map count as resident until they are given back; this bounds them.
MAP_SPAN_BYTES = 16 << 20


@dataclass
class ReadCount:
    """What has been read.

    Attributes:
        bytes_read: Bytes of tensors copied out of files.
        bytes_verified: Bytes of these that were compared with their checksum (whole blocks).
        reads: Number of ``pread`` calls and mapped copies.
        files: Names of the files opened.
    """

    bytes_read: int = 0
    bytes_verified: int = 0
    reads: int = 0
    files: set[str] = field(default_factory=set)


class FileReader:
    """Reads items of one checkpoint. Opens each file when first needed and keeps it open until closed."""

    def __init__(self, directory: str, manifest: Manifest, verify: bool = True) -> None:
        """Args: directory: where the files are. manifest: what they hold. verify: compare whole blocks' checksums."""
        self._directory = directory
        self._manifest = manifest
        self._verify = verify and not manifest.foreign
        self._byte_length = manifest.catalog.byte_length
        self._descriptors: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._staging = np.empty(manifest.checksums.block_bytes, dtype=np.uint8)
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
            self._pread(item, position, buffer)
            self._check_block(item, position, buffer)
            if raw_target is None:
                first = (position - begin) // dtype.itemsize
                values = buffer.view(dtype)
                for part in copy.part(first, first + len(values)):
                    count = part.size
                    part.scatter_into(target)[...] = values[:count].reshape(part.extents)
                    values = values[count:]
            position = stop

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

    def _check_block(self, item: int, position: int, buffer: np.ndarray) -> None:
        """Compares a buffer with its checksum if it is one whole block."""
        checksums = self._manifest.checksums
        length = int(self._byte_length[item])
        whole = position % checksums.block_bytes == 0 and (
            len(buffer) == checksums.block_bytes or position + len(buffer) == length
        )
        if not self._verify or not whole:
            return
        block = position // checksums.block_bytes
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
