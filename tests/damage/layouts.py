"""One flipped bit under another layout: ``python -m tests.damage.layouts --flips 500`` (``make test-damage``).

A bit of a tensor's bytes is flipped in a file, and the checkpoint is loaded under another layout, with all defaults.
Either every rank has what was saved, or every rank has an error. Where another copy is whole, it has to be the former.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import paddle_flexckpt as fc
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.ramdisk import memory_directory

#: Three blocks and a part of one; less than one.
SHAPES = {"large": (1030, 820), "small": (12, 24)}
WHOLE = {key: np.random.default_rng(len(key)).standard_normal(shape, dtype=np.float32) for key, shape in SHAPES.items()}


def shards(layout: str, rank: int, ranks: int, blank: bool = False) -> dict[str, fc.ShardedWeight]:
    """A rank's part of all tensors: whole, cut by rows, by columns or by both, or in flattened ranges."""
    made = {}
    for key, values in WHOLE.items():
        rows, columns = {"rows": (ranks, 1), "columns": (1, ranks), "both": (2, ranks // 2)}.get(layout, (1, 1))
        row, column = divmod(rank % (rows * columns), columns)
        low = [n * part // parts for n, part, parts in zip(values.shape, (row, column), (rows, columns))]
        high = [n * (part + 1) // parts for n, part, parts in zip(values.shape, (row, column), (rows, columns))]
        part, flat = values[low[0] : high[0], low[1] : high[1]], None
        shape = part.shape
        if layout == "flattened":
            flat = slice(*(values.size * each // ranks + 3 * (0 < each < ranks) for each in (rank, rank + 1)))
            part = values.reshape(-1)[flat]
        part = np.full_like(part, -7) if blank else part.copy()
        made[key] = fc.ShardedWeight(key, part, shape, values.shape, tuple(low), flat is not None, flat)
    return made


def filled(layout: str, ranks: int, load: Callable) -> list[bool | BaseException]:
    """By rank: whether it has what was saved, or its error."""

    def job(comm) -> bool:
        found = shards(layout, comm.position, ranks, blank=True)
        load(comm, found)
        wanted = shards(layout, comm.position, ranks)
        return all(found[key].local_tensor.tobytes() == wanted[key].local_tensor.tobytes() for key in found)

    return SimulatedWorld(ranks).run_all(job)


class Stored:
    """A checkpoint that two ranks have saved into one directory.

    Attributes:
        files: The data files.
        has_copies: Whether each byte is in another file too.
    """

    has_copies = False

    def __init__(self, path: Path, layout: str) -> None:
        self.path = path
        SimulatedWorld(2).run(lambda comm: save_state_dict(shards(layout, comm.position, 2), path, comm))
        self.files = {file: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}

    def load(self, comm, found) -> None:
        load_state_dict(found, self.path, comm)

    def place(self, pick: random.Random) -> tuple[Path, int]:
        """A byte of a tensor: its file, and the place in it."""
        file = pick.choice([*self.files])
        catalog = CheckpointDirectory(str(file.parent)).read_manifest().catalog
        rows = [row for row in range(len(catalog)) if catalog.file_name(row) == file.name]
        row = pick.choice(rows)
        return file, int(catalog.byte_offset[row]) + pick.randrange(int(catalog.byte_length[row]))


class InMemory(Stored):
    """A step in the memory of two nodes, with copies or parity."""

    def __init__(self, path: Path, **tier) -> None:
        self.path, self._tier, self.has_copies = path, tier, "copies" in tier

        def save(comm) -> None:
            manager = self._manager(comm)
            manager.should_save(1)
            manager.save(1, state=shards("rows", comm.position, comm.size), rng=False)
            manager.wait()
            manager.__exit__(ValueError, None, None)

        SimulatedWorld(3).run(save)
        self.files = {file: file.read_bytes() for file in sorted(path.glob("node*/*/step*/*.safetensors"))}

    def _manager(self, comm) -> fc.CheckpointManager:
        node = str(self.path / f"node{comm.position % 3}")
        tier = fc.MemoryTier(node, save_when=fc.SaveEvery(1), **self._tier)
        options = {"preemption_signals": (), "save_when": fc.SaveEvery(100)}
        return fc.CheckpointManager(str(self.path / "root"), process_group=comm, memory=tier, **options)

    def load(self, comm, found) -> None:
        manager = self._manager(comm)
        try:
            manager.restore(state=found)
        finally:
            manager.__exit__(ValueError, None, None)


#: By name: how it is saved, and the layout and ranks of the load.
CHANGES: dict[str, tuple[Callable[[Path], Stored], str, int]] = {
    "rows to columns": (lambda path: Stored(path, "rows"), "columns", 2),
    "columns to rows": (lambda path: Stored(path, "columns"), "rows", 2),
    "rows to both": (lambda path: Stored(path, "rows"), "both", 4),
    "to three ranks": (lambda path: Stored(path, "rows"), "rows", 3),
    "flattened": (lambda path: Stored(path, "rows"), "flattened", 3),
    "whole": (lambda path: Stored(path, "columns"), "whole", 2),
    "memory, copies": (lambda path: InMemory(path, copies=2), "columns", 3),
    "memory, parity": (lambda path: InMemory(path, parity=3), "columns", 3),
}


def run(change: str, flips: int, seed: int = 0) -> Counter[str]:
    """Flip a bit so many times; return how often the load was right, refused and wrong."""
    save, layout, ranks = CHANGES[change]
    pick, found = random.Random(f"{seed} {change}"), Counter[str]()
    with memory_directory() as path:
        stored = save(path)
        assert filled(layout, ranks, stored.load) == [True] * ranks
        for _ in range(flips):
            file, byte = stored.place(pick)
            content = bytearray(stored.files[file])
            content[byte] ^= 1 << pick.randrange(8)
            file.write_bytes(content)
            outcomes = filled(layout, ranks, stored.load)
            for each, before in stored.files.items():
                each.write_bytes(before)
            if all(outcome is True for outcome in outcomes):
                found["right"] += 1
            elif all(isinstance(outcome, fc.CorruptCheckpointError) for outcome in outcomes) and not stored.has_copies:
                found["refused"] += 1
            else:
                found["wrong"] += 1
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.damage.layouts", description=__doc__.split("\n")[0])
    parser.add_argument("--flips", type=int, default=500, help="for each change of layout (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.getLogger("paddle_flexckpt").setLevel(logging.CRITICAL)
    wrong = 0
    for change in CHANGES:
        found = run(change, options.flips, options.seed)
        wrong += found["wrong"]
        print(
            f"{change:<20}" + "".join(f"{name} {found[name]:>5}  " for name in ("right", "refused", "wrong")),
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
