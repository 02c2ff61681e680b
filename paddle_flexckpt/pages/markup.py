"""Make a self-contained HTML page: it loads nothing, and shown text cannot become markup.

Keys and paths come from checkpoints that anybody may have made. :func:`text` is the only way from text to HTML. The
page's policy (Content-Security-Policy) also allows only its own style and its own script, by their digests: even if
markup slipped through, it could not run or load anything.

Tested in tests/pages/test_markup.py and tests/pages/test_style.py.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Union

from paddle_flexckpt._version import __version__
from paddle_flexckpt.catalog.texts import format_bytes

#: Shades of a heat map, least first: background and text.
LEVELS = 6
#: Colours that tell ranks apart.
COLOURS = 8
#: A table of this many rows has a filter; one of more rows than ``LONG`` scrolls in a box.
FILTERED, LONG = 8, 24
#: A text of more characters may be broken anywhere.
WIDE = 24
#: The colours in the light and in the dark scheme, by name. Text on a background ``x`` has the colour ``x-text``; all
#: else is on ``ground``. Each means one thing on all pages: blue is an amount, red (``far``) a rank that stands out,
#: and any other colour a rank, whose number is on it. Colour-blind people can tell them apart.
PALETTE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ground": ("#ffffff", "#14171c"),
        "text": ("#1b1f24", "#e6e9ee"),
        "quiet": ("#57606a", "#a3acb8"),
        "link": ("#0a58ca", "#8ab8ff"),
        "line": ("#8c959f", "#6b7683"),
        "panel": ("#f3f5f8", "#1e232b"),
        "panel-text": ("#1b1f24", "#e6e9ee"),
        "bar": ("#2f6ca3", "#5b9bd5"),
        "far": ("#b42318", "#ff8a75"),
        "heat-1": ("#dbe9f6", "#1d2f44"),
        "heat-1-text": ("#111111", "#ffffff"),
        "heat-2": ("#b3d1ec", "#244b70"),
        "heat-2-text": ("#111111", "#ffffff"),
        "heat-3": ("#84b4de", "#2f6ca3"),
        "heat-3-text": ("#111111", "#ffffff"),
        "heat-4": ("#5594cf", "#5b9bd5"),
        "heat-4-text": ("#111111", "#111111"),
        "heat-5": ("#215f9c", "#93c1e8"),
        "heat-5-text": ("#ffffff", "#111111"),
        "heat-6": ("#0b3a69", "#d3e6f7"),
        "heat-6-text": ("#ffffff", "#111111"),
        "rank-1": ("#f7c4a2", "#c38e69"),
        "rank-1-text": ("#111111", "#111111"),
        "rank-2": ("#ccd966", "#96a329"),
        "rank-2-text": ("#111111", "#111111"),
        "rank-3": ("#c49dd4", "#9d7eaa"),
        "rank-3-text": ("#111111", "#111111"),
        "rank-4": ("#73ccb2", "#36967a"),
        "rank-4-text": ("#111111", "#111111"),
        "rank-5": ("#f2e6a6", "#beb16d"),
        "rank-5-text": ("#111111", "#111111"),
        "rank-6": ("#d4c7f4", "#9e90c0"),
        "rank-6-text": ("#111111", "#111111"),
        "rank-7": ("#bfbf40", "#888800"),
        "rank-7-text": ("#111111", "#111111"),
        "rank-8": ("#fff6d3", "#ccc29d"),
        "rank-8-text": ("#111111", "#111111"),
    }
)


def _variables(scheme: int) -> str:
    return "".join(f"--{name}:{colours[scheme]};" for name, colours in PALETTE.items())


_SHADES = "".join(
    f".{name}{{fill:var(--{name})}}text.{name}{{fill:var(--{name}-text)}}.key.{name}{{background:var(--{name})}}"
    for name in (*(f"heat-{i + 1}" for i in range(LEVELS)), *(f"rank-{i + 1}" for i in range(COLOURS)))
)

STYLE = f""":root{{{_variables(0)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:78rem;padding:1rem 1.25rem 3rem;background:var(--ground);color:var(--text);
font:16px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}}
header p,main>section>p,li{{max-width:52rem}}
h1{{font-size:1.6rem;line-height:1.25;margin:.5rem 0}}
h2{{font-size:1.25rem;margin:2.25rem 0 .5rem;border-bottom:1px solid var(--line);padding-bottom:.25rem}}
h3{{font-size:1rem;margin:1.5rem 0 .25rem}}.pair .quiet{{margin:0}}
a{{color:var(--link)}}
.skip{{position:absolute;left:-99rem}}
.skip:focus{{left:1rem;top:.5rem;background:var(--ground);padding:.5rem}}
nav ul{{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;margin:0;padding:0}}
.facts{{display:flex;flex-wrap:wrap;gap:.5rem;margin:1rem 0}}
.facts div{{background:var(--panel);color:var(--panel-text);border-radius:.4rem;padding:.5rem .8rem}}
dt{{font-size:.85rem}}dd{{margin:0;font-weight:600}}
pre{{white-space:pre-wrap;background:var(--panel);color:var(--panel-text);padding:.75rem;border-radius:.4rem}}
.scroll{{overflow:auto;margin:.75rem 0}}.long{{max-height:max(28rem,80vh)}}
table{{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}}
caption{{text-align:left;color:var(--quiet);padding-bottom:.25rem;max-width:calc(100vw - 4rem)}}
th,td{{text-align:left;padding:.2rem .9rem .2rem 0;vertical-align:top;border-bottom:1px solid var(--line)}}
thead th{{position:sticky;top:0;background:var(--ground);white-space:nowrap}}
tbody th{{font-weight:400}}.wide{{overflow-wrap:anywhere;min-width:min(14rem,50vw)}}
.number{{text-align:right;white-space:nowrap}}
th button{{all:unset;cursor:pointer}}th button::after{{content:"\\2195";color:var(--quiet);padding-left:.2em}}
th[aria-sort=ascending] button::after{{content:"\\2191";color:var(--text)}}
th[aria-sort=descending] button::after{{content:"\\2193";color:var(--text)}}
th button:focus-visible{{outline:3px solid var(--link)}}
.filter{{display:block;margin:.75rem 0 -.5rem;font-size:.9rem}}
.filter input{{font:inherit;color:inherit;background:var(--ground);border:1px solid var(--line);border-radius:.3rem;
padding:.2rem .5rem;width:min(20rem,60%);margin:0 .5rem}}
figure{{margin:1rem 0}}figcaption,.quiet{{color:var(--quiet);font-size:.9rem}}
.charts,.pair{{display:flex;flex-wrap:wrap;gap:0 2rem;align-items:flex-start}}
.charts>*,.pair>*{{max-width:100%}}.charts .long{{max-height:20rem}}
.charts figcaption,.pair figcaption{{max-width:20rem}}
.pair figure{{margin:.25rem 0}}
svg{{display:block}}.chart{{overflow-x:auto}}
svg text{{pointer-events:none;font:12px system-ui,sans-serif;fill:var(--text)}}
svg .middle{{text-anchor:middle}}svg .end{{text-anchor:end}}svg .centre{{dominant-baseline:central}}
.bar{{fill:var(--bar)}}.far{{fill:var(--far)}}text.far{{fill:var(--far);font-weight:600}}
.frame{{fill:none;stroke:var(--line)}}.key.bar{{background:var(--bar)}}.key.far{{background:var(--far)}}
.median{{stroke:var(--text);stroke-dasharray:4 3}}
.part{{stroke:var(--ground);stroke-width:1}}
.at{{stroke:var(--far);stroke-width:3;paint-order:stroke}}
.chart output{{display:block;min-height:1.5em;font-size:.9rem}}
:focus-visible{{outline:3px solid var(--link);outline-offset:2px}}
.legend{{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;margin:.25rem 0;padding:0;font-size:.85rem}}
.key{{display:inline-block;width:1em;height:1em;margin-right:.35em;vertical-align:-.1em;border:1px solid var(--line)}}
footer{{margin-top:3rem;color:var(--quiet);font-size:.85rem}}
{_SHADES}
@media print{{.skip,nav,.filter{{display:none}}body{{max-width:none}}.long{{max-height:none}}}}
"""

# Arrow keys go from mark to mark, and what a mark says is shown and read out; a pointer does the same. The head of a
# column sorts by it, the largest number or the first text on top; long tables have a filter. All text goes in as text.
SCRIPT = """
for (const chart of document.querySelectorAll(".chart")) {
  const rows = Number(chart.dataset.rows), columns = Number(chart.dataset.columns);
  const marks = new Map([...chart.querySelectorAll("[data-i]")].map(mark => [Number(mark.dataset.i), mark]));
  const shown = chart.querySelector("output"), across = chart.dataset.across.split("|");
  const down = chart.dataset.down ? chart.dataset.down.split("|") : null;
  let at = -1;
  const show = next => {
    if (at >= 0 && marks.has(at)) marks.get(at).classList.remove("at");
    at = next;
    const mark = marks.get(at);
    if (mark) mark.classList.add("at");
    shown.textContent = mark ? mark.querySelector("title").textContent
      : (down ? down[Math.floor(at / columns)] + " to " : "") + across[at % columns] + ": nothing";
  };
  const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  chart.addEventListener("keydown", event => {
    let row = Math.max(0, Math.floor(at / columns)), column = at < 0 ? -1 : at % columns;
    if (event.key in step) {
      row += step[event.key][0];
      column = Math.max(0, column + step[event.key][1]);
      if (row < 0 || row >= rows || column >= columns) { event.preventDefault(); return; }
    } else if (event.key === "Home") column = 0;
    else if (event.key === "End") column = columns - 1;
    else return;
    event.preventDefault();
    show(row * columns + column);
  });
  chart.addEventListener("pointerover", event => {
    const mark = event.target.closest("[data-i]");
    if (mark) show(Number(mark.dataset.i));
  });
}
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  if (rows.length < 2) continue;
  const key = (row, column) => {
    const cell = row.cells[column], value = Number(cell.dataset.v);
    return Number.isNaN(value) ? cell.textContent : value;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : typeof a === "number" ? 1 : typeof b === "number" ? -1 : a.localeCompare(b, "en", {numeric: true});
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      const sign = order === "ascending" ? 1 : -1;
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      rows.sort((a, b) => sign * compare(key(a, column), key(b, column)));
      body.append(...rows);
    });
  });
  if (rows.length < FILTERED) continue;
  const [line, label, input, count] = ["p", "label", "input", "output"].map(name => document.createElement(name));
  line.className = "filter";
  input.type = "search";
  label.append("Filter", input);
  line.append(label, count);
  table.closest(".scroll").before(line);
  const texts = new Map(rows.map(row => [row, [...row.cells].map(each => each.textContent).join(" ").toLowerCase()]));
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\\s+/);
    for (const row of rows) row.hidden = !words.every(word => texts.get(row).includes(word));
    count.textContent = rows.filter(row => !row.hidden).length + " of " + rows.length + " rows";
  });
}
""".replace("FILTERED", str(FILTERED))


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = Union[str, int]


class Amount(NamedTuple):
    """A cell of a table that is sorted by a number; ``text`` shows it, perhaps rounded."""

    text: Content
    value: float


def of_size(size: int) -> Amount:
    """Return a number of bytes as the cell of a table."""
    return Amount(format_bytes(size), size)


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


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Content | Amount]]) -> Markup:
    """Return a table, which can be sorted, filtered, and scrolled by keyboard where it is wider than the page.

    Args:
        caption: Its title.
        head: The titles of the columns.
        rows: The cells of each row; the first is the row's title. Numbers and amounts are aligned right.
    """
    every = list(rows)
    columns = zip(*every) if every else [()] * len(head)
    kinds = ["number" if any(isinstance(each, (int, Amount)) for each in cells) else None for cells in columns]
    top = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in zip(head, kinds)))
    body = (element("tr", *map(_cell, row, kinds, [0, *[1] * len(row)])) for row in every)
    inner = element("caption", caption) + element("thead", top) + element("tbody", *body)
    kind = "scroll long" if len(every) > LONG else "scroll"
    return element("div", element("table", Markup(inner)), class_=kind, tabindex=0, role="region", aria_label=caption)


def _cell(cell: Content | Amount, kind: str | None, column: int) -> Markup:
    shown, value = cell if isinstance(cell, Amount) else (cell, cell if isinstance(cell, int) else None)
    # As scripts write it.
    number = None if value is None else f"{value:.17g}".replace("inf", "Infinity")
    name, scope = ("td", None) if column else ("th", "row")
    return element(name, shown, scope=scope, class_=kind or ("wide" if len(str(shown)) > WIDE else None), data_v=number)


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
