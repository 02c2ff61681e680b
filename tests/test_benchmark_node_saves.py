"""The benchmark of saves to the memory of nodes: its rows, and the room, which no clock decides."""

from __future__ import annotations

import json

from benchmarks import node_saves


def test_the_rows_of_a_short_run(tmp_path):
    options = ["--directory", str(tmp_path), "--pairs", "1", "--mib", "8", "--json", str(tmp_path / "rows.json")]
    assert node_saves.main(options) == 0
    rows = {each["what"]: each["median"] for each in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert [name for name in rows if name.startswith("call of a save to memory, 8 MiB / ")][0].endswith("there")
    share = "bytes on 4 nodes / state, "
    for text, least in (("node_copies=2", 2), ("parity=4", 4 / 3)):
        # Headers, manifests and parity's headers are little beside a MiB for each rank.
        assert least <= rows[f"{share}{text}, at rest"] <= least * 1.02
        assert 2 * least <= rows[f"{share}{text}, with the next step"] <= 2 * least * 1.02
    assert not [each.name for each in tmp_path.iterdir() if each.name != "rows.json"]
