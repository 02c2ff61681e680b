"""Bring bytes of device tensors to the host, ahead of their user, through page-locked memory.

Two threads copy into a ring of buffers, while the caller hashes and writes earlier ones. While a thread waits for its
copy, without the interpreter's lock, the other's copy is queued, so that the link is always busy.

Copies to and from page-locked memory run at the link's speed and beside other work. Paddle offers Python such memory on
CUDA only, and no way to lock existing memory, such as the segment that a background writer shares. So the backend's own
function is called, from the library that is loaded.

Tested in tests/device/test_saves.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.media.ring import BufferRing
from paddle_flexckpt.memory.device_memory import DeviceMemory, use_current_device
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.native.data_file import BATCH_BLOCKS, BATCH_BYTES

logger = logging.getLogger("paddle_flexckpt")

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
        """Take the spans, the device that most of them are on, and an upper bound of their bytes with alignment."""
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
        # The caller's state: views of the current buffer, and buffers that it may still use, each with the number of
        # bytes and arrays that had been given when its last view was.
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


class _Backend(NamedTuple):
    """A library: its name, its function that locks (address, bytes, flags...; 0 is success), and one that unlocks."""

    library: str
    lock: str
    unlock: str
    flags: tuple[int, ...] = ()


# 1: page-locked for all contexts of the process (cudaHostRegisterPortable).
_BACKENDS = {
    "gpu": _Backend("libcudart.so", "cudaHostRegister", "cudaHostUnregister", (1,)),
    "rehearsal": _Backend("libpaddle-rehearsal.so", "rehearsal_register_host", "rehearsal_unregister_host"),
}


def can_lock(device: str) -> bool:
    """Return whether a loaded library has a known function that locks memory for a device's backend."""
    backend = _BACKENDS.get(device.partition(":")[0])
    return backend is not None and loaded_library(backend.library) is not None


def lock_pages(memory: np.ndarray, device: str) -> Callable[[], None] | None:
    """Page-lock an array's memory for a device such as ``gpu:0``; the array must stay in place until it is unlocked.

    Returns:
        A function that unlocks it. None if no function of the backend is known, or if it refuses, which is logged:
        copies are slower then, and nothing else changes.
    """
    backend = _BACKENDS.get(device.partition(":")[0])
    library = None if backend is None else loaded_library(backend.library)
    if backend is None or library is None or not memory.nbytes:
        return None
    address = ctypes.c_void_p(memory.ctypes.data)
    flags = [ctypes.c_uint(flag) for flag in backend.flags]
    status = library[backend.lock](address, ctypes.c_size_t(memory.nbytes), *flags)
    if status:
        logger.warning(
            "%s refused to page-lock %d bytes for %s (status %d): copies from the device are slower. Remedy (FC808): "
            "raise the limit of locked memory (ulimit -l)",
            backend.lock,
            memory.nbytes,
            device,
            status,
        )
        return None
    return functools.partial(_unlock, library, backend.unlock, address)


def _unlock(library: ctypes.CDLL, function: str, address: ctypes.c_void_p) -> None:
    status = library[function](address)
    if status:
        logger.warning(
            "%s failed (status %d): host memory stays page-locked. Remedy (FC808): report this", function, status
        )


@functools.cache
def loaded_library(name: str) -> ctypes.CDLL | None:
    """Return a library that is loaded in this process, by the beginning of its file's name, or None."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return ctypes.CDLL(f"/{path}")
    return None
