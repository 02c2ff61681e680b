"""Rules of another family than the model's are refused: by its configuration, and by the weights that they leave."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddle_flexckpt as fc
from paddle_flexckpt.aoa.families import small_models
from paddle_flexckpt.aoa.model_rules import model_rules, rule_names
from paddle_flexckpt.catalog import Catalog, CatalogBuilder
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.transfer.mapping import whole_mapping
from tests.aoa.test_families import numbered
from tests.cli.llama import CONFIG, llama
from tests.remedies.following import advised, provoked


@pytest.fixture
def hf(tmp_path):
    """A small Llama as Hugging Face has it, without a configuration."""
    (tmp_path / "hf").mkdir()
    save_file(llama(), tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "hf"


@pytest.fixture
def native(hf, tmp_path):
    """The same as Paddle has it."""
    fc.convert_checkpoint(hf, tmp_path / "native", model_rules("llama"))
    return tmp_path / "native"


def test_each_family_s_rules_make_what_llama_s_make_or_are_refused(hf, native, tmp_path):
    same, refused = set(), set()
    for number, family in enumerate(rule_names()):
        try:
            fc.convert_checkpoint(hf, tmp_path / str(number), model_rules(family))
        except fc.ValidationError as error:
            assert "FC606" in str(error), f"{family}: {error}"
            refused.add(family)
        else:
            same.add(family)
            assert fc.diff(native, tmp_path / str(number)).equal, family
    assert same >= {"llama", "gemma", "qwen2_vl"}
    assert refused >= {"gpt2", "chatglm2", "mixtral", "opt", "phi3", "glm", "qwen3"}


@pytest.mark.parametrize("family", ["gpt2", "glm", "mixtral"])
def test_rules_that_leave_weights_of_layers_name_those_that_do_not(hf, tmp_path, family):
    with provoked("aoa/rule_fits.py", "take the rules for the model's family; those for") as caught:
        fc.convert_checkpoint(hf, tmp_path / "out", model_rules(family))
    assert "'model.layers.0." in str(caught.value)
    assert not (tmp_path / "out").exists()
    named = str(caught.value).rpartition("those for ")[2].partition(" fit")[0].split(" or ")
    for number, name in enumerate(named):
        fc.convert_checkpoint(hf, tmp_path / str(number), model_rules(name))


def test_a_configuration_of_another_family_refuses_rules_unless_they_do_the_same(hf, native, tmp_path, capsys):
    (hf / "config.json").write_text(json.dumps(CONFIG))
    fused = model_rules("qwen2_moe", "stacked", num_experts=2, num_heads=4, num_key_value_groups=2)
    with provoked("aoa/rule_fits.py", "are meant, give their statements as your own") as caught:
        fc.convert_checkpoint(hf, tmp_path / "out", fused)
    assert "the model_type is 'llama'" in str(caught.value)
    assert "take the rules for llama; if those for qwen2_moe" in str(caught.value)
    assert main(["convert", str(hf), str(tmp_path / "out"), "--model", "gpt2"]) == 1
    assert "FC606" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(hf), str(tmp_path / "same"), "--model", "gemma"]) == 0
    assert fc.diff(native, tmp_path / "same").equal
    # Insisted on, as the remedy says.
    fc.convert_checkpoint(hf, tmp_path / "mine", fused["aoa_statements"])


def test_a_load_refuses_them_where_the_target_takes_a_weight_as_it_is(hf):
    wanted = {name: np.zeros_like(value) for name, value in llama().items()}
    with pytest.raises(fc.ValidationError, match=r"'model\.layers\.0\..*FC606"):
        fc.load_state_dict(wanted, hf, "self", aoa_config=model_rules("glm", lm_head="embedding"))
    assert not any(value.any() for value in wanted.values())
    fc.load_state_dict({"model.norm.weight": wanted["model.norm.weight"]}, hf, "self", aoa_config=model_rules("glm"))


def test_a_publication_refuses_them(native, tmp_path):
    with pytest.raises(fc.ValidationError, match=r"have no statement for .*FC606"):
        fc.convert_checkpoint(native, tmp_path / "out", model_rules("gpt2", direction="to_hf"), format="huggingface")
    state = fc.load_merged_state_dict(str(native))
    state = {name: np.asarray(value) for name, value in state.items()}
    with pytest.raises(fc.ValidationError, match=r"have no statement for .*FC606"):
        fc.publish(state, tmp_path / "out", "self", aoa_config=model_rules("gpt2", direction="to_hf"))


def test_another_variant_is_named_by_the_way_back(hf, tmp_path, capsys):
    (hf / "config.json").write_text(json.dumps(CONFIG))
    assert main(["convert", str(hf), str(tmp_path / "fused"), "--model", "llama", "--variant", "fused"]) == 0
    back = ["convert", str(tmp_path / "fused"), str(tmp_path / "back"), "--model", "llama", "--format", "huggingface"]
    capsys.readouterr()
    assert main(back) == 1
    text = capsys.readouterr().err
    assert "'model.layers.0.self_attn.qkv_proj.weight'" in text
    advised("aoa/rule_fits.py", "take the variant that fits", text)
    assert "--variant fused (variant='fused' in Python)" in text
    assert "optional" not in text
    assert main([*back, "--variant", "fused"]) == 0
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(value, written[name]) for name, value in llama().items())


@pytest.mark.parametrize("name", ["model.layers.1.mlp.extra.weight", "score.weight", "projector.linear_2.weight"])
def test_weights_that_no_family_has_are_refused_until_a_statement_names_them(hf, tmp_path, name):
    """Square ones beside the layers too: a head for classes or a projector would load, not transposed."""
    save_file({**llama(), name: np.arange(4, dtype=np.float32).reshape(2, 2)}, hf / "model.safetensors")
    with provoked("aoa/rule_fits.py", "name the family of these weights; where none has their names, give AOA"):
        fc.convert_checkpoint(hf, tmp_path / "out", model_rules("llama"))
    edited = [*model_rules("llama")["aoa_statements"], f"{name}^T -> {name}"]
    assert fc.convert_checkpoint(hf, tmp_path / "out", edited).keys == len(llama()) + 1


def test_the_error_of_a_target_is_not_taken_for_one_of_the_rules(hf):
    wanted = {"lm_head.weight": np.zeros((3, 5), np.float32)}
    with pytest.raises(fc.ValidationError, match="FC603"):
        fc.load_state_dict(wanted, hf, "self", aoa_config=model_rules("llama"))


def deep_llama(layers: int = 5) -> dict[str, np.ndarray]:
    one = {name: value for name, value in llama().items() if ".layers.1." not in name}
    return {name.replace(".0.", f".{n}."): value for n in range(layers) for name, value in one.items()}


# What a removed shard had; by the error, what is lacking.
REMOVED = {
    "a layer between": (["layers.2."], "lacks layer 2 of model.layers.*"),
    "the first layers": (["layers.0.", "layers.1."], "layers 0 to 1 of model.layers.*"),
    "the last layers": (["layers.3.", "layers.4."], "layers 3 to 4 of model.layers.*"),
    "all layers": (["layers."], "layers 0 to 4 of model.layers.*"),
    "parts of two": (["layers.1.mlp.", "layers.2.input"], "layer 1 of model.layers.*, 3 tensors: mlp.down_proj.weight"),
    "the norm": (["norm."], "lacks model.norm.weight"),
    "the embedding, and layers": (
        ["embed", "layers.0"],
        "lacks layer 0 of model.layers.*, model.embed_tokens.weight (",
    ),
    "a vector": (["layers.4.input"], "lacks model.layers.4.input_layernorm.weight"),
}


@pytest.mark.parametrize("removed", REMOVED)
def test_a_source_that_lacks_layers_is_refused_until_its_configuration_or_its_files_are_mended(removed, tmp_path):
    starts, lacking = REMOVED[removed]
    kept = {name: value for name, value in deep_llama().items() if not any(f".{each}" in name for each in starts)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 5}))
    rules = model_rules("llama")
    with provoked("aoa/rule_fits.py", "restore the files with these tensors; if a part of the model is") as caught:
        fc.convert_checkpoint(tmp_path, tmp_path / "out", rules)
    assert lacking in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(fc.ValidationError, match=r"FC304"):
        fc.load_merged_state_dict(str(tmp_path), aoa_config=rules)
    # A part is meant, as the remedy says.
    if set(starts) < {f"layers.{layer}." for layer in range(5)}:
        assert fc.convert_checkpoint(tmp_path, tmp_path / "part", rules["aoa_statements"]).keys == len(kept)
    save_file(deep_llama(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert fc.convert_checkpoint(tmp_path, tmp_path / "out", rules).keys == len(deep_llama())


def test_a_part_of_a_model_without_a_configuration_is_converted_with_a_warning(tmp_path, caplog):
    """As a stage of a pipeline, whose layers are the last ones."""
    kept = {name: value for name, value in deep_llama().items() if not name.startswith("model.layers.0")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        assert fc.convert_checkpoint(tmp_path, tmp_path / "out", model_rules("llama")).keys == len(kept)
    assert "lacks layer 0 of model.layers.*" in caplog.text and "FC304" in caplog.text


def catalog_of(shapes: dict[str, list[int]]) -> Catalog:
    builder = CatalogBuilder(0)
    for name, shape in shapes.items():
        builder.add(name, "float32", tuple(shape), (0,) * len(shape), tuple(shape))
    return builder.build()


@pytest.mark.parametrize("family", [name for name in rule_names() if name in small_models()])
def test_each_family_s_layers_are_whole_in_all_their_kinds_and_missed(family):
    shapes = {name: shape for name, _, shape in numbered(family)}
    layers = {name: name.split(".layers.")[-1].split(".h.")[-1].split(".blocks.")[-1].split(".")[0] for name in shapes}
    count = 1 + max(int(number) for name, number in layers.items() if number.isdigit() and "vis" not in name)
    count -= family == "glm4_moe"  # whose last layer predicts further tokens
    rules = model_rules(family)
    for settings in ({"num_hidden_layers": count}, {"text_config": {"num_hidden_layers": count}}, {}):
        assert whole_mapping(rules, catalog_of(shapes), settings=lambda settings=settings: settings) is not None
    lost = {name: shape for name, shape in shapes.items() if layers[name] != "1" or "vis" in name}
    with pytest.raises(fc.ValidationError, match=r"lacks layer 1 of .*FC304"):
        whole_mapping(rules, catalog_of(lost), settings=lambda: {"n_layer": count})


def test_layers_that_predict_further_tokens_and_a_draft_need_no_layer_like_theirs():
    family = "glm4_moe"
    shapes = {name: shape for name, _, shape in numbered(family) if ".layers.2." not in name}
    assert whole_mapping(model_rules(family), catalog_of(shapes), settings=lambda: {"num_hidden_layers": 2})
    draft = {name: shape for name, shape in shapes.items() if ".layers.1." not in name}
    settings = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    assert whole_mapping(model_rules(family), catalog_of(draft), settings=lambda: settings)
