"""Saves, loads and reshards where each rank has a core of its own: 2, 4 and 8 ranks, on tmpfs and on disk.

Each number of ranks saves and loads the same state, beside the medium itself and torch's DCP, by the cases of
``benchmarks/compare.py``. The same ranks then reshard in memory, beside a memcpy of the same bytes
(``benchmarks/reshard.py``). Where there are fewer cores than ranks the rows say so.

    python -m benchmarks.cores --python .venv-bench/bin/python          # all
    python -m benchmarks.cores --ranks 8 --media tmpfs --json result.json
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace
from pathlib import Path

from benchmarks import reshard
from benchmarks.compare import Case, Findings, Homes
from benchmarks.harness import Row, arguments, machine

RANKS = (2, 4, 8)
# Loads come out of the page cache, on disk as on tmpfs: those of columns are measured once.
LOADS = {"tmpfs": ("rows", "columns"), "disk": ("rows",)}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, pairs=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks (default 2 4 8)")
    parser.add_argument("--media", nargs="+", choices=LOADS, default=list(LOADS), help="where to save (default both)")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default %(default)s)")
    parser.add_argument("--tensors", type=int, default=1024, help="tensors in the state (default %(default)s)")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a directory on a RAM disk")
    parser.add_argument(
        "--python", type=Path, help="interpreter of an environment with torch; without it DCP stays out"
    )
    parser.add_argument("--reshards", type=reshard.case, nargs="*", default=reshard.CASES, help="such as 1024x262144")
    options = parser.parse_args(argv)
    found = Findings(options)
    with Homes(options.python) as homes:
        for ranks in options.ranks:
            for medium in options.media:
                directory = options.directory if medium == "disk" else options.ram
                saves = functools.partial(saves_and_loads, found, homes, ranks, medium, options)
                found.take(f"{ranks} ranks, {medium}", homes, directory, saves)
            found.take(
                f"{ranks} ranks, reshards", homes, options.ram, functools.partial(reshards, homes, ranks, options)
            )
            homes.close()  # the next ranks have the machine for themselves
    found.finish()


def saves_and_loads(
    found: Findings, homes: Homes, ranks: int, medium: str, options: argparse.Namespace, root: Path
) -> list[Row]:
    """Measure the saves and loads of one number of ranks on one medium."""
    case = Case(options.tensors, ranks=ranks, loads=LOADS[medium], others=("DCP",), disk=medium == "disk")
    return on_cores(ranks, found.compare(f"{ranks}-{medium}", case, homes, root))


def reshards(homes: Homes, ranks: int, options: argparse.Namespace, _: Path) -> list[Row]:
    """Measure the reshards of ranks that are there."""
    rows = []
    for tensors, nbytes in options.reshards:
        case = {"tensors": tensors, "nbytes": nbytes, "pairs": options.pairs}
        rows += reshard.rows_of(homes.ranks("ours", ranks).order("reshard", "measure", **case)[1], tensors)
    return on_cores(ranks, rows)


def on_cores(ranks: int, rows: list[Row]) -> list[Row]:
    """Say so in each row where ranks share cores."""
    cores = machine()["processors"]
    few = f"{ranks} ranks on {cores} core{'s' * (cores > 1)}" if cores < ranks else ""
    return [replace(row, note="; ".join(filter(None, (row.note, few)))) for row in rows]


if __name__ == "__main__":
    main()
