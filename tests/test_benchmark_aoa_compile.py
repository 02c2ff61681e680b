"""The benchmark of the AOA compiler runs, and counts what it says; times are not judged."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "aoa_compile.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("aoa_compile", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_small_cases_alone(benchmark, tmp_path, capsys):
    assert benchmark.main(["--small", "--no-paddle", "--pairs", "2", "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    printed = capsys.readouterr().out
    assert set(result["cases"]) == {"statements", "experts", "gated"}
    counts = {
        name: [case[key] for key in ("statements", "expanded", "source_keys", "target_keys")]
        for name, case in result["cases"].items()
    }
    assert counts == {"statements": [6, 18, 18, 18], "experts": [2, 12, 18, 12], "gated": [12, 12, 8, 2]}
    for name, case in result["cases"].items():
        assert len(case["ours"]["turns"]) == 2
        assert case["ours"]["total"]["cpu"] > 0
        assert "Paddle" not in case
        assert f"{name}: {case['case']}" in printed


def test_sizes_of_the_cases(benchmark):
    sizes = {name: (len(make().source), make().expanded) for name, make in benchmark.CASES.items()}
    assert sizes == {
        "statements": (30_000, 30_000),
        "experts": (12_288, 8_192),
        "large": (46_848, 31_232),
        "gated": (244, 366),
    }
    # The temporaries of each of 61 layers: pieces of 64 heads of q and gate, of 8 of k and v, and the whole.
    names = {name for text in benchmark.CASES["gated"]().texts for name in re.findall(r"model[\w.]+", text)}
    assert len(names) == 61 * (64 * (3 + 2) + 8 * (3 + 2) + 1 + 1)


@pytest.mark.paddle
def test_small_cases_with_the_engine_of_paddle(benchmark, capsys):
    pytest.importorskip("paddle")
    pytest.importorskip("paddle.distributed.flex_checkpoint.aoa.aoa_engine")
    for make in benchmark.SMALL.values():
        result = benchmark.measure(make(), compares=True, pairs=3)
        assert set(result["Paddle"]["steps"]) == {"compile", "resolve"}
        assert len(result["Paddle"]["turns"]) == 3
        rows = {row.what: row for row in benchmark.rows_of("x", result)}
        ratio = rows[f"AOA, compile, times Paddle: x ({result['case']})"]
        assert 0 < ratio.least <= ratio.median <= ratio.most
        assert "Paddle" in benchmark.report("x", result)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("pairs", ["0", "-1"])
def test_turns_have_to_be_positive(benchmark, pairs, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--small", "--pairs", pairs])
    assert "--pairs has to be positive" in capsys.readouterr().err
