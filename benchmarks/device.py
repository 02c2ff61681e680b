"""Saves and loads of a device, against the slower of its link and the medium alone.

The device is that of the plugin of the tests (tests/device/plugin/README.md), simulated unless this program was
started with another one (``python -m tests.device.gpu.on_plugin cuda 1 -m benchmarks.device --gibs 0``). The
simulated link, and a medium whose writes and reads wait until one of the given bandwidth would have taken or brought
the bytes, are slow on purpose, so that waiting for them takes the time, and not the machine: what is shown is whether
copies, writes and reads go on at the same time. With ``--gibs 0`` nothing is slowed down.

    python -m benchmarks.device                       # 256 MiB, 0.125 GiB/s each
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.harness import MIB, Row, arguments, finish, random_tensors, ratios, row, turns
from paddle_flexckpt.media.local import LocalInputFile, LocalOutputFile
from tests.device import plugin

GIB = 1 << 30


class Medium:
    """Take bytes at a bandwidth: whoever writes waits until all bytes before and its own would be there."""

    def __init__(self, gibs: float) -> None:
        self._rate, self._lock, self._free_at = gibs * GIB, threading.Lock(), 0.0

    def take(self, begin: float, nbytes: int) -> None:
        """Wait for bytes whose writing began at a time of ``time.monotonic()``."""
        with self._lock:
            self._free_at = max(self._free_at, begin) + nbytes / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))

    @contextmanager
    def throttles(self) -> Iterator[None]:
        """Slow down all files that this process writes or reads, for the duration of a block."""
        if not self._rate:
            yield
            return
        real, read = LocalOutputFile.write_many, LocalInputFile.read_into_each

        def write_many(file: LocalOutputFile, parts: Any) -> None:
            begin = time.monotonic()
            real(file, parts)
            self.take(begin, sum(memoryview(part).nbytes for part in parts))

        def read_into_each(file: LocalInputFile, buffers: Any, offset: int) -> int:
            begin = time.monotonic()
            got = read(file, buffers, offset)
            self.take(begin, got)
            return got

        writes = mock.patch.object(LocalOutputFile, "write_many", write_many)
        with writes, mock.patch.object(LocalInputFile, "read_into_each", read_into_each):
            yield


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, pairs=5)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--tensors", type=int, default=16, help="tensors in the state")
    parser.add_argument("--gibs", type=float, default=0.125, help="bandwidth of link and medium, GiB/s; 0: as it is")
    options = parser.parse_args(argv)
    if "CUSTOM_DEVICE_ROOT" not in os.environ:
        reason = plugin.missing_tools()
        if reason:
            sys.exit(f"no simulated device: {reason}")
        # Paddle finds devices when it is imported.
        os.environ.update(plugin.environment(1))
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.device", *(sys.argv[1:] if argv is None else argv)])
    directory = Path(tempfile.mkdtemp(prefix="device-", dir=options.directory))
    try:
        seconds, details = measure(options, directory)
    finally:
        shutil.rmtree(directory)
    finish(options, rows_of(seconds, options, details["runtime"]), seconds=seconds, **details)


def rows_of(seconds: Mapping[str, Sequence[float]], options: Any, runtime: str) -> list[Row]:
    """Compare turn by turn; bounds are for a link and a medium that are slowed down."""
    slower = list(map(max, zip(seconds["link"], seconds["medium"])))
    slower_in = list(map(max, zip(seconds["link, to the device"], seconds["medium, reading"])))
    bounds, where = ((">= 0.90", "<= 1.10"), "") if options.gibs else (("", ""), f", {runtime}")
    return [
        row(f"device load / the slower of link and medium alone{where}", ratios(slower_in, seconds["load"]), bounds[0]),
        row(f"device save / the slower of link and medium alone{where}", ratios(slower, seconds["save"]), bounds[0]),
        row(f"device async call / the link alone{where}", ratios(seconds["async"], seconds["link"]), bounds[1]),
        *(row(f"{name}, {options.mib} MiB", values, unit="s") for name, values in seconds.items()),
    ]


def measure(options: Any, directory: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run all subjects in turns; return seconds by subject, and counters."""
    import paddle

    import paddle_flexckpt as fc
    from paddle_flexckpt.memory.device_memory import DeviceMemory

    paddle.set_device(f"{plugin.DEVICE_TYPE}:0")
    shape = (options.mib * MIB // options.tensors // 4096, 1024)
    state = {key: paddle.to_tensor(values) for key, values in random_tensors(options.tensors, shape)}
    nbytes = sum(4 * int(tensor.size) for tensor in state.values())
    whole = np.zeros(nbytes, dtype=np.uint8)
    plugin.page_lock(whole.ctypes.data, whole.nbytes)
    if options.gibs:
        plugin.configure(d2h_gibs=options.gibs, h2d_gibs=options.gibs)
    medium = Medium(options.gibs)
    writer = fc.BackgroundWriter()

    def link() -> None:
        end = 0
        for tensor in state.values():
            begin, end = end, end + 4 * int(tensor.size)
            DeviceMemory(tensor).read_into(0, whole[begin:end])

    def alone() -> None:
        with medium.throttles():
            file = LocalOutputFile(str(directory / "raw"))
            for begin in range(0, nbytes, 8 * MIB):
                file.write_many([memoryview(whole[begin : begin + 8 * MIB])])
            file.finish()

    def save() -> None:
        with medium.throttles():
            fc.save_state_dict(state, str(directory / "save"))

    kept = directory / "kept"
    fc.save_state_dict(state, str(kept))
    target = {key: paddle.zeros_like(tensor) for key, tensor in state.items()}
    (kept / "raw").write_bytes(whole)

    def link_in() -> None:
        end = 0
        for tensor in target.values():
            begin, end = end, end + 4 * int(tensor.size)
            storage = DeviceMemory(tensor)
            storage.write(storage.whole(), whole[begin:end].view(np.float32))

    def open_raw() -> LocalInputFile:
        return LocalInputFile(os.open(kept / "raw", os.O_RDONLY), "raw")

    def alone_in() -> None:
        with medium.throttles(), contextlib.closing(open_raw()) as file:
            for begin in range(0, nbytes, 8 * MIB):
                file.read_into_each([memoryview(whole[begin : begin + 8 * MIB])], begin)

    def load() -> None:
        with medium.throttles():
            fc.load_state_dict(target, str(kept))

    handles = []
    stats: dict[str, Any] = {}  # of each subject's last run
    pageable = 0  # but for what is only looked at below

    def clean(name: str) -> None:
        nonlocal pageable
        counters = plugin.stats()
        pageable += counters["d2h"]["pageable_bytes"]
        stats[name] = counters
        if name == "async":
            handles.pop().result()
        if name == "load":
            for key, tensor in target.items():
                if not bool((tensor == state[key]).all()):
                    raise RuntimeError(f"{key} was not loaded as it was saved")
                tensor.zero_()
            paddle.device.synchronize()
        for path in set(directory.iterdir()) - {kept}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        plugin.reset()

    subjects = {
        "link": link,
        "medium": alone,
        "save": save,
        "link, to the device": link_in,
        "medium, reading": alone_in,
        "load": load,
        "async": lambda: handles.append(fc.save_state_dict(state, str(directory / "async"), async_save=writer)),
    }
    plugin.reset()
    seconds = turns(subjects, options.pairs, after=clean)
    writer.close()
    return seconds, {"pageable bytes": pageable, "runtime": plugin.runtime(), "stats": stats}


if __name__ == "__main__":
    main()
