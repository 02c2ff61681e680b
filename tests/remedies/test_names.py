"""Remedies about keys that the source lacks or has several of, and about values that do not fit; each is followed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.remedies.following import advised, provoked

A, B = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(50, 58, dtype=np.float32).reshape(4, 2)
OLD = np.full((4, 2), -7, np.float32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "source"


def load(path, targets, *statements, **options) -> dict:
    """What the targets hold after a load."""
    if statements:
        options["aoa_config"] = {"aoa_statements": list(statements)}
    fc.load_state_dict(targets, path, **options)
    return lists(targets)


def rooms(*keys) -> dict:
    return {key: OLD.copy() for key in keys}


def lists(arrays) -> dict:
    return {key: array.tolist() for key, array in arrays.items()}


def test_a_name_is_corrected_or_its_target_left_as_it_is(path):
    fc.save_state_dict({"v": A, "w": B}, path)
    targets = rooms("v", "x")
    with provoked("transfer/problems.py", "correct the name, or load with strict=False to leave this target as it is"):
        load(path, targets)
    assert lists(targets) == lists(rooms("v", "x"))
    assert load(path, rooms("v", "w")) == lists({"v": A, "w": B})
    assert load(path, targets, strict=False) == lists({"v": A, "x": OLD})


def test_a_target_that_a_statement_takes_away(path):
    fc.save_state_dict({"v": A, "w": B}, path)
    targets = rooms("v", "w")
    with provoked("transfer/problems.py", "add a statement that makes it, or load with strict=False to leave this"):
        load(path, targets, "v -> _")
    assert load(path, targets, "v -> _", strict=False) == lists({"v": OLD, "w": B})
    assert load(path, targets, "v -> _", "w -> v") == lists({"v": B, "w": B})


@pytest.mark.parametrize("transposed", ["", "^T"])
def test_a_head_that_was_tied_is_made_of_the_embedding(path, transposed):
    fc.save_state_dict({"embed.weight": A}, path)
    expected = A.T if transposed else A
    targets = {**rooms("embed.weight"), "lm_head.weight": np.full(expected.shape, -7, np.float32)}
    before = targets["lm_head.weight"].tolist()
    with provoked("transfer/problems.py", "if the saved model tied it to ") as caught:
        load(path, targets)
    statement = f"embed.weight{transposed} -> lm_head.weight"
    assert f"add the AOA statement '{statement}'; or correct the name, or load with strict=False" in str(caught.value)
    assert load(path, targets, strict=False) == {"embed.weight": A.tolist(), "lm_head.weight": before}
    assert load(path, targets, statement) == lists({"embed.weight": A, "lm_head.weight": expected})


def test_tied_parameters_that_were_two(path):
    fc.save_state_dict({"a": A, "b": B}, path)
    memory = OLD.copy()
    with provoked("transfer/source.py", "untie the parameters, or leave out one of the source's keys") as caught:
        load(path, {"a": memory, "b": memory})
    assert "by the statement 'b -> _'" in str(caught.value) and memory.tolist() == OLD.tolist()
    assert load(path, {"a": memory, "b": memory}, "b -> _") == lists({"a": A, "b": A})
    assert load(path, rooms("a", "b")) == lists({"a": A, "b": B})


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("model.x", "optimizer.x", "x"),
        ("linear_0.w_0_moment1_0", "linear_0.w_0.dist_moment1_0", "optimizer.linear_0.w_0_moment1_0"),
    ],
)
def test_one_of_several_keys_is_named_by_a_statement(path, one, other, wanted):
    """The same target is not said to be missing as well, with another remedy."""
    fc.save_state_dict({one: A, other: B}, path)
    with provoked("transfer/names.py", "say which by an AOA statement (") as caught:
        load(path, rooms(wanted))
    assert str(caught.value).count("Remedy (FC") == 1
    assert f"({one} -> {wanted})" in str(caught.value)
    assert load(path, rooms(wanted), f"{one} -> {wanted}") == lists({wanted: A})
    assert load(path, rooms(wanted), f"{other} -> {wanted}") == lists({wanted: B})


def test_each_of_several_targets_is_named_by_a_statement(path):
    fc.save_state_dict({"x": A, "y": B}, path)
    targets = rooms("model.x", "optimizer.x")
    with provoked("transfer/names.py", "say by an AOA statement for each of them where it comes from"):
        load(path, targets)
    assert lists(targets) == lists(rooms("model.x", "optimizer.x"))
    found = load(path, targets, "x -> model.x", "y -> optimizer.x")
    assert found == lists({"model.x": A, "optimizer.x": B})


def test_numbers_that_are_too_large_for_the_target(path):
    fc.save_state_dict({"w": A * 1e5}, path)
    target = {"w": np.zeros((4, 2), np.float16)}
    with provoked("catalog/dtypes.py", "or another dtype with its range, or scale the values first"):
        load(path, target, dtype="cast")
    assert load(path, rooms("w")) == lists({"w": A * np.float32(1e5)})
    wide = {"w": np.zeros((4, 2), np.float64)}
    assert load(path, wide, dtype="cast") == lists({"w": (A * np.float32(1e5)).astype(np.float64)})
    scaled = load(path, target, "w -> w, scale=0.0078125", dtype="cast")
    assert scaled == lists({"w": (A * np.float32(1e5) * np.float32(0.0078125)).astype(np.float16)})


def test_shards_that_overlap_in_too_many_ways(path, monkeypatch, tmp_path):
    def save(comm, spans):
        begin, end = spans[comm.rank]
        part = fc.ShardedWeight("w", A[begin:end].copy(), (end - begin, 2), (4, 2), (begin, 0))
        fc.save_state_dict({"w": part}, path, comm)

    monkeypatch.setattr("paddle_flexckpt.catalog.validate.MAX_OVERLAPS", 2)
    world = SimulatedWorld(3)
    with provoked(
        "catalog/validate.py", "describe replicas by the same offset and shape on every rank; or load another"
    ):
        world.run(lambda comm: save(comm, [(0, 4), (0, 3), (0, 2)]))
    fc.save_state_dict({"w": A}, tmp_path / "another")
    assert load(tmp_path / "another", rooms("w")) == lists({"w": A})
    SimulatedWorld(3).run(lambda comm: save(comm, [(0, 4), (0, 4), (0, 4)]))
    assert load(path, rooms("w")) == lists({"w": A})


def raw_state(key, *raw_names) -> fc.ShardedWeight:
    return fc.ShardedWeight(key, OLD.copy(), (4, 2), (4, 2), (0, 0), raw_names=raw_names)


def local(targets) -> dict:
    return {key: each.local_tensor.tolist() for key, each in targets.items()}


def test_raw_names_of_which_only_some_are_there_are_given_by_statements(path):
    """Here the first layer is linear_0; there it was a column_parallel_linear_0, and the second was linear_0."""
    fc.save_state_dict({"column_parallel_linear_0.w_0_moment1_0": A, "linear_0.w_0_moment1_0": B}, path)
    targets = {
        "a.moment1_0": raw_state("a.moment1_0", "linear_0.w_0_moment1_0"),
        "b.moment1_0": raw_state("b.moment1_0", "linear_1.w_0_moment1_0"),
    }
    with provoked("transfer/names.py", "give the names by AOA statements (plain_state_statements() makes them)"):
        fc.load_state_dict(targets, path, raw_names="trusted")
    assert local(targets) == {key: OLD.tolist() for key in targets}
    statements = [
        "column_parallel_linear_0.w_0_moment1_0 -> a.moment1_0",
        "linear_0.w_0_moment1_0 -> b.moment1_0",
    ]
    fc.load_state_dict(targets, path, aoa_config={"aoa_statements": statements})
    assert local(targets) == lists({"a.moment1_0": A, "b.moment1_0": B})


def test_raw_names_that_mean_another_parameter_on_each_rank(path, tmp_path):
    def load(comm, path, raw=True, **options):
        key = f"expert.{comm.rank}.moment1_0"
        targets = {key: raw_state(key, *["linear_0.w_0_moment1_0"] * raw)}
        fc.load_state_dict(targets, path, comm, **options)
        return local(targets)

    fc.save_state_dict({"linear_0.w_0_moment1_0": A, "linear_1.w_0_moment1_0": B}, path)
    expected = [{"expert.0.moment1_0": A.tolist()}, {"expert.1.moment1_0": B.tolist()}]
    with provoked("transfer/names.py", "save and load sharded_state_dict(), whose names are the same everywhere; or "):
        SimulatedWorld(2).run(lambda comm: load(comm, path, raw_names="trusted"))
    structured = {"expert.0.moment1_0": A, "expert.1.moment1_0": B}
    fc.save_state_dict(structured, tmp_path / "structured")
    assert SimulatedWorld(2).run(lambda comm: load(comm, tmp_path / "structured")) == expected
    statements = [f"linear_{rank}.w_0_moment1_0 -> expert.{rank}.moment1_0" for rank in range(2)]
    config = {"aoa_statements": statements}
    assert SimulatedWorld(2).run(lambda comm: load(comm, path, aoa_config=config)) == expected


def test_a_parameter_under_another_name_is_named_with_its_statement(path):
    """Its states follow, and no remedy gives them first values: that would lose what was trained."""
    states = {"q_proj.weight.moment1_0": B, "q_proj.weight.moment2_0": B + 1}
    fc.save_state_dict({"q_proj.weight": A, "v": B[:1], **states}, path)
    wanted = ["q.weight", "q.weight.moment1_0", "q.weight.moment2_0"]
    targets = {**rooms(*wanted), "v": OLD[:1].copy()}
    with provoked("transfer/name_fits.py", " under another name, give the AOA statement ") as caught:
        load(path, targets)
    text = str(caught.value)
    assert "'q_proj.weight -> q.weight': its states follow; or correct" in text
    assert "nor its states moment1_0, moment2_0" in text and "fill=" not in text and text.count("Remedy") == 1
    found = load(path, targets, "q_proj.weight -> q.weight")
    assert found == lists(dict(zip([*wanted, "v"], [A, B, B + 1, B[:1]])))


def test_a_parameter_whose_other_name_is_not_clear(path):
    fc.save_state_dict({"a.weight": A, "c.weight": B.T.copy()}, path)
    with provoked("transfer/name_fits.py", "if it is there under another name, give the AOA statement ") as caught:
        load(path, rooms("b.weight"))
    assert "'NAME -> b.weight' with that name ('NAME^T -> b.weight' if its axes are in another order)" in str(
        caught.value
    )
    assert load(path, rooms("b.weight"), "a.weight -> b.weight") == lists({"b.weight": A})
    assert load(path, rooms("b.weight"), "c.weight^T -> b.weight") == lists({"b.weight": B})


def test_a_square_parameter_under_another_name_may_be_transposed(path):
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    fc.save_state_dict({"q_proj.weight": square}, path)
    targets = {"q.weight": square * 0}
    with provoked("transfer/name_fits.py", "which a square shape does not tell") as caught:
        load(path, targets)
    assert "'q_proj.weight -> q.weight', or 'q_proj.weight^T -> q.weight' if" in str(caught.value)
    assert load(path, targets, "q_proj.weight -> q.weight") == lists({"q.weight": square})
    assert load(path, targets, "q_proj.weight^T -> q.weight") == lists({"q.weight": square.T})


def test_a_statement_that_was_left_out_is_proposed_as_the_others_are_written(path):
    """The parameters of Hugging Face are transposed; up_proj has the shape of down, and a statement uses it."""
    up, down = A, np.arange(20, 28, dtype=np.float32).reshape(2, 4)
    fc.save_state_dict({"mlp.up_proj.weight": up, "mlp.down_proj.weight": down}, path)
    targets = {"up.weight": np.zeros((2, 4), np.float32), "down.weight": OLD.copy()}
    given = ["mlp.up_proj.weight^T -> up.weight"]
    with provoked("transfer/name_fits.py", " under another name, give the AOA statement ") as caught:
        load(path, targets, *given)
    text = str(caught.value)
    assert "if it is 'mlp.down_proj.weight' under another name" in text
    assert "'mlp.down_proj.weight^T -> down.weight': its states" in text
    found = load(path, targets, *given, "mlp.down_proj.weight^T -> down.weight")
    assert found == lists({"up.weight": up.T, "down.weight": down.T})


def test_a_statement_that_makes_a_name_which_no_target_has(path):
    fc.save_state_dict({"a": A}, path)
    targets = rooms("w")
    with provoked("transfer/problems.py", "correct the name on the right of that statement; or ") as caught:
        load(path, targets, "a -> ww")
    assert "no target has 'ww', which a statement makes" in str(caught.value)
    assert load(path, targets, "a -> w") == lists({"w": A})


def test_a_key_of_another_size_is_left_out(path):
    fc.save_state_dict({"w": A, "v": B}, path)
    targets = {"w": np.full((4, 3), -7, np.float32), "v": OLD.copy()}
    with pytest.raises(fc.ValidationError, match="or leave this key out .by aoa_config, KEY -> _, and strict=False"):
        load(path, targets)
    assert load(path, targets, "w -> _", strict=False) == lists({"w": np.full((4, 3), -7, np.float32), "v": B})


LAYER = "model.layers.0.self_attn."


@pytest.fixture
def published(path):
    """Hugging Face's files of Qwen2, as far as attention goes."""
    heads = {"q": 8, "k": 4, "v": 4}
    tensors = {f"{LAYER}{part}_proj.weight": np.full((rows, 6), rows, np.float32) for part, rows in heads.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2}
    (path / "config.json").write_text(json.dumps(config))
    return path


