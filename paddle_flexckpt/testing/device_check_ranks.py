"""Checks of several ranks over the device backend; run by the launcher of Paddle, not imported.

Tested in tests/device/test_device_check.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # A script's folder comes first on sys.path; there, names like "world" would hide other modules.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.testing.device_check_counts import count_ranks
from paddle_flexckpt.testing.device_check_memory import reshard_of_ranks
from paddle_flexckpt.testing.device_check_record import (
    FP8,
    Found,
    Record,
    Work,
    elements,
    on_device,
    require,
    require_same,
    same,
)


class RankChecks:
    """One rank's part of the checks, in their order."""

    def __init__(self, folder: Path, measured_bytes: int) -> None:
        """Take the folder for checkpoints, which all ranks share, and the size of each rank's timed state."""
        self._folder, self._measured = folder, measured_bytes
        self._rank, self._size = dist.get_rank(), dist.get_world_size()

    def all(self) -> Iterator[tuple[str, Work]]:
        """Yield the checks by name."""
        yield "ranks have a device each", self._places
        yield "save in rows, load in columns", self._save_load
        yield "replicated state is written once", self._replicated
        yield "asynchronous save of all ranks", self._asynchronous
        yield "reshard from rows to columns", self._reshard
        yield "reshard one way", lambda: self._uneven("one way", 100_003, 0)
        yield "reshard of unequal amounts", lambda: self._uneven("unequal", 1_000_003, 1000)
        yield "no device memory left, reshard of ranks", lambda: reshard_of_ranks(self._barrier)
        yield "what crosses the link of a rank", lambda: count_ranks(self._folder, self._measured)
        yield "reshard, speed", self._speed

    def _cut(self, whole: np.ndarray, axis: int, name: str, dtype: str, *, filled: bool) -> fc.ShardedWeight:
        """Return this rank's part of a tensor, cut evenly on one axis, with its values or with zeros."""
        part = self._part(whole, axis)
        offset = [0] * whole.ndim
        offset[axis] = part.shape[axis] * self._rank
        tensor = on_device(part if filled else np.zeros_like(part), dtype)
        return fc.ShardedWeight(name, tensor, part.shape, whole.shape, tuple(offset))

    def _part(self, whole: np.ndarray, axis: int) -> np.ndarray:
        return np.ascontiguousarray(np.split(whole, self._size, axis)[self._rank])

    def _barrier(self) -> None:
        """Wait for the other ranks through host sockets: a barrier of the backend needs device memory."""
        here, there = np.zeros(1), np.ones(1)
        fc.reshard_sharded_state_dict({"meet": here}, {"meet": there})

    def _places(self) -> Found:
        places: list[Any] = []
        dist.all_gather_object(places, str(paddle.zeros([1]).place))
        require(len(set(places)) == self._size, f"the ranks are on {places}")
        total = paddle.full([1], float(self._rank))
        dist.all_reduce(total)
        require(float(total[0]) == sum(range(self._size)), f"the backend sums the ranks' numbers to {float(total[0])}")
        return {"detail": f"backend {dist.get_backend()}, {', '.join(places)}"}

    def _save_load(self) -> Found:
        dtypes = _known("float32", "float16", "bfloat16", "int64", "bool", "uint8", *FP8)
        whole = {dtype: elements(dtype, (24 * self._size, 20 * self._size), dtype) for dtype in dtypes}
        source = {dtype: self._cut(values, 0, dtype, dtype, filled=True) for dtype, values in whole.items()}
        report = fc.save_state_dict(source, self._folder / "rows")
        target = {dtype: self._cut(values, 1, dtype, dtype, filled=False) for dtype, values in whole.items()}
        fc.load_state_dict(target, self._folder / "rows")
        require_same(target, {dtype: self._part(whole[dtype], 1) for dtype in dtypes}, "other values after the load")
        return {"nbytes": report.total_bytes}

    def _replicated(self) -> Found:
        items = elements("replicated", (1000, 64), "float32")
        report = fc.save_state_dict({"w": on_device(items, "float32")}, self._folder / "replicated")
        require(report.total_bytes == items.nbytes, f"{report.total_bytes} bytes were written for {items.nbytes}")
        target = {"w": on_device(np.zeros_like(items), "float32")}
        fc.load_state_dict(target, self._folder / "replicated")
        require(same(target["w"], items), "other values after the load")
        return {"nbytes": items.nbytes, "detail": f"this rank wrote {report.bytes_written} bytes"}

    def _asynchronous(self) -> Found:
        items = elements("asynchronous", (256 * self._size, 128 * self._size), "float32")
        source = {"w": self._cut(items, 0, "w", "float32", filled=True)}
        begin = time.perf_counter()
        with fc.BackgroundWriter() as writer:
            handle: Any = fc.save_state_dict(source, self._folder / "async", async_save=writer)
            blocked = time.perf_counter() - begin
            source["w"].local_tensor.fill_(-1.0)
            handle.result()
        target = {"w": self._cut(items, 1, "w", "float32", filled=False)}
        fc.load_state_dict(target, self._folder / "async")
        require(same(target["w"].local_tensor, self._part(items, 1)), "values from after the save are in it")
        return {"nbytes": items.nbytes // self._size, "figures": {"blocked_seconds": blocked}}

    def _reshard(self) -> Found:
        dtypes = _known("float32", "float16", "bfloat16", "bool", "int64", *FP8)
        whole = {dtype: elements("r" + dtype, (12 * self._size, 17 * self._size), dtype) for dtype in dtypes}
        source = {dtype: self._cut(values, 0, dtype, dtype, filled=True) for dtype, values in whole.items()}
        target = {dtype: self._cut(values, 1, dtype, dtype, filled=False) for dtype, values in whole.items()}
        report = fc.reshard_sharded_state_dict(source, target)
        require_same(target, {dtype: self._part(whole[dtype], 1) for dtype in dtypes}, "other values after the reshard")
        return {"nbytes": report.bytes_received}

    def _uneven(self, name: str, there: int, back: int) -> Found:
        """Move ``there`` elements from the first rank to the last, and ``back`` the other way."""
        last = self._size - 1
        source: dict[str, Any] = {}
        target: dict[str, Any] = {}
        wanted: dict[str, np.ndarray] = {}
        for key, count, giver, taker in (("there", there, 0, last), ("back", back, last, 0)):
            items = elements(name + key, (count,), "float32")
            if count and self._rank == giver:
                source[key] = fc.ShardedWeight(key, on_device(items, "float32"), (count,), (count,), (0,))
            if count and self._rank == taker:
                tensor = on_device(np.zeros_like(items), "float32")
                target[key] = fc.ShardedWeight(key, tensor, (count,), (count,), (0,))
                wanted[key] = items
        fc.reshard_sharded_state_dict(source, target)
        require_same(target, wanted, "other values after the reshard")
        return {"nbytes": sum(items.nbytes for items in wanted.values())}

    def _speed(self) -> Found:
        columns = 1024 * self._size
        rows = max(1, self._measured // 4 // columns)
        shape = (rows * self._size, columns)
        local = paddle.full([rows, columns], float(self._rank))
        target = paddle.zeros([shape[0], columns // self._size])
        source = {"w": fc.ShardedWeight("w", local, (rows, columns), shape, (rows * self._rank, 0))}
        wanted = {"w": fc.ShardedWeight("w", target, (shape[0], 1024), shape, (0, 1024 * self._rank))}
        paddle.device.synchronize()
        begin = time.perf_counter()
        report = fc.reshard_sharded_state_dict(source, wanted)
        paddle.device.synchronize()
        seconds = time.perf_counter() - begin
        expected = np.repeat(np.arange(self._size, dtype="float32"), rows)
        require(bool((target.numpy() == expected[:, None]).all()), "other values after the reshard")
        gib = rows * columns * 4 / 2**30
        return {
            "nbytes": report.bytes_received,
            "detail": f"{gib / seconds:.2f} GiB/s of each rank's state",
            "figures": {"reshard_gib_per_s": gib / seconds},
        }


def _known(*dtypes: str) -> list[str]:
    return [dtype for dtype in dtypes if hasattr(paddle, dtype)]


def killed_rank(folder: Path) -> Found:
    """Kill the last rank while all save; the error of the others has to name it, and the old checkpoint has to stay."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # The launcher ends the ranks that are left.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def save(version: int) -> None:
        items = elements(f"version {version}", (16, 10), "float32")
        state = fc.ShardedWeight("w", on_device(items, "float32"), (16, 10), (16 * size, 10), (16 * rank, 0))
        fc.save_state_dict({"w": state}, folder / "killed", unique_id=0)

    save(1)
    if rank == size - 1:
        os.fsync = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    begin = time.perf_counter()
    try:
        save(2)
    except fc.CheckpointError as error:
        require(f"rank {size - 1}" in str(error), f"the error does not name the rank that was killed: {error}")
        seconds = time.perf_counter() - begin
    else:
        require(False, "a save has gone well of which a rank was killed")
    saved = fc.load_merged_state_dict(folder / "killed")["w"]
    whole = np.concatenate([elements("version 1", (16, 10), "float32")] * size)
    require(same(saved, whole), "the checkpoint that was there has changed")
    return {"detail": f"named after {seconds:.1f} s; the old checkpoint has stayed"}


def main() -> None:
    """Make the checks: ``FOLDER MEASURED-BYTES``."""
    folder, measured = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_parallel_env()
    rank = dist.get_rank()
    record = Record(folder / f"rank.{rank}", rank)
    for name, work in RankChecks(folder, measured).all():
        record.check(name, work)
    if rank == dist.get_world_size() - 1:
        killed_rank(folder)  # does not return
    else:
        record.check("a killed rank", lambda: killed_rank(folder))
    os._exit(0)  # an ordinary end would wait for the rank that is gone


if __name__ == "__main__":
    main()
