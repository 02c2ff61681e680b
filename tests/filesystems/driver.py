"""A process that takes a scenario's steps on a mounted file system, and says when each is reported done.

    python -m tests.filesystems.driver ROOT SCENARIO CONTROL

The scenarios are those of :mod:`tests.crash`, with background writers that are processes. ``CONTROL`` is a connection:
over it goes that the first step begins, and that each is done; the process goes on when that is noted. Nothing of the
library is replaced. With ``FLEXCKPT_LEFT_OUT``, ``left_out/sitecustomize.py`` leaves an fsync out, in this process and
in the writers'.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection

if not sys.argv[2].startswith("manager"):
    # The process starts in a fraction of the time without it, and arrays of numpy are enough for all but a manager.
    sys.modules["paddle"] = None  # type: ignore[assignment]

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.crash import background, managed
from tests.crash.scenarios import find


class Writers:
    """A background writer for each rank, in the place of those without a process."""

    def __init__(self) -> None:
        self._of: dict[int, BackgroundWriter] = {}

    def __call__(self, comm: Communicator) -> BackgroundWriter:
        return self._of.setdefault(comm.position, BackgroundWriter(nice=0, io_class="unchanged", timeout=60.0))

    def close(self) -> None:
        for writer in self._of.values():
            writer.close()


class Reporter:
    """Says which steps are done; a step of several ranks when the first of them returns."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._done = 0

    def __call__(self, step: int) -> None:
        with self._lock:
            if step == self._done:
                self.say(f"step {step} is reported done")
                self._done += 1

    def say(self, text: str) -> None:
        self._control.send(text)
        self._control.recv()


def main(root: str, name: str, control: Connection) -> None:
    scenario, reporter, writers = find(name), Reporter(control), Writers()
    background.InlineWriter = managed.InlineWriter = writers  # type: ignore[assignment,misc]
    reporter.say("begin")
    SimulatedWorld(scenario.ranks).run(lambda comm: scenario.act(reporter, root, comm))
    writers.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Connection(int(sys.argv[3])))
