"""Measure how much of the library the simulation runs: ``python -m tests.simulation.coverage --seeds 300``.

Counted are lines and branches of the rooms that save in the background, speak to media, write the format and manage a
run. They are run by seeds, by the cases in ``found``, and by the tests that save to a simulated store or through
simulated files. It needs the package ``coverage``: ``make coverage-simulation`` installs it in a place of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROOT = Path(__file__).parents[2]
_PACKAGE = "paddle_flexckpt"
ROOMS = ("background", "media", "native", "manager")
# Tests in which the library's own code runs in a simulated world.
TESTS = (
    "test_object_store.py",
    "test_library_files.py",
    "test_library_background.py",
    "test_library_manager.py",
    "test_library_native.py",
    "test_library_media.py",
)


def start(path: Path) -> Any:
    """Begin to measure in this process, before the library is imported."""
    import coverage

    include = [str(_ROOT / _PACKAGE / room / "*") for room in ROOMS]
    measured = coverage.Coverage(
        data_file=str(path), branch=True, concurrency="greenlet", include=include, config_file=False
    )
    measured.start()
    return measured


def run_part(part: int, options: argparse.Namespace, directory: Path) -> str:
    """Run every n-th seed, in a new process; return what the seeds have shown."""
    if any(name.startswith(_PACKAGE) for name in sys.modules):
        raise RuntimeError("the library was imported before the measurement began")
    measured = start(directory / f"part.{part}")
    from tests.simulated.cluster import simulate
    from tests.simulated.drawing import draw
    from tests.simulated.scenario import Case
    from tests.simulation.campaign import Totals
    from tests.simulation.run import FOUND

    totals = Totals()
    for seed in range(options.first + part, options.first + options.seeds, options.jobs):
        totals.add(simulate(draw(seed)))
    if part == 0 and not options.only_seeds:
        import pytest

        for case in sorted(FOUND.glob("*.json")):
            totals.add(simulate(Case.from_json(case.read_text(encoding="utf-8"))))
        here = Path(__file__).parent
        pytest.main(
            ["-q", "--no-header", "-m", "not slow", "-p", "no:cacheprovider", *(str(here / name) for name in TESTS)]
        )
    measured.stop()
    measured.save()
    return f"part {part}: {totals.runs} runs, {totals.commits} commits, violations: {totals.violated}"


def share(numbers: Any) -> float:
    """Return the per cent of lines and branches together."""
    there = numbers.n_statements + numbers.n_branches
    return 100.0 * (numbers.n_executed + numbers.n_executed_branches) / there if there else 100.0


def report(measured: Any, shows_missed: bool) -> list[str]:
    """Return a table of the rooms, and what was missed in each of their modules."""
    lines = [f"{'':28} lines   run  branches   run  per cent"]
    missed: list[str] = []
    total = None
    for room in ROOMS:
        files = sorted((_ROOT / _PACKAGE / room).glob("*.py"))
        found = [(path, measured._analyze(str(path))) for path in files]
        numbers = sum_of(analysis.numbers for _, analysis in found)
        total = numbers if total is None else total + numbers
        lines.append(_row(room, numbers))
        for path, analysis in found:
            if analysis.numbers.n_missing or analysis.numbers.n_missing_branches:
                missed.append(_row(f"{room}/{path.name}", analysis.numbers))
                missed.append("    " + analysis.missing_formatted(branches=True))
    lines.append(_row("all four", total))
    return [*lines, "", *missed] if shows_missed else lines


def sum_of(each: Iterable[Any]) -> Any:
    """Add numbers of modules."""
    first, *others = each
    for other in others:
        first = first + other
    return first


def _row(name: str, numbers: Any) -> str:
    return (
        f"{name:28} {numbers.n_statements:5d} {numbers.n_executed:5d} {numbers.n_branches:9d} "
        f"{numbers.n_executed_branches:5d} {share(numbers):9.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only-seeds", action="store_true", help="without the cases in found and the tests")
    parser.add_argument("--table", action="store_true", help="print no missed lines")
    parser.add_argument("--at-least", type=float, default=0.0, help="fail if one of the rooms has fewer per cent")
    options = parser.parse_args()
    import coverage

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        tasks = [(part, options, directory) for part in range(options.jobs)]
        with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
            print(*pool.starmap(run_part, tasks, chunksize=1), sep="\n")
            pool.close()
            pool.join()
        measured = coverage.Coverage(data_file=str(directory / "all"), config_file=False)
        measured.combine([str(directory / f"part.{part}") for part in range(options.jobs)])
        print(*report(measured, not options.table), sep="\n")
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.coverage", *sys.argv[1:]])
    sys.exit(main())
