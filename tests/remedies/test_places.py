"""Remedies about places of DistTensors and of shards, and what has no place; each provoked and followed."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import concat, group_replicas, validate_coverage
from paddle_flexckpt.catalog.validate import validate_shards
from paddle_flexckpt.parallel.layers import own_state
from paddle_flexckpt.planning.matching import ShardMatcher, uncovered_targets
from paddle_flexckpt.planning.mesh_layouts import MeshLayout
from paddle_flexckpt.planning.meshes import parse_mesh
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.sharded_weight import ShardedWeight, build_sharded_state_dict, make_replicated_sharded_weight
from tests.planning.test_mesh_layouts import model
from tests.property.layouts import Shard, catalog_of
from tests.remedies.following import Advice, advised, provoked

WHOLE = np.arange(16, dtype=np.float32).reshape(4, 4)
MESH = dist.ProcessMesh([0], dim_names=["x"])


def loaded(path) -> list:
    target = np.zeros_like(WHOLE)
    fc.load_state_dict({"a": target}, path)
    return target.tolist()


def rearranged(values):
    placement = dist.Shard(0)
    if not hasattr(placement, "set_split_factor"):
        pytest.skip("this Paddle does not re-arrange")
    placement.set_split_factor(2)
    return dist.shard_tensor(paddle.to_tensor(values), MESH, [placement])


def partial(values):
    return dist.auto_parallel.api.dtensor_from_local(paddle.to_tensor(values), MESH, [dist.Partial()])


def follow_by_a_copy(tensor, path):
    copy = dist.reshard(tensor, MESH, [dist.Replicate()])
    fc.save_state_dict({"a": copy}, path)
    assert loaded(path) == WHOLE.tolist()
    for placement in (dist.Replicate(), dist.Shard(0)):
        target = dist.shard_tensor(paddle.zeros([4, 4]), MESH, [placement])
        fc.load_state_dict({"a": target}, path)
        assert target.numpy().tolist() == WHOLE.tolist()


def test_a_partial_tensor(tmp_path):
    with provoked("dist_tensor.py", "save what dist.reshard() makes of it with Replicate or Shard; a"):
        fc.save_state_dict({"a": partial(WHOLE)}, tmp_path)
    follow_by_a_copy(partial(WHOLE), tmp_path)
    with provoked("dist_tensor.py", "save what dist.reshard() makes of it with Replicate or Shard; a"):
        fc.load_state_dict({"a": partial(WHOLE)}, tmp_path)


def test_re_arranged_elements(tmp_path):
    with provoked("dist_tensor.py", "save what dist.reshard() makes of it with a plain Shard or"):
        fc.save_state_dict({"a": rearranged(WHOLE)}, tmp_path)
    follow_by_a_copy(rearranged(WHOLE), tmp_path)


def test_a_buffer_with_wrong_placements(tmp_path):
    local = paddle.to_tensor(WHOLE.reshape(-1))
    tensor = paddle.Tensor(local, dims=[4, 4], process_mesh=MESH, placements=[dist.Shard(0)])
    with provoked("dist_tensor.py", "pass a ShardedWeight with the local value and its place"):
        fc.save_state_dict({"a": tensor}, tmp_path)
    fc.save_state_dict({"a": ShardedWeight("a", local, (4, 4), (4, 4), (0, 0), True, slice(0, 16))}, tmp_path)
    assert loaded(tmp_path) == WHOLE.tolist()


def test_a_description_that_is_not_the_tensors(tmp_path):
    tensor = dist.shard_tensor(paddle.to_tensor(WHOLE), MESH, [dist.Shard(0)])
    with provoked("sharded_weight.py", "make_replicated_sharded_weight(key, tensor) takes them from its"):
        ShardedWeight("a", tensor, (2, 4), (4, 4), (0, 0))
    fc.save_state_dict({"a": make_replicated_sharded_weight("a", tensor)}, tmp_path / "whole")
    assert loaded(tmp_path / "whole") == WHOLE.tolist()
    with provoked("sharded_weight.py", "make_replicated_sharded_weight(key, tensor) takes them from its"):
        ShardedWeight("a", tensor, (4, 4), (4, 4), (0, 0), True, slice(0, 16))
    local = tensor._local_value().flatten()
    fc.save_state_dict({"a": ShardedWeight("a", local, (4, 4), (4, 4), (0, 0), True, slice(0, 16))}, tmp_path / "flat")
    assert loaded(tmp_path / "flat") == WHOLE.tolist()


def test_a_part_of_a_layer_without_a_rule():
    class Cut(nn.Layer):
        def __init__(self):
            super().__init__()
            self.weight = self.create_parameter([4, 2])
            self.weight.is_distributed = True

    class Ruled(Cut):
        def _get_shard_rules(self):
            return {"weight": 1}

    with provoked("sharded_weight.py", "give its layer a _get_shard_rules() that returns {name: axis}"):
        build_sharded_state_dict(own_state(Cut()))
    layer = Ruled()
    state = build_sharded_state_dict(own_state(layer), layer._get_shard_rules())
    assert tuple(state["weight"].global_shape) == (4, 2)  # this process is a group of one


MESHES = {
    "mesh=2x2:dp,mp;sharding=stage1:dp;wide=S0,S1": (
        Advice("planning/mesh_layouts.py", "place it as R along one axis, or leave sharding= out"),
        ["mesh=2x2:dp,mp;sharding=stage1:dp;wide=R,S1", "mesh=2x2:dp,mp;wide=S0,S1"],
    ),
    "mesh=2x2x2:dp,x,y;sharding=stage1:dp;wide=R,S0,S1": (
        Advice("planning/mesh_layouts.py", "cut it along one axis, or leave sharding= out"),
        ["mesh=2x2x2:dp,x,y;sharding=stage1:dp;wide=R,S0,R", "mesh=2x2x2:dp,x,y;wide=R,S0,S1"],
    ),
    "mesh=2x2:mp,dp;sharding=stage1:dp": (
        Advice("planning/mesh_layouts.py", "put axis "),
        ["mesh=2x2:dp,mp;sharding=stage1:dp"],
    ),
}


@pytest.mark.parametrize("wrong", MESHES)
def test_a_mesh_over_which_states_are_not_sharded(wrong):
    advice, right = MESHES[wrong]
    with provoked(*advice):
        MeshLayout(model(), parse_mesh(wrong))
    for text in right:
        layout = MeshLayout(model(), parse_mesh(text))
        job = concat([layout.catalog(rank) for rank in range(layout.strategy.ranks)])
        assert (validate_shards(job), validate_coverage(job, group_replicas(job)).problems) == ([], [])


def test_a_source_that_holds_a_part():
    part, whole = (Shard("w", "uint8", (8,), (0,), (extent,), None, 0) for extent in (4, 8))

    def problems(source, target):
        pieces = ShardMatcher(catalog_of([source])).match(catalog_of([target]))
        return uncovered_targets(pieces, catalog_of([target]), np.arange(1))

    (problem,) = problems(part, whole)
    advised("planning/matching.py", "save again with every rank taking part, or load only what the", str(problem))
    assert problems(whole, whole) == problems(part, part) == []


def test_a_checkpoint_without_extra_state(tmp_path):
    state = {"a": WHOLE}
    fc.save_state_dict(state, tmp_path)
    with provoked("run_state/extra_state.py", "leave load_extra_state() out for this checkpoint, and save {**state"):
        load_extra_state(tmp_path)
    assert loaded(tmp_path) == WHOLE.tolist()
    fc.save_state_dict({**state, **collect_extra_state()}, tmp_path)
    assert restore_extra_state(load_extra_state(tmp_path)).not_restored == {}
    assert loaded(tmp_path) == WHOLE.tolist()
