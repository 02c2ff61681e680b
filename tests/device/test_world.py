"""The world of devices: places, groups, fresh fleets, failures, and the check of each job.

The jobs look at the world of devices itself.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

from paddle_flexckpt.testing import World, WorldError, cpu_world
from tests.device import plugin

# -- what each rank runs -----------------------------------------------------------------------------------------------


def where():
    """This rank's device, backend and groups, and a sum over all ranks."""
    total = paddle.to_tensor(np.arange(4, dtype="float32") + dist.get_rank())
    dist.all_reduce(total)
    return {
        "device": paddle.device.get_device(),
        "backend": dist.get_backend(),
        "place": str(total.place),
        "sum": total.numpy(),
        "collectives": plugin.stats()["ccl"]["calls"],
        "group": dist.collective._start_ring_id,
    }


def fleet_of(**degrees):
    """The ranks of this rank's tensor-parallel group, after a fleet of these degrees, with a sum over them."""
    hcg = cpu_world.init_fleet(**degrees)
    group = hcg.get_model_parallel_group()
    total = paddle.to_tensor(float(dist.get_rank()))
    if group.nranks > 1:
        dist.all_reduce(total, group=group)
    return [list(group.ranks), float(total)]


def one_fails():
    """Rank 1 raises while its peers wait for it in a collective of the device."""
    if dist.get_rank() == 1:
        raise ValueError("rank 1 will not come")
    total = paddle.ones([4])
    dist.all_reduce(total)
    paddle.device.synchronize()


def one_dies():
    """Rank 1 ends its process while its peers wait for it in a collective of the device."""
    if dist.get_rank() == 1:
        os._exit(7)
    total = paddle.ones([4])
    dist.all_reduce(total)
    return total.numpy()


# -- what is asserted -------------------------------------------------------------------------------------------------

needs_device = pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools())


def test_each_rank_has_a_device_of_its_own_and_the_device_backend(device_world2):
    answers = device_world2.run(where)
    assert [answer["device"] for answer in answers] == ["rehearsal:0", "rehearsal:1"]
    assert {answer["backend"].lower() for answer in answers} == {"xccl"}
    for rank, answer in enumerate(answers):
        assert answer["place"] == f"Place(rehearsal:{rank})"
        assert answer["sum"] == [1.0, 3.0, 5.0, 7.0]
        assert answer["collectives"] > 0


def test_fleet_gets_other_degrees_in_the_same_processes(device_world4):
    tensor4 = device_world4.run(fleet_of, mp=4)
    starts = device_world4.starts
    tensor2 = device_world4.run(fleet_of, mp=2, dp=2)
    assert tensor4 == [[[0, 1, 2, 3], 6.0]] * 4
    assert tensor2 == [[[0, 1], 1.0], [[0, 1], 1.0], [[2, 3], 5.0], [[2, 3], 5.0]]
    assert device_world4.starts == starts


@needs_device
@pytest.mark.parametrize(("job", "word"), [("one_fails", "rank 1 will not come"), ("one_dies", "process ended")])
def test_a_failure_ends_the_job_while_others_wait_for_the_device(job, word):
    with World(2, device="tests.device.ranks", grace=0.5) as world:
        with pytest.raises(WorldError) as caught:
            world.run(f"tests.device.test_world:{job}")
        failures, stacks = caught.value.failures, caught.value.stacks
        assert word in failures[1]
        # Where it waited, also if the launcher, which ends all when one process dies, came before its answer.
        assert "test_world.py" in failures.get(0, "") + stacks.get(0, "")
        # The next job runs in new processes.
        assert [answer["sum"] for answer in world.run(where)] == [[1.0, 3.0, 5.0, 7.0]] * 2
        assert world.starts == 2
