"""Progress bars: where somebody sees them, and nowhere else."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.cli import common
from paddle_flexckpt.cli.common import progress_bar
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.progress import Progress
from tests.transfer.samples import save


class Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self):
        return True


@pytest.fixture
def without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def checkpoint(tmp_path):
    save(str(tmp_path / "one"), {"w": np.ones((600, 1024), np.float32)}, world=1)
    return str(tmp_path / "one")


def test_nobody_sees_a_bar_in_a_file_or_beside_json_or_on_a_dumb_terminal(terminal, monkeypatch):
    with progress_bar(stream=io.StringIO()) as show:
        assert show is None
    with progress_bar(as_json=True, stream=terminal) as show:
        assert show is None
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar(stream=terminal) as show:
        assert show is None
    assert terminal.getvalue() == ""


def test_a_line_counts_per_cent_and_goes(terminal, without_tqdm):
    with progress_bar(stream=terminal) as show:
        show(Progress("verify", 0, 4096))
        show(Progress("verify", 1024, 4096))
    drawn = terminal.getvalue().split("\r")
    assert drawn[1:3] == ["verify   0%  0 B of 4.0 KiB", "verify  25%  1.0 KiB of 4.0 KiB"]
    assert drawn[3].strip() == "" and len(drawn[3]) == len(drawn[2])
    assert drawn[4:] == [""]


def test_the_line_goes_when_the_command_fails(terminal, without_tqdm):
    with pytest.raises(CheckpointError), progress_bar(stream=terminal) as show:
        show(Progress("verify", 1, 2))
        raise CheckpointError("damaged")
    assert terminal.getvalue().endswith(" \r")


@pytest.mark.parametrize(("no_color", "colour"), [("", "green"), ("1", None)])
def test_tqdm_draws_a_bar_in_colour_unless_no_color_is_set(terminal, monkeypatch, no_color, colour):
    pytest.importorskip("tqdm")
    monkeypatch.setenv("NO_COLOR", no_color)
    with progress_bar(stream=terminal) as show:
        show(Progress("read", 0, 1 << 20))
        bar = show.__self__._bar
        assert (bar.total, bar.colour, bar.desc) == (1 << 20, colour, "read")
        show(Progress("read", 1 << 19, 1 << 20))
        assert bar.n == 1 << 19
    assert "read:" in terminal.getvalue()
    assert ("\x1b[" in terminal.getvalue().replace("\x1b[A", "")) == (colour is not None)


@pytest.mark.parametrize("command", ["verify", "digest", "diff", "export", "convert"])
def test_commands_that_take_long_draw_one(terminal, without_tqdm, capsys, monkeypatch, checkpoint, tmp_path, command):
    monkeypatch.setattr(sys, "stderr", terminal)
    more = {"diff": [checkpoint], "export": [str(tmp_path / "out")], "convert": [str(tmp_path / "new")]}.get(
        command, []
    )
    assert main([command, checkpoint, *more]) == 0
    assert "100%" in terminal.getvalue()
    assert "%" not in capsys.readouterr().out
    if command not in ("export", "convert"):
        terminal.truncate(0)
        assert main([command, checkpoint, *more, "--json"]) == 0
        assert terminal.getvalue() == ""
        assert json.loads(capsys.readouterr().out)["schema"]["version"] == 1


def test_the_bar_does_not_import_tqdm_where_nobody_sees_it(monkeypatch):
    def never(stream):
        raise AssertionError

    monkeypatch.setattr(common, "_bar", never)
    with progress_bar(stream=io.StringIO()) as show:
        assert show is None
