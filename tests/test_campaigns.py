"""Records of campaigns are read from what campaigns print, are added to the file, and are printed as a table."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import campaigns
from tests.campaigns import FILE, add, read_totals, recording, table

CLUSTERS = """VIOLATION, seed 7: a text
so far: 12 runs, 1 violations; --first 12 goes on
40 runs, 68 simulated days
0.05 hours of processor time (4500 ms each)
faults that struck: 3 of 2 kinds; runs with 5 kinds or more: 9
        2 kill_rank
violations: 1
  seed 7: a text
"""
MISTAKES = """a line of a log
| `no-lock` | nobody takes the right to save | cluster | 9 | who lives keeps the right to save |
no-lock: who lives keeps the right to save: a/rank 0
| `lease-at-once` | a lease is taken over at once | store | 10000 |  |
1 of 2 mistakes found; not found: ['lease-at-once']
"""
KILLS = json.dumps(
    {"sync, trainer, other, killed, call: not struck": 3, "waves, writer: new": 4, "violations": 1}, indent=1
)
FILE_SYSTEMS = """file system       recordings      writes     flushes      states    prefixes  violations     seconds
ext4, data=ordered              35       5,526       3,986       2,030       1,206           0         100
xfs                             35       3,758       3,586       2,031       1,201           2         120
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "campaigns.json"
    path.write_text("[]")
    monkeypatch.setattr(campaigns, "FILE", path)
    monkeypatch.setattr(campaigns, "current_commit", lambda: "abc")
    return path


@pytest.mark.parametrize(
    ("output", "totals"),
    [
        (CLUSTERS, {"runs": 40, "days": 68, "many_faults": 9, "violations": 1, "processor_seconds": 180}),
        ("12 seeds; each manifest had its files at any time\n", {"runs": 12, "violations": 0}),
        ("12 seeds; a manifest without its files\n", {"runs": 12, "violations": 1}),
        (MISTAKES, {"mistakes": {"no-lock": [9, "who lives keeps the right to save"], "lease-at-once": [10000, ""]}}),
        (KILLS, {"runs": 8, "violations": 1}),
        (FILE_SYSTEMS, {"runs": 4061, "violations": 2}),
        ("SKIPPED: no crash states of xfs are looked at\n", {}),
    ],
)
def test_totals_are_read_from_what_is_printed(output, totals):
    assert read_totals(output) == totals


def test_a_simulation_prints_what_is_read():
    pytest.importorskip("paddle")
    pytest.importorskip("greenlet")
    from tests.simulation.campaign import Totals

    totals = Totals(runs=3, seconds=4 * 86400.0, processor=7200.0)
    totals.kinds.update({4: 2, 6: 1})
    found = read_totals(totals.summary())
    assert found == {"runs": 3, "days": 4, "many_faults": 1, "violations": 0, "processor_seconds": 7200}


def test_a_campaign_is_recorded_with_its_command_and_still_prints(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--first", "70", "--record", "--seeds", "40"])
    with recording("tests.simulation.run", False):
        print(CLUSTERS)
    assert json.loads(file.read_text()) == []
    with recording("tests.simulation.run", True):
        print(CLUSTERS, end="")
    assert capsys.readouterr().out.endswith(CLUSTERS)
    (record,) = json.loads(file.read_text())
    assert record["command"] == "python -m tests.simulation.run --first 70 --seeds 40"
    assert (record["commit"], record["first"], record["runs"]) == ("abc", 70, 40)


def test_a_campaign_without_totals_is_not_recorded(file):
    with pytest.raises(SystemExit, match="nothing is recorded"):
        add("python -m tests.filesystems.campaign", "abc", "SKIPPED: ...", [])
    assert json.loads(file.read_text()) == []


def test_the_table_has_each_kind_with_sums_and_the_newest_count_of_a_mistake(file):
    add("python -m tests.simulation.run --seeds 40", "one", CLUSTERS, ["real: a note"])
    add("python -m tests.simulation.run --seeds 50", "two", CLUSTERS, [])
    add("python -m tests.simulation.run --store --seeds 12", "one", "12 seeds; each manifest had its files", [])
    add("python -m tests.simulation.run --mistake all", "one", MISTAKES, [])
    add("python -m tests.simulation.run --mistake no-lock", "two", MISTAKES.replace("| 9 |", "| 8 |"), [])
    lines = [line.split() for line in table(json.loads(file.read_text())).splitlines()]
    assert ["one", "0", "40", "68", "9", "1", "180"] in lines
    assert ["real:", "a", "note"] in lines
    assert ["all", "80", "2"] in lines
    assert lines.count(["all", "12", "0"]) == 1
    assert [line[:3] for line in lines if line[:1] == ["no-lock"]] == [["no-lock", "two", "8"]]


def test_the_records_of_the_project_can_be_printed():
    printed = subprocess.run(
        [sys.executable, "-m", "tests.campaigns"], cwd=FILE.parents[1], capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr
    assert "python -m tests.simulation.run --neighbours" in printed.stdout
