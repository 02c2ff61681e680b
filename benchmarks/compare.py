"""Save and load against the medium itself, Paddle's own functions, torch's DCP, safetensors and Orbax, in turns.

Each case is a number of ranks and of tensors, a layout, a dtype and a medium. All subjects save and load the same
values. ``x / y`` is the seconds of y over those of x: "save / raw" of 1.0 means that a save takes as long as the medium
does. A subject's first save and load of a case do not count: what they loaded is compared bit for bit. Files are in the
page cache when they are read.

What is compared: this library's saves have checksums and are durable; its loads verify what they read. ``raw`` writes
and fsyncs as many bytes from the same memory, or reads them, a MiB at a time, by one file a rank. DCP and Orbax make
durable too, Paddle's own and safetensors do not: they are measured as they are, and with an fsync of their files after.

    python -m benchmarks.compare                                    # all cases: some ten minutes
    python -m benchmarks.compare --cases one-64 two-64 --mib 64 --pairs 3 --json result.json
    python -m benchmarks.compare --python .venv-bench/bin/python    # with the peers of that environment
    python -m benchmarks.compare --earlier ../other-checkout        # with another version of this library
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import MIB, Row, arguments, finish, ratios, row, timed, turns, write
from benchmarks.ranks import Ranks, State, earlier_ranks, paddle_ranks, peer_ranks

#: Which processes a subject lives in; the others are Paddle's.
HOMES = {"DCP": "torch", "safetensors": "torch", "Orbax": "orbax", "earlier": "earlier"}
PADDLE = ("Paddle", "Paddle safetensors")
PEERS = ("DCP", "safetensors", "Orbax")
NOT_DURABLE = (*PADDLE, "safetensors")
LOADS = {"rows": "load", "columns": "load of columns", "transposed": "load with AOA"}


@dataclass(frozen=True)
class Case:
    """Describe what is compared.

    Attributes:
        tensors: Of the model.
        kib: Size of a tensor; None: the whole state has the size that the caller asks for.
        ranks: Ranks that save; ``loading`` ranks load, as many by default.
        source: Layout of the save.
        loads: Layouts of the loads.
        others: Subjects besides raw and ours.
        disk: Whether on disk and not on a RAM disk.
        pairs: Turns, at most.
        columns: Columns of each tensor; None: as many as rows, or twice as many.
        export: Whether to export the checkpoint too.
        publish: Whether to publish the model, and do nothing else.
    """

    tensors: int
    kib: int | None = None
    ranks: int = 1
    loading: int | None = None
    source: str = "rows"
    loads: tuple[str, ...] = ("rows", "columns")
    others: tuple[str, ...] = ()
    dtype: str = "float32"
    disk: bool = False
    pairs: int = 99
    columns: int | None = None
    export: bool = False
    publish: bool = False

    @property
    def label(self) -> str:
        """Return what distinguishes it, for a reader."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}" + (f" to {self.loading}" if self.loading else "")
        parts = [ranks, f"{self.tensors:,} tensors", "disk" if self.disk else "tmpfs"]
        parts += ["bf16"] * (self.dtype == "bfloat16") + ["V2 to TP"] * (self.source == "flat")
        parts += [f"{self.columns} columns"] * (self.columns is not None)
        return ", ".join(parts)


