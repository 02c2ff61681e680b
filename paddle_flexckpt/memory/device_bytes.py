"""Bring bytes of device tensors to the host, ahead of their user: the first stage of a save from a device.

Two threads copy into a ring of buffers, while the caller hashes and writes earlier ones. While a thread waits for its
copy, without the interpreter's lock, the other's copy is queued, so that the link is always busy.

Tested in tests/device/test_saves.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from paddle_flexckpt.media.ring import BufferRing
from paddle_flexckpt.memory.device_memory import DeviceMemory, use_current_device
from paddle_flexckpt.memory.page_lock import lock_pages
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.native.data_file import BATCH_BLOCKS, BATCH_BYTES

# As large as one write, so that few gaps lie between copies. The caller keeps up to two buffers and the one that it is
# reading from; as many are filled meanwhile.
BUFFER_BYTES = BATCH_BYTES
BUFFERS = 6
# Every dtype is aligned at multiples of it.
ALIGNMENT = 16

# A tensor, its first byte, and its last one exclusive; bytes count in row-major order.
Span = tuple[Any, int, int]
# A tensor, the first byte to copy, and the memory to copy to.
_Copy = tuple[DeviceMemory, int, np.ndarray]


class DeviceBytes:
    """Spans of device tensors, read in their order.

    An array is valid until ``BATCH_BYTES`` more bytes, or ``BATCH_BLOCKS`` more arrays, have been requested: the writer
    of a data file holds no more. A context manager: leaving it ends all copies and frees the memory.
    """

    def __init__(self, spans: Iterable[Span], device: str, nbytes: int) -> None:
        """Take the spans, the device that most are on, and how many bytes they have with room for their alignment."""
        # A buffer may lack a block at its end.
        count = min(BUFFERS, nbytes // (BUFFER_BYTES - BLOCK_BYTES) + 1)
        memory = np.empty(count * BUFFER_BYTES, dtype=np.uint8)
        self._unlock = lock_pages(memory, device)
        self._ring = BufferRing(list(memory.reshape(count, BUFFER_BYTES)), self._fill, self._copy)
        # The threads' state: the current tensor, its bytes that are left, and what each thread has done once.
        self._spans = iter(spans)
        self._thread = threading.local()
        self._storage: DeviceMemory | None = None
        self._next = self._stop = 0
        # The caller's state: views of the current buffer, and buffers that it may still use, with the bytes and arrays
        # that had been given when their last one was.
        self._views: deque[np.ndarray] = deque()
        self._buffer: np.ndarray | None = None
        self._used: deque[tuple[int, int, np.ndarray]] = deque()
        self._bytes = self._arrays = 0

    def read(self, nbytes: int) -> Iterator[np.ndarray]:
        """Yield the next span, of so many bytes, as uint8 arrays, one at least; all but the last have whole blocks."""
        if not nbytes:
            yield np.empty(0, dtype=np.uint8)
        while nbytes:
            if not self._views:
                self._take()
            view = self._views.popleft()
            nbytes -= view.nbytes
            self._bytes += view.nbytes
            self._arrays += 1
            yield view

    def _take(self) -> None:
        """Get the next buffer; give back those that the caller does not use any more."""
        if self._buffer is not None:
            self._used.append((self._bytes, self._arrays, self._buffer))
        while self._used and (
            self._used[0][0] <= self._bytes - BATCH_BYTES or self._used[0][1] <= self._arrays - BATCH_BLOCKS
        ):
            self._ring.give_back(self._used.popleft()[2])
        taken = self._ring.take()
        if taken is None:
            raise RuntimeError("more bytes of device tensors were asked for than were announced")
        self._buffer, copies = taken
        self._views.extend(view for _, _, view in copies)

    # The following run in the threads.

    def _copy(self, copies: list[_Copy]) -> None:
        for storage, start, view in copies:
            storage.read_into(start, view)

    def _fill(self, buffer: np.ndarray) -> list[_Copy] | None:
        if not hasattr(self._thread, "is_ready"):
            use_current_device()
            self._thread.is_ready = True
        copies: list[_Copy] = []
        position = 0
        while position < len(buffer):
            copy = self._next_copy(buffer[position:])
            if copy is None:
                break
            copies.append(copy)
            position += -(-len(copy[2]) // ALIGNMENT) * ALIGNMENT
        return copies or None

    def _next_copy(self, room: np.ndarray) -> _Copy | None:
        """Return the next copy of the spans; None at the end, or if the room is too little for a block."""
        while self._next == self._stop:
            span = next(self._spans, None)
            if span is None:
                return None
            tensor, self._next, self._stop = span
            self._storage = DeviceMemory(tensor) if self._next < self._stop else None
        count = self._stop - self._next
        if count > len(room):
            count = len(room) // BLOCK_BYTES * BLOCK_BYTES
        if not count or self._storage is None:
            return None
        self._next += count
        return self._storage, self._next - count, room[:count]

    def close(self) -> None:
        """Copy no more, wait for the threads, and give the memory back."""
        self._ring.close()
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def __enter__(self) -> DeviceBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
