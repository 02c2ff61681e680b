"""Reshard in memory between processes of one host, against a memcpy of the same bytes.

Every rank holds rows of each tensor and wants columns, so all but its own part comes from the others. A reshard (with
its plan made before, and without one) and a copy of as many bytes as the targets have take turns in all ranks at once.
A ratio of 1.0 means that a reshard takes as long as copying its result.

    python -m benchmarks.reshard                      # 2 and 4 processes, 64 and 1,024 tensors
    python -m benchmarks.reshard --ranks 2 --cases 1024x262144 --json result.json
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
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
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for ranks in options.ranks:
        with World(ranks) as world:
            for tensors, nbytes in options.cases:
                made = world.run("benchmarks.reshard:measure", tensors=tensors, nbytes=nbytes, pairs=options.pairs)
                # A turn takes as long as its slowest rank.
                seconds = {name: [max(each) for each in zip(*(one[name] for one in made))] for name in made[0]}
                what = f"{ranks} ranks, {tensors} tensors"
                rows += [
                    row(f"memcpy / reshard in memory, {what}", ratios(seconds["memcpy"], seconds["run"]), ">= 0.5"),
                    row(f"memcpy / reshard without a plan, {what}", ratios(seconds["memcpy"], seconds["call"])),
                    *(row(f"{name}, {what}", each, unit="s") for name, each in seconds.items()),
                ]
    finish(options, rows)


def case(text: str) -> tuple[int, int]:
    """Read a number of tensors, and the bytes of each."""
    tensors, _, nbytes = text.partition("x")
    return int(tensors), int(nbytes)


def measure(tensors: int, nbytes: int, pairs: int) -> dict[str, list[float]]:
    """Take the turns on one rank; return seconds by subject."""
    import paddle
    import paddle.distributed as dist

    import paddle_flexckpt as fc
    from paddle_flexckpt.live.tensors import HostTensor

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
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(pairs + 1):  # the first one warms up
        for name in list(subjects)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            subjects[name]()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    whole = np.arange(rows * COLUMNS, dtype=np.float32).reshape(shape)
    mine = slice(rank * COLUMNS // ranks, (rank + 1) * COLUMNS // ranks)
    for i, array in enumerate(arrays):
        if (array.reshape(rows, -1) != (whole + np.float32(i))[:, mine]).any():
            raise RuntimeError(f"rank {rank}: tensor {i} has not the values that it should have")
    return seconds


if __name__ == "__main__":
    main()
