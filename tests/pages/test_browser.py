"""Pages in a browser: nothing is loaded and nothing hostile runs, they are read by keyboard, and fit every screen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paddle_flexckpt.pages.holder_pages import holders_page
from paddle_flexckpt.pages.report_pages import diff_page, rehearsal_page
from tests.pages import browser as browsers
from tests.pages.samples import HOSTILE, difference, holders, rehearsal

pytestmark = pytest.mark.skipif(
    browsers.find() is None, reason="PAGES ARE NOT TRIED IN A BROWSER: no Chromium. Remedy: apt-get install chromium"
)

PAGES = {
    "holders": lambda ranks: holders_page(holders(ranks), {"write": [1.0] * (ranks - 1) + [5.0]}),
    "rehearsal": lambda ranks: rehearsal_page(rehearsal(ranks)),
    "failure": lambda ranks: rehearsal_page(rehearsal(ranks, error="no such key\n" + HOSTILE[0] * 20)),
    "diff": lambda ranks: diff_page(difference(ranks)),
}
# Texts whose colour has a contrast below 4.5 with the ground behind them; those in charts are tested by their palette.
POOR = """(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("svg, script")) continue;
    let ground = element;
    while (ground && (parts(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
    if (!ground) { found.push("no ground"); break; }
    const both = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(c => light(parts(c)));
    const contrast = (Math.max(...both) + .05) / (Math.min(...both) + .05);
    seen += 1;
    if (contrast < 4.5) found.push([element.tagName, contrast, walker.currentNode.data]);
  }
  return [seen, found];
})()"""


@pytest.fixture(scope="module")
def browser():
    with browsers.running(browsers.find()) as found:
        yield found


@pytest.fixture(params=PAGES)
def made(request, tmp_path):
    def make(ranks: int):
        path = tmp_path / f"{request.param}{ranks}.html"
        path.write_text(PAGES[request.param](ranks), encoding="utf-8")
        return path

    return make


@pytest.mark.parametrize("ranks", [8, 1024])
def test_nothing_is_loaded_and_nothing_hostile_runs(browser, made, ranks):
    path = made(ranks)
    browser.open(path)
    assert browser.run("window.owned") is None
    assert browser.run("document.scripts.length") == 1
    told = [(name, said) for name, said in browser.events if name in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert told == []
    asked = [said["request"]["url"] for name, said in browser.events if name == "Network.requestWillBeSent"]
    assert asked == [f"file://{path}"]


def test_the_policy_stops_what_is_not_the_pages_own(browser, tmp_path):
    """As if something had not been escaped: the tests above could not tell it from text."""
    mark, more = "<h1>", "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'><h1>"
    content = holders_page(holders(2))
    for name, text in (("with", content), ("without", content.replace("Content-Security-Policy", "nothing"))):
        (tmp_path / name).with_suffix(".html").write_text(text.replace(mark, more, 1), encoding="utf-8")
    browser.open(tmp_path / "with.html")
    assert browser.run("window.owned") is None
    browser.open(tmp_path / "without.html")
    assert browser.run("window.owned") == 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read(browser, made, dark):
    browser.open(made(8), dark=dark)
    seen, poor = browser.run(POOR)
    assert seen > 10 and poor == []
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_page_is_as_wide_as_the_screen(browser, made, ranks, width):
    browser.open(made(ranks), width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("ArrowRight",), "rank 0: 1.0 s"),
        (("ArrowRight", "ArrowRight"), "rank 1: 1.0 s"),
        (("End",), "rank 7: 5.0 s"),
        (("End", "ArrowRight", "ArrowLeft"), "rank 6: 1.0 s"),
    ],
)
def test_the_keyboard_reaches_each_rank(browser, tmp_path, keys, said):
    (tmp_path / "a.html").write_text(PAGES["holders"](8), encoding="utf-8")
    browser.open(tmp_path / "a.html")
    for _ in range(50):
        browser.press("Tab")
        if browser.run("document.activeElement.className") == "chart":
            break
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith("write by rank")
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press(*keys)
    assert browser.run("document.activeElement.querySelector('output').textContent") == said.replace(".0 ", " ")


def test_the_keyboard_goes_through_a_heat_map(browser, tmp_path):
    (tmp_path / "a.html").write_text(rehearsal_page(rehearsal(8)), encoding="utf-8")
    browser.open(tmp_path / "a.html")
    browser.run("document.querySelector('.chart[data-rows=\"8\"]').focus()")
    said = "document.activeElement.querySelector('output').textContent"
    browser.press("ArrowRight")
    assert browser.run(said) == "rank 0 to rank 0: 60 B"
    browser.press("ArrowRight")
    assert browser.run(said) == "rank 0 to rank 1: nothing"
    browser.press("ArrowDown")
    assert browser.run(said) == "rank 1 to rank 1: 60 B"
    browser.press("Home", "ArrowUp", "ArrowUp")
    assert browser.run(said) == "rank 0 to rank 0: 60 B"


def test_a_screen_reader_is_told_what_there_is(browser, made):
    browser.open(made(8))
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named: dict[str, list[str]] = {}
    for node in nodes:
        if not node["ignored"]:
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert [each for each in named["heading"] if not each] == []
    for role in ("table", "image", "group", "region"):
        assert [each for each in named.get(role, []) if not each] == [], role
    assert len(named["main"]) == len(named["navigation"]) == 1
    assert len(named.get("table", [])) == browser.run("document.querySelectorAll('table').length")


# -- tables ----------------------------------------------------------------------------------------------------------

VALUES = "document.querySelector('#part-1 ~ .scroll table')"


def column(browser, number: int) -> list[str]:
    return browser.run(
        f"[...{VALUES}.tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[{number}].textContent.trim())"
    )


@pytest.fixture
def differences(browser, tmp_path):
    """A table of nine rows, whose numbers are rounded, and one of which has none."""
    report = difference(1)
    sizes = [0.1, 1e-20, 3.0, 0.10001, 20.0, 5e-7, 0.0999, 100.0, 2.0]
    differing = {
        f"layer.{n}.w": replace(each, max_difference=size, max_ulps=None if n == 3 else 10 - n)
        for n, (each, size) in enumerate(zip(report.differing.values(), sizes))
    }
    (tmp_path / "a.html").write_text(diff_page(replace(report, differing=differing)), encoding="utf-8")
    browser.open(tmp_path / "a.html")
    heads = browser.run(f"[...{VALUES}.tHead.rows[0].cells].map(e => e.textContent)")
    return heads, [sizes[n] for n in sorted(range(9), key=lambda n: -sizes[n])]


def test_a_click_on_a_head_sorts_by_the_exact_numbers(browser, differences):
    heads, falling = differences
    at = heads.index("Largest")
    head = f"{VALUES}.tHead.rows[0].cells[{at}]"
    for order, sign in (("descending", 1), ("ascending", -1), ("descending", 1)):
        browser.click(f"{head}.querySelector('button')")
        assert column(browser, at) == [f"{each:.3g}" for each in falling][::sign]
        assert browser.run(f"{head}.getAttribute('aria-sort')") == order
    browser.click(f"{VALUES}.tHead.rows[0].cells[{heads.index('ULPs')}].querySelector('button')")
    assert column(browser, heads.index("ULPs")) == ["10", "9", "8", "6", "5", "4", "3", "2", "-"]
    assert browser.run(f"{VALUES}.querySelectorAll('[aria-sort]').length") == 1


def test_the_keyboard_sorts_and_filters(browser, differences):
    browser.run("document.querySelector('.filter input').focus()")
    browser.type("LAYER.7  w")
    assert column(browser, 0) == ["layer.7.w"]
    assert browser.run("document.querySelector('.filter output').textContent") == "1 of 9 rows"
    browser.run("document.activeElement.select()")
    browser.type("no such row")
    assert column(browser, 0) == []
    browser.run("document.activeElement.select()")
    browser.type("layer")
    # To the table, which scrolls, and its first head.
    browser.press("Tab", "Tab")
    assert browser.run("document.activeElement.textContent") == "Key"
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Enter")
    assert column(browser, 0) == [f"layer.{n}.w" for n in range(9)]
    browser.press("Enter")
    assert column(browser, 0) == [f"layer.{n}.w" for n in reversed(range(9))]


def test_without_scripts_a_table_is_a_plain_table(browser, tmp_path):
    (tmp_path / "a.html").write_text(diff_page(difference(1)), encoding="utf-8")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(tmp_path / "a.html")
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.run("document.querySelectorAll('button, input').length") == 0
    assert len(column(browser, 0)) == 9


def test_tables_of_few_rows_use_the_page(browser, tmp_path):
    (tmp_path / "a.html").write_text(diff_page(difference(1)), encoding="utf-8")
    browser.open(tmp_path / "a.html", width=1280)
    boxes = "[...document.querySelectorAll('.scroll')]"
    assert browser.run(f"{boxes}.every(e => e.scrollHeight <= e.clientHeight && e.scrollWidth <= e.clientWidth)")
    assert browser.run(f"{boxes}.length") >= 2
    (tmp_path / "b.html").write_text(diff_page(difference(100)), encoding="utf-8")
    browser.open(tmp_path / "b.html", width=1280)
    assert browser.run(f"{boxes}[0].clientHeight <= innerHeight && {boxes}[0].scrollHeight > innerHeight")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("ranks", [4, 1024])
@pytest.mark.parametrize("name", ["holders", "rehearsal"])
def test_letters_of_charts_have_one_size(browser, tmp_path, name, ranks, width):
    (tmp_path / "a.html").write_text(PAGES[name](ranks), encoding="utf-8")
    browser.open(tmp_path / "a.html", width=width)
    size = "parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a"
    sizes = browser.run(f"[...document.querySelectorAll('svg text')].map(e => {size})")
    assert len(sizes) >= 10 and set(sizes) == {12}
