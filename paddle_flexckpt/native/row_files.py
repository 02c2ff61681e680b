"""Read bytes of a checkpoint's rows from its data files, each opened and checked when it is first needed.

The calling thread and a few more carry out the parts of a large read. Reading, hashing and copying all release the
interpreter's lock. A thread that hashes the data that it has just read finds it in its processor's cache, which a
separate thread for hashing would not.

Tested in tests/native/test_reader.py and tests/native/test_read_threads.py.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, TypeVar

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.catalog.dtypes import assign
from paddle_flexckpt.media.backend import Backend, InputFile
from paddle_flexckpt.media.read_ahead import Wanted
from paddle_flexckpt.native.data_file import check_data_file
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.stretches import AlikeCopies, reach

Kept = TypeVar("Kept")

# Pages of a memory map count as resident until they are released; this bounds those of one thread.
MAP_SPAN_BYTES = 8 << 20
# The most files kept open, and the most memory maps, of which each has a descriptor: up to so many, and up to this part
# of what the process may have.
MOST_OPEN, OPEN_PART = 256, 8


@dataclass
class ReadCount:
    """Counts of what has been read. Threads add to them under the lock.

    Attributes:
        bytes_read: Bytes of tensors copied out of files.
        bytes_verified: Bytes of the blocks that were compared with checksums, by this rank or another of its host.
        bytes_extra: Bytes of these that no target needed: the rest of blocks that were read whole to be verified,
            damaged blocks that a replica then replaced, and gaps between ranges that share a request.
        reads: Number of ``pread`` calls and mapped copies.
        files: Names of the files opened.
    """

    bytes_read: int = 0
    bytes_verified: int = 0
    bytes_extra: int = 0
    reads: int = 0
    files: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=lambda: threading.RLock(), repr=False, compare=False)

    def add(self, bytes_read: int = 0, bytes_verified: int = 0, bytes_extra: int = 0, reads: int = 0) -> None:
        """Add to the counts."""
        with self.lock:
            self.bytes_read += bytes_read
            self.bytes_verified += bytes_verified
            self.bytes_extra += bytes_extra
            self.reads += reads


class DamagedCopy(Exception):
    """An error in a stretch of a row. It is caught where another copy may be read instead."""


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Runs(NamedTuple):
    """Runs of stretches that are neighbours in a file. A run is one request.

    Attributes:
        first: The first stretch of each run, and the number of stretches.
        file: The file of each stretch.
        offset: The first byte of each stretch.
        end: The byte behind each stretch.
    """

    first: list[int]
    file: list[int]
    offset: list[int]
    end: list[int]


class RowFiles:
    """The rows of a manifest in their files. Of a file only its size and its save token are checked.

    Attributes:
        count: What has been read.
        threads: The threads that read from a file system. On an object store there is only the caller's: requests
            run at the same time instead.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        """Open nothing yet."""
        self.count = ReadCount()
        self.threads = ReadThreads(several=backend.has_path)
        self._backend, self._manifest = backend, manifest
        self._byte_length = manifest.catalog.byte_length
        # In the order of their use. One that is dropped is closed when the last thread that uses it has ended.
        self._files, self._maps = OrderedDict[int, InputFile](), OrderedDict[int, Optional[mmap.mmap]]()
        allowed = os.sysconf("SC_OPEN_MAX") // OPEN_PART
        most = MOST_OPEN if allowed < 0 else max(1, min(MOST_OPEN, allowed))  # negative: as many as it wants
        self._most_open = most if backend.has_path else len(manifest.file_bytes)
        self._versions: dict[int, object] = {}
        self._unusable: dict[int, CorruptCheckpointError | OSError] = {}

    def close(self) -> None:
        """End the threads, and close all files."""
        self.threads.close()
        for mapped in filter(None, self._maps.values()):
            # The traceback of an error holds views of the map: the map is closed with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()
        for file in self._files.values():
            file.close()
        self._maps.clear()
        self._files.clear()

    def is_open(self, row: int) -> bool:
        """Return whether a row's file is open, and so unchanged."""
        return int(self._manifest.catalog.file[row]) in self._files

    def open(self, file: int) -> InputFile:
        """Open a file, by its number in the manifest.

        Raises:
            CorruptCheckpointError: It is missing, of another size, or of another save.
            OSError: It cannot be opened.
        """
        with self.count.lock:
            if file in self._unusable:
                raise self._unusable[file].with_traceback(None)  # the traceback would grow with each raise
            if file not in self._files:
                name, size = self._manifest.catalog.files[file], int(self._manifest.file_bytes[file])
                try:
                    opened = check_data_file(self._backend, self._manifest, name, size, self._versions.get(file))
                except (CorruptCheckpointError, OSError) as error:
                    self._unusable[file] = error
                    raise
                self.count.files.add(name)
                self._versions[file], self._files[file] = opened.version, opened
            return self._latest(self._files, file)

    def map(self, row: int) -> mmap.mmap | None:
        """Map a row's file into memory; None if that cannot be done: its blocks are read whole then."""
        file = int(self._manifest.catalog.file[row])
        with self.count.lock:
            if file not in self._maps:
                try:
                    self._maps[file] = self.open(file).memory_map()
                except (CorruptCheckpointError, OSError):
                    return None
            return self._latest(self._maps, file)

    def _latest(self, kept: OrderedDict[int, Kept], file: int) -> Kept:
        """Return what is kept of a file; drop the one that has not been used for longest, if there are too many."""
        kept.move_to_end(file)
        if len(kept) > self._most_open:
            kept.popitem(last=False)
        return kept[file]

    @property
    def reads_ahead(self) -> bool:
        """Return whether announcing reads saves time."""
        return self._backend.at_once > 1

    def read_ahead(self, rows: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
        """Begin to read byte ranges of rows that will be needed, in this order.

        Raises:
            CorruptCheckpointError: A file has changed.
            OSError: It cannot be opened.
        """
        catalog = self._manifest.catalog
        numbers, number = np.unique(catalog.file[rows], return_inverse=True)
        files, offset = [self.open(file) for file in numbers.tolist()], catalog.byte_offset[rows]
        if files:
            extra = files[0].read_ahead(files, Wanted(number, offset + begin, offset + end))
            self.count.add(bytes_read=extra, bytes_extra=extra)

    def read(self, row: int, position: int, buffer: memoryview | np.ndarray) -> None:
        """Fill a buffer from byte ``position`` of a row. Bytes that were read before an error count as not needed.

        Raises:
            DamagedCopy: The file is too short.
            OSError: The file system failed.
        """
        catalog, view = self._manifest.catalog, memoryview(buffer)
        offset = int(catalog.byte_offset[row]) + position
        self._read_run(int(catalog.file[row]), offset, offset + len(view), [view])

    def read_runs(self, runs: Runs, first: int, last: int, buffers: Sequence[memoryview]) -> None:
        """Fill a buffer for each stretch from a first one to a last one, with one request for each run.

        Threads may call this at the same time. Bytes that were read before an error count as not needed.

        Raises:
            CorruptCheckpointError: A file has changed.
            DamagedCopy: A file is too short.
            OSError: The file system failed.
        """
        edges, begin, done = runs.first, first, 0
        number = bisect.bisect_right(edges, first)
        try:
            while begin < last:
                end = min(edges[number], last)
                offset, beyond = runs.offset[begin], runs.end[end - 1]
                self._read_run(runs.file[begin], offset, beyond, buffers[begin - first : end - first])
                begin, done, number = end, done + beyond - offset, number + 1
        except (CorruptCheckpointError, DamagedCopy, OSError):
            self.count.add(bytes_extra=done)
            raise

    def _read_run(self, file: int, offset: int, end: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with the bytes of a file from one offset to another; errors as of :meth:`read`."""
        opened, begin = self.open(file), offset
        while offset < end:
            try:
                got = opened.read_into_each(buffers, offset)
            except OSError:
                self.count.add(bytes_extra=offset - begin)
                raise
            self.count.add(bytes_read=got, reads=1)
            if got == 0:
                self.count.add(bytes_extra=offset - begin)
                raise DamagedCopy(f"the file ends at byte {offset}")
            offset += got
            if offset < end:
                buffers = _behind(buffers, got)

    def copy_alike(
        self, mapped: mmap.mmap, offset: np.ndarray, copies: AlikeCopies, usable: Callable[[slice], np.ndarray]
    ) -> np.ndarray:
        """Carry out strided copies of one form from a mapped file, at rising offsets, a bounded span at a time.

        Return bool per copy, whether it was carried out: only those are that ``usable`` allows.
        """
        copy, itemsize = copies.copy, copies.dtype.itemsize
        low, high = (each * itemsize for each in reach(copy.extents, copy.source_strides))
        first, end = offset + low, offset + high + itemsize
        edges, done = [0], np.zeros(len(offset), dtype=bool)
        while edges[-1] < len(offset):
            last = int(np.searchsorted(end, first[edges[-1]] + MAP_SPAN_BYTES, side="right"))
            edges.append(max(edges[-1] + 1, last))

        def work(number: int) -> None:
            some = slice(edges[number], edges[number + 1])
            done[some] = usable(some)
            members = np.flatnonzero(done[some]) + some.start
            copies.take(members).carry_out(mapped, offset[members])
            give_back(mapped, int(first[some.start]), int(end[some.stop - 1]))
            self.count.add(reads=len(members), bytes_read=copy.size * itemsize * len(members))

        self.threads.each(work, len(edges) - 1)
        return done

    def copy_mapped(
        self,
        mapped: mmap.mmap,
        row: int,
        copy: StridedCopy,
        target: np.ndarray,
        dtype: np.dtype,
        usable: Callable[[int, int], bool],
    ) -> bool:
        """Carry out a strided copy of short scattered runs from a mapped file, a bounded span of it at a time.

        This is one numpy call instead of a system call per run. The copy's outermost axis has the largest stride of the
        file; the target's storage is 1-D and contiguous; the dtype is the row's. Return False if a range of the row's
        bytes is not ``usable``: then not all was copied.
        """
        catalog = self._manifest.catalog
        begin, length = int(catalog.byte_offset[row]), int(self._byte_length[row])
        storage = np.frombuffer(mapped, dtype=np.uint8, count=length, offset=begin).view(dtype)
        # Steps along the outermost axis keep the mapped span bounded.
        stride = copy.source_strides[0] * dtype.itemsize
        step = map_step(copy, dtype.itemsize)
        inner = copy.size // copy.extents[0]
        low, high = (each * dtype.itemsize for each in reach(copy.extents[1:], copy.source_strides[1:]))
        start, refused = copy.source_base * dtype.itemsize, list[int]()
        begin += start
        if stride < 0:
            raise IndexError("a copy goes back in its file")

        def work(number: int) -> None:
            first, last = number * step, min(copy.extents[0], (number + 1) * step)
            if refused or not usable(start + first * stride + low, start + (last - 1) * stride + high + dtype.itemsize):
                refused.append(number)
                return
            for part in copy.part(first * inner, last * inner):
                assign(part.scatter_into(target), part.gather_from(storage), row)
            self.count.add(reads=1, bytes_read=(last - first) * inner * dtype.itemsize)
            give_back(mapped, begin + first * stride, begin + last * stride)

        self.threads.each(work, -(-copy.extents[0] // step))
        return not refused


def map_step(copy: StridedCopy, itemsize: int) -> int:
    """Return how many steps along its outermost axis a copy from a memory map makes at once."""
    return max(1, MAP_SPAN_BYTES // max(1, copy.source_strides[0] * itemsize))


def _behind(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """Return the rest of buffers after so many bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def give_back(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Release pages of a memory map, while other threads run: Python's own call would hold the interpreter's lock."""
    begin -= begin % mmap.PAGESIZE
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data + begin
    if _madvise(address, min(end, len(mapped)) - begin, mmap.MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


# Ranks of a host share its processors and its memory's bandwidth, which a few threads saturate.
MOST_THREADS = 4


class ReadThreads:
    """The threads of one reader. They are started when first needed and end when the reader closes."""

    def __init__(self, several: bool = True) -> None:
        """Start nothing yet. ``several``: whether there are more threads than the caller's, up to one a processor."""
        self._helpers = min(MOST_THREADS, _processors()) - 1 if several else 0
        self._executor: ThreadPoolExecutor | None = None
        # Called after each part, by the thread that has carried it out; its exception counts as that part's error.
        self.after: Callable[[], None] | None = None

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Call a function with every number below ``count``, begun in this order; return when all calls have returned.

        After an error no more calls begin. The error of the lowest number is raised, so that it does not depend on the
        order of threads.
        """
        numbers, errors = iter(range(count)), dict[int, BaseException]()

        def go_on() -> None:
            number = -1
            try:
                for number in numbers:
                    work(number)
                    if self.after is not None:
                        self.after()
            except BaseException as error:
                deque(numbers, maxlen=0)
                errors[number] = error

        others: list[Future[None]] = []
        helpers = min(self._helpers, count - 1)
        if helpers > 0:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._helpers, thread_name_prefix="flexckpt-read")
            others = [self._executor.submit(go_on) for _ in range(helpers)]
        go_on()
        wait(others)
        if errors:
            raise errors[min(errors)]

    def close(self) -> None:
        """Wait for the threads' end; a second call does nothing."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def _processors() -> int:
    """Return how many processors this process may use; all processors where the system does not report it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SpareMemory:
    """Buffers of one size for threads: as many as there are threads at work."""

    def __init__(self, nbytes: int) -> None:
        """Allocate no buffer yet."""
        self._nbytes = nbytes
        self._spare: list[np.ndarray] = []

    @contextlib.contextmanager
    def use(self) -> Iterator[np.ndarray]:
        """Lend a buffer for the time of a with statement: uint8, of any values."""
        try:
            memory = self._spare.pop()
        except IndexError:  # testing first would not be safe: another thread may take the last one
            memory = np.empty(self._nbytes, dtype=np.uint8)
        yield memory
        self._spare.append(memory)
