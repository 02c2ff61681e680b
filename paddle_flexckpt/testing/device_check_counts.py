"""Checks of the bytes that calls move over the link, by the counters of the device.

The figures are those of the table in docs/devices.md. A device that counts names its counters in the variable
``FLEXCKPT_DEVICE_COUNTERS``.

Tested in tests/device/test_device_check.py and tests/device/test_device_check_mistakes.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication.device_exchange import ROUND_BYTES
from paddle_flexckpt.memory.replica_digests import ROW_WORDS
from paddle_flexckpt.testing.device_check_record import Found, counters, require
from paddle_flexckpt.transfer.buffered_reads import BUFFER_BYTES
from paddle_flexckpt.transfer.copies import DEVICE_CHUNK_BYTES

MIB = 1 << 20
_COLUMNS = 1024
#: The most device memory of a reshard, of a reshard through the host, and of a comparison of replicas.
_RESHARD_BYTES, _OFFLOAD_BYTES, _COMPARE_BYTES = 64 * MIB, 8 * MIB, 4 * MIB


class Ledger:
    """The bytes that calls move, compared with the bytes that they should move.

    Attributes:
        figures: The bytes that each call has moved.
    """

    def __init__(self) -> None:
        """Find the device's counters.

        Raises:
            NotHere: The device has no counters that are known.
        """
        self._counters = counters()
        self.figures: dict[str, float] = {}
        self._wrong: list[str] = []
        # Collectives whose messages went through host memory, as between devices that cannot reach each other's memory.
        self._by_host: set[str] = set()

    def call(self, name: str, work: Callable[[], Any], *, device_memory: int = 0, spare: int = 0, **moved: int) -> Any:
        """Make a call and return its result.

        Args:
            name: The name of the call.
            work: The call.
            device_memory: The most bytes of device memory that the call may take.
            spare: The bytes that may cross to the host besides.
            **moved: Bytes ``to_host``, ``to_device`` and ``to_ranks``, and ``collectives``; those that are not given
                have to be 0.
        """
        paddle.device.synchronize()
        gc.collect()
        self._counters.reset()
        before = self._counters.stats()
        result = work()
        paddle.device.synchronize()
        after = self._counters.stats()
        found = {
            "to_host": after["d2h"]["bytes"],
            "to_device": after["h2d"]["bytes"],
            "to_ranks": after["ccl"]["bytes"],
            "collectives": after["ccl"]["calls"],
        }
        for what, number in found.items():
            self.figures[f"{name}: {what}"] = number
            if not 0 <= number - moved.get(what, 0) <= (spare if what == "to_host" else 0):
                self._wrong.append(f"{name}: {what} is {number}, and should be {moved.get(what, 0)}")
        taken = after["device_peak"] - before["device_bytes"]
        self.figures[f"{name}: device_memory"] = taken
        if taken > device_memory:
            self._wrong.append(f"{name}: {taken} bytes of device memory were taken, {device_memory} may be")
        by_host = set(after.get("fallbacks", ()))
        kernels = sorted(by_host - set(after["collectives"]))
        if kernels:
            self._wrong.append(f"{name}: kernels that ran on the host: {', '.join(kernels)}")
        self._by_host |= by_host
        return result

    def found(self, nbytes: int) -> Found:
        """Return the figures of all calls, on a state of this many bytes.

        Raises:
            CheckFailed: One of them was wrong.
        """
        require(not self._wrong, "; ".join(self._wrong))
        calls = len({name.partition(":")[0] for name in self.figures})
        detail = f"{calls} calls, each as it should"
        if self._by_host:
            detail += f"; messages went through the host: {', '.join(sorted(self._by_host))}"
        return {"nbytes": nbytes, "detail": detail, "figures": self.figures}


def count_alone(folder: Path, measured_bytes: int, writer: fc.BackgroundWriter) -> Found:
    """Count the bytes that the calls of one process move."""
    ledger = Ledger()
    tensor = _numbers(_rows(measured_bytes))
    state, nbytes = {"w": tensor}, int(tensor.size) * 4
    ledger.call("save", lambda: fc.save_state_dict(state, folder / "counted"), to_host=nbytes)
    handle: Any = ledger.call(
        "asynchronous save",
        lambda: fc.save_state_dict(state, folder / "counted-async", async_save=writer),
        to_host=nbytes,
    )
    handle.result()
    target = {"w": paddle.zeros_like(tensor)}
    ledger.call("load", lambda: fc.load_state_dict(target, folder / "counted-async"), to_device=nbytes)
    columns = paddle.zeros([tensor.shape[0], _COLUMNS + 8], dtype="int32")[:, 4:-4]
    ledger.call(
        "load into columns",
        lambda: fc.load_state_dict({"w": columns}, folder / "counted"),
        to_device=nbytes,
        device_memory=BUFFER_BYTES,
    )
    ledger.call(
        "save of columns",
        lambda: fc.save_state_dict({"w": columns}, folder / "counted-columns"),
        to_host=nbytes,
        device_memory=2 * DEVICE_CHUNK_BYTES,
    )
    merged = ledger.call("merged load", lambda: fc.load_merged_state_dict(folder / "counted"))
    again = {"w": paddle.zeros_like(tensor)}
    ledger.call("reshard", lambda: fc.reshard_sharded_state_dict(state, again))
    whole = tensor.numpy()
    arrived = {
        "load": target["w"],
        "load into columns": columns,
        "merged load": merged["w"],
        "reshard": again["w"],
    }
    wrong = [name for name, there in arrived.items() if not np.array_equal(there.numpy(), whole)]
    require(not wrong, f"other values after {wrong}")
    return ledger.found(nbytes)


def count_ranks(folder: Path, measured_bytes: int) -> Found:
    """Count the bytes that the calls of all ranks move on this rank; each rank has the same share of the state."""
    ledger = Ledger()
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = _rows(measured_bytes) // size * size
    columns = _COLUMNS // size
    whole = _numbers(rows * size, columns * size)
    nbytes = rows * columns * size * 4
    shape = tuple(whole.shape)
    part = whole[rows * rank : rows * (rank + 1)].clone()
    source = {"w": fc.ShardedWeight("w", part, tuple(part.shape), shape, (rows * rank, 0))}
    ledger.call("save", lambda: fc.save_state_dict(source, folder / "counted-rows"), to_host=nbytes)

    def columns_of(tensor: Any) -> dict[str, Any]:
        return {"w": fc.ShardedWeight("w", tensor, tuple(tensor.shape), shape, (0, columns * rank))}

    targets = {
        name: paddle.zeros([rows * size, columns], dtype="int32") for name in ("load", "reshard", "through the host")
    }
    ledger.call(
        "load",
        lambda: fc.load_state_dict(columns_of(targets["load"]), folder / "counted-rows"),
        to_device=nbytes,
    )
    foreign = nbytes // size * (size - 1)
    quota = ROUND_BYTES // (size - 1) // 16 * 16
    ledger.call(
        "reshard",
        lambda: fc.reshard_sharded_state_dict(source, columns_of(targets["reshard"])),
        to_ranks=foreign,
        collectives=-(-(nbytes // size) // quota),
        device_memory=_RESHARD_BYTES,
    )
    ledger.call(
        "reshard through the host",
        lambda: fc.reshard_sharded_state_dict(source, columns_of(targets["through the host"]), offload=True),
        to_host=foreign,
        to_device=foreign,
        device_memory=_OFFLOAD_BYTES,
    )
    wanted = whole.numpy()[:, columns * rank : columns * (rank + 1)]
    wrong = [name for name, tensor in targets.items() if not np.array_equal(tensor.numpy(), wanted)]
    require(not wrong, f"other values after {wrong}")
    # Each rank computes the sums of its own share and of a neighbour's. Two ranks sum up all rows; with more ranks, a
    # share may end within the rows of one sum.
    written = int(whole.size) * 4 // size
    ledger.call(
        "replicated save",
        lambda: fc.save_state_dict({"w": whole}, folder / "counted-replicas"),
        to_host=written + 8 * (2 * written // (ROW_WORDS * 4)),
        spare=0 if size == 2 else 8 * size,
        to_device=ROW_WORDS * 8,
        device_memory=_COMPARE_BYTES,
    )
    return ledger.found(nbytes)


def _rows(measured_bytes: int) -> int:
    """Return the rows of a tensor: enough for two rounds of a reshard, and whole rows of sums."""
    unit = ROW_WORDS // _COLUMNS
    return max(1, min(measured_bytes, 40 * MIB) // 4 // _COLUMNS // unit) * unit


def _numbers(rows: int, columns: int = _COLUMNS) -> Any:
    return paddle.arange(rows * columns, dtype="int32").reshape([rows, columns])
