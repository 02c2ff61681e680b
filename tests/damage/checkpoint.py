"""One checkpoint in memory, the other saves that files get mixed up with, and loads of everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.transfer.samples import cut, save, values_of

# By dtype and shape. The first has two blocks in every rank's file, the second is flattened.
KINDS = {
    "matrix": ("float32", (960, 1023)),
    "moments": ("bfloat16", (3, 50, 70)),
    "层.weight": ("bfloat16", (64, 96)),
    "bias": ("float32", (1000,)),
    "mask": ("bool", (33, 33)),
    "complex": ("complex128", (40,)),
    "quantised": ("float8_e4m3fn", (16, 24)),
    "scalar": ("int64", ()),
    "none": ("float32", (0, 3)),
}
WORLD = 3
ID = 0

Files = dict[str, "bytes | None"]


@dataclass(frozen=True, eq=False)
class Saves:
    """A checkpoint that is damaged and mended again and again, and others of the same model.

    Attributes:
        path: Its directory, with another checkpoint of a higher id in it.
        files: Its files by name, the manifest last.
        manifest: Their manifest.
        values: What it holds.
        others: Files of other saves, under the names that they have there: ``older``, an earlier save of the same id
            that this one replaced; ``next``, the one of the higher id. And ``twin``, of the same id in another
            directory, under the names of this one.
    """

    path: Path
    files: Mapping[str, bytes]
    manifest: Manifest
    values: Mapping[str, np.ndarray]
    others: Mapping[str, Mapping[str, bytes]]

    @property
    def manifest_name(self) -> str:
        return f"{ID}.manifest"

    @property
    def data_names(self) -> tuple[str, ...]:
        return self.manifest.catalog.files

    def data_start(self, name: str) -> int:
        """First byte behind the header of a data file."""
        catalog = self.manifest.catalog
        return int(catalog.byte_offset[catalog.file == catalog.files.index(name)].min())

    def write(self, files: Files) -> None:
        """Puts files in place; those that are None are removed."""
        for name, content in files.items():
            if content is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                (self.path / name).write_bytes(content)


def prepare(root: Path, **options) -> Saves:
    """Makes the saves in a directory; ``options`` are those of the save."""
    main, elsewhere = root / "main", root / "elsewhere"
    values = values_of(KINDS)

    def others(seed: int) -> dict[str, np.ndarray]:
        changed = {}
        for key, value in values.items():
            raw = np.random.default_rng([seed, len(key)]).integers(0, 256, value.nbytes, dtype=np.uint8)
            changed[key] = (raw % 2 if value.dtype == bool else raw).view(value.dtype).reshape(value.shape)
        return changed

    def files_of(path: Path, unique_id: int) -> dict[str, bytes]:
        manifest = CheckpointDirectory(str(path)).read_manifest(unique_id)
        return {name: (path / name).read_bytes() for name in (*manifest.catalog.files, f"{unique_id}.manifest")}

    save(main, others(1), WORLD, unique_id=ID, step=100, **options)
    older = files_of(main, ID)
    save(main, values, WORLD, unique_id=ID, step=200, **options)
    save(main, others(2), WORLD, unique_id=ID + 1, step=300, **options)
    for seed in (3, 4):
        save(elsewhere, others(seed), WORLD, unique_id=ID, step=100 * seed, **options)
    files = files_of(main, ID)
    # Of the same ranks, in the same order.
    twin = dict(zip(files, files_of(elsewhere, ID).values()))
    assert not set(files) - {f"{ID}.manifest"} & set(older)
    return Saves(
        main,
        files,
        CheckpointDirectory(str(main)).read_manifest(ID),
        values,
        {"older": older, "twin": twin, "next": files_of(main, ID + 1)},
    )


def opposite(values: np.ndarray) -> np.ndarray:
    """Values that differ from the given ones in every byte."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return (raw ^ (1 if values.dtype == bool else 255)).view(values.dtype).reshape(values.shape)


class Loads:
    """Loads of a whole checkpoint into targets that hold nothing of it before."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._before = {key: opposite(value) for key, value in saves.values.items()}

    def load(self, world: int = 1, **options) -> tuple[LoadReport | Exception, list[str]]:
        """Loads all keys on so many ranks, which cut tensors among them.

        Returns:
            The first rank's report, or what was raised; and the keys that are neither as they were before, if it was
            raised before anything was read, nor as they were saved, if nothing was raised.
        """
        states: list[dict] = [{}] * world

        def job(comm):
            states[comm.position] = cut(self._before, comm.position, world)
            return load_state_dict(states[comm.position], self._saves.path, comm, unique_id=ID, **options)

        outcome = SimulatedWorld(world).run_all(job)[0]
        if isinstance(outcome, Exception) and "Targets are partly overwritten" in str(outcome):
            return outcome, []
        expected = self._before if isinstance(outcome, Exception) else self._saves.values
        wrong = []
        for position in range(world):
            for key, target in cut(expected, position, world).items():
                got = states[position][key]
                array, wanted = (getattr(each, "local_tensor", each) for each in (got, target))
                if array.tobytes() != wanted.tobytes():
                    wrong.append(key)
        return outcome, wrong
