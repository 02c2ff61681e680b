"""Models of PaddleNLP: what they save under one layout loads under another, compared with PaddleNLP's own split.

The jobs: models of PaddleNLP described, saved and loaded under layouts, against an oracle.

The oracle knows nothing of the library: every whole parameter has values that follow from its name, its shape is that
of the model without any parallelism, and PaddleNLP's own split functions say what a rank holds of it.
"""

from __future__ import annotations

import importlib
import itertools
import zlib

import numpy as np
import pytest

pytest.importorskip("paddlenlp")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from paddle_flexckpt.trainer.model_rules import describe_model, install_model_rules

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "seq_length": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
_CHATGLM = {
    "num_layers": 4,
    "padded_vocab_size": 64,
    "ffn_hidden_size": 48,
    "kv_channels": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 4,
    "add_qkv_bias": True,
}
_JAMBA = {"num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1}
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
#: Name: (module, class of the model without head or pipeline, sizes, what is set afterwards).
FAMILIES = {
    "llama": ("llama", "Llama", _UNTIED, {}),
    "llama-tied": ("llama", "Llama", _TIED, {}),
    "llama-fused": ("llama", "Llama", _UNTIED, _FUSED),
    "llama-ffn": ("llama", "Llama", _UNTIED, {"fuse_attention_ffn": True}),
    "qwen2": ("qwen2", "Qwen2", _UNTIED, {}),
    "qwen2-tied": ("qwen2", "Qwen2", _TIED, {}),
    "qwen2-fused": ("qwen2", "Qwen2", _TIED, _FUSED),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 16, **_UNTIED}, {}),
    "gpt": ("gpt", "GPT", {"num_key_value_heads": 8}, {}),
    "gpt-fused": ("gpt", "GPT", {"num_key_value_heads": 8}, {"fuse_attention_qkv": True}),
    "qwen": ("qwen", "QWen", {"kv_channels": 4}, {}),
    "chatglm_v2": ("chatglm_v2", "ChatGLMv2", _CHATGLM, {}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2", {**_DEEPSEEK, **_UNTIED}, {}),
    "gemma-tied": ("gemma", "Gemma", {**_TIED, "head_dim": 4}, {}),
    "mistral": ("mistral", "Mistral", {}, {}),
    "mixtral": ("mixtral", "Mixtral", {"num_local_experts": 2, **_UNTIED}, {}),
    "bloom": ("bloom", "Bloom", {"n_layer": 2, "n_head": 8}, {}),
    "opt": ("opt", "OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, {}),
    "jamba": ("jamba", "Jamba", {**_JAMBA, **_UNTIED}, {}),
}


def _config(family, degree=1, rank=0):
    module, name, sizes, after = FAMILIES[family]
    configuration = importlib.import_module(f"paddlenlp.transformers.{module}.configuration")
    config = getattr(configuration, f"{name}Config")(**{**_SIZES, **sizes})
    for key, value in {**after, "tensor_parallel_degree": degree, "tensor_parallel_rank": rank}.items():
        setattr(config, key, value)
    return config


def model_class(family, pipeline=False):
    """The class of a family's causal language model, with or without a pipeline."""
    module, name, _, _ = FAMILIES[family]
    suffix = "ForCausalLMPipe" if pipeline else "ForCausalLM"
    file = "modeling_pp" if pipeline else "modeling"
    return getattr(importlib.import_module(f"paddlenlp.transformers.{module}.{file}"), name + suffix)


def build(family, layout):
    """A model under ``{"mp": ..., "pp": ..., "dp": ...}``."""
    degree = layout.get("mp", 1)
    world = dist.get_world_size()
    sizes = {"mp": degree, "pp": layout.get("pp", 1)}
    hcg = cpu_world.init_fleet(**{**sizes, "dp": world // (sizes["mp"] * sizes["pp"])})
    rank = hcg.get_model_parallel_rank() if degree > 1 else 0
    config = _config(family, degree, rank)
    pipeline = layout.get("pp", 1) > 1
    return model_class(family, pipeline)(config), config


def wholes(family):
    """``(first name, values)`` of whole parameters by their names in the model without parallelism.

    The names of a tied parameter have the same first name and values.
    """
    model = model_class(family)(_config(family))
    first, made = {}, {}
    for key, tensor in sorted(model.state_dict().items()):
        name = first.setdefault(id(tensor), key)
        made[key] = (name, values_of(name, tuple(tensor.shape)))
    return made


def values_of(key, shape):
    """Values that follow from a name."""
    first = np.float32(zlib.crc32(key.encode()) % 100_000)
    return (first + np.arange(int(np.prod(shape)), dtype=np.float32)).reshape(shape)


def expected_parts(family, config):
    """What a rank holds of every whole parameter, by PaddleNLP's own split functions."""
    cls = model_class(family)
    whole_values = wholes(family)
    actions = {}
    if config.tensor_parallel_degree > 1:
        actions = cls.get_tensor_parallel_convert_actions(config, list(whole_values), ignore_error=True)
    parts = {}
    for key, (first, whole) in whole_values.items():
        action = actions.get(key) or actions.get(first)
        if action is None:
            parts[key] = whole
            continue
        parts[key] = _part(action, whole)
    return parts


def _part(action, whole):
    """What a split function of PaddleNLP makes of an array."""
    try:
        part = action(whole)
    except (TypeError, ValueError):  # some take tensors of Paddle only
        part = action(paddle.to_tensor(whole))
    return np.asarray(part.numpy() if hasattr(part, "numpy") else part)


def names(family, layout):
    """What is described, by key: whole shape, other names, statement of a fused parameter."""
    install_model_rules("paddlenlp")
    model, _ = build(family, layout)
    return {
        key: [list(weight.global_shape), list(weight.aliases), weight.fused and weight.fused.statement]
        for key, weight in describe_model(model).items()
    }


def save(family, layout, path):
    """Saves the oracle's values under a layout."""
    install_model_rules("paddlenlp")
    model, config = build(family, layout)
    parts = expected_parts(family, config)
    sharded = describe_model(model)
    for key, weight in sharded.items():
        expected = parts[key]
        assert tuple(weight.local_tensor.shape) == expected.shape, (key, weight, expected.shape)
        weight.local_tensor.set_value(paddle.to_tensor(expected).astype(weight.local_tensor.dtype))
    return fc.save_state_dict(sharded, path).as_dict()["keys"]


def load(family, layout, path, strict):
    """Loads under a layout; returns what is not as the oracle says, and the report."""
    install_model_rules("paddlenlp")
    model, config = build(family, layout)
    parts = expected_parts(family, config)
    sharded = describe_model(model)
    for weight in sharded.values():
        weight.local_tensor.set_value(paddle.full_like(weight.local_tensor, -1))
    report = fc.load_state_dict(sharded, path, strict=strict)
    wrong = []
    for key, weight in sharded.items():
        got = weight.local_tensor.astype("float32").numpy()
        if not np.array_equal(got, parts[key].astype(np.float32)):
            wrong.append(key)
    return {"wrong": wrong, "keys": sorted(sharded), "fused": sorted(report.fused)}


def unknown_heads():
    """Layers of PaddleNLP that are a language model's head with a part of the vocabulary, and have no rule."""
    import pkgutil
    import re
    from pathlib import Path

    import paddlenlp.transformers as transformers

    from paddle_flexckpt.trainer.model_rules.axes import registered_axes

    unknown = []
    for module in pkgutil.walk_packages(transformers.__path__, "paddlenlp.transformers."):
        name = module.name
        if not name.endswith(".modeling"):
            continue
        text = Path(transformers.__path__[0], *name.split(".")[2:]).with_suffix(".py").read_text(encoding="utf-8")
        for head in re.findall(r"^class (\w*LMHead|ChatGLMHead)\(", text, re.MULTILINE):
            layer_class = getattr(importlib.import_module(name), head)
            layer = layer_class.__new__(layer_class)
            paddle.nn.Layer.__init__(layer)
            layer.config = _config("gemma-tied")
            cut = "tensor_parallel_degree" in text or "mpu." in text or "meta_parallel" in text
            if cut and registered_axes(layer, paddle.nn.Layer) is None:
                unknown.append(f"{name}.{head}")
    return unknown


class Unknown(paddle.nn.Layer):
    """A layer of somebody else's."""

    def __init__(self):
        super().__init__()
        self.table = self.create_parameter([4, 3])
        self.table.is_distributed = True


def unknown_layer():
    """The error, and the shape once a rule is registered."""
    from paddle_flexckpt.trainer.model_rules import register_model_rule, unregister_model_rule

    install_model_rules("paddlenlp")
    cpu_world.init_fleet(mp=2)
    model = paddle.nn.Sequential(Unknown())
    error = ""
    try:
        describe_model(model)
    except ValueError as caught:
        error = str(caught)
    register_model_rule(Unknown, {"table": 0})
    try:
        shape = list(describe_model(model)["0.table"].global_shape)
    finally:
        unregister_model_rule(Unknown)
    return error, shape


def adapted():
    """The keys and whole shapes of a model with LoRA layers."""
    from paddlenlp.peft import LoRAConfig, LoRAModel

    install_model_rules("paddlenlp")
    model, _ = build("llama-ffn", {"mp": 2})
    targets = [".*q_proj.*", ".*o_proj.*", ".*gate_up_fused_proj.*"]
    lora = LoRAModel(
        model, LoRAConfig(target_modules=targets, r=4, lora_alpha=8, tensor_parallel_degree=2, dtype="float32")
    )
    sharded = describe_model(lora)
    marked = sharded["llama.layers.0.mlp.gate_up_fused_proj.lora_B"]
    assert marked.fused is not None
    return sorted(sharded), {key: list(weight.global_shape) for key, weight in sharded.items()}


def uninstalled():
    """Whether every class is as before after an uninstall."""
    from paddlenlp.transformers import model_utils, moe_layer

    from paddle_flexckpt.trainer.model_rules import uninstall_model_rules

    install_model_rules("paddlenlp")  # paddle_flexckpt.install() comes with it, and stays
    uninstall_model_rules("paddlenlp")
    owners = (model_utils.PretrainedModel, model_utils.PipelinePretrainedModel, moe_layer.MoELayer, paddle.nn.Layer)
    before = [dict(vars(owner)) for owner in owners]
    install_model_rules("paddlenlp")
    changed = [dict(vars(owner)) for owner in owners]
    uninstall_model_rules("paddlenlp")
    after = [dict(vars(owner)) for owner in owners]
    return after == before != changed


def hf_mappings(family):
    """PaddleNLP's own table of Hugging Face's names."""
    cls, config = model_class(family), _config(family)
    config.architectures = [cls.__name__]
    mappings = cls._get_name_mappings(config)
    kept = [m for m in mappings if family == "chatglm_v2" or not m.target_name.endswith("inv_freq")]
    if family == "chatglm_v2":  # whose table leaves out what all names begin with
        for mapping in kept:
            mapping.source_name = f"transformer.{mapping.source_name}"
            mapping.target_name = f"chatglm_v2.{mapping.target_name}"
    return [m for m in kept if not (getattr(config, "tie_word_embeddings", False) and "lm_head" in m.target_name)]


def hf_weights(family):
    """A Hugging Face checkpoint: names and layouts of it, values that follow from the names."""
    plain = _config(family)
    for flag in _FUSED:
        setattr(plain, flag, False)
    shapes = {key: tuple(tensor.shape) for key, tensor in model_class(family)(plain).state_dict().items()}
    weights = {}
    for mapping in hf_mappings(family):
        if mapping.target_name not in shapes:
            continue  # DeepSeek's table has the names of every configuration
        shape = shapes[mapping.target_name]
        if mapping.action == "transpose":
            shape = shape[::-1]
        elif mapping.action == "split":
            shape = (*shape[:-1], 3 * shape[-1])
        weights[mapping.source_name] = values_of(mapping.source_name, shape)
    return weights


def converted(family, config):
    """What PaddleNLP makes of that for a rank: renamed and transposed, fused, cut."""
    cls = model_class(family)
    state = hf_weights(family)
    for mapping in hf_mappings(family):
        if mapping.source_name not in state:
            continue
        state[mapping.target_name] = np.ascontiguousarray(mapping.run(state, mapping.source_name))
    if hasattr(cls, "_get_fuse_or_split_param_mappings"):
        try:
            fusions = cls._get_fuse_or_split_param_mappings(config, is_fuse=True)
        except NotImplementedError:
            fusions = {}
        for names_, action in fusions.items():
            *singles, whole = (f"{cls.base_model_prefix}.{name}" for name in names_)
            state[whole] = action([state.pop(single) for single in singles])
    if family == "opt":  # whose head is a parameter of its own here
        state["lm_head.decoder_weight"] = state["opt.embeddings.word_embeddings.weight"].copy()
    if config.tensor_parallel_degree > 1:
        actions = cls.get_tensor_parallel_convert_actions(config, list(state), ignore_error=True)
        state.update({key: _part(actions[key], value) for key, value in state.items() if key in actions})
    return state


def _wrong(sharded, parts):
    """The keys that do not hold what they should; a tied parameter is under one of its names."""
    wrong = []
    for key, weight in sharded.items():
        name = next((name for name in (key, *weight.aliases) if name in parts), None)
        got = weight.local_tensor.astype("float32").numpy()
        if name is None or not np.array_equal(got, np.asarray(parts[name], dtype=np.float32)):
            wrong.append(key)
    return wrong


def load_hf(family, layout, path):
    """A Hugging Face checkpoint into a model under a layout; what differs from PaddleNLP's own conversion."""
    from paddle_flexckpt.trainer.model_rules import hf_rules

    install_model_rules("paddlenlp")
    model, config = build(family, layout)
    fc.save_state_dict(hf_weights(family), path)
    sharded = describe_model(model)
    for weight in sharded.values():
        weight.local_tensor.set_value(paddle.full_like(weight.local_tensor, -1))
    fc.load_state_dict(sharded, path, aoa_config=hf_rules(type(model), config)["from_hf"], dtype="cast")
    return _wrong(sharded, converted(family, config))


def export_hf(family, layout, path):
    """A model's checkpoint as a Hugging Face one; the names that are missing, too many, or differ."""
    from safetensors.numpy import load_file

    from paddle_flexckpt.trainer.model_rules import hf_rules

    install_model_rules("paddlenlp")
    model, config = build(family, layout)
    parts = converted(family, config)
    sharded = describe_model(model)
    for key, weight in sharded.items():
        name = next(name for name in (key, *weight.aliases) if name in parts)
        weight.local_tensor.set_value(paddle.to_tensor(parts[name]).astype(weight.local_tensor.dtype))
    fc.save_state_dict(sharded, f"{path}/flex")
    if dist.get_rank():
        return []
    report = fc.export_safetensors(f"{path}/flex", f"{path}/hf", hf_rules(type(model), config)["to_hf"])
    exported = {}
    for file in report.files:
        exported.update(load_file(f"{path}/hf/{file}"))
    expected = hf_weights(family)
    return sorted(
        key
        for key in {*exported, *expected}
        if key not in exported or key not in expected or not np.array_equal(exported[key], expected[key])
    )


def unknown_names():
    """The error of a model whose table does not fit."""
    from paddle_flexckpt.trainer.model_rules import hf_rules

    class Unknown(model_class("llama")):
        @classmethod
        def _get_name_mappings(cls, config):
            raise NotImplementedError

    try:
        hf_rules(Unknown, _config("llama"))
    except fc.ValidationError as error:
        return str(error)
    return ""


def load_glm(path):
    """A Hugging Face checkpoint of GLM-10B's names into the library's model; the keys that differ."""
    from paddlenlp.transformers import GLMConfig, GLMForConditionalGeneration

    from paddle_flexckpt.trainer.model_rules import hf_rules

    install_model_rules("paddlenlp")
    config = GLMConfig(**{**_SIZES, "num_hidden_layers": 2, "max_sequence_length": 16})
    model = GLMForConditionalGeneration(config)
    linear = ("query_key_value.weight", "dense.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight")
    parts = {key: values_of(key, tuple(tensor.shape)) for key, tensor in model.state_dict().items()}
    if dist.get_rank():
        return []
    hf = {key: np.ascontiguousarray(part.T) if key.endswith(linear) else part for key, part in parts.items()}
    fc.save_state_dict(hf, path, process_group="self")
    sharded = describe_model(model)
    rules = hf_rules(type(model), config)
    fc.load_state_dict(sharded, path, process_group="self", aoa_config=rules["from_hf"], dtype="cast")
    return _wrong(sharded, parts)


_FACTORS = {"moment1_0": 2, "moment2_0": 3}


def _with_optimizer(family, layout):
    """A model's and its AdamW's shards, and what a rank should hold of each: multiples of the parameters' values."""
    model, config = build(family, layout)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    sharded = describe_model(model)
    parts = expected_parts(family, config)
    expected = {key: parts[key] for key in sharded}
    states = fc.init_optimizer_state(optimizer, sharded)
    for key in states:
        parameter, _, state = key.rpartition(".")
        expected[key] = _FACTORS[state] * parts[parameter] if state in _FACTORS else None
    return {**sharded, **states}, expected


def save_training(family, layout, path):
    """Saves model and optimizer under a layout."""
    install_model_rules("paddlenlp")
    shards, expected = _with_optimizer(family, layout)
    for key, weight in shards.items():
        values = np.full(list(weight.local_tensor.shape), 0.5) if expected[key] is None else expected[key]
        weight.local_tensor.set_value(paddle.to_tensor(values).astype(weight.local_tensor.dtype))
    fc.save_state_dict(shards, path)


def load_training(family, layout, path):
    """Loads model and optimizer under a layout; the keys that are not as the oracle says."""
    install_model_rules("paddlenlp")
    shards, expected = _with_optimizer(family, layout)
    for weight in shards.values():
        weight.local_tensor.set_value(paddle.full_like(weight.local_tensor, -1))
    fc.load_state_dict(shards, path)
    wrong = []
    for key, weight in shards.items():
        got = weight.local_tensor.astype("float32").numpy()
        values = np.full_like(got, 0.5) if expected[key] is None else expected[key]
        if not np.array_equal(got, values.astype(np.float32)):
            wrong.append(key)
    return wrong


# -- what is asserted -------------------------------------------------------------------------------------------------

PIPELINES = [
    name
    for name in FAMILIES
    if name.split("-")[0] in ("llama", "qwen2", "qwen2_moe", "gpt", "qwen", "deepseek_v2", "gemma")
]
FUSED = {
    "llama-ffn": ["mlp.gate_up_fused_proj.weight"],
    "llama-fused": ["mlp.gate_up_fused_proj.weight"],
    "qwen2-fused": ["mlp.gate_up_fused_proj.weight"],
    "qwen": ["attn.c_attn.weight", "attn.c_attn.bias"],
    "chatglm_v2": [
        "self_attention.query_key_value.weight",
        "self_attention.query_key_value.bias",
        "mlp.dense_h_to_4h.weight",
    ],
}


def moved(world, family, source, target, path, strict="missing"):
    world.run(save, family=family, layout=source, path=str(path))
    results = world.run(load, family=family, layout=target, path=str(path), strict=strict)
    assert [result["wrong"] for result in results] == [[] for _ in results]
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_to_one_rank_and_back(world2, tmp_path, family):
    """Where no rank has anything but its own part of a head or of a fused parameter, and where each has all."""
    for source, target in (({"mp": 2}, {}), ({}, {"mp": 2})):
        results = moved(world2, family, source, target, tmp_path / str(len(source)), strict=True)
        expected = FUSED.get(family, [])
        for result in results:
            assert {key for key in result["keys"] if key.endswith(tuple(expected or ["-"]))} == set(result["fused"])
            assert bool(result["fused"]) == bool(expected)


@pytest.mark.parametrize("family", PIPELINES)
def test_pipelines_have_the_names_of_the_model_without_one(world2, tmp_path, family):
    plain = world2.run(names, family=family, layout={"mp": 2})[0]
    stages = world2.run(names, family=family, layout={"pp": 2})
    tied = {alias for _, aliases, _ in plain.values() for alias in aliases}
    for key, (shape, aliases, fused) in plain.items():
        if key not in tied:
            (stage,) = (stage for stage in stages if key in stage)
            assert (stage[key][0], stage[key][2]) == (shape, fused)
            # A layer that is shared has, besides, the names that its parameters would have at the other position.
            assert set(stage[key][1]) >= set(aliases)
    for stage in stages:
        assert set(stage) <= set(plain)
        for key in tied & set(stage):
            # GPT's pipeline does not know the name of the head: it is under the embedding's in any case.
            assert set(plain[key][1]) <= set(stage[key][1]) or family.startswith("gpt")
    assert tied == set() or all(tied & set(stage) for stage in stages)


@pytest.mark.parametrize("family", PIPELINES)
def test_pipeline_to_tensor_parallel_and_back(world2, tmp_path, family):
    moved(world2, family, {"pp": 2}, {"mp": 2}, tmp_path / "pp")
    moved(world2, family, {"mp": 2}, {"pp": 2}, tmp_path / "mp")


@pytest.mark.parametrize("family", ["llama-fused", "qwen2-fused", "qwen", "qwen2-tied", "gpt", "qwen2_moe"])
def test_degrees_of_four_ranks(world4, tmp_path, family):
    for number, (source, target) in enumerate(
        (({"mp": 4}, {"mp": 2, "pp": 2}), ({"mp": 2, "pp": 2}, {"mp": 4}), ({"pp": 4}, {"mp": 2}))
    ):
        moved(world4, family, source, target, tmp_path / str(number))


def test_experts_are_named_by_their_numbers_in_the_whole_layer(world4):
    """Experts are spread over the data-parallel ranks, and each of them is cut by tensor parallelism."""
    ranks = world4.run(names, family="qwen2_moe", layout={"mp": 2})
    held = [{key.split(".")[5] for key in rank if ".experts." in key} for rank in ranks]
    assert held == [{"0", "1"}, {"0", "1"}, {"2", "3"}, {"2", "3"}]


def test_every_head_of_the_library_is_known(world2):
    assert world2.run(unknown_heads) == [[], []]


def test_a_cut_parameter_without_a_rule_is_an_error_until_one_is_registered(world2):
    for error, shape in world2.run(unknown_layer):
        assert "key '0.table' is marked is_distributed" in error
        assert "Unknown" in error and "register_model_rule()" in error
        assert shape == [8, 3]


def test_adapters_are_described_as_the_model_inside(world2):
    for keys, shapes in world2.run(adapted):
        assert "llama.layers.0.self_attn.q_proj.lora_A" in keys
        assert shapes["llama.layers.0.self_attn.q_proj.lora_B"] == [4, 32]  # cut along its columns
        assert shapes["llama.layers.0.self_attn.o_proj.lora_A"] == [32, 4]  # cut along its rows
        assert shapes["llama.layers.0.mlp.gate_up_fused_proj.lora_B"] == [4, 96]


def test_uninstalling_leaves_the_library_as_it_was(world2):
    assert all(world2.run(uninstalled))


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_weights_into_tensor_parallel_ranks(world2, tmp_path, family):
    assert world2.run(load_hf, family=family, layout={"mp": 2}, path=str(tmp_path)) == [[], []]


@pytest.mark.parametrize("family", ["llama-tied", "llama-fused", "qwen2-fused", "qwen2_moe", "gpt-fused", "qwen"])
def test_hugging_face_weights_into_a_pipeline(world2, tmp_path, family):
    assert world2.run(load_hf, family=family, layout={"pp": 2}, path=str(tmp_path)) == [[], []]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_the_hugging_face_checkpoint(world2, tmp_path, family):
    assert world2.run(export_hf, family=family, layout={"mp": 2}, path=str(tmp_path)) == [[], []]


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-fused", "gpt", "qwen2_moe"])
def test_what_a_pipeline_exports_is_the_same(world2, tmp_path, family):
    assert world2.run(export_hf, family=family, layout={"pp": 2}, path=str(tmp_path)) == [[], []]


def test_a_model_whose_names_are_not_known_is_an_error(world2):
    for text in world2.run(unknown_names):
        assert "it is not known how Hugging Face's weights become those of" in text
        assert "Unknown" in text and "aoa_config" in text


def test_the_first_glm_has_rules_of_its_own(world2, tmp_path):
    assert world2.run(load_glm, path=str(tmp_path)) == [[], []]


@pytest.mark.parametrize("family", ["llama-fused", "qwen2-tied", "qwen2-fused", "gpt", "qwen"])
def test_optimizer_states_follow(world2, tmp_path, family):
    """Those of a fused parameter are put right with it; those of a tied one are found under either of its names."""
    layouts = [{"mp": 2}, {"pp": 2}, {}]
    for number, (source, target) in enumerate(itertools.permutations(layouts, 2)):
        path = str(tmp_path / str(number))
        world2.run(save_training, family=family, layout=source, path=path)
        assert world2.run(load_training, family=family, layout=target, path=path) == [[], []], (source, target)
