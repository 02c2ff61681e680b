"""Rules for a model by its config.json: family, heads, experts, tied embeddings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddle_flexckpt as fc
from paddle_flexckpt.aoa import AoaError
from paddle_flexckpt.aoa.model_rules import (
    describe_model_rules,
    family_of,
    model_rules,
    rule_names,
    rules_of_config,
    with_head_of,
)

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
KEYS = ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("model_type", "family"),
    [(name, name) for name in rule_names()] + [("mistral", "llama"), ("ernie4_5_moe", "ernie4_5")],
)
def test_the_family_is_that_of_the_model_type(model_type, family):
    assert family_of({"model_type": model_type}) == family


@pytest.mark.parametrize("config", [{}, {"model_type": "t5"}, {"model_type": None}])
def test_a_model_without_rules_is_an_error_that_lists_those_with(config):
    with pytest.raises(AoaError, match="there are no rules for the model_type .* llama, .*mistral"):
        rules_of_config(config, "from_hf", KEYS)


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
@pytest.mark.parametrize(
    ("config", "variant", "parameters"),
    [
        ({"model_type": "llama", **HEADS}, "fused", {"num_heads": 8, "num_key_value_groups": 2}),
        (
            {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": None, "tie_word_embeddings": True},
            "fused",
            {"num_heads": 8, "num_key_value_groups": 8, "tied": True},
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, **HEADS},
            "fused",
            {"num_heads": 8, "num_key_value_groups": 2, "num_experts": 4},
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 3, "num_hidden_layers": 5},
            "stacked",
            {"num_experts": 3, "num_layers": 5},
        ),
    ],
)
def test_parameters_are_those_of_the_configuration(direction, config, variant, parameters):
    family = config["model_type"]
    assert rules_of_config(config, direction, KEYS, None, variant) == model_rules(
        family, variant, direction, **parameters
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_numbers_may_be_in_the_text_config(family):
    config = {"model_type": family, "text_config": HEADS, "vision_config": {"num_heads": 16}}
    given = {"num_heads": 8, "num_key_value_groups": 2}
    assert rules_of_config(config, "from_hf", KEYS, None, "fused") == model_rules(family, "fused", **given)
    assert model_rules(variant="fused", config={**config, **HEADS, "text_config": {}}) == model_rules(
        family, "fused", **given
    )


def test_embeddings_are_tied_where_there_is_no_output_layer_and_nothing_else_is_said():
    config = {"model_type": "llama", **HEADS}
    tied, own = (model_rules("llama", "plain", "from_hf", tied=tied) for tied in (True, False))
    assert tied != own
    assert rules_of_config(config, "from_hf", KEYS) == own
    assert rules_of_config(config, "from_hf", KEYS[:1]) == tied
    assert rules_of_config({**config, "tie_word_embeddings": False}, "from_hf", KEYS[:1]) == own


def test_what_is_given_counts_more():
    config = {"model_type": "opt", **HEADS}
    assert rules_of_config(config, "from_hf", KEYS, "llama", "fused", num_heads=8, prefix="llama.") == model_rules(
        "llama", "fused", "from_hf", num_heads=8, num_key_value_groups=2, prefix="llama."
    )
    with pytest.raises(AoaError, match="num_heads"):
        rules_of_config({"model_type": "llama"}, "from_hf", KEYS, None, "fused")


QUANTIZED = {"quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "gpt_oss"},
            "by 'mxfp4', .* gpt_oss, 'plain', take them for plain numbers. Remedy .FC208.: .*'mxfp4'",
        ),
        ({"model_type": "llama"}, "by 'mxfp4', .*Remedy .FC208.: write them out dequantized first"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantized, by a method that it does not name"),
        ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}, "by 'fp8', .*variant 'fp8'"),
    ],
)
def test_quantized_weights_are_refused_by_rules_that_do_not_dequantize(config, said):
    with pytest.raises(AoaError, match=said):
        rules_of_config({**QUANTIZED, **config}, "from_hf", KEYS)


def test_and_dequantized_by_those_that_do():
    found = rules_of_config({**QUANTIZED, "model_type": "gpt_oss"}, "from_hf", KEYS, None, "mxfp4")
    assert found == model_rules("gpt_oss", "mxfp4")
    # What a Paddle model holds is not quantized.
    assert rules_of_config({**QUANTIZED, "model_type": "gpt_oss"}, "to_hf", KEYS) == model_rules(
        "gpt_oss", "plain", "to_hf"
    )
    assert rules_of_config({"model_type": "gpt_oss", "quantization_config": None}, "from_hf", KEYS)


def test_every_count_of_the_rules_has_an_entry_in_configurations():
    """Of a parameter that is added to the rules, somebody has to say where configurations have it."""
    from paddle_flexckpt.aoa import model_rules as rules

    counts = {
        name
        for family in rule_names()
        for name, spec in describe_model_rules(family)["parameters"].items()
        if spec["type"] == "integer"
    }
    assert counts <= set(rules._ENTRIES)


# --- heads and embeddings: the tensors decide whether they are tied ---------------------------------------------------

VOCABULARY, HIDDEN = 16, 8
TIED = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True, **HEADS}
LAYER = {
    **{f"self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"},
    **{f"mlp.{part}_proj.weight": (HIDDEN, HIDDEN) for part in ("gate", "up", "down")},
    **{f"{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")},
}


def weights(head: str) -> dict[str, np.ndarray]:
    """A llama of one layer by Hugging Face's names, whose head is ``other``, the ``same`` or ``none``."""
    draw = np.random.default_rng(0).standard_normal
    made = {"model.embed_tokens.weight": draw((VOCABULARY, HIDDEN)), "model.norm.weight": draw(HIDDEN)}
    made |= {f"model.layers.0.{name}": draw(shape) for name, shape in LAYER.items()}
    if head != "none":
        made["lm_head.weight"] = draw((VOCABULARY, HIDDEN)) if head == "other" else made["model.embed_tokens.weight"]
    return {name: array.astype(np.float32) for name, array in made.items()}


