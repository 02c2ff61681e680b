"""Checks that host memory for copies from and to a device is page-locked, and unlocked in the end.

Tested in tests/device/test_device_check.py and tests/device/test_device_check_mistakes.py.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.engine import buffered_reads
from paddle_flexckpt.live import device_bytes, page_lock, shared_saves, targets
from paddle_flexckpt.live.device_memory import DeviceMemory
from paddle_flexckpt.testing.device_check_record import Found, NotHere, Work, bytes_of, counters, require, state_of

MIB = 1 << 20
#: The smallest buffer of a load.
BUFFER_BYTES = min(device_bytes.BUFFER_BYTES, buffered_reads.BUFFER_BYTES)
#: Copies of up to this many bytes are made in another way.
_TINY = 4096


@dataclass
class Lock:
    """A request of the library to page-lock host memory, and whether it was locked and later unlocked."""

    nbytes: int
    locked: bool
    unlocked: bool = False


@contextlib.contextmanager
def _watched_locks() -> Iterator[list[Lock]]:
    """Record all memory that the library asks to be page-locked."""
    locks: list[Lock] = []

    def lock_pages(memory: np.ndarray, device: str) -> Callable[[], None] | None:
        unlock = page_lock.lock_pages(memory, device)
        lock = Lock(memory.nbytes, unlock is not None)
        locks.append(lock)
        if unlock is None:
            return None

        def release() -> None:
            unlock()
            lock.unlocked = True

        return release

    with contextlib.ExitStack() as patches:
        for module in (device_bytes, shared_saves, targets):
            patches.enter_context(mock.patch.object(module, "lock_pages", lock_pages))
        yield locks


class PageChecks:
    """The checks of page-locked memory, in one process and on one device."""

    def __init__(self, device: str, folder: Path, measured_bytes: int) -> None:
        """Take the device, which is current, the folder for checkpoints, and the size of the state."""
        self._device, self._folder, self._measured = device, folder, measured_bytes

    def all(self) -> Iterator[tuple[str, Work]]:
        """Yield the checks by name."""
        yield "host memory is page-locked", self._page_locked
        yield "cudaHostRegister", self._cuda_host_register

    def _page_locked(self) -> Found:
        if not page_lock.can_lock(self._device):
            raise NotHere(f"for {self._device} no function that page-locks memory is known, or its library not loaded")
        state = state_of(self._measured)
        nbytes = bytes_of(state)

        def save_asynchronously() -> None:
            with fc.BackgroundWriter() as writer:
                handle: Any = fc.save_state_dict(state, self._folder / "locked-async", async_save=writer)
                handle.result()

        # At least one buffer of a ring has to be locked, and all staging memory.
        buffer = min(nbytes, BUFFER_BYTES)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "save": (lambda: fc.save_state_dict(state, self._folder / "locked"), buffer),
            "asynchronous save": (save_asynchronously, nbytes),
            "load": (lambda: fc.load_state_dict(state, self._folder / "locked"), buffer),
        }
        details = []
        for name, (call, least) in calls.items():
            with _watched_locks() as locks, self._pageable() as pageable:
                call()
            refused = [lock.nbytes for lock in locks if not lock.locked]
            require(not refused, f"the {name} has memory that is not page-locked, of {refused} bytes")
            locked = sum(lock.nbytes for lock in locks)
            require(locked >= least, f"the {name} has {locked} bytes of page-locked memory; expected {least} or more")
            kept = [lock.nbytes for lock in locks if not lock.unlocked]
            require(not kept, f"the {name} has left memory page-locked, of {kept} bytes")
            require(not pageable, f"the {name} has copied from or to pageable memory, {pageable} bytes")
            details.append(f"{name} {locked >> 20} MiB")
        return {"nbytes": nbytes, "detail": ", ".join(details)}

    @contextlib.contextmanager
    def _pageable(self) -> Iterator[list[int]]:
        """Record the sizes of copies from and to pageable memory, if the device counts them."""
        sizes: list[int] = []
        try:
            device = counters()
        except NotHere:
            yield sizes
            return
        device.reset()
        yield sizes
        paddle.device.synchronize()
        sizes += [span.nbytes for span in device.spans() if span.pageable and span.nbytes > _TINY]

    def _cuda_host_register(self) -> Found:
        """Run the library's code for CUDA, whatever the device."""
        library = page_lock.loaded_library("libcudart.so")
        if library is None:
            raise NotHere("no libcudart is loaded in this process")
        tensor = paddle.arange(2 * MIB, dtype="int32")
        memory = np.zeros(8 * MIB, dtype=np.uint8)
        unlock = page_lock.lock_pages(memory, "gpu:0")
        require(unlock is not None, "cudaHostRegister has refused; the log has its status")
        DeviceMemory(tensor).read_into(0, memory)
        address, nbytes = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
        # Both of these are refused. A status stays CUDA's last error until it is read.
        again = library.cudaHostRegister(address, nbytes, ctypes.c_uint(1))
        library.cudaGetLastError()
        if unlock is not None:
            unlock()
        after = library.cudaHostUnregister(address)
        library.cudaGetLastError()
        require(again != 0, "cudaHostRegister locked the memory a second time: it had not done so before")
        require(after != 0, "cudaHostUnregister unlocked the memory a second time: it had not done so before")
        right = np.array_equal(memory.view(np.int32), np.arange(2 * MIB, dtype=np.int32))
        require(right, "other values after a copy to the memory that was locked")
        detail = f"locked and unlocked; status {again} for a second lock, {after} for a second unlock"
        return {"nbytes": memory.nbytes, "detail": detail}
