"""Crash states in numbers: ``python -m tests.filesystems.campaign --states 2000`` (``make test-filesystems``).

Every scenario of :mod:`tests.crash` is recorded on every file system, again and again with other noise beside it, until
so many states have been looked at on each: ext4 with ``data=ordered``, ``data=journal`` and ``data=writeback``, XFS and
btrfs. A reader has to find the old or the new checkpoints, bit for bit, and all that was reported done; then a new save
has to go well and clean up.

``--results FILE`` keeps what was done, a line for each recording; the next run goes on from there. With ``--left-out``
an fsync is left out, and then something has to be found. ``--record`` keeps the totals: see ``tests/campaigns.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from random import Random

from tests.campaigns import recording
from tests.crash.scenarios import SCENARIOS
from tests.filesystems.device import FILE_SYSTEMS, Unavailable, why_not
from tests.filesystems.trial import LEFT_OUT, Found, Trial, carry_out


def trials(system: str, states: int, only: str, left_out: str) -> Iterator[Trial]:
    """Recordings without an end, of all scenarios in turn."""
    names = [scenario.name for scenario in SCENARIOS if only in scenario.name]
    Random(0).shuffle(names)  # the first few are of all kinds
    limit = max(10, -(-states // len(names)))
    for first in itertools.count():
        for number, name in enumerate(names):
            yield Trial(system, name, first + number, limit, left_out)


class Campaign:
    """What was found, by trial, and how much is to be found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.found: dict[str, Found] = {}
        self.systems = []
        for system in FILE_SYSTEMS:
            if system.kind in options.file_systems:
                reason = why_not(system)
                if reason is None:
                    self.systems.append(system.name)
                else:
                    print(f"SKIPPED: no crash states of {system.name} are looked at: {reason}", flush=True)
        # Those of trials that have begun are counted as if they had come to their limits.
        self._states: Counter[str] = Counter()
        more = options.states, options.only, options.left_out
        self._left = {name: trials(name, *more) for name in self.systems}
        if options.results and options.results.exists():
            for line in options.results.read_text().splitlines():
                entry = json.loads(line)
                self._count(Trial(**entry["trial"]), Found(**entry["found"]))

    def _count(self, trial: Trial, found: Found) -> None:
        self.found[trial.name] = found
        self._states[trial.system] += found.states

    def add(self, trial: Trial, found: Found) -> None:
        self._states[trial.system] -= trial.limit
        self._count(trial, found)
        if self._options.results:
            with open(self._options.results, "a") as stream:
                stream.write(json.dumps({"trial": asdict(trial), "found": asdict(found)}) + "\n")

    def next(self) -> Trial | None:
        """What is to be done next, on the file system that has least; None if nothing is wanting."""
        name = min(self._left, key=lambda each: self._states[each], default=None)
        if name is None or self._states[name] >= self._options.states:
            return None
        trial = next(each for each in self._left[name] if each.name not in self.found)
        self._states[name] += trial.limit
        return trial

    def table(self) -> str:
        columns = ("recordings", "writes", "flushes", "states", "prefixes", "violations", "seconds")
        lines = [f"{'file system':<22}" + "".join(f"{name:>12}" for name in columns)]
        for name in self.systems:
            of = [found for trial, found in self.found.items() if trial.startswith(f"{name}:")]
            sums = [sum(getattr(found, column) for found in of) for column in columns[1:5]]
            numbers = [len(of), *sums, sum(len(found.violations) for found in of), sum(found.seconds for found in of)]
            lines.append(f"{name:<22}" + "".join(f"{number:>12,.0f}" for number in numbers))
        return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = list(dict.fromkeys(each.kind for each in FILE_SYSTEMS))
    parser.add_argument("--states", type=int, default=2000, help="on each file system, and each mode of ext4")
    parser.add_argument("--file-systems", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="scenarios with this text in their name")
    parser.add_argument("--left-out", choices=LEFT_OUT, default="", help="whose fsyncs are left out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--results", type=Path, help="a file of what was done")
    parser.add_argument("--keep", type=Path, help="a directory for the disks of violations")
    parser.add_argument("--record", action="store_true", help="add the totals to tests/campaigns.json")
    options = parser.parse_args(arguments)
    with recording("tests.filesystems.campaign", options.record):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Carry trials out until enough is found; return the exit status."""
    begin, campaign = time.perf_counter(), Campaign(options)
    running: dict[Future[Found], Trial] = {}
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(options.jobs, context) as pool:
            while True:
                while len(running) < options.jobs and time.perf_counter() - begin < options.seconds:
                    trial = campaign.next()
                    if trial is None:
                        break
                    running[pool.submit(carry_out, trial, options.keep)] = trial
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    trial, found = running.pop(done), done.result()
                    campaign.add(trial, found)
                    print(*found.violations, sep="\n\n", end="\n" * bool(found.violations), flush=True)
                    print(f"[{time.perf_counter() - begin:.0f} s] {found.states} states, {trial.name}", file=sys.stderr)
    except Unavailable as error:
        print(f"SKIPPED: no crash states of real file systems were looked at: {error}", flush=True)
        return 0
    print(campaign.table())
    wrong = {name.partition(":")[0] for name, found in campaign.found.items() if found.violations}
    if options.left_out and campaign.systems:
        print(f"without the fsync of {options.left_out}, something is found on: {', '.join(sorted(wrong)) or 'none'}")
        return int(not wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
