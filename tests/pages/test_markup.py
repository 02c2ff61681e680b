"""Pages: what is text stays text, whatever it says, and a page has all that it needs."""

from __future__ import annotations

import base64
import hashlib
import html
import re

import pytest

from paddle_flexckpt.pages.markup import Markup, Section, bullets, element, facts, join, page, paragraph, table, text
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
    rows = [(hostile, hostile), ("b", "2")]
    parts = [table(hostile, (hostile, "n"), rows, numbers=(1,)), bullets([hostile]), facts([(hostile, hostile)])]
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
