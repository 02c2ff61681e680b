"""Charts: each mark says what it shows, sums are exact, and the number of marks is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.pages.charts import (
    FAR,
    FLOOR_BYTES,
    FLOOR_COUNT,
    FLOOR_SECONDS,
    MOST_CELLS,
    MOST_COLUMNS,
    MOST_RANKS,
    Area,
    Series,
    Text,
    areas,
    by_rank,
    columns,
    figure,
    heat_map,
    of_bytes,
    of_counts,
    of_seconds,
)
from tests.documents import ROOT
from tests.pages.samples import Page


def titles(markup: str) -> list[str]:
    return [text for tag, text in Page(markup).texts if tag == "title"]


@pytest.mark.parametrize("ranks", [1, 2, 8, MOST_COLUMNS, MOST_COLUMNS + 1, 1024, 10_000])
def test_each_rank_is_in_a_column_and_the_straggler_is_seen(ranks):
    values = [10.0] * ranks
    values[ranks // 2] = 30.0 if ranks > 2 else 10.0
    series = Series("Seconds", values, "{:.0f} s".format)
    found = Page(figure(columns(series)))
    marks = [each for each in found.named("rect") if "data-i" in each]
    assert len(marks) == -(-ranks // max(1, -(-ranks // MOST_COLUMNS))) <= MOST_COLUMNS
    assert series.far() == ([ranks // 2] if ranks > 2 else [])
    assert [each["class"] for each in marks].count("far") == len(series.far())
    (tallest,) = {each["height"] for each in marks if each["class"] == ("far" if ranks > 2 else "bar")}
    assert float(tallest) == max(float(each["height"]) for each in marks)
    if ranks > 2:
        assert f"most 30 s, rank {ranks // 2}; median 10 s; 3.00 times the median" in found.text()


@pytest.mark.parametrize(
    ("series", "far"),
    [
        (of_seconds("plan", [0.004, 0.006, 0.004]), []),
        (of_seconds("plan", [0.1, 0.1 + FLOOR_SECONDS, 0.1]), []),
        (of_seconds("plan", [0.1, 0.11 + FLOOR_SECONDS, 0.1]), [1]),
        (of_seconds("write", [10.0, 11.0, 10.0]), []),
        (of_bytes("Saved", [100, 1000, 100]), []),
        (of_bytes("Saved", [100, 101 + FLOOR_BYTES, 100]), [1]),
        (of_counts("Requests", [2, 2 + FLOOR_COUNT, 2]), []),
        (of_counts("Requests", [2, 3 + FLOOR_COUNT, 2]), [1]),
    ],
)
def test_below_the_floor_nothing_stands_out(series, far):
    assert series.far() == far
    markup = by_rank("rank", [series])
    assert ("far" in [each["class"] for each in Page(markup).named("rect")]) == bool(far)
    assert ("stands out;" in Page(markup).text()) == bool(far)
    assert f"1.2 times the median, and more than {series.show(series.floor)} above it" in Page(markup).text()


def test_the_floors_are_documented():
    text = " ".join((ROOT / "docs/pages.md").read_text(encoding="utf-8").split())
    floors = (of_seconds("", ()), of_bytes("", ()), of_counts("", ()))
    seconds, size, count = (each.show(each.floor) for each in floors)
    assert f"{FAR} times the median" in text
    assert f"{seconds}, {size.replace('.0', '')} or {count} requests" in text


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 100, 1024, 10_000])
def test_the_axis_of_ranks_has_whole_numbers_with_room(ranks):
    drawing = columns(of_bytes("Saved", [5] * ranks))
    ticks = [mark for mark in drawing.marks if isinstance(mark, Text) and mark.y > drawing.height - 20]
    assert [int(mark.text) for mark in ticks] == sorted({int(mark.text) for mark in ticks})
    assert ticks[0].text == "0" and int(ticks[-1].text) < ranks
    assert len(ticks) >= min(ranks, 5)
    assert all(b.x - a.x >= 38 or ranks <= 8 for a, b in zip(ticks, ticks[1:]))
    assert all(0 <= mark.x <= drawing.width - 14 for mark in ticks)


def test_ranks_without_anything_do_not_count_for_the_median():
    series = Series("Bytes", [0, 0, 0, 0, 5, 5, 9], str)
    assert (series.median, series.far()) == (5, [6])
    assert Series("Bytes", [0, 0], str).far() == [] == Series("Bytes", [], str).far()
    assert "no rank" in columns(Series("Bytes", [], str)).description


@pytest.mark.parametrize("ranks", [1, 2, 8, MOST_CELLS, 100, 1024])
def test_a_heat_map_has_all_that_goes_from_rank_to_rank(ranks):
    pairs = np.stack(np.divmod(np.arange(ranks * ranks), ranks), axis=1)
    values = np.random.default_rng(ranks).integers(0, 1000, len(pairs))
    markup = heat_map("Bytes", pairs, values, ranks, ranks, str)
    assert len(markup) < 1_000_000
    cells = [text.rpartition(": ") for text in titles(markup) if " to rank" in text]
    assert len(cells) <= MOST_CELLS**2
    assert sum(int(value) for *_, value in cells) == int(values.sum())
    width = max(1, -(-ranks // MOST_CELLS))
    sums = values.reshape(ranks, ranks)
    first = f"rank{'s' * (width > 1)} 0" + f"-{width - 1}" * (width > 1)
    assert (f"{first} to {first}", ": ", str(sums[:width, :width].sum())) in cells


def test_nothing_between_ranks_is_no_cell():
    markup = heat_map("Bytes", np.asarray([[0, 3]]), np.asarray([7]), 2, 4, str)
    assert [text for text in titles(markup) if " to " in text] == ["rank 0 to rank 3: 7"]
    (chart,) = [each for each in Page(markup).named("div")]
    assert (chart["data-rows"], chart["data-columns"], chart["data-down"]) == ("2", "4", "rank 0|rank 1")
    assert "most 0" in heat_map("Bytes", np.zeros((0, 2), int), np.zeros(0, int), 2, 2, str)


def test_shades_rise_with_values():
    pairs = np.asarray([[0, n] for n in range(6)])
    found = Page(heat_map("Bytes", pairs, np.arange(1, 7), 1, 6, str))
    assert [each["class"] for each in found.named("rect") if "data-i" in each] == [
        *(f"heat-{level}" for level in range(2, 7)),
        "heat-6",
    ]


def test_parts_of_a_tensor_lie_where_they_are():
    parts = [
        Area((0, 2), (0, 4), 0, ["0"], "rank 0"),
        Area((2, 2), (0, 1), 9, ["12, 14 and 300 more", "12 +301", "12+"], "b"),
        Area((2, 2), (1, 0), 9, ["0"], "c"),
    ]
    found = Page(figure(areas("Saved", (4, 4), parts)))
    marks = [each for each in found.named("rect") if "data-i" in each]
    assert [(each["class"], each["y"], each["height"]) for each in marks] == [
        ("rank-1 part", "1", "80"),
        ("rank-2 part", "81", "80"),
        ("rank-2 part", "81", "80"),
    ]
    assert [text for tag, text in found.texts if tag == "text"] == ["0", "12 +301"]


# -- by rank ---------------------------------------------------------------------------------------------------------


def rows(markup: str) -> list[str]:
    return [text for tag, text in Page(markup).texts if tag == "th"]


def test_a_straggler_is_named():
    text = Page(by_rank("rank", [of_seconds("write", [1.0, 1.0, 4.0, 1.0]), of_bytes("Saved", [5, 5, 5, 5])])).text()
    assert "write: rank 2 stands out; rank 2 has 4 s, 4.0 times the median." in text
    assert "Saved: rank" not in text
    said = "No rank stands out: none has more than 1.2 times the median, and more than 1.0 MiB above it."
    assert said in Page(by_rank("rank", [of_bytes("Saved", [5, 5])])).text()


def test_values_that_are_equal_need_no_chart_of_their_own():
    series = [
        of_bytes("Needed", [5, 7]),
        of_bytes("Read", [5, 7]),
        of_bytes("Memory", [9, 9]),
        of_bytes("Least", [1, 2]),
    ]
    markup = by_rank("rank", series)
    titles = [text for tag, text in Page(markup).texts if tag == "strong"]
    assert titles == ["Needed, Read by rank", "Least by rank"]
    assert "Memory: 9 B on each rank." in Page(markup).text()
    assert rows(markup) == ["Rank", "Needed", "Read", "Memory", "Least", "0", "1"]


def test_few_ranks_are_all_in_the_table():
    markup = by_rank("rank", [of_counts("Reads", [3, 1, 2]), of_bytes("Read", [3])])
    assert rows(markup) == ["Rank", "Reads", "Read", "0", "1", "2"]
    assert [text for tag, text in Page(markup).texts if tag == "td"] == ["3", "3 B", "1", "-", "2", "-"]


def test_of_many_ranks_the_table_has_those_that_stand_out():
    values = [1.0] * 1024
    values[700], values[3] = 9.0, 5.0
    # Of these none stands out, for all their ratio.
    plan = [0.0001] * 1023 + [0.1]
    found = rows(by_rank("rank", [of_seconds("plan", plan), of_seconds("write", values)]))
    assert found[3:6] == ["700", "3", "1023"]
    assert len(found) == 3 + MOST_RANKS


def test_nothing_is_said_of_nothing():
    assert "Nothing is known" in by_rank("rank", [of_bytes("Saved", [])])
