"""Live state from layout to layout between devices, in rounds; and ranks on which something fails in the middle."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.device import jobs_reshard as device_jobs
from tests.distributed import jobs_checkpoint as jobs
from tests.distributed.test_reshard import check

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
#: Bytes that a rank sends in a round; the zoo has some hundred, so that there are many rounds.
SMALL_ROUND = 64


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("source", "target"),
    [("rows", "columns"), ("flat", "reversed"), ("flat rows", "flat"), ("whole", "rows"), ("rows", "rows")],
)
def test_exactly_what_a_rank_lacks_is_moved(device_world, size, source, target):
    reports = device_world(size).run(jobs.reshard_zoo, source=source, target=target, round_bytes=SMALL_ROUND)
    check(reports, None)
    for report in reports:
        assert report["calls"] == 0  # of Paddle's exchange of objects: agreements stay off the device
        assert report["collectives"] == 4


def test_a_live_model_and_its_optimizer(device_world4):
    for report in device_world4.run(jobs.reshard_model, source_degree=4, target_degree=1, round_bytes=4096):
        assert report["wrong"] == []
        assert report["received"] == report["lacked"] > 0


@pytest.mark.parametrize("where", ["_pack", "_unpack"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_fails_in_a_round_takes_part_until_all_know(device_world4, where, number):
    reports = device_world4.run(device_jobs.failing_round, where=where, number=number, rank=1, time_limit=60)
    for report in reports:
        assert report["error"] == reports[0]["error"]
        assert f"[rank 1] MemoryError: no room in {where}" in report["error"][1]
        assert report["collectives"] == reports[0]["collectives"] > 2
        assert report["again"] == []


def test_a_device_without_room_for_the_buffers_is_every_ranks_error(device_world2):
    reports = device_world2.run(device_jobs.no_room, rank=1, time_limit=60)
    for report in reports:
        assert report["error"] == reports[0]["error"]
        assert "[rank 1] MemoryError" in report["error"][1]
        assert "Out of memory error on rehearsal:1" in report["error"][1]
        assert report["target"] == "untouched"
        assert report["collectives"] == 0
        assert report["again"] == "right"
