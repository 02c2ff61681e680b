"""Rules that are made from names of layers, on small models of each family, against arrays made by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.aoa.families import small_models
from paddle_flexckpt.aoa.model_rules import describe_model_rules, model_rules, rules_of_config
from paddle_flexckpt.catalog import CatalogBuilder
from paddle_flexckpt.catalog.errors import CheckpointError
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping
from tests.aoa.oracle_steps import dequantized_mxfp4
from tests.aoa.test_model_rules import State, blank, check_equal, move

HEADS, GROUPS, EXPERTS, HIDDEN = 4, 2, 4, 8  # of the small models
ROOT = Path(__file__).resolve().parents[2]


def numbered(family: str) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, kind and shape of each tensor."""
    for key, (kind, shape, numbers) in small_models()[family]["tensors"].items():
        for each in numbers:
            name = key
            for number in each:
                name = name.replace("#", str(number), 1)
            yield name, kind, shape


def hugging_face(family: str) -> State:
    state, first = {}, 1
    for name, _, shape in numbered(family):
        count = int(np.prod(shape))
        state[name] = np.arange(first, first + count, dtype=np.float32).reshape(shape)
        first += count
    return state


def plain(family: str, hf: State) -> State:
    return {name: hf[name].T.copy() if kind == "linear" else hf[name] for name, kind, _ in numbered(family)}


def fused(state: State, names: list[str], groups: int) -> np.ndarray:
    """Put columns side by side, group by group of them."""
    parts = [np.split(state.pop(name), groups, axis=-1) for name in names]
    return np.concatenate([part[group] for group in range(groups) for part in parts], axis=-1)


