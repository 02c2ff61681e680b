"""Head counts of statements against those of a model's configuration: loads, conversions and publications."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import paddle_flexckpt as fc
from paddle_flexckpt.aoa import AoaError
from paddle_flexckpt.aoa.compile import explain
from paddle_flexckpt.aoa.head_counts import check_heads
from paddle_flexckpt.aoa.model_rules import model_rules
from paddle_flexckpt.catalog import Catalog, CatalogBuilder, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.digests import digest_checkpoint
from tests.documents import docstring_block
from tests.remedies.following import provoked

CONFIG = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
RIGHT, WRONG = ({"num_heads": heads, "num_key_value_groups": groups} for heads, groups in ((4, 2), (8, 4)))
NAME = "model.layers.0.self_attn.{}_proj.weight"
REFUSED = "says other numbers of heads, 4, of keys 2, and q, k and v would be cut .*FC606"


def rules(counts, direction="from_hf") -> list[str]:
    """The statements about q, k and v."""
    texts = model_rules("qwen2", "fused", direction, **counts)["aoa_statements"]
    return [text for text in texts if "q_proj.weight" in text]


@pytest.fixture
def published(tmp_path):
    """Hugging Face's files of 4 heads of 6 features, and 2 of keys and values."""
    path = tmp_path / "hf"
    path.mkdir()
    heads = {"q": 24, "k": 12, "v": 12}
    tensors = {NAME.format(part): np.random.rand(rows, 8).astype(np.float32) for part, rows in heads.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_a_load_refuses_other_numbers_than_the_configuration_beside_the_files(published):
    wanted = {NAME.format("qkv"): np.zeros((8, 48), np.float32)}

    def load(counts) -> None:
        SimulatedWorld(2).run(lambda comm: fc.load_state_dict(wanted, published, comm, aoa_config=rules(counts)))

    with provoked("aoa/head_counts.py", "give the rules the numbers of that configuration, as fc.model") as caught:
        load(WRONG)
    assert re.search(REFUSED, str(caught.value))
    assert not wanted[NAME.format("qkv")].any()
    load(RIGHT)
    assert wanted[NAME.format("qkv")].any()
    # Followed: the configuration was another model's.
    (published / "config.json").unlink()
    load(WRONG)


def test_other_calls_that_read_refuse_them_too(published, tmp_path):
    for call in (
        lambda: fc.load_merged_state_dict(str(published), aoa_config=rules(WRONG)),
        lambda: fc.export_safetensors(published, tmp_path / "out", aoa_config=rules(WRONG)),
        lambda: fc.convert_checkpoint(published, tmp_path / "out", rules(WRONG)),
        lambda: digest_checkpoint(published, aoa_config=rules(WRONG)),
        lambda: fc.diff(published, published, aoa_config=rules(WRONG)),
    ):
        with pytest.raises(ValidationError, match=REFUSED):
            call()
    assert not (tmp_path / "out").exists()


def test_a_parameter_of_a_conversion_does_not_override_the_configuration(published, tmp_path, capsys):
    line = ["convert", str(published), str(tmp_path / "out"), "--model", "auto", "--variant", "fused"]
    assert main([*line, "--set", "num_heads=8", "--set", "num_key_value_groups=4"]) != 0
    assert "would be cut at wrong" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_path", [False, True])
def test_a_publication_refuses_other_numbers_than_its_configuration(tmp_path, is_path):
    state = {NAME.format("qkv"): np.zeros((8, 48), np.float32)}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def publish(comm, counts) -> None:
        config = tmp_path / "config.json" if is_path else CONFIG
        fc.publish(state, tmp_path / "out", comm, aoa_config=rules(counts, "to_hf"), config=config)

    with pytest.raises(ValidationError, match=REFUSED):
        SimulatedWorld(2).run(lambda comm: publish(comm, WRONG))
    assert not (tmp_path / "out").exists()
    SimulatedWorld(2).run(lambda comm: publish(comm, RIGHT))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hidden_size": 8},
        {"num_attention_heads": 8},
        {"n_head": 8, "multi_query_group_num": 4},
        {"text_config": {"num_attention_heads": 8, "num_key_value_heads": 4}, "vision_config": {"num_heads": 16}},
        {"num_attention_heads": 16, "encoder": {"encoder_attention_heads": 8}},
        {"num_attention_heads": 8, "num_kv_heads": 71, "multi_query": True},  # Falcon: the number does not count then
    ],
)
def test_configurations_that_allow_these_numbers(config):
    check_heads(["a, b, c -> d, fused_qkv, num_heads=8, num_key_value_groups=4", "a -> b"], config)


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        {"n_head": 8, "multi_query_group_num": 2},
        {"text_config": {"num_attention_heads": 4, "num_key_value_heads": 4}, "vision_config": {"num_heads": 16}},
    ],
)
def test_configurations_that_do_not(config):
    with pytest.raises(AoaError, match="AOA statement 2, column 26: the model's config.json says"):
        check_heads(["a -> b", "a, b, c -> d, fused_qkv, num_heads=8, num_key_value_groups=4"], config)


