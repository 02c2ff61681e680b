"""Extra state of several ranks: each gets its own back, and under another layout a clear word about it."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle

from paddle_flexckpt.run_state import load_extra_state, restore_extra_state
from tests.distributed import jobs_extra_state as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.fixture(scope="module")
def saved(world2, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("extra"))
    return path, world2.run(jobs.save, directory=path, tensor=2)


def test_every_rank_gets_its_own_back(world2, saved):
    path, before = saved
    results = world2.run(jobs.load, directory=path, tensor=2)
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
    for result in world(ranks).run(jobs.load, directory=path, tensor=tensor):
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
    errors = world2.run(jobs.disagree, directory=str(tmp_path))
    assert errors[0] == errors[1]
    assert "extra_state.common" in errors[0]
