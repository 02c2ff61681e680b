"""Remedies of semi-automatic parallelism, each provoked and followed; those of more than one rank by two real ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.utils import unique_name

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.semi_auto import DistModelMixin
from tests.parallel.conftest import installed  # noqa: F401 - each test runs with the mixins
from tests.remedies.following import advised, provoked

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)


def error_of(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def built(mesh, **options):
    """A layer on a mesh, with an optimizer of stage 1 whose buffers are fused."""
    with unique_name.guard():
        layer = paddle.nn.Linear(4, 6, bias_attr=False)
        layer.weight.set_value(WEIGHT)
        dist.shard_layer(layer, mesh)
        inner = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
        optimizer = dist.shard_optimizer(inner, dist.ShardingStage1("dp", mesh))
        optimizer._enable_tensor_fusion()
    return layer, optimizer


def states_of(layer, optimizer):
    return optimizer.sharded_state_dict(layer.sharded_state_dict())


def loaded(path):
    target = {"weight": np.zeros_like(WEIGHT)}
    target.update({f"weight.moment{number}_0": np.ones_like(WEIGHT) for number in (1, 2)})
    target.update({f"weight.beta{number}_pow_acc_0": np.zeros([1], "float32") for number in (1, 2)})
    fc.load_state_dict(target, path, process_group="self", strict=True)
    return [target["weight"].tolist() == WEIGHT.tolist(), float(target["weight.moment1_0"].sum())]


def meshes_of_fusion(path):
    """Fusion without the axis of the mesh, and on a mesh that one rank is not on: errors, and a save after each."""
    fc.install()
    before = dist.auto_parallel.get_mesh()
    ranks = list(range(dist.get_world_size()))
    told = []
    for name, on in (("axis", ranks), ("rank", ranks[:1])):
        mesh = dist.ProcessMesh(on, dim_names=["dp"])
        dist.auto_parallel.set_mesh(mesh)
        layer, optimizer = built(mesh)
        if name == "axis":
            dist.auto_parallel.set_mesh(dist.ProcessMesh(ranks, dim_names=["x"]))
        told.append(error_of(lambda: states_of(layer, optimizer)))  # noqa: B023
        dist.auto_parallel.set_mesh(mesh)
        state = layer.sharded_state_dict()
        if dist.get_rank() in on:
            state.update(states_of(layer, optimizer))
        fc.save_state_dict(state, f"{path}/{name}")
        told.append(loaded(f"{path}/{name}"))
    dist.auto_parallel.set_mesh(before)
    return told


def groups_under_fully_shard(path):
    """An optimizer with parameter groups under ``fully_shard``: the error, and a save with one list."""
    from paddle.distributed.fsdp import fully_shard

    fc.install()
    before = dist.auto_parallel.get_mesh()
    mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
    dist.auto_parallel.set_mesh(mesh)
    with unique_name.guard():
        layer = paddle.nn.Linear(4, 6, bias_attr=False)
        layer.weight.set_value(WEIGHT)
        dist.shard_layer(layer, mesh)
        fully_shard(layer, mesh=mesh, enable_tensor_fusion_and_overlap=False)
    group = {"params": layer.parameters(), "weight_decay": 0.0}
    grouped = paddle.optimizer.AdamW(0.1, parameters=[group])
    text = error_of(lambda: states_of(layer, grouped))
    one = paddle.optimizer.AdamW(0.1, parameters=layer.parameters(), apply_decay_param_fun=lambda name: False)
    fc.save_state_dict({**layer.sharded_state_dict(), **states_of(layer, one)}, path)
    dist.auto_parallel.set_mesh(before)
    return [text, loaded(path)]


# -- what is asserted -------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_the_mesh_of_tensor_fusion(world2, tmp_path):
    for rank, (axis, first, place, second) in enumerate(world2.run(meshes_of_fusion, path=str(tmp_path))):
        assert first == second == [True, 0.0]
        advised("parallel/tensor_fusion.py", "paddle.distributed.auto_parallel.set_mesh() with a mesh that has", axis)
        if rank:
            advised("parallel/tensor_fusion.py", "ask only the ranks of the mesh for the optimizer's state", place)
        else:
            assert place == ""


@pytest.mark.multiprocess
def test_parameter_groups_under_fully_shard(world2, tmp_path):
    for text, found in world2.run(groups_under_fully_shard, path=str(tmp_path)):
        advised("parallel/state_creation.py", "one list of parameters, and weight decay by apply_decay_param_fun", text)
        assert found == [True, 0.0]


def static_model(state, mode="train"):
    """What is looked at of a DistModel."""
    names = {"weight": "w.dist"}
    return SimpleNamespace(
        _engine=SimpleNamespace(_mode=mode, fused_ffn_qkv=None, _optimizer=None),
        _structured_to_parameter_name=names,
        _parameter_to_structured_name={raw: key for key, raw in names.items()},
        state_dict=lambda: state,
    )


def test_a_static_model_without_a_program():
    model = static_model({"weight": paddle.to_tensor(WEIGHT)}, mode=None)
    with provoked("parallel/semi_auto.py", "call its train(), eval() or predict() before its state is asked for"):
        DistModelMixin.sharded_state_dict(model)
    model._engine._mode = "train"
    assert list(DistModelMixin.sharded_state_dict(model)) == ["weight"]


def test_a_static_model_with_a_state_of_no_parameter(tmp_path):
    state = {"weight": paddle.to_tensor(WEIGHT), "queer_0_moment1_0": paddle.to_tensor(WEIGHT + 1)}
    with provoked("parallel/semi_auto.py", "save state_dict() as it is, without other names"):
        DistModelMixin.sharded_state_dict(static_model(state))
    fc.save_state_dict(static_model(state).state_dict(), tmp_path)
    target = {name: paddle.zeros([4, 6]) for name in state}
    fc.load_state_dict(target, tmp_path, strict=True)
    assert all(target[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in state.items())


def test_a_fused_slice_in_a_plain_state_dict(tmp_path):
    layer = paddle.nn.Linear(4, 6, bias_attr=False)
    layer.weight.set_value(WEIGHT)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    state = {"weight": layer.weight, "slice@weight_moment1_0": paddle.zeros([24])}
    with provoked(
        "memory/state.py", "save and load dist_model.sharded_state_dict() instead of dist_model.state_dict()"
    ):
        fc.save_state_dict(state, tmp_path)
    shards = layer.sharded_state_dict()
    fc.save_state_dict({**shards, **optimizer.sharded_state_dict(shards)}, tmp_path)
    assert loaded(tmp_path) == [True, 0.0]
