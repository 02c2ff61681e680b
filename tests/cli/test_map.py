"""flexckpt map: its text, its JSON, and how it refuses what makes no sense."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.cli.rehearse import read_seconds
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.strategy import parse_strategy
from tests.pages.samples import HOSTILE, check
from tests.saved import data_file
from tests.tools.rehearsed import save
from tests.tools.test_models import decoder
from tests.transfer.samples import save as save_values

KEY = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "one", Layout(decoder(), parse_strategy("tp=2")))
    return str(tmp_path / "one")


def test_each_part_has_a_line_before_and_after(checkpoint, capsys):
    assert main(["map", checkpoint, KEY, "--to", "tp=4,dp=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{KEY}: bfloat16 [16, 8]"
    assert [line.split() for line in lines[1:3]] == [
        ["stored", "[0:8,", "0:8]", "rank", "0", "128", "B", data_file(checkpoint)],
        ["stored", "[8:16,", "0:8]", "rank", "1", "128", "B", data_file(checkpoint, 1)],
    ]
    assert lines[3].split() == ["needed", "[0:4,", "0:8]", "ranks", "0,", "4", "64", "B"]
    assert len(lines) == 1 + 2 + 4 + 1
    assert lines[-1].endswith("under tp=4,dp=2 512 B needed by 8 ranks, at most 64 B, by rank 0")


def test_without_a_job_only_the_checkpoint_is_told_and_all_keys(checkpoint, capsys):
    assert main(["map", checkpoint]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("  needed") for line in lines)
    assert sum(not line.startswith("  ") for line in lines) == 90 + 1


def test_json_has_all(checkpoint, capsys):
    assert main(["map", checkpoint, KEY, "--to", "tp=1", "--weights", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["world_size"], len(report["stored_bytes"]), len(report["needed_bytes"])) == (2, 2, 1)
    (part,) = report["tensors"][KEY]["needed"]
    assert (part["global_offset"], part["local_shape"], part["ranks"]) == ([0, 0], [16, 8], [0])


def test_a_page_and_a_picture_are_written_beside(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report = tmp_path / "report.json"
    html, png = tmp_path / "a.html", tmp_path / "a.png"
    report.write_text(json.dumps({"rank_seconds": {"write": [1.0, 3.0]}}))
    command = ["map", checkpoint, "--to", "tp=4", "--html", str(html), "--png", str(png), "--report", str(report)]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [f"wrote {html}", f"wrote {png}"]
    text = check(html.read_text(encoding="utf-8")).text()
    assert "write: rank 1 stands out; rank 1 has 3 s, 1.5 times the median." in text and KEY in text
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 2


def test_a_key_is_text_in_the_page_whatever_it_says(tmp_path, capsys):
    keys = [key for key in HOSTILE if "\udc80" not in key]
    save_values(tmp_path / "bad", dict.fromkeys(keys, np.ones(4, np.float32)), world=1)
    assert main(["map", str(tmp_path / "bad"), "--html", str(tmp_path / "a.html")]) == 0
    text = check((tmp_path / "a.html").read_text(encoding="utf-8")).text()
    assert [key for key in keys if key not in text] == []


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        ({"rank_seconds": {"plan": [1, 2], "write": [3, 4.5]}}, {"plan": [1.0, 2.0], "write": [3.0, 4.5]}),
        ([{"seconds": {"read": 1}}, {"seconds": {"read": 2, "plan": 3}}], {"read": [1.0, 2.0], "plan": [0.0, 3.0]}),
    ],
)
def test_seconds_are_those_of_one_report_or_of_all_ranks(tmp_path, found, seconds):
    (tmp_path / "r.json").write_text(json.dumps(found))
    assert read_seconds(str(tmp_path / "r.json")) == seconds


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"rank_seconds": {"write": ["x"]}}', '{"rank_seconds": [1]}'])
def test_a_report_that_is_none_is_refused(checkpoint, tmp_path, capsys, content):
    (tmp_path / "r.json").write_text(content)
    command = ["map", checkpoint, "--html", str(tmp_path / "a.html"), "--report", str(tmp_path / "r.json")]
    assert main(command) == 1
    assert "this is no report with seconds (file " in capsys.readouterr().err
    assert "this is no report with seconds" in check((tmp_path / "a.html").read_text(encoding="utf-8")).text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "there is no such key (key 'nope')"),
        (["--weights"], "--weights describes the job that --to names"),
        (["--cut", "*=1"], "--cut describes the job that --to names"),
        (["--to", "tp=3"], "tp=3 does not fit the model"),
        (["--id", "7"], "7"),
        (["--report", "r.json"], "--report is for a page or a picture"),
    ],
)
def test_what_makes_no_sense_is_an_error(checkpoint, capsys, arguments, words):
    assert main(["map", checkpoint, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flexckpt map: ") and words in captured.err
