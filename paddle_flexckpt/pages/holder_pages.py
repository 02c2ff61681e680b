"""Pages of who holds what: the bytes of ranks, the ranks of parts of tensors, and the report of a save.

Tested in tests/pages/test_holder_pages.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paddle_flexckpt.algebra.flat import flat_range_to_boxes
from paddle_flexckpt.catalog.texts import format_bytes, format_ranks
from paddle_flexckpt.optimizer_states import MASTER, PARAMETER, split_state
from paddle_flexckpt.pages.charts import (
    Area,
    Drawing,
    areas,
    by_rank,
    figure,
    of_bytes,
    of_seconds,
)
from paddle_flexckpt.pages.markup import (
    COLOURS,
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
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.tools.holders import HoldersReport, Part, TensorHolders

#: The most parameters to draw, rows of tables of parts, and parts of one drawing: so a page stays readable and small.
MOST_DRAWN, MOST_ROWS, MOST_AREAS = 12, 1000, 300
_RANGES = 6
# The states whose names in keys say little.
_STATES = {PARAMETER: "parameter", MASTER: f"master weight ({MASTER})"}


def holders_page(report: HoldersReport, seconds: Mapping[str, Sequence[float]] | None = None) -> str:
    """Return a page of the holders of tensors.

    Args:
        report: The holders.
        seconds: Seconds of a save or load by phase and rank.
    """
    return page(f"Who holds what: {report.source}", report.summary(), holders_sections(report, seconds))


def holders_sections(report: HoldersReport, seconds: Mapping[str, Sequence[float]] | None = None) -> list[Section]:
    """Return the parts of that page."""
    job = report.strategy
    overview = facts(
        [
            ("id", str(report.unique_id)),
            ("step", "unknown" if report.step is None else report.step),
            ("saved by", f"{report.world_size} ranks" if report.world_size else "unknown ranks"),
            ("tensors", len(report.tensors)),
            ("saved", format_bytes(sum(report.stored_bytes))),
            *([("under", job), ("needed", format_bytes(sum(report.needed_bytes)))] if job else []),
        ]
    )
    if report.notes:
        overview = join([overview, paragraph("Taken for granted:"), bullets(report.notes)])
    found = [Section("Overview", overview)]
    if seconds:
        found.append(
            Section(
                "Seconds by rank and phase", by_rank("rank", [of_seconds(name, each) for name, each in seconds.items()])
            )
        )
    found.append(Section("Parameters", tensors_drawn(report)))
    found.append(Section("Bytes saved by each rank", by_rank("rank", [of_bytes("Saved", report.stored_bytes)])))
    if job:
        needed = [of_bytes(f"Needed under {job}", report.needed_bytes)]
        found.append(Section("Bytes needed by each rank", by_rank("rank", needed)))
    return [*found, Section("Parts", parts_table(report))]


class Alike(NamedTuple):
    """The states of a parameter that are cut alike.

    Attributes:
        names: Their names and dtypes.
        tensor: The parts of all of them together.
    """

    names: str
    tensor: TensorHolders


def by_parameter(report: HoldersReport) -> dict[str, list[str]]:
    """Return the keys of each parameter and of its optimizer states, by the parameter's."""
    found: dict[str, list[str]] = {}
    for key in report.tensors:
        found.setdefault(split_state(key, report.tensors)[0], []).append(key)
    return found


def alike(report: HoldersReport, parameter: str, keys: Sequence[str]) -> list[Alike]:
    """Return a parameter and its states, those together that have the same parts on the same ranks."""
    groups: dict[Any, list[str]] = {}
    for key in keys:
        tensor = report.tensors[key]
        cut = [
            tuple((*map(tuple, _boxes([part])), *part.ranks) for part in parts)
            for parts in (tensor.stored, tensor.needed)
        ]
        groups.setdefault((tuple(tensor.shape), *cut), []).append(key)
    return [_together(report, parameter, same) for same in groups.values()]


