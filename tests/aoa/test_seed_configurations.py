"""Configurations that users of PaddleNLP trained with: Llama's and ERNIE's, as they were written down."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddle_flexckpt.aoa import AoaError
from tests.aoa.small import assert_equal, numbered, room, run

STATES = ("", ".moment1_0", ".moment2_0", ".w_0")


def statements(name: str, attributes: str) -> list[str]:
    """One statement for a parameter and one for each of its states."""
    return [f"{name}{state} -> {name}{state}, {attributes}" for state in STATES]


LLAMA = r"""{
"aoa_statements": [
"llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight -> llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight, fused_ffn",
"llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight.moment1_0 -> llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight.moment1_0, fused_ffn",
"llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight.moment2_0 -> llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight.moment2_0, fused_ffn",
"llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight.w_0 -> llama.layers.$LAYER_ID.mlp.gate_up_fused_proj.weight.w_0, fused_ffn"
]
}"""  # noqa: E501 - as it was written
HEADS = "num_heads=20, num_key_value_groups=5"


def ernie(layout: str) -> dict[str, object]:
    """The configuration of ERNIE, with one of the two spellings of the layout of q, k and v."""
    texts = []
    for block in (r"layers.\$LAYER_ID", r"mtp_block.\$LAYER_ID"):
        texts += statements(f"ernie.{block}.self_attn.qkv_proj.weight", f"{layout}, {HEADS}")
    for block in (r"layers.\$LAYER_ID", r"mtp_block.\$LAYER_ID"):
        texts += statements(f"ernie.{block}.mlp.up_gate_proj.weight", "fused_ffn")
    texts += statements("ernie.layers.1.mlp.shared_experts.up_gate_proj.weight", "fused_ffn")
    return {"aoa_statements": texts}


def with_states(name: str, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    """A parameter in bfloat16 and its states in float32; each from its own list of arrays."""
    return {f"{name}{state}": x if state else x.astype("bfloat16") for state, x in zip(STATES, arrays)}


def interleaved(components: list[np.ndarray], parts: int) -> np.ndarray:
    """Components along axis 1 as the parts of a fused tensor hold them: each part its share of each, in turn."""
    shares = [np.split(component, parts, 1) for component in components]
    return np.concatenate([share[part] for part in range(parts) for share in shares], 1)


def contents(widths: list[int], seed: int) -> list[list[np.ndarray]]:
    """The components of a parameter and of each of its states, all different."""
    total = sum(widths)
    wholes = [numbered(8, total, start=seed + 10_000 * i) for i in range(len(STATES))]
    return [np.split(whole, np.cumsum(widths)[:-1], 1) for whole in wholes]


def side(
    names: dict[str, tuple[list[int], int]], parts: int
) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, int]]]:
    """All keys for a tensor-parallel degree, and how they are cut."""
    arrays = {}
    for name, (widths, seed) in names.items():
        arrays.update(with_states(name, [interleaved(each, parts) for each in contents(widths, seed)]))
    return arrays, {key: (1, parts) for key in arrays}


def check(config: object, names: dict[str, tuple[list[int], int]], source_parts: int, target_parts: int) -> None:
    source, source_cuts = side(names, source_parts)
    expected, target_cuts = side(names, target_parts)
    for name in names:
        for state in ("beta1_pow_acc_0", "beta2_pow_acc_0"):
            source[f"{name}.{state}"] = expected[f"{name}.{state}"] = np.array([0.25], np.float32)
    # What no statement names is loaded as it is.
    source["norm.weight"] = expected["norm.weight"] = numbered(8)
    target = {key: room(*array.shape, dtype=array.dtype.name) for key, array in expected.items()}
    assert_equal(run((), source, target, source_cuts, target_cuts, config=config), expected)
    if source_parts != target_parts:
        assert any(source[key].tobytes() != expected[key].tobytes() for key in source)


FFN = {f"llama.layers.{i}.mlp.gate_up_fused_proj.weight": ([16, 16], 1000 * i) for i in (0, 1, 11)}


@pytest.mark.parametrize(("source_parts", "target_parts"), [(2, 4), (4, 2), (1, 4), (4, 1), (2, 8), (4, 4)])
def test_llama_with_other_degrees(source_parts: int, target_parts: int):
    check(LLAMA, FFN, source_parts, target_parts)


@pytest.mark.parametrize(("source_parts", "target_parts"), [(2, 4), (4, 2)])
def test_llama_in_reverse(source_parts: int, target_parts: int):
    check({**json.loads(LLAMA), "aoa_config_reverse": True}, FFN, source_parts, target_parts)


def test_the_statements_about_states_say_what_follows_anyway():
    """The first statement is enough; the states follow their parameter."""
    first = json.loads(LLAMA)["aoa_statements"][:1]
    check({"aoa_statements": first}, FFN, 2, 4)


QKV = [20 * 2, 5 * 2, 5 * 2]
ERNIE = {
    **{f"ernie.layers.{i}.self_attn.qkv_proj.weight": (QKV, 1000 * i) for i in range(3)},
    **{f"ernie.mtp_block.{i}.self_attn.qkv_proj.weight": (QKV, 5000 + 1000 * i) for i in range(1)},
    **{f"ernie.layers.{i}.mlp.up_gate_proj.weight": ([10, 10], 500 + 1000 * i) for i in (0, 2)},
    "ernie.mtp_block.0.mlp.up_gate_proj.weight": ([10, 10], 7000),
    "ernie.layers.1.mlp.shared_experts.up_gate_proj.weight": ([20, 20], 8000),
}


@pytest.mark.parametrize(("source_parts", "target_parts"), [(1, 5), (5, 1), (5, 5)])
def test_ernie_with_the_later_spelling(source_parts: int, target_parts: int):
    """20 query heads and 5 key-value heads: degrees that divide both are 1 and 5."""
    check(ernie("fused_qkv_old"), ERNIE, source_parts, target_parts)


def test_degrees_that_do_not_divide_the_heads_are_refused_with_the_spelling_that_works():
    """Of ERNIE's 20 query heads 5 share one key-value head: num_key_value_groups= is their number, 4, and not 5."""
    shared = {name: ([40, 8, 8] if "qkv" in name else [16, 16], seed) for name, (_, seed) in ERNIE.items()}
    with pytest.raises(AoaError, match="5 K heads cannot be cut into 2 equal tensor-parallel parts") as caught:
        check(ernie("fused_qkv_old"), shared, 2, 4)
    assert "If 5 query heads share one of them, write num_key_value_groups=4" in str(caught.value)
    texts = [text.replace("groups=5", "groups=4") for text in ernie("fused_qkv_old")["aoa_statements"]]
    check({"aoa_statements": texts}, shared, 2, 4)


def test_no_other_meaning_is_proposed_where_it_would_not_fit_either():
    config = {"aoa_statements": ["a -> a, fused_qkv_old, num_heads=12, num_key_value_groups=6"]}
    with pytest.raises(AoaError, match="6 K heads cannot be cut into 4 equal tensor-parallel parts") as caught:
        check(config, {"a": ([24, 12, 12], 0)}, 2, 4)
    assert "write num_key_value_groups" not in str(caught.value)


def test_the_older_spelling_is_refused_with_the_reason():
    """``a -> a, fused_qkv`` would change nothing: that layout is the same under every degree."""
    with pytest.raises(AoaError) as caught:
        check(ernie("fused_qkv"), ERNIE, 1, 5)
    problems = [str(problem) for problem in caught.value.problems]
    # The statements about states follow from those about the parameters.
    assert len(problems) == 2
    for number, problem in zip((1, 5), problems):
        assert problem.startswith(f"AOA statement {number}: fused_qkv is the same layout under every tensor-parallel")
        assert "Remedy (FC603): if every rank holds [Q | K | V] of its own heads, write fused_qkv_old" in problem
