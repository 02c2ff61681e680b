"""What the block checksums cost: saves and loads with and without them, in turns.

A save without checksums is the same save with a hash function that returns 0; a load without is ``verify="off"``.
Saves to disk are durable (fsync), and before a load from disk its files are dropped from the page cache. On a RAM disk
nothing hides the hashing, so that is its price at its highest.

    python benchmarks/checksums.py                        # 512 MiB, 9 turns, here and in /dev/shm
    python benchmarks/checksums.py --mib 256 --turns 5 --json checksums.json
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
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from paddle_flexckpt.live.communicator import SoloCommunicator
from paddle_flexckpt.live.loader import load_state_dict
from paddle_flexckpt.live.saver import save_state_dict
from paddle_flexckpt.native import checksums, data_file

LIMITS = {"disk save": 1.05, "disk load": 1.05, "RAM disk save": 1.10, "RAM disk load": 1.10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--disk", type=Path, default=Path(), help="a directory on a disk")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a directory on a RAM disk")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    logging.getLogger("paddle_flexckpt").setLevel(logging.WARNING)
    result: dict[str, dict] = {}
    for medium, parent in (("disk", options.disk), ("RAM disk", options.ram)):
        with tempfile.TemporaryDirectory(prefix="checksums-", dir=parent) as directory:
            result.update(measure(medium, Path(directory), options.mib << 20, options.tensors, options.turns))
    for name, numbers in result.items():
        print(
            f"{name:14} with checksums / without: median {numbers['ratio']:.3f} (quartiles "
            f"{numbers['quartiles'][0]:.3f} to {numbers['quartiles'][1]:.3f}), aim {LIMITS[name]:.2f}; "
            f"median {numbers['seconds with']:.3f} s with, {numbers['seconds without']:.3f} s without"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(medium: str, directory: Path, nbytes: int, tensors: int, turns: int) -> dict[str, dict]:
    rng = np.random.default_rng(0)
    length = nbytes // tensors
    state = {f"t{i}": rng.integers(0, 256, length, dtype=np.uint8) for i in range(tensors)}
    targets = {key: np.empty_like(value) for key, value in state.items()}
    comm = SoloCommunicator()
    path = directory / "checkpoint"
    number = 0

    def save() -> None:
        nonlocal number
        number += 1
        save_state_dict(state, path / str(number), comm)

    def save_without() -> None:
        with (
            mock.patch.object(data_file, "hash_block", lambda block: 0),
            mock.patch.object(checksums, "hash_block", lambda block: 0),
        ):
            save()

    def clean() -> None:
        shutil.rmtree(path)

    def forget() -> None:
        for file in path.iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    saves = take_turns((save, save_without), turns, clean)
    save_state_dict(state, path, comm)
    loads = take_turns(
        (
            lambda: load_state_dict(targets, path, comm),
            lambda: load_state_dict(targets, path, comm, verify="off"),
        ),
        turns,
        forget,
    )
    if not all((targets[key] == value).all() for key, value in state.items()):
        raise SystemExit("some loaded values are not those that were saved")
    return {f"{medium} save": saves, f"{medium} load": loads}


def take_turns(subjects: tuple[Callable[[], None], Callable[[], None]], turns: int, after: Callable[[], None]) -> dict:
    """Times of both, in the order A B, B A, A B ...; the first turn warms up and does not count."""
    ratios, times = [], ([], [])
    for turn in range(turns + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        seconds = [0.0, 0.0]
        for which in order:
            begin = time.perf_counter()
            subjects[which]()
            seconds[which] = time.perf_counter() - begin
            after()
        if turn:
            ratios.append(seconds[0] / seconds[1])
            for which in (0, 1):
                times[which].append(seconds[which])
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
        "seconds with": statistics.median(times[0]),
        "seconds without": statistics.median(times[1]),
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
