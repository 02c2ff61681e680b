"""Scenarios: saves by all ranks, and repairs of a lost manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import paddle_flexckpt.tools.verification as verification
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.ranks.communicator import Communicator
from tests.crash.scenario import DIRECTORY, Scenario, State, Step, save, saved


def _name(unique_id: int) -> str:
    return f"{DIRECTORY}/{unique_id}"


def again_with(large: bool = False) -> tuple[Callable[[str, Communicator, int], str], ...]:
    return tuple(
        lambda root, comm, version, unique_id=unique_id: save(root, comm, version, unique_id, large)
        for unique_id in (None, 0)
    )


def _step(version: int, unique_id: int | None, large: bool = False) -> Step:
    return lambda root, comm: save(root, comm, version, unique_id, large)


def _saves(ranks: int) -> list[Scenario]:
    one = {_name(0): 1}

    def scenario(
        name: str, versions: Sequence[int], steps: Sequence[Step], states: Sequence[State], large: bool = False
    ) -> Scenario:
        return Scenario(
            name=f"{name}, {ranks} ranks",
            ranks=ranks,
            prepare=saved(ranks, *versions, large=large),
            steps=tuple(steps),
            states=tuple(states),
            again=again_with(large),
            large=large,
        )

    return [
        scenario("fresh", (), [_step(1, None)], [{}, one]),
        scenario("overwrite", (1,), [_step(2, 0)], [one, {_name(0): 2}]),
        scenario("second id", (1,), [_step(2, None)], [one, {**one, _name(1): 2}]),
        scenario("overwrite twice", (1,), [_step(2, 0), _step(3, 0)], [one, {_name(0): 2}, {_name(0): 3}]),
        scenario(
            "second id, then overwrite the first",
            (1,),
            [_step(2, None), _step(3, 0)],
            [one, {**one, _name(1): 2}, {_name(0): 3, _name(1): 2}],
        ),
        scenario("overwrite, several blocks", (1,), [_step(2, 0, True)], [one, {_name(0): 2}], large=True),
    ]


def _repair(overwrite: bool) -> Step:
    def step(root: str, comm: Communicator) -> None:
        verification.repair_manifest(os.path.join(root, DIRECTORY), 0, overwrite=overwrite)

    return step


def _repairs(files_of: int) -> list[Scenario]:
    one = {_name(0): 1}

    def without_manifest(root: str) -> None:
        saved(files_of, 1)(root)
        os.unlink(CheckpointDirectory(os.path.join(root, DIRECTORY)).manifest_file(0))

    def scenario(name: str, prepare: Callable[[str], None], overwrite: bool, before: State) -> Scenario:
        name = f"repair of {files_of} files{name}"
        return Scenario(name, 1, prepare, (_repair(overwrite),), (before, one), again_with(), kind="repair")

    return [
        scenario("", without_manifest, False, {}),
        scenario(", manifest there", saved(files_of, 1), True, one),
    ]


SAVES = (*_saves(1), *_saves(2))
REPAIRS = (*_repairs(1), *_repairs(2))
