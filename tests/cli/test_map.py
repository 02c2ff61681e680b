"""flexckpt map: its text, its JSON, and how it refuses what makes no sense."""

from __future__ import annotations

import json

import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.strategy import parse_strategy
from tests.engine.rehearsed import save
from tests.engine.test_models import decoder

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
        ["stored", "[0:8,", "0:8]", "rank", "0", "128", "B", "0_0.safetensors"],
        ["stored", "[8:16,", "0:8]", "rank", "1", "128", "B", "1_0.safetensors"],
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "there is no such key (key 'nope')"),
        (["--weights"], "--weights describes the job that --to names"),
        (["--cut", "*=1"], "--cut describes the job that --to names"),
        (["--to", "tp=3"], "tp=3 does not fit the model"),
        (["--id", "7"], "7"),
    ],
)
def test_what_makes_no_sense_is_an_error(checkpoint, capsys, arguments, words):
    assert main(["map", checkpoint, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flexckpt map: ") and words in captured.err
