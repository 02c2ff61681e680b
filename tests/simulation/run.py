"""Simulate many seeds, or one: ``python -m tests.simulation.run --seeds 1000 --first 0 --jobs 2``.

``--seed N --story`` tells what happened, ``--shrink`` finds a shorter case that fails alike, and ``--write-test`` keeps
that in ``tests/simulation/found``, where ``test_cluster.py`` runs it. ``--mistake NAME`` puts one of the mistakes of
``mistakes.py`` into the library, and counts the seeds until it is found; several, or ``all``, give a table.
``--neighbours`` simulates cases near those in ``found``: see ``neighbours.py``. ``--store`` has savers compete for one
object store, from seed 0 on: see ``store_world.py``. ``--record`` keeps the totals of many seeds: see
``tests/campaigns.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.campaigns import recording
from tests.simulated.cluster import simulate
from tests.simulated.drawing import draw
from tests.simulated.scenario import Case
from tests.simulated.shrink import shrink
from tests.simulated.story import timeline
from tests.simulation.campaign import REPEATED, run_seeds
from tests.simulation.neighbours import FOUND, draw_neighbour


def fails_alike(violated: str) -> object:
    """Return a function that tells whether a case violates the same invariant."""

    def fails(case: Case) -> bool:
        return violated in {violation.invariant for violation in simulate(case).violations[:1]}

    return fails


def write_test(case: Case, violated: str, text: str) -> Path:
    """Keep a case as a regression test."""
    name = re.sub(r"[^a-z0-9]+", "_", violated.lower()).strip("_")
    path = FOUND / f"{name}_{case.scenario.seed}.json"
    text = text.replace(f"{Path(__file__).parents[2]}/", "")  # of a traceback
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
    parser.add_argument(
        "--repeat-every", type=int, default=REPEATED, help="simulate one of so many seeds twice (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="simulate this one alone")
    parser.add_argument("--neighbours", action="store_true", help="simulate cases near those that failed once")
    parser.add_argument("--store", action="store_true", help="have savers compete for one object store")
    parser.add_argument("--case", type=Path, help="simulate the case in this file")
    parser.add_argument("--story", action="store_true", help="tell what happened")
    parser.add_argument("--shrink", action="store_true", help="find a shorter case that fails alike")
    parser.add_argument("--write-test", action="store_true", help="keep the case as a regression test")
    parser.add_argument("--mistake", nargs="+", help="make this mistake, and stop at the first seed that finds it")
    parser.add_argument("--record", action="store_true", help="add the totals to tests/campaigns.json")
    options = parser.parse_args()
    if options.mistake and options.mistake != ["all"]:
        from tests.simulation.mistakes import MISTAKES

        if unknown := sorted({*options.mistake} - MISTAKES.keys()):
            parser.error(f"there is no mistake {', '.join(unknown)}; there are: all, {', '.join(MISTAKES)}")
    if options.store or (options.seed is None and options.case is None):
        campaign = _mistakes if options.mistake else _compete if options.store else _many
        with recording("tests.simulation.run", options.record):
            return campaign(options)
    with mistaken(options.mistake[0] if options.mistake else None):
        if options.case is not None:
            return _one(Case.from_json(options.case.read_text()), options)
        return _one((draw_neighbour if options.neighbours else draw)(options.seed), options)


def _many(options: argparse.Namespace) -> int:
    cases = draw_neighbour if options.neighbours else None
    totals = run_seeds(
        options.first, options.seeds, options.jobs, options.seconds, repeated=options.repeat_every, cases=cases
    )
    print(totals.summary())
    return 1 if totals.violated else 0


def _compete(options: argparse.Namespace) -> int:
    from tests.simulation.store_world import seeds_until_broken

    logging.disable(logging.CRITICAL)  # each save says that it is done
    seeds, broken = seeds_until_broken(options.seeds, options.seconds)
    print(f"{seeds} seeds; {broken or 'each manifest had its files at any time'}")
    return 1 if broken else 0


def _mistakes(options: argparse.Namespace) -> int:
    """Make mistakes, one after the other, and say how many seeds it took to find each, as rows of a table."""
    from tests.simulation.mistakes import MISTAKES

    names = [*MISTAKES] if options.mistake == ["all"] else options.mistake
    missed = []
    for name in names:
        seeds, world, found = _search(name, options)
        if seeds is None:
            return 1  # stopped
        print(f"| `{name}` | {MISTAKES[name].what} | {world} | {seeds} | {found.partition(': ')[0]} |", flush=True)
        print(f"{name}: {found[:600] or 'not found'}", file=sys.stderr, flush=True)
        if not found:
            missed.append(name)
    print(f"{len(names) - len(missed)} of {len(names)} mistakes found; not found: {missed}")
    return 1 if missed else 0


def _search(name: str, options: argparse.Namespace) -> tuple[int | None, str, str]:
    """Make a mistake; return how many seeds it took, or were tried, in which world, and what was found, if it was.

    Their number is None if somebody has stopped the search.
    """
    from tests.simulation.mistakes import MISTAKES

    world = MISTAKES[name].world
    with mistaken(name):
        if world == "store":
            from tests.simulation.store_world import seeds_until_broken

            seeds, broken = seeds_until_broken(options.seeds, options.seconds)
            return seeds, world, broken and f"a committed checkpoint is whole: {broken}"
        wanted = MISTAKES[name].can_show
        totals = run_seeds(options.first, options.seeds, options.jobs, options.seconds, stop=True, wanted=wanted)
    if not totals.violated:
        return None if totals.is_stopped else options.seeds, world, ""
    seed, found = min(totals.violated)
    return seed + 1 - options.first, world, found


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
