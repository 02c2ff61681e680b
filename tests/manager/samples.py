"""Small states whose every value tells the step that they are of, and what becomes of their checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import paddle_flexckpt as fc
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.manager import KeepLatest, RestoreReport
from paddle_flexckpt.manager.identities import OWNER
from paddle_flexckpt.manager.step_directories import StepDirectories
from tests.native.samples import flip
from tests.saved import data_file, short_names

SHAPES = {"w": (4, 3), "b": (5,)}


def values(step: int) -> dict[str, np.ndarray]:
    return {
        key: (np.arange(np.prod(shape)).reshape(shape) + 1000 * step).astype("float32") for key, shape in SHAPES.items()
    }


def empty() -> dict[str, np.ndarray]:
    return {key: np.full(shape, -1, dtype="float32") for key, shape in SHAPES.items()}


def manager_of(root, **options) -> fc.CheckpointManager:
    return fc.CheckpointManager(root, **{"preemption_signals": (), **options})


def save(manager: fc.CheckpointManager, step: int, version: int | None = None, **options):
    """Saves the values of a version, by default the step's number."""
    return manager.save(step, state=values(step if version is None else version), rng=False, **options)


def version_of(state: dict[str, np.ndarray]) -> int:
    """The version that a state is of, every element of it."""
    version = int(state["b"][0]) // 1000
    expected = values(version)
    assert {key: array.tolist() for key, array in state.items()} == {key: a.tolist() for key, a in expected.items()}
    return version


def restore(manager: fc.CheckpointManager, step="latest", **options) -> tuple[int, int, RestoreReport]:
    """The step that was restored, the version of its values, and the report."""
    state = empty()
    report = manager.restore(step, state=state, **options)
    return report.step, version_of(state), report


def directory_of(root, step: int) -> Path:
    return Path(root) / f"step_{step:08d}"


def data_of(root, step: int, rank: int = 0) -> Path:
    """The data file of a rank."""
    directory = directory_of(root, step)
    return directory / data_file(directory, rank)


def tree(root) -> list[str]:
    """All files and empty directories below a root, by short names, but for its owner's, and Paddle's beside others."""
    found = []
    for path, directories, files in os.walk(root):
        below = os.path.relpath(path, root)
        files = [name for name in files if name != OWNER]
        listed = [name for name in files if name != PADDLE_METADATA] or files
        found += [os.path.normpath(os.path.join(below, name)) for name in listed]
        if not directories and not files and below != ".":
            found.append(f"{below}/")
    return short_names(found)


def listed(root) -> list[str]:
    """The names in a root, but for its owner's."""
    return sorted({*os.listdir(root)} - {OWNER})


def files_of(step: int, number: int = 1) -> list[str]:
    """What a checkpoint of a step consists of, by short names; its save has a number in the step's directory."""
    return [f"step_{step:08d}/{name}" for name in ("0.manifest", f"0_0-{number}.safetensors")]


def run_in(root) -> str:
    """The identity of the run whose steps these are."""
    (run,) = {each.run for each in StepDirectories(root).records()[0]}
    return run


def retain(root, run: str, count: int, busy=()) -> None:
    """The retention of a start of a run, which keeps some of the latest steps."""
    directories = StepDirectories(root)
    directories.run = run
    directories.retain([KeepLatest(count)], None, busy)


# What can happen to a checkpoint, and whether reading it finds that before any target is touched.


def damage_manifest(root, step: int) -> None:
    path = directory_of(root, step) / "0.manifest"
    flip(path, path.stat().st_size - 1)


def truncate_data(root, step: int) -> None:
    path = data_of(root, step)
    os.truncate(path, path.stat().st_size - 1)


def remove_data(root, step: int) -> None:
    data_of(root, step).unlink()


def flip_values(root, step: int) -> None:
    """Changes the last value of one of the tensors, wherever it stands."""
    path = data_of(root, step)
    content = path.read_bytes()
    position = content.index(values(step)["w"].tobytes()) + 4
    flip(path, position)


DAMAGES = {"manifest": damage_manifest, "truncated": truncate_data, "missing": remove_data, "flipped": flip_values}
