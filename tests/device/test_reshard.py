"""Live state from layout to layout between devices, in rounds; and ranks on which something fails in the middle.

The jobs: exchanges in which one rank fails.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication.device_exchange import DeviceExchange
from tests.device import plugin
from tests.device.jobs_findings import columns_shard, right_columns, rows_shard
from tests.distributed import jobs_common as common
from tests.distributed import test_cooperative as cooperative
from tests.distributed import test_reshard as jobs
from tests.distributed.test_reshard import check, small_rounds

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def failing_round(where, number, rank):
    """One rank fails in a round of an exchange; then everybody reshards again."""
    here, size = dist.get_rank(), dist.get_world_size()
    native = getattr(DeviceExchange, where)

    def broken(self, side, round_number, *args):
        if round_number == number:
            raise MemoryError(f"no room in {where}")
        return native(self, side, round_number, *args)

    def attempt():
        state = common.zoo_state("rows", here, size)
        goal = common.zoo_state("columns", here, size, salt="other")
        with small_rounds(64):
            fc.reshard_sharded_state_dict(state, goal)
        return common.zoo_wrong(goal, "columns", here, size)

    if here == rank:
        setattr(DeviceExchange, where, broken)
    plugin.reset()
    try:
        error = common.outcome(attempt)
    finally:
        setattr(DeviceExchange, where, native)
    collectives = plugin.stats()["ccl"]["calls"]
    return {"error": error, "collectives": collectives, "again": attempt()}


def no_room(rank):
    """The device of one rank has no memory left when a reshard begins."""
    mib = 32
    state, target = rows_shard(mib), columns_shard(mib)
    before = target["w"].local_tensor.cpu().numpy().copy()
    used = plugin.stats()["device_bytes"]
    if dist.get_rank() == rank:
        plugin.configure(memory_gib=(used + (1 << 20)) / (1 << 30))
    plugin.reset()
    try:
        error = common.outcome(lambda: fc.reshard_sharded_state_dict(state, target))
    finally:
        plugin.configure(memory_gib=4)
    collectives = plugin.stats()["ccl"]["calls"]
    untouched = (target["w"].local_tensor.cpu().numpy() == before).all()
    fc.reshard_sharded_state_dict(state, target)
    return {
        "error": error,
        "collectives": collectives,
        "target": "untouched" if untouched else "changed",
        "again": "right" if right_columns(target, mib) else "wrong",
    }


# -- what is asserted -------------------------------------------------------------------------------------------------

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
        assert report["calls"] == report["collectives"] == 4  # all of them in the host channel


@pytest.mark.parametrize("target", ["columns", "flat", "whole"])
def test_ranks_that_read_for_each_other_fill_devices(device_world2, tmp_path, target):
    device_world2.run(cooperative.save_zoo, directory=str(tmp_path), layout="rows")
    for report in device_world2.run(cooperative.load_zoo, directory=str(tmp_path), layout=target):
        assert [each["wrong"] for each in report.values()] == [[]] * 2
        assert report["cooperative"]["report"]["comm_method"] == "cooperative"


def test_a_live_model_and_its_optimizer(device_world4):
    for report in device_world4.run(jobs.reshard_model, source_degree=4, target_degree=1, round_bytes=4096):
        assert report["wrong"] == []
        assert report["received"] == report["lacked"] > 0


@pytest.mark.parametrize("where", ["_pack", "_unpack"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_fails_in_a_round_takes_part_until_all_know(device_world4, where, number):
    reports = device_world4.run(failing_round, where=where, number=number, rank=1)
    for report in reports:
        assert report["error"] == reports[0]["error"]
        assert f"[rank 1] MemoryError: no room in {where}" in report["error"][1]
        assert report["collectives"] == reports[0]["collectives"] > 2
        assert report["again"] == []


def test_a_device_without_room_for_the_buffers_is_every_ranks_error(device_world2):
    reports = device_world2.run(no_room, rank=1)
    for report in reports:
        assert report["error"] == reports[0]["error"]
        assert "[rank 1] MemoryError" in report["error"][1]
        assert "Out of memory error on rehearsal:1" in report["error"][1]
        assert report["target"] == "untouched"
        assert report["collectives"] == 0
        assert report["again"] == "right"
