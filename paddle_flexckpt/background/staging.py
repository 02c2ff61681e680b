"""Staging: memory that the training process and its writer share, allocated once and used by save after save.

A segment is a memfd. Its pages cost several times as much to allocate as to write again; so segments are reused, and
grow only when a save needs more than they have (docs/design.md, "Shared memory is touched early").
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from typing import Union

import numpy as np

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.forks import close_in_forks

_HUGE_PAGE_BYTES = 2 << 20
# Page-locks memory for a device, and returns a function that unlocks it; None if it cannot be locked.
LockPages = Callable[[np.ndarray], Union[Callable[[], None], None]]


class Segment:
    """A piece of memory that two processes share.

    Attributes:
        number: Its number, in both processes.
        descriptor: Its memfd.
        nbytes: Bytes of it that are mapped here.
        text: The begin and end of the text that :meth:`fill` has put there.
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
        """Return the segment's own memory as uint8 ``[stop - start]``.

        Raises:
            ValueError: The segment is smaller.
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"bytes {start} to {stop} of segment {self.number}, which has {self.nbytes}")
        return self._memory[start:stop]

    def fill(self, start: int, text: bytes) -> None:
        """Append a text to the segment, after its data."""
        self.text = start, start + len(text)
        self.view(*self.text)[:] = np.frombuffer(text, dtype=np.uint8)

    def lock_pages(self, lock: LockPages) -> None:
        """Page-lock the segment's memory, once for as long as it is mapped."""
        if not self._was_asked:
            self._was_asked, self._unlock = True, lock(self._memory)

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
            f"{format_bytes(available)} are available. Remedy: pass staging_bytes=, to copy through so much memory "
            "(64 MiB at least), save synchronously, or give the job more memory"
        )


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
