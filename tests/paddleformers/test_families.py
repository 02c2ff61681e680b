"""Rules of families of models beside those of PaddleFormers' own classes, on small models."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("paddleformers")
import paddle_flexckpt as fc
from paddle_flexckpt.aoa.model_rules import model_rules
from tests.aoa.test_families import GROUPS, HEADS, hugging_face
from tests.ramdisk import memory_directory

SIZES = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
# Family: class, variant, and parameters of the rules. Other classes need PaddleFleet, or their statements a real model.
FAMILIES = {
    "gemma3_text": ("Gemma3ForCausalLM", "fused", {"num_heads": HEADS, "num_key_value_groups": GROUPS, "tied": True}),
    "phi3": ("Phi3ForCausalLM", "plain", {"lm_head": "embedding"}),
    "gpt_oss": ("GptOssForCausalLM", "plain", {"lm_head": "embedding"}),
}


def made_by(rules: dict[str, list[str]], path: str) -> dict[str, bytes]:
    merged = fc.load_merged_state_dict(path, aoa_config=rules)
    return {name: tensor.numpy().tobytes() for name, tensor in merged.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_that_the_library_makes(family):
    class_name, variant, given = FAMILIES[family]
    module = importlib.import_module(f"paddleformers.transformers.{family}.modeling")
    model_class = getattr(module, class_name)
    config = model_class.config_class(**SIZES)
    hf = hugging_face(family)
    if given.get("tied"):
        del hf["lm_head.weight"]
    with memory_directory() as path:
        fc.save_state_dict(hf, path, process_group="self")
        theirs = made_by(model_class._gen_aoa_config(config), path)
        assert theirs == made_by(model_rules(family, variant, **given), path)
