"""Draw the pictures of the documentation: those of ideas, and those of a run of the demo.

    python docs/pictures.py              # the ideas: docs/images/{key,shard,layout,manifest,survive}.svg
    python docs/pictures.py demo-output  # the demo of `make demo`: docs/images/demo-{losses,layouts}.svg

The pictures have no ground. Lines and letters have the colour of the text around them, in light and in dark.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parent / "images"
# Of each rank. White letters are readable on all of them.
RANKS = ("#2f6ab8", "#b45309", "#2f7d43", "#b03a72")
# Thin lines, in light and in dark.
LINES = ("#3f83d8", "#d9730d", "#2e9e52")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
# Where the file is an image of its own, and not a part of a page that has a colour of text.
STYLE = "<style>:root{color:#24292f}@media(prefers-color-scheme:dark){:root{color:#e6edf3}}</style>"
# By the name of a layout in the demo's results, what stands above it.
LAYOUTS = {
    "tp2": ("saved by", "TP 2"),
    "tp4_resumed": ("loaded by", "TP 4"),
    "tp1_resumed": ("loaded by", "1 rank"),
    "live_source": ("live in", "DP 2 x TP 2"),
    "live_target": ("moved to", "TP 4"),
}
MAPPED = ("blocks.0.mlp.gate.weight", "blocks.0.mlp.down.weight.moment1_0")


def text(x: float, y: float, words: str, size: float = 13, anchor: str = "start", more: str = "") -> str:
    """Return a line of text, whose baseline begins, is centred, or ends at a point."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def code(x: float, y: float, words: str, size: float = 12.5, anchor: str = "start", more: str = "") -> str:
    """Return a line of text in letters of one width."""
    return text(x, y, words, size, anchor, f'font-family="{MONO}" {more}')


def box(x: float, y: float, width: float, height: float, ranks: tuple[int, ...], label: str = "") -> str:
    """Return a part of a tensor in the colour of its rank; in stripes if two ranks have it."""
    fill = RANKS[ranks[0]] if len(ranks) == 1 else f"url(#r{ranks[0]}{ranks[1]})"
    label = label or ", ".join(map(str, ranks))
    made = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'
    middle, base = x + width / 2, y + height / 2 + 4.5
    if len(ranks) > 1:
        made += f'<rect x="{middle - 15:g}" y="{base - 15:g}" width="30" height="20" rx="4" fill="#222"/>'
    return made + text(middle, base, label, 12.5, "middle", 'fill="#fff" font-weight="600"')


def stripes(first: int, second: int) -> str:
    """Return the pattern of a part that two ranks have."""
    return (
        f'<pattern id="r{first}{second}" width="12" height="12" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="12" height="12" fill="{RANKS[first]}"/>'
        f'<rect width="6" height="12" fill="{RANKS[second]}"/></pattern>'
    )


def frame(x: float, y: float, width: float, height: float) -> str:
    """Return an empty rectangle with round corners."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="6" fill="none" stroke="currentColor" stroke-opacity=".45"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a line with a head at its end."""
    line = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {line} stroke="currentColor" stroke-width="1.5" marker-end="url(#head)"/>'


HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="currentColor"/></marker>'
)


def svg(width: int, height: int, *parts: str) -> str:
    """Return a whole picture."""
    defs = f"<defs>{HEAD}{stripes(0, 2)}{stripes(1, 3)}{stripes(0, 1)}</defs>"
    attributes = f'viewBox="0 0 {width} {height}" width="{width}" font-family="{FONT}" fill="currentColor"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>'
    return "\n".join([head, STYLE, defs, *parts, "</svg>"]) + "\n"


def key() -> str:
    """Draw two ranks that have parts of a tensor, which is one key in the checkpoint."""
    parts = []
    for rank, top in enumerate((1, 99)):
        parts += [frame(1, top, 176, 88), text(12, top + 22, f"rank {rank}", more='font-weight="600"')]
        parts += [code(12, top + 47, "mlp.up.weight"), code(12, top + 71, "….moment1_0")]
        parts += [box(120, top + 32, 46, 22, (rank,)), box(120, top + 57, 46, 22, (rank,))]
        parts += [arrow(184, top + 44, 226, 94 + 12 * (rank - 0.5))]
    parts += [frame(234, 8, 245, 172), text(246, 31, "checkpoint: one key a tensor", more='font-weight="600"')]
    for name, top in (("mlp.up.weight", 46), ("mlp.up.weight.moment1_0", 110)):
        parts += [code(246, top + 14, name), *(box(246 + 68 * rank, top + 23, 66, 22, (rank,)) for rank in (0, 1))]
        parts += [code(390, top + 38, "[256, 768]")]
    return svg(480, 188, *parts)


