"""The benchmark of planning, at a small size: what it counts, not what it times."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from paddle_flexckpt.catalog import validate_shards

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_scale.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_scale", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("ranks", "tensors", "replicas"), [(32, 50, 8), (16, 30, 1), (8, 40, 8), (1, 3, 1)])
def test_counts_and_balance(benchmark, ranks, tensors, replicas):
    result = benchmark.measure(ranks, tensors, replicas)
    assert result["items"] == ranks * tensors
    assert result["distinct"] == result["written_items"] == ranks * tensors // replicas
    assert (result["problems"], result["overlaps"]) == (0, 0)
    assert result["written_bytes"] == result["distinct_bytes"]
    assert result["read_pieces"] == tensors
    assert result["read_bytes"] == result["target_bytes"] > 0
    # No shard here is large enough to be split: the bound is one whole shard above the mean.
    largest = 63 * 16 * benchmark.ROWS_PER_RANK * 4
    assert result["imbalance"] <= 1 + largest * ranks / result["written_bytes"]
    assert result["total_seconds"] > 0


def test_balance_of_many_tensors_is_near_perfect(benchmark):
    assert benchmark.measure(64, 1000, 8)["imbalance"] < 1.05


def test_numbers_are_printed_and_written(benchmark, tmp_path, capsys):
    file = tmp_path / "result.json"
    assert benchmark.main(["--ranks", "8", "--tensors", "5", "--replicas", "2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    (result,) = json.loads(file.read_text())["jobs"]
    assert printed.startswith("40 shards: 8 ranks x 5 tensors, 2 replicas each\n")
    for name in ("validate", "group", "coverage", "write_plan", "total"):
        assert f"\n  {name} " in printed
        assert result[f"{name}_seconds"] >= 0
    assert "MB above the empty interpreter" in printed
    assert result["peak_mb"] >= result["save_peak_mb"] >= result["catalog_mb"] >= 0


def test_a_world_that_replicas_do_not_divide_is_refused(benchmark, capsys):
    with pytest.raises(ValueError, match="10 ranks"):
        benchmark.measure(10, 5, 4)
    with pytest.raises(SystemExit):
        benchmark.main(["--ranks", "10", "--replicas", "4"])
    assert "10 ranks cannot hold 4 replicas" in capsys.readouterr().err


def test_the_catalog_is_sound(benchmark):
    catalog = benchmark.build_catalog(8, 5, 2)
    assert validate_shards(catalog) == []
    assert catalog.describe(7) == f"float32 [4:8, 0:{catalog.shape[7, 1]}] of [16, {catalog.shape[7, 1]}]"
