"""Save and load many small tensors in one process, against the medium itself: a plain write and fsync, or read.

Both take turns (A B, B A, ...), so that what else the machine does hits both; what counts is the ratio of times within
a turn. ``raw / save`` of 1.0 means that a save takes as long as the medium does. Loads are of the same layout, of the
second half of the columns where rows were saved (raw: as many bytes), and both with ``verify="full"``, which is also
compared with the same load without. Calls are counted by ``sys.setprofile``: the difference of two states, for each
tensor more.

    python benchmarks/many_tensors.py                                        # in the current directory's file system
    python benchmarks/many_tensors.py --directory /dev/shm --kind paddle --json result.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import paddle_flexckpt as fc
from paddle_flexckpt.live.communicator import SoloCommunicator
from paddle_flexckpt.live.tensor_memory import host_memory
from paddle_flexckpt.sharded_weight import ShardedWeight

COLUMNS = 64
# Tensors, and bytes of each.
CASES = ((64, 8 << 20), (1024, 512 << 10), (4096, 64 << 10), (16384, 32 << 10))
KINDS = ("numpy", "paddle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=case, nargs="+", default=CASES, help="such as 1024x524288")
    parser.add_argument("--kind", choices=KINDS, default="numpy", help="whose tensors; they are in ShardedWeights")
    parser.add_argument("--pairs", type=int, default=7, help="turns")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write (the file system matters)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    logging.getLogger("paddle_flexckpt").setLevel(logging.WARNING)
    result: dict[str, Any] = {"machine": machine(), "kind": options.kind, "directory": str(options.directory.resolve())}
    with tempfile.TemporaryDirectory(prefix="many-tensors-", dir=options.directory) as directory:
        result["calls"] = calls(options.kind, Path(directory))
        show_calls(result["calls"])
        result["cases"] = []
        for tensors, nbytes in options.cases:
            result["cases"].append(measure(options.kind, tensors, nbytes, options.pairs, Path(directory)))
            show(result["cases"][-1])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def case(text: str) -> tuple[int, int]:
    """Read a number of tensors, and the bytes of each."""
    tensors, _, nbytes = text.partition("x")
    return int(tensors), int(nbytes)


def machine() -> dict[str, Any]:
    """Return versions and machine, JSON-safe."""
    return {
        "paddle_flexckpt": fc.__version__,
        "paddle": getattr(sys.modules.get("paddle"), "__version__", None),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def random_state(kind: str, tensors: int, nbytes: int) -> dict[str, ShardedWeight]:
    """Make float32 tensors of ``nbytes`` bytes each."""
    shape = (nbytes // 4 // COLUMNS, COLUMNS)
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    state = {}
    for i in range(tensors):
        tensor: Any = values + np.float32(i)
        if kind == "paddle":
            import paddle

            tensor = paddle.to_tensor(tensor, place=paddle.CPUPlace())
        name = f"model.layers.{i}.mlp.weight"
        state[name] = ShardedWeight(name, tensor, shape, shape, (0, 0))
    return state


def save(state: dict[str, ShardedWeight], path: Path) -> None:
    fc.save_state_dict(state, path, SoloCommunicator())


def save_raw(state: dict[str, ShardedWeight], path: Path) -> None:
    """Write the same bytes from the same memory, a MiB at a time, and make them durable."""
    path.mkdir()
    descriptor = os.open(path / "raw", os.O_WRONLY | os.O_CREAT)
    for weight in state.values():
        view = memoryview(host_memory(weight.local_tensor).view(np.uint8))
        while len(view):
            view = view[os.write(descriptor, view[: 1 << 20]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def half_of(state: dict[str, ShardedWeight]) -> dict[str, ShardedWeight]:
    """Make targets that hold the second half of the columns of each tensor."""
    half = {}
    for name, weight in state.items():
        rows, columns = weight.global_shape
        tensor: Any = np.ones((rows, columns // 2), np.float32)
        if not isinstance(weight.local_tensor, np.ndarray):
            import paddle

            tensor = paddle.to_tensor(tensor, place=paddle.CPUPlace())
        half[name] = ShardedWeight(name, tensor, tensor.shape, weight.global_shape, (0, columns - columns // 2))
    return half


def load(state: dict[str, ShardedWeight], path: Path, verify: str = "read") -> None:
    fc.load_state_dict(state, path, SoloCommunicator(), verify=verify)


def load_raw(state: dict[str, ShardedWeight], path: Path) -> None:
    """Read as many bytes of the data file into the same memory, a MiB at a time."""
    descriptor, offset = os.open(next(path.glob("*.safetensors")), os.O_RDONLY), 0
    for weight in state.values():
        view = memoryview(host_memory(weight.local_tensor).view(np.uint8))
        while len(view):
            got = os.preadv(descriptor, [view[: 1 << 20]], offset)
            view, offset = view[got:], offset + got
    os.close(descriptor)


def calls(kind: str, directory: Path) -> dict[str, dict[str, float]]:
    """Return calls of Python and of C functions for each tensor, by what is done."""
    few, many = 512, 1024
    counts = {}
    for tensors in (few, many):
        state = random_state(kind, tensors, 1 << 10)
        half, path = half_of(state), directory / "calls"
        counts[tensors] = {
            "save": counted(lambda state=state, path=path: save(state, path)),
            "load": counted(lambda state=state, path=path: load(state, path)),
            "cut": counted(lambda half=half, path=path: load(half, path)),
        }
        shutil.rmtree(path)
    events = ("call", "c_call")
    return {
        name: {event: (counts[many][name][event] - counts[few][name][event]) / (many - few) for event in events}
        for name in counts[few]
    }


def counted(work: Callable[[], None]) -> dict[str, int]:
    """Return how often something calls functions of Python and of C."""
    counts = {"call": 0, "c_call": 0, "return": 0, "c_return": 0, "c_exception": 0}

    def count(_frame: Any, event: str, _value: Any) -> None:
        counts[event] += 1

    work()  # what is looked up once has been looked up
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts


def measure(kind: str, tensors: int, nbytes: int, pairs: int, directory: Path) -> dict[str, Any]:
    """Measure one case, JSON-safe."""
    state = random_state(kind, tensors, nbytes)
    subjects = {"raw write": save_raw, "save": save}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(pairs + 1):  # the first warms up
        for name in list(subjects)[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            subjects[name](state, directory / "turn")
            if turn:
                seconds[name].append(time.perf_counter() - begin)
            shutil.rmtree(directory / "turn")
    seconds.update(loads(state, pairs, directory / "kept"))
    pairs_of = {
        "save": ("raw write", "save"),
        "load": ("raw read", "load"),
        "cut": ("raw half", "cut"),
        "load, full": ("raw read", "load, full"),
        "cut, full": ("raw half", "cut, full"),
        "load, full, to load": ("load", "load, full"),
        "cut, full, to cut": ("cut", "cut, full"),
    }
    ratios = {name: compared(seconds[raw], seconds[ours], tensors) for name, (raw, ours) in pairs_of.items()}
    return {"tensors": tensors, "bytes": nbytes, "seconds": seconds, "ratios": ratios}


def loads(state: dict[str, ShardedWeight], pairs: int, path: Path) -> dict[str, list[float]]:
    """Measure what reads, in turns; return the seconds by name."""
    save(state, path)
    half = half_of(state)
    subjects: dict[str, Callable[[], None]] = {
        "raw read": lambda: load_raw(state, path),
        "load": lambda: load(state, path),
        "load, full": lambda: load(state, path, "full"),
        "raw half": lambda: load_raw(half, path),
        "cut": lambda: load(half, path),
        "cut, full": lambda: load(half, path, "full"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(pairs + 1):  # the first warms up
        for name in list(subjects)[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            subjects[name]()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    shutil.rmtree(path)
    return seconds


def compared(raw: list[float], ours: list[float], tensors: int) -> dict[str, float]:
    """Compare turn by turn: the medium's time over ours, and what ours is longer, in microseconds for each tensor."""
    ratios = sorted(medium / own for medium, own in zip(raw, ours))
    beyond = statistics.median(own - medium for medium, own in zip(raw, ours))
    return {
        "median": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "microseconds beyond raw": beyond / tensors * 1e6,
    }


def show_calls(table: dict[str, dict[str, float]]) -> None:
    for name, row in table.items():
        print(f"{name}: {row['call']:.1f} calls of Python functions and {row['c_call']:.1f} of C functions a tensor")


def show(row: dict[str, Any]) -> None:
    for name, ratio in row["ratios"].items():
        left = name.replace(", to ", " against ") if ", to " in name else f"raw / {name}"
        print(
            f"{row['tensors']:>6} x {row['bytes'] >> 10} KiB: {left} {ratio['median']:.2f} "
            f"({ratio['least']:.2f}-{ratio['most']:.2f}), {ratio['microseconds beyond raw']:.1f} us a tensor beyond"
        )


if __name__ == "__main__":
    main()
