"""Process groups other than the world: their first rank is not global rank 0, or they are in another order."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from tests.distributed import jobs_checkpoint as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.mark.parametrize("coordinator_rank", [0, 1])
@pytest.mark.parametrize("ranks", [[1, 3], [2, 3], [0, 2]], ids=str)
def test_a_group_saves_loads_and_reshards_by_itself(world4, tmp_path, ranks, coordinator_rank):
    reports = world4.run(jobs.group_job, directory=str(tmp_path), ranks=ranks, coordinator_rank=coordinator_rank)
    members = [report for report in reports if report["member"]]
    assert [rank for rank, report in enumerate(reports) if report["member"]] == ranks
    for rank, report in enumerate(reports):
        if not report["member"]:
            assert report["refused"][0] == "ValidationError"
            assert f"rank {rank} is not a member of the process group of ranks {ranks}" in report["refused"][1]
            continue
        assert [report["id"], report["second id"]] == [0, 1]
        assert report["wrong"] == []
        assert len(set(report["read"])) == 1
        assert report["error"][0] == "ValidationError"
        assert "coordinator_rank counts within the process group, 0 to 1; got 2" in report["error"][1]
    assert members[0]["error"] == members[1]["error"]
    assert sum(report["written"] for report in members) == members[0]["unique"]
    # Files are named by global rank, so groups that share a directory do not collide.
    data = [f"{rank}_{unique_id}.safetensors" for rank in ranks for unique_id in (0, 1)]
    assert sorted(os.listdir(tmp_path)) == sorted([*data, "0.manifest", "1.manifest", PADDLE_METADATA])
    assert world4.run(jobs.load_by_all, directory=str(tmp_path), unique_id=0) == [[]] * 4


def test_a_group_of_one(world4, tmp_path):
    """Paddle gives its only member the rank -1, as if it were none."""
    reports = world4.run(jobs.group_job, directory=str(tmp_path), ranks=[2], coordinator_rank=0)
    assert [report["member"] for report in reports] == [False, False, True, False]
    assert reports[2]["wrong"] == []
    assert reports[2]["written"] == reports[2]["unique"]
    assert world4.run(jobs.load_by_all, directory=str(tmp_path), unique_id=1) == [[]] * 4


@pytest.mark.parametrize("order", [[1, 0], [2, 0, 3, 1]], ids=str)
def test_ranks_in_another_order(world, tmp_path, order):
    assert world(len(order)).run(jobs.permuted, directory=str(tmp_path), order=order) == [[]] * len(order)


def test_one_rank_may_save_alone_what_all_ranks_hold(world2, tmp_path):
    assert world2.run(jobs.one_rank_saves_for_all, directory=str(tmp_path)) == [True, True]
