"""Muon through the trainer: saved by one job, resumed by a fresh one of another number of ranks, all states bit-equal.

PaddleFleet's trainer, Muon and the optimizer that shards it are imitated; processes, collectives and fused buffers are
real (tests/distributed/jobs_muon.py). All ranks take the same samples, so that one process trains what every job has to
hold: the mean of equal gradients is exact for 2 and 4 ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle.distributed.flex_checkpoint")

import paddle.distributed as dist
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from paddle_flexckpt.trainer.contents import collect_shards
from tests.distributed.jobs_muon import Muon, MuonShardingOptimizer, paddle_with_muon
from tests.paddlefleet.library import everything, imitated, make_trainer

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
MATRICES = ("up.weight", "down.weight")

# -- what each rank runs -----------------------------------------------------------------------------------------------


def make_muon(model: Any) -> Any:
    matrices = {parameter.name for name, parameter in model.named_parameters() if name in MATRICES}
    return Muon(0.01, model.parameters(), matrices, multi_precision=True)


def trainer_with_muon(sharding: str, output_dir: str, salt: str = "", **flags: Any) -> Any:
    """A trainer whose optimizer is sharded as MuonShardingOptimizer does, or element by element (V2)."""
    hcg = cpu_world.init_fleet(sharding=dist.get_world_size(), split_param=sharding == "v2")

    def wrap(model: Any, optimizer: Any) -> tuple[Any, Any]:
        if sharding == "muon":
            return model, MuonShardingOptimizer(optimizer, hcg)
        return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)

    return make_trainer(output_dir, salt, wrap=wrap, optimizer=make_muon, hybrid=True, **flags)


def train(output_dir, sharding="muon", resume=None, **flags):
    """Trains, from the start or from a checkpoint, and saves; returns what this rank's optimizer holds itself."""
    with paddle_with_muon(), imitated():
        trainer = trainer_with_muon(sharding, output_dir, "" if resume is None else "other", **flags)
        trainer.train(resume_from_checkpoint=resume)
        if flags.get("max_steps") == 0:
            fc.save_state_dict(collect_shards(trainer, True), f"{output_dir}/there")
        names = {parameter.name: name for name, parameter in trainer.model.named_parameters()}
        owned = {names[name]: list(t.shape) for name, t in trainer.optimizer._accumulators["moment1"].items()}
        return {"step": trainer.state.global_step, "moment1": owned}


# -- what is asserted --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> dict[int, dict[str, bytes]]:
    """What one process holds after each number of steps."""
    found = {}
    with paddle_with_muon(), imitated():
        for steps in (2, 4):
            trainer = make_trainer(tmp_path_factory.mktemp("truth"), optimizer=make_muon, max_steps=steps)
            trainer.train()
            found[steps] = everything(trainer)
    assert (
        len(found[4]) == 5 + 4 + 5 + 3 * 3
    )  # parameters, masters, momenta, and three more states of what is no matrix
    assert all(found[2][key] != found[4][key] for key in found[2])
    return found


def assert_holds(directory: Path, expected: dict[str, bytes]) -> None:
    found = {key: tensor.numpy().tobytes() for key, tensor in fc.load_merged_state_dict(str(directory)).items()}
    assert found.keys() == expected.keys()
    assert [key for key in found if found[key] != expected[key]] == []


def saved(world: Any, directory: Path, truth: dict[int, dict[str, bytes]]) -> str:
    """Trains two steps; each matrix is whole, and one rank's."""
    reports = world.run(train, output_dir=str(directory), max_steps=2)
    owners = [name for report in reports for name in report["moment1"] if name in MATRICES]
    assert sorted(owners) == sorted(MATRICES)
    assert_holds(directory / "checkpoint-2/flex_checkpoint", truth[2])
    return str(directory / "checkpoint-2")


def assert_resumes(world: Any, checkpoint: str, directory: Path, truth: dict[int, dict[str, bytes]]) -> None:
    """Everything is there after the load, and two steps later it is what it would have been without a break."""
    reports = world.run(train, output_dir=str(directory / "loaded"), resume=checkpoint, max_steps=0)
    assert {report["step"] for report in reports} == {2}
    assert_holds(directory / "loaded/there", truth[2])
    world.run(train, output_dir=str(directory / "on"), resume=checkpoint, max_steps=4)
    assert_holds(directory / "on/checkpoint-4/flex_checkpoint", truth[4])


def test_a_job_of_four_ranks_resumes_what_two_have_saved(world2, world4, tmp_path, truth):
    checkpoint = saved(world2, tmp_path / "two", truth)
    assert_resumes(world4, checkpoint, tmp_path, truth)


@pytest.mark.slow
def test_a_job_of_two_ranks_resumes_what_four_have_saved(world2, world4, tmp_path, truth):
    checkpoint = saved(world4, tmp_path / "four", truth)
    assert_resumes(world2, checkpoint, tmp_path, truth)


@pytest.mark.slow
def test_one_process_resumes_and_so_does_sharding_by_elements(world2, tmp_path, truth):
    checkpoint = saved(world2, tmp_path / "two", truth)
    with paddle_with_muon(), imitated():
        trainer = make_trainer(tmp_path / "one", "other", optimizer=make_muon, max_steps=4)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert everything(trainer) == truth[4]
    # A step of Muon on a part of a matrix is another step, so V2 only loads.
    world2.run(train, output_dir=str(tmp_path / "v2"), sharding="v2", resume=checkpoint, max_steps=0)
    assert_holds(tmp_path / "v2/there", truth[2])


@pytest.mark.slow
def test_a_save_in_the_background_resumes_too(world2, world4, tmp_path, truth):
    flags = {"use_flex_async_save": True, "tensorwise_offload_optimizer": True}
    world2.run(train, output_dir=str(tmp_path / "two"), max_steps=2, **flags)
    assert_resumes(world4, str(tmp_path / "two/checkpoint-2"), tmp_path, truth)
