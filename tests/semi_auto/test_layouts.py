"""Layouts on meshes that are generated without a job equal what the ranks of a real job describe, field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

import paddle.distributed as dist

from paddle_flexckpt.memory.state import open_state
from paddle_flexckpt.planning.mesh_layouts import MeshLayout
from paddle_flexckpt.planning.meshes import parse_mesh
from tests.distributed.test_layouts import rows_of
from tests.semi_auto import layouts
from tests.semi_auto.strategies import BY_NAME

pytestmark = [pytest.mark.paddle, pytest.mark.multiprocess]

# All are compared by `make test-rehearsals`.
CASES = [
    ("dp2-stage1", "semi-uneven"),
    ("dp4-stage2", "semi-uneven"),
    ("dp4-stage3", "semi-uneven"),
    ("dp2-mp2-stage1", "semi-uneven"),
    ("dp2-mp2-stage3", "semi-even"),
    ("dp2-mp2-fusion", "semi-uneven"),
    ("dp4-fully-shard", "semi-even"),
    ("dp2-mp2-stage2-half", "semi-half"),
]
SHAPES = {"one": (1, 8), "wide": (4, 12), "bias": (12,), "cube": (5, 3, 4), "frozen": (6, 2), "number": (1,)}


def of_strategy(strategy, model):
    return rows_of(open_state(layouts.state_of(strategy, model), dist.get_rank()).catalog)


def of_mesh(**said):
    return rows_of(layouts.describe(**said))


def compare(layout, described):
    assert layout.strategy.ranks == len(described)
    for rank, real in enumerate(described):
        said = rows_of(layout.catalog(rank))
        assert said == real
        assert [*said] == [*real]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_a_layout_equals_what_real_ranks_describe(world, name, model):
    strategy = BY_NAME[name]
    described = world(strategy.ranks).run(of_strategy, strategy=name, model=model)
    compare(layouts.layout_of(strategy, model), described)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("mesh=2x2:x,y;one=R,S1;wide=S0,S1;bias=S0;cube=S0,S0;number=R", False),
        ("mesh=4:x;wide=S1;cube=S0;frozen=S0", False),
        ("mesh=2x2:dp,mp;sharding=stage1:dp;one=R,S1;wide=R,S1;bias=R,S0;cube=R,S2;frozen=R,S0", True),
        ("mesh=2x2:dp,mp;sharding=stage3:dp;one=R,S1;wide=R,S0;bias=R,S0", True),
        ("mesh=2x2:mp,dp;sharding=stage2:dp;one=S1;wide=S1;bias=S0;cube=S2", True),
        ("mesh=2x2:pp,dp;sharding=stage1:dp;one=@0;wide=@0;bias=@1;cube=@1;frozen=@0;number=@1", True),
        ("mesh=2x2:pp,mp;one=@0;wide=@0,S1;bias=@1,S0;cube=@1,S2;frozen=@0;number=@1", True),
    ],
)
def test_any_placements(world, text, states):
    frozen = ("frozen",)
    described = world(4).run(of_mesh, text=text, shapes=SHAPES, frozen=frozen, states=states)
    model = layouts.tensors_of(SHAPES, frozen)
    if not states:
        model = replace(model, states=())
    compare(MeshLayout(model, parse_mesh(text)), described)


def of_stages(**said):
    return rows_of(layouts.describe_stages(**said))


@pytest.mark.parametrize("layers", [4, 5])
def test_stages_are_those_of_parallelize(world, layers):
    text = "mesh=2x2:pp,dp;sharding=stage1:dp"
    described = world(4).run(of_stages, text=text, layers=layers)
    compare(MeshLayout(layouts.stages_model(layers), parse_mesh(text)), described)
