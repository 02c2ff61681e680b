"""The layouts that are generated without a job equal what the ranks of a real job describe, field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.memory.state import open_state
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.testing import cpu_world
from tests.distributed import test_experts as experts
from tests.distributed.matrix import jobs
from tests.distributed.matrix.network import AXES, BLOCKS, HIDDEN, INNER, VOCABULARY
from tests.distributed.matrix.strategies import MODELS, REHEARSED, STRATEGIES, Strategy

BLOCK = {
    "ln.weight": [HIDDEN],
    "ln.bias": [HIDDEN],
    "fc1.weight": [HIDDEN, INNER],
    "fc1.bias": [INNER],
    "fc2.weight": [INNER, HIDDEN],
    "fc2.bias": [HIDDEN],
    "cube": [3, 5, 7],
    "gain": [1],
    "idle": [5],
    "frozen": [4],
}
# Parameters of the layer itself come before those of its sub-layers.
ORDER = ("cube", "gain", "idle", "frozen", *(name for name in BLOCK if "." in name))


def rows_of(catalog):
    """Everything that a catalog says of each shard, by key."""
    return {
        catalog.key_name(row): [
            catalog.dtype_name(row),
            *(list(catalog.unpadded(row, column)) for column in (catalog.global_shape, catalog.offset, catalog.shape)),
            int(catalog.flat_start[row]),
            int(catalog.flat_stop[row]),
        ]
        for row in range(len(catalog))
    }


def describe(strategy, model):
    """What this rank of a real job describes."""
    return rows_of(open_state(jobs.begin(strategy, model, "saved").state(), dist.get_rank()).catalog)


def model_of(strategy: Strategy, kind: str) -> Model:
    """The model of the matrix, by hand."""
    if kind == "experts":
        return experts_model()
    last = BLOCKS + 1
    tied = kind == "tied"
    tensors = [ModelTensor("0.embedding.weight", (VOCABULARY, HIDDEN), tp_axis=0, layers=(0, last) if tied else (0,))]
    for layer in range(1, last):
        tensors += [
            ModelTensor(
                f"{layer}.{name}",
                tuple(BLOCK[name]),
                tp_axis=AXES.get(name),
                layers=(layer,),
                is_trained=name != "frozen",
            )
            for name in ORDER
        ]
    if not tied:
        tensors.append(ModelTensor(f"{last}.linear.weight", (HIDDEN, VOCABULARY), layers=(last,)))
    return Model(tuple(tensors), last + 1, frozenset(range(1, last)), segment_size=64)


def experts_model() -> Model:
    tensors = [ModelTensor("inp.weight", (experts.WIDTH,) * 2), ModelTensor("inp.bias", (experts.WIDTH,))]
    net = experts.Net()
    known = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    for name, shape in known.items():
        if name.startswith("inp."):
            continue
        if ".experts." in name:
            number, local = name.split(".experts.")[1].split(".", 1)
            expert = (int(number), experts.EXPERTS)
            tensors.append(ModelTensor(name, shape, tp_axis=experts.AXES.get(local), expert=expert))
        else:
            tensors.append(ModelTensor(name, shape))
    return Model(tuple(tensors), segment_size=experts.SEGMENT)


def text_of(strategy: Strategy) -> str:
    """How a user would write a strategy of the matrix."""
    kind = "v2" if strategy.split else "v1"
    degree, dp = strategy.sharding, strategy.dp
    if strategy.level is not None:
        kind = {"os_g": "stage2", "p_g_os": "stage3"}[strategy.level]
        if degree == 1:  # over all ranks
            degree, dp = strategy.world, 1
    ep = f"{strategy.over}:{strategy.experts}" if strategy.over != "data" else str(strategy.experts)
    sharding = f",sharding={kind}:{degree}" if degree > 1 else ""
    more = f"dp={dp},sep={strategy.sep},ep={ep}{sharding}"
    return f"tp={strategy.mp},pp={strategy.pp},vpp={strategy.chunks},{more}"


KNOWN = (*STRATEGIES, *REHEARSED)
CASES = [(each, model) for each in KNOWN if each.world in (2, 4) for model in MODELS if model in each.models]


@pytest.mark.parametrize(("strategy", "model"), CASES, ids=[f"{each.name}-{model}" for each, model in CASES])
def test_a_layout_equals_what_real_ranks_describe(world, strategy, model):
    layout = Layout(model_of(strategy, model), parse_strategy(text_of(strategy)))
    assert layout.strategy.ranks == strategy.world
    described = world(strategy.world).run(describe, strategy=strategy.name, model=model)
    for rank, real in enumerate(described):
        said = rows_of(layout.catalog(rank))
        assert said == real
        assert [*said] == [*real]


def describe_pipeline():
    """What this rank of a pipeline describes, whose layers have experts of their own."""
    return rows_of(open_state(experts.Pipeline(1).state(), dist.get_rank()).catalog)


def test_experts_in_a_pipeline(world):
    described = world(4).run(describe_pipeline)
    tensors = []
    for layer in range(4):
        for each in experts_model().tensors:
            tensors.append(replace(each, name=f"{layer}.{each.name}", tp_axis=None, layers=(layer,)))
    layout = Layout(Model(tuple(tensors), 4), parse_strategy("pp=2,sharding=v2:2,ep=2"))
    for rank, real in enumerate(described):
        said = rows_of(layout.catalog(rank))
        assert said == real
        assert [*said] == [*real]


MIXED = {"a": ([70], "float32"), "b": ([100, 3], "bfloat16"), "c": ([33], "float32"), "d": ([9], "bfloat16")}


def describe_mixed(kind):
    """What this rank describes of parameters of two types."""
    fc.install()
    cpu_world.init_fleet(sharding=dist.get_world_size(), split_param=kind == "v2")
    layer = paddle.nn.Layer()
    for name, (shape, dtype) in MIXED.items():
        layer.add_parameter(name, layer.create_parameter(shape, dtype=dtype))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters(), multi_precision=True)
    optimizer = fleet.distributed_optimizer(optimizer)
    state = layer.sharded_state_dict()
    state.update(optimizer.sharded_state_dict(state))
    return rows_of(open_state(state, dist.get_rank()).catalog)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_parameters_of_two_types(world, kind):
    model = Model(tuple(ModelTensor(name, tuple(shape), dtype) for name, (shape, dtype) in MIXED.items()))
    layout = Layout(model, parse_strategy(f"sharding={kind}:2"))
    for rank, real in enumerate(world(2).run(describe_mixed, kind=kind)):
        said = rows_of(layout.catalog(rank))
        assert said == real
        assert [*said] == [*real]
