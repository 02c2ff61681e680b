"""Simulate many seeds, or one: ``python -m tests.simulation.run --seeds 1000 --first 0 --jobs 2``.

``--seed N --story`` tells what happened, ``--shrink`` finds a shorter case that fails alike, and ``--write-test`` keeps
that in ``tests/simulation/found``, where ``test_cluster.py`` runs it. ``--mistake NAME`` puts one of the mistakes of
``mistakes.py`` into the library, and counts the seeds until it is found; several, or ``all``, give a table.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from paddle_flexckpt.testing.simulation.cluster import Outcome, simulate
from paddle_flexckpt.testing.simulation.scenario import DAY, Case, draw
from paddle_flexckpt.testing.simulation.shrink import shrink
from paddle_flexckpt.testing.simulation.story import timeline

FOUND = Path(__file__).parent / "found"
_SHOWN = 5


@dataclass
class Totals:
    """What many runs have shown."""

    runs: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    commits: int = 0
    restores: int = 0
    readings: int = 0
    kinds: Counter[int] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    states: set[tuple[str, ...]] = field(default_factory=set)
    violated: list[tuple[int, str]] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count a run."""
        self.runs += 1
        self.fingerprints[outcome.case.scenario.seed] = outcome.fingerprint
        self.seconds += outcome.seconds
        self.commits += outcome.commits
        self.restores += outcome.restores
        self.readings += outcome.readings
        self.kinds[len(outcome.struck)] += 1
        self.struck.update(outcome.struck)
        self.states |= outcome.states
        if outcome.violations:
            self.violated.append((outcome.case.scenario.seed, str(outcome.violations[0])))

    def merge(self, other: Totals) -> None:
        """Count another's runs."""
        for name in ("runs", "seconds", "processor", "commits", "restores", "readings"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds.update(other.kinds)
        self.struck.update(other.struck)
        self.states |= other.states
        self.violated += other.violated
        self.fingerprints.update(other.fingerprints)

    def fingerprint(self, count: int = 4) -> str:
        """What the first seeds' stories have in common with those of another process only if all are the same."""
        first = sorted(self.fingerprints.items())[:count]
        return hashlib.sha256(repr(first).encode()).hexdigest()[:32]

    def summary(self) -> str:
        """What is printed in the end."""
        many = sum(count for kinds, count in self.kinds.items() if kinds >= 5)
        coordinator = {(state[0], state[1]) for state in self.states}
        each, struck = 1000 * self.processor / max(self.runs, 1), sum(self.struck.values())
        lines = [
            f"{self.runs} runs, {self.seconds / DAY:.0f} simulated days",
            f"{self.processor / 3600:.2f} hours of processor time ({each:.0f} ms each)",
            f"{self.commits} checkpoints committed, {self.restores} restores, {self.readings} readings by others",
            f"faults that struck: {struck} of {len(self.struck)} kinds; runs with 5 kinds or more: {many}",
            *(f"  {count:7d} {kind}" for kind, count in self.struck.most_common()),
            f"protocol states in which something struck: {len(self.states)}; by fault and phase of the coordinator: "
            f"{len(coordinator)}",
            f"fingerprint of the first stories: {self.fingerprint()}",
            f"violations: {len(self.violated)}",
            *(f"  seed {seed}: {text[:600]}" for seed, text in sorted(self.violated)[:_SHOWN]),
        ]
        return "\n".join(lines)


def run_seeds(first: int, count: int, jobs: int = 1, seconds: float | None = None, stop: bool = False) -> Totals:
    """Simulate seeds, in several processes; no more of them after some seconds, or after the first violation."""
    if jobs == 1:
        return _run_seeds((first, count, 1, seconds, stop))
    totals = Totals()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for found in pool.imap_unordered(_run_seeds, [(first + j, count, jobs, seconds, stop) for j in range(jobs)]):
            totals.merge(found)
        pool.close()
        pool.join()
    return totals


def _run_seeds(task: tuple[int, int, int, float | None, bool]) -> Totals:
    first, count, stride, seconds, stop = task
    totals, begin, processor = Totals(), time.monotonic(), time.process_time()
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    for seed in range(first, first + count - (first % stride if stride > 1 else 0), stride):
        totals.add(simulate(draw(seed)))
        if (stop and totals.violated) or (seconds is not None and time.monotonic() - begin > seconds):
            break
    totals.processor = time.process_time() - processor
    return totals


def fails_alike(violated: str) -> object:
    """A function that tells whether a case violates the same invariant."""

    def fails(case: Case) -> bool:
        return violated in {violation.invariant for violation in simulate(case).violations[:1]}

    return fails


def write_test(case: Case, violated: str, text: str) -> Path:
    """Keep a case as a regression test."""
    name = re.sub(r"[^a-z0-9]+", "_", violated.lower()).strip("_")
    path = FOUND / f"{name}_{case.scenario.seed}.json"
    path.write_text(replace(case, violated=text).to_json() + "\n", encoding="utf-8")
    return path


@contextlib.contextmanager
def mistaken(name: str | None) -> Iterator[None]:
    """Have a mistake in the library."""
    if name is None:
        yield
        return
    from tests.simulation.mistakes import make

    with make(name):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, help="begin no more after so many seconds")
    parser.add_argument("--seed", type=int, help="simulate this one alone")
    parser.add_argument("--case", type=Path, help="simulate the case in this file")
    parser.add_argument("--story", action="store_true", help="tell what happened")
    parser.add_argument("--shrink", action="store_true", help="find a shorter case that fails alike")
    parser.add_argument("--write-test", action="store_true", help="keep the case as a regression test")
    parser.add_argument("--mistake", nargs="+", help="make this mistake, and stop at the first seed that finds it")
    options = parser.parse_args()
    if options.mistake and options.seed is None and options.case is None:
        return _mistakes(options)
    with mistaken(options.mistake[0] if options.mistake else None):
        if options.seed is None and options.case is None:
            return _many(options)
        case = draw(options.seed) if options.case is None else Case.from_json(options.case.read_text())
        return _one(case, options)


