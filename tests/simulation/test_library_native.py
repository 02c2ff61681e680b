"""Damaged checkpoints on simulated disks: what a load, a verification and a repair make of them.

Two ranks have saved, over the host channel, so that some tensors are there twice. Whatever is damaged then, a load
gives the bits that were saved or an error that names the file, and a verification says beforehand which it will be.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.engine.verification import repair_manifest, verify_checkpoint
from paddle_flexckpt.live.communicator import SoloCommunicator
from paddle_flexckpt.live.loader import load_state_dict
from paddle_flexckpt.live.saver import save_state_dict
from paddle_flexckpt.native import partitions
from paddle_flexckpt.native.listing import latest, list_checkpoints
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulation.training import ChannelCommunicator, Store
from paddle_flexckpt.testing.simulation.trees import Tree, fill, tree_of
from tests.simulation.test_library_files import Library

RUN = "/run/a"
RANKS = 2
BLOCK = 1 << 20
Work = Callable[[], Any]


def together(world: Library, work: Callable[[ChannelCommunicator], Any], nodes: bool = False) -> list[Any]:
    """What each rank of a job returns."""
    scheduler, name = world.scheduler, f"job {world.scheduler.now}"
    stores: list[Store] = []

    def rank(number: int) -> Any:
        world.os.environ["PADDLE_CURRENT_ENDPOINT"] = f"{scheduler.process.node.name}:{6000 + number}"
        return work(ChannelCommunicator(stores[0], name, RANKS, number))

    processes = [
        world.start(lambda number=number: rank(number), number if nodes else 0, f"rank {number}")
        for number in range(RANKS)
    ]
    stores.append(Store(scheduler, world.network, processes[0]))
    scheduler.run()
    assert [process.status for process in processes] == [0] * RANKS
    return [process.main.result for process in processes]


def whole(version: int) -> dict[str, np.ndarray]:
    """Tensors of several blocks; ``alone`` is in one file only."""
    generator = np.random.default_rng(version)
    return {
        "alone": generator.random(70_000),
        "rows": generator.random((700, 300)),
        "small": np.full(5, version, dtype=np.int32),
        "twice": generator.random((2 * BLOCK + 400) // 4, dtype=np.float32),
    }


def shards(version: int, rank: int) -> dict[str, ShardedWeight]:
    found, tensors = {}, whole(version)
    for key, tensor in tensors.items():
        first, count = (rank * 350, 350) if key == "rows" else (0, len(tensor))
        if key != "alone" or rank == 0:
            part, offset = tensor[first : first + count].copy(), (first,) + (0,) * (tensor.ndim - 1)
            found[key] = ShardedWeight(key, part, part.shape, tensor.shape, offset)
    return found


def save(comm: Any, version: int, path: Any = RUN, **options: Any) -> None:
    state = shards(version, comm.rank) if comm.size > 1 else whole(version)
    save_state_dict(state, path, comm, save_replicas=True, step=version, **options)


def load(path: Any = RUN, **options: Any) -> int:
    """The version, every bit of which is as it was saved; by one process."""
    found = {key: np.full_like(tensor, 77) for key, tensor in whole(0).items()}
    load_state_dict(found, path, SoloCommunicator(), **{"strict": True, "verify": "full", **options})
    version = int(found["small"][0])
    for key, tensor in whole(version).items():
        assert found[key].tobytes() == tensor.tobytes(), f"{key} is not of version {version}"
    return version


def make(in_partitions: bool = False) -> Tree:
    """The files of a checkpoint of two ranks."""
    with Library() as world, pytest.MonkeyPatch.context() as patch:
        if in_partitions:
            patch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 2)
            patch.setattr(partitions, "ROWS_PER_PARTITION", 3)
        together(world, lambda comm: save(comm, 1))
        return tree_of(world.disks[0])


@pytest.fixture(scope="module")
def saved() -> Tree:
    return make()


@pytest.fixture(scope="module")
def partitioned() -> Tree:
    found = make(True)
    assert sum(path.endswith(".partition") for path in found) == 3
    return found


@pytest.fixture
def library() -> Iterator[Library]:
    with Library() as world:
        yield world


def holding(tree: Tree, on_call: Any = None) -> Library:
    world = Library(on_call=on_call)
    fill(world.disks[0], tree)
    return world


def data_files(tree: Tree) -> list[str]:
    return sorted(path for path in tree if path.endswith(".safetensors") and "/a/0_" in f"/{path}")


def raised(work: Work) -> CheckpointError | None:
    """The error of the library that a function raises; others go on."""
    try:
        work()
    except CheckpointError as error:
        return error
    return None


def problems_of(path: str = RUN) -> tuple[Any, CheckpointError | None]:
    """What a verification reports, and what a load that verifies everything raises."""
    return verify_checkpoint(path), raised(load)


# Damage of a file's bytes.


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def damaged(data: bytes, dice: Random) -> tuple[str, bytes]:
    """Bytes that differ: what happened to a file."""
    at, length = dice.randrange(len(data)), dice.choice((1, 512, 3 * BLOCK // 2))
    zeros = bytes(len(data[at : at + length]))
    options = {
        f"a bit of byte {at}": flipped(data, at),
        f"cut at {at}": data[:at],
        "longer": data + b"x" * length,
        f"zeros from {at}": data[:at] + zeros + data[at + len(zeros) :],
        f"without bytes from {at}": data[:at] + data[at + length :],
        "a bit of the header": flipped(data, dice.randrange(min(3000, len(data)))),
        "a bit at the end": flipped(data, len(data) - 1),
        "empty": b"",
    }
    what = dice.choice([name for name, found in options.items() if found != data])
    return what, options[what]


def damage_of(tree: Tree, seed: int) -> tuple[str, Tree]:
    """One or two files of a checkpoint, damaged or missing."""
    dice, changed, told = Random(seed), dict(tree), []
    files = [path for path, data in tree.items() if data is not None and not path.endswith((".json", ".metadata"))]
    for path in dice.sample(sorted(files), dice.choice((1, 1, 2))):
        if dice.random() < 0.15:
            del changed[path]
            told.append(f"{path} is missing")
        else:
            what, changed[path] = damaged(tree[path] or b"", dice)
            told.append(f"{path}: {what}")
    return ", ".join(told), changed


def check_damage(tree: Tree, seeds: Any) -> set[str]:
    """Whatever is damaged, all that looks at it agrees; returns what loads came to."""
    outcomes = set()
    for seed in seeds:
        what, changed = damage_of(tree, seed)
        lost = sorted(path for path in tree if changed.get(path) != tree[path])
        with holding(changed) as world:
            if f"{RUN}/0.manifest"[1:] not in changed:
                assert isinstance(world.run(lambda: raised(load)), CheckpointError), what
                outcomes.add("no manifest")
                continue
            report, error = world.run(problems_of)
            named = [os.path.basename(path) for path in lost]
            assert not report.ok and report.problems, f"seed {seed}: {what}"
            text = " ".join(map(str, report.problems))
            assert any(name in text for name in named), f"seed {seed}: {what}: {text}"
            assert report.recoverable == (error is None), f"seed {seed}: {what}: {text}; but a load: {error}"
            if error is not None:
                assert any(name in str(error) for name in named), f"seed {seed}: {what}: {error}"
            outcomes.add("refused" if error is not None else "from replicas")
            (info,) = world.run(lambda: list_checkpoints(RUN))
            is_latest = world.run(lambda: latest(RUN)) is not None
            assert is_latest == info.complete, f"seed {seed}: {what}"
            # The next save goes well.
            world.run(lambda: save(SoloCommunicator(), 2, unique_id=None))
            assert world.run(load) == 2, f"seed {seed}: {what}"
            assert not [path for path in tree_of(world.disks[0]) if path.endswith((".tmp", ".saving"))], what
    return outcomes


def test_whatever_is_damaged_a_verification_says_what_a_load_can_read(saved):
    assert check_damage(saved, range(24)) >= {"refused", "from replicas"}


def test_whatever_of_partitions_is_damaged_a_verification_says_what_a_load_can_read(partitioned):
    assert check_damage(partitioned, range(100, 116)) >= {"refused"}


@pytest.mark.slow
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_much_damage(saved, partitioned, is_partitioned):
    check_damage(partitioned if is_partitioned else saved, range(1000, 1600))
