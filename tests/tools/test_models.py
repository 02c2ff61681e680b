"""A model is described by what a checkpoint holds of it: the same layouts, but for what names and shards do not say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import ValidationError, concat
from paddle_flexckpt.cli.common import parse_cut
from paddle_flexckpt.planning.layouts import ADAMW, Layout, Model, ModelTensor
from paddle_flexckpt.planning.mesh_layouts import MeshLayout
from paddle_flexckpt.planning.meshes import parse_mesh
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.tools.models import layout_of, model_of, read_strategy
from paddle_flexckpt.tools.rehearsal import rehearse
from tests.remedies.following import provoked
from tests.tools.rehearsed import save
from tests.transfer.samples import Part, catalog


def decoder(layers: int = 4, dtype: str = "bfloat16", **more) -> Model:
    """As PaddleNLP names and cuts them; ``more``: of the model."""
    tensors = [ModelTensor("model.embed_tokens.weight", (32, 8), dtype, 0, (0,))]
    for layer in range(layers):
        name, place = f"model.layers.{layer}", (layer + 1,)
        tensors += [
            ModelTensor(f"{name}.input_layernorm.weight", (8,), dtype, None, place),
            ModelTensor(f"{name}.self_attn.qkv_proj.weight", (8, 24), dtype, 1, place),
            ModelTensor(f"{name}.mlp.down_proj.weight", (16, 8), dtype, 0, place),
        ]
    last = (layers + 1,)
    tensors += [
        ModelTensor("model.norm.weight", (8,), dtype, None, last),
        ModelTensor("lm_head.weight", (8, 32), dtype, 1, last),
    ]
    return Model(tuple(tensors), layers + 2, frozenset(range(1, layers + 1)), **more)


def rows_of(layout: Layout, rank: int) -> set:
    catalog = layout.catalog(rank)
    return {(catalog.key_name(row), catalog.describe(row)) for row in range(len(catalog))}


@pytest.mark.parametrize("saved", ["tp=2", "tp=4,pp=2", "tp=2,sharding=v1:2"])
@pytest.mark.parametrize("to", ["dp=1", "tp=2", "tp=4,pp=2", "pp=4", "tp=2,pp=2,dp=2"])
def test_a_layout_of_a_checkpoint_is_that_of_its_model(tmp_path, saved, to):
    save(tmp_path, Layout(decoder(), parse_strategy(saved)))
    found, notes = layout_of(str(tmp_path), to)
    expected = Layout(decoder(), parse_strategy(to))
    for rank in range(expected.strategy.ranks):
        assert rows_of(found, rank) == rows_of(expected, rank)
    assert notes == []


@pytest.mark.parametrize(("to", "is_noted"), [("pp=2", True), ("tp=2,pp=4", True), ("tp=2", False), ("dp=2", False)])
@pytest.mark.parametrize(("name", "states"), [("0.weight", ADAMW), ("model.embed_tokens.weight", ())])
def test_a_note_says_that_the_copy_of_a_tied_tensor_is_not_counted(tmp_path, to, is_noted, name, states):
    prefix = "" if name[0] == "0" else "model.layers."
    tensors = [ModelTensor(name, (32, 8), "float32", 0, (0, 5))]
    tensors += [ModelTensor(f"{prefix}{layer}.up.weight", (8, 8), "float32", 1, (layer,)) for layer in range(1, 5)]
    model = Model(tuple(tensors), 6, frozenset(range(1, 5)), states)
    save(tmp_path, Layout(model, parse_strategy("tp=2,pp=2")))
    notes = [each for each in layout_of(str(tmp_path), to)[1] if "tied" in each]
    assert len(notes) == is_noted and all(f"a copy of {name}" in each for each in notes)


def test_layers_of_a_pipeline_are_shared_out_by_their_look(tmp_path):
    tensors = [ModelTensor("0.embedding.weight", (8, 4), layers=(0,))]
    tensors += [ModelTensor(f"{layer}.fc.weight", (4, 4), layers=(layer,)) for layer in range(1, 5)]
    tensors += [ModelTensor("5.head.weight", (4, 8), layers=(5,))]
    model = Model(tuple(tensors), 6, frozenset(range(1, 5)))
    save(tmp_path, Layout(model, parse_strategy("pp=2")))
    found, _ = layout_of(str(tmp_path), "pp=2")
    for rank in range(2):
        assert rows_of(found, rank) == rows_of(Layout(model, parse_strategy("pp=2")), rank)


def wide(axis: int | None) -> Model:
    """Weights of some MiB, between two that are small: replicas of them are split where a save shares them out."""
    tensors = [ModelTensor("small", (16,))]
    tensors += [ModelTensor(f"w{number}", (1000, 600), tp_axis=axis) for number in range(3)]
    return Model((*tensors, ModelTensor("last", (600, 8), tp_axis=axis)), states=())


def test_what_a_save_splits_among_replicas_is_no_cut_of_tensor_parallelism(tmp_path):
    """Two ranks with the same share out 7 MB: the weight in the middle is stored in two parts of other sizes."""
    save(tmp_path, Layout(wide(None), parse_strategy("dp=2")))
    with pytest.raises(
        ValidationError, match=r"parts of different sizes, as a save splits what several.*--cut 'w1=AXIS'"
    ):
        layout_of(str(tmp_path), "tp=2")
    with pytest.raises(ValidationError, match="parts of different sizes"):
        layout_of(str(tmp_path), "mesh=2x2:dp,mp")
    found, _ = layout_of(str(tmp_path), "tp=2", cuts=[("w*", 1), ("last", 0)])
    assert ("w1", "float32 [0:1000, 300:600] of [1000, 600]") in rows_of(found, 1)
    # Nothing is cut by tensor parallelism here, so nobody has to say how.
    assert rows_of(layout_of(str(tmp_path), "dp=2")[0], 1) == rows_of(Layout(wide(None), parse_strategy("dp=2")), 1)
    assert layout_of(str(tmp_path), "mesh=2:dp")[0].strategy.ranks == 2


def test_parts_of_columns_that_are_split_among_replicas_are_cut_along_both_axes(tmp_path):
    save(tmp_path, Layout(wide(1), parse_strategy("tp=2,dp=2")))
    with pytest.raises(ValidationError, match=r"parts along several axes.*--cut 'w.=AXIS'"):
        layout_of(str(tmp_path), "tp=4")
    assert rows_of(layout_of(str(tmp_path), "dp=2")[0], 1) == rows_of(Layout(wide(1), parse_strategy("dp=2")), 1)


@pytest.mark.parametrize("mesh", ["mesh=3:mp", "mesh=7:mp"])
def test_uneven_parts_of_a_mesh_are_a_cut(tmp_path, mesh):
    """As Paddle cuts unevenly: as much as fits for each, and what is left for the last."""
    save(tmp_path, MeshLayout(wide(0), parse_mesh(mesh)))
    found, _ = layout_of(str(tmp_path), "tp=2")
    assert ("w1", "float32 [500:1000, 0:600] of [1000, 600]") in rows_of(found, 1)


def test_experts_are_spread(tmp_path):
    model = Model(tuple(ModelTensor(f"experts.{n}.up", (4, 8), tp_axis=1, expert=(n, 4)) for n in range(4)))
    save(tmp_path, Layout(model, parse_strategy("tp=2")))
    found, _ = layout_of(str(tmp_path), "dp=2,ep=2,tp=2")
    for rank in range(4):
        assert rows_of(found, rank) == rows_of(Layout(model, parse_strategy("dp=2,ep=2,tp=2")), rank)


def test_who_has_no_cut_is_told_to_give_it(tmp_path):
    save(tmp_path, Layout(decoder(), parse_strategy("dp=1")))
    with pytest.raises(ValidationError, match=r"nothing says how tensor parallelism cuts.*--cut"):
        layout_of(str(tmp_path), "tp=2")
    cuts = [("*.qkv_proj.weight", -1), ("*embed*", None), ("lm_head.*", 1)]
    found, notes = layout_of(str(tmp_path), "tp=2", cuts=cuts)
    boxes = dict(rows_of(found, 1))
    assert boxes["model.layers.0.self_attn.qkv_proj.weight"] == "bfloat16 [0:8, 12:24] of [8, 24]"
    assert boxes["model.embed_tokens.weight"] == "bfloat16 [0:32, 0:8] of [32, 8]"
    (note,) = notes
    assert "'model.embed_tokens.weight'" in note or "model.embed_tokens.weight" in note


def test_states_are_left_out_and_their_order_is_told(tmp_path):
    save(tmp_path, Layout(decoder(), parse_strategy("tp=2")))
    found, _ = layout_of(str(tmp_path), "tp=2", states=False)
    assert {key for key, _ in rows_of(found, 0)} == {each.name for each in decoder().tensors}
    _, notes = layout_of(str(tmp_path), "tp=2,sharding=v2:2")
    assert any("in the order of the checkpoint" in note for note in notes)


@pytest.mark.parametrize("saved", ["dp=1", "sharding=v1:2", "sharding=muon:2"])
def test_a_checkpoint_of_muon_says_which_states_its_matrices_have(tmp_path, saved):
    lacks = ("moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
    tensors = [
        replace(each, lacks=lacks) if ".mlp." in each.name or ".self_attn." in each.name else each
        for each in decoder().tensors
    ]
    model = replace(decoder(), tensors=tuple(tensors))
    save(tmp_path, Layout(model, parse_strategy(saved)))
    for to in ("sharding=muon:3", "pp=2,sharding=muon:2", "dp=2"):
        found, _ = layout_of(str(tmp_path), to)
        expected = Layout(model, parse_strategy(to))
        for rank in range(expected.strategy.ranks):
            assert rows_of(found, rank) == rows_of(expected, rank)
        assert rehearse(str(tmp_path), found).error == ""


def test_parts_along_two_axes_need_a_cut():
    parts = [Part("w", (4, 4), shape=(2, 2), offset=(row, column)) for row in (0, 2) for column in (0, 2)]
    infos, stored = {"w": TensorInfo((4, 4), "float32")}, concat([catalog(part) for part in parts])
    with provoked("tools/models.py", "say along which axis tensor parallelism cuts it: --cut '") as caught:
        model_of(infos, stored)
    assert "parts along several axes (key 'w'). Remedy" in str(caught.value)
    assert str(caught.value).endswith("--cut 'w=AXIS', or 'w=none'")
    for said, axis in (("w=0", 0), ("w=none", None)):
        assert model_of(infos, stored, [parse_cut(said)]).tensors[0].tp_axis == axis


MESH = "mesh=2x2:dp,mp;sharding=stage1:dp;*.norm.weight=S0"


def test_a_strategy_may_be_a_mesh_or_its_file(tmp_path):
    said = {
        "mesh": {"shape": [2, 2], "dim_names": ["dp", "mp"]},
        "sharding": "stage1:dp",
        "placements": {"*.norm.weight": ["Shard(dim=0)"]},
    }
    path, broken = tmp_path / "mesh.json", tmp_path / "broken.json"
    path.write_text(json.dumps(said))
    broken.write_text("{")
    assert read_strategy(str(path)) == read_strategy(MESH) == parse_mesh(MESH)
    assert read_strategy("tp=2") == parse_strategy("tp=2")
    for wrong in (broken, tmp_path / "none.yaml"):
        with pytest.raises(ValidationError, match="cannot read the mesh"):
            read_strategy(str(wrong))


def test_a_mesh_may_be_a_yaml_file(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "mesh.yaml"
    lines = ["mesh: {shape: [2, 2], dim_names: [dp, mp]}", "sharding: stage1:dp", "placements: {'*.norm.weight': S0}"]
    path.write_text("\n".join(lines))
    assert read_strategy(str(path)) == parse_mesh(MESH)
    for content, words in (("- 1", "is no mapping"), ("{", "is not valid YAML")):
        path.write_text(content)
        with pytest.raises(ValidationError, match=words):
            read_strategy(str(path))


def test_a_layout_of_a_mesh_cuts_as_the_checkpoint_is_cut(tmp_path):
    save(tmp_path, Layout(decoder(), parse_strategy("tp=2")))
    found, notes = layout_of(str(tmp_path), MESH)
    boxes = dict(rows_of(found, 1))
    assert boxes["model.layers.0.self_attn.qkv_proj.weight"] == "bfloat16 [0:8, 12:24] of [8, 24]"
    assert boxes["model.layers.0.self_attn.qkv_proj.weight.w_0"] == "float32 [0:4, 12:24] of [8, 24]"
    assert boxes["model.norm.weight"] == "bfloat16 [0:4] of [8]"
    assert notes == []
    with pytest.raises(ValidationError, match="placements fit no tensor.*nothing"):
        layout_of(str(tmp_path), "mesh=2:dp;nothing=S0")
    save(tmp_path / "whole", Layout(decoder(), parse_strategy("dp=1")))
    with pytest.raises(ValidationError, match="nothing says how tensor parallelism cuts"):
        layout_of(str(tmp_path / "whole"), "mesh=2:mp")
