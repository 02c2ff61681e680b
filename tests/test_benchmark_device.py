"""The benchmark of devices runs, and counts what it says; times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
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
