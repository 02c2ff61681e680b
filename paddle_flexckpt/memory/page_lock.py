"""Page-lock host memory for a device, so that copies run at the link's speed and beside other work.

Paddle offers Python page-locked memory of its own on CUDA only, and no way to lock existing memory, such as the segment
that a background writer shares. So the backend's own function is called, from the library that is loaded.

Tested in tests/device/test_saves.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

logger = logging.getLogger("paddle_flexckpt")


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
            "%s refused to page-lock %d bytes for %s (status %d): copies from the device are slower. Remedy: raise the "
            "limit of locked memory (ulimit -l)",
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
        logger.warning("%s failed (status %d): host memory stays page-locked. Remedy: report this", function, status)


@functools.cache
def loaded_library(name: str) -> ctypes.CDLL | None:
    """Return a library that is loaded in this process, by the beginning of its file's name, or None."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return ctypes.CDLL(f"/{path}")
    return None
