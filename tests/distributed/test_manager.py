"""CheckpointManager over real process groups: a run that is preempted, and goes on under this or another layout."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("paddle")
import paddle_flexckpt as fc
from tests.distributed import jobs_manager as jobs
from tests.manager.samples import directory_of
from tests.native.samples import flip

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

STEPS = 9


@pytest.fixture(scope="module")
def runs(world2, tmp_path_factory):
    """An uninterrupted run, and one that is preempted in step 6, on rank 1 alone."""
    whole = world2.run(jobs.train, directory=str(tmp_path_factory.mktemp("whole")), degree=2, steps=STEPS, seed=7)
    path = tmp_path_factory.mktemp("preempted")
    first = world2.run(jobs.train, directory=str(path), degree=2, steps=STEPS, seed=7, preempted=[1, 6])
    return whole, path, first


def test_a_signal_on_one_rank_stops_all_after_the_same_step(world2, runs):
    whole, _, first = runs
    assert [rank["preempted"] for rank in first] == [False, True]
    for rank, result in enumerate(first):
        assert list(result["losses"]) == ["1", "2", "3", "4", "5", "6"]
        assert result["saved"] == [4, 6]
        assert result["steps"] == [4, 6]
        assert result["collectives"] == [1]
        assert result["caught"]
        for step, loss in result["losses"].items():
            assert loss == whole[rank]["losses"][step]
    assert world2.run(jobs.handler_is_the_default) == [True, True]


def test_the_whole_run_keeps_the_latest_and_the_best(runs):
    for result in runs[0]:
        assert result["saved"] == [4, 8]
        assert result["best"] == min([4, 8], key=lambda step: result["losses"][str(step)])


def resume(world, ranks, degree, runs, tmp_path):
    """The rest of the preempted run, from a copy of its checkpoints, with another seed."""
    path = tmp_path / "copy"
    shutil.copytree(runs[1], path)
    return world(ranks).run(jobs.train, directory=str(path), degree=degree, steps=STEPS, seed=11)


def test_it_goes_on_as_if_it_had_not_stopped(world, runs, tmp_path):
    for rank, result in enumerate(resume(world, 2, 2, runs, tmp_path)):
        assert result["start"] == 6
        assert result["extra"] == [{"seed": 7}, []]
        assert result["scale"] == 7.0
        assert list(result["losses"]) == ["7", "8", "9"]
        for step, loss in result["losses"].items():
            assert loss == runs[0][rank]["losses"][step]
        assert result["saved"] == [8]
        assert set(result["steps"]) == {6, 8, result["best"]}
        assert not result["preempted"]


def test_it_goes_on_under_another_layout(world, runs, tmp_path):
    path = tmp_path / "plain"
    for result in resume(world, 4, 4, runs, path):
        assert result["start"] == 6
        assert result["extra"] == [{"seed": 7}, ["rng"]]
        assert result["saved"] == [8]
        assert result["scale"] == 7.0
    # What four ranks saved, two read: with the noise of another generator, so losses cannot be compared.
    (info,) = [info for info in fc.list_checkpoints(path / "copy") if info.step == 8]
    assert (info.world_size, info.complete) == (4, True)


def test_damage_makes_all_ranks_fall_back(world2, runs, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(runs[1], path)
    manifest = directory_of(path, 6) / "0.manifest"
    flip(manifest, manifest.stat().st_size - 1)
    results = world2.run(jobs.fall_back, directory=str(path), degree=2)
    assert results[0] == results[1]
    assert results[0]["error"][0] == "CorruptCheckpointError"
    assert "step_00000006" in results[0]["error"][1]
    assert (results[0]["step"], list(results[0]["skipped"])) == (4, ["6"])