def join(state: State, groups: int, stacked: bool) -> State:
    """Fuse the layers of a decoder as the variants say."""
    for name in [name for name in state if ".layers." in name]:
        path, of_query, leaf = name.partition(".q_proj.")
        if of_query and f"{path}.k_proj.{leaf}" in state:
            names = [f"{path}.{part}_proj.{leaf}" for part in "qkv"]
            if state[name].shape[-1] in (state[names[1]].shape[-1] * extent for extent in (1, HEADS // GROUPS)):
                state[f"{path}.qkv_proj.{leaf}"] = fused(state, names, groups)
        path, of_gate, leaf = name.partition(".gate_proj.")
        if of_gate:
            state[f"{path}.up_gate_proj.{leaf}"] = fused(state, [name, f"{path}.up_proj.{leaf}"], 1)
    for path in {name.partition(".experts.0.")[0] for name in state if ".experts.0." in name and stacked}:
        for number, part in enumerate(("up_gate_proj", "down_proj"), 1):
            each = [state.pop(f"{path}.experts.{expert}.{part}.weight") for expert in range(EXPERTS)]
            state[f"{path}.grouped_gemm_experts.weight{number}"] = np.stack(each)
    return state


def parameters(family: str) -> dict[str, Any]:
    shapes = {name: shape for name, _, shape in numbered(family)}
    key = next((name for name in shapes if name.endswith("k_proj.weight")), None)
    queries = shapes[key.replace("k_proj", "q_proj")][0] if key else 0
    groups = HEADS if key and shapes[key][0] == queries else GROUPS
    experts = 2 * EXPERTS if family == "ernie4_5_vl_moe" else EXPERTS
    given = {"num_heads": HEADS, "num_key_value_groups": groups, "num_experts": experts}
    return {name: value for name, value in given.items() if name in describe_model_rules(family)["parameters"]}


CASES = [
    (family, variant)
    for family in small_models()
    for variant in describe_model_rules(family)["variants"]
    if variant != "mxfp4"
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_there_and_back(family, variant, monkeypatch):
    hf, given = hugging_face(family), parameters(family)
    wanted = plain(family, hf)
    if variant != "plain":
        if family == "ernie4_5_vl_moe":
            monkeypatch.setattr(f"{__name__}.EXPERTS", 2 * EXPERTS)
        wanted = join(wanted, given.get("num_key_value_groups", 1), variant == "stacked")
    target = blank(wanted)
    # strict: neither missing nor unexpected keys.
    move(hf, target, model_rules(family, variant, **given), strict=True)
    check_equal(target, wanted)
    again = blank(hf)
    move(wanted, again, model_rules(family, variant, "to_hf", **given), strict=True)
    check_equal(again, hf)


def test_tied_heads_and_other_layouts():
    hf = hugging_face("mixtral")
    del hf["lm_head.weight"]
    wanted = plain("mixtral", {**hf, "lm_head.weight": hf["model.embed_tokens.weight"].T})
    wanted = {f"mixtral{name[5:]}" if name.startswith("model.") else name: value for name, value in wanted.items()}
    wanted |= {name: value.T.copy() for name, value in wanted.items() if "gate.weight" in name}
    choices = {"tied": True, "router": "linear", "prefix": "mixtral."}
    target = blank(wanted)
    move(hf, target, model_rules("mixtral", **choices), strict=True)
    check_equal(target, wanted)
    again = blank(hf)
    move(wanted, again, model_rules("mixtral", "plain", "to_hf", **choices), strict=True)
    check_equal(again, hf)


@pytest.mark.parametrize("family", ["gemma", "opt", "olmoe"])
def test_a_tied_embedding_is_kept_beside_the_head_where_no_destination_says_so(family):
    """An export has what statements make; of a tensor that only another is made of, it has nothing."""
    builder = CatalogBuilder(0)
    for name, _, shape in numbered(family):
        if name != "lm_head.weight":
            builder.add(name, "float32", tuple(shape), (0,) * len(shape), tuple(shape))
    stored = builder.build()
    made = tensor_infos(stored, whole_mapping(model_rules(family, tied=True), stored))
    assert {"lm_head.weight", *stored.keys} == {*made}


def test_names_of_published_files_are_known_too():
    """ERNIE-4.5-VL's have no model. before the vision model; what transformers saves has."""
    hf = hugging_face("ernie4_5_vl_moe")
    wanted = plain("ernie4_5_vl_moe", hf)
    assert any(name.startswith("model.vision_model.") for name in hf)
    published = {re.sub(r"^model\.vision_model\.", "vision_model.", name): value for name, value in hf.items()}
    target = blank(wanted)
    move(published, target, model_rules("ernie4_5_vl_moe"), strict=True)
    check_equal(target, wanted)


@pytest.mark.parametrize("family", ["opt", "glm4_moe", "gpt_oss"])
def test_a_checkpoint_that_lacks_a_weight_is_an_error(family):
    """Statements are optional, since configurations differ; what nothing feeds is an error of the load."""
    hf = hugging_face(family)
    wanted = plain(family, hf)
    lost = next(name for name in hf if name.endswith("o_proj.weight") or name.endswith("out_proj.weight"))
    del hf[lost]
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        move(hf, blank(wanted), model_rules(family), strict=True)


def in_mxfp4(state: State) -> tuple[State, State]:
    """Random MXFP4 blocks in the place of a model's experts; and what the model holds then, in bfloat16."""
    rng, plain = np.random.default_rng(5), {}
    stored: State = {}
    for name, value in state.items():
        if value.ndim != 3:
            stored[name] = plain[name] = value
            continue
        experts, _, outputs = value.shape
        codes = rng.integers(0, 256, (experts, outputs, 2, 16), dtype=np.uint8)
        scales = rng.integers(110, 140, (experts, outputs, 2), dtype=np.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = codes, scales
        made = dequantized_mxfp4(codes, scales).astype(ml_dtypes.bfloat16)
        plain[name] = made.transpose(0, 2, 1).copy()
    return stored, plain


def test_gpt_oss_from_mxfp4():
    stored, made = in_mxfp4(hugging_face("gpt_oss"))
    assert sum(name.endswith(("_blocks", "_scales")) for name in stored) == 8
    assert made["model.layers.0.mlp.experts.gate_up_proj"].shape == (EXPERTS, 64, 24)
    wanted = plain("gpt_oss", made)
    target = blank(wanted)
    move(stored, target, model_rules("gpt_oss", "mxfp4"), strict=True)
    check_equal(target, wanted)
    back = blank(made)
    move(wanted, back, model_rules("gpt_oss", "mxfp4", "to_hf"), strict=True)
    check_equal(back, made)
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj"):
        move(stored, blank(wanted), model_rules("gpt_oss"), strict="missing")


def test_a_configuration_gives_the_numbers():
    config = {"model_type": "opt", "num_attention_heads": HEADS, "tie_word_embeddings": True}
    rules = rules_of_config(config, "from_hf", [], None, "fused")
    assert rules == model_rules("opt", "fused", num_heads=HEADS, num_key_value_groups=HEADS, tied=True)


def test_there_are_forty_families():
    from paddle_flexckpt.aoa.model_rules import rule_names

    assert len(rule_names()) >= 40
    assert len(set(rule_names())) == len(rule_names())


def torch_python() -> str:
    python = os.environ.get("FLEXCKPT_TORCH_PYTHON")
    if not python:
        pytest.skip("FLEXCKPT_TORCH_PYTHON names no interpreter with transformers")
    return python


def written_by_the_library(made: Path, *arguments: str) -> dict[str, Any]:
    script = str(ROOT / "tests" / "aoa" / "family_names.py")
    subprocess.run([torch_python(), script, str(made), *arguments], check=True, timeout=600)
    return json.loads(made.read_text())


def test_the_file_is_what_the_library_of_the_models_says(tmp_path):
    assert written_by_the_library(tmp_path / "families.json") == small_models()


def test_rules_that_are_written_by_hand_take_the_library_s_models_there_and_back(tmp_path, monkeypatch):
    models = written_by_the_library(tmp_path / "written.json", "written")
    assert len(models) == 9
    # The class calls its head otherwise than the file, from which its layer is not to be seen.
    models["gpt_neox"]["tensors"]["embed_out.weight"][0] = "linear"
    monkeypatch.setattr(f"{__name__}.small_models", lambda: models)
    for kind in models:
        family, hf = {"ernie4_5_moe": "ernie4_5"}.get(kind, kind), hugging_face(kind)
        wanted = plain(kind, hf)
        target, again = blank(wanted), blank(hf)
        move(hf, target, model_rules(family), strict=True)
        check_equal(target, wanted)
        move(wanted, again, model_rules(family, "plain", "to_hf"), strict=True)
        check_equal(again, hf)


def test_mxfp4_is_dequantized_as_the_library_does_it(tmp_path):
    stored, made = in_mxfp4(hugging_face("gpt_oss"))
    np.savez(tmp_path / "stored.npz", **{key: value for key, value in stored.items() if value.dtype == np.uint8})
    script = """
import sys, numpy, torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
stored, made = numpy.load(sys.argv[1]), {}
for key in stored:
    if key.endswith("_blocks"):
        blocks, scales = (torch.from_numpy(stored[key[:-6] + part]) for part in ("blocks", "scales"))
        made[key[:-7]] = convert_moe_packed_tensors(blocks, scales).view(torch.uint16).numpy()
numpy.savez(sys.argv[2], **made)
"""
    files = [str(tmp_path / "stored.npz"), str(tmp_path / "made.npz")]
    subprocess.run([torch_python(), "-c", script, *files], check=True, timeout=600)
    theirs = np.load(files[1])
    assert len(theirs.files) == 4
    for key in theirs:
        assert theirs[key].tobytes() == made[key].tobytes(), key
