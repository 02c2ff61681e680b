"""Rules of families of models beside what PaddleFormers' own classes say, on small models.

Every tensor that the library's statements make of a small checkpoint, these rules make too, bit for bit. No two
elements of a checkpoint are equal. Names in which the models of ``paddlefleet`` differ are taken back to Hugging Face's
first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddleformers")
import numpy as np

import paddle_flexckpt as fc
from paddle_flexckpt.aoa.model_rules import model_rules
from paddle_flexckpt.trainer.model_rules.hf import with_optional_patterns
from tests.aoa import test_model_rules as written
from tests.aoa.test_families import EXPERTS, GROUPS, HEADS, hugging_face
from tests.ramdisk import memory_directory

ROOT = Path(__file__).resolve().parents[2]
State = dict[str, np.ndarray]
NUMBERS = {"num_heads": HEADS, "num_key_value_groups": GROUPS}
assert {"num_heads": written.HEADS, "num_key_value_groups": written.KV_HEADS} == NUMBERS
# What configurations of small models have in common.
SIZES = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
HEAD = {"lm_head": "embedding"}
# What paddlefleet's models call by other names than Hugging Face.
OF_FLEET = {
    r"^model\.embedding\.": "model.",
    r"^model\.lm_head\.": "lm_head.",
    r"\.q_layernorm\.": ".q_norm.",
    r"\.k_layernorm\.": ".k_norm.",
}
# Biases of gate and up, of which ERNIE's statements do not speak.
OF_GATED = r"mlp\.(gate|up|up_gate)_proj\.bias$"


@dataclass(frozen=True)
class Case:
    """Say how a family is compared.

    Attributes:
        module: PaddleFormers' module.
        model: Its class.
        variant: The variant of the rules.
        given: Their parameters.
        config: What its configuration has besides :data:`SIZES`.
        weights: Makes the checkpoint; by default the small model of the family's tensors.
        names: What the library calls otherwise, as patterns and what they become.
        left: Patterns of tensors that the library's statements leave as they are, or out: it has no such layers.
        imitated: Whether ``paddlefleet`` has to be imitated for the import.
        family: That of the rules, where it is called otherwise.
        published: What published files call otherwise than transformers does, as patterns and what they become.
    """

    module: str
    model: str
    variant: str = "fused"
    given: dict[str, Any] = field(default_factory=lambda: {**NUMBERS, **HEAD})
    config: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[], State] | None = None
    names: dict[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    imitated: bool = True
    family: str = ""
    published: dict[str, str] = field(default_factory=dict)


def by_hand(make: Callable[[str], Any]) -> Callable[[], State]:
    return lambda: make("plain")[0]


FAMILIES = {
    "gemma3_text": Case(
        "gemma3_text.modeling", "Gemma3ForCausalLM", given={**NUMBERS, "tied": True}, imitated=False,
        config={"tie_word_embeddings": True},
    ),
    "phi3": Case("phi3.modeling", "Phi3ForCausalLM", "plain", HEAD, imitated=False),
    "gpt_oss": Case("gpt_oss.modeling", "GptOssForCausalLM", "plain", HEAD, imitated=False),
    "llama": Case("llama.modeling", "LlamaForCausalLM", "plain", HEAD, weights=by_hand(written.llama), imitated=False),
    "ernie4_5": Case(
        "ernie4_5.modeling", "Ernie4_5ForCausalLM", given={**NUMBERS, "tied": True}, imitated=False,
        config={"tie_word_embeddings": True, "use_bias": True}, weights=by_hand(written.ernie4_5_dense),
        left=(OF_GATED,),
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe.modeling", "Ernie4_5_MoeForCausalLM", given={**NUMBERS, **HEAD, "router": "linear"},
        config={"use_bias": True}, weights=by_hand(written.ernie4_5_moe), imitated=False, family="ernie4_5",
        left=(OF_GATED,),
    ),
    "qwen2": Case(
        "qwen2.modeling", "Qwen2ForCausalLM", given={**NUMBERS, "tied": True},
        config={"tie_word_embeddings": True}, weights=by_hand(written.qwen2_tied),
    ),
    "qwen3": Case(
        "qwen3.modeling", "Qwen3ForCausalLM", config={"attention_bias": True}, weights=by_hand(written.qwen3),
    ),
    "qwen2_moe": Case(
        "qwen2_moe.modeling", "Qwen2MoeForCausalLM", weights=by_hand(written.qwen2_moe),
        names={r"shared_experts\.gate_weight": "shared_expert_gate.weight", r"shared_experts\.": "shared_expert."},
        left=(r"layers\.0\.mlp\.",),  # a layer without experts
    ),
    "qwen3_moe": Case(
        "qwen3_moe.modeling", "Qwen3MoeForCausalLM",
        config={"attention_bias": True}, weights=by_hand(written.qwen3_moe),
        left=(r"layers\.1\.mlp\.",),  # likewise
    ),
    "deepseek_v3": Case(
        "deepseek_v3.modeling", "DeepseekV3ForCausalLM", "plain", {**HEAD, "router": "linear"},
        weights=by_hand(written.deepseek_v3), left=(r"\.eh_proj\.",),
    ),
    "glm4_moe": Case(
        "glm4_moe.modeling", "Glm4MoeForCausalLM",
        config={
            "attention_bias": True, "use_qk_norm": True, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
        names={r"\.transformer_layer\.": ".", r"layers\.2\.norm\.": "layers.2.shared_head.norm."},
        left=(r"\.shared_head\.head\.",),
    ),
    "qwen3_next": Case(
        "qwen3_next.modeling", "Qwen3NextForCausalLM", given={**HEAD, "router": "linear"},
        config={"num_hidden_layers": 4},
        # Heads of q have a gate each, so that here q, k and v stay apart; it has no layers for further tokens.
        left=(r"self_attn\.(q|k|v|qkv)_proj\.", r"^mtp\."),
    ),
    "qwen2_5_vl": Case(
        "qwen2_5_vl.modeling", "Qwen2_5_VLForConditionalGeneration", imitated=False,
        names={r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."},
    ),
    "qwen3_vl": Case("qwen3_vl.modeling", "Qwen3VLForConditionalGenerationDeprecated", imitated=False),
    "ernie4_5_vl_moe": Case(
        "ernie4_5_moe_vl.model.modeling_moe_vl", "Ernie4_5_VLMoeForConditionalGeneration", "plain", {},
        imitated=False, published={r"^model\.vision_model\.": "vision_model."},
        names={r"^vision_model\.": "model.vision_model."},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What the classes say: of all of them in a process of its own."""
    requests = {
        name: {"module": case.module, "class": case.model, "config": {**SIZES, **case.config}}
        for name, case in FAMILIES.items()
    }
    command = [sys.executable, "-m", "tests.paddleformers.statements"]
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, timeout=560, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def made_by(statements: list[str], path: str) -> dict[str, bytes]:
    merged = fc.load_merged_state_dict(path, aoa_config=statements)
    return {name: tensor.numpy().tobytes() for name, tensor in merged.items()}


def differences(name: str, statements: list[str]) -> list[str]:
    """Return the names of tensors that the library makes otherwise, or that only one side makes."""
    case = FAMILIES[name]
    weights = case.weights() if case.weights else hugging_face(name)
    for pattern, text in case.published.items():
        weights = {re.sub(pattern, text, key): value for key, value in weights.items()}
    if case.given.get("tied"):
        weights.pop("lm_head.weight", None)
    with memory_directory() as path:
        fc.save_state_dict(weights, path, process_group="self")
        theirs = made_by(list(with_optional_patterns(statements)), path)
        ours = made_by(model_rules(case.family or name, case.variant, **case.given)["aoa_statements"], path)
    for pattern, text in {**(OF_FLEET if case.imitated else {}), **case.names}.items():
        theirs = {re.sub(pattern, text, key): value for key, value in theirs.items()}
    assert len(theirs) > EXPERTS
    left = re.compile("|".join(case.left) or "$^")
    return sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key) and not left.search(key))


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_are_those_that_the_library_makes(name, said):
    assert "error" not in said[name], said[name]
    assert said[name]["imitated"] == FAMILIES[name].imitated
    assert differences(name, said[name]["from_hf"]) == []
