"""A model is described by its config.json: names and shapes by hand, and what a checkpoint of that model says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddle_flexckpt.aoa.families import small_models
from paddle_flexckpt.aoa.model_rules import rule_names
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.tools.config_models import read_config_model
from paddle_flexckpt.tools.models import layout_of
from paddle_flexckpt.tools.rehearsal import rehearse
from tests.remedies.following import provoked
from tests.tools.rehearsed import save

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "torch_dtype": "bfloat16",
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3,
    "v_head_dim": 5,
}
CONFIGS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "mlp_only_layers": [0]},
    "ernie4_5": {"use_bias": True},
    "deepseek_v3": LATENT,
    "gpt_neox": {},
}


@pytest.fixture
def config(tmp_path):
    """Writes a configuration; returns its path."""

    def write(family: str, **more) -> str:
        path = tmp_path / f"{family}.json"
        path.write_text(json.dumps({"model_type": family, **SIZES, **CONFIGS.get(family, {}), **more}))
        return str(path)

    return write


def shapes(path: str, variant: str = "plain", layer: int = 1) -> dict[str, tuple[int, ...]]:
    """What one layer has, and what is in none."""
    infos = read_config_model(path, variant).infos
    return {
        name.replace(f"layers.{layer}.", ""): info.shape
        for name, info in infos.items()
        if f"layers.{layer}." in name or "layers." not in name
    }


def test_every_family_whose_rules_are_written_by_hand_is_described(config):
    assert {*CONFIGS} == {*rule_names()} - {*small_models()}
    for family in CONFIGS:
        assert read_config_model(config(family)).infos


OUTSIDE = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,), "lm_head.weight": (16, 32)}
NORMS = {"model.input_layernorm.weight": (16,), "model.post_attention_layernorm.weight": (16,)}
MLP = {
    "model.mlp.gate_proj.weight": (16, 24),
    "model.mlp.up_proj.weight": (16, 24),
    "model.mlp.down_proj.weight": (24, 16),
}
ATTENTION = {
    "model.self_attn.q_proj.weight": (16, 16),
    "model.self_attn.k_proj.weight": (16, 8),
    "model.self_attn.v_proj.weight": (16, 8),
    "model.self_attn.o_proj.weight": (16, 16),
}


def test_llama(config):
    assert shapes(config("llama")) == {**OUTSIDE, **NORMS, **ATTENTION, **MLP}


def test_llama_fused(config):
    found = shapes(config("llama"), "fused")
    assert found["model.self_attn.qkv_proj.weight"] == (16, 32)
    assert found["model.mlp.up_gate_proj.weight"] == (16, 48)
    assert len(found) == 9


def test_qwen2(config):
    biases = {f"model.self_attn.{name}_proj.bias": (n,) for name, n in (("q", 16), ("k", 8), ("v", 8))}
    assert shapes(config("qwen2")) == {**OUTSIDE, **NORMS, **ATTENTION, **MLP, **biases}


def test_qwen3_has_heads_of_its_own_width(config):
    found = shapes(config("qwen3"))
    assert (found["model.self_attn.q_proj.weight"], found["model.self_attn.k_norm.weight"]) == ((16, 32), (8,))


def test_qwen2_moe(config):
    found = shapes(config("qwen2_moe"))
    assert found["model.mlp.gate.weight"] == (4, 16)
    assert found["model.mlp.experts.3.down_proj.weight"] == (8, 16)
    assert found["model.mlp.shared_expert.up_proj.weight"] == (16, 12)
    assert found["model.mlp.shared_expert_gate.weight"] == (16, 1)
    assert "model.mlp.up_proj.weight" not in found


def test_layers_without_experts(config):
    path = config("qwen3_moe")
    assert "model.mlp.up_proj.weight" in shapes(path, layer=0)
    assert "model.mlp.experts.0.up_proj.weight" in shapes(path, layer=1)


def test_deepseek_v3(config):
    found = shapes(config("deepseek_v3"))
    assert found["model.self_attn.q_a_proj.weight"] == (16, 6)
    assert found["model.self_attn.q_b_proj.weight"] == (6, 20)
    assert found["model.self_attn.kv_a_proj_with_mqa.weight"] == (16, 12)
    assert found["model.self_attn.kv_b_proj.weight"] == (10, 32)
    assert found["model.self_attn.o_proj.weight"] == (20, 16)
    assert found["model.mlp.shared_experts.up_proj.weight"] == (16, 16)
    assert found["model.mlp.gate.e_score_correction_bias"] == (4,)


def llama(dtype: str = "bfloat16") -> Model:
    """The model of the configuration, by hand."""
    tensors = [ModelTensor("model.embed_tokens.weight", (32, 16), dtype, 0, (0,))]
    axes = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 0, "gate_proj": 1, "up_proj": 1, "down_proj": 0}
    for layer in range(2):
        for name, shape in {**ATTENTION, **MLP, **NORMS}.items():
            axis = axes.get(name.split(".")[-2])
            full = name.replace("model.", f"model.layers.{layer}.", 1)
            tensors.append(ModelTensor(full, shape, dtype, axis, (layer + 1,)))
    tensors += [ModelTensor("model.norm.weight", (16,), dtype, None, (3,))]
    tensors += [ModelTensor("lm_head.weight", (16, 32), dtype, 1, (3,))]
    return Model(tuple(tensors), 4, frozenset({1, 2}))


def rows_of(layout: Layout, rank: int) -> set:
    catalog = layout.catalog(rank)
    return {(catalog.key_name(row), catalog.describe(row)) for row in range(len(catalog))}


@pytest.mark.parametrize("to", ["dp=1", "tp=2", "pp=2", "tp=2,pp=2,sharding=v1:2", "sharding=stage2:2"])
def test_a_layout_of_a_configuration_is_that_of_its_model(tmp_path, config, to):
    found, notes = layout_of("nowhere", to, model=config("llama"))
    expected = Layout(llama(), parse_strategy(to))
    for rank in range(expected.strategy.ranks):
        assert rows_of(found, rank) == rows_of(expected, rank)
    assert "llama, variant plain, in bfloat16, as llama.json says" in notes[0]


def test_a_checkpoint_loads_into_the_model_of_its_configuration(tmp_path, config):
    save(tmp_path / "saved", Layout(llama(), parse_strategy("tp=2,pp=2")))
    layout, _ = layout_of(str(tmp_path / "saved"), "tp=4,sharding=v2:2", model=config("llama"))
    report = rehearse(str(tmp_path / "saved"), layout)
    assert (report.error, report.missing, report.unexpected) == ("", [], [])
    other, _ = layout_of(str(tmp_path / "saved"), "tp=2", model=config("llama", intermediate_size=48))
    assert "[16, 48]" in rehearse(str(tmp_path / "saved"), other).error


def test_the_optimizer_has_what_is_fused_in_the_place_of_its_first_part(config):
    names = [name for name in read_config_model(config("llama"), "fused").infos if "layers.0." in name]
    parts = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_gate_proj", "mlp.down_proj"]
    assert names[:4] == [f"model.layers.0.{part}.weight" for part in parts]


def test_a_tied_head_is_the_embedding_of_both_ends(config):
    layout, _ = layout_of("nowhere", "pp=2", model=config("qwen2", tie_word_embeddings=True, torch_dtype="float32"))
    keys = [{key for key, _ in rows_of(layout, rank)} for rank in range(2)]
    assert all("model.embed_tokens.weight" in each and "lm_head.weight" not in each for each in keys)
    assert not any(key.endswith(".w_0") for each in keys for key in each)


def test_experts_are_spread(config):
    layout, _ = layout_of("nowhere", "dp=2,ep=2,tp=2", model=config("qwen3_moe"), states=False)
    held = {key for key, _ in rows_of(layout, 3) if ".experts." in key and key.endswith("up_proj.weight")}
    assert held == {f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in (2, 3)}


@pytest.mark.parametrize(
    ("family", "more", "variant", "words"),
    [
        ("bert", {}, "plain", "model_type 'bert', and shapes are known of deepseek_v3, ernie4_5, "),
        ("llama", {"hidden_size": None}, "plain", "has to say hidden_size, a whole number; got None"),
        ("llama", {"vocab_size": "many"}, "plain", "has to say vocab_size"),
        ("llama", {}, "stacked", "in the variants plain, fused; got 'stacked'"),
        ("gpt_neox", {}, "fused", "no variant of gpt_neox 'fused'"),
        ("llama", {"torch_dtype": "int3"}, "plain", "int3"),
    ],
)
def test_what_is_no_model_is_refused(config, family, more, variant, words):
    with pytest.raises(ValidationError, match=words):
        read_config_model(config(family, **more), variant)


def test_a_model_with_multi_token_prediction_is_described_without_it_or_by_a_checkpoint(config, tmp_path):
    whole, copy = config("deepseek_v3", num_nextn_predict_layers=1), tmp_path / "copy.json"
    with provoked(
        "tools/config_models.py", "give a copy of the configuration with num_nextn_predict_layers 0, which describes"
    ):
        layout_of("nowhere", "dp=2", model=whole)
    copy.write_text(json.dumps({**json.loads(Path(whole).read_text()), "num_nextn_predict_layers": 0}))
    described = rows_of(layout_of("nowhere", "dp=2", model=str(copy))[0], 0)
    assert described == rows_of(layout_of("nowhere", "dp=2", model=config("deepseek_v3"))[0], 0)
    more = Model((ModelTensor("model.layers.2.eh_proj.weight", (16, 32)),), states=())
    save(tmp_path / "checkpoint", Layout(more, parse_strategy("dp=1")))
    found = layout_of("nowhere", "dp=2", model=str(tmp_path / "checkpoint"))[0]
    assert {key for key, _ in rows_of(found, 0)} == {"model.layers.2.eh_proj.weight"}


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for name in ("config.json", "absent.json"):
        with pytest.raises(ValidationError, match="cannot read the configuration"):
            layout_of("nowhere", "tp=2", model=str(tmp_path / name))
