"""Reports to make pages of, keys that somebody hostile has chosen, and a strict reader of pages."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

from paddle_flexckpt.tools.comparison import DiffReport
from paddle_flexckpt.tools.differences import TensorDifference
from paddle_flexckpt.tools.holders import HoldersReport, Part, TensorHolders
from paddle_flexckpt.tools.rehearsal_report import RankReads, RehearsalReport

HOSTILE = (
    "<script>window.owned = 1</script>",
    '"><img src=x onerror="window.owned = 1">',
    "'><svg onload='window.owned = 1'>",
    "</title></style></script><script>window.owned = 1</script>",
    "javascript:window.owned=1",
    "<style>@import 'http://example.org/x.css'</style>",
    "]]><!-- <iframe src='http://example.org'></iframe>",
    "&lt;b&gt; &amp; \u202ereversed\u202c \x00\x07\udc80 \u2028",
)
_EMPTY = {"meta", "link", "br", "img", "input", "hr"}
_DRAWN = {"svg", "rect", "line", "text", "title", "desc"}


def holders(ranks: int = 8, keys: tuple[str, ...] = HOSTILE, job: int | None = 4) -> HoldersReport:
    """Tensors cut in columns by the ranks that saved them, in rows by those that need them."""
    shape, tensors = [64, ranks * 2], {}
    for key in keys:
        stored = [Part([0, 2 * r], [64, 2], None, 512, [r], [f"{r}_0.safetensors"]) for r in range(ranks)]
        needed = [Part([64 * r // job, 0], [64 // job, ranks * 2], [0, 8], 32, [r, r + job]) for r in range(job or 0)]
        tensors[key] = TensorHolders("float32", shape, stored, needed)
    size = [512 * len(keys)] * ranks
    strategy, notes = (f"tp={job}", [HOSTILE[0]]) if job else ("", [])
    return HoldersReport("run/" + HOSTILE[0], 0, None, ranks, strategy, tensors, size, [32] * 2 * (job or 0), notes)


def rehearsal(ranks: int = 8, error: str = "", groups: int | None = None) -> RehearsalReport:
    """Each rank reads from itself and from the next one; rank 1 the most."""
    kinds = np.array_split(np.arange(ranks), groups or ranks)
    found = [
        RankReads(each.tolist(), 100, 100 if n != 1 else 10 << 20, 3, 2, 100, 0, {n: 60, (n + 1) % ranks: 40})
        for n, each in enumerate(kinds)
    ]
    lists = {"missing": [HOSTILE[0]], "unexpected": [HOSTILE[1]], "maybe_fused": [HOSTILE[2]], "notes": [HOSTILE[3]]}
    maps = {"aliases": {HOSTILE[4]: HOSTILE[5]}, "cast": {HOSTILE[6]: "float32"}, "masters": {HOSTILE[7]: HOSTILE[0]}}
    shared = {name: [n * 7 for n in range(ranks)] for name in ("bytes_read", "reads", "bytes_received", "bytes_sent")}
    said = {**lists, **maps, "cooperative": shared, "seconds": {"direct": 1.5}}
    found = [] if error else found
    return RehearsalReport(f"run/{HOSTILE[1]}", 0, "tp=2", ranks, error, ranks=found, total_bytes=100 * ranks, **said)


def difference(count: int = 3) -> DiffReport:
    differing = {
        key: TensorDifference(
            "float32", [4, 4], n + 1, (n + 1) / 16, 0.5, 0.1, None if n else 3, 0, [0, n], 0.25, n + 1
        )
        for n, key in enumerate([*HOSTILE, *(f"w{n}" for n in range(count))])
    }
    unlike = {HOSTILE[0]: ["float32 [2]", "float16 [2]"]}
    return DiffReport(HOSTILE[0], HOSTILE[1], 9, [HOSTILE[2]], [HOSTILE[3]], unlike, differing, 10, 20)


class Page(HTMLParser):
    """Read a page strictly: each element is closed in its turn, and what may not be in a page is not.

    Attributes:
        elements: Names of all elements, with their attributes, in order.
        texts: Texts, with the name of the element that they are in.
    """

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _DRAWN, f"{tag} cannot be closed like that"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1], data))

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def text(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))


def check(content: str) -> Page:
    """Reads a page, and checks what holds for every one; returns it."""
    page = Page(content)
    count = {tag: len(page.named(tag)) for tag in ("script", "style", "h1", "main", "html", "title", "caption")}
    assert (count["script"], count["style"], count["h1"], count["main"]) == (1, 1, 1, 1)
    (html,) = page.named("html")
    assert html["lang"] == "en"
    (policy,) = [each["content"] for each in page.named("meta") if each.get("http-equiv")]
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[^';]+'; script-src 'sha256-[^';]+'", policy or "")
    allowed = {
        "a",
        "code",
        "div",
        "figure",
        "figcaption",
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "p",
        "pre",
        "strong",
        "span",
        "output",
    }
    allowed |= {"html", "head", "body", "header", "nav", "main", "section", "footer", "meta", "h1", "h2", "h3"}
    allowed |= {"table", "caption", "thead", "tbody", "tr", "th", "td", "script", "style", *_DRAWN}
    names = {tag for tag, _ in page.elements}
    assert names <= allowed, names - allowed
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("style", "src", "srcset", "data"), (tag, name)
            assert name != "href" or (value or "").startswith("#")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {each["href"][1:] for each in page.named("a")} <= set(ids)
    assert {each["aria-labelledby"] for each in page.named("section")} <= set(ids)
    # For who does not see it: a table has a caption and heads, a chart a name and what it says.
    assert len(page.named("table")) == count["caption"]
    assert {each.get("scope") for each in page.named("th")} <= {"col", "row"}
    assert all(each["role"] == "img" and each["aria-label"] for each in page.named("svg"))
    for kind in ("scroll", "chart"):
        for each in page.named("div"):
            if kind in (each.get("class") or "").split():
                assert each["tabindex"] == "0" and each["role"] and each["aria-label"]
    assert len([tag for tag, _ in page.texts if tag == "desc"]) == len(page.named("svg"))
    return page
