"""Colours can be told apart from what they stand on, in both schemes."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest

from paddle_flexckpt.pages.markup import COLOURS, LEVELS, PALETTE, SCRIPT, STYLE

AMOUNTS = [f"heat-{level + 1}" for level in range(LEVELS)]
RANKS = [f"rank-{rank + 1}" for rank in range(COLOURS)]


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted([luminance(one), luminance(two)])
    return (high + 0.05) / (low + 0.05)


def test_the_measure_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(scheme):
    colours = {name: both[scheme] for name, both in PALETTE.items()}
    grounds = [name for name in colours if f"{name}-text" in colours]
    assert len(grounds) == 1 + LEVELS + COLOURS
    poor = {name: contrast(colours[name], colours[f"{name}-text"]) for name in grounds}
    poor.update({name: contrast(colours[name], colours["ground"]) for name in ("text", "quiet", "link", "far")})
    assert {name: value for name, value in poor.items() if value < 4.5} == {}


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_marks_can_be_seen(scheme):
    colours = {name: both[scheme] for name, both in PALETTE.items()}
    assert {name for name in ("bar", "far", "line") if contrast(colours[name], colours["ground"]) < 3} == set()
    shades = [luminance(colours[f"heat-{level}"]) for level in range(1, LEVELS + 1)]
    assert shades == sorted(shades, reverse=scheme == 0)


# How colours look without one kind of cone (Machado and others, 2009), in linear light.
SEEN = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
_TO_XYZ = np.asarray([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, seen) -> np.ndarray:
    """Return the CIE L*a*b* of a colour as it is seen."""
    parts = np.asarray([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = _TO_XYZ @ np.clip(seen @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.asarray([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_of_one_chart_are_told_apart_by_all(scheme, seen):
    found = {name: lab(both[scheme], np.asarray(SEEN[seen])) for name, both in PALETTE.items()}

    def apart(one: str, other: str) -> float:
        return float(np.linalg.norm(found[one] - found[other]))

    assert apart("bar", "far") > 20
    for rank in range(COLOURS):
        name, others = f"rank-{rank + 1}", [f"rank-{(rank + n) % COLOURS + 1}" for n in range(1, COLOURS)]
        # Neighbouring ranks are beside each other.
        assert apart(name, others[0]) > 12 and min(apart(name, other) for other in others) > 5


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_blue_is_an_amount_and_red_a_rank_that_stands_out(scheme):
    hue = {}
    for name, both in PALETTE.items():
        red, green, blue = (int(both[scheme][i : i + 2], 16) / 255 for i in (1, 3, 5))
        hue[name] = 360 * colorsys.rgb_to_hls(red, green, blue)[0]
    assert {name: each for name, each in hue.items() if name in ("bar", *AMOUNTS) and not 195 < each < 225} == {}
    assert hue["far"] < 15
    assert {
        name: each for name, each in hue.items() if name in RANKS and not 20 < each < 195 and not 225 < each < 330
    } == {}


def test_nothing_is_loaded():
    for content in (STYLE, SCRIPT):
        assert "url(" not in content and "@import" not in content and "//" not in content
    for writes_markup in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval"):
        assert writes_markup not in SCRIPT
