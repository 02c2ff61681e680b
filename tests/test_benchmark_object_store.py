"""The benchmark of object stores runs, and counts what it says; times are not judged."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("s3fs")

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "object_store.py"


def test_a_small_case(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("object_store_benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    options = "--mib 24 --tensors 6 --rate 0 --latency 0.01 --errors 0 --pairs 1"
    assert benchmark.main([*options.split(), "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert {row["what"].partition(":")[0] for row in result["rows"]} == {
        "object store, save / plain requests",
        "object store, load / plain requests",
    }
    ((name, case),) = result["cases"].items()
    assert name == "6 tensors, 0% errors"
    assert f"{name}\n  save: " in capsys.readouterr().out
    assert case["equal"]
    assert case["bytes"] == 24 << 20
    for call in ("save", "load"):
        assert case[call]["failed"] == 0
        assert 1 < case[call]["most_requests"] <= result["budget"]["requests"]
        assert case[call]["most_bytes"] <= result["budget"]["bytes"]
        assert {name: len(each) for name, each in case[call]["seconds"].items()} == {"plain": 1, "ours": 1}
