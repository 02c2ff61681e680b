"""Meshes: their text, their JSON, and what is refused."""

from __future__ import annotations

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.planning.meshes import Mesh, Placement, is_mesh, mesh_of, parse_mesh, parse_placements

TEXT = "mesh=2x4:dp,mp;sharding=stage1:dp;*.q_proj.weight=R,S1;*.bias=S0"


def test_a_mesh_is_read_and_written():
    mesh = parse_mesh(TEXT)
    whole, first, second = Placement(), Placement(cut=0), Placement(cut=1)
    placements = (("*.q_proj.weight", (whole, second)), ("*.bias", (first,)))
    assert mesh == Mesh((2, 4), ("dp", "mp"), placements, "stage1", "dp")
    assert str(mesh) == TEXT
    assert parse_mesh(" mesh = 2x4 : dp, mp ; sharding=stage1:dp; *.q_proj.weight = r,s1;*.bias=Shard(dim=0)") == mesh
    assert mesh.ranks == 8
    assert [mesh.place(rank) for rank in (0, 3, 4, 7)] == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert is_mesh(TEXT) and not is_mesh("tp=2")


def test_a_mesh_is_read_from_json():
    said = {
        "mesh": {"shape": [2, 4], "dim_names": ["dp", "mp"]},
        "sharding": "stage1:dp",
        "placements": {"*.q_proj.weight": ["Replicate()", "Shard(dim=1)"], "*.bias": "S0"},
    }
    assert mesh_of(said) == parse_mesh(TEXT)


def test_placements_are_those_of_paddle():
    texts = ["R", "replicate", "Replicate()", "S2", "Shard(2)", "Shard(dim=2)", "@3"]
    whole, third = Placement(), Placement(cut=2)
    expected = (whole, whole, whole, third, third, third, Placement(only=3))
    assert parse_placements("w", texts) == parse_placements("w", ",".join(texts)) == expected
    assert parse_placements("w", ",".join(map(str, expected))) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mesh", "unknown entry of a mesh.*mesh=EXTENTS:AXES"),
        ("mesh=2x4", "no extents and axes.*mesh=2x4:dp,mp"),
        ("mesh=2xa:dp,mp", "no extents and axes"),
        ("mesh=0:dp", "positive extent"),
        ("mesh=2x4:dp", "a name for each axis"),
        ("mesh=2x2:dp,dp", "different names"),
        ("mesh=2:dp;mesh=2:dp", "twice"),
        ("mesh=2:dp;w=S0;w=R", "twice.*w=R"),
        ("mesh=2:dp;sharding=v2:dp", "unknown kind of sharding.*fusion"),
        ("mesh=2:dp;sharding=stage1", "without its axis"),
        ("mesh=2:dp;sharding=stage1:mp", "axis that the mesh has not.*'dp'.*'?mp"),
        ("mesh=2:x;sharding=fusion:x", "sharding=fusion:dp"),
        ("mesh=2:dp;w=T0", "unknown placement.*'w'.*T0"),
        ("mesh=2:dp;w=S-1", "unknown placement.*'w'.*S-1"),
        ("mesh=2:dp;w=Partial", "term of a sum.*'w'.*reshard"),
        ("mesh=2:dp;w=R,S0", "more placements than the mesh has axes.*'w'"),
        ("mesh=2:pp;w=@2", "no such index.*@0 to @1"),
    ],
)
def test_what_is_no_mesh_is_refused(text, words):
    with pytest.raises(ValidationError, match=words):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"mesh": [2, 4]}, "without its shape and names"),
        ({"mesh": {"shape": [2], "dim_names": ["dp"]}, "stage": 1}, "unknown entry of a mesh.*stage"),
        ({"mesh": {"shape": [2], "dim_names": ["dp"]}, "placements": ["S0"]}, "no mapping"),
        ({"mesh": {"shape": ["2"], "dim_names": ["dp"]}}, "without its shape"),
    ],
)
def test_what_is_no_mesh_in_json_is_refused(said, words):
    with pytest.raises(ValidationError, match=words):
        mesh_of(said)
