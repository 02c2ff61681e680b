"""Draw the charts of the page of who holds what as a PNG file, with matplotlib.

Tested in tests/pages/test_pictures.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.pages.charts import Drawing, Line, Text, columns, of_bytes, of_seconds
from paddle_flexckpt.pages.holder_pages import largest, sides
from paddle_flexckpt.pages.markup import PALETTE
from paddle_flexckpt.tools.holders import HoldersReport

# The most parameters of a picture, and the colours of its light scheme.
_MOST_PICTURED = 6
_LIGHT = {name: colours[0] for name, colours in PALETTE.items()}


def holders_picture(
    report: HoldersReport, path: str | os.PathLike[str], seconds: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Write a picture of the holders of tensors: bytes and seconds by rank, and the parts of the largest
    parameters.

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
                f"a PNG file is drawn by matplotlib, which is not there ({error}). Remedy (FC901): pip install "
                "'paddle-flexckpt[viz]', or ask for --html, which needs nothing"
            ]
        ) from error
    series = [of_seconds(f"Seconds: {name}", each) for name, each in (seconds or {}).items()]
    series.append(of_bytes("Saved", report.stored_bytes))
    if report.strategy:
        series.append(of_bytes(f"Needed under {report.strategy}", report.needed_bytes))
    rows: list[list[tuple[str, Drawing | str]]] = [
        [(f"{each.name}: {each.describe()}", columns(each))] for each in series
    ]
    for parameter, groups in largest(report, _MOST_PICTURED):
        for each in groups:
            drawings = sides(each.tensor, bool(report.strategy))
            row = [(getattr(drawn, "title", "") or str(drawn), drawn) for drawn in drawings]
            # The first line has the width of the picture.
            row[0] = (f"{parameter} {each.tensor.shape}: {each.names}\n{row[0][0]}", row[0][1])
            rows.append(row)
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
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


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
