"""Asynchronous saves: how long training stands still for one, and how much slower it is while one is written.

Both are compared within turns of one process (A B A B ...), so that what else the machine does hits both sides. Data is
random. The first save takes its memory from the system and is reported apart; turns use that memory again.

* blocked: the whole call of ``save_state_dict(..., async_save=writer)``, over a plain numpy copy of the same tensors
  into memory that exists. The save of the turn before is over.
* step: a fixed computation (products of matrices, one thread) while a save is written, over the same without one. It
  needs a core to spare, for the writer. Wall time says what training loses; its own CPU time leaves out what it loses
  to other processes of the machine that are not the writer's.

    python benchmarks/async_save.py                    # 512 MiB, 9 turns, in the current directory's file system
    python benchmarks/async_save.py --mib 256 --pairs 3 --tensors 1000 --directory /dev/shm --json result.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# Before numpy is imported: the computation has one thread.
os.environ.update({name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")})

import numpy as np

import paddle_flexckpt as fc
from paddle_flexckpt.live.communicator import SoloCommunicator
from paddle_flexckpt.live.tensors import HostTensor

SOLO = SoloCommunicator()
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--pairs", type=int, default=9, help="turns")
    parser.add_argument("--tensors", type=int, default=64, help="tensors in the state")
    parser.add_argument("--paddle", action="store_true", help="Paddle tensors; numpy arrays otherwise")
    parser.add_argument("--reserve", action="store_true", help="take the memory before the first save")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write (the file system matters)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    logging.getLogger("paddle_flexckpt").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="async-save-", dir=options.directory) as directory:
        result = run(Path(directory), options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


def run(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements, JSON-safe; times in seconds."""
    state = random_state(options.mib << 20, options.tensors, options.paddle)
    with fc.BackgroundWriter() as writer:
        reserve = timed(lambda: writer.reserve(options.mib << 20)) if options.reserve else None
        first = save(state, directory, writer).result().seconds["blocked"]
        blocked, copies, writes = measure_blocking(state, directory, writer, options.pairs)
        steps = measure_steps(state, directory, writer, options.pairs)
    blocked_ratios = [ours / theirs for ours, theirs in zip(blocked, copies)]
    return {
        "mib": options.mib,
        "tensors": options.tensors,
        "kind": "paddle" if options.paddle else "numpy",
        "cores": len(os.sched_getaffinity(0)),
        "reserve": reserve,
        "first blocked": first,
        "blocked": blocked,
        "memcpy": copies,
        "written in the background": writes,
        "blocked over memcpy": blocked_ratios,
        "median blocked over memcpy": statistics.median(blocked_ratios),
        **{
            f"step, {clock}": {
                "alone": alone,
                "during a save": during,
                "median ratio": statistics.median(ours / theirs for ours, theirs in zip(during, alone)),
            }
            for clock, (alone, during) in steps.items()
        },
    }


def random_state(nbytes: int, tensors: int, use_paddle: bool) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    state: dict[str, Any] = {}
    for i in range(tensors):
        array = np.frombuffer(generator.bytes(nbytes // tensors // 4 * 4), dtype=np.int32)
        if use_paddle:
            import paddle

            state[f"w{i}"] = paddle.to_tensor(array)
        else:
            state[f"w{i}"] = array
    return state


def save(state: dict[str, Any], directory: Path, writer: fc.BackgroundWriter) -> Any:
    """Starts a save; what earlier ones wrote is gone, so that the medium need not hold it."""
    shutil.rmtree(directory, ignore_errors=True)
    return fc.save_state_dict(state, directory, SOLO, async_save=writer)


def measure_blocking(
    state: dict[str, Any], directory: Path, writer: fc.BackgroundWriter, pairs: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the call, of a copy, and of the writing, turn by turn."""
    arrays = [HostTensor(tensor).array.view(np.uint8) for tensor in state.values()]
    target = np.ones(sum(array.nbytes for array in arrays), dtype=np.uint8)

    def copy() -> None:
        end = 0
        for array in arrays:
            begin, end = end, end + array.nbytes
            target[begin:end] = array

    blocked, copies, writes = [], [], []
    for turn in range(WARM_UP + pairs):
        seconds = {}
        for subject in ("copy", "save") if turn % 2 else ("save", "copy"):
            if subject == "copy":
                seconds["copy"] = timed(copy)
            else:
                shutil.rmtree(directory, ignore_errors=True)
                begin = time.perf_counter()
                handle = fc.save_state_dict(state, directory, SOLO, async_save=writer)
                seconds["save"] = time.perf_counter() - begin
                report = handle.result()
        if turn >= WARM_UP:
            blocked.append(seconds["save"])
            copies.append(seconds["copy"])
            writes.append(report.seconds["write"])
    return blocked, copies, writes


def measure_steps(
    state: dict[str, Any], directory: Path, writer: fc.BackgroundWriter, pairs: int
) -> dict[str, tuple[list[float], list[float]]]:
    """By clock: mean seconds of a step without a save, and while one is written, turn by turn."""
    matrix = np.random.default_rng(1).random((384, 384), dtype=np.float32)
    clocks = {"wall": time.perf_counter, "cpu": time.thread_time}
    found: dict[str, tuple[list[float], list[float]]] = {clock: ([], []) for clock in clocks}
    for turn in range(WARM_UP + pairs):
        count = 0
        for side in (1, 0):
            handle = save(state, directory, writer) if side else None
            begin = {clock: now() for clock, now in clocks.items()}
            steps = 0
            while not handle.done() if handle else steps < count:
                np.tanh(matrix @ matrix)
                steps += 1
            count = steps
            for clock, now in clocks.items():
                if turn >= WARM_UP:
                    found[clock][side].append((now() - begin[clock]) / steps)
    return found


def timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
