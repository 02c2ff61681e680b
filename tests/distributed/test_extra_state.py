"""Extra state of several ranks: each gets its own back, and under another layout a clear word about it.

The jobs: every rank has generators and a position of its own.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

import paddle_flexckpt as fc
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.testing import cpu_world
from tests.remedies.following import provoked

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def start(tensor, seed):
    size = dist.get_world_size()
    cpu_world.init_fleet(dp=size // tensor, mp=tensor)
    for each in (random.seed, np.random.seed, paddle.seed):
        each(seed + dist.get_rank())
    get_rng_state_tracker().reset()
    get_rng_state_tracker().add("local_seed", seed + 50 + dist.get_rank())
    return paddle.optimizer.lr.StepDecay(0.1, 3)


def draw():
    numbers = [random.random(), float(np.random.rand()), *paddle.rand([2]).numpy().tolist()]
    with get_rng_state_tracker().rng_state("local_seed"):
        return numbers + paddle.rand([2]).numpy().tolist()


def save(directory, tensor):
    scheduler = start(tensor, 100)
    for _ in range(4):
        scheduler.step()
    draw()
    state = collect_extra_state(scheduler, step=7, dataloader={"rank": dist.get_rank()})
    fc.save_state_dict({"weight": paddle.ones([3]), **state}, directory)
    return {"draws": draw()}


def load(directory, tensor):
    scheduler = start(tensor, 200)
    state = load_extra_state(directory)
    before = collect_extra_state()
    report = restore_extra_state(state, scheduler)
    after = collect_extra_state()
    mine = f"extra_state.rng.rank{dist.get_rank()}"
    return {
        "unchanged": before[mine].numpy().tobytes() == after[mine].numpy().tobytes(),
        "draws": draw(),
        "step": report.step,
        "dataloader": report.dataloader,
        "dataloaders": {str(rank): position for rank, position in report.dataloaders.items()},
        "restored": report.restored,
        "not_restored": report.not_restored,
    }


def disagree(directory):
    start(2, 1)
    rank = dist.get_rank()
    with provoked("catalog/table.py", "a position of each rank's own goes into dataloader=") as caught:
        fc.save_state_dict(collect_extra_state(step=4 + rank), directory)
    fc.save_state_dict(collect_extra_state(step=4, dataloader={"at": rank}), directory)
    return str(caught.value)


# -- what is asserted -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(world2, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("extra"))
    return path, world2.run(save, directory=path, tensor=2)


def test_every_rank_gets_its_own_back(world2, saved):
    path, before = saved
    results = world2.run(load, directory=path, tensor=2)
    assert before[0]["draws"] != before[1]["draws"]
    for rank, result in enumerate(results):
        assert result["draws"] == before[rank]["draws"]
        assert result["step"] == 7
        assert result["dataloader"] == {"rank": rank}
        assert result["dataloaders"] == {str(rank): {"rank": rank}}
        assert result["not_restored"] == {}
        assert {"lr_scheduler", "dataloader", "rng.tracker.local_seed", "rng.numpy"} <= set(result["restored"])


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 2)])
def test_under_another_layout_what_belongs_to_ranks_is_reported(world, saved, ranks, tensor):
    path, _ = saved
    for result in world(ranks).run(load, directory=path, tensor=tensor):
        assert result["step"] == 7
        assert result["restored"] == ["lr_scheduler"]
        assert result["unchanged"]
        assert result["dataloader"] is None
        assert result["dataloaders"] == {"0": {"rank": 0}, "1": {"rank": 1}}
        assert sorted(result["not_restored"]) == ["dataloader", "rng"]
        assert "saved under world_size 2, model 2, this run has world_size" in result["not_restored"]["rng"]


def test_one_process_reads_what_two_saved(saved):
    path, _ = saved
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 3)
    report = restore_extra_state(load_extra_state(path), scheduler)
    assert (report.step, report.restored, scheduler.last_epoch) == (7, ["lr_scheduler"], 4)
    assert report.dataloaders == {0: {"rank": 0}, 1: {"rank": 1}}
    assert "this run has world_size 1" in report.not_restored["rng"]


def test_ranks_that_disagree_are_told_so(world2, tmp_path):
    errors = world2.run(disagree, directory=str(tmp_path))
    assert errors[0] == errors[1]
    assert "ranks differ in the run's extra state (key 'extra_state.common'" in errors[0]
