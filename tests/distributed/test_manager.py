"""CheckpointManager over real process groups: a run that is preempted, and goes on under this or another layout.

The jobs: a tensor-parallel run with a manager, from the beginning or where an earlier one stopped.
"""

from __future__ import annotations

import os
import shutil
import signal

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.manager import KeepBest, KeepLatest, SaveEvery
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import Net
from tests.manager.samples import directory_of
from tests.native.samples import flip
from tests.run_state.test_extra_state import scaler

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

KINDS = ("col", "row")


def train(directory, degree, steps, seed, preempted=None):
    """The loop of the manager's documentation. ``preempted``: the rank that gets SIGTERM, and in which step."""
    fc.install()
    hcg = common.init_tensor_parallel(degree)
    place, _ = common.place_in(hcg)
    paddle.seed(seed)
    net = Net(KINDS, True, degree, salt=str(seed), place=place)
    scheduler = paddle.optimizer.lr.StepDecay(0.01, 3)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=net.parameters())
    amp = scaler(float(seed))
    run = {"model": net, "optimizer": optimizer, "lr_scheduler": scheduler, "scaler": amp}
    handler = signal.getsignal(signal.SIGTERM)
    losses, saved, collectives, start, extra = {}, [], set(), 0, None
    keep = (KeepLatest(2), KeepBest(1))
    with fc.CheckpointManager(directory, save_when=SaveEvery(4), keep=keep) as manager:
        if manager.latest_step() is not None:
            report = manager.restore(**run)
            start = report.step
            extra = [report.extra.more, sorted(report.extra.not_restored)]
        for step in range(start + 1, steps + 1):
            # Noise of the generator that is restored, the same on every rank.
            inputs = common.inputs_of(KINDS, step)
            loss = (net(inputs + paddle.rand(inputs.shape)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            scheduler.step()
            losses[str(step)] = float(loss)
            if preempted == [dist.get_rank(), step]:
                os.kill(os.getpid(), signal.SIGTERM)
            before = manager._comm.collectives
            wanted = manager.should_save(step)
            collectives.add(manager._comm.collectives - before)
            if wanted:
                manager.save(step, **run, metrics={"loss": loss}, extra={"seed": seed})
                saved.append(step)
            if manager.should_stop:
                break
        caught = signal.getsignal(signal.SIGTERM) != handler
        result = {
            "start": start,
            "extra": extra,
            "losses": losses,
            "saved": saved,
            "steps": manager.all_steps(),
            "best": manager.best_step(),
            "collectives": sorted(collectives),
            "preempted": manager.preempted,
            "scale": amp.state_dict()["scale"].item(),
        }
    given_back = signal.getsignal(signal.SIGTERM) == handler
    return {**result, "caught": caught, "given_back": given_back}


def fall_back(directory, degree):
    """Restores with a fall-back; every rank's report."""
    fc.install()
    hcg = common.init_tensor_parallel(degree)
    place, _ = common.place_in(hcg)
    net = Net(KINDS, True, degree, salt="other", place=place)
    with fc.CheckpointManager(directory) as manager:
        error = common.outcome(lambda: manager.restore(model=net, optimizer_states="ignore"))
        report = manager.restore(model=net, fallback=True, optimizer_states="ignore")
    return {"error": error, "step": report.step, "skipped": {str(step): why for step, why in report.skipped.items()}}


# -- what is asserted -------------------------------------------------------------------------------------------------

STEPS = 9


@pytest.fixture(scope="module")
def runs(world2, tmp_path_factory):
    """An uninterrupted run, and one that is preempted in step 6, on rank 1 alone."""
    whole = world2.run(train, directory=str(tmp_path_factory.mktemp("whole")), degree=2, steps=STEPS, seed=7)
    path = tmp_path_factory.mktemp("preempted")
    first = world2.run(train, directory=str(path), degree=2, steps=STEPS, seed=7, preempted=[1, 6])
    return whole, path, first


def test_a_signal_on_one_rank_stops_all_after_the_same_step(world2, runs):
    whole, _, first = runs
    assert [rank["preempted"] for rank in first] == [False, True]
    for rank, result in enumerate(first):
        assert list(result["losses"]) == ["1", "2", "3", "4", "5", "6"]
        assert result["saved"] == [4, 6]
        assert result["steps"] == [4, 6]
        assert result["collectives"] == [1, 2]  # the first looks for steps of another run
        assert result["caught"]
        for step, loss in result["losses"].items():
            assert loss == whole[rank]["losses"][step]
        assert not result["given_back"]  # a launcher sends the signal several times
        assert whole[rank]["given_back"]


def test_the_whole_run_keeps_the_latest_and_the_best(runs):
    for result in runs[0]:
        assert result["saved"] == [4, 8]
        assert result["best"] == min([4, 8], key=lambda step: result["losses"][str(step)])


def resume(world, ranks, degree, runs, tmp_path):
    """The rest of the preempted run, from a copy of its checkpoints, with another seed."""
    path = tmp_path / "copy"
    shutil.copytree(runs[1], path)
    return world(ranks).run(train, directory=str(path), degree=degree, steps=STEPS, seed=11)


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
    results = world2.run(fall_back, directory=str(path), degree=2)
    assert results[0] == results[1]
    assert results[0]["error"][0] == "CorruptCheckpointError"
    assert "step_00000006" in results[0]["error"][1]
    assert (results[0]["step"], list(results[0]["skipped"])) == (4, ["6"])
