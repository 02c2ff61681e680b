"""Models of PaddleNLP: what they save under one layout loads under another, compared with PaddleNLP's own split."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("paddlenlp")
from tests.trainer import jobs_model_rules as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

PIPELINES = [
    name
    for name in jobs.FAMILIES
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
    world.run(jobs.save, family=family, layout=source, path=str(path))
    results = world.run(jobs.load, family=family, layout=target, path=str(path), strict=strict)
    assert [result["wrong"] for result in results] == [[] for _ in results]
    return results


@pytest.mark.parametrize("family", jobs.FAMILIES)
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
    plain = world2.run(jobs.names, family=family, layout={"mp": 2})[0]
    stages = world2.run(jobs.names, family=family, layout={"pp": 2})
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
    ranks = world4.run(jobs.names, family="qwen2_moe", layout={"mp": 2})
    held = [{key.split(".")[5] for key in rank if ".experts." in key} for rank in ranks]
    assert held == [{"0", "1"}, {"0", "1"}, {"2", "3"}, {"2", "3"}]


def test_every_head_of_the_library_is_known(world2):
    assert world2.run(jobs.unknown_heads) == [[], []]


def test_a_cut_parameter_without_a_rule_is_an_error_until_one_is_registered(world2):
    for error, shape in world2.run(jobs.unknown_layer):
        assert "key '0.table' is marked is_distributed" in error
        assert "Unknown" in error and "register_model_rule()" in error
        assert shape == [8, 3]


def test_adapters_are_described_as_the_model_inside(world2):
    for keys, shapes in world2.run(jobs.adapted):
        assert "llama.layers.0.self_attn.q_proj.lora_A" in keys
        assert shapes["llama.layers.0.self_attn.q_proj.lora_B"] == [4, 32]  # cut along its columns
        assert shapes["llama.layers.0.self_attn.o_proj.lora_A"] == [32, 4]  # cut along its rows
        assert shapes["llama.layers.0.mlp.gate_up_fused_proj.lora_B"] == [4, 96]


def test_uninstalling_leaves_the_library_as_it_was(world2):
    assert all(world2.run(jobs.uninstalled))


# The heads of these have no counterpart in their tables: ChatGLM2 has no names in front, OPT none for its own head.
HF = [name for name in jobs.FAMILIES if name not in ("chatglm_v2", "opt")]


@pytest.mark.parametrize("family", HF)
def test_hugging_face_weights_into_tensor_parallel_ranks(world2, tmp_path, family):
    assert world2.run(jobs.load_hf, family=family, layout={"mp": 2}, path=str(tmp_path)) == [[], []]


@pytest.mark.parametrize("family", ["llama-tied", "llama-fused", "qwen2-fused", "qwen2_moe", "gpt-fused", "qwen"])
def test_hugging_face_weights_into_a_pipeline(world2, tmp_path, family):
    assert world2.run(jobs.load_hf, family=family, layout={"pp": 2}, path=str(tmp_path)) == [[], []]


@pytest.mark.parametrize("family", HF)
def test_what_is_exported_is_the_hugging_face_checkpoint(world2, tmp_path, family):
    assert world2.run(jobs.export_hf, family=family, layout={"mp": 2}, path=str(tmp_path)) == [[], []]


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-fused", "gpt", "qwen2_moe"])
def test_what_a_pipeline_exports_is_the_same(world2, tmp_path, family):
    assert world2.run(jobs.export_hf, family=family, layout={"pp": 2}, path=str(tmp_path)) == [[], []]


def test_a_model_whose_names_are_not_known_is_an_error(world2):
    for text in world2.run(jobs.unknown_names):
        assert "it is not known how Hugging Face's weights become those of" in text
        assert "ChatGLMv2ForCausalLM" in text and "aoa_config" in text


@pytest.mark.parametrize("family", ["llama-fused", "qwen2-tied", "qwen2-fused", "gpt", "qwen"])
def test_optimizer_states_follow(world2, tmp_path, family):
    """Those of a fused parameter are put right with it; those of a tied one are found under either of its names."""
    layouts = [{"mp": 2}, {"pp": 2}, {}]
    for number, (source, target) in enumerate(itertools.permutations(layouts, 2)):
        path = str(tmp_path / str(number))
        world2.run(jobs.save_training, family=family, layout=source, path=path)
        assert world2.run(jobs.load_training, family=family, layout=target, path=path) == [[], []], (source, target)
