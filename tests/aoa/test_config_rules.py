"""Rules for a model by its config.json: family, heads, experts, tied embeddings."""

from __future__ import annotations

import pytest

from paddle_flexckpt.aoa import AoaError
from paddle_flexckpt.aoa.model_rules import describe_model_rules, family_of, model_rules, rule_names, rules_of_config

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
