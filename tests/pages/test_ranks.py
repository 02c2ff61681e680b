"""Values by rank: who stands out is said in words, and the table has those first that matter."""

from __future__ import annotations

from paddle_flexckpt.pages.ranks import MOST_RANKS, by_rank, of_bytes, of_counts, of_seconds
from tests.pages.samples import Page


def rows(markup: str) -> list[str]:
    return [text for tag, text in Page(markup).texts if tag == "th"]


def test_a_straggler_is_named():
    text = Page(by_rank("rank", [of_seconds("write", [1.0, 1.0, 4.0, 1.0]), of_bytes("Saved", [5, 5, 5, 5])])).text()
    assert "write: rank 2 stands out; rank 2 has 4 s, 4.0 times the median." in text
    assert "Saved: rank" not in text
    assert "No rank has more than 1.2 times the median." in Page(by_rank("rank", [of_bytes("Saved", [5, 5])])).text()


def test_few_ranks_are_all_in_the_table():
    markup = by_rank("rank", [of_counts("Reads", [3, 1, 2]), of_bytes("Read", [3])])
    assert rows(markup) == ["Rank", "Reads", "Read", "0", "1", "2"]
    assert [text for tag, text in Page(markup).texts if tag == "td"] == ["3", "3 B", "1", "-", "2", "-"]


def test_of_many_ranks_the_table_has_those_that_stand_out():
    values = [1.0] * 1024
    values[700], values[3] = 9.0, 5.0
    found = rows(by_rank("rank", [of_seconds("plan", [1.0] * 1024), of_seconds("write", values)]))
    assert found[3:6] == ["700", "3", "0"]
    assert len(found) == 3 + MOST_RANKS


def test_nothing_is_said_of_nothing():
    assert "Nothing is known" in by_rank("rank", [of_bytes("Saved", [])])
