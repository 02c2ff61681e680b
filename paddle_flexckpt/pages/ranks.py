"""Show values of each rank: a chart for each kind of value, and a table. Tested in tests/pages/test_ranks.py."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.pages.charts import FAR, Series, columns
from paddle_flexckpt.pages.markup import Content, Markup, element, join, paragraph, table

#: The most ranks in a table: those that stand out the most.
MOST_RANKS = 64


def of_bytes(name: str, values: Sequence[float]) -> Series:
    """Return bytes by rank."""
    return Series(name, values, lambda value: format_bytes(int(value)))


def of_seconds(name: str, values: Sequence[float]) -> Series:
    """Return seconds by rank."""
    return Series(name, values, lambda value: f"{value:.3g} s" if value < 100 else f"{value:.0f} s")


def of_counts(name: str, values: Sequence[float]) -> Series:
    """Return counts by rank."""
    return Series(name, values, lambda value: str(int(value)))


def by_rank(what: str, series: Sequence[Series]) -> Markup:
    """Return charts of some values of each rank, a text about ranks that stand out, and a table."""
    series = [each for each in series if len(each.values)]
    count = max((len(each.values) for each in series), default=0)
    if not count:
        return paragraph("Nothing is known of it.")
    charts = element("div", *map(columns, series), class_="charts")
    return join([_who_stands_out(series), charts, _table(what, series, count)])


def _who_stands_out(series: Sequence[Series]) -> Markup:
    remarks: list[Content] = []
    for each in series:
        far = each.far()
        if far:
            ranks = ("ranks " if len(far) > 1 else "rank ") + listed(list(map(str, far)), 5)
            most = f"{each.show(each.values[far[0]])}, {each.values[far[0]] / each.median:.1f} times the median"
            remarks.append(f"{each.name}: {ranks} stand{'s' * (len(far) == 1)} out; rank {far[0]} has {most}.")
    if not remarks:
        return paragraph(f"No rank has more than {FAR} times the median.")
    return element("ul", *(element("li", text) for text in remarks))


def _table(what: str, series: Sequence[Series], count: int) -> Markup:
    ranks: Sequence[int] = range(count)
    caption = f"By {what}"
    if count > MOST_RANKS:
        # A rank's distance above the others, in the value where this is the largest.
        def above(rank: int) -> float:
            return max(each.values[rank] / (each.median or 1) for each in series if rank < len(each.values))

        ranks = sorted(range(count), key=lambda rank: (-above(rank), rank))[:MOST_RANKS]
        caption += f": the {MOST_RANKS} of {count} that stand highest above the median; --json has all"
    rows = [
        (str(rank), *(each.show(each.values[rank]) if rank < len(each.values) else "-" for each in series))
        for rank in ranks
    ]
    numbers = range(len(series) + 1)
    return table(caption, (what.capitalize(), *(each.name for each in series)), rows, numbers=numbers)
