"""The benchmark of reshards runs, checks the values, and says what it says; times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
pytestmark = [pytest.mark.paddle, pytest.mark.multiprocess]


def test_a_small_case(tmp_path):
    options = [
        "--ranks",
        "2",
        "--cases",
        "3x65536",
        "--pairs",
        "2",
        "--in-place",
        "--json",
        str(tmp_path / "result.json"),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    command = [sys.executable, "-m", "benchmarks.reshard", *options]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[1], env=env, timeout=300)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["what"] for row in result["rows"] if row["bound"]] == ["memcpy / reshard in memory, 2 ranks, 3 tensors"]
    assert "memcpy / bare reads in place, 2 ranks, 3 tensors" in [row["what"] for row in result["rows"]]
    assert all(0 < row["least"] <= row["median"] <= row["most"] and row["turns"] == 2 for row in result["rows"])
