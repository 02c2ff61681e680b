"""Checkpoints in PaddleFleet's layout, written by Paddle's own functions, resumed with this library by real ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("paddle.distributed.flex_checkpoint")

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.native.directory import is_complete
from paddle_flexckpt.testing import cpu_world
from paddle_flexckpt.trainer import replace_in_tree, restore_in_tree
from paddle_flexckpt.trainer.contents import collect_shards, model_shards
from tests.paddlefleet.library import everything, imitated, make_trainer

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
PARTS = ("model_state", "optimizer_state", "master_weight")
EMA = {"zcc_save_ema_coef": 0.5}
CODES = np.arange(24, dtype="int8").reshape(4, 6)

# -- what each rank runs -----------------------------------------------------------------------------------------------


def trainer_under(strategy: str, output_dir: str, salt: str = "", **flags: Any) -> Any:
    degrees = {"v1": {"sharding": 2}, "v2": {"sharding": 2}, "tp2": {"mp": 2}, "dp2": {"dp": 2}}[strategy]
    cpu_world.init_fleet(**degrees, split_param=strategy == "v2")

    def wrap(model: Any, optimizer: Any) -> tuple[Any, Any]:
        return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)

    degree = 2 if strategy == "tp2" else 1
    return make_trainer(output_dir, salt, degree, wrap, hybrid=True, **flags)


def write(strategy, output_dir, **flags):
    """PaddleFleet's way, without this library."""
    fc.uninstall()
    with imitated(installed=False):
        trainer = trainer_under(strategy, output_dir, **flags)
        trainer.train()
    dist.barrier()
    return trainer.calls


def resume(strategy, directory, output_dir, **flags):
    """Resumes, trains no further, and saves what is there then."""
    with imitated():
        trainer = trainer_under(strategy, output_dir, "other", max_steps=0, **flags)
        trainer.train(resume_from_checkpoint=directory)
        fc.save_state_dict(collect_shards(trainer, True), f"{output_dir}/there")
        return trainer.state.global_step


def save_fused(directory, where):
    """Saves a model whose first layer keeps gate and up side by side on each rank, as its statements say."""
    with imitated():
        trainer = trainer_under("tp2", directory)
        rules = {"aoa_statements": ["gate^T, up^T -> layers.0.up.weight, fused_ffn"]}
        if where == "class":
            type(trainer.model)._gen_aoa_config = classmethod(lambda cls, config: rules)
        else:
            trainer.model._gen_aoa_config = lambda config: rules
        fc.save_state_dict(model_shards(trainer), directory)
        return trainer.model.state_dict()["up.weight"].astype("float32").numpy().tolist()


def load_quantized(directory):
    """Loads as PaddleFleet does, by Paddle's own name of the function, with groups of which one is None."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = CODES.shape[0] // world
    target = paddle.zeros([rows, CODES.shape[1]], dtype="bfloat16")
    weight = fc.ShardedWeight("w", target, tuple(target.shape), CODES.shape, (rank * rows, 0))
    replace_in_tree()
    try:
        dist.load_state_dict(
            {"w": weight}, directory, aoa_config={"aoa_statements": ["hf.w -> w"]}, offload=True, safetensors=True,
            process_group=None, comm_method="parallel_broadcast", worker_groups=[dist.new_group([0, 1]), None],
            load_transform=Codes(),
        )  # fmt: skip
    finally:
        restore_in_tree()
    return target.astype("float32").numpy().tolist()


class Codes:
    def logical_metadata(self):
        return {"hf.w": SimpleNamespace(global_shape=CODES.shape, dtype="bfloat16")}

    def source_keys(self, logical_key):
        return ["hf.w", "hf.scale"]

    def apply(self, logical_key, source_tensors, output_dtype):
        return (source_tensors["hf.w"].astype("float32") * source_tensors["hf.scale"]).astype(output_dtype)


def train(strategy, output_dir, resume=None, **flags):
    """Trains with this library."""
    with imitated():
        trainer = trainer_under(strategy, output_dir, "" if resume is None else "other", **flags)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.calls


# -- what is asserted --------------------------------------------------------------------------------------------------


def averages_of(trainer: Any) -> dict[str, bytes]:
    buffer = trainer.callback_handler.callbacks[-1].buffer
    return {name: t.numpy().tobytes() for name, t in {**buffer.master_weights, **buffer.model_params}.items()}


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What one process trains: all ranks of the others take the same samples, so that theirs is the same."""
    with imitated():
        trainer = make_trainer(tmp_path_factory.mktemp("truth"), max_steps=2, **EMA)
        trainer.train()
        return everything(trainer), averages_of(trainer)


