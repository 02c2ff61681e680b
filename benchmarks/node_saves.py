"""Saves to the memory of nodes: the length of the call on one rank, and the room that four nodes need.

python -m benchmarks.node_saves --directory /dev/shm
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import MIB, arguments, finish, random_tensors, ratios, row, timed, turns
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld

RANKS, NODES = 8, 4
# What nodes hold at rest, and when a second step is whole, over the state: copies=2, and four nodes with parity=4.
BOUNDS = {"node_copies=2": (2.05, 4.1), "parity=4": (1.3, 2.6)}


def room(folder: Path, options: dict[str, int], nbytes: int) -> tuple[float, float]:
    """The bytes in the directories of four nodes over those of the state, with one step and with two."""
    found = []
    for step in (1, 2):
        SimulatedWorld(RANKS).run(functools.partial(save_share, folder, options, nbytes // RANKS // 4, step))
        files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
        found.append(sum(map(os.path.getsize, files)) / nbytes)
    return found[0], found[1]


def save_share(folder: Path, options: dict[str, int], count: int, step: int, comm: Any) -> None:
    """One rank saves its share of one tensor to the directory of its node."""
    share = np.full(count, comm.rank, dtype=np.float32)
    state = {"w": ShardedWeight("w", share, (count,), (count * RANKS,), (count * comm.rank,))}
    path = folder / str(comm.rank * NODES // RANKS) / f"step_{step}"
    save_state_dict(state, path, comm, unique_id=0, storage="per_node", **options)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=7)
    parser.add_argument("--mib", type=int, default=256, help="of the state (default %(default)s)")
    options = parser.parse_args(argv)
    state = dict(random_tensors(options.mib // 4, (1024, 1024)))
    arrays = [each.reshape(-1).view(np.uint8) for each in state.values()]
    warm, comm, writer = np.zeros(sum(map(len, arrays)), dtype=np.uint8), SoloCommunicator(), BackgroundWriter()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as name, writer, quiet():
        folder = Path(name)

        def save() -> float:
            begun: list[Any] = []
            call = functools.partial(save_state_dict, unique_id=0, storage="per_node", async_save=writer)
            seconds = timed(lambda: begun.append(call(state, folder / "step", comm)))
            begun[0].result()
            return seconds

        def write() -> None:
            with open(folder / "raw", "wb", buffering=0) as file:
                for array in arrays:
                    file.write(array)

        def copy(target: np.ndarray | None) -> None:
            space, begin = np.empty_like(warm) if target is None else target, 0
            for array in arrays:
                space[begin : begin + len(array)] = array
                begin += len(array)

        def remove(_: str) -> None:
            shutil.rmtree(folder / "step", ignore_errors=True)
            (folder / "raw").unlink(missing_ok=True)

        subjects = {
            "save": save,
            "write": write,
            "fresh": functools.partial(copy, None),
            "warm": functools.partial(copy, warm),
        }
        seconds = turns(subjects, options.pairs, after=remove)
        told = f"call of a save to memory, {options.mib} MiB"
        for subject, what, bound in (
            ("write", "one write of the bytes there", ""),
            ("fresh", "memcpy to fresh memory", ""),
            ("warm", "memcpy to memory that is there", "<= 1.15"),
        ):
            rows.append(row(f"{told} / {what}", ratios(seconds["save"], seconds[subject]), bound))
        for (text, bounds), given in zip(BOUNDS.items(), ({"node_copies": 2}, {"parity": 4})):
            path = folder / text
            for what, value, bound in zip(("at rest", "with the next step"), room(path, given, 8 * MIB), bounds):
                rows.append(row(f"bytes on {NODES} nodes / state, {text}, {what}", value, f"<= {bound}"))
            shutil.rmtree(path)
    finish(options, rows)
    return 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log no line for each save."""
    logger = logging.getLogger("paddle_flexckpt")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


if __name__ == "__main__":
    sys.exit(main())
