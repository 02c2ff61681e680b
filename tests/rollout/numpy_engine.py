"""An engine of numpy arrays: each rank holds its rows of every tensor, and faults can be put in its way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import save_file

from paddle_flexckpt.rollout.engine_worker import EngineWorker, LiveComparison

Arrays = dict[str, np.ndarray]


def weights(seed: int, names: tuple[str, ...] = ("embed", "layers.0.up", "layers.0.norm", "head")) -> Arrays:
    """Weights of a small model, other ones for each seed."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((8, 3 + i)).astype(np.float32) for i, name in enumerate(names)}


def model_directory(path: Path, arrays: Arrays) -> str:
    """A directory as an engine is started from, in two files."""
    path.mkdir(parents=True, exist_ok=True)
    names = sorted(arrays)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: arrays[name] for name in part}, path / f"model-{number + 1:05d}-of-00002.safetensors")
    return str(path)


def segment(path: Path, arrays: Arrays) -> str:
    """A segment with these tensors."""
    save_file(arrays, path)
    return str(path)


class NumpyEngine:
    """One rank of an engine.

    Attributes:
        rank: The rank.
        model: What it serves.
        failing_loads: For each of the next loads the number of tensors after which it fails; None: it does not.
        keeps: Whether it serves from the mapped memory itself, and so keeps it mapped.
        loads: The number of loads that were begun.
    """

    def __init__(self, arrays: Arrays, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.model = {name: self.part(array).copy() for name, array in arrays.items()}
        self.failing_loads: list[int | None] = []
        self.keeps = False
        self.loads = 0

    def part(self, array: np.ndarray) -> np.ndarray:
        rows = len(array) // self.ranks
        return array[self.rank * rows : (self.rank + 1) * rows]

    def load(self, tensors: Arrays) -> None:
        self.loads += 1
        fails_after = self.failing_loads.pop(0) if self.failing_loads else None
        for number, (name, array) in enumerate(tensors.items()):
            if number == fails_after:
                raise RuntimeError(f"injected fault at {name}")
            self.model[name] = self.part(array) if self.keeps else self.part(array).copy()

    def compare(self, tensors: Arrays) -> LiveComparison:
        different = [name for name, array in tensors.items() if not np.array_equal(self.model[name], self.part(array))]
        return LiveComparison(len(tensors), different)

    def digest(self) -> str:
        """What a generated token depends on."""
        return xxhash.xxh3_64_hexdigest(
            b"".join(np.ascontiguousarray(self.model[n]).tobytes() for n in sorted(self.model))
        )

    def holds(self, arrays: Arrays) -> bool:
        """Whether it serves exactly these weights."""
        return self.model.keys() == arrays.keys() and all(
            np.array_equal(self.model[name], self.part(array)) for name, array in arrays.items()
        )


def workers(directory: str, arrays: Arrays, ranks: int) -> tuple[list[NumpyEngine], list[EngineWorker]]:
    """The ranks of an engine that was started from a directory with these weights."""
    engines = [NumpyEngine(arrays, rank, ranks) for rank in range(ranks)]
    return engines, [EngineWorker(engine, directory) for engine in engines]
