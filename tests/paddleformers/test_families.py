"""Rules of families of models beside those of PaddleFormers' own classes, on small models."""

from __future__ import annotations

import importlib
import re

import pytest

pytest.importorskip("paddleformers")
import paddle_flexckpt as fc
from paddle_flexckpt.aoa.model_rules import model_rules
from tests.aoa.test_families import GROUPS, HEADS, hugging_face
from tests.ramdisk import memory_directory

SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "tie_word_embeddings": False}
GLM = {"n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}
# Family: class, variant, what its configuration has besides, and what PaddleFormers names otherwise.
FAMILIES = {
    "gemma3_text": ("Gemma3ForCausalLM", "fused", {"num_hidden_layers": 2}, None),
    "phi3": ("Phi3ForCausalLM", "plain", {"num_hidden_layers": 2}, None),
    "gpt_oss": ("GptOssForCausalLM", "plain", {"num_hidden_layers": 2}, None),
    # Its layer for further tokens is put together otherwise.
    "glm4_moe": ("Glm4MoeForCausalLM", "fused", {"num_hidden_layers": 2, **GLM}, r"model\.layers\.2\."),
}


def made_by(rules: dict[str, list[str]], path: str) -> dict[str, bytes]:
    merged = fc.load_merged_state_dict(path, aoa_config=rules)
    return {name: tensor.numpy().tobytes() for name, tensor in merged.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_that_the_library_makes(family):
    class_name, variant, sizes, others = FAMILIES[family]
    module = importlib.import_module(f"paddleformers.transformers.{family}.modeling")
    model_class = getattr(module, class_name)
    config = model_class.config_class(**SIZES, **sizes)
    given = {"num_heads": HEADS, "num_key_value_groups": GROUPS} if variant == "fused" else {}
    with memory_directory() as path:
        fc.save_state_dict(hugging_face(family), path, process_group="self")
        theirs = made_by(model_class._gen_aoa_config(config), path)
        ours = made_by(model_rules(family, variant, lm_head="embedding", **given), path)
    if others is not None:
        theirs, ours = (
            {name: part for name, part in made.items() if not re.match(others, name)} for made in (theirs, ours)
        )
    assert theirs == ours
