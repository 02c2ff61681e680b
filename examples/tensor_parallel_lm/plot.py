"""Draws the picture of the demo: the loss curves, and which rank held which part of a tensor."""

from __future__ import annotations

import json
import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.patches import Patch, Rectangle

RANK_COLORS = ("#3b6fb6", "#e08a2e", "#4a9d5b", "#b5487a")
INK = "#222222"
TITLE_HEIGHT = 0.95
TITLE_STYLE = {"fontsize": 13.5, "fontweight": "bold"}
# (phase, label, colour, line style, line width), the widest line first so that the others stay visible on top of it.
CURVES = (
    ("tp2", "TP2, uninterrupted", "#c9ced6", "-", 7.0),
    ("tp2_resumed", "TP2, resumed", "#3b6fb6", "-", 2.4),
    ("tp4_resumed", "TP4, resumed", "#e08a2e", (0, (4, 3)), 2.4),
    ("tp1_resumed", "TP1, resumed", "#2c7a3f", (0, (1, 2.2)), 2.4),
)
# Layouts in the order of the columns of the map: (name of the layout files, title).
LAYOUTS = (
    ("tp2", "saved by\nTP2"),
    ("tp4_resumed", "loaded by\nTP4"),
    ("tp1_resumed", "loaded by\nTP1"),
    ("live_source", "live model\nDP2 × TP2"),
    ("live_target", "resharded into\nTP4 in memory"),
)
# Rows of the map: a parameter cut along its columns, and an AdamW state of a parameter cut along its rows.
MAPPED = (
    ("blocks.0.mlp.gate.weight", "a column-parallel weight"),
    ("blocks.0.mlp.down.weight.moment1_0", "AdamW's first moment of a row-parallel weight"),
)


def _read(results: pathlib.Path, name: str) -> dict:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def _layout(results: pathlib.Path, name: str, key: str) -> dict[int, dict]:
    """Returns what each rank wrote down about its ShardedWeight of a tensor, by rank."""
    shards = {}
    for path in results.glob(f"{name}.layout.rank*.json"):
        rank = int(path.stem.rpartition("rank")[2])
        shards[rank] = json.loads(path.read_text(encoding="utf-8"))[key]
    return dict(sorted(shards.items()))


def _draw_curves(ax: Axes, results: pathlib.Path, checkpoint_step: int) -> None:
    reference = _read(results, CURVES[0][0])["losses"]
    for phase, label, color, style, width in CURVES:
        losses = _read(results, phase)["losses"]
        if phase != CURVES[0][0]:
            difference = max(abs(loss - reference[step]) for step, loss in losses.items())
            label += f"  (max |difference| {difference:.2g})"
        ax.plot([int(step) for step in losses], losses.values(), color=color, linestyle=style, lw=width, label=label)
    ax.axvline(checkpoint_step - 0.5, color="#8a8f98", linewidth=1.2)
    ax.annotate(
        "checkpoint",
        xy=(checkpoint_step - 0.5, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color="#5c626b",
    )
    ax.set_xlabel("training step")
    ax.set_ylabel("loss (nats per byte)")
    ax.grid(color="#e6e8eb", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper right", handlelength=3.2, facecolor="white", edgecolor="none", framealpha=1.0)


def _draw_shards(ax: Axes, shards: dict[int, dict]) -> None:
    """Draws a matrix as the ranks describe their parts; a part that several ranks hold is hatched in their colours."""
    rows, columns = next(iter(shards.values()))["global_shape"]
    holders: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, shard in shards.items():
        holders.setdefault((*shard["global_offset"], *shard["local_shape"]), []).append(rank)
    for (top, left, height, width), ranks in holders.items():
        fill = {"facecolor": RANK_COLORS[ranks[0]], "linewidth": 0}
        if len(ranks) > 1:
            fill |= {"edgecolor": RANK_COLORS[ranks[1]], "hatch": "//"}
        ax.add_patch(Rectangle((left, top), width, height, **fill))
        ax.add_patch(Rectangle((left, top), width, height, facecolor="none", edgecolor="white", linewidth=2.5))
        ax.text(
            left + width / 2,
            top + height / 2,
            "\n".join(map(str, ranks)) if width < columns else ", ".join(map(str, ranks)),
            color="white",
            ha="center",
            va="center",
            fontweight="bold",
            fontsize=12,
            linespacing=1.3,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": INK, "linewidth": 0} if len(ranks) > 1 else None,
        )
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    ax.set_xticks([0, columns])
    ax.set_yticks([0, rows])
    ax.tick_params(length=0, labelsize=9, colors="#5c626b")
    for labels, alignments in ((ax.get_xticklabels(), ("left", "right")), (ax.get_yticklabels(), ("top", "bottom"))):
        for label, alignment in zip(labels, alignments):
            (label.set_ha if alignment in ("left", "right") else label.set_va)(alignment)
    ax.spines[:].set_visible(False)


def _draw_map(figure: Figure, region: SubplotSpec, results: pathlib.Path) -> None:
    grid = region.subgridspec(len(MAPPED), len(LAYOUTS), wspace=0.36, hspace=0.62)
    for row, (key, kind) in enumerate(MAPPED):
        axes = [figure.add_subplot(grid[row, column]) for column in range(len(LAYOUTS))]
        for ax, (name, title) in zip(axes, LAYOUTS):
            _draw_shards(ax, _layout(results, name, key))
            ax.set_title(title, fontsize=10.5, pad=7)
        heading = f"{key}: {kind}"
        axes[0].annotate(
            heading, (0, 1), (0, 44), xycoords="axes fraction", textcoords="offset points", fontsize=12, color="#5c626b"
        )
    keys = [Patch(facecolor=color, label=f"rank {rank}") for rank, color in enumerate(RANK_COLORS)]
    keys.append(Patch(facecolor="#c9ced6", edgecolor="#7d838c", hatch="//", linewidth=0, label="held by two ranks"))
    left, right = axes[0].get_position().x0, axes[-1].get_position().x1
    figure.text(left, TITLE_HEIGHT, "Which rank held which part of a tensor", **TITLE_STYLE)
    figure.legend(
        handles=keys, loc="lower center", bbox_to_anchor=((left + right) / 2, 0.005), ncols=len(keys), frameon=False
    )


def draw(results: pathlib.Path, checkpoint_step: int, path: pathlib.Path) -> None:
    """Draws the picture.

    Args:
        results: Folder with the files that the phases wrote.
        checkpoint_step: Number of steps trained before the checkpoint.
        path: PNG file to write.
    """
    style = {"font.size": 11, "text.color": INK, "axes.labelcolor": INK, "hatch.linewidth": 4.5}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(16.5, 7.2), dpi=110, facecolor="white")
        columns = figure.add_gridspec(1, 2, width_ratios=[0.9, 1.25], wspace=0.13, left=0.045, right=0.985)
        columns.update(top=0.925, bottom=0.085)
        ax = figure.add_subplot(columns[0])
        _draw_curves(ax, results, checkpoint_step)
        title = "Loss of the uninterrupted run and of the resumed runs"
        figure.text(ax.get_position().x0, TITLE_HEIGHT, title, **TITLE_STYLE)
        maps = figure.add_gridspec(1, 2, width_ratios=[0.9, 1.25], wspace=0.13, left=0.045, right=0.985)
        maps.update(top=0.8, bottom=0.125)
        _draw_map(figure, maps[1], results)
        figure.savefig(path)
        plt.close(figure)
