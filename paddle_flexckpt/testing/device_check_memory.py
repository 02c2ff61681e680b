"""Checks of memory: calls without device memory, and host memory that is page-locked and unlocked in the end.

Tested in tests/device/test_device_check.py and tests/device/test_device_check_mistakes.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.memory import device_bytes
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.saving import background_saves
from paddle_flexckpt.testing.device_check_record import (
    CheckFailed,
    Found,
    NotHere,
    Work,
    bytes_of,
    counters,
    elements,
    on_device,
    require,
    require_same,
    same,
    state_of,
)
from paddle_flexckpt.transfer import buffered_reads

MIB = 1 << 20
#: The smallest buffer of a load.
BUFFER_BYTES = min(device_bytes.BUFFER_BYTES, buffered_reads.BUFFER_BYTES)
#: Copies of up to this many bytes are made in another way.
_TINY = 4096
#: Sizes that are allocated, each until that fails; a call needs more than the last. A failed allocation is slow.
_SIZES = (1 << 28, 1 << 20)
#: The shape of tensors that need more memory than is left.
_SHAPE = (640, 1024)


class Hoard:
    """A context in which all memory of the current device is occupied.

    Attributes:
        nbytes: Bytes that are occupied.
    """

    def __init__(self) -> None:
        """Begin with no memory occupied."""
        self._held: list[Any] = []
        self.nbytes = 0

    def __enter__(self) -> Hoard:
        paddle.device.synchronize()
        gc.collect()
        for size in _SIZES:
            # The class of the error depends on Paddle's version.
            with contextlib.suppress(RuntimeError, MemoryError, SystemError, OSError, ValueError):
                while True:
                    self._held.append(paddle.empty([size], dtype="uint8"))
                    self.nbytes += size
        return self

    def __exit__(self, *_: object) -> None:
        self._held.clear()
        gc.collect()
        paddle.device.synchronize()
        # Memory that Paddle caches is lost to other processes on the same device. Old versions have no such function.
        getattr(paddle.device, "empty_cache", lambda: None)()


class MemoryChecks:
    """The checks without device memory, in one process."""

    def __init__(self, folder: Path) -> None:
        """Take the folder for checkpoints."""
        self._folder = folder

    def all(self) -> Iterator[tuple[str, Work]]:
        """Yield the checks by name."""
        yield "no device memory left, save", self._save
        yield "no device memory left, load", self._load
        yield "no device memory left, reshard", self._reshard

    def _state(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return values, and tensors of them: a contiguous one, and one that has to be gathered."""
        items = {key: elements(f"{name} {key}", _SHAPE, "float32") for key in ("whole", "turned")}
        return items, {key: on_device(values, "float32") for key, values in items.items()}

    def _save(self) -> Found:
        path = self._folder / "no-memory-save"
        old, bases = self._state("old")
        fc.save_state_dict(_turned(bases), path)
        items, bases = self._state("new")
        state, before = _turned(bases), sorted(each.name for each in path.iterdir())
        text = _refused("save", lambda: fc.save_state_dict(state, path))
        require_same(bases, items, "the save without memory has changed its source")
        after = sorted(each.name for each in path.iterdir())
        require(after == before, f"the save without memory has left {after}; there was {before}")
        _require_saved(path, old, "the checkpoint that was there is another one after the save without memory")
        fc.save_state_dict(state, path)
        _require_saved(path, items, "other values after the save that had memory again")
        return {"nbytes": 2 * items["whole"].nbytes, "detail": text}

    def _load(self) -> Found:
        path = self._folder / "no-memory-load"
        items, bases = self._state("load")
        fc.save_state_dict(_turned(bases), path)
        untouched = {key: elements(f"target {key}", _SHAPE, "float32") for key in items}
        targets = {key: on_device(values, "float32") for key, values in untouched.items()}
        text = _refused("load", lambda: fc.load_state_dict(_turned(targets), path))
        _require_kept(targets, untouched, text)
        fc.load_state_dict(_turned(targets), path)
        require_same(targets, items, "other values after the load that had memory again")
        return {"nbytes": 2 * items["whole"].nbytes, "detail": text}

    def _reshard(self) -> Found:
        """Reshard within one device, which needs no memory and succeeds, unlike all other calls."""
        items, bases = self._state("reshard")
        targets = {key: on_device(np.zeros_like(values), "float32") for key, values in items.items()}
        with Hoard() as hoard:
            fc.reshard_sharded_state_dict(_turned(bases), _turned(targets))
        require_same(targets, items, "other values after the reshard without memory")
        require_same(bases, items, "the reshard without memory has changed its source")
        return {"nbytes": 2 * items["whole"].nbytes, "detail": f"went well, with {hoard.nbytes >> 20} MiB held"}


