"""Pages of a rehearsal and of what differs: all that the reports say, hostile or not, and sizes."""

from __future__ import annotations

import html
from dataclasses import replace

import pytest

from paddle_flexckpt.pages.markup import text
from paddle_flexckpt.pages.report_pages import diff_page, rehearsal_page, save_rehearsal_page
from paddle_flexckpt.tools.comparison import DiffReport
from paddle_flexckpt.tools.save_rehearsal import SaveRehearsal
from tests.pages.samples import HOSTILE, check, difference, rehearsal


def cells(page) -> list[str]:
    return [each for tag, each in page.texts if tag in ("th", "td")]


@pytest.mark.parametrize("ranks", [4, 8, 1024])
def test_a_rehearsal_says_who_reads_what_of_whom(ranks):
    content = rehearsal_page(rehearsal(ranks))
    found = check(content)
    assert len(content) < 2_000_000
    assert "Read: rank 1 stands out; rank 1 has 10.0 MiB, 104857.6 times the median." in found.text()
    titles = [each for tag, each in found.texts if tag == "title" and " to rank" in each]
    if ranks <= 64:
        assert "rank 1 to rank 1: 60 B" in titles
        assert len(titles) == 2 * ranks
    else:  # 16 ranks a cell
        assert "ranks 0-15 to ranks 0-15: 1.5 KiB" in titles
        assert "ranks 16-31 to ranks 0-15: 40 B" in titles
    headings = [each for tag, each in found.texts if tag == "h2"]
    names = {"Missing", "Unexpected", "Maybe fused", "Aliases", "Cast", "Masters", "From rank to rank"}
    assert names <= set(headings)
    for key in HOSTILE:
        assert html.unescape(text(key)) in found.text()


def test_ranks_that_do_the_same_are_counted_each():
    found = check(rehearsal_page(rehearsal(12, groups=3)))
    assert "rank 0 to rank 3: 60 B" in [each for tag, each in found.texts if tag == "title"]
    assert "0-3" in cells(found)


def test_a_rehearsal_that_fails_says_why():
    found = check(rehearsal_page(rehearsal(8, error=f"no such key\n  1. {HOSTILE[0]}")))
    (error,) = [each for tag, each in found.texts if tag == "pre"]
    assert error == f"no such key\n  1. {HOSTILE[0]}"
    assert "From rank to rank" not in found.text()


def test_a_save_that_fails_says_why():
    found = check(save_rehearsal_page(SaveRehearsal("tp=2", 2, error=HOSTILE[0], notes=[HOSTILE[1]])))
    assert [each for tag, each in found.texts if tag == "pre"] == [HOSTILE[0]]
    assert HOSTILE[1] in found.text()


def test_what_differs_is_all_there():
    found = check(diff_page(difference()))
    assert "6.25%" in str(cells(found)) and "float16 [2]" in cells(found)
    for key in HOSTILE:
        assert html.unescape(text(key)) in found.text()
    order = [each for each in cells(found) if each.endswith("%")]
    assert order == [f"{each.share:.2%}" for each in difference().differing.values()]  # as in the report
    assert "Not allowed" not in cells(found)
    within = check(diff_page(replace(difference(), rtol=0.5)))
    assert {"Not allowed", "of these within rtol 0.5, atol 0"} <= {text for _, text in within.texts}


def test_of_many_differences_the_first_are_shown():
    content = diff_page(difference(20_000))
    found = check(content)
    assert len(content) < 2_000_000
    assert "1000 of 20008; --json has all" in found.text()
    assert "w0" in cells(found) and "w19999" not in cells(found)


@pytest.mark.parametrize("count", [0, 2])
def test_values_that_are_not_finite_have_a_column_where_there_are_any(count):
    report = difference()
    differing = {"w": replace(report.differing["w0"], not_finite=count)}
    found = check(diff_page(replace(report, differing=differing)))
    assert ("Not finite" in cells(found)) == bool(count)


def test_nothing_differs():
    found = check(diff_page(DiffReport("a", "b", 3, [], [], {}, {}, 10, 0)))
    assert "There are none." in found.text()
