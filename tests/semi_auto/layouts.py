"""Layouts of semi-automatic strategies as a user would ask for them, and what real ranks describe of the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.memory.state import open_state
from paddle_flexckpt.planning.job_layout import JobLayout, Model, ModelTensor
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.mesh_layouts import MeshLayout
from paddle_flexckpt.planning.meshes import Mesh, Placement, parse_mesh
from paddle_flexckpt.tools.models import read_strategy
from tests.semi_auto.strategies import HALF, SIZES, STRATEGIES, Strategy
from tests.semi_auto.training import CUT, build

#: By name of a model: its sizes, and the strategies that it is described under. Fused buffers of ``fully_shard`` depend
#: on classes of layers, which no layout knows.
MODELS = {
    "semi-even": ("even", [s for s in STRATEGIES if s.fully_shard != "fused"]),
    "semi-uneven": ("uneven", [s for s in STRATEGIES if s.fully_shard != "fused"]),
    "semi-half": ("even", [s for s in HALF if s.fully_shard != "fused" and not s.fusion]),
}


def state_of(strategy: str, model: str):
    """The whole state of a fresh job, as a user describes it. Collective."""
    fc.install()
    built = build(strategy, MODELS[model][0])
    shards = built.model.sharded_state_dict()
    return {**shards, **built.optimizer.sharded_state_dict(shards)}


def layout_of(strategy: Strategy, model: str) -> JobLayout:
    """The layout of a strategy, as a user would ask for it."""
    sizes = SIZES[MODELS[model][0]]
    shapes = {
        "cube.weight": (sizes.cube, 2, sizes.features),
        "norm.weight": (sizes.features,),
        "norm.bias": (sizes.features,),
        "a.weight": (sizes.features, sizes.hidden),
        "a.bias": (sizes.hidden,),
        "b.weight": (sizes.hidden, sizes.classes),
        "b.bias": (sizes.classes,),
    }
    dtype = "bfloat16" if strategy.half else "float32"
    described = Model(tuple(ModelTensor(name, shape, dtype, CUT.get(name)) for name, shape in shapes.items()))
    return _layout(described, text_of(strategy))


def text_of(strategy: Strategy) -> str:
    """How a user would write a strategy."""
    if strategy.dense:
        return "dp=1"
    stage = 3 if strategy.fully_shard else strategy.stage
    sharding = "fusion" if strategy.fusion else f"stage{stage}"
    more = f";sharding={sharding}:dp" if stage else ""
    return f"mesh={'x'.join(map(str, strategy.mesh))}:{','.join(strategy.axes)}{more}"


def _layout(model: Model, text: str) -> JobLayout:
    parsed = read_strategy(text)
    return MeshLayout(model, parsed) if isinstance(parsed, Mesh) else Layout(model, parsed)


# -- jobs of any mesh --------------------------------------------------------------------------------------------------


def tensors_of(shapes: Mapping[str, Sequence[int]], frozen: Sequence[str] = ()) -> Model:
    """A model of parameters without layers."""
    return Model(
        tuple(ModelTensor(name, tuple(shape), is_trained=name not in frozen) for name, shape in shapes.items())
    )


def describe(text: str, shapes: Mapping[str, Sequence[int]], frozen: Sequence[str] = (), states: bool = True):
    """What this rank describes of parameters that are placed on a mesh as a text says."""
    fc.install()
    said = parse_mesh(text)
    mesh = dist.ProcessMesh(np.arange(said.ranks).reshape(said.shape), dim_names=list(said.axes))
    dist.auto_parallel.set_mesh(mesh)
    with paddle.utils.unique_name.guard():
        layer = paddle.nn.Layer()
        for name, shape in shapes.items():
            own, placements = _paddle_placements(mesh, dict(said.placements).get(name, ()))
            whole = layer.create_parameter(list(shape))
            placed = dist.shard_tensor(whole, own, placements)
            placed.stop_gradient = name in frozen
            layer.add_parameter(name, placed)
        state = layer.sharded_state_dict()
        if states:
            trained = [parameter for parameter in layer.parameters() if not parameter.stop_gradient]
            inner = paddle.optimizer.AdamW(0.01, parameters=trained)
            kinds = {"stage1": dist.ShardingStage1, "stage2": dist.ShardingStage2, "stage3": dist.ShardingStage3}
            kind = kinds.get(said.sharding)
            optimizer = dist.shard_optimizer(inner, kind and kind(said.sharding_axis, mesh))
            state = layer.sharded_state_dict()
            state.update(optimizer.sharded_state_dict(state))
    return open_state(state, dist.get_rank()).catalog


class Stack(paddle.nn.Layer):
    """Layers between an embedding and a norm."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = paddle.nn.Linear(4, 4)
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(4, 4) for _ in range(layers)])
        self.norm = paddle.nn.LayerNorm(4)


def describe_stages(text: str, layers: int):
    """What this rank describes of a model that ``dist.parallelize`` has split into stages."""
    fc.install()
    said = parse_mesh(text)
    mesh = dist.ProcessMesh(np.arange(said.ranks).reshape(said.shape), dim_names=list(said.axes))
    dist.auto_parallel.set_mesh(mesh)
    config = {"pp_config": {"split_spec": "layers"}, "dp_config": {"sharding_level": int(said.sharding[-1])}}
    with paddle.utils.unique_name.guard():
        net = Stack(layers)
        optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
        net, optimizer = dist.parallelize(net, optimizer, mesh, config=config)
    state = net.sharded_state_dict()
    state.update(optimizer.sharded_state_dict(state))
    return open_state(state, dist.get_rank()).catalog


def stages_model(layers: int) -> Model:
    """The same model, by hand."""
    linear = {"weight": (4, 4), "bias": (4,)}
    names = ["embed_tokens", *(f"layers.{layer}" for layer in range(layers))]
    tensors = [ModelTensor(f"{n}.{p}", linear[p], layers=(at,)) for at, n in enumerate(names) for p in linear]
    tensors += [ModelTensor(f"norm.{part}", (4,), layers=(layers + 1,)) for part in linear]
    return Model(tuple(tensors), layers + 2, frozenset(range(1, layers + 1)))


def _paddle_placements(mesh: dist.ProcessMesh, placed: Sequence[Placement]):
    """Mesh and placements as Paddle has them: a tensor that only one index of an axis has is on a part of the mesh."""
    placed = [*placed, *[Placement()] * (mesh.ndim - len(placed))]
    names, own = list(mesh.dim_names), mesh
    for axis, each in zip(names, placed):
        if each.only is not None:
            own = own.get_mesh_with_dim(axis, each.only)
    kept = [each for each in placed if each.only is None]
    return own, [dist.Replicate() if each.cut is None else dist.Shard(each.cut) for each in kept]