def of_attention(config) -> list[str]:
    return [
        text
        for text in config["aoa_statements"]
        if LAYER.replace(".0.", ".$LAYER_ID.") in text and "o_proj" not in text
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rules_of_the_family_are_named_once(published, ranks):
    wanted = {f"{LAYER}qkv_proj.weight": np.zeros((6, 16), np.float32), "x": OLD.copy(), "y": OLD.copy()}

    def load(comm) -> None:
        fc.load_state_dict(wanted, published, comm)

    with provoked("transfer/problems.py", "give the rules of the family, aoa_config=fc.model_rules(") as caught:
        SimulatedWorld(ranks).run(load)
    config = str(published / "config.json")
    assert str(caught.value).count("model_rules") == 1
    assert f"fc.model_rules('qwen2', VARIANT, config={config!r})" in str(caught.value)
    rules = of_attention(fc.model_rules("qwen2", "fused", config=config))
    fc.load_state_dict(wanted, published, aoa_config=rules, strict=False)
    assert sorted(np.unique(wanted[f"{LAYER}qkv_proj.weight"])) == [4, 8]


def test_rules_of_another_variant(published):
    wanted = {f"{LAYER}qkv_proj.weight": np.zeros((6, 16), np.float32)}
    plain, fused = (
        of_attention(fc.model_rules(None, kind, config=published / "config.json")) for kind in ("plain", "fused")
    )
    with provoked("transfer/problems.py", "the model may be another variant, which fuses other parameters ("):
        fc.load_state_dict(wanted, published, aoa_config=plain)
    fc.load_state_dict(wanted, published, aoa_config=fused)
    assert wanted[f"{LAYER}qkv_proj.weight"].any()


def test_a_family_without_rules_is_not_named(published):
    (published / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(fc.ValidationError, match="no such key") as caught:
        fc.load_state_dict(rooms("x"), published)
    assert "model_rules" not in str(caught.value)


def test_a_renamed_layer_beside_a_further_one(tmp_path):
    up, down = np.ones((2, 8), np.float32), np.ones((8, 2), np.float32)
    saved = {f"layers.{i}.{n}.weight": each + i for i in range(2) for n, each in (("up", up), ("down", down))}
    names = (("fc_in", up), ("down", down))
    wanted = {f"layers.{i}.{n}.weight": np.zeros_like(each) for i in range(3) for n, each in names}
    fc.save_state_dict(saved, tmp_path)
    with pytest.raises(fc.ValidationError) as caught:
        fc.load_state_dict(wanted, tmp_path)
    first, *others = caught.value.lines
    assert "no such layers" in first and len(others) == 2
    advised("transfer/further_layers.py", "after the statements for the other names are given", first)
    statements = [f"layers.{i}.up.weight -> layers.{i}.fc_in.weight" for i in range(2)]
    fc.load_state_dict(wanted, tmp_path, strict=False, aoa_config={"aoa_statements": statements})
    assert (wanted["layers.1.fc_in.weight"] == saved["layers.1.up.weight"]).all()
