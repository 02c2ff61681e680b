"""Pages: what is text stays text, whatever it says, and a page has all that it needs."""

from __future__ import annotations

import base64
import hashlib
import html
import re

import pytest

from paddle_flexckpt.pages.markup import (
    LONG,
    Amount,
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
    text,
)
from tests.pages.samples import HOSTILE, Page, check


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_is_never_markup(hostile):
    found = text(hostile)
    assert not re.search(r"[<>\"']", found)
    shown = html.unescape(found)
    assert shown.isprintable()
    assert [each for each in shown if each in "<>\"'&"] == [each for each in hostile if each in "<>\"'&"]


def test_what_prints_nothing_is_shown_by_its_number():
    assert text("a\u202eb\x00\udc80\u2028") == "a\\u202eb\\x00\\udc80\\u2028"
    assert text("gewöhnlich 模型") == "gewöhnlich 模型"
    assert text("two\nlines") == "two\nlines"


def test_markup_is_not_escaped_again():
    assert text(paragraph("a<b")) == "<p>a&lt;b</p>"
    assert isinstance(join(["<", Markup("<br>")]), Markup)
    assert join(["<", Markup("<br>")]) == "&lt;<br>"
    assert element("a", "x", class_='"', data_i=3, href=None) == '<a class="&quot;" data-i="3">x</a>'


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_page_of_hostile_text_is_a_page(hostile):
    rows = [(hostile, hostile), ("b", Amount(hostile, 2))]
    parts = [table(hostile, (hostile, "n"), rows), bullets([hostile]), facts([(hostile, hostile)])]
    content = page(hostile, hostile, [Section(hostile, join(parts))])
    found = check(content)
    shown = html.unescape(text(hostile))
    assert [each for tag, each in found.texts if tag in ("title", "h1", "h2", "caption", "dt", "dd")] == [shown] * 6
    content.encode("utf-8")


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_else():
    content = page("t", "l", [])
    found = Page(content)
    (policy,) = [each["content"] for each in found.named("meta") if each.get("http-equiv")]
    for name in ("style", "script"):
        (own,) = re.findall(rf"<{name}>(.*?)</{name}>", content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert content.index("Content-Security-Policy") < content.index("<title>")


def test_lists_are_cut():
    assert bullets(["a", "b", "c"], 2) == "<ul><li>a</li><li>b</li><li>and 1 more</li></ul>"


def test_numbers_carry_what_sorts_them():
    found = Page(table("t", ("Key", "Count", "Size"), [("a", 7, of_size(1_000_000)), ("b", -1, "-")]))
    assert [each.get("data-v") for each in found.named("td")] == ["7", "1000000", "-1", None]
    assert [each.get("class") for each in found.named("th")] == [None, "number", "number", None, None]
    assert [text for tag, text in found.texts if tag == "td"] == ["7", "976.6 KiB", "-1", "-"]
    # A column of numbers is one though its first cell has none.
    found = Page(table("t", ("Key", "n"), [("a", "-"), ("b", 2)]))
    assert {each["class"] for each in found.named("td")} == {"number"}
    exact = 0.1 + 0.2
    (cell,) = Page(table("t", ("Key",), [(Amount("0.3", exact),)])).named("th")[1:]
    assert float(cell["data-v"]) == exact


@pytest.mark.parametrize(("rows", "kind"), [(0, "scroll"), (LONG, "scroll"), (LONG + 1, "scroll long")])
def test_a_table_of_few_rows_does_not_scroll(rows, kind):
    (box,) = Page(table("t", ("Key", "n"), [("a", n) for n in range(rows)])).named("div")
    assert box["class"] == kind
