"""Draw the holders of tensors as a PNG file, with matplotlib. Tested in tests/pages/test_pictures.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.engine.holders import HoldersReport, Part
from paddle_flexckpt.pages.charts import Series
from paddle_flexckpt.pages.holders import MOST_AREAS, cut_axes, largest, plane
from paddle_flexckpt.pages.ranks import of_bytes, of_seconds
from paddle_flexckpt.pages.style import COLOURS, PALETTE

#: The most tensors to draw.
MOST_DRAWN = 6
_LIGHT = {name: colours[0] for name, colours in PALETTE.items()}


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
    tensors = largest(report, MOST_DRAWN)
    wide = 2 if report.strategy else 1
    figure = Figure(figsize=(11, 1.9 * len(series) + 1.5 * len(tensors) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    # Names are not markup here either.
    figure.suptitle(_plain(f"{report.source} (id {report.unique_id})"), fontsize=11, parse_math=False)
    grid = figure.add_gridspec(
        len(series) + len(tensors), wide, height_ratios=[1.25] * len(series) + [1] * len(tensors)
    )
    for row, each in enumerate(series):
        _columns(figure.add_subplot(grid[row, :]), each)
    for row, (key, tensor) in enumerate(tensors, len(series)):
        sides = (("saved", tensor.stored), ("needed", tensor.needed))[:wide]
        for column, (what, parts) in enumerate(sides):
            axes = figure.add_subplot(grid[row, column])
            axes.set_title(_plain(f"{key} {tensor.shape}: {what}"), fontsize=8, loc="left", parse_math=False)
            _areas(axes, parts, tensor.shape)
    figure.savefig(path, format="png", dpi=110)


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _columns(axes: Any, series: Series) -> None:
    far = set(series.far())
    colours = [_LIGHT["far" if rank in far else "bar"] for rank in range(len(series.values))]
    axes.bar(range(len(series.values)), series.values, color=colours, width=0.9)
    axes.axhline(series.median, color=_LIGHT["text"], linestyle="--", linewidth=0.8)
    axes.set_title(f"{series.name}: {series.describe()}", fontsize=9, loc="left", parse_math=False)
    axes.set_xlabel("rank", fontsize=8)
    axes.yaxis.set_major_formatter(lambda value, _: series.show(value))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(-0.6, max(len(series.values) - 0.4, 0.6))


def _areas(axes: Any, parts: Sequence[Part], shape: Sequence[int]) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = (max(shape[axis], 1) if axis >= 0 else 1 for axis in cut_axes(parts, shape))
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    found = plane(parts, shape)
    if len(found) > MOST_AREAS:
        axes.text(columns / 2, rows / 2, f"{len(found)} pieces, too many to draw", ha="center", va="center", fontsize=8)
        return
    for each in found:
        colour = _LIGHT[f"rank-{each.colour % COLOURS + 1}"]
        corner, extents = (each.column[0], each.row[0]), (each.column[1], each.row[1])
        axes.add_patch(Rectangle(corner, *extents, facecolor=colour, edgecolor=_LIGHT["ground"], linewidth=0.8))
        if each.column[1] / columns > 0.012 * len(each.label) + 0.01 and each.row[1] / rows > 0.12:
            middle = (each.column[0] + each.column[1] / 2, each.row[0] + each.row[1] / 2)
            axes.text(*middle, each.label, ha="center", va="center", fontsize=7, color=_LIGHT["rank-1-text"])
