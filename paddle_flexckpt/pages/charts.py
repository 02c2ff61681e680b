"""Charts: one value for each rank, bytes from rank to rank, and the parts of a tensor.

A chart is a :class:`Drawing`: a bounded number of marks for any number of ranks, as neighbours share one.
:func:`figure` shows it in a page, ``pictures.py`` in a PNG file. In a page the keyboard reaches each mark, which has a
text. Colours have the names of the page's style, so that they follow its scheme.

Tested in tests/pages/test_charts.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.pages.markup import COLOURS, LEVELS, Amount, Content, Markup, element, join, paragraph, table, text

#: Columns of a chart, and rows and columns of a heat map. With more ranks, several share one.
MOST_COLUMNS, MOST_CELLS = 128, 64
#: A rank stands out if its value is more than this many times the median, and more than a floor above it. Below the
#: floor a difference costs nobody anything: times vary by that much from run to run, a disk or network moves so many
#: bytes in some milliseconds, and a few requests go unnoticed.
FAR = 1.2
FLOOR_SECONDS, FLOOR_BYTES, FLOOR_COUNT = 0.5, 1 << 20, 10
#: The most ranks in a table: those that stand out the most.
MOST_RANKS = 64
# The width of a phone without margins.
_WIDTH, _HEIGHT = 320, 150


class Rect(NamedTuple):
    """A rectangle. One with a text is a mark that the keyboard reaches, by its ``number``."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    number: int | None = None
    text: str = ""


class Line(NamedTuple):
    """A line."""

    kind: str
    x1: float
    x2: float
    y1: float
    y2: float


class Text(NamedTuple):
    """A text; its kind may have the words ``middle`` or ``end``, and ``centre`` for its height."""

    text: str
    x: float
    y: float
    kind: str = ""


@dataclass(frozen=True)
class Drawing:
    """A chart.

    Attributes:
        title: Its name.
        description: Its contents in one line.
        width: Its extent to the right.
        height: Its extent downwards.
        marks: All that is drawn, the last on top.
        across: The names of its columns.
        down: The names of its rows; None for one row.
    """

    title: str
    description: str
    width: float
    height: float
    marks: Sequence[Rect | Line | Text]
    across: Sequence[str]
    down: Sequence[str] | None = None


@dataclass(frozen=True)
class Series:
    """One value for each rank.

    Attributes:
        name: The name of the values.
        values: The values by rank.
        show: Returns the text of a value.
        floor: A rank that stands out has this much more than the median.
    """

    name: str
    values: Sequence[float]
    show: Callable[[float], str]
    floor: float = 0

    @property
    def median(self) -> float:
        """Return the median of the ranks with a value other than 0; 0 if there are none."""
        return statistics.median([value for value in self.values if value] or [0.0])

    def far(self) -> list[int]:
        """Return the ranks that stand out, the highest value first."""
        limit = max(FAR * self.median, self.median + self.floor)
        found = [rank for rank, value in enumerate(self.values) if value > limit]
        return sorted(found, key=lambda rank: -self.values[rank])

    def cell(self, value: float) -> Amount:
        """Return a value as the cell of a table."""
        return Amount(self.show(value), value)

    def describe(self) -> str:
        """Return one line: the rank with the highest value, compared with the others."""
        if not self.values:
            return "no rank"
        most = max(self.values)
        rank = list(self.values).index(most)
        some = sum(value != 0 for value in self.values)
        of = "" if some in (0, len(self.values)) else f" of the {some} with any"
        text = f"most {self.show(most)}, rank {rank}; median{of} {self.show(self.median)}"
        return text + (f"; {most / self.median:.2f} times the median" if self.median > 0 else "")


