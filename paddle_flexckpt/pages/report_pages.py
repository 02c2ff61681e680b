"""Show the reports of rehearsals and of differences between two checkpoints.

Tested in tests/pages/test_report_pages.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from paddle_flexckpt.catalog.errors import Problem, without_remedy
from paddle_flexckpt.catalog.texts import format_bytes, format_ranks
from paddle_flexckpt.pages.charts import by_rank, heat_map, of_bytes, of_counts
from paddle_flexckpt.pages.markup import (
    Amount,
    Content,
    Markup,
    Section,
    bullets,
    element,
    facts,
    join,
    of_size,
    page,
    paragraph,
    table,
)
from paddle_flexckpt.tools.comparison import DiffReport
from paddle_flexckpt.tools.rehearsal_report import RankReads, RehearsalReport
from paddle_flexckpt.tools.save_rehearsal import SaveRehearsal

#: The most rows of a table, and of a table of pairs of ranks.
MOST_ROWS, MOST_PAIRS = 1000, 64
_RANGES = 6
_REMEDY = re.compile(r"\. (?=Remedy\b)")


def diff_page(report: DiffReport) -> str:
    """Return a page of the differences between two checkpoints."""
    overview = facts(
        [
            ("first", report.first),
            ("second", report.second),
            ("in both", report.keys),
            ("values differ", len(report.differing)),
            *_within(report),
            ("shape or dtype differs", len(report.unlike)),
            ("only in the first", len(report.only_in_first)),
            ("only in the second", len(report.only_in_second)),
            ("read", format_bytes(report.bytes_read)),
            ("compared by checksums", format_bytes(report.bytes_by_checksum)),
        ]
    )
    found = [Section("Overview", overview)]
    if report.equal:
        found.append(Section("Differences", paragraph("There are none.")))
    if report.differing:
        found.append(Section("Values", _values(report)))
    if report.unlike:
        rows = [(key, *both) for key, both in list(report.unlike.items())[:MOST_ROWS]]
        caption = _caption("Tensors of another shape or dtype", len(rows), len(report.unlike))
        found.append(Section("Shapes and dtypes", table(caption, ("Key", "First", "Second"), rows)))
    for name, keys in (("first", report.only_in_first), ("second", report.only_in_second)):
        if keys:
            found.append(Section(f"Only in the {name}", _keys(f"Keys only in the {name}", keys)))
    within = "are equal within the tolerances" if report.within_tolerance else "differ"
    verdict = "are equal" if report.equal else within
    return page("What differs between two checkpoints", f"{report.first} and {report.second} {verdict}", found)


def _within(report: DiffReport) -> list[tuple[str, str]]:
    """Return the facts about tolerances, if there are any."""
    if not (report.rtol or report.atol):
        return []
    count = sum(each.within_tolerance for each in report.differing.values())
    return [(f"of these within rtol {report.rtol:g}, atol {report.atol:g}", str(count))]


def _values(report: DiffReport) -> Markup:
    """Return a table of the tensors whose values differ, the largest relative difference first."""
    has_tolerances = bool(report.rtol or report.atol)
    shown = list(report.differing.items())[:MOST_ROWS]
    has_others = any(each.not_finite for _, each in shown)
    rows = [
        (
            key,
            f"{each.dtype} {each.shape}",
            Amount(f"{each.max_relative:.3g}", each.max_relative),
            Amount(f"{each.max_difference:.3g}", each.max_difference),
            Amount(f"{each.mean_difference:.3g}", each.mean_difference),
            Amount(each.ulps, float(each.max_ulps or 0)) if each.ulps else "-",
            each.changed,
            Amount(f"{each.share:.2%}", each.share),
            *([each.not_finite] if has_others else []),
            *([each.beyond] if has_tolerances else []),
            str(each.first_index),
        )
        for key, each in shown
    ]
    head = ["Key", "Tensor", "Relative", "Largest", "Mean", "ULPs", "Elements", "Share"]
    head += [*(["Not finite"] if has_others else []), *(["Not allowed"] if has_tolerances else []), "First at"]
    caption = "Tensors whose values differ, the largest relative difference first"
    caption = _caption(caption, len(rows), len(report.differing))
    return table(caption, head, rows)


def _keys(caption: str, keys: Sequence[str]) -> Markup:
    rows = [(key,) for key in keys[:MOST_ROWS]]
    return table(_caption(caption, len(rows), len(keys)), ("Key",), rows)


def _caption(text: str, shown: int, count: int) -> str:
    return text if shown == count else f"{text}: {shown} of {count}; --json has all"


def rehearsal_page(report: RehearsalReport) -> str:
    """Return a page of the rehearsal of a load, or of its error."""
    title = f"Load of {report.source} under {report.strategy}, rehearsed"
    overview = [
        facts(
            [
                ("loads", "yes" if report.ok else "no"),
                ("id", str(report.unique_id)),
                ("ranks", report.world_size),
                ("needed", format_bytes(report.total_bytes)),
                *((f"seconds, {way}", f"{value:.1f}") for way, value in report.seconds.items()),
            ]
        )
    ]
    overview += [*_failure(report.error), *_notes(report.notes)]
    found = [Section("Overview", join(overview))]
    if report.ok:
        found += _ranks(report)
    names = ("missing", "unexpected", "maybe_fused", "aliases", "cast", "masters")
    noticed = {name.replace("_", " "): getattr(report, name) for name in names}
    for name, keys in noticed.items():
        if isinstance(keys, Mapping) and keys:
            rows = list(keys.items())[:MOST_ROWS]
            content = table(_caption(f"Keys: {name}", len(rows), len(keys)), ("Key", "How"), rows)
            found.append(Section(name.capitalize(), content))
        elif keys:
            found.append(Section(name.capitalize(), _keys(f"Keys: {name}", keys)))
    return page(title, report.summary() if report.ok else "It does not load.", found)


def save_rehearsal_page(report: SaveRehearsal) -> str:
    """Return a page of the rehearsal of a save, or of its error."""
    pairs: list[tuple[str, Content]] = [("saves", "yes" if report.ok else "no"), ("ranks", report.world_size)]
    if report.ok:
        pairs += [("tensors", report.keys), ("files", report.files), ("imbalance", f"{report.imbalance:.2f}")]
        pairs += [("written", format_bytes(report.total_bytes)), ("held", format_bytes(report.held_bytes))]
    pairs += [(f"seconds, {way}", f"{value:.1f}") for way, value in report.seconds.items()]
    overview = [facts(pairs), *_failure(report.error), *_notes(report.notes)]
    found = [Section("Overview", join(overview))]
    if report.ok:
        series = [
            (of_bytes if "bytes" in name else of_counts)(name.replace("_", " ").capitalize(), values)
            for name, values in report.ranks.items()
        ]
        found.append(Section("What each rank writes and holds", by_rank("rank", series)))
    lead = report.summary() if report.ok else "It does not save."
    return page(f"Save under {report.strategy}, rehearsed", lead, found)


def refusal_page(
    command: str, error: Exception, advice: str, asked: str, near: Sequence[tuple[str, int, str]] = ()
) -> str:
    """Return a page of the error of a command that made no report.

    Args:
        command: The command's name.
        error: The error.
        advice: The command line that helps; or empty.
        asked: The command line.
        near: Layouts near the one that was asked for, which the model can have; each with its number of ranks and its
            command line.
    """
    problems = list(getattr(error, "problems", ())) or [str(error)]
    found = [_REMEDY.split(str(each), maxsplit=1) for each in problems]
    remedies = list(dict.fromkeys(parts[1] for parts in found if len(parts) > 1))
    sections = [Section("Asked", element("pre", asked)), Section("Problems", _problems(problems))]
    if remedies:
        sections.append(Section("Remedies", bullets(remedies, MOST_ROWS)))
    if near:
        rows = [(layout, ranks, element("code", line)) for layout, ranks, line in near]
        caption = "Layouts near it that the model can have, the nearest number of ranks first"
        sections.append(Section("Layouts that fit", table(caption, ("Layout", "Ranks", "Command to try"), rows)))
    if advice:
        sections.append(Section("See also", element("pre", advice)))
    return page(f"flexckpt {command}: refused", without_remedy(error).partition("\n")[0], sections)


def _problems(problems: Sequence[Problem | str]) -> Markup:
    """Return a table of what is wrong, where, what was expected, and what was there; a list where only texts say it."""
    known = [each for each in problems if isinstance(each, Problem)]
    if len(known) < len(problems):
        return bullets([_REMEDY.split(str(each), maxsplit=1)[0] for each in problems], MOST_ROWS)
    names = [name for name in ("key", "rank", "file", "expected", "got") if any(vars(each)[name] for each in known)]
    rows = [(each.what, *(_shown(vars(each)[name]) for name in names)) for each in known[:MOST_ROWS]]
    caption = _caption("What does not fit", len(rows), len(known))
    return table(caption, ("Problem", *(name.capitalize() for name in names)), rows)


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def _failure(error: str) -> list[Markup]:
    if not error:
        return []
    return [paragraph("The job would raise this on every rank:"), element("pre", error)]


def _notes(notes: Sequence[str]) -> list[Markup]:
    return [paragraph("Taken for granted:"), bullets(notes)] if notes else []


def _ranks(report: RehearsalReport) -> list[Section]:
    groups = report.ranks
    of_rank = np.zeros(report.world_size, dtype=np.int64)
    for number, each in enumerate(groups):
        of_rank[each.ranks] = number

    def values(name: str) -> list[int]:
        return [getattr(groups[number], name) for number in of_rank.tolist()]

    series = [of_bytes("Needed", values("bytes_needed")), of_bytes("Read", values("bytes_read"))]
    series += [of_counts("Requests", values("reads")), of_bytes("Memory", values("memory_bytes"))]
    found = [Section("What each rank reads and holds", by_rank("rank", series))]
    flows = _flows(report)
    if flows is not None:
        found.append(Section("From rank to rank", flows))
    if report.cooperative:
        kinds = [
            of_bytes(name.replace("bytes_", "").capitalize(), counts)
            for name, counts in report.cooperative.items()
            if name != "reads"
        ]
        found.append(Section("Where one rank reads for all", by_rank("rank", kinds)))
    rows = [_row(each) for each in sorted(groups, key=lambda each: -each.bytes_read)[:MOST_ROWS]]
    head = ("Ranks", "Needed", "Read", "Amplification", "Requests", "Files", "Memory")
    caption = _caption("Ranks that do the same, those that read the most first", len(rows), len(groups))
    return [*found, Section("Ranks that do the same", table(caption, head, rows))]


def _row(each: RankReads) -> tuple[str | Amount | int, ...]:
    needed, read, memory = (of_size(size) for size in (each.bytes_needed, each.bytes_read, each.memory_bytes))
    counts = (Amount(f"{each.amplification:.2f}", each.amplification), each.reads, each.files)
    return (format_ranks(each.ranks, _RANGES), needed, read, *counts, memory)


def _flows(report: RehearsalReport) -> Markup | None:
    """Return a heat map of bytes from saving ranks to reading ranks, and a table of the largest; None if not known."""
    parts = []
    for each in report.ranks:
        sources = np.asarray(list(each.sources.items()), dtype=np.int64).reshape(-1, 2)
        count = len(each.ranks)
        targets = np.repeat(np.asarray(each.ranks, dtype=np.int64), len(sources))
        parts.append(np.column_stack([np.tile(sources[:, 0], count), targets, np.tile(sources[:, 1], count)]))
    flows = np.concatenate(parts) if parts else np.zeros((0, 3), dtype=np.int64)
    if not len(flows):
        return None
    name = "Bytes that each target rank needs, by the source rank that saved them"
    ranks = int(flows[:, 0].max()) + 1
    show = of_bytes("", ()).show
    picture = heat_map(name, flows[:, :2], flows[:, 2], ranks, report.world_size, show)
    order = np.lexsort([flows[:, 1], flows[:, 0], -flows[:, 2]])[:MOST_PAIRS]
    rows = [(source, target, of_size(count)) for source, target, count in flows[order].tolist()]
    caption = _caption("Pairs of ranks, the most bytes first", len(rows), len(flows))
    return join([picture, table(caption, ("Source rank", "Target rank", "Bytes"), rows)])
