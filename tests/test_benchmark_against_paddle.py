"""The benchmark against Paddle runs, compares what it loads, and writes what it says; times are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ramdisk import memory_directory

paddle = pytest.importorskip("paddle")
pytest.importorskip("paddle.distributed.flex_checkpoint")
pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[1]


def test_two_mebibytes():
    with memory_directory() as path:
        done = subprocess.run(
            [sys.executable, "benchmarks/against_paddle.py", "--mib", "2", "--pairs", "2", "--tensors", "5",
             "--directory", str(path), "--json", str(path / "result.json")],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = json.loads((path / "result.json").read_text())
        assert [file.name for file in path.iterdir()] == ["result.json"]
    assert (result["mib"], result["pairs"], result["tensors"]) == (2, 2, 5)
    assert result["versions"]["paddle"] == paddle.__version__
    assert set(result["equal"]) == set(result["load"])
    assert len(result["equal"]) == 5
    assert all(result["equal"].values())
    assert {"ours, durable", "Paddle, durable", "raw, durable"} < set(result["save"])
    for phase in ("save", "load"):
        for name, row in result[phase].items():
            assert len(row["seconds"]) == 2
            assert min(row["seconds"]) > 0
            assert ("ratio" in row) == (not name.startswith("raw"))
            assert name in done.stdout
    for row in (*result["save"].values(), *result["load"].values()):
        if "ratio" in row:
            other = {**result["save"], **result["load"]}[row["ratio"]["to"]]
            ratios = [a / b for a, b in zip(row["seconds"], other["seconds"])]
            assert [row["ratio"]["min"], row["ratio"]["max"]] == [min(ratios), max(ratios)]
    assert "loaded values equal: all" in done.stdout
