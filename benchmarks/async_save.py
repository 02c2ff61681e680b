"""Asynchronous saves: how long training stands still for one, and how much slower it is while one is written.

The first save takes its memory from the system and is told apart; turns use that memory again.

* ``call``: the whole call of ``save_state_dict(..., async_save=writer)``, over a plain numpy copy of the same tensors
  into memory that exists. The save of the turn before is over.
* ``step``: a fixed computation (products of matrices, one thread) while a save is written, over the same without one.
  It needs a core to spare, for the writer. Wall time says what training loses; its own CPU time leaves out what it
  loses to other processes of the machine that are not the writer's.

* ``comparing replicas``: the call on two ranks that have the same state, and compare what they save
  (``check_replicas=True``) or all that they have (``"all"``), over the call that compares nothing. What counts is the
  slower rank; both are processes of a CPU world, each with a writer. Wall time needs a quiet machine; the CPU time of
  the call's process, its threads included, does not.

    python -m benchmarks.async_save                    # 512 MiB, 9 turns, in the current directory's file system
    python -m benchmarks.async_save --mib 256 --pairs 3 --tensors 1000 --directory /dev/shm --json result.json
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

# Before numpy is imported: the computation has one thread.
os.environ.update({name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")})

import numpy as np

import paddle_flexckpt as fc
from benchmarks.harness import MIB, Row, arguments, finish, random_tensors, ratios, row, timed, turns
from paddle_flexckpt.memory.tensors import HostTensor
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.testing import World

SOLO = SoloCommunicator()
WARM_UP = 2
WAYS: dict[str, Any] = {"no": False, "comparing what is saved": True, "comparing all": "all"}
CPU = ", its own CPU time"
COLUMNS = 128
Seconds = dict[str, list[float]]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, pairs=9)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--tensors", type=int, default=64, help="tensors in the state")
    parser.add_argument("--paddle", action="store_true", help="Paddle tensors; numpy arrays otherwise")
    parser.add_argument("--reserve", action="store_true", help="take the memory before the first save")
    options = parser.parse_args(argv)
    logging.getLogger("paddle_flexckpt").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="async-save-", dir=options.directory) as directory:
        rows, seconds = measure(Path(directory) / "checkpoint", options)
        rows += comparing(Path(directory).absolute() / "replicas", options, seconds)
    finish(options, rows, seconds=seconds)


def measure(path: Path, options: argparse.Namespace) -> tuple[list[Row], Seconds]:
    """Return the rows, and all seconds."""
    state = random_state(options.mib * MIB, options.tensors, options.paddle)
    case = f"{options.mib} MiB, {options.tensors:,} tensors"
    seconds: Seconds = {}
    with fc.BackgroundWriter() as writer:
        if options.reserve:
            seconds["reserve"] = [timed(lambda: writer.reserve(options.mib * MIB))]
        seconds["first call"] = [save(state, path, writer).result().seconds["blocked"]]
        seconds.update(calls(state, path, writer, options.pairs))
        seconds.update(steps(state, path, writer, options.pairs))
    longer = {
        clock: ratios(seconds[f"step during a save, {clock}"], seconds[f"step, {clock}"]) for clock in ("wall", "CPU")
    }
    return [
        row(f"call of an async save, in memcpys: {case}", ratios(seconds["call"], seconds["memcpy"])),
        row(f"first call of an async save: {case}", seconds["first call"], unit="s"),
        row(f"training step during a save / without: {case}", longer["wall"], "<= 1.02", note="wall time"),
        row(f"training step during a save / without, its own CPU time: {case}", longer["CPU"]),
    ], seconds


def comparing(path: Path, options: argparse.Namespace, seconds: Seconds) -> list[Row]:
    """Return the rows of calls that compare replicas; add their seconds."""
    arguments = {"mib": options.mib, "tensors": options.tensors, "pairs": options.pairs}
    with World(2) as world:
        ranks = world.run("benchmarks.async_save:comparing_calls", time_limit=3600, directory=str(path), **arguments)
    found = {name: [max(pair) for pair in zip(*(rank[name] for rank in ranks))] for name in ranks[0]}
    seconds.update({f"call on two ranks, {name}": values for name, values in found.items()})
    case = f"{options.mib} MiB, 2 ranks"
    return [
        row(
            f"call of an async save, {way} / without comparing replicas{clock}: {case}",
            ratios(found[way + clock], found["no" + clock]),
            bound,
        )
        for way, bound in (("comparing what is saved", "<= 1.2"), ("comparing all", ""))
        for clock in ("", CPU)
    ]


def comparing_calls(directory: str, mib: int, tensors: int, pairs: int) -> Seconds:
    """Return the seconds of one rank's calls, in turns."""
    state = random_state(mib * MIB, tensors, use_paddle=True)
    seconds: Seconds = {way + clock: [] for way in WAYS for clock in ("", CPU)}
    with fc.BackgroundWriter() as writer:
        for turn in range(WARM_UP + pairs):
            for way in list(WAYS) if turn % 2 else reversed(WAYS):
                begin, begin_cpu = time.perf_counter(), time.process_time()
                handle = fc.save_state_dict(state, directory, unique_id=0, async_save=writer, check_replicas=WAYS[way])
                if turn >= WARM_UP:
                    seconds[way].append(time.perf_counter() - begin)
                    seconds[way + CPU].append(time.process_time() - begin_cpu)
                handle.result()
    return seconds


