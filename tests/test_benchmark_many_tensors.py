"""The benchmark of many small tensors runs, and writes what it says; times are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ramdisk import memory_directory

paddle = pytest.importorskip("paddle")
pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("kind", ["numpy", "paddle"])
def test_two_small_cases(kind):
    with memory_directory() as path:
        done = subprocess.run(
            [sys.executable, "benchmarks/many_tensors.py", "--cases", "3x1024", "40x2048", "--pairs", "2",
             "--kind", kind, "--directory", str(path), "--json", str(path / "result.json")],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = json.loads((path / "result.json").read_text())
        assert [file.name for file in path.iterdir()] == ["result.json"]
    assert {"paddle_flexckpt", "numpy", "python", "kernel", "processors"} <= set(result["machine"])
    assert result["machine"]["paddle"] == paddle.__version__
    assert list(result["calls"]) == ["save", "load", "cut"]
    for name, most in (("save", 10), ("load", 10), ("cut", 15)):
        assert 0 <= result["calls"][name]["call"] <= most
    assert [(row["tensors"], row["bytes"]) for row in result["cases"]] == [(3, 1024), (40, 2048)]
    for row in result["cases"]:
        assert {len(seconds) for seconds in row["seconds"].values()} == {2}
        assert {"save", "load", "cut", "load, full", "cut, full, to cut"} <= set(row["ratios"])
        for ratio in row["ratios"].values():
            assert ratio["least"] <= ratio["median"] <= ratio["most"]
