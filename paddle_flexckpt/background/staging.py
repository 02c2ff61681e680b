"""Staging: memory that the training process and its writer share, allocated once and used by save after save.

A segment is a memfd. Its pages cost several times as much to allocate as to write again; so segments are reused, and
grow only when a save needs more than they have (docs/design.md, "Shared memory is touched early").

A share that is larger than the memory for it passes in *waves*, through a few buckets that are used again and again.
The training process fills a bucket and sends its size; the writer answers when it has written it. At the end the
training process sends whether all ranks succeeded: before that the writer does not publish its part.

Tested in tests/background/test_staging.py and tests/background/test_waves.py.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Union

import numpy as np

from paddle_flexckpt.catalog import Catalog, CheckpointError
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.catalog.wire import encode_catalog
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.media.full_disks import writing

_HUGE_PAGE_BYTES = 2 << 20
# Page-locks memory for a device, and returns a function that unlocks it; None if it cannot be locked.
LockPages = Callable[[np.ndarray], Union[Callable[[], None], None]]


class Segment:
    """A piece of memory that two processes share.

    Attributes:
        number: Its number, in both processes.
        descriptor: Its memfd.
        nbytes: Bytes of it that are mapped here.
        text: The begin and end of the encoded job that :meth:`put_job` has put there.
    """

    def __init__(self, number: int, descriptor: int) -> None:
        """Args: number: its number. descriptor: its memfd, which the segment closes."""
        self.number = number
        self.descriptor = descriptor
        self.nbytes, self.text = 0, (0, 0)
        self._memory = np.zeros(0, dtype=np.uint8)
        self._was_asked = False
        self._unlock: Callable[[], None] | None = None
        close_in_forks(self, Segment._leave_to_owner)

    @classmethod
    def create(cls, number: int) -> Segment:
        """Create an empty segment."""
        return cls(number, os.memfd_create(f"paddle_flexckpt-{number}", os.MFD_CLOEXEC))

    def grow(self, nbytes: int) -> None:
        """Make the segment at least so large; its contents may be lost.

        Raises:
            CheckpointError: The machine has not so much memory left.
        """
        if nbytes <= self.nbytes:
            return
        # Whole huge pages, for kernels that have them for shared memory.
        nbytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        _check_memory(nbytes - self.nbytes)
        with writing("memory that the writer shares", nbytes):
            os.ftruncate(self.descriptor, nbytes)
        self.attach(nbytes)

    def attach(self, nbytes: int) -> None:
        """Map the first so many bytes, which the other process has made."""
        if nbytes <= self.nbytes:
            return
        self._unlock_pages()
        mapped = mmap.mmap(self.descriptor, nbytes)
        # A hint; kernels without huge pages in shared memory refuse it, which does no harm.
        with contextlib.suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._memory, self.nbytes = np.frombuffer(mapped, dtype=np.uint8), nbytes

    def view(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes from ``start`` to ``stop`` of the segment, not copied: uint8 ``[stop - start]``.

        Raises:
            ValueError: The segment is smaller.
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"bytes {start} to {stop} of segment {self.number}, which has {self.nbytes}")
        return self._memory[start:stop]

    def put_job(self, start: int, text: bytes) -> None:
        """Put an encoded job behind the segment's data, which ends at ``start``."""
        self.text = start, start + len(text)
        self.view(*self.text)[:] = np.frombuffer(text, dtype=np.uint8)

    def lock_pages(self, lock_pages: LockPages) -> None:
        """Page-lock the segment's memory, once for as long as it is mapped."""
        if not self._was_asked:
            self._was_asked, self._unlock = True, lock_pages(self._memory)

    @property
    def is_locked(self) -> bool:
        """Return whether the memory is page-locked."""
        return self._unlock is not None

    def _unlock_pages(self) -> None:
        if self._unlock is not None:
            self._unlock()
        self._was_asked, self._unlock = False, None

    def touch(self) -> None:
        """Allocate all pages now, so that the first save need not. Their content is lost."""
        self._memory[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Free the memory, here; views that are still in use keep it alive."""
        self._unlock_pages()
        self._leave_to_owner()

    def _leave_to_owner(self) -> None:
        self._unlock = None  # the parent has locked the pages, not a fork
        self._memory, self.nbytes = np.zeros(0, dtype=np.uint8), 0
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _check_memory(more: int) -> None:
    """Raise CheckpointError if the machine has less memory: the kernel would not refuse, but kill a process."""
    with open("/proc/meminfo", encoding="ascii") as stream:
        available = next(int(line.split()[1]) << 10 for line in stream if line.startswith("MemAvailable:"))
    if more > available:
        raise CheckpointError(
            f"an asynchronous save needs {format_bytes(more)} more of memory for its copy of the state, and "
            f"{format_bytes(available)} are available. Remedy (FC505): pass staging_bytes=, to copy through so much "
            "memory (64 MiB at least), save synchronously, or give the job more memory"
        )


@dataclass(frozen=True, eq=False)
class WrittenFile:
    """A data file that a save to nodes has written, from which a save of the same state to storage can read.

    Attributes:
        path: The file, on this machine.
        begin: The first byte of the items' data, which lie end to end.
        items: The items.
    """

    path: str
    begin: int
    items: Catalog

    def has(self, items: Catalog) -> bool:
        """Return whether the file has these items, in this order."""
        own, others = (encode_catalog(replace(each, files=())) for each in (self.items, items))
        return own == others

    def open(self) -> int:
        """Return a descriptor of the file, which stays readable when the file is removed."""
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)


def map_data(descriptor: int, begin: int, nbytes: int) -> np.ndarray:
    """Return so many bytes of a file from ``begin`` on, not copied: uint8 ``[nbytes]``. The descriptor is closed."""
    try:
        mapped = mmap.mmap(descriptor, begin + nbytes, prot=mmap.PROT_READ)
        return np.frombuffer(mapped, dtype=np.uint8)[begin : begin + nbytes]
    finally:
        os.close(descriptor)


class StagingPool:
    """The segments of one training process."""

    def __init__(self) -> None:
        """Make an empty pool."""
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._free: list[Segment] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of all segments together."""
        return sum(segment.nbytes for segment in self._segments)

    def take(self, nbytes: int) -> Segment:
        """Return a segment of at least so many bytes: the smallest free one that fits, or else the largest, grown.

        Raises:
            CheckpointError: The machine has not so much memory left.
        """
        with self._lock:
            self._free.sort(key=lambda segment: segment.nbytes)
            if not self._free:
                self._segments.append(Segment.create(len(self._segments)))
                self._free.append(self._segments[-1])
            fitting = next((segment for segment in self._free if segment.nbytes >= nbytes), self._free[-1])
            fitting.grow(nbytes)
            self._free.remove(fitting)
            return fitting

    def give_back(self, segment: Segment) -> None:
        """Put a segment back that nobody reads any more."""
        with self._lock:
            self._free.append(segment)

    def close(self) -> None:
        """Free all memory; the pool is not used any more."""
        with self._lock:
            for segment in self._segments:
                segment.close()
            self._segments, self._free = [], []


# The writer still uses the bucket before the one that it requested last: it holds the last arrays that it requested, up
# to a batch of a data file, which is less than a bucket. So it holds two, and the training process fills the other two.
BUCKETS = 4
_NUMBER_BYTES = 8
_GO = 0
_FREE, _ERROR = b"\1", b"\0"


def buckets_of(space: np.ndarray) -> list[np.ndarray]:
    """Cut the memory into buckets of one size; the same in both processes."""
    return list(space[: len(space) // BUCKETS * BUCKETS].reshape(BUCKETS, -1))


class WaveSender:
    """The training process's end of the buckets: it fills them."""

    def __init__(self, space: np.ndarray) -> None:
        """Take the memory; :attr:`theirs` is the writer's end of the connection."""
        self._buckets = buckets_of(space)
        self._ours, self.theirs = (close_in_forks(end) for end in socket.socketpair())
        self._count = 0

    def bucket(self) -> np.ndarray:
        """Wait until the next bucket is free, and return it.

        Raises:
            CheckpointError: The writer failed, or has ended.
        """
        # The writer has its own copy by now. Without this one, the connection ends with the writer.
        self.theirs.close()
        self._count += 1
        if self._count > BUCKETS:
            word = self._receive(1)
            if word != _FREE:
                self._raise(word)
        return self._buckets[(self._count - 1) % BUCKETS]

    def send(self, nbytes: int) -> None:
        """Send the number of bytes in the bucket; more than 0.

        Raises:
            CheckpointError: The writer failed, or has ended.
        """
        try:
            self._ours.sendall(nbytes.to_bytes(_NUMBER_BYTES, "little"))
        except OSError:
            self._raise(_FREE)

    def _raise(self, word: bytes) -> None:
        # An earlier message of the writer may still be waiting.
        while word == _FREE:
            word = self._receive(1)
        text = "the background writer has ended while a save was handed over"
        if word == _ERROR:
            text = b"".join(iter(lambda: self._receive(1 << 16), b"")).decode(errors="replace")
        raise CheckpointError(text)

    def _receive(self, nbytes: int) -> bytes:
        """Return the next message, or nothing at the end."""
        try:
            return self._ours.recv(nbytes)
        except ConnectionError:  # the kernel resets the connection if the writer ends with unread messages
            return b""

    def go(self) -> None:
        """Send that all ranks succeeded. If the writer has ended meanwhile, others notice."""
        with contextlib.suppress(OSError):
            self._ours.sendall(_GO.to_bytes(_NUMBER_BYTES, "little"))

    def close(self) -> None:
        """Close the connection. Before :meth:`go` that makes the save fail."""
        self.theirs.close()
        self._ours.close()


class WaveReceiver:
    """The writer's end of the buckets: it reads items from them."""

    def __init__(self, connection: socket.socket, space: np.ndarray) -> None:
        """Take the writer's end of the connection, and the memory."""
        self._socket, self._buckets = connection, buckets_of(space)
        self._count = 0

    def items(self, lengths: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the bytes of items of these lengths, as a data file's writer wants them.

        Raises:
            CheckpointError: The training process has ended, or another rank failed.
        """
        bucket = np.empty(0, dtype=np.uint8)
        for length in lengths:
            if not length:
                yield bucket[:0]
            while length:
                if not len(bucket):
                    bucket = self._next()
                piece, bucket = bucket[:length], bucket[length:]
                length -= len(piece)
                yield piece
        if self._receive() != _GO:
            raise CheckpointError("more data came for a save than was planned")

    def _next(self) -> np.ndarray:
        # The bucket before the last is written by now.
        if self._count > 1:
            with contextlib.suppress(OSError):  # if the other end has died, nothing more comes
                self._socket.sendall(_FREE)
        self._count += 1
        return self._buckets[(self._count - 1) % BUCKETS][: self._receive()]

    def _receive(self) -> int:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._socket.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
        if len(data) < _NUMBER_BYTES:
            raise CheckpointError("a save was not handed over to its end: a rank failed, or its process ended")
        return int.from_bytes(data, "little")

    def fail(self, error: BaseException) -> None:
        """Send the training process the error for which this rank cannot write."""
        with contextlib.suppress(OSError):  # the other end has died, or has sent the reason itself
            self._socket.sendall(_ERROR + str(error).encode())

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