CASES = {
    # One process, and calls and microseconds a tensor.
    "one-64": Case(64),
    "one-1024": Case(1024, others=("Paddle",), export=True),
    "one-16384": Case(16384, kib=32),
    "one-narrow": Case(1024, columns=64),
    "one-4096": Case(4096, kib=64),
    "one-aoa": Case(1024, loads=("transposed",), others=("Paddle",), pairs=3),
    # Two ranks, and everybody.
    "two-64": Case(64, ranks=2, others=(*PADDLE, *PEERS)),
    "two-1024": Case(1024, ranks=2, others=(*PADDLE, *PEERS)),
    # Paddle's own would take minutes for each load of columns.
    "two-16384": Case(16384, kib=32, ranks=2, others=("DCP",), pairs=2),
    "two-bf16": Case(1024, ranks=2, dtype="bfloat16", others=("Paddle", "DCP"), pairs=3),
    "two-v2": Case(1024, ranks=2, source="flat", others=("Paddle",), pairs=3),
    "two-to-four": Case(1024, ranks=2, loading=4, others=("Paddle", "DCP"), pairs=3),
    "four-64": Case(64, ranks=4, pairs=3),
    "four-1024": Case(1024, ranks=4, others=("Paddle", "DCP"), pairs=3),
    "four-publish": Case(64, ranks=4, loads=(), publish=True, pairs=9),
    # On disk.
    "disk-64": Case(64, ranks=2, others=(*PADDLE, *PEERS), disk=True, pairs=5),
    "disk-1024": Case(1024, ranks=2, others=("Paddle", "DCP"), disk=True, pairs=5),
    "disk-16384": Case(16384, kib=32, ranks=2, disk=True, pairs=3),
    "disk-publish": Case(64, ranks=4, loads=(), publish=True, disk=True, pairs=9),
}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, pairs=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--mib", type=int, default=512, help="size of the state (default %(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of tensors, to see that it runs")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a directory on a RAM disk")
    parser.add_argument("--python", type=Path, help="interpreter of the peers' environment; without it they stay out")
    parser.add_argument("--earlier", type=Path, help="a checkout of another version of this library, which takes part")
    options = parser.parse_args(argv)
    found = Findings(options)
    with Homes(options.python, options.earlier) as homes:
        for name in ("calls", *options.cases) if set(options.cases) & {"one-64", "one-4096"} else options.cases:
            if name == "calls":
                found.take(name, homes, options.ram, functools.partial(calls, homes))
            else:
                case = scaled(CASES[name], options.scale)
                directory = options.directory if case.disk else options.ram
                found.take(name, homes, directory, functools.partial(found.compare, name, case, homes))
    found.finish()


class Findings:
    """Collect what is found, and write it down as it comes: what fails does not lose what the others found.

    Attributes:
        rows: All rows.
        details: All seconds, by case.
        failures: A line for each case that failed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[Row] = []
        self.details: dict[str, Any] = {}
        self.failures: list[str] = []
        self._peers: dict[str, str] = {}
        self._options = options

    def take(self, name: str, homes: Homes, directory: Path, work: Callable[[Path], list[Row]]) -> None:
        """Add the rows of one case, which has an empty directory to write into."""
        try:
            with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as root:
                self.rows += work(Path(root).resolve())
                self._peers.update(homes.versions())
        except (RuntimeError, OSError, EOFError) as error:
            homes.close()
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            print(self.failures[-1], flush=True)
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        write(self._options, self.rows, **self._told())

    def compare(self, name: str, case: Case, homes: Homes, root: Path) -> list[Row]:
        """Measure one case; return its rows."""
        self.details[name] = Comparison(case, homes, root, self._options).run()
        return rows_of(case, self.details[name]["seconds"])

    def finish(self) -> None:
        """Print all rows; end the program with an error if a case failed."""
        finish(self._options, self.rows, **self._told())
        if self.failures:
            raise SystemExit(f"{len(self.failures)} cases failed")

    def _told(self) -> dict[str, Any]:
        return {"cases": self.details, "failures": self.failures, "peers": self._peers}


class Homes(contextlib.AbstractContextManager["Homes"]):
    """Hold the groups of processes, started when first used and kept for the next case."""

    def __init__(self, python: Path | None, earlier: Path | None = None) -> None:
        self._python, self._earlier, self._ranks = python, earlier, {}

    def ranks(self, subject: str, size: int) -> Ranks:
        """Return the ranks that a subject lives in."""
        home = HOMES.get(subject, "paddle")
        if (home, size) not in self._ranks:
            if home == "paddle":
                started = paddle_ranks(size)
            elif home == "earlier":
                started = earlier_ranks(self._earlier, size)
            else:
                started = peer_ranks(self._python, home, size)
            self._ranks[home, size] = started
        return self._ranks[home, size]

    def has(self, subject: str) -> bool:
        """Return whether a subject can take part."""
        return subject not in HOMES or (self._earlier if subject == "earlier" else self._python) is not None

    def versions(self) -> dict[str, str]:
        """Return the versions of what the peers' environments have."""
        told = [
            ranks.order("process", "versions")[1][0]
            for (home, _), ranks in self._ranks.items()
            if home in ("torch", "orbax")
        ]
        return {name: version for each in told for name, version in each.items()}

    def close(self) -> None:
        """End all processes."""
        while self._ranks:
            self._ranks.popitem()[1].close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Comparison:
    """Measure one case."""

    def __init__(self, case: Case, homes: Homes, root: Path, options: argparse.Namespace) -> None:
        self._case, self._homes, self._root = case, homes, root
        self._pairs = min(case.pairs, options.pairs)
        self._state = state_of(case, options.mib)
        self._subjects = ["raw", "ours", *filter(homes.has, ("earlier", *case.others))]
        self._loading = case.loading or case.ranks
        # What the last save and load of this library told of their phases, by rank.
        self._phases: dict[str, list[dict[str, float]]] = {}

    def run(self) -> dict[str, Any]:
        """Return the seconds of all turns, by what was done and by subject."""
        case = self._case
        self._everywhere("prepare", source=case.source, targets=[], **asdict(self._state))
        if case.publish:
            return {"state": asdict(self._state), "seconds": {"publish": self._publications()}, "phases": {}}
        seconds = {"save": self._saves()}
        self._everywhere("prepare", loading=True, source="rows", targets=case.loads, **asdict(self._state))
        # Raw is read by the ranks that load, each its own file.
        self._order("raw", "save", True, path=str(self._root / "raw"))
        for layout in case.loads:
            seconds[LOADS[layout]] = self._loads(layout)
        if case.export:
            seconds["export"] = self._exports()
        return {"state": asdict(self._state), "seconds": seconds, "phases": self._phases}

    def _order(self, subject: str, method: str, loading: bool = False, **arguments: Any) -> float:
        size = self._loading if loading else self._case.ranks
        named = "ours" if subject == "earlier" else subject
        seconds, values = self._homes.ranks(subject, size).order(named, method, **arguments)
        if subject == "ours" and values[0] is not None:
            self._phases[" ".join([method, *(str(each) for name, each in arguments.items() if name != "path")])] = (
                values
            )
        return seconds

    @property
    def _raw_and_ours(self) -> list[str]:
        return [subject for subject in self._subjects if subject in ("raw", "ours", "earlier")]

    def _everywhere(self, method: str, loading: bool = False, **arguments: Any) -> None:
        for subject in {HOMES.get(subject, "paddle"): subject for subject in self._subjects}.values():
            self._of_memory(subject, method, loading, **arguments)

    def _of_memory(self, subject: str, method: str, loading: bool, **arguments: Any) -> list[Any]:
        ranks = self._homes.ranks(subject, self._loading if loading else self._case.ranks)
        return ranks.order("memory", method, **arguments)[1]

    def _saves(self) -> dict[str, list[float]]:
        def save(subject: str, path: Path, fsync: bool = False, **options: Any) -> float:
            seconds = self._order(subject, "save", path=str(path), **options)
            return seconds + timed(lambda: make_durable(path)) if fsync else seconds

        for subject in self._subjects:
            save(subject, self._root / subject)
        turn = self._root / "turn"
        runs = {subject: functools.partial(save, subject, turn) for subject in self._subjects}
        if self._case.disk:
            runs["ours, not durable"] = functools.partial(save, "ours", turn, durable=False)
            for subject in set(NOT_DURABLE) & set(self._subjects):
                runs[f"{subject}, then fsync"] = functools.partial(save, subject, turn, fsync=True)
        if self._homes.has("earlier"):
            for subject in ("ours", "earlier"):
                in_background = functools.partial(self._order, subject, "save_in_background", path=str(turn))
                runs[f"{subject}, asynchronous"] = in_background
                in_background()
                shutil.rmtree(turn)
        # The first saves were those above.
        return turns(runs, self._pairs, after=lambda _: shutil.rmtree(turn), warm_up=0)

    def _loads(self, layout: str) -> dict[str, list[float]]:
        def load(subject: str, **options: Any) -> float:
            return self._order(subject, "load", True, path=str(self._root / subject), layout=layout, **options)

        # Paddle's own loads nothing but whole tensors in a world of one.
        whole_only = PADDLE if self._loading == 1 and layout == "columns" else ()
        subjects = [subject for subject in self._subjects if subject not in whole_only]
        for subject in subjects:
            self._of_memory(subject, "poison", True, layout=layout)
            load(subject)
            if subject != "raw" and not all(self._of_memory(subject, "equal", True, layout=layout)):
                raise RuntimeError(f"{subject} loaded other values than were saved: {self._case.label}, {layout}")
        runs: dict[str, Callable[[], float]] = {
            **{subject: functools.partial(load, subject) for subject in subjects},
            "unverified": functools.partial(load, "ours", verify="off"),
            "memcpy": lambda: self._order("memory", "copy", True, layout=layout),
        }
        # The first loads were those above.
        return turns(runs, self._pairs, warm_up=0)

    def _exports(self) -> dict[str, list[float]]:
        def export(subject: str) -> float:
            return self._order(subject, "export", path=str(self._root / subject), output=str(self._root / "out"))

        runs = {subject: functools.partial(export, subject) for subject in self._raw_and_ours}
        return turns(runs, self._pairs, after=lambda _: shutil.rmtree(self._root / "out"))

    def _publications(self) -> dict[str, list[float]]:
        """Write whole tensors by all ranks, each of which has rows of all of them; raw: each its rows."""
        out = self._root / "out"

        def check(subject: str) -> None:
            if subject == "ours" and not all(self._of_memory("ours", "published", False, path=str(out))):
                raise RuntimeError(f"other values were published: {self._case.label}")
            shutil.rmtree(out)

        runs = {
            subject: functools.partial(self._order, subject, "save" if subject == "raw" else "publish", path=str(out))
            for subject in self._raw_and_ours
        }
        for subject, work in runs.items():
            work()
            check(subject)
        return turns(runs, self._pairs, after=lambda _: shutil.rmtree(out), warm_up=0)


def scaled(case: Case, scale: int) -> Case:
    """Return a case with fewer tensors."""
    return replace(case, tensors=max(case.tensors // scale, 1))


def state_of(case: Case, mib: int) -> State:
    """Return the tensors of a case."""
    itemsize = 2 if case.dtype == "bfloat16" else 4
    elements = (case.kib << 10 if case.kib else mib * MIB // case.tensors) // itemsize
    columns = case.columns or 1 << (elements.bit_length() // 2)
    return State(case.tensors, (elements // columns, columns), case.dtype)


def make_durable(path: Path) -> None:
    """Make files and names durable that somebody else wrote."""
    for each in (*path.rglob("*"), path):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def calls(homes: Homes, root: Path) -> list[Row]:
    """Count Python calls of one process for each tensor more."""
    few, many = 512, 1024
    counts: dict[str, list[int]] = {"save": [], "load": [], "load of columns": []}
    ranks = homes.ranks("ours", 1)
    for tensors in (few, many):
        ranks.order("memory", "prepare", source="rows", targets=["rows", "columns"], **asdict(State(tensors, (4, 64))))
        for what, found in counts.items():
            path = str(root / f"{tensors}")
            layout = {"save": {}, "load": {"layout": "rows"}}.get(what, {"layout": "columns"})
            method = "save" if what == "save" else "load"
            ranks.order("ours", method, path=path, **layout)  # what is looked up once has been looked up
            found += ranks.order("ours", "calls", method=method, path=path, **layout)[1]
    bounds = {"save": "<= 10", "load": "<= 10", "load of columns": "<= 15"}
    return [
        row(f"Python calls a tensor: {what}, 1 rank", (found[1] - found[0]) / (many - few), bounds[what])
        for what, found in counts.items()
    ]


def rows_of(case: Case, seconds: Mapping[str, Mapping[str, list[float]]]) -> list[Row]:
    """Compare turn by turn."""
    rows = []
    for what, taken in seconds.items():
        ours = taken["ours"]
        for other, theirs in taken.items():
            if other == "raw":
                rows.append(row(f"{what} / raw: {case.label}", ratios(theirs, ours), bound_to_raw(case, what)))
            elif other == "unverified":
                bound = {"load of columns": ">= 0.75" if case.ranks > 2 else ">= 0.8"}.get(what, "")
                rows.append(row(f'{what}, verified / verify="off": {case.label}', ratios(theirs, ours), bound))
            elif other == "memcpy":
                rows.append(row(f"{what} / memcpy: {case.label}", ratios(theirs, ours)))
            elif other.startswith("earlier"):
                way = other[len("earlier") :]
                both = ratios(theirs, taken[f"ours{way}"])
                rows.append(row(f"{what}{way}, times earlier: {case.label}", both, ">= 0.95"))
            elif not other.startswith("ours"):
                against, note = ours, ""
                if case.disk and what == "save" and other in NOT_DURABLE:
                    against, note = taken["ours, not durable"], "neither makes durable"
                bound = bound_to_peer(case, what, other)
                rows.append(row(f"{what}, times {other}: {case.label}", ratios(theirs, against), bound, note=note))
        if case.tensors == 4096:
            beyond = [(own - raw) / case.tensors * 1e6 for own, raw in zip(ours, taken["raw"])]
            bound = {"save": "<= 20", "load": "<= 25", "load of columns": "<= 40"}[what]
            rows.append(row(f"beyond raw, a tensor: {what}, {case.label}", beyond, bound, unit="us"))
    return rows


def bound_to_raw(case: Case, what: str) -> str:
    """Return the bound of raw's seconds over this library's; none for what only is told."""
    if what == "publish":
        return ">= 0.9"
    if what == "save":
        return {16384: ">= 0.6", 4096: ""}.get(case.tensors, ">= 0.95" if case.disk else ">= 0.9")
    if case.tensors not in (64, 1024) or case.source != "rows" or case.loading:
        return ""
    return {"load": ">= 0.95", "load of columns": ">= 0.8"}.get(what, "")


def bound_to_peer(case: Case, what: str, other: str) -> str:
    """Return the bound of a peer's seconds over this library's; none for what only is told."""
    if what in ("save", "load", "load of columns"):
        at = ("save", "load", "load of columns").index(what)
        if other == "DCP":
            return (">= 5", ">= 5", ">= 6")[at] if case.tensors == 1024 else ">= 1.2"
        if other.partition(",")[0] == "Paddle" and case.tensors in (64, 1024):
            return (">= 3", ">= 1.5", ">= 5" if case.tensors == 64 else ">= 20")[at]
    return ""


if __name__ == "__main__":
    main()