def _bins(count: int, most: int) -> list[tuple[int, int]]:
    """Return ranges of ranks of equal length; the last may be shorter. Their number is bounded."""
    width = max(1, -(-count // most))
    return [(first, min(first + width, count)) for first in range(0, count, width)]


def _ranks(low: int, high: int) -> str:
    return f"rank {low}" if high - low == 1 else f"ranks {low}-{high - 1}"


def figure(drawing: Drawing, *caption: Content) -> Markup:
    """Return a chart as SVG, with a caption."""
    label = f"{drawing.title}: {drawing.description}"
    words = (element("title", drawing.title), element("desc", drawing.description))
    # Its size is in pixels, so that letters have the same size in every drawing.
    size = {"width": f"{drawing.width:g}", "height": f"{drawing.height:g}"}
    svg = element("svg", *words, *map(_mark, drawing.marks), role="img", aria_label=label, **size)
    chart = element(
        "div",
        svg,
        element("output", ""),
        class_="chart",
        tabindex=0,
        role="group",
        aria_label=f"{drawing.title}. Arrow keys move through it.",
        data_rows=len(drawing.down or "1"),
        data_columns=len(drawing.across),
        data_across="|".join(drawing.across),
        data_down=None if drawing.down is None else "|".join(drawing.down),
    )
    return element("figure", element("figcaption", *caption), chart)


def _mark(mark: Rect | Line | Text) -> Markup:
    if isinstance(mark, Text):
        return Markup(f'<text class="{mark.kind}" x="{mark.x:.4g}" y="{mark.y:.4g}">{text(mark.text)}</text>')
    if isinstance(mark, Line):
        ends = f'x1="{mark.x1:.4g}" x2="{mark.x2:.4g}" y1="{mark.y1:.4g}" y2="{mark.y2:.4g}"'
        return Markup(f'<line class="{mark.kind}" {ends}/>')
    place = f'x="{mark.x:.4g}" y="{mark.y:.4g}" width="{mark.width:.4g}" height="{mark.height:.4g}"'
    index = "" if mark.number is None else f' data-i="{mark.number}"'
    title = element("title", mark.text) if mark.text else ""
    return Markup(f'<rect class="{mark.kind}" {place}{index}>{title}</rect>')


def columns(series: Series) -> Drawing:
    """Draw a column for each rank, or for neighbours (the highest of them), and a line for the median."""
    bins = _bins(len(series.values), MOST_COLUMNS)
    values = np.asarray(series.values, dtype=np.float64)
    top, far = float(values.max(initial=0)) or 1.0, set(series.far())
    left, base, head = 6.0, _HEIGHT - 22.0, 20.0
    step = (_WIDTH - 2 * left) / max(len(bins), 1)
    marks: list[Rect | Line | Text] = []
    for number, (low, high) in enumerate(bins):
        rank = low + int(values[low:high].argmax())
        height = max((base - head) * float(values[rank]) / top, 1 if values[rank] else 0)
        words = f"rank {rank}: {series.show(series.values[rank])}"
        words += f", the most of {_ranks(low, high)}" if high - low > 1 else ""
        width = max(step * 0.85, step - 3)
        kind = "far" if rank in far else "bar"
        marks.append(Rect(kind, left + number * step, base - height, width, height, number, words))
    middle = base - (base - head) * series.median / top
    marks += [
        Line("frame", left, _WIDTH - left, base, base),
        Line("median", left, _WIDTH - left, middle, middle),
        Text(f"{series.show(top)}", left, 13),
        Text(f"median {series.show(series.median)}", _WIDTH - left, 13, "end"),
    ]
    # The number of the first rank of a column, where there is room.
    for number in _ticks(len(bins), step, 38):
        x = left + (number + 0.425) * step
        if x <= _WIDTH - 14:
            marks.append(Text(str(bins[number][0]), x, _HEIGHT - 6, "middle"))
    across = [_ranks(*each) for each in bins]
    return Drawing(f"{series.name} by rank", series.describe(), _WIDTH, _HEIGHT, marks, across)


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
    marks: list[Rect | Text] = []
    for row, column in np.argwhere(sums > 0).tolist():
        value = int(sums[row, column])
        level = f"heat-{_level(value, most) + 1}"
        x, y = left + column * size, head + row * size
        words = f"{_ranks(*rows[row])} to {_ranks(*across[column])}: {show(value)}"
        marks.append(Rect(level, x, y, size, size, row * len(across) + column, words))
        if is_written:
            marks.append(Text(show(value), x + size / 2, y + size / 2, f"{level} middle centre"))
    width, height = left + size * len(across), head + size * len(rows)
    marks.append(Rect("frame", left, head, width - left, height - head))
    marks += [Text("source", 4, head - 8), Text("target", left, 12)]
    for row in _ticks(len(rows), size, 14):
        marks.append(Text(_numbers(rows[row]), left - 6, head + (row + 0.5) * size, "end centre"))
    for column in _ticks(len(across), size, 56):
        marks.append(Text(_numbers(across[column]), left + (column + 0.5) * size, head - 6, "middle"))
    together = rows[0][1] > 1 or across[0][1] > 1 if rows and across else False
    words = f"{len(values)} pairs of ranks; most {show(most)}" + (" between the ranks of one cell" if together else "")
    names = [[_ranks(*each) for each in some] for some in (across, rows)]
    drawing = Drawing(name, words, width + 4, height + 4, marks, *names)
    return join([figure(drawing, element("strong", name), f": {words}."), _legend(most, show)])


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
        labels: Its holders, in fewer and fewer characters; the first one with room is drawn.
        text: Its holders in words.
    """

    row: tuple[int, int]
    column: tuple[int, int]
    colour: int
    labels: Sequence[str]
    text: str


def areas(title: str, shape: tuple[int, int], parts: Sequence[Area]) -> Drawing:
    """Draw rectangles of a tensor of two axes, each with its holders."""
    width = _WIDTH - 2.0
    height = min(max(width * shape[0] / max(shape[1], 1), 28.0), 160.0)
    down, right = height / max(shape[0], 1), width / max(shape[1], 1)
    marks: list[Rect | Text] = []
    for number, part in enumerate(parts):
        x, y, wide, high = part.column[0] * right, part.row[0] * down, part.column[1] * right, part.row[1] * down
        kind = f"rank-{part.colour % COLOURS + 1}"
        marks.append(Rect(f"{kind} part", x + 1, y + 1, wide, high, number, part.text))
        fitting = [label for label in part.labels if wide > 7 * len(label) + 4 and high >= 14]
        if fitting:
            marks.append(Text(fitting[0], x + 1 + wide / 2, y + 1 + high / 2, f"{kind} middle centre"))
    marks.append(Rect("frame", 1, 1, width, height))
    across = [part.labels[0] for part in parts] or ["nothing"]
    return Drawing(title, f"{len(parts)} parts", width + 2, height + 2, marks, across)


def of_bytes(name: str, values: Sequence[float]) -> Series:
    """Return bytes by rank."""
    return Series(name, values, lambda value: format_bytes(int(value)), FLOOR_BYTES)


def of_seconds(name: str, values: Sequence[float]) -> Series:
    """Return seconds by rank."""
    return Series(name, values, lambda value: f"{value:.3g} s" if value < 100 else f"{value:.0f} s", FLOOR_SECONDS)


def of_counts(name: str, values: Sequence[float]) -> Series:
    """Return counts by rank."""
    return Series(name, values, lambda value: str(int(value)), FLOOR_COUNT)


def by_rank(what: str, series: Sequence[Series]) -> Markup:
    """Return charts of some values of each rank, a text about ranks that stand out, and a table.

    Values that are equal on all ranks have a line in place of a chart; equal series share one.
    """
    series = [each for each in series if len(each.values)]
    count = max((len(each.values) for each in series), default=0)
    if not count:
        return paragraph("Nothing is known of it.")
    alike: dict[tuple[str, ...], list[Series]] = {}
    for each in series:
        alike.setdefault(tuple(map(each.show, each.values)), []).append(each)
    told = [(shown, replace(same[0], name=", ".join(each.name for each in same))) for shown, same in alike.items()]
    even = [f"{each.name}: {shown[0]} on each {what}." for shown, each in told if len(shown) > 1 == len({*shown})]
    charts = [_columns_figure(each) for shown, each in told if not len(shown) > 1 == len({*shown})]
    table_of_all = element("div", _by_rank_table(what, series, count))
    return join(
        [_who_stands_out(series), *map(paragraph, even), element("div", *charts, table_of_all, class_="charts")]
    )


def _columns_figure(series: Series) -> Markup:
    drawing = columns(series)
    return figure(drawing, element("strong", drawing.title), f": {drawing.description}.")


def _who_stands_out(series: Sequence[Series]) -> Markup:
    remarks: list[Content] = []
    for each in series:
        far = each.far()
        if far:
            ranks = ("ranks " if len(far) > 1 else "rank ") + listed(list(map(str, far)), 5)
            most = f"{each.show(each.values[far[0]])}, {each.values[far[0]] / each.median:.1f} times the median"
            remarks.append(f"{each.name}: {ranks} stand{'s' * (len(far) == 1)} out; rank {far[0]} has {most}.")
    floors = dict.fromkeys(each.show(each.floor) for each in series)
    rule = f"more than {FAR} times the median, and more than {' or '.join(floors)} above it"
    if not remarks:
        return paragraph(f"No rank stands out: none has {rule}.")
    key = element("li", element("span", "", class_="key far"), f"stands out: {rule}")
    return join([element("ul", *(element("li", each) for each in remarks)), element("ul", key, class_="legend")])


def _by_rank_table(what: str, series: Sequence[Series], count: int) -> Markup:
    ranks: Sequence[int] = range(count)
    caption = f"By {what}"
    if count > MOST_RANKS:
        # A rank's distance above the others, in the value where this is the largest.
        def above(rank: int) -> float:
            return max(each.values[rank] / (each.median or 1) for each in series if rank < len(each.values))

        far = {rank for each in series for rank in each.far()}
        ranks = sorted(range(count), key=lambda rank: (rank not in far, -above(rank), rank))[:MOST_RANKS]
        caption += f": the {MOST_RANKS} of {count} that stand highest above the median; --json has all"
    rows = [
        (rank, *(each.cell(each.values[rank]) if rank < len(each.values) else "-" for each in series)) for rank in ranks
    ]
    return table(caption, (what.capitalize(), *(each.name for each in series)), rows)
