"""Rules for common models, on weights of true names and small shapes, against arrays made by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.aoa import parser
from paddle_flexckpt.aoa.families import small_models
from paddle_flexckpt.aoa.model_rules import describe_model_rules, model_rules, rule_names
from paddle_flexckpt.aoa.statements import AoaError
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.ramdisk import memory_directory

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCABULARY, LAYERS, EXPERTS = 6, 4, 2, 2, 5, 7, 2, 3
NUMBERS = {"num_heads": HEADS, "num_key_value_groups": KV_HEADS}
State = dict[str, np.ndarray]


class Weights:
    """Makes a checkpoint of HF's layout; no two elements are equal."""

    def __init__(self) -> None:
        self.state: State = {}
        self._next = 1

    def add(self, name: str, *shape: int) -> None:
        count = int(np.prod(shape))
        self.state[name] = np.arange(self._next, self._next + count, dtype=np.float32).reshape(shape)
        self._next += count

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)

    def gated(self, name: str, bias: bool = False) -> None:
        self.linear(f"{name}.gate_proj", HIDDEN, INNER, bias)
        self.linear(f"{name}.up_proj", HIDDEN, INNER, bias)
        self.linear(f"{name}.down_proj", INNER, HIDDEN, bias)

    def attention(self, name: str, bias: bool = False, output_bias: bool = False, norms: bool = False) -> None:
        self.linear(f"{name}.q_proj", HIDDEN, HEADS * WIDTH, bias)
        self.linear(f"{name}.k_proj", HIDDEN, KV_HEADS * WIDTH, bias)
        self.linear(f"{name}.v_proj", HIDDEN, KV_HEADS * WIDTH, bias)
        self.linear(f"{name}.o_proj", HEADS * WIDTH, HIDDEN, output_bias)
        if norms:
            self.add(f"{name}.q_norm.weight", WIDTH)
            self.add(f"{name}.k_norm.weight", WIDTH)

    def latent_attention(self, name: str, low_rank: bool = True) -> None:
        if low_rank:
            self.linear(f"{name}.q_a_proj", HIDDEN, 3)
            self.add(f"{name}.q_a_layernorm.weight", 3)
            self.linear(f"{name}.q_b_proj", 3, 8)
        else:
            self.linear(f"{name}.q_proj", HIDDEN, 8)
        self.linear(f"{name}.kv_a_proj_with_mqa", HIDDEN, 5)
        self.add(f"{name}.kv_a_layernorm.weight", 4)
        self.linear(f"{name}.kv_b_proj", 4, 10)
        self.linear(f"{name}.o_proj", 8, HIDDEN)

    def experts(self, name: str) -> None:
        for expert in range(EXPERTS):
            self.gated(f"{name}.experts.{expert}")

    def frame(self, tied: bool = False) -> None:
        """Everything outside the layers, and the norms in them."""
        self.add("model.embed_tokens.weight", VOCABULARY, HIDDEN)
        for layer in range(LAYERS):
            self.block_norms(f"model.layers.{layer}")
        self.add("model.norm.weight", HIDDEN)
        if not tied:
            self.add("lm_head.weight", VOCABULARY, HIDDEN)

    def block_norms(self, name: str) -> None:
        self.add(f"{name}.input_layernorm.weight", HIDDEN)
        self.add(f"{name}.post_attention_layernorm.weight", HIDDEN)


# -- what Paddle's side has to be, by hand -----------------------------------------------------------------------------


def transposed(state: State) -> State:
    """Linear weights ``[in, out]``: all of two axes but embeddings, routers and the like."""
    as_is = re.compile(r"embed|(?<!shared_expert_)gate\.weight|e_score_correction_bias")
    return {
        name: value if value.ndim < 2 or as_is.search(name) else np.ascontiguousarray(value.T)
        for name, value in state.items()
    }


