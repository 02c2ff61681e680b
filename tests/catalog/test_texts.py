"""Texts for people: what a terminal would carry out is not among them."""

from __future__ import annotations

import json

import pytest

from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.texts import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("größe 权重 'x'", "größe 权重 'x'"),
        ("\x1b[31mred\x1b[0m", "\\u001b[31mred\\u001b[0m"),
        ("a\x9b2Jb\x7f", "a\\u009b2Jb\\u007f"),
        ("one\ntwo\r\t", "one\\u000atwo\\u000d\\u0009"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\udb40\\udc41"),
    ],
)
def test_what_does_not_show_is_escaped(text, shown):
    assert printable(text) == shown
    assert json.loads(f'"{printable(text)}"') == text
    assert printable_lines(f"{text}\n") == f"{shown}\n".replace("\\u000a", "\n")
    assert listed(["a", text]) == f"a, {shown}"