def _many(options: argparse.Namespace) -> int:
    totals = run_seeds(options.first, options.seeds, options.jobs, options.seconds)
    print(totals.summary())
    return 1 if totals.violated else 0


def _mistakes(options: argparse.Namespace) -> int:
    """Make mistakes, one after the other, and say how many seeds it took to find each, as rows of a table."""
    from tests.simulation.mistakes import MISTAKES

    names = [*MISTAKES] if options.mistake == ["all"] else options.mistake
    missed = []
    for name in names:
        seeds, world, found = _search(name, options)
        print(f"| `{name}` | {MISTAKES[name].what} | {world} | {seeds} | {found.partition(': ')[0]} |", flush=True)
        print(f"{name}: {found[:600] or 'not found'}", file=sys.stderr, flush=True)
        if not found:
            missed.append(name)
    print(f"{len(names) - len(missed)} of {len(names)} mistakes found; not found: {missed}")
    return 1 if missed else 0


def _search(name: str, options: argparse.Namespace) -> tuple[int, str, str]:
    """Make a mistake; return the seeds that were tried, in which world, and what was found, if it was."""
    from tests.simulation.mistakes import MISTAKES

    world = MISTAKES[name].world
    with mistaken(name):
        if world == "store":
            from tests.simulation.store_world import seeds_until_broken

            seeds, broken = seeds_until_broken(options.seeds, options.seconds)
            return seeds, world, broken and f"a committed checkpoint is whole: {broken}"
        totals = run_seeds(options.first, options.seeds, options.jobs, options.seconds, stop=True)
    return totals.runs, world, min(totals.violated)[1] if totals.violated else ""


def _one(case: Case, options: argparse.Namespace) -> int:
    outcome = simulate(case)
    if outcome.violations and options.shrink:
        case = shrink(case, fails_alike(outcome.violations[0].invariant))  # type: ignore[arg-type]
        outcome = simulate(case)
    print(case.scenario, *case.faults, sep="\n")
    if options.story or outcome.violations:
        print(timeline(outcome.story))
    print(f"story: {outcome.fingerprint}")
    for violation in outcome.violations:
        print(f"VIOLATION of {violation}")
    if outcome.violations and options.write_test:
        print(f"written: {write_test(case, outcome.violations[0].invariant, str(outcome.violations[0]))}")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of texts have another order in each process otherwise, and a seed would not say all.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.run", *sys.argv[1:]])
    sys.exit(main())
