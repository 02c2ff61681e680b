"""What the benchmarks share: turns, ratios within a turn, rows with bounds, random data, machine and versions, JSON.

Subjects take turns in one run (A B C, C B A, ...), so that what else the machine does hits all of them. What counts is
the median of the ratios within a turn, and its spread. numpy is all that this module needs: peers in an environment of
their own import it too.

A benchmark is a module with a ``main`` such as this one::

    def main(argv=None):
        options = arguments(__doc__, pairs=7).parse_args(argv)
        seconds = turns({"raw": write_raw, "ours": save}, options.pairs)
        finish(options, [row("save / raw, 64 tensors", ratios(seconds["raw"], seconds["ours"]), ">= 0.95")])

``python -m benchmarks.NAME --json FILE`` runs it. ``benchmarks/run.py`` runs all of them and makes the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
#: Before the benchmark itself loads the machine.
LOAD_AT_FIRST = os.getloadavg()[0]
#: What a result depends on; those that are installed are told.
PACKAGES = (
    "paddle-flexckpt", "paddlepaddle", "numpy", "safetensors", "xxhash", "torch", "orbax-checkpoint", "jax", "fsspec",
    "s3fs", "aiobotocore",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Hold one line of the table.

    Attributes:
        what: What is measured, and of what case: the key of a reason in docs/benchmarks.md.
        bound: ``">= 0.95"``, ``"<= 20"``; empty: it is only told.
        median: Median over the turns; ``least`` and ``most`` are the spread.
        turns: Number of values.
        unit: Of the values; empty for ratios and counts.
        note: What a reader has to know.
    """

    what: str
    bound: str
    median: float
    least: float
    most: float
    turns: int
    unit: str = ""
    note: str = ""

    @property
    def passes(self) -> bool | None:
        """Return whether the median keeps the bound; None without one."""
        if not self.bound:
            return None
        return self.reach >= 1

    @property
    def reach(self) -> float:
        """Return how much of the bound the median reaches: 1 and more keeps it, 0.5 is a factor of two short."""
        sign, limit = self.bound.split()
        if sign == ">=":
            return self.median / float(limit)
        return float(limit) / self.median if self.median > 0 else math.inf


def row(what: str, values: Sequence[float] | float, bound: str = "", unit: str = "", note: str = "") -> Row:
    """Make a row of all turns' values, or of one number."""
    values = [float(values)] if isinstance(values, (int, float)) else list(values)
    return Row(what, bound, statistics.median(values), min(values), max(values), len(values), unit, note)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Divide turn by turn."""
    return [a / b for a, b in zip(above, below)]


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def turns(
    subjects: Mapping[str, Callable[[], Any]],
    pairs: int,
    *,
    after: Callable[[str], Any] | None = None,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Run all subjects in turns, A B C, C B A, ...; return their seconds, turn by turn.

    Args:
        subjects: Each is timed from here, or returns its seconds as a float.
        pairs: Turns that count.
        after: Called with the name after each run, untimed.
        warm_up: Turns before, which do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(warm_up + pairs):
        for name in list(subjects)[:: -1 if turn % 2 else 1]:
            begin = time.perf_counter()
            took = subjects[name]()
            took = took if isinstance(took, float) else time.perf_counter() - begin
            if turn >= warm_up:
                seconds[name].append(took)
            if after is not None:
                after(name)
    return seconds


def random_tensors(count: int, shape: tuple[int, ...], dtype: str = "float32") -> Iterable[tuple[str, np.ndarray]]:
    """Make named random tensors, one after the other; the same ones on each call. bfloat16 comes as uint16."""
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    for i in range(count):
        tensor = values + np.float32(i % 997)
        if dtype == "bfloat16":
            tensor = (tensor.view(np.uint32) >> 16).astype(np.uint16)
        yield f"model.layers.{i}.mlp.weight", tensor


def machine() -> dict[str, Any]:
    """Return versions and machine, JSON-safe."""
    model = next((line.partition(": ")[2] for line in read("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((line.split()[1] for line in read("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "system": platform.platform(),
        "processor": model,
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory GiB": round(int(memory) / MIB, 1),
        "load": LOAD_AT_FIRST,
    }


def versions() -> dict[str, str]:
    """Return the versions of what is installed of ``PACKAGES``."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read(path: str) -> list[str]:
    """Return the lines of a file of the system; none where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def arguments(description: str, pairs: int) -> argparse.ArgumentParser:
    """Make the parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=pairs, help="turns (default %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write (the file system matters)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser


def finish(options: argparse.Namespace, rows: Sequence[Row], **details: Any) -> None:
    """Print the rows, and :func:`write` them."""
    print("\n".join(lines(rows)))
    write(options, rows, **details)


def write(options: argparse.Namespace, rows: Sequence[Row], **details: Any) -> None:
    """Write rows, options, the machine and details to the file of ``--json``; what was there is replaced."""
    if options.json:
        told = {name: value for name, value in vars(options).items() if name != "json"}
        kept = {"machine": machine(), "options": told, "rows": [asdict(each) for each in rows], **details}
        options.json.write_text(json.dumps(kept, indent=1, default=str) + "\n", encoding="utf-8")


def lines(rows: Sequence[Row], reasons: Mapping[str, str] | None = None) -> list[str]:
    """Make the rows of a Markdown table; where a bound fails, with the reason."""
    table = ["| what | bound | median | spread | turns | | |", "|---|---|---|---|---|---|---|"]
    for each in rows:
        verdict = {None: "", True: "pass", False: "FAIL"}[each.passes]
        reason = "" if reasons is None or each.passes is not False else reasons.get(each.what, "not yet known")
        unit = f" {each.unit}" if each.unit else ""
        bound = f"{each.bound}{unit}" if each.bound else ""
        spread = f"{number(each.least)} to {number(each.most)}" if each.turns > 1 else ""
        remark = "; ".join(filter(None, (each.note, reason)))
        cells = (each.what, bound, number(each.median) + unit, spread, str(each.turns), verdict, remark)
        table.append("| " + " | ".join(cells) + " |")
    return table


def number(value: float) -> str:
    """Write a number with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
