"""Make a table of bounds, a table of all rows and a plot of what the benchmarks have written.

python -m benchmarks.report bench-output            # bench-output/table.md and plots
python -m benchmarks.report bench-output --docs     # into docs/ and benchmarks/results/ too
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, lines, number

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PAGE, FULL = DOCS / "benchmarks.md", RESULTS / "table.md"
HEAD = """# All rows of the benchmarks

`python -m benchmarks.report bench-output --docs` writes this file. [docs/benchmarks.md](../../docs/benchmarks.md)
explains it."""
# Files that are made with the results, so that no link leads to nothing before.
LINKS = """[benchmarks/results/table.md](../benchmarks/results/table.md) has a line for each case.

![seconds of saves and loads on two ranks, as multiples of this library's](benchmarks-compare.svg)"""
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
REASON = re.compile(r"^\* `([^`]+)`: (.+(?:\n  .+)*)", re.M)
PEERS = ("raw", "memcpy", "Paddle", "Paddle safetensors", "DCP", "safetensors", "Orbax")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the results are")
    parser.add_argument("--docs", action="store_true", help="write into docs/ and benchmarks/results/ too")
    options = parser.parse_args(argv)
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.directory.glob("*.json"))
    }
    results = {name: result for name, result in found.items() if "rows" in result}
    why = reasons(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    short, full = summary(results), table(results, why)
    (options.directory / "table.md").write_text(f"{short}\n\n{full}\n", encoding="utf-8")
    print(short)
    plot(results, options.directory)
    if options.docs:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{short}\n\n{LINKS}\n\n{END}{after}", encoding="utf-8")
        RESULTS.mkdir(exist_ok=True)
        FULL.write_text(f"{HEAD}\n\n{full}\n", encoding="utf-8")
        plot(results, DOCS)


def rows_of(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the rows of each benchmark."""
    return {name: [Row(**row) for row in result["rows"]] for name, result in results.items()}


def summary(results: Mapping[str, Any]) -> str:
    """Return a line for each bound, with the case that keeps it least; the page has the reasons."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (row for rows in rows_of(results).values() for row in rows if row.bound):
        groups.setdefault((row.what.partition(":")[0], row.bound), []).append(row)
    text = ["| bound | cases kept | least | where | |", "|---|---|---|---|---|"]
    for (what, bound), rows in groups.items():
        worst = min(rows, key=lambda row: row.reach)
        kept = sum(bool(row.passes) for row in rows)
        unit = f" {worst.unit}" if worst.unit else ""
        remark = "; ".join(filter(None, ("" if kept == len(rows) else "FAIL", worst.note)))
        where = worst.what.partition(": ")[2]
        middle = number(worst.median) + unit
        cells = (f"{what} {bound}{unit}", f"{kept}/{len(rows)}", middle, where, remark)
        text.append("| " + " | ".join(cells) + " |")
    judged = [row.passes for rows in groups.values() for row in rows]
    told = [f"{sum(judged)} of {len(judged)} bounded rows keep their bound."]
    if results:
        told.append(told_machine(next(iter(results.values()))["machine"]))
        peers = results.get("compare", {}).get("peers")
        told += [f"Peers: {', '.join(f'{name} {version}' for name, version in peers.items())}."] if peers else []
    return "\n\n".join([*told, "\n".join(text)])


def table(results: Mapping[str, Any], why: Mapping[str, str]) -> str:
    """Return all rows as Markdown, benchmark by benchmark; what fails with the reason."""
    parts = []
    for name, rows in rows_of(results).items():
        result = results[name]
        found = {row.what: reason_of(row, why) for row in rows if row.passes is False}
        parts.append(f"## {name}")
        parts.append(f"Load of the machine before: {result['machine']['load']:.1f}.")
        parts.append("\n".join(lines(rows, found)))
        if result.get("failures"):
            parts.append("Did not run: " + "; ".join(text.splitlines()[0] for text in result["failures"]) + ".")
    return "\n\n".join(parts)


def reason_of(row: Row, why: Mapping[str, str]) -> str:
    """Return the reason of a row that fails."""
    return next((text for pattern, text in why.items() if fnmatch.fnmatchcase(row.what, pattern)), "not yet known")


def reasons(page: str) -> dict[str, str]:
    """Return the reasons that a page gives, by pattern of rows: lines such as ``* `save / raw*`: why``."""
    return {pattern: " ".join(text.split()) for pattern, text in REASON.findall(page)}


def told_machine(machine: Mapping[str, Any]) -> str:
    """Return versions and machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['processors']} cores ({machine['processor']}), {machine['memory GiB']} GiB; {versions}."


def plot(results: Mapping[str, Any], directory: Path) -> None:
    """Draw the seconds of all subjects, for each number of tensors on two ranks."""
    seconds = results.get("compare", {}).get("cases", {})
    cases = [name for name in ("two-64", "two-1024", "two-16384") if name in seconds]
    if not cases:
        return
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same picture is the same file.
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), sharey=True, constrained_layout=True)
    for axis, what in zip(axes, ("save", "load", "load of columns")):
        draw(axis, what, [(name, seconds[name]["state"]["tensors"], seconds[name]["seconds"][what]) for name in cases])
    axes[0].set_ylabel("times this library's seconds (lower is faster)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(directory / "benchmarks-compare.svg", metadata={"Date": None})
    pyplot.close(figure)


def draw(axis: Any, what: str, cases: Sequence[tuple[str, int, Mapping[str, Sequence[float]]]]) -> None:
    """Draw a group of bars for each number of tensors: medians of the ratios within a turn, and their spread."""
    import statistics

    for place, subject in enumerate(PEERS):
        found = [
            (x, sorted(a / b for a, b in zip(taken[subject], taken["ours"])))
            for x, (_, _, taken) in enumerate(cases)
            if subject in taken
        ]
        if not found:
            continue
        middles = [statistics.median(values) for _, values in found]
        errors = [
            [middle - values[0] for middle, (_, values) in zip(middles, found)],
            [values[-1] - middle for middle, (_, values) in zip(middles, found)],
        ]
        xs = [x + (place - len(PEERS) / 2) * 0.12 for x, _ in found]
        axis.bar(xs, middles, 0.11, yerr=errors, error_kw={"linewidth": 0.8}, label=subject, color=f"C{place}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_title(what)
    axis.set_xticks(range(len(cases)), [f"{tensors:,} tensors" for _, tensors, _ in cases], fontsize=8)


if __name__ == "__main__":
    main()
