"""Layouts on meshes without a job: each element has an owner, and what Paddle cannot do is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra.boxes import nested_piece
from paddle_flexckpt.catalog import ValidationError, concat
from paddle_flexckpt.catalog.validate import group_replicas, validate_coverage, validate_shards
from paddle_flexckpt.planning.job_layout import Model, ModelTensor
from paddle_flexckpt.planning.mesh_layouts import MeshLayout
from paddle_flexckpt.planning.meshes import Mesh, Placement, parse_mesh
from tests.planning.test_layouts import check_many_at_once
from tests.property import examples

SHAPES = {"wide": (4, 12), "bias": (12,), "cube": (5, 3, 4), "one": (1, 8), "number": ()}


def model(dtype="float32"):
    return Model(tuple(ModelTensor(name, shape, dtype) for name, shape in SHAPES.items()))


@st.composite
def meshes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axes = tuple(f"x{number}" for number in range(len(shape)))
    placements = []
    for name, extents in SHAPES.items():
        cuts = [Placement()] + [Placement(cut=axis) for axis in range(len(extents))]
        only = [Placement(only=draw(st.integers(0, shape[0] - 1)))]
        first = draw(st.sampled_from(cuts + only))
        placements.append((name, (first, *(draw(st.sampled_from(cuts)) for _ in shape[1:]))))
    return Mesh(shape, axes, tuple(placements))


@examples(60)
@given(meshes())
def test_every_element_has_an_owner(mesh):
    layout = MeshLayout(model("bfloat16"), mesh)
    job = concat([layout.catalog(rank) for rank in range(mesh.ranks)])
    groups = group_replicas(job)
    assert validate_shards(job) == []
    coverage = validate_coverage(job, groups)
    assert (coverage.problems, len(coverage.overlaps)) == ([], 0)
    assert {job.keys[key] for key in job.key.tolist()} == set(layout.keys)


@examples(60)
@given(meshes())
def test_boxes_are_nested_pieces(mesh):
    layout = MeshLayout(model(), mesh)
    placements = dict(mesh.placements)
    for rank in range(mesh.ranks):
        catalog, place = layout.catalog(rank), mesh.place(rank)
        for row in range(len(SHAPES)):
            name = catalog.key_name(row)
            here = all(p.only in (None, index) for p, index in zip(placements[name], place))
            cuts = [
                [(mesh.shape[n], place[n]) for n, p in enumerate(placements[name]) if p.cut == axis]
                for axis in range(len(SHAPES[name]))
            ]
            pieces = [nested_piece(extent, each) for extent, each in zip(SHAPES[name], cuts)]
            offset, shape = [list(catalog.unpadded(row, column)) for column in (catalog.offset, catalog.shape)]
            if here and all(size for _, size in pieces):
                assert [*zip(offset, shape)] == pieces
                assert int(catalog.flat_start[row]) == -1
            else:
                assert (int(catalog.flat_start[row]), int(catalog.flat_stop[row])) == (0, 0)


def test_ranks_of_a_kind_have_the_same():
    layout = MeshLayout(model(), parse_mesh("mesh=3x2:dp,mp;wide=R,S1"))
    assert len({layout.kind(rank) for rank in range(6)}) == 2
    sharded = MeshLayout(model(), parse_mesh("mesh=3x2:dp,mp;sharding=stage1:dp;wide=R,S1"))
    assert len({sharded.kind(rank) for rank in range(6)}) == 6


@pytest.mark.parametrize("more", ["", ";sharding=stage1:dp", ";sharding=stage3:dp", ";sharding=fusion:dp", ";wide=@0"])
def test_many_ranks_at_once_have_what_each_of_them_has(more):
    check_many_at_once(MeshLayout(model(), parse_mesh(f"mesh=3x2:dp,mp{more}")))
    tensors = (ModelTensor("first", (8, 4), tp_axis=0, layers=(0,)), ModelTensor("second", (4, 8), layers=(1,)))
    check_many_at_once(MeshLayout(Model(tensors, 2), parse_mesh("mesh=2x2x2:dp,pp,mp")))


def test_axes_with_usual_names_cut_as_usual():
    tensors = (
        ModelTensor("first", (8, 4), tp_axis=0, layers=(0,)),
        ModelTensor("second", (4, 8), tp_axis=1, layers=(1,)),
        ModelTensor("norm", (4,), layers=(1,)),
    )
    layout = MeshLayout(Model(tensors, 2, states=()), parse_mesh("mesh=2x2:pp,mp"))
    parts = [layout.catalog(rank) for rank in range(4)]
    said = [[catalog.describe(row) for row in range(3)] for catalog in parts]
    assert said[0][0] == "float32 [0:4, 0:4] of [8, 4]" and said[1][0] == "float32 [4:8, 0:4] of [8, 4]"
    assert said[3][1] == "float32 [0:4, 4:8] of [4, 8]" and said[3][2] == "float32 [0:4] of [4]"
    # The other stage has nothing.
    assert [int(catalog.byte_length.sum()) for catalog in parts] == [64, 64, 80, 80]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mesh=2:dp;nothing*=S0", "placements fit no tensor.*nothing"),
        ("mesh=2:dp;bias=S1", "cuts along no axis.*'bias'"),
        ("mesh=2:dp;number=S0", "cuts along no axis.*'number'"),
        ("mesh=2x2:dp,mp;sharding=stage1:dp;wide=S0,S1", "axis along which each parameter is whole.*'wide'"),
        ("mesh=2x2x2:dp,x,y;sharding=stage1:dp;wide=R,S0,S1", "several mesh axes.*'wide'"),
        ("mesh=2x2:mp,dp;sharding=stage1:dp", "another axis of the mesh.*axis 'dp' first"),
    ],
)
def test_what_does_not_fit_is_refused(text, words):
    with pytest.raises(ValidationError, match=words):
        MeshLayout(model(), parse_mesh(text))


def test_too_few_layers_for_stages_are_refused():
    few = Model((ModelTensor("w", (4,), layers=(0,)), ModelTensor("v", (4,), layers=(1,))), 2)
    with pytest.raises(ValidationError, match="too few layers for the axis pp.*@<index>"):
        MeshLayout(few, parse_mesh("mesh=3:pp"))


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="two tensors have one name"):
        MeshLayout(Model((ModelTensor("w", (4,)), ModelTensor("w", (5,)))), parse_mesh("mesh=2:dp"))
