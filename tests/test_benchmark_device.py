"""The benchmark of devices runs, and counts what it says; times are not judged."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
from benchmarks import device
from tests.device import plugin

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools()),
]


def test_a_small_case(tmp_path):
    options = ["--mib", "8", "--tensors", "2", "--pairs", "1", "--gibs", "4", "--directory", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.device", *options, "--json", str(tmp_path / "result.json")]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "REHEARSAL_", "CUSTOM_"))
    }
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[1], env=env)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["bound"] for row in result["rows"] if row["bound"]] == [">= 0.90", ">= 0.90", "<= 1.10"]
    assert {name: len(each) for name, each in result["seconds"].items()} == dict.fromkeys(
        ("link", "medium", "save", "link, to the device", "medium, reading", "load", "async"), 1
    )
    assert result["pageable bytes"] == 0
    assert os.listdir(tmp_path) == ["result.json"]


def test_what_is_not_slowed_down_has_no_bounds_and_names_its_runtime():
    seconds = {"link": [2], "medium": [1], "save": [4], "link, to the device": [1], "medium, reading": [3], "load": [6]}
    options = argparse.Namespace(gibs=0, mib=8)
    rows = {row.what: row for row in device.rows_of({**seconds, "async": [2]}, options, "cuda")}
    assert {row.bound for row in rows.values()} == {""}
    assert rows["device save / the slower of link and medium alone, cuda"].median == 0.5
    assert rows["device load / the slower of link and medium alone, cuda"].median == 0.5
    assert rows["device async call / the link alone, cuda"].median == 1
    with device.Medium(0).throttles():
        assert device.LocalOutputFile.write_many.__name__ == "write_many"
        assert device.LocalOutputFile.write_many.__qualname__.startswith("LocalOutputFile")
