"""Scenarios: what is done to a directory of checkpoints, and what a reader may find meanwhile and afterwards.

A scenario is a disk before, steps, and the states between which the steps lead.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paddle_flexckpt.catalog import CorruptCheckpointError, UnsafePickleError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.crash.job import Job

# "{directory below the root}/{id}" of every complete checkpoint, and the version of the values in it.
State = Mapping[str, int]

DIRECTORY = "runs/a"
# Elements of 4 bytes: several blocks of 1 MiB for each of two ranks.
BLOCKS = (2 << 20) // 4 + 10


@functools.lru_cache(maxsize=64)
def values(version: int, large: bool = False) -> dict[str, np.ndarray]:
    """Return the whole tensors of one version; not to be changed."""
    generator = np.random.default_rng(version)
    tensors = {
        "version": np.full(3, version, dtype=np.int32),
        "rows": generator.random((8, 5), dtype=np.float32),
        "replicated": generator.integers(-99, 99, (7, 3)).astype(np.int16),
        "flat": generator.random((3, 5)),
        "one rank's": generator.integers(0, 2, 11).astype(bool),
    }
    if large:
        tensors["none"] = np.zeros((0, 4), dtype=np.float32)  # which Paddle's own loader cannot read
        tensors["blocks"] = generator.random(BLOCKS, dtype=np.float32)
    return tensors


def shards(version: int, comm: Communicator, large: bool = False) -> dict[str, ShardedWeight]:
    """Return what one rank has of them."""
    found = {}
    for key, whole in values(version, large).items():
        start, stop = (len(whole) * (comm.position + more) // comm.size for more in (0, 1))
        if key in ("rows", "blocks"):
            part, offset = whole[start:stop].copy(), (start,) + (0,) * (whole.ndim - 1)
            found[key] = ShardedWeight(key, part, part.shape, whole.shape, offset)
        elif key == "flat":
            begin, end = (whole.size * (comm.position + more) // comm.size for more in (0, 1))
            part, offset = whole.reshape(-1)[begin:end].copy(), (0,) * whole.ndim
            found[key] = ShardedWeight(key, part, whole.shape, whole.shape, offset, True, slice(begin, end))
        elif key != "one rank's" or comm.position == comm.size - 1:
            found[key] = ShardedWeight(key, whole.copy(), whole.shape, whole.shape, (0,) * whole.ndim)
    return found


def read_version(directory: str, unique_id: int | None = None, large: bool = False) -> int:
    """Return the version of a checkpoint, after every bit of it has been compared.

    Raises:
        AssertionError: It is a mixture, or damaged.
    """
    found = {key: np.full_like(whole, 99) for key, whole in values(0, large).items()}
    targets = {key: ShardedWeight(key, x, x.shape, x.shape, (0,) * x.ndim) for key, x in found.items()}
    load_state_dict(targets, directory, SoloCommunicator(), unique_id=unique_id, strict=True, verify="full")
    version = int(found["version"][0])
    for key, whole in values(version, large).items():
        assert found[key].tobytes() == whole.tobytes(), f"{directory} id {unique_id}: {key!r} is not of {version}"
    return version


def paddle_reads(directory: str, large: bool = False) -> int | None:
    """Return the version that Paddle's own loader reads with ``safetensors=True``; None if it fails.

    No Paddle is needed.

    Raises:
        AssertionError: It reads a mixture, or takes shards for whole tensors.
    """
    names = os.listdir(directory)
    stored = {name for name in names if name.endswith(".safetensors")}
    if PADDLE_METADATA not in names:
        assert not stored, f"{directory}: Paddle takes {stored} for a Hugging Face directory"
        return None
    with open(os.path.join(directory, PADDLE_METADATA), "rb") as stream:
        content = stream.read()
    try:
        metadata = load_pickle(content, PADDLE_METADATA)
    except (CorruptCheckpointError, UnsafePickleError):
        return None
    if not set(metadata.storage_metadata.values()) <= stored:
        return None
    found = {key: np.full_like(whole, 99) for key, whole in values(0, large).items()}
    for index, file in metadata.storage_metadata.items():
        if index.tensor_key not in found:
            continue  # a manager's own
        box = found[index.tensor_key][tuple(slice(o, o + n) for o, n in zip(index.global_offset, index.local_shape))]
        flat = box.copy().reshape(-1)
        start, stop = index.flattened_range or (0, flat.size)
        flat[start:stop] = load_file(os.path.join(directory, file))[index.tensor_key].reshape(-1)
        box[...] = flat.reshape(box.shape)
    version = int(found["version"][0])
    for key, whole in values(version, large).items():
        assert found[key].tobytes() == whole.tobytes(), f"{directory}: Paddle reads {key!r}, which is not of {version}"
    return version


def save(root: str, comm: Communicator, version: int, unique_id: int | None = None, large: bool = False) -> str:
    """Do one rank's part in a save; return the checkpoint's name in states."""
    report = save_state_dict(
        shards(version, comm, large), os.path.join(root, DIRECTORY), comm, unique_id=unique_id, step=version
    )
    return f"{DIRECTORY}/{report.unique_id}"


Step = Callable[[str, Communicator], Any]


@dataclass(frozen=True)
class Scenario:
    """Describe one history.

    Attributes:
        name: For reports.
        ranks: Of the job that takes the steps.
        prepare: Makes the disk before, beneath a root that is empty; nothing fails meanwhile.
        steps: What each rank does, one after the other.
        states: What a reader may find: ``states[i]`` once i steps are done.
        again: Later saves of all ranks: get the root, the communicator and the new version; return the name.
        between: What else a reader may find during each step; nothing by default: old or new.
        large: Whether there is a tensor of several blocks.
        kind: ``save`` or ``repair``.
        read_all: Gives the version of every checkpoint beneath a root, where one is in several directories.
        cleans_up: Whether a step that fails removes what it wrote, and does not leave that to the next save.
    """

    name: str
    ranks: int
    prepare: Callable[[str], None]
    steps: tuple[Step, ...]
    states: tuple[State, ...]
    again: tuple[Callable[[str, Communicator, int], str], ...]
    between: tuple[tuple[State, ...], ...] = ()
    large: bool = False
    kind: str = "save"
    read_all: Callable[[str], dict[str, int]] | None = None
    cleans_up: bool = True

    @property
    def repeatable(self) -> bool:
        """Tell whether it is one save, which may be asked for again after it has died."""
        return len(self.steps) == 1 and not self.large and self.kind == "save"

    def allowed(self, done: int) -> list[State]:
        """Return what a reader may find when so many steps have been acknowledged, and the next may have begun."""
        more = self.between[done] if done < len(self.between) else ()
        return [*self.states[done : done + 2], *more]

    def act(self, acknowledge: Callable[[int], None], root: str, comm: Communicator) -> None:
        """Do one rank's part."""
        for number, step in enumerate(self.steps):
            step(root, comm)
            acknowledge(number)


def saved(ranks: int, *versions: int, large: bool = False) -> Callable[[str], None]:
    """Return what makes a disk with a checkpoint of each version, with ids from 0."""

    def prepare(root: str) -> None:
        for version in versions:
            run(ranks, lambda comm, version=version: save(root, comm, version, large=large))

    return prepare


def run(ranks: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """Run a function on every rank; return each rank's result.

    Raises:
        BaseException: The first rank's that has one.
    """
    outcomes = Job(ranks).run(function)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