def _together(report: HoldersReport, parameter: str, keys: Sequence[str]) -> Alike:
    tensors = [report.tensors[key] for key in keys]
    names: dict[str, list[str]] = {}
    for key, tensor in zip(keys, tensors):
        state = key[len(parameter) + 1 :]
        names.setdefault(tensor.dtype, []).append(_STATES.get(state, state))
    label = "; ".join(f"{', '.join(some)} {dtype}" for dtype, some in names.items())

    def summed(each: Iterable[Sequence[Part]]) -> list[Part]:
        return [
            replace(
                same[0], bytes=sum(part.bytes for part in same), files=sorted({f for part in same for f in part.files})
            )
            for same in zip(*each)
        ]

    stored, needed = (summed(getattr(tensor, side) for tensor in tensors) for side in ("stored", "needed"))
    return Alike(label, TensorHolders(tensors[0].dtype, tensors[0].shape, stored, needed))


def tensors_drawn(report: HoldersReport) -> Markup:
    """Return drawings of the largest parameters."""
    chosen = largest(report, MOST_DRAWN)
    drawn = [_drawing(parameter, groups, bool(report.strategy)) for parameter, groups in chosen]
    left = len(by_parameter(report)) - len(drawn)
    legend = f"Each part has the colour and the number of its first rank; {COLOURS} colours repeat. After a + is the "
    legend += "number of further ranks, where there is room."
    legend += " States of one element, such as powers of beta, are in the table alone."
    more = [f"{left} smaller ones are not drawn. Name keys to have those drawn."] if left else []
    return join([paragraph(legend, class_="quiet"), *drawn, *(paragraph(each, class_="quiet") for each in more)])


def largest(report: HoldersReport, most: int) -> list[tuple[str, list[Alike]]]:
    """Return the largest parameters with their states to draw, up to a number, the largest first."""
    every = by_parameter(report)
    size = {name: sum(math.prod(report.tensors[key].shape) for key in keys) for name, keys in every.items()}
    chosen = sorted(size, key=lambda name: (-size[name], name))[:most]
    found = [(name, alike(report, name, every[name])) for name in chosen]
    # Of one element, beside others: powers of beta.
    return [(name, [each for each in all_ if math.prod(each.tensor.shape) > 1] or all_) for name, all_ in found]


def _drawing(parameter: str, groups: Sequence[Alike], has_job: bool) -> Markup:
    drawn: list[Markup] = []
    for each in groups:
        pair = element("div", *map(_figure, sides(each.tensor, has_job)), class_="pair")
        drawn.append(element("div", paragraph(each.names, class_="quiet"), pair))
    return join([element("h3", f"{parameter} {groups[0].tensor.shape}"), element("div", *drawn, class_="pair")])


def _figure(drawn: Drawing | str) -> Markup:
    return paragraph(drawn) if isinstance(drawn, str) else figure(drawn, drawn.title)


def sides(tensor: TensorHolders, has_job: bool) -> list[Drawing | str]:
    """Return drawings of a tensor's parts, those that are saved and those that a job needs, or why there is none."""
    stored = _parts("Saved", tensor.stored, tensor.shape)
    return [stored, _parts("Needed", tensor.needed, tensor.shape)] if has_job else [stored]


def _parts(what: str, parts: Sequence[Part], shape: Sequence[int]) -> Drawing | str:
    if not parts:
        return f"{what}: no part."
    found = plane(parts, shape)
    if len(found) > MOST_AREAS:
        return f"{what}: in {len(found)} pieces, too many to draw."
    axes = cut_axes(parts, shape)
    extents = [shape[axis] if axis >= 0 else 1 for axis in axes]
    title = f"{what}: {len(parts)} part{'s' * (len(parts) > 1)}"
    if axes[0] >= 0 and len(shape) > 2:
        title += f", drawn along axes {axes[0]} and {axes[1]}"
    return areas(title, (extents[0], extents[1]), found)


def cut_axes(parts: Sequence[Part], shape: Sequence[int]) -> tuple[int, int]:
    """Return the two axes of a tensor to draw, cut axes first; -1 if there is none."""
    cut = [axis for axis in range(len(shape)) if any(box[axis][1] < shape[axis] for box in _boxes(parts))]
    rest = [axis for axis in reversed(range(len(shape))) if axis not in cut]
    chosen = sorted((cut + rest)[:2])
    return (chosen[0], chosen[1]) if len(chosen) == 2 else (-1, chosen[0] if chosen else -1)


