"""A process that takes a scenario's steps in earnest, to be traced, or killed in the middle.

    python -m tests.crash.victim ROOT SCENARIO [--kill-at CALL]

The disk at ROOT is the scenario's disk before. Without ``--kill-at`` nothing of the library or of ``os`` is replaced.
"""

from __future__ import annotations

import argparse
import sys

# The process starts in a fraction of the time without it, and arrays of numpy are enough.
sys.modules["paddle"] = None  # type: ignore[assignment]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("scenario")
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()

    from tests.crash.file_system import Fault, FileSystem
    from tests.crash.job import Job
    from tests.crash.scenarios import find

    scenario = find(arguments.scenario)
    job = Job(scenario.ranks)
    if arguments.kill_at is None:
        outcomes = job.run(lambda comm: scenario.act(lambda step: None, arguments.root, comm))
    else:
        with FileSystem(arguments.root, job, Fault(arguments.kill_at, "kill")) as files:
            outcomes = job.run(lambda comm: scenario.act(files.acknowledge, arguments.root, comm))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


if __name__ == "__main__":
    main()
