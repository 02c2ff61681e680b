"""The benchmark of deltas of weights runs, and counts its bytes; times are not judged."""

from __future__ import annotations

import pytest

pytest.importorskip("zstandard")

from benchmarks.weight_deltas import run


def test_a_small_model(tmp_path):
    found = run(megabytes=4, rounds=1, directory=str(tmp_path))
    assert sorted(found) == ["overwrite", "xor"]
    assert 2 < found["xor"]["bytes an element"] < 4 < found["overwrite"]["bytes an element"] < 6
