"""Models of PaddleFormers: described by their own rules and the registry's, with names of Hugging Face's weights."""

from __future__ import annotations

import pytest

pytest.importorskip("paddleformers")
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe

import paddle_flexckpt as fc
from paddle_flexckpt.sharded_weight import is_sharded_weight
from paddle_flexckpt.trainer.model_rules import (
    describe_model,
    hf_rules,
    install_model_rules,
    uninstall_model_rules,
)


@pytest.fixture(autouse=True)
def installed():
    install_model_rules("paddleformers")
    yield
    uninstall_model_rules("paddleformers")
    fc.uninstall()


def config(**others):
    made = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=48,
        vocab_size=64,
        max_position_embeddings=32,
        **others,
    )
    made.fuse_rms_norm = False  # no kernel of it on CPU
    return made


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_described(tied):
    model = LlamaForCausalLM(config(tie_word_embeddings=tied))
    sharded = describe_model(model)
    assert set(sharded) == set(model.state_dict())
    assert all(is_sharded_weight(weight) for weight in sharded.values())
    assert sharded["lm_head.weight"].aliases == (("model.embed_tokens.weight",) if tied else ())


def test_the_models_own_statements_are_taken_also_those_of_a_pipelines_model():
    own = LlamaForCausalLM._gen_aoa_config(config())["aoa_statements"]
    for model_class in (LlamaForCausalLM, LlamaForCausalLMPipe):
        rules = hf_rules(model_class, config())
        # A pattern that matches nothing is no statement, as in Paddle's engine.
        assert rules["from_hf"]["aoa_statements"] == [f"{text}, optional" if "$" in text else text for text in own]
        assert any("-> model.layers" in text for text in rules["to_hf"]["aoa_statements"])