def shard() -> str:
    """Draw a box of a tensor, and a range of its elements."""
    side, parts = 26, []
    for left, title in ((1, "A shard is a box"), (256, "or a range of its elements")):
        parts += [text(left, 14, title, more='font-weight="600"')]
        for number in range(32):
            row, column = divmod(number, 8)
            mine = column >= 5 and row >= 1 if left == 1 else 11 <= number < 23
            fill = RANKS[0] if mine else "currentColor"
            place = f'x="{left + column * side}" y="{26 + row * side}" width="{side - 2}" height="{side - 2}"'
            parts.append(f'<rect {place} fill="{fill}" fill-opacity="{1 if mine else 0.12}"/>')
    lines = (("global_shape", "(4, 8)"), ("global_offset", "(1, 5)"), ("local_shape", "(3, 3)"))
    for number, (name, value) in enumerate(lines):
        parts.append(code(1, 150 + 19 * number, f"{name:<13} = {value}", more='xml:space="preserve"'))
    parts += [code(256, 150, "flattened_range ="), code(256, 169, "    slice(11, 23)", more='xml:space="preserve"')]
    return svg(480, 196, *parts)


def layout() -> str:
    """Draw one tensor under four layouts, and the checkpoint between them."""
    parts = [frame(174, 62, 132, 90), text(240, 104, "checkpoint", 14, "middle", 'font-weight="600"')]
    parts += [text(240, 124, "has no layout", 12.5, "middle")]
    for left, top, title, cuts in (
        (1, 24, "TP 2: columns", [(0, 0, 60, 60, (0,)), (62, 0, 60, 60, (1,))]),
        (1, 136, "DP 2: replicas", [(0, 0, 122, 60, (0, 1))]),
        (357, 24, "TP 4: columns", [(31 * rank, 0, 29, 60, (rank,)) for rank in range(4)]),
        (357, 136, "TP 2, DP 2: rows", [(0, 0, 122, 29, (0, 2)), (0, 31, 122, 29, (1, 3))]),
    ):
        parts += [text(left, top - 8, title, more='font-weight="600"')]
        parts += [box(left + x, top + y, width, height, ranks) for x, y, width, height, ranks in cuts]
    parts += [arrow(130, 60, 168, 88), arrow(130, 158, 168, 128), arrow(312, 88, 350, 60), arrow(312, 128, 350, 158)]
    parts += [text(156, 48, "save", 12.5, "middle"), text(324, 48, "load", 12.5, "middle")]
    return svg(480, 200, *parts)


def manifest() -> str:
    """Draw the files of a checkpoint: what the manifest says of the data files."""
    parts = [frame(1, 1, 478, 190), code(12, 23, "checkpoint/")]
    parts += [frame(12, 36, 250, 142), code(22, 58, "0.manifest"), text(112, 58, "written last", 12.5)]
    rows = (("key", "box", "file", "sum"), ("w", "[:, 0:4]", "0_0…", "9f3c"), ("w", "[:, 4:8]", "1_0…", "04be"))
    for number, row in enumerate((*rows, ("b", "[0:8]", "1_0…", "7ad1"))):
        for left, word in zip((22, 58, 144, 204), row):
            place = (left, 86 + 25 * number)
            parts.append(code(*place, word) if number else text(*place, word, 12.5, more='font-weight="600"'))
    for rank, (top, names) in enumerate(((36, "w"), (112, "w b"))):
        parts += [frame(310, top, 158, 66), code(320, top + 21, f"{rank}_0….safetensors", 12)]
        parts += [box(320 + 70 * number, top + 32, 66, 24, (rank,), name) for number, name in enumerate(names.split())]
    parts += [arrow(242, 107, 304, 76), arrow(242, 132, 304, 140), arrow(242, 157, 304, 156)]
    return svg(480, 192, *parts)


def survive() -> str:
    """Draw four nodes, of which one is lost, with the files in their memory, and the storage below."""
    parts = [text(1, 14, "in the memory of the nodes: step 1,240", more='font-weight="600"')]
    for node in range(4):
        left, is_lost = 1 + 121 * node, node == 1
        parts += [f'<g opacity="{0.3 if is_lost else 1}">', frame(left, 24, 115, 84)]
        parts += [text(left + 10, 46, f"node {node}", more='font-weight="600"')]
        for number, (rank, label) in enumerate(((node, "own"), ((node - 1) % 4, "copy"))):
            parts += [
                box(left + 10 + 49 * number, 58, 46, 22, (rank,)),
                text(left + 33 + 49 * number, 98, label, 12, "middle"),
            ]
        parts.append("</g>")
        if is_lost:
            parts.append(f'<path d="M{left} 24l115 84m0 -84l-115 84" stroke="{RANKS[3]}" stroke-width="3"/>')
    parts += [text(180, 132, "its file is on node 2 too", 12.5, "middle"), frame(1, 146, 478, 44)]
    parts += [text(12, 173, "in the root, on shared storage: step 1,000", more='font-weight="600"')]
    parts += [box(330 + 36 * rank, 157, 34, 22, (rank,)) for rank in range(4)]
    return svg(480, 192, *parts)


