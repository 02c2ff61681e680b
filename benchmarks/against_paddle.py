"""Save and load of one process against Paddle's own, and against the medium itself.

All subjects take turns within one process (A B C A B C ...), so that what else the machine does hits all of them; what
is compared is the ratio within a turn. Data is random. Loads come from a warm page cache into memory that exists.

Paddle does not make its files durable, this library does. So saves are measured twice: "durable", where Paddle's files
are fsynced afterwards, and "cached", where this library's fsync does nothing. ``raw`` writes the same bytes from the
same memory with plain system calls: what the medium can do.

    python benchmarks/against_paddle.py                   # 1 GiB, 5 turns, in the current directory's file system
    python benchmarks/against_paddle.py --mib 256 --pairs 3 --directory /dev/shm --json result.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.live.tensors import HostTensor

Times = dict[str, list[float]]
SAVES = {
    # subject: the one that its times are divided by
    "raw, durable": None,
    "ours, durable": "raw, durable",
    "Paddle, durable": "ours, durable",
    "Paddle safetensors, durable": "ours, durable",
    "raw, cached": None,
    "ours, cached": "raw, cached",
    "Paddle, cached": "ours, cached",
    "Paddle safetensors, cached": "ours, cached",
}
LOADS = {
    "raw": None,
    "ours": "raw",
    "ours, unverified": "raw",
    "Paddle": "ours",
    "Paddle safetensors": "ours",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--pairs", type=int, default=5, help="turns")
    parser.add_argument("--tensors", type=int, default=32, help="tensors in the state")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write (the file system matters)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    for name in ("paddle_flexckpt", "paddle", "root"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="against-paddle-", dir=options.directory) as directory:
        result = run(Path(directory), options.mib, options.pairs, options.tensors)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not all(result["equal"].values()):
        raise SystemExit("some loaded values are not those that were saved")


def run(directory: Path, mib: int, pairs: int, tensors: int) -> dict[str, Any]:
    """All measurements, JSON-safe."""
    state = random_state(mib << 20, tensors)
    quiet_paddle()
    saves, loads = {name: [] for name in SAVES}, {name: [] for name in LOADS}
    for turn in range(pairs + 1):  # the first turn warms up
        for name in SAVES:
            seconds = timed_save(name, state, directory)
            if turn:
                saves[name].append(seconds)
    equal = {name: True for name in LOADS}
    target = {name: paddle.empty_like(tensor) for name, tensor in state.items()}
    for name in LOADS:
        save(name.replace(", unverified", ""), state, directory / name)
        warm(directory / name)
    for turn in range(pairs + 1):
        for name in LOADS:
            for tensor in target.values():
                HostTensor(tensor).array.view(np.uint8)[...] = 0
            begin = time.perf_counter()
            load(name, target, directory / name)
            if turn:
                loads[name].append(time.perf_counter() - begin)
            equal[name] &= all(same(target[key], state[key]) for key in state)
    return {
        "mib": mib,
        "pairs": pairs,
        "tensors": tensors,
        "versions": {
            "paddle": paddle.__version__,
            "paddle_flexckpt": fc.__version__,
            "python": platform.python_version(),
        },
        "processors": os.cpu_count(),
        "save": summary(saves, SAVES, mib),
        "load": summary(loads, LOADS, mib),
        "equal": equal,
    }


def random_state(size: int, count: int) -> dict[str, paddle.Tensor]:
    """Random float32 tensors of several sizes, ``size`` bytes in all."""
    rng = np.random.default_rng(0)
    columns = 256
    rows = size // 4 // columns
    cuts = np.sort(rng.choice(np.arange(1, rows), count - 1, replace=False))
    state = {}
    for i, (low, high) in enumerate(zip([0, *cuts], [*cuts, rows])):
        tensor = paddle.empty([int(high - low), columns])
        memory = HostTensor(tensor).array
        memory[...] = rng.standard_normal(len(memory), dtype=np.float32)
        state[f"layers.{i}.weight"] = tensor
    return state


def quiet_paddle() -> None:
    """Paddle's checkpoint modules log every call, to loggers with handlers of their own."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith("paddle"):
            logger.setLevel(logging.WARNING)


def same(a: paddle.Tensor, b: paddle.Tensor) -> bool:
    return bool((HostTensor(a).array.view(np.uint32) == HostTensor(b).array.view(np.uint32)).all())


def timed_save(name: str, state: dict[str, paddle.Tensor], directory: Path) -> float:
    path = directory / "save"
    begin = time.perf_counter()
    if name == "ours, cached":
        with mock.patch("os.fsync"):
            save("ours", state, path)
    else:
        save(name.partition(", ")[0], state, path)
        if name.endswith(", durable") and not name.startswith("ours"):
            make_durable(path)
    seconds = time.perf_counter() - begin
    shutil.rmtree(path)
    return seconds


def save(subject: str, state: dict[str, paddle.Tensor], path: Path) -> None:
    path.mkdir()
    if subject == "ours":
        fc.save_state_dict(state, path)
    elif subject == "raw":
        descriptor = os.open(path / "raw", os.O_WRONLY | os.O_CREAT)
        for tensor in state.values():
            in_steps(lambda view: os.write(descriptor, view), HostTensor(tensor).array)
        os.close(descriptor)
    else:
        dist.save_state_dict(state, str(path), safetensors="safetensors" in subject)


def in_steps(call: Callable[[memoryview], int], array: np.ndarray) -> None:
    """Writes or reads an array, a MiB at a time as this library does."""
    view = memoryview(array.view(np.uint8))
    while len(view):
        view = view[call(view[: 1 << 20]) :]


def make_durable(path: Path) -> None:
    for each in (*path.iterdir(), path):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def warm(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def load(subject: str, target: dict[str, paddle.Tensor], path: Path) -> None:
    if subject.startswith("ours"):
        fc.load_state_dict(target, path, verify=subject == "ours")
    elif subject == "raw":
        descriptor = os.open(path / "raw", os.O_RDONLY)
        for tensor in target.values():
            in_steps(lambda view: os.readv(descriptor, [view]), HostTensor(tensor).array)
        os.close(descriptor)
    else:
        dist.load_state_dict(target, str(path), safetensors="safetensors" in subject)


def summary(times: Times, baselines: dict[str, str | None], mib: int) -> dict[str, Any]:
    """Per subject: seconds of every turn, their median, MiB/s, and the ratio of times within a turn to a baseline."""
    table = {}
    for name, seconds in times.items():
        row: dict[str, Any] = {"seconds": seconds, "median": statistics.median(seconds)}
        row["mib_per_second"] = mib / row["median"]
        baseline = baselines[name]
        if baseline is not None:
            ratios = [mine / other for mine, other in zip(seconds, times[baseline])]
            row["ratio"] = {
                "to": baseline, "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios),
            }  # fmt: skip
        table[name] = row
    return table


def show(result: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"{result['mib']} MiB in {result['tensors']} tensors, {result['pairs']} turns; {versions}")
    for phase in ("save", "load"):
        print(f"\n{phase:<30}{'median':>9}{'MiB/s':>8}   time over time, within a turn (min-max)")
        for name, row in result[phase].items():
            text = f"{name:<30}{row['median']:>7.3f} s{row['mib_per_second']:>8.0f}"
            if "ratio" in row:
                ratio = row["ratio"]
                text += f"   {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}) of {ratio['to']!r}"
            print(text)
    print("\nloaded values equal: " + ("all" if all(result["equal"].values()) else str(result["equal"])))


if __name__ == "__main__":
    main()