@pytest.mark.parametrize("is_path", [False, True])
def test_rules_take_their_parameters_from_a_configuration(tmp_path, is_path):
    """As ``flexckpt convert --model auto`` does."""
    config = {**CONFIG, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = tmp_path / "config.json" if is_path else config
    expected = model_rules("qwen2", "fused", tied=True, **RIGHT)
    assert fc.model_rules(config=given, variant="fused") == expected == fc.model_rules("qwen2", "fused", config=given)
    assert fc.model_rules("llama", config=given, tied=False) == model_rules("llama")
    with pytest.raises(AoaError, match="other numbers of heads"):
        fc.model_rules("qwen2", "fused", config=given, num_heads=8)
    with pytest.raises(AoaError, match=r"nothing says which family.*FC606"):
        fc.model_rules(variant="fused")
    (tmp_path / "other").write_text("[]")
    for name in ("other", "none"):
        with pytest.raises(AoaError, match=r"config '.*' cannot be read.*\(FC606\): give the model's config.json"):
            fc.model_rules(config=str(tmp_path / name))


def test_the_example_of_model_rules_gives_statements_of_both_directions():
    scope = {"fc": fc}
    exec(docstring_block("paddle_flexckpt/aoa/model_rules.py", "fc.model_rules("), scope)
    assert scope["rules"] == model_rules("qwen2", "fused", num_heads=14, num_key_value_groups=2, tied=True)
    assert scope["back"] == model_rules("qwen2", "fused", "to_hf", num_heads=14, num_key_value_groups=2)


def described(shapes: dict[str, tuple[int, ...]]) -> Catalog:
    builder = CatalogBuilder(0)
    for name, shape in shapes.items():
        builder.add(name, "float32", shape, (0,) * len(shape), shape)
    return builder.build()


@pytest.mark.parametrize("tag", ["fused_qkv", "fused_qkv_old"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_numbers_that_the_shapes_contradict_are_refused(tag, axis):
    """As in a configuration with 8 heads of keys for a model with 4: all parts would be whole, of two sizes."""
    shapes = {"q": (16, 32), "k": (16, 16), "v": (16, 16)}
    if axis == 0:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    source = described(shapes)

    def outputs(heads: int, groups: int):
        text = f"q, k, v -> a, {tag}, num_heads={heads}, num_key_value_groups={groups}, axis={axis}"
        return explain({"aoa_statements": [text]}, source)

    assert outputs(8, 4)
    with provoked("aoa/macros.py", "give num_heads= and num_key_value_groups= of this model") as caught:
        outputs(8, 8)
    said = f"q has 32 elements along axis {axis}, 4 for each of 8 heads, and k has 16, 2 for each of 8"
    assert said in str(caught.value) and "Remedy (FC606): give num_heads= and num_key_value_groups=" in str(
        caught.value
    )
    turned = described({name: shape[::-1] for name, shape in shapes.items()})
    text = f"q^T, k^T, v^T -> a, {tag}, num_heads=8, num_key_value_groups=8, axis={axis}"
    with pytest.raises(AoaError, match="q has 32 elements along axis"):
        explain({"aoa_statements": [text]}, turned)
