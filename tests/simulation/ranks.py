"""Jobs of several ranks in a simulated world, with something that strikes at one of their calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from tests.simulated.habits import sizes_for
from tests.simulated.tasks import Process
from tests.simulated.training import (
    LARGE,
    SHAPES,
    ChannelCommunicator,
    Store,
    shards,
    versions_in,
)
from tests.simulated.trees import tree_of
from tests.simulation import test_library_files
from tests.simulation.test_library_files import Library

ROOT = "/shared/run"
DAY = 86400.0
_MOST_SWITCHES = 200_000
# What is said of a save of which a rank could not learn how it ended, or how long that lasts.
_UNKNOWN = ("it is not known what became of the save", "may be undone by a loss of power")
# What strikes at a call: it may raise what the call fails with, or return by how many seconds it takes longer.
Strike = Callable[["Ranks"], float]


class Dead:
    """What a rank says that was killed."""

    def __repr__(self) -> str:
        return "dead"


DEAD = Dead()


class Ranks(Library):
    """A world with a file system that all nodes share, on which jobs of several ranks run, one after the other.

    Attributes:
        calls: Those that were counted since something was armed: of which process, what, and where.
        said: What a process has written to its standard error, by name.
    """

    def __init__(self, seed: int = 0, nodes: int = 1, habits: tuple[str, ...] = ()) -> None:
        super().__init__(nodes, seed, self._called)
        # What the library's own sizes and functions are instead, by module and name.
        self.sizes: dict[tuple[str, str], Any] = sizes_for(habits)
        self.shapes = SHAPES | LARGE if "large" in habits else SHAPES
        self.calls: list[tuple[str, str, str]] = []
        self._who, self._at, self._strike, self._is_storage = "", -1, _nothing, False
        self._jobs = 0
        deliver = self.network.deliver

        def send(source: Any, target: Any, arrive: Callable[[], None]) -> None:
            running = self.scheduler.running
            if running is not None and running.process.alive:
                self._called("send", target.node.name)
            deliver(source, target, arrive)

        self.network.deliver = send  # type: ignore[method-assign]

    def __enter__(self) -> Ranks:
        state_of = test_library_files.process_state
        with mock.patch.object(test_library_files, "process_state", lambda each: {**state_of(each), **self.sizes}):
            super().__enter__()
        return self

    # What strikes.

    def arm(self, who: str, at: int | None = None, strike: Strike | None = None) -> None:
        """Count the calls of processes whose names end so, and have something strike at one of them.

        Where storage is to fail, only the calls on that count.
        """
        self._who, self._at, self._strike = who, -1 if at is None else at, strike or _nothing
        self._is_storage = getattr(strike, "is_of_storage", False)
        self.calls = []

    def disarm(self) -> None:
        self._who = ""

    def _called(self, kind: str, where: str) -> float:
        process = self.scheduler.process
        if not self._who or not process.name.endswith(self._who):
            return 0.0
        if self._is_storage and not where.startswith("/shared"):
            return 0.0
        self.calls.append((process.name, kind, where))
        return self._strike(self) if len(self.calls) - 1 == self._at else 0.0

    # Jobs.

    def job(self, work: Callable[[Communicator], Any], size: int = 2) -> list[Any]:
        """What each rank's work has returned; a CheckpointError that it has raised; of one that was killed, DEAD."""
        self._jobs += 1
        told: list[Any] = [DEAD] * size
        processes = [self._process(f"rank {rank}", rank) for rank in range(size)]
        store, name = Store(self.scheduler, self.network, processes[0]), f"job {self._jobs}"

        def main(rank: int) -> None:
            try:
                comm = ChannelCommunicator(store, name, size, rank)
            except RuntimeError:  # the job's own store has gone, before the library has a part in it
                return
            try:
                told[rank] = work(comm)
            except CheckpointError as error:
                told[rank] = error

        for rank, process in enumerate(processes):
            process.start(lambda rank=rank: main(rank))
        self.finish()
        return told

    def _process(self, name: str, rank: int) -> Process:
        node = self.nodes[rank % len(self.nodes)]
        return Process(self.scheduler, node, name, environ={"PADDLE_CURRENT_ENDPOINT": f"{node.name}:{6000 + rank}"})

    def alone(self, work: Callable[[], Any], name: str = "rank 0") -> Any:
        """What some work in a process of its own has returned; what it raises is raised."""
        process = self._process(name, 0)
        task = process.start(work)
        self.finish()
        if task.error is not None:
            raise task.error
        return task.result

    def finish(self) -> None:
        """Run until all processes have ended, as they must."""
        self.scheduler.run(until=self.scheduler.now + DAY, steps=_MOST_SWITCHES)
        errors = [f"{task.name} of {task.process.name}: {text}" for task, text in self.scheduler.thread_errors]
        errors += [f"{task.process.name}: {text}" for task, text in self.scheduler.main_errors]
        assert not errors, "\n".join(errors)
        left = [process for process in self.scheduler.processes if process.alive]
        assert left == [], "processes are left"

    # What is on storage.

    def names(self, path: str = ROOT) -> list[str]:
        """The files below a directory."""
        below = path.removeprefix("/shared/") + "/"
        return sorted(
            name[len(below) :] for name, data in tree_of(self.shared).items() if name[: len(below)] == below and data
        )

    def state(self, rank: int = 0, size: int = 1, version: int | None = None) -> dict[str, Any]:
        """What a rank holds."""
        return shards(rank, size, 0, version, self.shapes)

    def version_at(self, path: str = ROOT, unique_id: int = 0) -> int:
        """The version of a checkpoint, every bit of which is as it was saved."""

        def read() -> int:
            state = self.state()
            load_state_dict(state, path, SoloCommunicator(), unique_id=unique_id, verify="full", strict=True)
            (version,) = versions_in(state, 0, 1, 0)
            return version

        return int(self.alone(read, "reader"))