def plane(parts: Sequence[Part], shape: Sequence[int]) -> list[Area]:
    """Return rectangles, along the axes of :func:`cut_axes`; a flattened range is several."""
    axes, found = cut_axes(parts, shape), []
    for part in parts:
        where = f"{part.where()}: {_in_words(part)}, {format_bytes(part.bytes)}"
        for box in _boxes([part]):
            row, column = (box[axis] if axis >= 0 else (0, 1) for axis in axes)
            if row[1] and column[1]:
                found.append(Area(row, column, part.ranks[0], _labels(part.ranks), where))
    return found


def _labels(ranks: Sequence[int]) -> list[str]:
    """Return ranks as a text, and as shorter ones: the first rank and the number of others, and the first alone."""
    first, others = ranks[0], len(ranks) - 1
    return [format_ranks(ranks, _RANGES), *([f"{first} +{others}", f"{first}+"] if others else [])]


def _boxes(parts: Sequence[Part]) -> list[list[tuple[int, int]]]:
    """Return the boxes of parts: first index and extent along each axis."""
    found = []
    for part in parts:
        inner = [([0] * len(part.local_shape), part.local_shape)]
        if part.flattened_range is not None:
            inner = [
                (list(box.offset), list(box.shape))
                for box in flat_range_to_boxes(part.local_shape, *part.flattened_range)
            ]
        for offset, extents in inner:
            found.append([(o + p, n) for o, p, n in zip(part.global_offset, offset, extents)])
    return found


def _in_words(part: Part) -> str:
    return ("rank " if len(part.ranks) == 1 else "ranks ") + format_ranks(part.ranks, _RANGES)


def parts_table(report: HoldersReport) -> Markup:
    """Return a table of all parts, or of those of the first parameters."""
    rows: list[tuple[str | Amount, ...]] = []
    every, shown = by_parameter(report), 0
    for parameter, keys in every.items():
        own = [
            (
                parameter,
                each.names,
                what,
                part.where(),
                format_ranks(part.ranks, _RANGES),
                of_size(part.bytes),
                ", ".join(part.files[:2]),
            )
            for each in alike(report, parameter, keys)
            for what, parts in (("saved", each.tensor.stored), ("needed", each.tensor.needed))
            for part in parts
        ]
        if rows and len(rows) + len(own) > MOST_ROWS:
            break
        rows += own
        shown += 1
    caption = f"Parts of {shown} of {len(every)} parameters"
    if shown < len(every):
        caption += "; the text and --json have all"
    head = ("Key", "States", "What", "Range of indices", "Ranks", "Bytes", "Files")
    return table(caption, head, rows[: 4 * MOST_ROWS])


def save_page(
    report: SaveReport,
    holders: HoldersReport,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    begun: float | None = None,
) -> str:
    """Return a page of a save.

    Args:
        report: Its report.
        holders: The ranks that saved each part.
        step: Training step.
        metrics: The metrics recorded with it.
        begun: When it was saved, in seconds since the epoch.
    """
    pairs: list[tuple[str, Content]] = [
        ("step", "unknown" if step is None else step),
        ("id", report.unique_id),
        *([] if begun is None else [("saved", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(begun)))]),
        ("tensors", report.keys),
        ("written", format_bytes(report.total_bytes)),
        ("held", format_bytes(report.held_bytes)),
        ("imbalance", f"{report.imbalance:.2f}"),
        *((f"seconds, {name}", f"{value:.3g}") for name, value in report.seconds.items()),
    ]
    overview = [facts(pairs)]
    if metrics:
        overview += [paragraph("Metrics:"), facts((name, f"{value:.6g}") for name, value in metrics.items())]
    if report.warnings:
        overview += [paragraph("Warnings:"), bullets(report.warnings)]
    seconds = [of_seconds(name, values) for name, values in report.rank_seconds.items()]
    found = [
        Section("Overview", join(overview)),
        Section("Seconds by rank and phase", by_rank("rank", seconds)),
        Section("Bytes written by each rank", by_rank("rank", [of_bytes("Written", report.rank_bytes)])),
    ]
    if report.replicas:
        rows = sorted(report.replicas.items(), key=lambda pair: (pair[1] == "equal", pair[0]))
        found.append(Section("Replicas", table("Replicas that need not be equal", ("Key", "How"), rows[:MOST_ROWS])))
    found += [Section("Largest parameters", tensors_drawn(holders)), Section("Their parts", parts_table(holders))]
    title = "A save" if step is None else f"Checkpoint of step {step}"
    return page(title, report.summary(), found)
