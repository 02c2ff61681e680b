"""Pages of who holds what: the bytes of ranks, the ranks of parts of tensors, and the report of a save.

:func:`holders_picture` draws the same as a PNG file, with matplotlib.
Tested in tests/pages/test_holder_pages.py and tests/pages/test_pictures.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_flexckpt.algebra.flat import flat_range_to_boxes
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.texts import format_bytes, format_ranks
from paddle_flexckpt.pages.charts import (
    Area,
    Drawing,
    Line,
    Text,
    areas,
    by_rank,
    columns,
    figure,
    of_bytes,
    of_seconds,
)
from paddle_flexckpt.pages.markup import (
    PALETTE,
    Content,
    Markup,
    Section,
    bullets,
    element,
    facts,
    join,
    page,
    paragraph,
    table,
)
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.tools.holders import HoldersReport, Part, TensorHolders

#: The most tensors to draw, rows of tables of parts, and parts of one drawing: so a page stays readable and small.
MOST_DRAWN, MOST_ROWS, MOST_AREAS = 12, 1000, 300
# The most tensors of a picture, and the colours of its light scheme.
_MOST_PICTURED = 6
_LIGHT = {name: colours[0] for name, colours in PALETTE.items()}
_RANGES = 6


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
    found.append(Section("Bytes saved by each rank", by_rank("rank", [of_bytes("Saved", report.stored_bytes)])))
    if job:
        needed = [of_bytes(f"Needed under {job}", report.needed_bytes)]
        found.append(Section("Bytes needed by each rank", by_rank("rank", needed)))
    return [*found, Section("Tensors", tensors_drawn(report)), Section("Parts", parts_table(report))]


def tensors_drawn(report: HoldersReport) -> Markup:
    """Return drawings of the largest tensors."""
    drawn = [_drawing(key, tensor, bool(report.strategy)) for key, tensor in largest(report, MOST_DRAWN)]
    left = len(report.tensors) - len(drawn)
    more = (
        [paragraph(f"{left} smaller ones are not drawn. Name keys to have those drawn.", class_="quiet")]
        if left
        else []
    )
    return join([*drawn, *more])


def largest(report: HoldersReport, most: int) -> list[tuple[str, TensorHolders]]:
    """Return the largest tensors, up to a number, by key."""
    size = {key: math.prod(tensor.shape) for key, tensor in report.tensors.items()}
    chosen = set(sorted(size, key=lambda key: (-size[key], key))[:most])
    return [(key, tensor) for key, tensor in report.tensors.items() if key in chosen]


def _drawing(key: str, tensor: TensorHolders, has_job: bool) -> Markup:
    head = element("h3", f"{key}: {tensor.dtype} {tensor.shape}")
    return join([head, element("div", *map(_figure, sides(tensor, has_job)), class_="pair")])


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
                found.append(Area(row, column, part.ranks[0], format_ranks(part.ranks, 1), where))
    return found


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
    """Return a table of all parts, or of those of the first tensors."""
    rows: list[tuple[str, ...]] = []
    shown = 0
    for key, tensor in report.tensors.items():
        sides = (("saved", tensor.stored), ("needed", tensor.needed))
        own = [
            (
                key,
                what,
                part.where(),
                format_ranks(part.ranks, _RANGES),
                format_bytes(part.bytes),
                ", ".join(part.files[:2]),
            )
            for what, parts in sides
            for part in parts
        ]
        if rows and len(rows) + len(own) > MOST_ROWS:
            break
        rows += own
        shown += 1
    caption = f"Parts of {shown} of {len(report.tensors)} tensors"
    if shown < len(report.tensors):
        caption += "; the text and --json have all"
    head = ("Key", "What", "Range of indices", "Ranks", "Bytes", "Files")
    return table(caption, head, rows[: 4 * MOST_ROWS], numbers=(4,))


def save_page(
    report: SaveReport, holders: HoldersReport, step: int | None = None, metrics: Mapping[str, float] | None = None
) -> str:
    """Return a page of a save.

    Args:
        report: Its report.
        holders: The ranks that saved each part.
        step: Training step.
        metrics: The metrics recorded with it.
    """
    pairs: list[tuple[str, Content]] = [
        ("step", "unknown" if step is None else step),
        ("id", report.unique_id),
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
    found += [Section("Largest tensors", tensors_drawn(holders)), Section("Their parts", parts_table(holders))]
    title = "A save" if step is None else f"Checkpoint of step {step}"
    return page(title, report.summary(), found)


def holders_picture(
    report: HoldersReport, path: str | os.PathLike[str], seconds: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Write a picture of the holders of tensors: bytes and seconds by rank, and the parts of the first tensors.

    Args:
        report: The holders.
        path: The PNG file.
        seconds: Seconds of a save or load by phase and rank.

    Raises:
        ValidationError: There is no matplotlib.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValidationError(
            [
                f"a PNG file is drawn by matplotlib, which is not there ({error}). Remedy: pip install "
                "'paddle-flexckpt[viz]', or ask for --html, which needs nothing"
            ]
        ) from error
    series = [of_seconds(f"Seconds: {name}", each) for name, each in (seconds or {}).items()]
    series.append(of_bytes("Saved", report.stored_bytes))
    if report.strategy:
        series.append(of_bytes(f"Needed under {report.strategy}", report.needed_bytes))
    tensors = largest(report, _MOST_PICTURED)
    rows: list[list[tuple[str, Drawing | str]]] = [
        [(f"{each.name}: {each.describe()}", columns(each))] for each in series
    ]
    for key, tensor in tensors:
        drawings = sides(tensor, bool(report.strategy))
        rows.append([(f"{key} {tensor.shape}. {getattr(drawn, 'title', drawn)}", drawn) for drawn in drawings])
    inches = [max(_inches(drawing) for _, drawing in row) for row in rows]
    figure = Figure(figsize=(11, sum(inches) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    # Names are not markup here either.
    figure.suptitle(_plain(f"{report.source} (id {report.unique_id})"), fontsize=11, parse_math=False)
    grid = figure.add_gridspec(len(rows), 1, height_ratios=inches)
    for number, row in enumerate(rows):
        cells = grid[number].subgridspec(1, len(row))
        for column, (title, drawing) in enumerate(row):
            axes = figure.add_subplot(cells[column])
            axes.set_title(_plain(title), fontsize=8, loc="left", parse_math=False)
            axes.set_axis_off()
            if not isinstance(drawing, str):
                _paint(axes, drawing)
    figure.savefig(path, format="png", dpi=110)


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _inches(drawing: Drawing | str) -> float:
    """Return the height of a drawing and its title."""
    return 0.4 if isinstance(drawing, str) else 0.4 + drawing.height / 100


def _paint(axes: Any, drawing: Drawing) -> None:
    from matplotlib.patches import Rectangle

    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    for mark in drawing.marks:
        words = mark.kind.split() or [""]
        if isinstance(mark, Text):
            across = "center" if "middle" in words else "right" if "end" in words else "left"
            down = "center" if "centre" in words else "baseline"
            colour = _LIGHT.get(f"{words[0]}-text", _LIGHT["text"])
            axes.text(mark.x, mark.y, mark.text, ha=across, va=down, fontsize=7, color=colour, parse_math=False)
        elif isinstance(mark, Line):
            style = {"color": _LIGHT["text"], "linestyle": "--"} if "median" in words else {"color": _LIGHT["line"]}
            axes.plot([mark.x1, mark.x2], [mark.y1, mark.y2], linewidth=0.8, **style)
        else:
            is_frame = "frame" in words
            fill, edge = ("none", _LIGHT["line"]) if is_frame else (_LIGHT[words[0]], _LIGHT["ground"])
            corner = (mark.x, mark.y)
            axes.add_patch(Rectangle(corner, mark.width, mark.height, facecolor=fill, edgecolor=edge, linewidth=0.8))
