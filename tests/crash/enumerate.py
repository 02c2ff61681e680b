"""All crash points of all scenarios.

    python -m tests.crash.enumerate [--jobs 2] [--orders 3] [--only TEXT] [--list]

Every scenario is stopped before each of its calls on files, with jobs of two ranks in several orders of the ranks and
with each of the spreads (the whole job dies; one rank dies, and the other sees its collective fail; one rank dies, and
the other waits until it is killed; nobody dies, but one rank is slow, and the other gives up meanwhile). Then every
save is begun once more where an earlier one died before each of its calls, and dies as well (a part of these points).
Then the disks that a loss of power may leave at each point. Then each
call fails, or writes a part, or is interrupted. After each of them a reader has to find the old or the new checkpoint,
bit for bit, and a new save has to go well and clean up.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.crash.explore import Found, losses, stops
from tests.crash.faults import FAULTS, can_fail, faults
from tests.crash.harness import Bench, Violation, after_dead
from tests.crash.scenarios import SCENARIOS, find
from tests.ramdisk import memory_directory

# Of the points of a save after a dead one, by ranks: their number is the square of the number of calls.
SHARE_AFTER_DEAD = {1: 0.4, 2: 0.15}
KINDS = ("stops", "stops after a dead save", "power losses", "faults")


@dataclass(frozen=True)
class Task:
    """Describe points of one scenario.

    Attributes:
        kind: One of :data:`KINDS`.
        scenario: Name of the scenario.
        order: Seed of the order of the ranks.
        slice: Of the calls before which the earlier attempt died: the first of them, and the step to the next.
    """

    kind: str
    scenario: str
    order: int | None = None
    slice: tuple[int, int] = (0, 1)


def tasks(orders: int, only: str = "") -> Iterator[Task]:
    """Yield all there is to do, the longest tasks first."""
    chosen = [scenario for scenario in SCENARIOS if only in scenario.name]
    for scenario in sorted(chosen, key=lambda each: (-each.ranks, not each.large)):
        for order in range(orders) if scenario.ranks > 1 else [None]:
            yield Task("stops", scenario.name, order)
            yield Task("power losses", scenario.name, order)
        yield Task("faults", scenario.name)
        if scenario.repeatable:
            # In slices, so that processes share them.
            for first in range(8):
                yield Task("stops after a dead save", scenario.name, None, (first, 8))


def carry_out(task: Task) -> tuple[Task, Found, float]:
    """Go through the points of one task."""
    begin = time.perf_counter()
    logging.getLogger("paddle_flexckpt").setLevel(logging.WARNING)
    with memory_directory() as path:
        bench = Bench(find(task.scenario), str(path / "disk"))
        try:
            if task.kind == "stops":
                found = stops(bench, task.order)
            elif task.kind == "power losses":
                found = losses(bench, task.order, limit=8 if bench.scenario.large else 32)
            elif task.kind == "faults":
                found = Found()
                for fault in FAULTS:
                    if can_fail(bench.scenario, fault):
                        found.add(faults(bench, fault))
            else:
                found = _stops_after_dead(bench, task, str(path / "first"))
        except Violation as error:
            found = Found(violations=[str(error)])
    return task, found, time.perf_counter() - begin


def _stops_after_dead(bench: Bench, task: Task, root: str) -> Found:
    total = Found()
    first, step = task.slice
    for at in range(first, len(bench.record(0).calls), step):
        again = Bench(after_dead(bench.scenario, at, root), bench.root)
        found = stops(again, at, SHARE_AFTER_DEAD[again.scenario.ranks], spreads=("job",))
        total.add(found)
    return total


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--orders", type=int, default=3, help="orders of the ranks in each scenario with several")
    parser.add_argument("--only", default="", help="scenarios with this text in their name")
    parser.add_argument("--list", action="store_true", help="print the scenarios' names and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print(*(scenario.name for scenario in SCENARIOS), sep="\n")
        return 0
    todo = list(tasks(options.orders, options.only))
    begin = time.perf_counter()
    points, seconds, violations = Counter(), Counter(), []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for number, (task, found, took) in enumerate(pool.imap_unordered(carry_out, todo), 1):
            points[task.kind] += found.points
            points[task.scenario] += found.points
            seconds[task.kind] += took
            violations += found.violations
            for text in found.violations:
                print(f"VIOLATION {text}", flush=True)
            passed = time.perf_counter() - begin
            print(
                f"[{number}/{len(todo)}, {passed:.0f} s] {found.points} points, {task.kind}, {task.scenario}",
                file=sys.stderr,
                flush=True,
            )
    names = sorted({task.scenario for task in todo})
    for name in names:
        print(f"{points[name]:7} {name}")
    total = sum(points[kind] for kind in KINDS)
    print(
        f"{len(names)} scenarios, {total} points: "
        + ", ".join(f"{points[kind]} {kind} ({seconds[kind]:.0f} s)" for kind in KINDS)
        + f"; {len(violations)} violations; {time.perf_counter() - begin:.0f} s with {options.jobs} processes"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
