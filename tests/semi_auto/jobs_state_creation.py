"""Jobs of test_state_creation."""

from __future__ import annotations

import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.state_creation import create_states
from tests.semi_auto.training import build


def given_without_one(fully):
    """A semi-automatic optimizer that was given all states but one: the error, what is left, and what a second try has.

    Args:
        fully: Whether the model is under ``fully_shard`` without fusion; otherwise stage 1.

    Returns:
        The error; numbers of states created and of entries left after it; the number of states once all are given.
    """
    from paddle.distributed.fsdp import fully_shard

    fc.install()
    mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
    dist.auto_parallel.set_mesh(mesh)

    def make():
        with paddle.utils.unique_name.guard():
            layer = paddle.nn.Linear(4, 6)
            dist.shard_layer(layer, mesh)
            if fully:
                fully_shard(layer, mesh=mesh, enable_tensor_fusion_and_overlap=False)
        inner = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
        return layer, inner if fully else dist.shard_optimizer(inner, dist.ShardingStage1("dp", mesh))

    with paddle.utils.unique_name.guard():
        _, optimizer = make()
        create_states(optimizer)
        state = optimizer.state_dict()
        given = {name: paddle.ones(tensor.shape) for name, tensor in state.items() if name != "LR_Scheduler"}
    layer, fresh = make()
    text = ""
    with paddle.utils.unique_name.guard():
        fresh.set_state_dict({name: t for name, t in given.items() if name != "linear_0.b_0.dist_moment2_0"})
        shards = layer.sharded_state_dict()
        try:
            fresh.sharded_state_dict(shards)
        except ValueError as error:
            text = str(error)
        inner = getattr(fresh, "_inner_opt", fresh)
        left = [sum(map(len, inner._accumulators.values())), len(inner._accumulators_holder)]
        fresh.set_state_dict(given)
        return [text, left, len(fresh.sharded_state_dict(shards))]


def frozen_in_between():
    """Tensor fusion whose states are asked for, and again after a parameter has been frozen and thawed.

    Returns:
        The error with the parameter frozen; whether the states are the same, under the same names, once it is thawed.
    """
    fc.install()
    built = build("dp2-fusion", "uneven")

    def ask():
        shards = built.optimizer.sharded_state_dict(built.model.sharded_state_dict())
        return {key: [str(shard.flattened_range), shard.local_tensor.data_ptr()] for key, shard in shards.items()}

    before, text = ask(), ""
    built.model.cube.weight.stop_gradient = True
    try:
        ask()
    except ValueError as error:
        text = str(error)
    built.model.cube.weight.stop_gradient = False
    return [text, ask() == before]
