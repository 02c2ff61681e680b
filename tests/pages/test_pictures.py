"""Pictures: PNG files of who holds what, and a loud word where matplotlib is missing."""

from __future__ import annotations

import builtins

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.pages.holder_pages import holders_picture
from tests.pages.samples import holders


@pytest.mark.parametrize(("ranks", "job"), [(1, None), (8, 4), (1024, 4)])
def test_a_picture_is_a_png_file(tmp_path, ranks, job):
    pytest.importorskip("matplotlib")
    # Names that matplotlib would take for formulas, and such as it has no glyphs for.
    keys = ("w", "$\\frac{", "\x00\u202e")
    holders_picture(holders(ranks, keys, job), tmp_path / "a.png", {"write": [1.0] * ranks})
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width == 1210 and 400 < height < 2500


def test_without_matplotlib_the_remedy_is_said(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValidationError, match=r"is not there .*pip install 'paddle-flexckpt\[viz\]'"):
        holders_picture(holders(2), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
