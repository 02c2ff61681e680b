"""Jobs of test_reshard: exchanges in which one rank fails."""

from __future__ import annotations

import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.live.device_exchange import DeviceExchange
from paddle_flexckpt.testing import rehearsal_device
from tests.device.jobs_findings import columns_shard, right_columns, rows_shard
from tests.distributed import jobs_common as common
from tests.distributed.jobs_checkpoint import small_rounds


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
    rehearsal_device.reset()
    try:
        error = common.outcome(attempt)
    finally:
        setattr(DeviceExchange, where, native)
    collectives = rehearsal_device.stats()["ccl"]["calls"]
    return {"error": error, "collectives": collectives, "again": attempt()}


def no_room(rank):
    """The device of one rank has no memory left when a reshard begins."""
    mib = 32
    state, target = rows_shard(mib), columns_shard(mib)
    before = target["w"].local_tensor.cpu().numpy().copy()
    used = rehearsal_device.stats()["device_bytes"]
    if dist.get_rank() == rank:
        rehearsal_device.configure(memory_gib=(used + (1 << 20)) / (1 << 30))
    rehearsal_device.reset()
    try:
        error = common.outcome(lambda: fc.reshard_sharded_state_dict(state, target))
    finally:
        rehearsal_device.configure(memory_gib=4)
    collectives = rehearsal_device.stats()["ccl"]["calls"]
    untouched = (target["w"].local_tensor.cpu().numpy() == before).all()
    fc.reshard_sharded_state_dict(state, target)
    return {
        "error": error,
        "collectives": collectives,
        "target": "untouched" if untouched else "changed",
        "again": "right" if right_columns(target, mib) else "wrong",
    }