def random_state(nbytes: int, tensors: int, use_paddle: bool) -> dict[str, Any]:
    state: dict[str, Any] = dict(random_tensors(tensors, (nbytes // tensors // 4 // COLUMNS, COLUMNS)))
    if use_paddle:
        import paddle

        state = {name: paddle.to_tensor(tensor) for name, tensor in state.items()}
    return state


def save(state: dict[str, Any], path: Path, writer: fc.BackgroundWriter) -> Any:
    """Start a save; what earlier ones wrote is gone, so that the medium need not hold it."""
    shutil.rmtree(path, ignore_errors=True)
    return fc.save_state_dict(state, path, SOLO, async_save=writer)


def calls(state: dict[str, Any], path: Path, writer: fc.BackgroundWriter, pairs: int) -> Seconds:
    """Return the seconds of the call, of a copy, and of the writing, turn by turn."""
    arrays = [HostTensor(tensor).array.reshape(-1).view(np.uint8) for tensor in state.values()]
    target = np.ones(sum(array.nbytes for array in arrays), dtype=np.uint8)
    writes: list[float] = []

    def copy() -> None:
        end = 0
        for array in arrays:
            begin, end = end, end + array.nbytes
            target[begin:end] = array

    def call() -> float:
        shutil.rmtree(path, ignore_errors=True)
        begin = time.perf_counter()
        handle = fc.save_state_dict(state, path, SOLO, async_save=writer)
        seconds = time.perf_counter() - begin
        writes.append(handle.result().seconds["write"])
        return seconds

    seconds = turns({"memcpy": copy, "call": call}, pairs, warm_up=WARM_UP)
    return {**seconds, "written in the background": writes[WARM_UP:]}


def steps(state: dict[str, Any], path: Path, writer: fc.BackgroundWriter, pairs: int) -> Seconds:
    """Return mean seconds of a step while a save is written, and of as many steps without one, turn by turn."""
    matrix = np.random.default_rng(1).random((384, 384), dtype=np.float32)
    clocks = {"wall": time.perf_counter, "CPU": time.thread_time}
    found: Seconds = {f"step{during}, {clock}": [] for during in ("", " during a save") for clock in clocks}
    for turn in range(WARM_UP + pairs):
        count = 0
        for during in (" during a save", ""):
            handle = save(state, path, writer) if during else None
            begin = {clock: now() for clock, now in clocks.items()}
            done = 0
            while not handle.done() if handle else done < count:
                np.tanh(matrix @ matrix)
                done += 1
            count = done
            for clock, now in clocks.items():
                if turn >= WARM_UP:
                    found[f"step{during}, {clock}"].append((now() - begin[clock]) / done)
    return found


if __name__ == "__main__":
    main()
