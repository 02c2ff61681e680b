"""Scenarios: saves to the directories of two nodes, each of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.crash.scenario import Scenario, State, Step, run, shards


def directory(root: str, rank: int) -> str:
    return os.path.join(root, f"node{rank}")


def save(root: str, comm: Communicator, version: int, unique_id: int | None = None) -> str:
    report = save_state_dict(
        shards(version, comm),
        directory(root, comm.position),
        comm,
        unique_id=unique_id,
        step=version,
        storage="per_node",
    )
    return str(report.unique_id)


def read_all(root: str) -> dict[str, int]:
    """Return the version of every checkpoint that a node has published, read by both nodes' ranks.

    Raises:
        Exception: One is not whole.
    """
    ids = {each for rank in range(2) for each in CheckpointDirectory(directory(root, rank)).list_ids()}
    return {str(each): _read(root, each) for each in sorted(ids)}


def _read(root: str, unique_id: int) -> int:
    def job(comm: Communicator) -> int:
        found = shards(0, comm)
        for shard in found.values():
            shard.local_tensor.fill(99)
        load_state_dict(found, directory(root, comm.position), comm, unique_id=unique_id, storage="per_node")
        version = int(found["version"].local_tensor[0])
        for key, wanted in shards(version, comm).items():
            assert np.array_equal(found[key].local_tensor, wanted.local_tensor), f"id {unique_id}: {key!r} is a mixture"
        return version

    (version,) = set(SimulatedWorld(2).run(job))
    return version


def _step(version: int, unique_id: int | None) -> Step:
    return lambda root, comm: save(root, comm, version, unique_id)


def _again(unique_id: int | None) -> Callable[[str, Communicator, int], str]:
    return lambda root, comm, version: save(root, comm, version, unique_id)


def _scenario(name: str, versions: Sequence[int], step: Step, states: Sequence[State]) -> Scenario:
    def prepare(root: str) -> None:
        for version in versions:
            run(2, lambda comm, version=version: save(root, comm, version))

    return Scenario(
        name=f"nodes: {name}",
        ranks=2,
        prepare=prepare,
        steps=(step,),
        states=tuple(states),
        again=(_again(None), _again(0)),
        read_all=read_all,
        cleans_up=False,  # whether another node has published is not known where one cannot
    )


NODES = (
    _scenario("fresh", (), _step(1, None), [{}, {"0": 1}]),
    _scenario("overwrite", (1,), _step(2, 0), [{"0": 1}, {"0": 2}]),
    _scenario("second id", (1,), _step(2, None), [{"0": 1}, {"0": 1, "1": 2}]),
)
