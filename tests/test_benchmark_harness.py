"""What the benchmarks share: turns, ratios, bounds, and the file and the table that they make."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import harness


def test_turns_go_back_and_forth_and_the_first_does_not_count():
    order = []

    def subject(name, seconds):
        def run():
            order.append(name)
            return seconds * len(order)

        return run

    ended = []
    seconds = harness.turns({"a": subject("a", 1.0), "b": subject("b", 100.0)}, 2, after=ended.append)
    assert order == ended == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [4.0, 5.0], "b": [300.0, 600.0]}
    assert harness.ratios(seconds["b"], seconds["a"]) == [75.0, 120.0]


def test_what_tells_no_seconds_is_timed():
    seconds = harness.turns({"a": lambda: None}, 3, warm_up=0)["a"]
    assert len(seconds) == 3
    assert min(seconds) > 0


@pytest.mark.parametrize(
    ("values", "bound", "passes"),
    [
        ([1, 5, 0.94], ">= 0.95", True),
        ([0.9, 0.94, 5], ">= 0.95", False),
        (5, "<= 5", True),
        (5.1, "<= 5", False),
        (1, "", None),
    ],
)
def test_the_median_is_what_a_bound_is_about(values, bound, passes):
    row = harness.row("x", values, bound)
    assert row.passes is passes
    assert row.least <= row.median <= row.most


def test_the_file_and_the_table(tmp_path, capsys):
    path = tmp_path / "result.json"
    options = harness.arguments("What it measures.\n\nMore.", pairs=3).parse_args(["--json", str(path)])
    rows = [
        harness.row("save / raw", [0.5, 0.6, 0.7], ">= 0.95"),
        harness.row("a call", 12, "<= 20", "us", note="simulated"),
        harness.row("told", [2000.0]),
    ]
    harness.finish(options, rows, more={"seconds": [1, 2]})
    result = json.loads(path.read_text())
    assert result["machine"]["versions"]["numpy"] == np.__version__
    assert result["options"] == {"pairs": 3, "directory": "."}
    assert result["more"] == {"seconds": [1, 2]}
    assert [harness.Row(**row) for row in result["rows"]] == rows
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| save / raw | >= 0.95 | 0.6 | 0.5 to 0.7 | 3 | FAIL |  |",
        "| a call | <= 20 us | 12.00 us |  | 1 | pass | simulated |",
        "| told |  | 2,000 |  | 1 |  |  |",
    ]
    table = harness.lines(rows, {"save / raw": "the medium is slow"})
    assert table[2].endswith("| FAIL | the medium is slow |")
    assert harness.lines(rows, {})[2].endswith("| FAIL | not yet known |")


def test_random_tensors_are_the_same_ones_and_differ():
    first, again = (dict(harness.random_tensors(3, (4, 8))) for _ in range(2))
    assert len(first) == 3
    assert all((first[name] == again[name]).all() for name in first)
    assert len({tensor.tobytes() for tensor in first.values()}) == 3
    ((_, half),) = harness.random_tensors(1, (4, 8), "bfloat16")
    assert half.dtype == np.uint16
    assert half.tobytes() == b"".join(value.tobytes()[2:] for value in next(iter(first.values())).ravel())
