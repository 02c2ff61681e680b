"""Pictures: PNG files of who holds what, and a loud word where matplotlib is missing."""

from __future__ import annotations

import builtins

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.pages.pictures import holders_picture
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


def test_the_axes_of_a_picture_have_whole_ranks(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    holders_picture(holders(2, ("w",), None), tmp_path / "a.png", {"write": [0.004, 0.006]})
    for axes in drawn[0].axes[:2]:
        assert not axes.axison  # matplotlib's own numbers: -0.5, 0.0, 0.5
        assert [each.get_text() for each in axes.texts][2:] == ["0", "1"]


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