def in_paddle(state: dict[str, np.ndarray], head: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The same by the names and layouts of a Paddle model, with this head."""
    made = {k: v.T.copy() if v.ndim == 2 and "embed" not in k else v for k, v in state.items() if k != "lm_head.weight"}
    return made if head is None else {**made, "lm_head.weight": head}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(one[key].tobytes() == other[key].tobytes() for key in one)


@pytest.mark.parametrize("head", ["other", "same", "none"])
def test_a_conversion_ties_a_head_that_is_the_embedding_and_keeps_any_other(tmp_path, head):
    pytest.importorskip("paddle")
    hf, native, back = tmp_path / "hf", tmp_path / "native", tmp_path / "back"
    hf.mkdir()
    state = weights(head)
    save_file(state, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(TIED))
    rules = fc.model_rules(config=TIED)
    fc.convert_checkpoint(hf, native, aoa_config=rules)
    wanted = state["lm_head.weight"].T if head == "other" else state["model.embed_tokens.weight"]
    assert same(load_native(native), in_paddle(state, wanted))
    assert fc.digest(hf, aoa_config=rules) == fc.digest(native)
    assert fc.diff(hf, native, rules).equal
    rules = fc.model_rules(config=TIED, direction="to_hf")
    fc.convert_checkpoint(native, back, format="huggingface", aoa_config=rules)
    fc.export_safetensors(native, tmp_path / "export", aoa_config=rules)
    fc.merge_sharded_state_dict(native, tmp_path / "merge", process_group="self", aoa_config=rules)
    kept = {key: array for key, array in state.items() if head == "other" or key != "lm_head.weight"}
    for path in (back, tmp_path / "export", tmp_path / "merge"):
        assert same(load_file(path / "model.safetensors"), kept), path


def load_native(path) -> dict[str, np.ndarray]:
    return {key: tensor.numpy() for key, tensor in fc.load_merged_state_dict(path).items()}


@pytest.mark.parametrize("layout", ["linear", "embedding"])
def test_a_load_takes_the_head_in_the_layout_of_the_target(tmp_path, layout):
    pytest.importorskip("paddle")
    state = weights("other")
    save_file(state, tmp_path / "model.safetensors")
    wanted = in_paddle(state, state["lm_head.weight"].T if layout == "linear" else state["lm_head.weight"])
    target = {key: np.zeros(array.shape, np.float32) for key, array in wanted.items()}
    fc.load_state_dict(target, tmp_path, aoa_config=fc.model_rules(config=TIED))
    assert same({key: np.ascontiguousarray(array) for key, array in target.items()}, wanted)
    tied = {**target, "lm_head.weight": target["model.embed_tokens.weight"]}
    with pytest.raises(fc.CheckpointError, match="are one tied parameter"):
        fc.load_state_dict(tied, tmp_path, aoa_config=fc.model_rules(config=TIED))


@pytest.mark.parametrize("layout", ["linear", "embedding"])
def test_a_live_head_is_published_unless_it_is_the_tensor_of_the_embedding(tmp_path, layout):
    pytest.importorskip("paddle")
    state = weights("other")
    rules = fc.model_rules(config=TIED, direction="to_hf")
    head = state["lm_head.weight"].T.copy() if layout == "linear" else state["lm_head.weight"].copy()
    model = in_paddle(state, head)
    fc.publish(model, tmp_path / "own", "self", aoa_config=rules)
    assert same(load_file(tmp_path / "own" / "model.safetensors"), state)
    publisher = fc.WeightPublisher(tmp_path / "versions", process_group="self", aoa_config=rules)
    publisher.publish(model)
    head += 1
    assert publisher.publish(model).keys == 1
    assert dict(fc.full_param(model, process_group="self", aoa_config=rules)).keys() == state.keys()
    tied = {**model, "lm_head.weight": model["model.embed_tokens.weight"]}
    fc.publish(tied, tmp_path / "tied", "self", aoa_config=rules)
    assert same(load_file(tmp_path / "tied" / "model.safetensors"), weights("none"))
    assert "lm_head.weight" not in dict(fc.full_param(tied, process_group="self", aoa_config=rules))


@pytest.mark.parametrize("flags", [(True, None), (None, True), (False, True), (True, False)])
def test_a_part_of_a_configuration_that_ties_is_for_a_source_without_a_head(flags):
    whole, text = ({} if flag is None else {"tie_word_embeddings": flag} for flag in flags)
    config = {"model_type": "llama", **HEADS, **whole, "text_config": text}
    assert fc.model_rules(config=config).parameters["tied"]
    assert not fc.model_rules(config={**config, "tie_word_embeddings": False, "text_config": {}}).parameters["tied"]


@pytest.mark.parametrize(
    "family", [name for name in rule_names() if "tied" in describe_model_rules(name)["parameters"]]
)
@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_all_families_have_rules_for_a_head_of_its_own(family, direction):
    tied, own = (model_rules(family, "plain", direction, tied=tied) for tied in (True, False))
    shapes = {
        f"{'embed_out' if family == 'gpt_neox' else 'lm_head'}.weight": (4, 6),
        "model.embed_tokens.weight": (6, 4),
    }
    assert with_head_of(shapes, tied, None) == own
    assert with_head_of({"model.embed_tokens.weight": (6, 4)}, tied, None) is tied
    tied["aoa_statements"].append("a -> b")
    assert with_head_of(shapes, tied, None) is tied