def losses(results: Path) -> str:
    """Draw the losses of a run that was not interrupted, and of those that went on from its checkpoint."""
    runs = {name: _losses(results, name) for name in ("tp2", "tp2_resumed", "tp4_resumed", "tp1_resumed")}
    whole, left, right, top, bottom = runs["tp2"], 28, 464, 34, 304
    low, high = min(whole.values()) - 0.1, max(whole.values()) + 0.1

    def at(step: int, loss: float) -> tuple[float, float]:
        x = left + (right - left) * step / max(whole)
        return round(x, 1), round(bottom - (bottom - top) * (loss - low) / (high - low), 1)

    parts = [text(0, 16, "Training goes on, on any number of ranks", 15, more='font-weight="600"')]
    for value in range(int(low) + 1, int(high) + 1):
        y = at(0, value)[1]
        parts.append(f'<path d="M{left} {y}H{right}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(text(left - 8, y + 4, str(value), 12, "end"))
    parts += [text(at(step, 0)[0], bottom + 18, str(step), 12, "middle") for step in range(0, max(whole) + 2, 10)]
    parts += [text(left, bottom + 36, "loss by training step", 12)]
    begun = at(min(runs["tp2_resumed"]), 0)[0]
    parts.append(f'<path d="M{begun} {top}V{bottom}" stroke="currentColor" stroke-opacity=".6"/>')
    parts.append(text(begun - 6, bottom - 8, "checkpoint", 12.5, "end"))
    styles = {
        "tp2": ("2 ranks, not interrupted", 'stroke="#8a94a3" stroke-opacity=".4" stroke-width="8"'),
        "tp2_resumed": ("2 ranks, resumed", f'stroke="{LINES[0]}" stroke-width="2.4"'),
        "tp4_resumed": ("4 ranks, resumed", f'stroke="{LINES[1]}" stroke-width="2.4" stroke-dasharray="9 9"'),
        "tp1_resumed": ("1 rank, resumed", f'stroke="{LINES[2]}" stroke-width="2.4" stroke-dasharray="3 6"'),
    }
    for number, (name, (title, style)) in enumerate(styles.items()):
        points = " ".join(f"{x:g},{y:g}" for x, y in (at(*each) for each in runs[name].items()))
        y = top + 14 + 22 * number
        parts.append(f'<polyline points="{points}" fill="none" stroke-linejoin="round" {style}/>')
        parts += [f'<path d="M258 {y - 4}h44" {style}/>', text(312, y, title)]
    return svg(480, 352, *parts)


def layouts(results: Path) -> str:
    """Draw which rank had which part of a weight, and of an optimizer's state, in each layout of the demo."""
    parts = [text(0, 16, "One checkpoint, any layout", 15, more='font-weight="600"')]
    for row, name in enumerate(MAPPED):
        top = 62 + 138 * row
        parts.append(code(0, top + 118, name, 12))
        for column, (file, titles) in enumerate(LAYOUTS.items()):
            left, holders = 98 * column, _holders(results, file, name)
            parts += [text(left + 43, 40 + 14 * i, word, 12, "middle") for i, word in enumerate(titles) if not row]
            for (x, y, width, height), ranks in holders.items():
                size = max(86 * width - 2, 1), max(100 * height - 2, 1)
                parts.append(box(left + 86 * x, top + 100 * y, *size, ranks))
    parts += [text(0, 344, "Numbers are ranks. Two numbers: both ranks have that part.", 12)]
    return svg(480, 352, *parts)


def _losses(results: Path, name: str) -> dict[int, float]:
    found = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["losses"]
    return {int(step): loss for step, loss in found.items()}


def _holders(results: Path, layout: str, name: str) -> dict[tuple[float, ...], tuple[int, ...]]:
    """Return by part of a matrix, as left, top, width and height of 1, the ranks that have it."""
    found: dict[tuple[float, ...], tuple[int, ...]] = {}
    for path in sorted(results.glob(f"{layout}.layout.rank*.json")):
        shard = json.loads(path.read_text(encoding="utf-8"))[name]
        rows, columns = shard["global_shape"]
        (top, left), (height, width) = shard["global_offset"], shard["local_shape"]
        part = (left / columns, top / rows, width / columns, height / rows)
        found[part] = (*found.get(part, ()), int(path.stem.rpartition("rank")[2]))
    return found


def main(argv: list[str] | None = None) -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demo", type=Path, nargs="?", help="the output of `make demo`, to draw it; else the ideas")
    demo = parser.parse_args(argv).demo
    IMAGES.mkdir(exist_ok=True)
    if demo is None:
        made = {"key": key(), "shard": shard(), "layout": layout(), "manifest": manifest()}
        made["survive"] = survive()
    else:
        made = {"demo-losses": losses(demo / "results"), "demo-layouts": layouts(demo / "results")}
    for name, picture in made.items():
        (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
