"""Wrappers of models and optimizers: no prefix reaches a key, and nothing is lost through them.

The jobs: models and optimizers in every wrapper of fleet, trained, saved and loaded.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from paddle_flexckpt.trainer.in_tree import replace_in_tree, restore_in_tree
from tests.distributed import jobs_common as common

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

WIDTH = 6
STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", paddle.zeros([1], "int64"))

    def forward(self, x):
        return nn.functional.gelu(self.linear(x))


def blocks(count=2):
    return nn.Sequential(*(Block() for _ in range(count)))


class Loss(nn.Layer):
    def forward(self, out, label):
        return ((out - label) ** 2).mean()


def layout(case):
    """Initialises fleet for a case, and returns its model, its wrapped model and its wrapped optimizer."""
    size = dist.get_world_size()
    degrees = {
        "DataParallel": {"dp": size},
        "TensorParallel": {"mp": size},
        "ShardingParallel": {"sharding": size},
        "SegmentParallel": {"sep": size},
        "PipelineParallel": {"pp": size},
        "PipelineParallelWithInterleave": {"pp": size},
        "PipelineParallelWithInterleaveFthenB": {"pp": size},
        "GroupShardedStage2": {"dp": size},
        "MixPrecision": {"sharding": size},
        "MixPrecisionV2": {"sharding": size},
    }[case]
    # Paddle chooses between the two interleaved schedules by the number of micro batches.
    micro = 2 if case.endswith("FthenB") else 1
    split = {"split_param": case.endswith("V2"), "accumulate_steps": 8 // micro, "micro_batch_size": micro}
    hcg = cpu_world.init_fleet(**degrees, **split)
    if "pp" in degrees:
        interleaved = {"num_virtual_pipeline_stages": 2, "seg_method": "layer:Block"}
        chunks = interleaved if "Interleave" in case else {}
        descs = [LayerDesc(Block) for _ in range(size * 2)]
        model = PipelineLayer(descs, num_stages=size, loss_fn=Loss(), topology=hcg.topology(), **chunks)
    else:
        model = blocks()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    if case == "GroupShardedStage2":
        from paddle.distributed.sharding import group_sharded_parallel

        return (model, *group_sharded_parallel(model, optimizer, "os_g")[:2])
    if case.startswith("MixPrecision"):
        wrapper = fleet.distributed_model(MixPrecisionLayer(model, "bfloat16"))
        return model, wrapper, fleet.distributed_optimizer(MixPrecisionOptimizer(optimizer))
    return model, fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)


def fill(model, salt):
    """Values by name and salt, the same in every stage, replica and wrapper."""
    for name, parameter in model.named_parameters():
        seed = sum(map(ord, name)) + salt
        parameter.set_value(paddle.to_tensor(common.np.random.RandomState(seed).randn(*parameter.shape), "float32"))


def step(model, wrapper, optimizer, number):
    x = paddle.to_tensor(common.np.random.RandomState(number).randn(8, WIDTH).astype("float32"))
    if isinstance(model, PipelineLayer):
        return wrapper.train_batch([x, x], optimizer).numpy().ravel().tolist()
    loss = (wrapper(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def round_trip(case, directory):
    """Two steps, a save through the wrappers, a load through fresh wrappers, one more step on both."""
    fc.install()
    model, wrapper, optimizer = layout(case)
    fill(model, 1)
    fc.check(wrapper, optimizer)
    created = getattr(optimizer, "_accumulators", {})
    unasked = sorted(name for name, tensors in created.items() if tensors)
    for number in range(2):
        step(model, wrapper, optimizer, number)
    inner, outer = model.sharded_state_dict(), wrapper.sharded_state_dict()
    prefixed = wrapper.sharded_state_dict(structured_name_prefix="x.")
    states = fc.optimizer_sharded_state_dict(optimizer, outer)
    result = {
        "wrapper": type(wrapper).__name__,
        "optimizer": type(optimizer).__name__,
        "same": list(inner) == list(outer) and all(inner[k].local_tensor is outer[k].local_tensor for k in inner),
        "prefixed": sorted(prefixed) == sorted(f"x.{key}" for key in inner),
        "prefixes": [key for key in (*outer, *states) if "_layer" in key],
        "own_method": sorted(optimizer.sharded_state_dict(outer)) == sorted(states),
        "names": sorted([*outer, *states]),
        "created by a check": unasked,
    }
    replace_in_tree()
    values = {key: value.numpy() for key, value in model.state_dict().items()}
    whole = dict(wrapper.full())
    fill(model, 3)
    wrapper.set_state_dict(whole)
    result["set"] = [key for key, value in model.state_dict().items() if (value.numpy() != values[key]).any()]
    restore_in_tree()
    state = {**outer, **states}
    fc.save_state_dict(state, directory)
    loss = step(model, wrapper, optimizer, 2)
    after = common.snapshot({**wrapper.sharded_state_dict(), **optimizer.sharded_state_dict(outer)})

    model, wrapper, optimizer = layout(case)
    fill(model, 2)
    outer = wrapper.sharded_state_dict()
    target = {**outer, **optimizer.sharded_state_dict(outer)}
    report = fc.load_state_dict(target, directory)
    result["missing"] = report.missing
    result["loss"] = [loss, step(model, wrapper, optimizer, 2)]
    final = common.snapshot({**wrapper.sharded_state_dict(), **optimizer.sharded_state_dict(outer)})
    result["different"] = sorted(key for key in after if after[key] != final.get(key))
    return result


def load_plain(directory):
    """What any wrapper saved, into a model and an optimizer that nothing is wrapped around."""
    fc.install()
    cpu_world.init_fleet(dp=dist.get_world_size())
    model = blocks()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    shards = model.sharded_state_dict()
    report = fc.load_state_dict({**shards, **optimizer.sharded_state_dict(shards)}, directory, strict=True)
    return {"keys": report.keys, "aliases": report.aliases}


# -- what is asserted -------------------------------------------------------------------------------------------------

#: Ranks, the class around the model, and the class around the optimizer.
CASES = {
    "DataParallel": (2, "DataParallel", "HybridParallelOptimizer"),
    "TensorParallel": (2, "TensorParallel", "HybridParallelOptimizer"),
    "ShardingParallel": (2, "ShardingParallel", "HybridParallelOptimizer"),
    "SegmentParallel": (2, "SegmentParallel", "HybridParallelOptimizer"),
    "PipelineParallel": (2, "PipelineParallel", "HybridParallelOptimizer"),
    "PipelineParallelWithInterleave": (4, "PipelineParallelWithInterleave", "HybridParallelOptimizer"),
    "PipelineParallelWithInterleaveFthenB": (4, "PipelineParallelWithInterleaveFthenB", "HybridParallelOptimizer"),
    "GroupShardedStage2": (2, "GroupShardedStage2", "GroupShardedOptimizerStage2"),
    "MixPrecision": (2, "ShardingParallel", "HybridParallelOptimizer"),
    "MixPrecisionV2": (2, "ShardingParallel", "HybridParallelOptimizer"),
}


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    root, results = tmp_path_factory.mktemp("wrappers"), {}

    def run(case):
        if case not in results:
            path = str(root / case)
            results[case] = path, world(CASES[case][0]).run(round_trip, case=case, directory=path)
        return results[case]

    return run


@pytest.mark.parametrize("case", CASES)
def test_round_trip(done, case):
    for result in done(case)[1]:
        assert (result["wrapper"], result["optimizer"]) == CASES[case][1:]
        assert result["same"]
        assert result["prefixed"]
        assert result["own_method"]
        assert result["created by a check"] == []
        # Virtual stages give names of their own in Paddle.
        assert result["set"] == [] or "Interleave" in case
        assert result["prefixes"] == result["missing"] == result["different"] == []
        assert result["loss"][0] == result["loss"][1]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("Pipeline")])
def test_a_plain_model_loads_it(world2, done, case):
    parameters = [f"{i}.linear.{name}" for i in range(2) for name in ("weight", "bias")]
    names = {*parameters, *(f"{i}.calls" for i in range(2)), *(f"{p}.{s}" for p in parameters for s in STATES)}
    path, results = done(case)
    assert set().union(*(result["names"] for result in results)) == names
    for result in world2.run(load_plain, directory=path):
        assert result == {"keys": len(names), "aliases": {}}
