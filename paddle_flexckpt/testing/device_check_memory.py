"""Check calls for which a device has no memory left: what they say, what they leave, and that they go well later.

Tested in tests/device/test_device_check.py and tests/device/test_device_check_mistakes.py.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.testing.device_check_record import CheckFailed, Found, Work, elements, on_device, require, same

#: Sizes that are taken, each until no more of it is to be had; a call needs more than the last. Refusals are slow.
_SIZES = (1 << 28, 1 << 20)
#: Of tensors that take more than what is left.
_SHAPE = (640, 1024)


class Hoard:
    """Occupy all memory of the current device for the time of a with statement.

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
            # Which one it is depends on Paddle's version.
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
    """Make the checks of one process."""

    def __init__(self, folder: Path) -> None:
        """Take the folder for checkpoints."""
        self._folder = folder

    def all(self) -> Iterator[tuple[str, Work]]:
        """Yield the checks by name."""
        yield "no device memory left, save", self._save
        yield "no device memory left, load", self._load
        yield "no device memory left, reshard", self._reshard

    def _state(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return values, and tensors of them: one that stands as it is, and one that has to be gathered."""
        items = {key: elements(f"{name} {key}", _SHAPE, "float32") for key in ("whole", "turned")}
        return items, {key: on_device(values, "float32") for key, values in items.items()}

    def _save(self) -> Found:
        path = self._folder / "no-memory-save"
        old, bases = self._state("old")
        fc.save_state_dict(_turned(bases), path)
        items, bases = self._state("new")
        state, before = _turned(bases), sorted(each.name for each in path.iterdir())
        said = _refused("save", lambda: fc.save_state_dict(state, path))
        _require_same(bases, items, "the save without memory has changed its source")
        after = sorted(each.name for each in path.iterdir())
        require(after == before, f"the save without memory has left {after}; there was {before}")
        _require_saved(path, old, "the checkpoint that was there is another one after the save without memory")
        fc.save_state_dict(state, path)
        _require_saved(path, items, "other values after the save that had memory again")
        return {"nbytes": 2 * items["whole"].nbytes, "detail": said}

    def _load(self) -> Found:
        path = self._folder / "no-memory-load"
        items, bases = self._state("load")
        fc.save_state_dict(_turned(bases), path)
        untouched = {key: elements(f"target {key}", _SHAPE, "float32") for key in items}
        targets = {key: on_device(values, "float32") for key, values in untouched.items()}
        said = _refused("load", lambda: fc.load_state_dict(_turned(targets), path))
        _require_kept(targets, untouched, said)
        fc.load_state_dict(_turned(targets), path)
        _require_same(targets, items, "other values after the load that had memory again")
        return {"nbytes": 2 * items["whole"].nbytes, "detail": said}

    def _reshard(self) -> Found:
        """Move within one device, for which no memory is needed: the one call that goes well."""
        items, bases = self._state("reshard")
        targets = {key: on_device(np.zeros_like(values), "float32") for key, values in items.items()}
        with Hoard() as hoard:
            fc.reshard_sharded_state_dict(_turned(bases), _turned(targets))
        _require_same(targets, items, "other values after the reshard without memory")
        _require_same(bases, items, "the reshard without memory has changed its source")
        return {"nbytes": 2 * items["whole"].nbytes, "detail": f"went well, with {hoard.nbytes >> 20} MiB held"}


def reshard_of_ranks(meet: Callable[[], object]) -> Found:
    """Move rows to columns while the last rank has no device memory; all ranks have to be told.

    ``meet`` waits for the other ranks, without device memory.
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

    said = ""
    with Hoard() if rank == size - 1 else contextlib.nullcontext():
        meet()
        try:
            move()
        except Exception as error:  # any that says what it is will do
            said = _told(error)
        meet()
    meet()  # ranks may share a device
    require(bool(said), f"a reshard went well for which rank {size - 1} had no device memory")
    require("memory" in said.lower(), f"an error that does not name memory: {said}")
    require(f"rank {size - 1}" in said, f"an error that does not name the rank without memory: {said}")
    require(same(source, part), "the reshard without memory has changed its source")
    _require_kept({"w": target}, {"w": untouched}, said)
    move()
    require(same(target, wanted), "other values after the reshard that had memory again")
    return {"nbytes": part.nbytes, "detail": said}


def _turned(bases: dict[str, Any]) -> dict[str, Any]:
    return {**bases, "turned": bases["turned"].transpose([1, 0])}


def _refused(what: str, work: Callable[[], object]) -> str:
    """Make a call for which there is no memory; return what it said."""
    with Hoard() as hoard:
        try:
            work()
        except Exception as error:  # any that says what it is will do
            said = _told(error)
        else:
            raise CheckFailed(f"a {what} that needs device memory went well with {hoard.nbytes >> 20} MiB held")
    require("memory" in said.lower(), f"an error that does not name memory: {said}")
    return said


def _told(error: Exception) -> str:
    """Return what an error says, without the lines of C++ that Paddle puts in between."""
    first, *others = re.sub("-{4,}", "", f"{type(error).__name__}: {error}").splitlines()
    return " ".join([first.strip(), *(line for line in others if "memory" in line.lower() and "::" not in line)])


def _require_same(tensors: dict[str, Any], items: dict[str, np.ndarray], otherwise: str) -> None:
    wrong = [key for key, values in items.items() if not same(tensors[key], values)]
    require(not wrong, f"{otherwise}: {wrong}")


def _require_kept(targets: dict[str, Any], untouched: dict[str, np.ndarray], said: str) -> None:
    """Require that targets are as they were, or that the error says otherwise."""
    changed = [key for key, values in untouched.items() if not same(targets[key], values)]
    require(not changed or "partly overwritten" in said, f"{changed} changed, of which the error says nothing: {said}")


def _require_saved(path: Path, items: dict[str, np.ndarray], otherwise: str) -> None:
    saved = fc.load_merged_state_dict(path)
    wanted = {"whole": items["whole"], "turned": np.ascontiguousarray(items["turned"].T)}
    _require_same(saved, wanted, otherwise)
