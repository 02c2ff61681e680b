"""Draw charts as SVG: one value for each rank, bytes from rank to rank, and the parts of a tensor.

A chart has a bounded number of marks for any number of ranks: neighbours share one. The keyboard reaches each mark,
which has a text. Colours are in the page's style, so that they follow its scheme.

Tested in tests/pages/test_charts.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.pages.markup import Content, Markup, element, join
from paddle_flexckpt.pages.style import COLOURS, LEVELS

#: Columns of a chart, and rows and columns of a heat map. With more ranks, several share one.
MOST_COLUMNS, MOST_CELLS = 128, 64
#: A rank stands out if its value is this many times the median.
FAR = 1.2
_WIDTH, _HEIGHT = 480, 150


@dataclass(frozen=True)
class Series:
    """One value for each rank.

    Attributes:
        name: The name of the values.
        values: The values by rank.
        show: Returns the text of a value.
    """

    name: str
    values: Sequence[float]
    show: Callable[[float], str]

    @property
    def median(self) -> float:
        """Return the median of the ranks with a value other than 0; 0 if there are none."""
        return statistics.median([value for value in self.values if value] or [0.0])

    def far(self) -> list[int]:
        """Return the ranks that stand out, the highest value first."""
        limit = FAR * self.median
        found = [rank for rank, value in enumerate(self.values) if value > limit]
        return sorted(found, key=lambda rank: -self.values[rank])

    def describe(self) -> str:
        """Return one line: the rank with the highest value, compared with the others."""
        if not self.values:
            return "no rank"
        most = max(self.values)
        rank = list(self.values).index(most)
        text = f"most {self.show(most)}, rank {rank}; median {self.show(self.median)}"
        return text + (f"; {most / self.median:.2f} times the median" if self.median > 0 else "")


def _bins(count: int, most: int) -> list[tuple[int, int]]:
    """Return ranges of ranks of equal length; the last may be shorter. Their number is bounded."""
    width = max(1, -(-count // most))
    return [(first, min(first + width, count)) for first in range(0, count, width)]


def _ranks(low: int, high: int) -> str:
    return f"rank {low}" if high - low == 1 else f"ranks {low}-{high - 1}"


def _chart(svg: Markup, label: str, rows: int, across: Sequence[str], down: Sequence[str] | None) -> Markup:
    return element(
        "div",
        svg,
        element("output", ""),
        class_="chart",
        tabindex=0,
        role="group",
        aria_label=f"{label}. Arrow keys move through it.",
        data_rows=rows,
        data_columns=len(across),
        data_across="|".join(across),
        data_down=None if down is None else "|".join(down),
    )


def _svg(width: float, height: float, title: str, description: str, *content: Content) -> Markup:
    words = (element("title", title), element("desc", description))
    return element(
        "svg", *words, *content, role="img", viewBox=f"0 0 {width:g} {height:g}", aria_label=f"{title}: {description}"
    )


def _rect(kind: str, x: float, y: float, width: float, height: float, number: int | None, *content: Content) -> Markup:
    place = f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"'
    index = "" if number is None else f' data-i="{number}"'
    return Markup(f'<rect class="{kind}" {place}{index}>{join(content)}</rect>')


def _text(content: Content, x: float, y: float, kind: str = "") -> Markup:
    return Markup(f'<text class="{kind}" x="{x:.4g}" y="{y:.4g}">{join([content])}</text>')


def columns(series: Series) -> Markup:
    """Draw a column for each rank, or for neighbours (the highest of them), and a line for the median."""
    bins = _bins(len(series.values), MOST_COLUMNS)
    values = np.asarray(series.values, dtype=np.float64)
    top, far = float(values.max(initial=0)) or 1.0, set(series.far())
    left, base, head = 6.0, _HEIGHT - 22.0, 20.0
    step = (_WIDTH - 2 * left) / max(len(bins), 1)
    marks = []
    for number, (low, high) in enumerate(bins):
        rank = low + int(values[low:high].argmax())
        height = max((base - head) * float(values[rank]) / top, 1 if values[rank] else 0)
        text = f"rank {rank}: {series.show(series.values[rank])}"
        text += f", the most of {_ranks(low, high)}" if high - low > 1 else ""
        width = max(step * 0.85, step - 3)
        kind = "far" if rank in far else "bar"
        marks.append(_rect(kind, left + number * step, base - height, width, height, number, element("title", text)))
    middle = base - (base - head) * series.median / top
    line = Markup(f'<line class="median" x1="{left}" x2="{_WIDTH - left}" y1="{middle:.4g}" y2="{middle:.4g}"/>')
    frame = Markup(f'<line class="frame" x1="{left}" x2="{_WIDTH - left}" y1="{base}" y2="{base}"/>')
    texts = [
        _text(f"{series.show(top)}", left, 13),
        _text(f"median {series.show(series.median)}", _WIDTH - left, 13, "end"),
    ]
    if bins:
        texts += [
            _text("rank 0", left, _HEIGHT - 6),
            _text(f"rank {len(values) - 1}", _WIDTH - left, _HEIGHT - 6, "end"),
        ]
    svg = _svg(_WIDTH, _HEIGHT, f"{series.name} by rank", series.describe(), *marks, frame, line, *texts)
    caption = element("figcaption", element("strong", series.name), f": {series.describe()}.")
    across = [_ranks(*each) for each in bins]
    return element("figure", caption, _chart(svg, f"{series.name} by rank", 1, across, None))


def heat_map(
    name: str, pairs: np.ndarray, values: np.ndarray, sources: int, targets: int, show: Callable[[float], str]
) -> Markup:
    """Draw the bytes from each source rank, a row, to each target rank, a column.

    Args:
        name: The name of the chart.
        pairs: int64 ``[n, 2]``, source and target rank.
        values: int64 ``[n]``.
        sources: Number of source ranks.
        targets: Number of target ranks.
        show: Returns the text of a value.
    """
    rows, across = _bins(sources, MOST_CELLS), _bins(targets, MOST_CELLS)
    sums = np.zeros((len(rows), len(across)), dtype=np.int64)
    if len(pairs):
        np.add.at(
            sums, (pairs[:, 0] // (rows[0][1] - rows[0][0]), pairs[:, 1] // (across[0][1] - across[0][0])), values
        )
    most = int(sums.max(initial=0))
    size = min(64.0, 704 / max(len(rows), len(across), 1))
    left, head = 96.0, 34.0
    is_written = size >= 60
    cells = []
    for row, column in np.argwhere(sums > 0).tolist():
        value = int(sums[row, column])
        level = f"heat-{_level(value, most) + 1}"
        x, y = left + column * size, head + row * size
        words = f"{_ranks(*rows[row])} to {_ranks(*across[column])}: {show(value)}"
        cells.append(_rect(level, x, y, size, size, row * len(across) + column, element("title", words)))
        if is_written:
            cells.append(_text(show(value), x + size / 2, y + size / 2, f"{level} middle centre"))
    width, height = left + size * len(across), head + size * len(rows)
    cells.append(_rect("frame", left, head, width - left, height - head, None))
    texts = [_text("source", 4, head - 8), _text("target", left, 12)]
    texts += [
        _text(_numbers(rows[row]), left - 6, head + (row + 0.5) * size, "end centre")
        for row in _ticks(len(rows), size, 14)
    ]
    texts += [
        _text(_numbers(across[column]), left + (column + 0.5) * size, head - 6, "middle")
        for column in _ticks(len(across), size, 56)
    ]
    together = rows[0][1] > 1 or across[0][1] > 1 if rows and across else False
    words = f"{len(values)} pairs of ranks; most {show(most)}" + (" between the ranks of one cell" if together else "")
    svg = _svg(width + 4, height + 4, name, words, *cells, *texts)
    names = [[_ranks(*each) for each in some] for some in (across, rows)]
    figure = _chart(svg, name, len(rows), names[0], names[1])
    return element("figure", element("figcaption", element("strong", name), f": {words}."), figure, _legend(most, show))


def _level(value: int, most: int) -> int:
    return min(LEVELS * value // max(most, 1), LEVELS - 1)


def _numbers(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[1] - bounds[0] == 1 else f"{bounds[0]}-{bounds[1] - 1}"


def _ticks(count: int, size: float, room: float) -> range:
    """Return the rows or columns with room for a name."""
    return range(0, count, max(1, int(-(-room // size))))


def _legend(most: int, show: Callable[[float], str]) -> Markup:
    def key(level: int) -> Markup:
        bounds = f"up to {show(most * (level + 1) // LEVELS)}"
        return element("li", element("span", "", class_=f"key heat-{level + 1}"), bounds)

    return element("ul", element("li", "empty: nothing"), *map(key, range(LEVELS)), class_="legend")


@dataclass(frozen=True)
class Area:
    """A rectangle of a tensor, with its holders.

    Attributes:
        row: First index along the axis that goes down, and the extent.
        column: The same along the axis that goes right.
        colour: A number that tells holders apart.
        label: Its holders, in few characters.
        text: Its holders in words.
    """

    row: tuple[int, int]
    column: tuple[int, int]
    colour: int
    label: str
    text: str


def areas(title: str, shape: tuple[int, int], parts: Sequence[Area]) -> Markup:
    """Draw rectangles of a tensor of two axes, each with its holders."""
    width = 320.0
    height = min(max(width * shape[0] / max(shape[1], 1), 28.0), 240.0)
    down, right = height / max(shape[0], 1), width / max(shape[1], 1)
    marks = []
    for number, part in enumerate(parts):
        x, y, wide, high = part.column[0] * right, part.row[0] * down, part.column[1] * right, part.row[1] * down
        kind = f"rank-{part.colour % COLOURS + 1}"
        marks.append(_rect(f"{kind} part", x + 1, y + 1, wide, high, number, element("title", part.text)))
        if wide > 7 * len(part.label) + 4 and high >= 14:
            marks.append(_text(part.label, x + 1 + wide / 2, y + 1 + high / 2, f"{kind} middle centre"))
    marks.append(_rect("frame", 1, 1, width, height, None))
    svg = _svg(width + 2, height + 2, title, f"{len(parts)} parts", *marks)
    chart = _chart(svg, title, 1, [part.label for part in parts] or ["nothing"], None)
    return element("figure", element("figcaption", title), chart)