def fuse_qkv(state: State) -> None:
    """Replaces q, k and v by what has, for every key-value head, its query heads, itself and its value head."""
    for name in [name for name in state if name.endswith((".q_proj.weight", ".q_proj.bias"))]:
        q, k, v = (state.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv")
        columns, share = [], HEADS // KV_HEADS
        for group in range(KV_HEADS):
            columns.append(q[..., group * share * WIDTH : (group + 1) * share * WIDTH])
            columns.append(k[..., group * WIDTH : (group + 1) * WIDTH])
            columns.append(v[..., group * WIDTH : (group + 1) * WIDTH])
        state[name.replace("q_proj", "qkv_proj")] = np.concatenate(columns, axis=-1)


def fuse_gate_up(state: State) -> None:
    for name in [name for name in state if ".gate_proj." in name]:
        gate, up = state.pop(name), state.pop(name.replace("gate_proj", "up_proj"))
        state[name.replace("gate_proj", "up_gate_proj")] = np.concatenate([gate, up], axis=-1)


def stack_experts(state: State) -> None:
    """After :func:`fuse_gate_up`."""
    for name in [name for name in state if name.endswith(".experts.0.down_proj.weight")]:
        layer = name[: -len(".experts.0.down_proj.weight")]
        for new, old in (("weight1", "up_gate_proj"), ("weight2", "down_proj")):
            parts = [state.pop(f"{layer}.experts.{expert}.{old}.weight") for expert in range(EXPERTS)]
            state[f"{layer}.grouped_gemm_experts.{new}"] = np.stack(parts)


def expected(hf: State, variant: str, qkv: bool = True) -> State:
    state = transposed(hf)
    if variant in ("fused", "stacked"):
        if qkv:
            fuse_qkv(state)
        fuse_gate_up(state)
    if variant == "stacked":
        stack_experts(state)
    return state


def renamed(state: State, prefix: str) -> State:
    return {re.sub(r"^model\.", prefix, name): value for name, value in state.items()}


# -- families ----------------------------------------------------------------------------------------------------------

Case = tuple[State, State, dict[str, Any]]


def llama(variant: str, bias: bool = False) -> Case:
    weights = Weights()
    weights.frame()
    for layer in range(LAYERS):
        weights.attention(f"model.layers.{layer}.self_attn", bias, bias)
        weights.gated(f"model.layers.{layer}.mlp")
    return weights.state, renamed(expected(weights.state, variant), "llama."), {"prefix": "llama.", **NUMBERS}


def llama_with_biases(variant: str) -> Case:
    return llama(variant, bias=True)


def qwen2_tied(variant: str) -> Case:
    weights = Weights()
    weights.frame(tied=True)
    for layer in range(LAYERS):
        weights.attention(f"model.layers.{layer}.self_attn", bias=True)
        weights.gated(f"model.layers.{layer}.mlp")
    wanted = expected(weights.state, variant)
    wanted["lm_head.weight"] = weights.state["model.embed_tokens.weight"]
    return weights.state, renamed(wanted, "qwen2."), {"prefix": "qwen2.", "tied": True, **NUMBERS}


def qwen3(variant: str) -> Case:
    weights = Weights()
    weights.frame()
    for layer in range(LAYERS):
        weights.attention(f"model.layers.{layer}.self_attn", bias=True, output_bias=True, norms=True)
        weights.gated(f"model.layers.{layer}.mlp")
    wanted = expected(weights.state, variant)
    wanted["lm_head.weight"] = weights.state["lm_head.weight"]
    return weights.state, renamed(wanted, "a.b."), {"prefix": "a.b.", "lm_head": "embedding", **NUMBERS}


def qwen2_moe(variant: str) -> Case:
    weights = Weights()
    weights.frame()
    for layer in range(LAYERS):
        weights.attention(f"model.layers.{layer}.self_attn", bias=True)
    weights.gated("model.layers.0.mlp")
    weights.add("model.layers.1.mlp.gate.weight", EXPERTS, HIDDEN)
    weights.gated("model.layers.1.mlp.shared_expert")
    weights.linear("model.layers.1.mlp.shared_expert_gate", HIDDEN, 1)
    weights.experts("model.layers.1.mlp")
    wanted = renamed(expected(weights.state, variant), "qwen2_moe.")
    return weights.state, wanted, {"prefix": "qwen2_moe.", "num_experts": EXPERTS, **NUMBERS}


def qwen3_moe(variant: str) -> Case:
    weights = Weights()
    weights.frame()
    for layer in range(LAYERS):
        weights.attention(f"model.layers.{layer}.self_attn", bias=True, output_bias=True, norms=True)
    weights.add("model.layers.0.mlp.gate.weight", EXPERTS, HIDDEN)
    weights.experts("model.layers.0.mlp")
    weights.gated("model.layers.1.mlp")
    wanted = expected(weights.state, variant)
    wanted["model.layers.0.mlp.gate.weight"] = np.ascontiguousarray(weights.state["model.layers.0.mlp.gate.weight"].T)
    parameters = {"prefix": "paddle.", "num_experts": EXPERTS, "router": "linear", **NUMBERS}
    return weights.state, renamed(wanted, "paddle."), parameters


def deepseek_weights(low_rank: bool = True) -> Weights:
    """One dense layer, one of experts, and a multi-token prediction layer (of number 2) with experts."""
    weights = Weights()
    weights.frame()
    weights.block_norms("model.layers.2")
    for layer in range(3):
        weights.latent_attention(f"model.layers.{layer}.self_attn", low_rank)
    weights.gated("model.layers.0.mlp")
    for layer in (1, 2):
        weights.add(f"model.layers.{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        weights.add(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", EXPERTS)
        weights.gated(f"model.layers.{layer}.mlp.shared_experts")
        weights.experts(f"model.layers.{layer}.mlp")
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights.add(f"model.layers.2.{name}.weight", HIDDEN)
    weights.linear("model.layers.2.eh_proj", 2 * HIDDEN, HIDDEN)
    weights.add("model.layers.2.embed_tokens.weight", VOCABULARY, HIDDEN)
    weights.add("model.layers.2.shared_head.head.weight", VOCABULARY, HIDDEN)
    return weights


def deepseek_v3(variant: str) -> Case:
    state = deepseek_weights().state
    wanted = renamed(expected(state, variant, qkv=False), "v3.")
    return state, wanted, {"prefix": "v3.", "num_experts": EXPERTS}


def deepseek_v3_shared_mtp(variant: str) -> Case:
    state = deepseek_weights(low_rank=False).state
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    for copy, name in copies.items():
        state[f"model.layers.2.{copy}.weight"] = state[f"{name}.weight"].copy()
    wanted = expected(state, variant, qkv=False)
    for copy in copies:
        del wanted[f"model.layers.2.{copy}.weight"]
    parameters = {"num_experts": EXPERTS, "mtp": "shared", "num_layers": 2, "prefix": "deepseek_v2."}
    return state, renamed(wanted, "deepseek_v2."), parameters


def ernie4_5_dense(variant: str) -> Case:
    weights = Weights()
    weights.frame(tied=True)
    for layer in range(LAYERS):
        weights.attention(f"model.layers.{layer}.self_attn", bias=True, output_bias=True)
        weights.gated(f"model.layers.{layer}.mlp", bias=True)
    wanted = expected(weights.state, variant)
    wanted["lm_head.weight"] = weights.state["model.embed_tokens.weight"]
    return weights.state, renamed(wanted, "ernie."), {"prefix": "ernie.", "tied": True, **NUMBERS}


def ernie4_5_moe(variant: str) -> Case:
    weights = Weights()
    weights.frame()
    for layer in range(LAYERS):
        weights.attention(f"model.layers.{layer}.self_attn")
    weights.gated("model.layers.0.mlp")
    weights.add("model.layers.1.mlp.gate.weight", EXPERTS, HIDDEN)
    weights.add("model.layers.1.mlp.moe_statics.e_score_correction_bias", 1, EXPERTS)
    weights.gated("model.layers.1.mlp.shared_experts")
    weights.experts("model.layers.1.mlp")
    weights.block_norms("model.mtp_block.0")
    weights.attention("model.mtp_block.0.self_attn", bias=True, output_bias=True)
    weights.gated("model.mtp_block.0.mlp", bias=True)
    weights.add("model.mtp_emb_norm.0.weight", HIDDEN)
    weights.add("model.mtp_hidden_norm.0.weight", HIDDEN)
    weights.linear("model.mtp_linear_proj.0", 2 * HIDDEN, HIDDEN, bias=True)
    wanted = renamed(expected(weights.state, variant), "ernie.")
    return weights.state, wanted, {"prefix": "ernie.", "num_experts": EXPERTS, **NUMBERS}


def gpt_neox(variant: str) -> Case:
    weights = Weights()
    weights.add("gpt_neox.embed_in.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        name = f"gpt_neox.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights.add(f"{name}.{norm}.weight", HIDDEN)
            weights.add(f"{name}.{norm}.bias", HIDDEN)
        weights.linear(f"{name}.attention.query_key_value", HIDDEN, HEADS * 3 * WIDTH, bias=True)
        weights.linear(f"{name}.attention.dense", HEADS * WIDTH, HIDDEN, bias=True)
        weights.linear(f"{name}.mlp.dense_h_to_4h", HIDDEN, INNER, bias=True)
        weights.linear(f"{name}.mlp.dense_4h_to_h", INNER, HIDDEN, bias=True)
    weights.add("gpt_neox.final_layer_norm.weight", HIDDEN)
    weights.add("gpt_neox.final_layer_norm.bias", HIDDEN)
    weights.add("embed_out.weight", VOCABULARY, HIDDEN)
    wanted = transposed({k: v for k, v in weights.state.items() if "embed" not in k})
    wanted["gpt_neox.embed_in.weight"] = weights.state["gpt_neox.embed_in.weight"]
    wanted["embed_out.weight"] = np.ascontiguousarray(weights.state["embed_out.weight"].T)
    if variant == "split":
        for name in [name for name in wanted if "query_key_value" in name]:
            # transformers views the outputs as [head, 3 * width] and cuts the last axis in three.
            heads = wanted.pop(name).reshape(-1, HEADS, 3, WIDTH)
            for number, letter in enumerate("qkv"):
                part = heads[:, :, number].reshape(-1, HEADS * WIDTH)
                key = name.replace("query_key_value", f"{letter}_proj")
                wanted[key] = part[0].copy() if name.endswith("bias") else part
    wanted = {name.replace("gpt_neox.", "neox."): value for name, value in wanted.items()}
    return weights.state, wanted, {"prefix": "neox.", "num_heads": HEADS}


FAMILIES: list[tuple[str, Callable[[str], Case], tuple[str, ...]]] = [
    ("llama", llama, ("plain", "fused")),
    ("llama", llama_with_biases, ("plain", "fused")),
    ("qwen2", qwen2_tied, ("plain", "fused")),
    ("qwen3", qwen3, ("plain", "fused")),
    ("qwen2_moe", qwen2_moe, ("plain", "fused", "stacked")),
    ("qwen3_moe", qwen3_moe, ("plain", "fused", "stacked")),
    ("deepseek_v3", deepseek_v3, ("plain", "fused", "stacked")),
    ("deepseek_v3", deepseek_v3_shared_mtp, ("plain", "fused", "stacked")),
    ("ernie4_5", ernie4_5_dense, ("plain", "fused")),
    ("ernie4_5", ernie4_5_moe, ("plain", "fused", "stacked")),
    ("gpt_neox", gpt_neox, ("plain", "split")),
]
CASES = [
    pytest.param(name, make, variant, id=f"{make.__name__}-{variant}")
    for name, make, variants in FAMILIES
    for variant in variants
]


def move(source: State, target: State, aoa_config: dict[str, list[str]], **options: Any) -> Any:
    """Loads what was saved from one state into another, through files."""

    def job(comm: Any) -> Any:
        with memory_directory() as path:
            fc.save_state_dict(source, path, comm)
            return fc.load_state_dict(target, path, comm, aoa_config=aoa_config, **options)

    (report,) = SimulatedWorld(1).run(job)
    return report


def blank(state: State) -> State:
    return {name: np.full_like(value, -1) for name, value in state.items()}


def check_equal(got: State, wanted: State) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(("name", "make", "variant"), CASES)
def test_every_key_of_hf_is_used_and_every_key_of_paddle_is_fed(name, make, variant):
    hf, wanted, parameters = make(variant)
    target = blank(wanted)
    # strict: neither missing nor unexpected keys.
    move(hf, target, model_rules(name, variant, **parameters), strict=True)
    check_equal(target, wanted)


@pytest.mark.parametrize(("name", "make", "variant"), CASES)
def test_the_way_back(name, make, variant):
    hf, paddle, parameters = make(variant)
    target = blank(hf)
    move(paddle, target, model_rules(name, variant, "to_hf", **parameters), strict=True)
    check_equal(target, hf)


@pytest.mark.paddle
@pytest.mark.parametrize(("name", "make", "variant"), CASES)
def test_an_export_has_the_keys_of_hf(name, make, variant):
    """Without a destination, what statements make is what they say, and nothing in between."""
    pytest.importorskip("paddle")
    from paddle_flexckpt.loading.merged import load_merged_state_dict

    hf, paddle, parameters = make(variant)
    config = model_rules(name, variant, "to_hf", **parameters)
    with memory_directory() as path:
        fc.save_state_dict(paddle, path, process_group="self")
        merged = load_merged_state_dict(path, aoa_config=config)
    check_equal({key: tensor.numpy() for key, tensor in merged.items()}, hf)


def test_fused_parameters_of_two_tensor_parallel_ranks():
    """Each rank has whole groups of heads, and its own part of gate beside its own part of up."""
    hf, whole, parameters = llama("fused")
    inner = 4  # that two ranks can share
    for layer in range(LAYERS):
        for part in ("gate", "up"):
            hf[f"model.layers.{layer}.mlp.{part}_proj.weight"] = hf[f"model.layers.{layer}.mlp.{part}_proj.weight"][
                :inner
            ].copy()
    config = model_rules("llama", "fused", **parameters)
    names = [f"llama.layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in
             ("self_attn.qkv_proj", "mlp.up_gate_proj")]  # fmt: skip

    def job(comm):
        target = {}
        for name in names:
            columns = whole[name].shape[1] // 2 if "qkv" in name else inner
            local = np.zeros((HIDDEN, columns), dtype=np.float32)
            offset = (0, comm.rank * columns)
            target[name] = fc.ShardedWeight(name, local, local.shape, (HIDDEN, 2 * columns), offset)
        fc.load_state_dict(target, path, comm, aoa_config=config)
        return {name: weight.local_tensor for name, weight in target.items()}

    with memory_directory() as path:
        SimulatedWorld(1).run(lambda comm: fc.save_state_dict(hf, path, comm))
        ranks = SimulatedWorld(2).run(job)
    for rank, state in enumerate(ranks):
        for name, local in state.items():
            if "qkv" in name:
                wanted = np.split(whole[name], 2, axis=1)[rank]
            else:
                layer = name.split(".")[2]
                gate, up = (hf[f"model.layers.{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
                half = slice(rank * inner // 2, (rank + 1) * inner // 2)
                wanted = np.concatenate([gate[:, half], up[:, half]], axis=1)
            assert (local == wanted).all(), (rank, name)


def quantised(state: State) -> State:
    """Linear weights in FP8 with a scale for every two rows and three columns."""
    rng = np.random.default_rng(0)
    hf: State = {}
    for name, value in state.items():
        if "_proj" in name and "eh_proj" not in name and name.endswith("weight"):
            scales = tuple(-(-extent // block) for extent, block in zip(value.shape, (2, 3)))
            hf[name] = rng.uniform(-400, 400, value.shape).astype(ml_dtypes.float8_e4m3fn)
            hf[f"{name}_scale_inv"] = rng.uniform(1e-4, 1e-3, scales).astype(np.float32)
        else:
            hf[name] = value.astype(np.float32 if "e_score" in name else ml_dtypes.bfloat16)
    return hf


@pytest.mark.parametrize("low_rank", [True, False])
def test_deepseek_from_fp8(low_rank):
    hf = quantised(deepseek_weights(low_rank).state)
    plain: State = {}
    for name, value in hf.items():
        if f"{name}_scale_inv" in hf:
            rows, columns = (np.arange(extent) for extent in value.shape)
            scale = hf[f"{name}_scale_inv"][rows[:, None] // 2, columns // 3]
            plain[name] = (value.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
        elif not name.endswith("_scale_inv"):
            plain[name] = value
    wanted = renamed(transposed(plain), "v3.")
    parameters = {"prefix": "v3.", "block": "[2, 3]"}
    target = blank(wanted)
    move(hf, target, model_rules("deepseek_v3", "fp8", **parameters), strict=True)
    check_equal(target, wanted)
    back = blank(plain)
    move(wanted, back, model_rules("deepseek_v3", "fp8", "to_hf", **parameters), strict=True)
    check_equal(back, plain)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_buffers_of_old_checkpoints_are_left_out(name):
    hf, wanted, parameters = {"llama": llama, "gpt_neox": gpt_neox}[name]("plain")
    prefix = {"llama": "model.layers.1.self_attn.", "gpt_neox": "gpt_neox.layers.1.attention."}[name]
    hf[f"{prefix}rotary_emb.inv_freq"] = np.ones(1, dtype=np.float32)
    if name == "gpt_neox":
        hf[f"{prefix}bias"] = np.ones((1, 1, 2, 2), dtype=bool)
        hf[f"{prefix}masked_bias"] = np.ones((), dtype=np.float32)
    target = blank(wanted)
    move(hf, target, model_rules(name, **parameters), strict=True)
    check_equal(target, wanted)


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_weight_is_an_error(missing):
    hf, wanted, parameters = llama("plain")
    del hf[missing]
    target = blank(wanted)
    with pytest.raises(ValueError, match=re.escape(missing.replace("model.", "", 1))):
        move(hf, target, model_rules("llama", **parameters))
    assert all((value == -1).all() for value in target.values())


# -- the files and the loader ------------------------------------------------------------------------------------------


def test_names():
    files = sorted(path.stem for path in (ROOT / "paddle_flexckpt" / "aoa" / "rules").glob("*.json"))
    assert rule_names() == sorted([*files, *small_models()])
    assert {name for name, _, _ in FAMILIES} == set(files)


@pytest.mark.parametrize("name", rule_names())
def test_rules_are_consistent(name):
    rules = describe_model_rules(name)
    assert set(rules) == {"name", "description", "parameters", "blocks", "variants"} and rules["name"] == name
    if name not in small_models():
        variants = {variant for family, _, variants in FAMILIES if family == name for variant in variants}
        assert set(rules["variants"]) - {"fp8"} == variants, "every variant is tested"
    used = {block for variant in rules["variants"].values() for block in variant["blocks"]}
    assert used == set(rules["blocks"])
    texts = []
    for block in rules["blocks"].values():
        assert {"aoa_statements", "to_hf"} <= set(block) <= {"when", "aoa_statements", "to_hf"}
        assert set(block.get("when", {})) <= set(rules["parameters"])
        texts += block["aoa_statements"] + (block["to_hf"] if isinstance(block["to_hf"], list) else [])
        back = block["to_hf"]
        assert isinstance(back, list) or back == "invert" or back in rules["blocks"]
    mentioned = set(re.findall(r"\{([a-z_]+)[}*]", " ".join(texts)))
    conditions = {key for block in rules["blocks"].values() for key in block.get("when", {})}
    assert mentioned | conditions == set(rules["parameters"])


@pytest.mark.parametrize("name", rule_names())
def test_every_text_is_one_statement(name):
    rules = describe_model_rules(name)
    numbers = {key: 4 for key, spec in rules["parameters"].items() if spec["type"] == "integer"}
    for variant in rules["variants"]:
        for direction in ("from_hf", "to_hf"):
            config = model_rules(name, variant, direction, **numbers)
            assert list(config) == ["aoa_statements"]
            for text in config["aoa_statements"]:
                assert len(parser.parse(text)) == 1, text
                assert "{" not in text.replace("${", ""), text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"name": "lama"},
            "no model rules 'lama'. Remedy .FC606.: use 'llama'.*, the nearest of 60; `flexckpt rules` lists all",
        ),
        (
            {"name": "nothing-like-it"},
            "no model rules 'nothing-like-it'. Remedy .FC606.: use one of .*, llama, .*qwen2,",
        ),
        ({"name": "../../setup"}, "no model rules"),
        ({"variant": "fuzed"}, "no variant of llama 'fuzed'. Remedy .FC606.: use one of plain, fused"),
        ({"direction": "to_paddle"}, "no direction 'to_paddle'. Remedy .FC606.: use one of from_hf, to_hf"),
        ({"heads": 4}, "no parameter of llama 'heads'. Remedy .FC606.: use one of prefix, num_heads"),
        ({"variant": "fused"}, "missing .num_heads: Number of attention heads.; num_key_value_groups"),
        ({"variant": "fused", "num_heads": 4}, "missing .num_key_value_groups"),
        ({"num_heads": "4"}, "'num_heads' .* has to be a positive whole number; got '4'"),
        ({"num_heads": True}, "has to be a positive whole number; got True"),
        ({"num_heads": 0}, "has to be a positive whole number; got 0"),
        ({"tied": 1}, "'tied' .* has to be True or False; got 1"),
        ({"lm_head": "rows"}, "'lm_head' .* has to be one of linear, embedding; got 'rows'"),
        ({"prefix": "my-model."}, "'prefix' .* has to be a text of letters"),
        ({"prefix": "0."}, "does not begin with a digit; got '0.'"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(AoaError, match=text):
        model_rules(**{"name": "llama", **arguments})


def test_parameters_that_no_statement_needs_may_be_left_out():
    assert model_rules("llama") == model_rules("llama", **NUMBERS)
    assert model_rules("llama")["aoa_statements"][0] == "model.embed_tokens.weight -> model.embed_tokens.weight"


def test_the_data_files_are_installed():
    """The files that setup.py packs, by its own words."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    ((single, pattern),) = re.findall(r'"paddle_flexckpt\.aoa": \["([^"]+)", "([^"]+)"\]', text)
    folder = ROOT / "paddle_flexckpt" / "aoa"
    assert {path.name for path in folder.glob(pattern)} == {
        f"{name}.json" for name in {*rule_names()} - {*small_models()}
    }
    assert (folder / single).is_file()
