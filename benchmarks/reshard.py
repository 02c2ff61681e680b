"""Reshard in memory between processes of one host, against a memcpy of the same bytes.

Every rank holds rows of each tensor and wants columns, so all but its own part comes from the others. A reshard (with
its plan made before, and without one) and a copy of as many bytes as the targets have take turns in all ranks at once.
A ratio of 1.0 means that a reshard takes as long as copying its result.

    python -m benchmarks.reshard                      # 2 and 4 processes, 64 and 1,024 tensors
    python -m benchmarks.reshard --ranks 2 --cases 1024x262144 --json result.json
    python -m benchmarks.reshard --in-place           # and bare calls of process_vm_readv for the same bytes

``--in-place`` says what could be gained if each rank took its columns straight out of the memory of the others: the
lists of addresses are made before, nothing is planned, agreed on or checked, and a barrier ends each turn.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Row, arguments, finish, ratios, row
from paddle_flexckpt.testing import World

COLUMNS = 1024
# Tensors, and bytes of each.
CASES = ((64, 4 << 20), (1024, 256 << 10))


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, pairs=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    parser.add_argument("--cases", type=case, nargs="+", default=CASES, help="such as 1024x262144")
    parser.add_argument("--in-place", action="store_true", help="measure process_vm_readv too")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for ranks in options.ranks:
        with World(ranks) as world:
            for tensors, nbytes in options.cases:
                case_of = {"tensors": tensors, "nbytes": nbytes, "pairs": options.pairs, "in_place": options.in_place}
                made = world.run("benchmarks.reshard:measure", **case_of)
                rows += rows_of(made, tensors)
    finish(options, rows)


def rows_of(made: Sequence[dict[str, list[float]]], tensors: int) -> list[Row]:
    """Compare turn by turn what the ranks measured."""
    # A turn takes as long as its slowest rank.
    seconds = {name: [max(each) for each in zip(*(one[name] for one in made))] for name in made[0]}
    what = f"{len(made)} ranks, {tensors} tensors"
    rows = [
        row(f"memcpy / reshard in memory, {what}", ratios(seconds["memcpy"], seconds["run"]), ">= 0.5"),
        row(f"memcpy / reshard without a plan, {what}", ratios(seconds["memcpy"], seconds["call"])),
        *(row(f"{name}, {what}", each, unit="s") for name, each in seconds.items()),
    ]
    if "in place" in seconds:
        rows.append(row(f"memcpy / bare reads in place, {what}", ratios(seconds["memcpy"], seconds["in place"])))
    return rows


def case(text: str) -> tuple[int, int]:
    """Read a number of tensors, and the bytes of each."""
    tensors, _, nbytes = text.partition("x")
    return int(tensors), int(nbytes)


def reads_in_place(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], rank: int, ranks: int
) -> Callable[[], None]:
    """Return what takes a rank's columns straight out of the memory of the ranks that have the rows."""
    import paddle.distributed as dist

    readv, word = ctypes.CDLL(None, use_errno=True).process_vm_readv, ctypes.c_ulong
    readv.argtypes = [ctypes.c_int, ctypes.c_void_p, word, ctypes.c_void_p, word, word]
    readv.restype = ctypes.c_ssize_t
    known: list[Any] = []
    dist.all_gather_object(known, (os.getpid(), [array.ctypes.data for array in sources]))
    held, width = sources[0].size // COLUMNS, COLUMNS // ranks
    most, nbytes = 1024 // held, width * 4  # whole tensors in one call, which takes 1,024 runs
    calls, own = [], []
    for step in range(1, ranks):
        other = (rank + step) % ranks
        pid, addresses = known[other]
        for first in range(0, len(sources), most):
            some = slice(first, first + most)
            here = [(array.ctypes.data + other * held * nbytes, held * nbytes) for array in targets[some]]
            rows = range(held)
            there = [(base + row * COLUMNS * 4 + rank * nbytes, nbytes) for base in addresses[some] for row in rows]
            calls.append((pid, np.asarray(here, dtype=np.uint64), np.asarray(there, dtype=np.uint64)))
    for source, target in zip(sources, targets):
        columns = slice(rank * width, (rank + 1) * width)
        own.append((target.reshape(-1, width)[rank * held :][:held], source.reshape(held, COLUMNS)[:, columns]))

    def read() -> None:
        for pid, here, there in calls:
            if readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0) != here[:, 1].sum():
                raise OSError(ctypes.get_errno(), f"process {pid}: {os.strerror(ctypes.get_errno())}")
        for target, source in own:
            target[...] = source
        dist.barrier()

    return read


def measure(tensors: int, nbytes: int, pairs: int, in_place: bool = False) -> dict[str, list[float]]:
    """Take the turns on one rank; return seconds by subject."""
    import paddle
    import paddle.distributed as dist

    import paddle_flexckpt as fc
    from paddle_flexckpt.memory.tensors import HostTensor

    logging.getLogger("paddle_flexckpt").setLevel(logging.WARNING)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = nbytes // 4 // COLUMNS
    source, target = {}, {}
    shape = (rows, COLUMNS)
    for i in range(tensors):
        name = f"model.layers.{i}.mlp.weight"
        numbers = np.arange(rows // ranks * COLUMNS, dtype=np.float32) + np.float32(rank * rows // ranks * COLUMNS + i)
        held = paddle.to_tensor(numbers.reshape(rows // ranks, COLUMNS), place=paddle.CPUPlace())
        source[name] = fc.ShardedWeight(name, held, tuple(held.shape), shape, (rank * rows // ranks, 0))
        wanted = paddle.zeros([rows, COLUMNS // ranks])
        target[name] = fc.ShardedWeight(name, wanted, tuple(wanted.shape), shape, (0, rank * COLUMNS // ranks))
    arrays = [HostTensor(weight.local_tensor).array for weight in target.values()]
    copies = [np.ones_like(array) for array in arrays]
    plan = fc.plan_reshard(source, target)

    def memcpy() -> None:
        for array, copy in zip(arrays, copies):
            copy[...] = array

    subjects: dict[str, Callable[[], Any]] = {
        "memcpy": memcpy,
        "run": plan.run,
        "call": lambda: fc.reshard_sharded_state_dict(source, target),
    }
    if in_place:
        held = [HostTensor(weight.local_tensor).array for weight in source.values()]
        subjects["in place"] = reads_in_place(held, arrays, rank, ranks)
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(pairs + 1):  # the first one warms up
        for name in list(subjects)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            subjects[name]()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    if in_place:
        for array in arrays:
            array[...] = 0
        dist.barrier()
        subjects["in place"]()
    whole = np.arange(rows * COLUMNS, dtype=np.float32).reshape(shape)
    mine = slice(rank * COLUMNS // ranks, (rank + 1) * COLUMNS // ranks)
    for i, array in enumerate(arrays):
        if (array.reshape(rows, -1) != (whole + np.float32(i))[:, mine]).any():
            raise RuntimeError(f"rank {rank}: tensor {i} has not the values that it should have")
    return seconds


if __name__ == "__main__":
    main()
