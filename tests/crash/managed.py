"""Scenarios: a run's CheckpointManager, which saves steps and removes old ones."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from paddle_flexckpt.manager import CheckpointManager, KeepLatest
from paddle_flexckpt.ranks.communicator import Communicator
from tests.crash.background import InlineWriter
from tests.crash.job import JobCommunicator
from tests.crash.scenario import Scenario, State, Step, run, shards

RUN = "runs/b"


def _manager(root: str, comm: Communicator, keep: int | None = None, writer: InlineWriter | None = None):
    return CheckpointManager(
        os.path.join(root, RUN),
        keep=() if keep is None else KeepLatest(keep),
        process_group=comm,
        async_save=writer or False,
        preemption_signals=(),
    )


def _save(manager: CheckpointManager, comm: Communicator, step: int, version: int) -> None:
    manager.save(step, state=shards(version, comm), rng=False, overwrite=True)


def _go_on(manager: CheckpointManager, comm: Communicator) -> None:
    if manager.latest_step() is not None:
        manager.restore(state=shards(0, comm))


def _name(step: int) -> str:
    return f"{RUN}/step_{step:08d}/0"


def _steps(*steps: int) -> State:
    """Return checkpoints of steps, each of the version of its number."""
    return {_name(step): step for step in steps}


def _step(number: int, keep: int, version: int | None = None) -> Step:
    def step(root: str, comm: Communicator) -> None:
        with _manager(root, comm, keep) as manager:
            _go_on(manager, comm)
            _save(manager, comm, number, number if version is None else version)

    return step


def _background_step(number: int, keep: int) -> Step:
    def step(root: str, comm: JobCommunicator) -> None:
        with _manager(root, comm, keep, InlineWriter(comm)) as manager:
            _go_on(manager, comm)
            _save(manager, comm, number, number)
            manager.wait()

    return step


def _again(step: int):
    def again(root: str, comm: Communicator, version: int) -> str:
        with _manager(root, comm) as manager:
            _go_on(manager, comm)  # a run that goes on may go back below the latest step
            _save(manager, comm, step, version)
        return _name(step)

    return again


def _kept(ranks: int, *steps: int):
    def prepare(root: str) -> None:
        def work(comm: Communicator) -> None:
            with _manager(root, comm) as manager:
                for step in steps:
                    _save(manager, comm, step, step)

        run(ranks, work)

    return prepare


def _managed(ranks: int) -> list[Scenario]:
    def scenario(
        name: str,
        before: Sequence[int],
        steps: Sequence[Step],
        states: Sequence[State],
        between: Sequence[Sequence[State]],
    ) -> Scenario:
        return Scenario(
            name=f"{name}, {ranks} ranks",
            ranks=ranks,
            prepare=_kept(ranks, *before),
            steps=tuple(steps),
            states=tuple(states),
            again=(_again(9), _again(3)),
            between=tuple(map(tuple, between)),
        )

    subsets = [_steps(*some, 4) for count in range(4) for some in itertools.combinations((1, 2, 3), count)]
    return [
        scenario("manager: first step", (), [_step(3, 2)], [{}, _steps(3)], ()),
        scenario("manager: one goes", (1, 2), [_step(3, 2)], [_steps(1, 2), _steps(2, 3)], [[_steps(1, 2, 3)]]),
        scenario("manager: three go", (1, 2, 3), [_step(4, 1)], [_steps(1, 2, 3), _steps(4)], [subsets]),
        scenario(
            "manager: overwrite, one goes",
            (1, 2, 3),
            [_step(3, 2, version=7)],
            [_steps(1, 2, 3), {**_steps(2), _name(3): 7}],
            [[{**_steps(1, 2), _name(3): 7}]],
        ),
        scenario(
            "manager: in the background, one goes, then another",
            (1, 2),
            [_background_step(3, 2), _background_step(4, 2)],
            [_steps(1, 2), _steps(2, 3), _steps(3, 4)],
            [[_steps(1, 2, 3)], [_steps(2, 3, 4)]],
        ),
    ]


MANAGED = (*_managed(1), *_managed(2))
