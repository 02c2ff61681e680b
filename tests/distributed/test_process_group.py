"""Process groups other than the world: their first rank is not global rank 0, or they are in another order.

The jobs: saves and loads by the ranks of a group.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.ranks import transport
from paddle_flexckpt.ranks.communicator import Communicator
from tests.distributed import jobs_common as common
from tests.saved import short_names

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def group_job(directory, ranks, coordinator_rank):
    """Save, load and reshard among some ranks of the world; the others do something else meanwhile."""
    group = dist.new_group(ranks)
    rank = dist.get_rank()
    out = {"member": rank in ranks}
    if rank not in ranks:
        others = {"w": paddle.full([2], float(rank))}
        # A rank that is not a member is told so, and does not hang.
        out["refused"] = common.outcome(lambda: fc.save_state_dict(others, directory, group))
        return out
    place, size = ranks.index(rank), len(ranks)
    names = ("of.float32", "of.bfloat16", "of.int64", "scalar")
    state = common.zoo_state("rows", place, size, names=names)
    report = fc.save_state_dict(state, directory, group, coordinator_rank)
    out["id"] = report.unique_id
    again = fc.save_state_dict(state, directory, group, coordinator_rank)
    out["second id"] = again.unique_id
    out["written"] = report.bytes_written
    out["unique"] = sum(common.zoo_value(name).nbytes for name in names)
    target = common.zoo_state("columns", place, size, salt="other", names=names)
    loaded = fc.load_state_dict(target, directory, group, coordinator_rank)
    out["read"] = [loaded.bytes_read, loaded.bytes_needed, common.local_bytes(target)]
    out["wrong"] = common.zoo_wrong(target, "columns", place, size)
    target = common.zoo_state("flat", place, size, salt="other", names=names)
    fc.reshard_sharded_state_dict(state, target, group, coordinator_rank)
    out["wrong"] += common.zoo_wrong(target, "flat", place, size)
    out["error"] = common.outcome(lambda: fc.save_state_dict(state, directory, group, size))
    return out


def load_by_all(directory, unique_id):
    """The whole world loads what a group of it has saved."""
    rank, size = common.here()
    names = ("of.float32", "of.bfloat16", "of.int64", "scalar")
    state = common.zoo_state("rows", rank, size, salt="other", names=names)
    fc.load_state_dict(state, directory, unique_id=unique_id)
    return common.zoo_wrong(state, "rows", rank, size)


class Permuted(Communicator):
    """The world with its ranks in another order."""

    def __init__(self, order):
        super().__init__(tuple(order), order.index(dist.get_rank()))
        self._inner = communicator_for(None)

    def _all_gather(self, payload):
        gathered = self._inner.all_gather(payload)
        return [gathered[rank] for rank in self.ranks]

    def open_transport(self):
        return transport.SocketTransport(self.ranks, self.position)


def permuted(directory, order):
    """A group whose ranks are not in rising order: the place in it, not the rank, counts."""
    comm = Permuted(order)
    place, size = comm.position, comm.size
    state = common.zoo_state("rows", place, size)
    fc.save_state_dict(state, directory, comm)
    wrong = []
    for layout in ("columns", "rows", "whole"):
        target = common.zoo_state(layout, place, size, salt="other")
        fc.load_state_dict(target, directory, comm)
        wrong += common.zoo_wrong(target, layout, place, size)
        target = common.zoo_state(layout, place, size, salt="other")
        fc.reshard_sharded_state_dict(state, target, comm)
        wrong += common.zoo_wrong(target, layout, place, size)
    return wrong


def one_rank_saves_for_all(directory):
    """Pure data parallelism: rank 0 saves without the others, and everyone loads."""
    values = paddle.arange(12, dtype="float32").reshape([3, 4])
    if dist.get_rank() == 0:
        fc.save_state_dict({"w": values}, directory, process_group="self")
    dist.barrier()
    target = paddle.zeros([3, 4])
    fc.load_state_dict({"w": target}, directory)
    return bool((target == values).all())


# -- what is asserted -------------------------------------------------------------------------------------------------


# Each group, and each coordinator, once in CI.
@pytest.mark.parametrize(
    ("ranks", "coordinator_rank"),
    [
        *[([1, 3], 1), ([2, 3], 0), ([0, 2], 1)],
        *[pytest.param(*each, marks=pytest.mark.slow) for each in (([1, 3], 0), ([2, 3], 1), ([0, 2], 0))],
    ],
    ids=str,
)
def test_a_group_saves_loads_and_reshards_by_itself(world4, tmp_path, ranks, coordinator_rank):
    reports = world4.run(group_job, directory=str(tmp_path), ranks=ranks, coordinator_rank=coordinator_rank)
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
    data = [f"{rank}_{unique_id}-{unique_id + 1}.safetensors" for rank in ranks for unique_id in (0, 1)]
    assert short_names(tmp_path) == sorted([*data, "0.manifest", "1.manifest", PADDLE_METADATA])
    assert world4.run(load_by_all, directory=str(tmp_path), unique_id=0) == [[]] * 4


def test_a_group_of_one(world4, tmp_path):
    """Paddle gives its only member the rank -1, as if it were none."""
    reports = world4.run(group_job, directory=str(tmp_path), ranks=[2], coordinator_rank=0)
    assert [report["member"] for report in reports] == [False, False, True, False]
    assert reports[2]["wrong"] == []
    assert reports[2]["written"] == reports[2]["unique"]
    assert world4.run(load_by_all, directory=str(tmp_path), unique_id=1) == [[]] * 4


@pytest.mark.parametrize("order", [[1, 0], [2, 0, 3, 1]], ids=str)
def test_ranks_in_another_order(world, tmp_path, order):
    assert world(len(order)).run(permuted, directory=str(tmp_path), order=order) == [[]] * len(order)


def test_one_rank_may_save_alone_what_all_ranks_hold(world2, tmp_path):
    assert world2.run(one_rank_saves_for_all, directory=str(tmp_path)) == [True, True]
