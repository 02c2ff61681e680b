"""The benchmark of rehearsals runs, and its checkpoint is one that a rehearsal opens."""

from __future__ import annotations

import json

from benchmarks import rehearsals


def test_small_cases_run(tmp_path):
    given = ["--tensors", "40", "--pairs", "1", "--most-ranks", "512", "--directory", str(tmp_path)]
    assert rehearsals.main([*given, "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["median"] > 0 and row["bound"] == "" for row in rows)
    assert rows[1]["what"] == "rehearse 40 tensors: tp=8,pp=4,sharding=v2:16, read together"