@pytest.fixture(scope="module", params=["v1", "v2"])
def written(request, world2, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    flags = {"strategy": request.param, "output_dir": str(directory), "max_steps": 2}
    calls = world2.run(write, **flags, **EMA)
    assert calls[1] == ["_save_flex_model_state", "_save_flex_optimizer_state", "_rotate_checkpoints"]
    found = directory / "checkpoint-2"
    assert {path.name for path in found.iterdir()} == {
        *PARTS, "ema_state", "trainer_state.bin", "saved_signal_0", "saved_signal_1",
    }  # fmt: skip
    assert all(list((found / part).glob("*.distcp")) for part in (*PARTS, "ema_state"))
    return found


def assert_holds(directory: Path, expected: dict[str, bytes]) -> None:
    found = {key: tensor.numpy().tobytes() for key, tensor in fc.load_merged_state_dict(str(directory)).items()}
    assert found.keys() == expected.keys()
    assert [key for key in found if found[key] != expected[key]] == []


def test_one_process_resumes_model_masters_states_and_averages(tmp_path, written, truth):
    with imitated():
        trainer = make_trainer(tmp_path, "other", max_steps=0, **EMA)
        trainer.train(resume_from_checkpoint=str(written))
        assert trainer.state.global_step == 2
        assert everything(trainer) == truth[0]
        assert averages_of(trainer) == truth[1]
        assert trainer.callback_handler.callbacks[-1].buffer.resumed_from is None


@pytest.mark.parametrize("strategy", ["v1", "v2", "tp2"])
def test_ranks_resume_under_other_strategies(tmp_path, written, truth, world2, strategy):
    assert world2.run(resume, strategy=strategy, directory=str(written), output_dir=str(tmp_path)) == [2, 2]
    assert_holds(tmp_path / "there", truth[0])


def test_all_ranks_save_where_paddlefleet_lets_one_of_each_pair(tmp_path, world2):
    """Its own save of the optimizer waits for ever there: a step of all ranks, behind a gate."""
    flags = {"data_parallel_size": 2, "max_steps": 4, "use_flex_async_save": True, "save_total_limit": 1}
    calls = world2.run(train, strategy="dp2", output_dir=str(tmp_path), **flags)
    assert calls == [["state.save"] * 2, []]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert is_complete(tmp_path / "checkpoint-4/flex_checkpoint")
    with imitated():
        whole, resumed = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b", "other", max_steps=0)
        whole.train()
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert everything(resumed) == everything(whole)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_fused_parameters_are_natural_in_one_process(tmp_path, world2, where):
    first, second = world2.run(save_fused, directory=str(tmp_path), where=where)
    (gate, up), (gate2, up2) = (np.split(np.asarray(part, "float32"), 2, 1) for part in (first, second))
    found = fc.load_merged_state_dict(str(tmp_path))["up.weight"].astype("float32").numpy()
    assert np.array_equal(found, np.concatenate([gate, gate2, up, up2], axis=1))


def test_real_ranks_load_through_a_transform(tmp_path, world2):
    scale = np.linspace(0.5, 2, 4, dtype="float32")[:, None]
    save_file({"hf.w": CODES, "hf.scale": scale}, tmp_path / "model.safetensors")
    parts = world2.run(load_quantized, directory=str(tmp_path))
    expected = paddle.to_tensor(CODES * scale).astype("bfloat16").astype("float32").numpy()
    assert np.array_equal(np.concatenate([np.asarray(part, "float32") for part in parts]), expected)


@pytest.mark.parametrize(
    ("lost", "error", "said"),
    [
        ("optimizer_state/0.metadata", CorruptCheckpointError, "optimizer_state has no 0.metadata, which the other"),
        ("master_weight/1_0.distcp", CorruptCheckpointError, "master_weight/1_0.distcp is missing; the metadata names"),
        ("model_state/0_0.distcp", CorruptCheckpointError, "model_state/0_0.distcp is missing; the metadata names it"),
        ("master_weight", ValidationError, ".w_0'"),
        ("optimizer_state", ValidationError, "the source has no optimizer states"),
        ("model_state", ValidationError, "key 'scale'"),
    ],
)
def test_a_lost_part_is_refused_by_name(tmp_path, written, lost, error, said):
    copy = tmp_path / "checkpoint-2"
    shutil.copytree(written, copy)
    if (copy / lost).is_dir():
        shutil.rmtree(copy / lost)
    else:
        (copy / lost).unlink()
    with imitated():
        trainer = make_trainer(tmp_path / "out", "other", max_steps=0)
        before = {name: tensor.numpy().tobytes() for name, tensor in trainer.model.state_dict().items()}
        with pytest.raises(error) as caught:
            trainer.train(resume_from_checkpoint=str(copy))
        assert said in str(caught.value)
        assert {name: tensor.numpy().tobytes() for name, tensor in trainer.model.state_dict().items()} == before


def test_averages_that_say_not_what_is_where_are_left_to_the_library(tmp_path, written):
    copy = tmp_path / "checkpoint-2"
    shutil.copytree(written, copy)
    (copy / "ema_state/0.metadata").unlink()
    with imitated():
        trainer = make_trainer(tmp_path / "out", "other", max_steps=0, **EMA)
        trainer.train(resume_from_checkpoint=str(copy))
        assert trainer.callback_handler.callbacks[-1].buffer.resumed_from == str(copy)
