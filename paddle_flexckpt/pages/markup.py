"""Make a self-contained HTML page: it loads nothing, and shown text cannot become markup.

Keys and paths come from checkpoints that anybody may have made. :func:`text` is the only way from text to HTML. The
page's policy (Content-Security-Policy) also allows only its own style and its own script, by their digests: even if
markup slipped through, it could not run or load anything.

Tested in tests/pages/test_markup.py.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Union

from paddle_flexckpt._version import __version__
from paddle_flexckpt.pages.style import SCRIPT, STYLE


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = Union[str, int]


def text(value: Content) -> Markup:
    """Return HTML that shows a text; :class:`Markup` stays as it is.

    Characters that print nothing, or change the direction of text, are shown by their number.
    """
    if isinstance(value, Markup):
        return value
    shown = "".join(each if each.isprintable() else _named(each) for each in str(value))
    return Markup(html.escape(shown, quote=True))


def _named(character: str) -> str:
    return "\n" if character == "\n" else character.encode("unicode_escape").decode("ascii")


def join(parts: Iterable[Content], between: str = "") -> Markup:
    """Return the HTML of several parts, one after the other, each by :func:`text`."""
    return Markup(between.join(map(text, parts)))


def element(name: str, *content: Content, **attributes: Content | None) -> Markup:
    """Return an element; attributes that are None are left out, and ``class_`` is ``class``, ``a_b`` is ``a-b``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(content)}</{name}>")


def paragraph(*content: Content, **attributes: Content | None) -> Markup:
    """Return a paragraph."""
    return element("p", *content, **attributes)


def facts(pairs: Iterable[tuple[str, Content]]) -> Markup:
    """Return names with their values."""
    shown = (element("div", element("dt", name), element("dd", value)) for name, value in pairs)
    return element("dl", *shown, class_="facts")


def bullets(items: Iterable[Content], most: int = 200) -> Markup:
    """Return a list; of many items the first ones and the number of the others."""
    every = list(items)
    shown = [element("li", item) for item in every[:most]]
    more = [element("li", f"and {len(every) - most} more")] if len(every) > most else []
    return element("ul", *shown, *more)


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Content]], numbers: Collection[int] = ()
) -> Markup:
    """Return a table, which can be scrolled by keyboard where it is wider than the page.

    Args:
        caption: Its title.
        head: The titles of the columns.
        rows: The texts of each row; the first is the row's title.
        numbers: Columns of numbers, which are aligned right.
    """
    kind = ["number" if i in numbers else None for i in range(len(head))]
    top = element("tr", *(element("th", name, scope="col", class_=each) for name, each in zip(head, kind)))
    body = (
        element(
            "tr",
            element("th", row[0], scope="row", class_=kind[0]),
            *(element("td", cell, class_=each) for cell, each in zip(row[1:], kind[1:])),
        )
        for row in rows
    )
    inner = element("caption", caption) + element("thead", top) + element("tbody", *body)
    return element(
        "div", element("table", Markup(inner)), class_="scroll", tabindex=0, role="region", aria_label=caption
    )


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: Its heading.
        content: Its HTML.
    """

    title: str
    content: Markup


def page(title: str, lead: Content, sections: Sequence[Section]) -> str:
    """Return a whole page.

    Args:
        title: Its heading, and its name.
        lead: A summary in one line.
        sections: Its parts.
    """
    policy = f"default-src 'none'; style-src '{_digest(STYLE)}'; script-src '{_digest(SCRIPT)}'"
    links = (
        element("li", element("a", section.title, href=f"#part-{number}")) for number, section in enumerate(sections)
    )
    parts = (
        element(
            "section",
            element("h2", section.title, id=f"part-{number}"),
            section.content,
            aria_labelledby=f"part-{number}",
        )
        for number, section in enumerate(sections)
    )
    head = (
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>"
    )
    body = join(
        (
            element("a", "Skip to the content", class_="skip", href="#main"),
            element("header", element("h1", title), paragraph(lead)),
            element("nav", element("ul", *links), aria_label="Parts of this page"),
            element("main", *parts, id="main"),
            element("footer", f"Made by flexckpt {__version__}."),
        ),
        "\n",
    )
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en">\n<head>\n{head}\n</head>',
            f"<body>\n{body}\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        )
    )


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
