"""The world of devices: places, groups, fresh fleets, failures, and the check of each job."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from paddle_flexckpt.testing import World, WorldError, rehearsal_device
from tests.device import jobs_world

needs_device = pytest.mark.skipif(bool(rehearsal_device.missing_tools()), reason=rehearsal_device.missing_tools())


def test_each_rank_has_a_device_of_its_own_and_the_device_backend(device_world2):
    answers = device_world2.run(jobs_world.where)
    assert [answer["device"] for answer in answers] == ["rehearsal:0", "rehearsal:1"]
    assert {answer["backend"].lower() for answer in answers} == {"xccl"}
    for rank, answer in enumerate(answers):
        assert answer["place"] == f"Place(rehearsal:{rank})"
        assert answer["sum"] == [1.0, 3.0, 5.0, 7.0]
        assert answer["collectives"] > 0


def test_fleet_gets_other_degrees_in_the_same_processes(device_world4):
    tensor4 = device_world4.run(jobs_world.fleet_of, mp=4)
    starts = device_world4.starts
    tensor2 = device_world4.run(jobs_world.fleet_of, mp=2, dp=2)
    assert tensor4 == [[[0, 1, 2, 3], 6.0]] * 4
    assert tensor2 == [[[0, 1], 1.0], [[0, 1], 1.0], [[2, 3], 5.0], [[2, 3], 5.0]]
    assert device_world4.starts == starts


@needs_device
@pytest.mark.parametrize(("job", "word"), [("one_fails", "rank 1 will not come"), ("one_dies", "process ended")])
def test_a_failure_ends_the_job_while_others_wait_for_the_device(job, word):
    with World(2, device=True, grace=0.5) as world:
        with pytest.raises(WorldError) as caught:
            world.run(f"tests.device.jobs_world:{job}")
        failures, stacks = caught.value.failures, caught.value.stacks
        assert word in failures[1]
        assert "jobs_world.py" in {**failures, **stacks}[0]
        # The next job runs in new processes.
        assert [answer["sum"] for answer in world.run(jobs_world.where)] == [[1.0, 3.0, 5.0, 7.0]] * 2
        assert world.starts == 2
