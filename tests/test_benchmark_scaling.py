"""The simulation of large jobs, at a small size: what it counts, not what it times."""

from __future__ import annotations

import json

import pytest

from benchmarks import scaling

REPLICATED, SHARDED, EXPERTS = "tiny:tp=2,dp=4", "tiny:tp=2,sharding=v2:4", "tiny-moe:pp=2,ep=4,dp=8"


def test_all_tables(tmp_path, capsys):
    file = tmp_path / "result.json"
    jobs = ["--jobs", REPLICATED, SHARDED, EXPERTS, "--loads", f"{REPLICATED}>dp=2", EXPERTS]
    assert (
        scaling.main(
            [
                *jobs,
                "--rows",
                "120000",
                "--openings",
                "4,0",
                "4,16",
                "--first-saves",
                "64",
                "--tensors",
                "50",
                "--sample",
                "100",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    found = json.loads(file.read_text())
    assert {"calls", *scaling.TABLES} <= {*found}
    printed = capsys.readouterr().out
    assert all(f"\n{name}\n" in printed for name in scaling.TABLES)
    replicated, sharded, experts = found["jobs"]
    assert [each["ranks"] for each in found["jobs"]] == [8, 8, 16]
    assert [each["rows"] for each in found["jobs"]] == [each["rows"] for each in found["plans"]]
    assert replicated["keys"] == 6 * (4 * 9 + 3) and replicated["rows"] == 8 * replicated["keys"]
    assert replicated["state_bytes"] == sharded["state_bytes"] < experts["state_bytes"]
    calls = found["calls"]
    assert calls["save_collectives"][0] == calls["save_collectives"][1] >= 3
    assert calls["load_rank_files"][0] == calls["load_rank_files"][1] > 0
    # It looks at each rank's data file.
    assert calls["save_coordinator_files"][1] - calls["save_coordinator_files"][0] >= 4
    before, now = found["openings"]
    assert before["held"] == before["rows"] == 16 * now["held"] and before["partitions_read"] == before["partitions"]
    assert now["keys"] * 16 == before["keys"] and now["mib"] < before["mib"] / 4
    assert calls["load_collectives"] == [4, 4]
    # Where keys are spread it does neither.
    spread = calls["save, keys spread_coordinator_files"]
    assert spread[0] == spread[1] < calls["save_coordinator_files"][0]
    (manifest,) = found["manifests"]
    assert manifest["writers"] == 30 and manifest["writer_received"] < manifest["bytes"] / 5
    assert manifest["partitions"] == 30 and manifest["bytes"] < 40 * manifest["rows"]
    whole, own = found["loads"]
    assert whole["targets"] == replicated["keys"] and whole["bytes"] == replicated["state_bytes"]
    assert own["pieces"] >= own["targets"] and own["bytes"] < experts["state_bytes"]


@pytest.mark.parametrize("job", [REPLICATED, SHARDED, EXPERTS])
def test_planners_get_every_shard_once(job):
    ranks = scaling.layout_of(job).strategy.ranks
    rows = 0
    for planner in range(ranks):
        messages, before = scaling.shares(job, planner)
        rows += len(scaling.decode_rows(messages, range(ranks), before).catalog)
    assert rows == scaling.measure_plan(job, 1_000_000)["rows"]


def test_a_job_with_more_shards_than_one_process_plans(capsys):
    result = scaling.measure_plan(REPLICATED, 10)
    assert result["all_seconds"] is None and result["own_seconds"] > 0
    assert "| - | - | - | - |" in scaling.show_plans([result])
