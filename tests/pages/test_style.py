"""Colours can be told apart from what they stand on, in both schemes."""

from __future__ import annotations

import pytest

from paddle_flexckpt.pages.markup import COLOURS, LEVELS, PALETTE, SCRIPT, STYLE


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


def test_nothing_is_loaded():
    for content in (STYLE, SCRIPT):
        assert "url(" not in content and "@import" not in content and "//" not in content
    for writes_markup in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval"):
        assert writes_markup not in SCRIPT
