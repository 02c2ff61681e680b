"""The benchmark of pushes: its rows; it compares the bytes itself."""

from __future__ import annotations

import json

from benchmarks import push


def test_the_rows_of_a_short_run(tmp_path):
    options = ["--directory", str(tmp_path), "--pairs", "1", "--mib", "8", "--json", str(tmp_path / "rows.json")]
    assert push.main(options) == 0
    rows = [each["what"] for each in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    assert rows == [
        "memcpy / push of 8 MiB on one machine",
        "memcpy / push of 8 MiB on one machine, the first, which makes the memory",
        "memcpy / push of 8 MiB through a receiver, over loopback",
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["rows.json"]