def reshard_of_ranks(barrier: Callable[[], object]) -> Found:
    """Reshard rows to columns while the last rank has no device memory; all ranks have to raise the error.

    ``barrier`` waits for the other ranks, without device memory.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, columns = 320, 512 * size
    whole = elements("no memory", (rows * size, columns), "float32")
    part = np.ascontiguousarray(whole[rows * rank : rows * (rank + 1)])
    wanted = np.ascontiguousarray(np.split(whole, size, 1)[rank])
    untouched = elements(f"target {rank}", wanted.shape, "float32")
    source, target = on_device(part, "float32"), on_device(untouched, "float32")

    def move() -> None:
        fc.reshard_sharded_state_dict(
            {"w": fc.ShardedWeight("w", source, part.shape, whole.shape, (rows * rank, 0))},
            {"w": fc.ShardedWeight("w", target, wanted.shape, whole.shape, (0, 512 * rank))},
        )

    text = ""
    with Hoard() if rank == size - 1 else contextlib.nullcontext():
        barrier()
        try:
            move()
        except Exception as error:  # any that says what it is will do
            text = _text_of(error)
        barrier()
    barrier()  # ranks may share a device
    require(bool(text), f"a reshard went well for which rank {size - 1} had no device memory")
    require("memory" in text.lower(), f"an error that does not name memory: {text}")
    require(f"rank {size - 1}" in text, f"an error that does not name the rank without memory: {text}")
    require(same(source, part), "the reshard without memory has changed its source")
    _require_kept({"w": target}, {"w": untouched}, text)
    move()
    require(same(target, wanted), "other values after the reshard that had memory again")
    return {"nbytes": part.nbytes, "detail": text}


def _turned(bases: dict[str, Any]) -> dict[str, Any]:
    return {**bases, "turned": bases["turned"].transpose([1, 0])}


def _refused(what: str, work: Callable[[], object]) -> str:
    """Make a call for which there is no memory; return the text of its error."""
    with Hoard() as hoard:
        try:
            work()
        except Exception as error:  # any that says what it is will do
            text = _text_of(error)
        else:
            raise CheckFailed(f"a {what} that needs device memory went well with {hoard.nbytes >> 20} MiB held")
    require("memory" in text.lower(), f"an error that does not name memory: {text}")
    return text


def _text_of(error: Exception) -> str:
    """Return the text of an error, without Paddle's lines of C++."""
    first, *others = re.sub("-{4,}", "", f"{type(error).__name__}: {error}").splitlines()
    return " ".join([first.strip(), *(line for line in others if "memory" in line.lower() and "::" not in line)])


def _require_kept(targets: dict[str, Any], untouched: dict[str, np.ndarray], text: str) -> None:
    """Require that targets are unchanged, or that the error says otherwise."""
    changed = [key for key, values in untouched.items() if not same(targets[key], values)]
    require(not changed or "partly overwritten" in text, f"{changed} changed, of which the error says nothing: {text}")


def _require_saved(path: Path, items: dict[str, np.ndarray], otherwise: str) -> None:
    saved = fc.load_merged_state_dict(path)
    wanted = {"whole": items["whole"], "turned": np.ascontiguousarray(items["turned"].T)}
    require_same(saved, wanted, otherwise)


# -- page-locked host memory ------------------------------------------------------------------------------------------


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
    real_lock_pages = device_bytes.lock_pages

    def lock_pages(memory: np.ndarray, device: str) -> Callable[[], None] | None:
        unlock = real_lock_pages(memory, device)
        lock = Lock(memory.nbytes, unlock is not None)
        locks.append(lock)
        if unlock is None:
            return None

        def release() -> None:
            unlock()
            lock.unlocked = True

        return release

    with contextlib.ExitStack() as patches:
        for module in (background_saves, device_bytes):
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
        if not device_bytes.can_lock(self._device):
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
        library = device_bytes.loaded_library("libcudart.so")
        if library is None:
            raise NotHere("no libcudart is loaded in this process")
        tensor = paddle.arange(2 * MIB, dtype="int32")
        memory = np.zeros(8 * MIB, dtype=np.uint8)
        unlock = device_bytes.lock_pages(memory, "gpu:0")
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
