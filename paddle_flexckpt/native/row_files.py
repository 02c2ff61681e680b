"""Read bytes of a checkpoint's rows from its data files, each opened and checked when it is first needed.

Tested in tests/native/test_reader.py.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.media.backend import Backend, InputFile
from paddle_flexckpt.media.read_ahead import Wanted
from paddle_flexckpt.native.data_file import check_data_file
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.stretches import AlikeCopies, reach

# Pages of a memory map count as resident until they are given back; this bounds them.
MAP_SPAN_BYTES = 16 << 20


@dataclass
class ReadCount:
    """Count what has been read.

    Attributes:
        bytes_read: Bytes of tensors copied out of files.
        bytes_verified: Bytes of these that were compared with their checksum (whole blocks).
        bytes_extra: Bytes of these that no target needed: the rest of blocks that were read whole to be verified, what
            was read of damaged blocks before a replica served instead, and gaps between ranges that share a request.
        reads: Number of ``pread`` calls and mapped copies.
        files: Names of the files opened.
    """

    bytes_read: int = 0
    bytes_verified: int = 0
    bytes_extra: int = 0
    reads: int = 0
    files: set[str] = field(default_factory=set)


class DamagedCopy(Exception):
    """Tell what is wrong with a stretch of a row; caught where another copy may be read instead."""


class RowFiles:
    """Read rows of a manifest from the files that hold them. Nothing is verified but the files' size and save token."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        """Open nothing yet."""
        self.count = ReadCount()
        self._backend, self._manifest = backend, manifest
        self._byte_length = manifest.catalog.byte_length
        self._files: dict[int, InputFile] = {}
        self._unusable: dict[int, CorruptCheckpointError | OSError] = {}
        self._maps: dict[int, mmap.mmap | None] = {}

    def close(self) -> None:
        """Close all files."""
        for mapped in filter(None, self._maps.values()):
            # The traceback of an error holds views of the map: it is closed with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()
        for file in self._files.values():
            file.close()
        self._maps.clear()
        self._files.clear()

    def is_open(self, row: int) -> bool:
        """Return whether a row's file is open, and so as it was written."""
        return int(self._manifest.catalog.file[row]) in self._files

    def open(self, file: int) -> InputFile:
        """Open a file, by its number in the manifest.

        Raises:
            CorruptCheckpointError: It is missing, of another size, or of another save.
            OSError: It cannot be opened.
        """
        if file in self._unusable:
            raise self._unusable[file].with_traceback(None)  # which would grow with each raise
        if file not in self._files:
            name, size = self._manifest.catalog.files[file], int(self._manifest.file_bytes[file])
            try:
                self._files[file] = check_data_file(self._backend, self._manifest, name, size)
            except (CorruptCheckpointError, OSError) as error:
                self._unusable[file] = error
                raise
            self.count.files.add(name)
        return self._files[file]

    def map(self, row: int) -> mmap.mmap | None:
        """Map a row's file into memory; None if it is remote."""
        file = int(self._manifest.catalog.file[row])
        if file not in self._maps:
            self._maps[file] = self.open(file).memory_map()
        return self._maps[file]

    @property
    def reads_ahead(self) -> bool:
        """Return whether it helps to say what will be read."""
        return self._backend.at_once > 1

    def read_ahead(self, rows: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
        """Begin to bring byte ranges of rows that will be read, in this order.

        Raises:
            CorruptCheckpointError: A file is not as it was.
            OSError: It cannot be opened.
        """
        catalog = self._manifest.catalog
        numbers, number = np.unique(catalog.file[rows], return_inverse=True)
        files, offset = [self.open(file) for file in numbers.tolist()], catalog.byte_offset[rows]
        if files:
            extra = files[0].read_ahead(files, Wanted(number, offset + begin, offset + end))
            self.count.bytes_read += extra
            self.count.bytes_extra += extra

    def read(self, row: int, position: int, buffer: memoryview | np.ndarray) -> None:
        """Fill a buffer from byte ``position`` of a row.

        Raises:
            DamagedCopy: The file ends before.
            OSError: The file system failed.
        """
        catalog, view = self._manifest.catalog, memoryview(buffer)
        offset = int(catalog.byte_offset[row]) + position
        self._read_run(int(catalog.file[row]), offset, offset + len(view), [view])

    def read_neighbours(self, rows: np.ndarray, position: np.ndarray, buffers: Sequence[memoryview]) -> None:
        """Fill each buffer from a byte of a row; what follows each other in a file is one request.

        Raises:
            CorruptCheckpointError: A file is not as it was.
            DamagedCopy: A file ends before.
            OSError: The file system failed.
        """
        catalog = self._manifest.catalog
        file, offset = catalog.file[rows], catalog.byte_offset[rows] + position
        end = offset + np.fromiter(map(len, buffers), dtype=np.int64, count=len(buffers))
        edges = np.flatnonzero((file[1:] != file[:-1]) | (offset[1:] != end[:-1])) + 1
        for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(buffers)]):
            self._read_run(int(file[first]), int(offset[first]), int(end[last - 1]), buffers[first:last])

    def _read_run(self, file: int, offset: int, end: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with the bytes of a file from one offset to another."""
        opened = self.open(file)
        while offset < end:
            got = opened.read_into_each(buffers, offset)
            self.count.reads += 1
            if got == 0:
                raise DamagedCopy(f"the file ends at byte {offset}")
            self.count.bytes_read += got
            offset += got
            if offset < end:
                buffers = _behind(buffers, got)

    def copy_alike(self, mapped: mmap.mmap, offset: np.ndarray, copies: AlikeCopies) -> None:
        """Carry out strided copies of one form from a mapped file, at rising offsets, a bounded span at a time."""
        copy, itemsize = copies.copy, copies.dtype.itemsize
        low, high = (each * itemsize for each in reach(copy.extents, copy.source_strides))
        first, end = offset + low, offset + high + itemsize
        while len(offset):
            # Portions keep the mapped span bounded.
            count = max(1, int(np.searchsorted(end, first[0] + MAP_SPAN_BYTES, side="right")))
            copies.take(slice(0, count)).carry_out(mapped, offset[:count])
            _give_back(mapped, int(first[0]), int(end[count - 1]))
            self.count.reads += count
            self.count.bytes_read += copy.size * itemsize * count
            copies, offset, first, end = copies.take(slice(count, None)), offset[count:], first[count:], end[count:]

    def copy_mapped(self, mapped: mmap.mmap, row: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Carry out a strided copy of short scattered runs from a mapped file, a bounded span of it at a time.

        That is one numpy call instead of a system call per run. The copy's outermost axis has the largest stride of the
        file; the target's storage is 1-D and contiguous; the dtype is the row's.
        """
        catalog = self._manifest.catalog
        begin, length = int(catalog.byte_offset[row]), int(self._byte_length[row])
        storage = np.frombuffer(mapped, dtype=np.uint8, count=length, offset=begin).view(dtype)
        # Steps along the outermost axis keep the mapped span bounded.
        stride = copy.source_strides[0] * dtype.itemsize
        step = max(1, MAP_SPAN_BYTES // max(1, stride))
        inner = copy.size // copy.extents[0]
        begin += copy.source_base * dtype.itemsize
        for first in range(0, copy.extents[0], step):
            last = min(copy.extents[0], first + step)
            for part in copy.part(first * inner, last * inner):
                part.scatter_into(target)[...] = part.gather_from(storage)
            self.count.reads += 1
            _give_back(mapped, begin + first * stride, begin + last * stride)
        self.count.bytes_read += copy.size * dtype.itemsize


def _behind(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """Return what is left of buffers behind so many bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def _give_back(mapped: mmap.mmap, begin: int, end: int) -> None:
    begin -= begin % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, begin, min(end, len(mapped)) - begin)