def is_unknown(text: str) -> bool:
    """Tell whether an error leaves open whether the checkpoint is there, or stays."""
    return any(each in text for each in _UNKNOWN)


def _nothing(world: Ranks) -> float:
    return 0.0


def fail_with(number: int) -> Strike:
    """Have the call fail."""

    def strike(world: Ranks) -> float:
        raise OSError(number, os.strerror(number))

    strike.is_of_storage = True  # type: ignore[attr-defined]
    return strike


fail = fail_with(errno.EIO)


def kill(world: Ranks) -> float:
    """Kill the process that makes the call; what it sends then is on its way."""
    world.scheduler.process.kill()
    if world.calls[-1][1] != "send":
        world.scheduler.check_alive()
    return 0.0


def kill_writer(world: Ranks) -> float:
    """Kill the writers of the process that makes the call."""
    for process in world.scheduler.processes:
        if process.parent is world.scheduler.process:
            process.kill()
    return 0.0


def stop(seconds: float) -> Strike:
    """Stop the process that makes the call, and let it go on later."""

    def strike(world: Ranks) -> float:
        process = world.scheduler.process
        process.stop()
        world.scheduler.after(seconds, process.resume)
        return 0.0

    return strike


def fill_the_disk(world: Ranks) -> float:
    """From this call on there is no room, until :func:`empty`."""
    world.shared.capacity = world.shared.used + 2000
    return 0.0


def lose_power(world: Ranks) -> float:
    """All processes end, and what was not made durable may go."""
    for process in world.scheduler.processes:
        process.kill()
    world.shared.lose_power(world.scheduler.random)
    if world.calls[-1][1] != "send":
        world.scheduler.check_alive()
    return 0.0


def some_of(count: int, part: int, seed: int) -> list[int]:
    """Some places of so many, in rising order; other ones with each seed."""
    return sorted(Random(seed).sample(range(count), min(part, count)))
