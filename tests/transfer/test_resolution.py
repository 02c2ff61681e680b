"""Resolutions: how each target is filled, why some cannot be, and what a report says of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import CUT, NATURAL, Order, Problem
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.transfer.fused import FusedMismatch
from paddle_flexckpt.transfer.mapping import compile_mapping
from paddle_flexckpt.transfer.options import TransferOptions
from paddle_flexckpt.transfer.resolution import Resolved
from paddle_flexckpt.transfer.resolver import complete, resolve
from tests.transfer.samples import Part, catalog, columns, refusal, targets, the_refusal

CONVERT = {"master_weights": "convert"}
LEFT_ALONE = "correct the name, or load with strict=False to leave this target as it is"
FFN = Order(2, 1, "fused_ffn")


def by_rank(parts):
    return catalog(*sorted(parts, key=lambda part: part.rank), file="data_{}")


def solve(wanted, source, mapping=None, **options):
    """Resolve targets; ``mapping`` may be statements."""
    here, there, asked = targets(*wanted), by_rank(source), TransferOptions(**options)
    if isinstance(mapping, list):
        asked = replace(asked, aoa_config=mapping)
        mapping = compile_mapping(mapping, there, here.catalog, asked.master_weights)
    return resolve(here, there, asked, mapping)


def filled(wanted, source, mapping=None, **options):
    """How targets are filled, by key."""
    found = solve(wanted, source, mapping, **options)
    return dict(zip(found.targets.catalog.keys, found.rows))


def keys(*names, **more):
    return [Part(name, **more) for name in names]


# -- names -------------------------------------------------------------------------------------------------------------


def test_targets_are_filled_from_the_source_keys_of_their_names():
    found = solve(keys("b", "a"), keys("a", "more", "b"))
    assert found.rows == (Resolved("own", "b"), Resolved("own", "a"))
    assert (found.filled.tolist(), found.filled.dtype, found.same_memory) == ([0, 1], np.int64, {})
    assert (found.missing, found.mismatches, found.catalog.keys) == ([], [], ("b", "a"))
    nothing = solve([], keys("a")).filled
    assert (nothing.tolist(), nothing.dtype) == ([], np.int64)


def test_a_tied_parameter_is_found_under_another_name():
    wanted = [Part("w", aliases=("x", "b", "a"))]
    assert filled(wanted, keys("a", "b")) == {"w": Resolved("alias", "b", "b")}
    assert filled(wanted, keys("a", "w")) == {"w": Resolved("own", "w")}
    assert filled(wanted, keys("a"), strict=False, tied_names=False) == {"w": Resolved("missing", "w")}
    found = solve(wanted, keys("a"))
    assert (found.catalog.keys, found.report()["aliases"], found.by_key("alias")) == (("a",), {"w": "a"}, {"w": "a"})


def test_other_names_of_paddles_are_found():
    wanted, source = keys("model.a", "linear_0.w_0_moment1_1"), keys("a", "linear_0.w_0.dist_moment1_0")
    assert filled(wanted, source) == {
        wanted[0].key: Resolved("raw name", "a", "a"),
        wanted[1].key: Resolved("raw name", source[1].key, source[1].key),
    }
    missing = {part.key: Resolved("missing", part.key) for part in wanted}
    assert filled(wanted, source, strict=False, mw_name_compatibility=False) == missing
    tied = [Part("w", aliases=("model.a",))]
    assert filled(tied, source)["w"] == Resolved("raw name", "a", "a")
    assert filled(tied, source, strict=False, tied_names=False)["w"].how == "missing"
    # What only the parameter's raw name leads to.
    raw = [Part("b.moment1_0", raw_names=("linear_0.w_0_moment1_0",))]
    assert filled(raw, source)["b.moment1_0"].name == source[1].key
    named = [Part("linear_3.w_0_moment1_0", state_names=("b.moment1_0",)), Part("b")]
    assert filled(named, keys("b", "b.moment1_0"))["linear_3.w_0_moment1_0"].name == "b.moment1_0"


def test_a_name_of_paddles_counter_says_nothing_of_whose_state_it_is():
    raw = ["linear_0.w_0_moment1_0", "linear_1.w_0_moment1_0"]
    here = [Part(key, state_names=(name,)) for key, name in zip(raw, ("a.moment1_0", "b.moment1_0"))]
    there = [Part(key, state_names=(name,)) for key, name in zip(raw, ("b.moment1_0", "a.moment1_0"))]
    assert {key: row.name for key, row in filled(here, there).items()} == dict(zip(raw, reversed(raw)))
    for wanted, source in ((keys(*raw), there), (here, keys(*raw)), (keys(*raw), keys(*raw))):
        for strict in ("missing", False):
            problem = the_refusal(solve, wanted, source, strict=strict)
            assert "several parameters have the shape [4, 12]" in problem.what
        assert {key: row.name for key, row in filled(wanted, source, raw_names="trusted").items()} == {
            k: k for k in raw
        }
    # What is recorded counts in any case; and under their own names alone nothing is found.
    assert filled(here, there, raw_names="trusted")[raw[0]].name == raw[1]
    problems = refusal(solve, here, there, mw_name_compatibility=False)
    assert [each.key for each in problems] == raw
    assert "the one of its raw name is 'b.moment1_0', as the source says" in problems[0].got
    own = filled(keys(*raw), there, mw_name_compatibility=False, raw_names="trusted")
    assert {key: row.how for key, row in own.items()} == dict.fromkeys(raw, "own")
    # Another shape is enough.
    alone = [Part(raw[0]), Part(raw[1], (4, 11))]
    assert {key: row.how for key, row in filled(alone, alone).items()} == dict.fromkeys(raw, "own")
    # And so is a statement.
    stated = filled(keys(*raw), keys(*raw), [f"{key} -> {key}" for key in raw])
    assert {key: row.how for key, row in stated.items()} == dict.fromkeys(raw, "statement")


def test_a_source_key_goes_to_one_target_unless_two_are_one_tensor():
    wanted, array = keys("a", "model.a"), np.zeros((4, 12), np.float32)
    problem = the_refusal(solve, wanted, keys("a", "b"))
    assert (problem.key, problem.got) == (
        "model.a", "2 keys, among them ['a', 'b']; what might be meant is taken by target 'a'"
    )  # fmt: skip
    same = [replace(part, array=array) for part in wanted]
    found = solve(same, keys("a"))
    assert [row.name for row in found.rows] == ["a", "a"]
    assert (found.filled.tolist(), found.same_memory) == ([0], {})
    # Or if statements make them of the same.
    tied = [Part(name, array=array) for name in "xyz"]
    found = solve(tied, keys("a", "b"), ["a -> x", "a -> y", "b -> z"])
    assert (found.filled.tolist(), found.same_memory) == ([0, 2], {2: 0})


def test_several_keys_that_may_be_meant_are_a_problem_with_the_rank():
    source = keys("linear_0.w_0_moment1_0", "linear_0.w_0_moment1_1")
    problem = the_refusal(solve, [Part("linear_0.w_0_moment1_2", rank=5)], source)
    assert (problem.key, problem.rank) == ("linear_0.w_0_moment1_2", 5)
    assert "several that may be meant" in problem.what


# -- missing keys ------------------------------------------------------------------------------------------------------


def test_a_key_that_is_missing_is_a_problem_that_lists_similar_names():
    source = keys("a.d.w", "p.q.c.w", "w", "c.w", "a.c.v", "b.c.w", "e.c.w")
    wanted = [Part("a.b.c.w", (4, 12), shape=(4, 6), offset=(0, 6), rank=7)]
    assert the_refusal(solve, wanted, source) == Problem(
        "the source has no such key",
        key="a.b.c.w",
        rank=7,
        expected="float32 [0:4, 6:12] of [4, 12]",
        got="7 keys, among them ['b.c.w', 'c.w', 'e.c.w']",
        remedy="if it is 'b.c.w' under another name, give the AOA statement 'b.c.w -> a.b.c.w': its states follow; or "
        f"{LEFT_ALONE}",
        code="FC201",
    )
    assert the_refusal(solve, keys("q"), source).got == "7 keys, among them ['a.c.v', 'a.d.w', 'b.c.w']"
    assert the_refusal(solve, keys("p"), keys()).got == "0 keys, among them []"


LAYER = {"q": (8, 8), "k": (8, 4), "gate": (8, 12), "up": (8, 12), "down": (12, 8)}
GIVEN = "if it is '{0}' under another name, give the AOA statement '{0}{1} -> {2}': its states follow; or "


def layer(form, names=LAYER, turned=False):
    """The parameters of a layer, each under a name of a form."""
    return [Part(form.format(name), LAYER[name][:: -1 if turned else 1]) for name in names]


def starts_of(*problems):
    """The start of each remedy, by key."""
    return {each.key: each.remedy[: -len(LEFT_ALONE)] for each in problems}


@pytest.mark.parametrize("left_out", LAYER)
def test_a_statement_that_was_left_out_is_given_as_the_others_were(left_out):
    """Two parameters of one shape, the shape reversed, a square: no other parameter's values are proposed."""
    here, there = layer("l.0.mlp.{}.weight"), layer("model.layers.0.mlp.{}_proj.weight", turned=True)
    given = [f"{b.key}^T -> {a.key}" for a, b in zip(here, there) if f".{left_out}." not in a.key]
    name, target = f"model.layers.0.mlp.{left_out}_proj.weight", f"l.0.mlp.{left_out}.weight"
    found = starts_of(the_refusal(solve, here, there, given))[target]
    if left_out == "q":
        assert f"'{name} -> {target}', or '{name}^T -> {target}' if the source's axes are in another order" in found
    else:
        assert found == GIVEN.format(name, "^T", target)


@pytest.mark.parametrize("turned", [False, True])
def test_without_statements_each_parameter_is_given_its_own_name(turned):
    form = "model.layers.0.mlp.{}_proj.weight"
    here, there = layer("l.0.{}.weight"), layer(form, turned=turned)
    found = starts_of(*refusal(solve, [*here, *keys("x")], [*there, *keys("x")]))
    axes = "^T" if turned else ""
    for name in ("k", "gate", "up", "down"):
        assert found[f"l.0.{name}.weight"] == GIVEN.format(form.format(name), axes, f"l.0.{name}.weight")


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        ("l.0.down.weight", ["l.0.up_proj.weight"]),  # of the shape, with another name
        ("l.0.k_proj.weight", ["l.0.v_proj.weight"]),  # only a word that all have
        ("l.0.proj.weight", ["l.0.q_proj.weight"]),
        ("l.0.down.weight", ["l.1.down_proj.weight"]),  # another layer
        ("decoder.q.weight", ["encoder.q_proj.weight"]),
        ("q.weight", ["a.q_proj.weight", "b.q_proj.weight"]),  # one fits as well as the other
        ("q.weight", ["q.bias"]),
    ],
)
def test_no_name_is_better_than_one_that_does_not_fit(wanted, there):
    found = starts_of(the_refusal(solve, keys(wanted, "x"), keys(*there, "x")))[wanted]
    hint = f"'NAME -> {wanted}' with that name ('NAME^T -> {wanted}' if its axes are in another order)"
    assert found == f"if it is there under another name, give the AOA statement {hint}: its states follow; or "


@pytest.mark.parametrize("wanted", [[1, 2], [1]])
def test_no_layer_is_proposed_where_both_sides_count_layers_differently(wanted):
    """A pipeline whose embedding is layer 0, or a stage of it: layer 1 is the source's layer 0."""
    there = keys(*(f"model.layers.{i}.down_proj.weight" for i in range(2)), "x")
    found = starts_of(*refusal(solve, keys(*(f"{i}.down.weight" for i in wanted), "x"), there))
    assert all("NAME -> " in text for text in found.values())
    assert len(found) == len(wanted)


def test_a_name_that_fits_two_targets_or_was_used_is_given_to_none():
    found = starts_of(*refusal(solve, keys("a.q.weight", "b.q.weight", "x"), keys("q_proj.weight", "x")))
    assert all("NAME -> " in text for text in found.values())
    # down_proj was given to up by mistake.
    wanted, there = keys("up.weight", "down.weight"), keys("up_proj.weight", "down_proj.weight")
    found = starts_of(the_refusal(solve, wanted, there, ["down_proj.weight -> up.weight"]))
    assert "NAME -> down.weight" in found["down.weight"]
    # Nothing is left.
    assert starts_of(the_refusal(solve, keys("v", "w"), keys("v"))) == {"w": ""}


def test_a_misspelt_key_is_a_problem_that_lists_the_nearest_names():
    source = keys("a.weight", "down.weight", "up.bias", "up.weight", "zero", *(f"a.{i}.moment1_0" for i in range(9)))
    got = the_refusal(solve, keys("upp.weight"), source).got
    assert got.startswith("14 keys, the nearest of them ['up.weight'")
    # Many names, or many targets, would take long: the search ends.
    found = refusal(solve, [Part(f"upp.weight{i}") for i in range(50)], source)
    assert sum("nearest" in str(problem) for problem in found) == 20
    many = [*source, *(Part(f"layers.{i}.w") for i in range(3000))]
    assert "among them" in the_refusal(solve, keys("upp.weight"), many).got


@pytest.mark.parametrize(
    ("strict", "is_error"), [(True, True), ("missing", True), ("unexpected", False), (False, False)]
)
def test_strictness_says_whether_missing_keys_are_errors(strict, is_error):
    wanted = keys("a", "b", "c")
    if is_error:
        assert [each.key for each in refusal(solve, wanted, keys("b"), strict=strict)] == ["a", "c"]
        return
    found = solve(wanted, keys("b"), strict=strict)
    assert (found.missing, found.filled.tolist()) == (["a", "c"], [1])
    assert (found.report()["missing"], found.report()["keys"]) == (["a", "c"], 1)
    assert [row.how for row in found.rows] == ["missing", "own", "missing"]


def test_a_raw_name_that_counts_other_layers_is_told_with_a_way_out():
    problem = the_refusal(solve, keys("linear_0.w_0_moment1_0"), keys("linear_1.w_0_moment1_0"))
    assert (
        problem.remedy == "give its name by an AOA statement (plain_state_statements() makes them); or correct the name"
    )
    # Where the source has no states at all, none is meant.
    problem = the_refusal(solve, keys("linear_0.w_0_moment1_0"), keys("w"))
    assert "'_ -> linear_0.w_0_moment1_0, fill=0'" in problem.remedy


@pytest.mark.parametrize(("state", "value"), [
    ("moment1_0", "0'"), ("beta2_pow_acc_0", "BETA2', with the optimizer's beta2"), ("mu_product_0", "1'"),
])  # fmt: skip
def test_a_state_that_the_source_lacks_is_not_left_stale(state, value):
    problem = the_refusal(solve, keys("w", "v", f"w.{state}", f"v.{state}"), keys("w", "v", f"v.{state}"))
    assert f"AOA statement '_ -> w.{state}, fill={value}" in problem.remedy
    assert LEFT_ALONE not in problem.remedy


@pytest.mark.parametrize("key", ["a.w_0", "linear_0.w_0_fp32_master_0", "optimizer.master_weights.linear_0.w_0"])
def test_a_master_is_not_filled_with_zeros(key):
    problems = refusal(solve, keys("a", key), keys("a"))
    (remedy,) = (each.remedy for each in problems if each.key == key)
    assert "fill=" not in remedy and "strict=False" not in remedy


def test_a_head_that_may_have_been_tied_is_told_with_the_statement():
    problem = the_refusal(solve, [Part("lm_head.weight")], [Part("first"), Part("embed.weight")])
    advice = "if the saved model tied it to 'embed.weight', add the AOA statement 'embed.weight -> lm_head.weight'; or "
    assert problem.remedy == advice + LEFT_ALONE


def stack(numbers, *ends, rank=0):
    return [Part(f"m.layers.{number}.{end}", rank=rank) for number in numbers for end in ends]


def test_layers_that_the_source_lacks_are_one_problem():
    ends = ("a.w", "b.w", "c.w", "d.w")
    wanted = [*keys("norm"), *stack(range(2, 8), *ends, "a.w.moment1_0", rank=3)]
    problems = refusal(solve, wanted, [*keys("norm"), *stack(range(4), *ends, "a.w.moment1_0")])
    assert problems == [
        Problem(
            "the source has no such layers, nor their states",
            key="m.layers.4.a.w",
            rank=3,
            expected="layers 4 to 7 of m.layers.*, 4 tensors each, such as a.w",
            got="layers 0 to 3 of m.layers.*",
            code="FC201",
            remedy="if these layers have other numbers in the source, give AOA statements such as 'NAME -> "
            "m.layers.4.a.w' with the names there, which states follow; or make the model as it was when it was saved, "
            "with its number of layers; or, to leave these layers as they are, load with strict=False",
        )
    ]
    problem = the_refusal(solve, stack(range(3), "a", "b"), stack(range(2), "a", "b"))
    assert problem.remedy.startswith("make the model as it was")
    # Experts; and a rank that has layers of its own alone.
    experts = [f"mlp.experts.{number}.{end}" for number in range(4) for end in "ab"]
    problems = refusal(solve, stack(range(2), *experts), stack(range(2), *experts[:4]))
    assert [(each.what, each.expected, each.got) for each in problems] == [
        (
            "the source has no such layers",
            f"layers 2 to 3 of m.layers.{number}.mlp.experts.*, 2 tensors each: a, b",
            f"layers 0 to 1 of m.layers.{number}.mlp.experts.*",
        )
        for number in range(2)
    ]


def test_a_layer_that_may_have_another_number_is_no_further_layer():
    """As if a layer without parameters was added in between."""
    problems = refusal(solve, keys("0.w", "0.b", "2.w", "2.b"), keys("0.w", "0.b", "1.w", "1.b"))
    assert [each.what for each in problems] == ["the source has no such key"] * 2
    # A part of a layer, a layer in the middle, and another stack.
    for wanted, source in (
        (stack([0, 1], "a", "b"), stack([0, 1], "a")),
        (stack([0, 1, 2], "a", "b"), stack([0, 2], "a", "b")),
        (stack([0, 1], "a", "b"), keys("other.layers.0.c")),
    ):
        assert {each.what for each in refusal(solve, wanted, source)} == {"the source has no such key"}


# -- shapes and dtypes -------------------------------------------------------------------------------------------------


def test_another_shape_is_a_problem_that_names_the_file():
    source = [*keys("other"), Part("w", (4, 8), "float16", rank=2), Part("w", (4, 8), "float16", rank=4)]
    assert the_refusal(solve, [Part("v", rank=6), Part("w", (4, 6), rank=6)], [*source, Part("v", rank=4)]) == Problem(
        "global shapes differ",
        "w",
        6,
        "data_2",
        expected="[4, 6] (target)",
        got="[4, 8] (source)",
        remedy="load into a model of the saved size, or leave this key out (by aoa_config, KEY -> _, and strict=False),"
        " or, if elements were added or removed at the end, as in a vocabulary, cut or extend it by the AOA "
        "statement 'w -> w, resize=\"auto\"'",
        code="FC205",
    )
    # As many axes as the widest table does not make them alike.
    problem = the_refusal(solve, [Part("w", (2, 3)), Part("v")], [Part("w", (3,)), Part("v")])
    assert (problem.expected, problem.got) == ("[2, 3] (target)", "[3] (source)")
    assert (
        problem.remedy
        == "load into a model of the saved size, or leave this key out (by aoa_config, KEY -> _, and strict=False)"
    )


def test_a_shape_that_differs_in_all_layers_is_one_problem_with_one_statement():
    names, statement = [f"h.{number}.w" for number in range(40)], "h.$LAYER_ID.w^T -> h.$LAYER_ID.w"
    wanted, source = ([Part(name, shape) for name in names] for shape in ((6, 4), (4, 6)))
    problem = the_refusal(solve, wanted, source)
    assert (problem.key, problem.expected, problem.got) == ("h.$LAYER_ID.w", "[6, 4] (target)", "[4, 6] (source)")
    assert f"add the AOA statement '{statement}'" in problem.remedy
    assert len(solve(wanted, source, [statement]).filled) == 40
    # The statement would change a layer that is right.
    problems = refusal(solve, [Part("h.3.w", (4, 6)), *wanted[:3], *wanted[4:]], source)
    assert {each.key for each in problems} == {*names} - {"h.3.w"}


def test_names_of_the_same_layer_are_told_first():
    problem = the_refusal(solve, [Part("h.7.attention.q.weight")], keys(*(f"h.{n}.attn.q.weight" for n in range(9))))
    assert "among them ['h.7.attn.q.weight', 'h.0.attn.q.weight', " in problem.got


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_is_advised_where_it_is_done(dtype):
    others = [other for other in DTYPES if other != dtype]
    wanted, source = [Part(e, dtype=e) for e in others], [Part(e, dtype=dtype, order=NATURAL) for e in others]
    problems = refusal(solve, wanted, source)
    advised = {problem.key for problem in problems if problem.remedy == 'load with dtype="cast" to convert the values'}
    refused = [part for part in wanted if part.key not in advised]
    assert {problem.remedy for problem in problems if problem.key not in advised} <= {
        "load into a target of the saved dtype"
    }
    if refused:
        assert {problem.key for problem in refusal(solve, wanted, source, dtype="cast")} == {
            part.key for part in refused
        }


def test_another_dtype_is_a_problem_or_cast():
    wanted, source = [Part("w", dtype="bfloat16", rank=6)], [Part("w", rank=2)]
    assert the_refusal(solve, wanted, source) == Problem(
        "dtypes differ",
        "w",
        6,
        "data_2",
        expected="bfloat16 (target)",
        got="float32 (source)",
        remedy='load with dtype="cast" to convert the values',
        code="FC206",
    )
    found = solve([*wanted, *keys("v", rank=6)], [*source, *keys("v", rank=2)], dtype="cast")
    assert found.rows == (Resolved("own", "w", cast="float32 -> bfloat16"), Resolved("own", "v"))
    assert found.report()["cast"] == {"w": "float32 -> bfloat16"}
    assert the_refusal(solve, [Part("w", dtype="int8", rank=6)], source, dtype="cast") == Problem(
        "a cast would lose what the values mean",
        "w",
        6,
        "data_2",
        expected="int8 (target)",
        got="float32 (source)",
        remedy="load into a target of the saved dtype",
        code="FC206",
    )


FLOATS = {"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"}
COMPLEX = {"complex64", "complex128"}


def range_of(dtype):
    """The integers that a dtype holds."""
    if dtype == "bool":
        return 0, 1
    found = np.iinfo(dtype)
    return int(found.min), int(found.max)


def keeps_meaning(source, target):
    if source in COMPLEX:
        return target in COMPLEX
    if target in FLOATS | COMPLEX:
        return True
    if source in FLOATS or target == "bool":
        return False
    (low, high), (least, most) = range_of(source), range_of(target)
    return least <= low and high <= most


@pytest.mark.parametrize("source", DTYPES)
def test_casts_keep_what_values_mean(source):
    for dtype in DTYPES:
        wanted, stored = [Part("w", dtype=dtype)], [Part("w", dtype=source, order=NATURAL)]
        if dtype == source:
            assert filled(wanted, stored, dtype="cast")["w"].cast == ""
        elif keeps_meaning(source, dtype):
            assert filled(wanted, stored, dtype="cast")["w"].cast == f"{source} -> {dtype}"
        else:
            assert the_refusal(solve, wanted, stored, dtype="cast").what.startswith("a cast would lose")


def test_a_malformed_target_is_told_first_and_all_problems_are_listed():
    wanted = [Part("a"), Part("w", (4, 6), shape=(4, 6), offset=(0, 1)), Part("b", dtype="int8")]
    problems = refusal(solve, wanted, keys("w", "b"))
    assert [(each.key, each.what) for each in problems] == [
        ("w", "shard outside its global shape"),
        ("a", "the source has no such key"),
        ("w", "global shapes differ"),
        ("b", "dtypes differ"),
    ]


# -- master weights ----------------------------------------------------------------------------------------------------


def test_a_master_weight_starts_from_its_parameter():
    source = [Part("w", dtype="bfloat16"), Part("v", dtype="float16")]
    assert filled([Part("w.w_0")], source, **CONVERT) == {
        "w.w_0": Resolved("master", "w", cast="bfloat16 -> float32", master="w")
    }
    tied = [Part("x.w_0", aliases=("y", "z.w_0", "v.w_0", "w.w_0"))]
    found = solve(tied, source, **CONVERT)
    assert found.rows == (Resolved("master", "v", cast="float16 -> float32", master="v"),)
    assert found.report()["masters"] == {"x.w_0": "v"}
    # What the source has is not converted, and nothing is without leave.
    assert filled([Part("w.w_0")], [*source, Part("w.w_0")], **CONVERT) == {"w.w_0": Resolved("own", "w.w_0")}
    assert the_refusal(solve, [Part("w.w_0")], source).what == "the source has no such key"
    problems = refusal(solve, keys("u", "u.w_0", "w.w_1"), source, **CONVERT)
    assert [each.key for each in problems] == ["u", "w.w_1"]
    assert problems[0].what == "the source has no such key, nor its states w_0"


def test_a_float32_parameter_comes_from_its_master():
    for half in ("bfloat16", "float16"):
        source = [Part("more"), Part("w", dtype=half), Part("w.w_0"), Part("v", dtype=half)]
        assert filled([Part("w")], source, **CONVERT) == {"w": Resolved("master", "w.w_0", master="w.w_0")}
        assert filled([Part("x", aliases=("w",))], source, **CONVERT) == {
            "x": Resolved("master", "w.w_0", master="w.w_0")
        }
        assert filled([Part("w", dtype=half)], source, **CONVERT) == {"w": Resolved("own", "w")}
        assert the_refusal(solve, [Part("w")], source).what == "dtypes differ"
        assert the_refusal(solve, [Part("v")], source, **CONVERT).what == "dtypes differ"
        assert the_refusal(solve, [Part("w", dtype="float64")], source, **CONVERT).what == "dtypes differ"
    assert filled([Part("w")], keys("w", "w.w_0"), **CONVERT) == {"w": Resolved("own", "w")}


# -- statements --------------------------------------------------------------------------------------------------------


def test_statements_fill_the_targets_that_they_make():
    found = solve(keys("x", "b"), keys("a", "b"), ["a -> x"])
    assert found.rows == (Resolved("statement", "x"), Resolved("own", "b"))
    tied = [Part("x", aliases=("y",)), Part("w", aliases=("u", "x"))]
    assert filled(tied, keys("a"), ["a -> x"])["w"] == Resolved("statement", "x", "x")
    # What a statement makes is not the source's tensor of that name.
    assert filled(keys("b"), [Part("a"), Part("b", (1,))], ["a -> b"]) == {"b": Resolved("statement", "b")}
    # The source has what a tied parameter is first called.
    wanted = [Part("w", aliases=("b", "x")), Part("x")]
    assert filled(wanted, keys("a", "b"), ["a -> x"])["w"] == Resolved("alias", "b", "b")


def test_statements_that_do_not_fit_a_target_are_named():
    source = by_rank([Part("a{0}", (4, 8), rank=3), Part("b", rank=3)])
    mapping = compile_mapping(['"a{0}" -> x', "b -> y"], source, targets(Part("x", (4, 8)), Part("y")).catalog, "exact")
    wanted = [Part("first", rank=6), Part("x", (4, 6), rank=6), Part("y", dtype="int8", rank=6)]
    here = targets(*wanted)
    one, other = refusal(resolve, here, source, TransferOptions(strict=False), mapping)
    assert one == Problem(
        "global shapes differ",
        "x",
        6,
        expected="[4, 6] (target)",
        got='AOA gives [4, 8] (AOA statement 1: "a{0}" -> x)',
        remedy="correct the statement, or the target",
        code="FC205",
    )
    assert (other.what, other.got) == ("dtypes differ", "AOA gives float32 (AOA statement 2: b -> y)")
    cast = resolve(targets(Part("y", dtype="float16")), source, TransferOptions(dtype="cast"), mapping)
    assert cast.rows == (Resolved("statement", "y", cast="float32 -> float16"),)


def test_masters_that_statements_convert_are_cast():
    source = [Part("a", dtype="bfloat16"), Part("a.w_0"), Part("b", dtype="float16")]
    wanted = [Part("x"), Part("y.w_0"), Part("y", dtype="float16")]
    found = solve(wanted, source, ["a -> x", "b -> y"], **CONVERT)
    assert found.report()["masters"] == {"x": "a.w_0", "y.w_0": "b"}
    mapping = compile_mapping(["a -> x"], by_rank(source), targets(Part("x")).catalog, "convert")
    half = replace(mapping, tensors={"x": TensorInfo((4, 12), "bfloat16")})
    rows = filled([Part("x")], source, half, **CONVERT)
    assert rows == {"x": Resolved("statement", "x", cast="bfloat16 -> float32", master="a.w_0")}
    assert the_refusal(solve, [Part("x")], source, replace(half, masters={}), **CONVERT).what == "dtypes differ"


def removed(wanted, source, *statements):
    """A mapping that was compiled for other targets."""
    return compile_mapping(list(statements), by_rank(source), targets(*wanted).catalog, "exact")


def test_what_statements_take_away_is_missing():
    remedy = "add a statement that makes it, or load with strict=False to leave this target as it is"
    problem = the_refusal(solve, [Part("a", rank=4)], keys("a", "b"), ["a -> _"])
    assert problem == Problem(
        "nothing feeds a target",
        key="a",
        rank=4,
        expected="float32 [0:4, 0:12] of [4, 12]",
        got="a statement removes the source key of that name",
        remedy=remedy,
        code="FC604",
    )
    mapping = removed(keys("x"), keys("a", "b"), "a -> _")
    problem = the_refusal(solve, keys("a"), keys("a", "b"), mapping)
    assert problem.got == "a statement removes the source key of that name, and none makes another"
    assert problem.remedy == remedy
    # A reason that knows a remedy says it itself.
    problem = the_refusal(solve, keys("w", "w.moment1_0"), keys("a", "a.moment1_0"), ["a -> w, scale=2.0"])
    assert (problem.key, problem.remedy) == ("w.moment1_0", None)
    assert "Remedy (" in problem.got
    assert filled(keys("a"), keys("a"), ["a -> _"], strict=False) == {"a": Resolved("missing", "a")}
    # Others are wrong by name, statements or not.
    assert the_refusal(solve, keys("c"), keys("a", "b"), mapping).what == "the source has no such key"


def test_what_statements_take_away_is_not_looked_for_under_other_names():
    mapping = removed(keys("x"), keys("model.a", "a"), "model.a -> _")
    assert the_refusal(solve, keys("model.a"), keys("model.a", "a"), mapping).what == "nothing feeds a target"
    # Nor does what they take away serve others.
    assert the_refusal(solve, keys("a"), keys("model.a"), removed(keys("x"), keys("model.a"), "model.a -> _"))
    tied = [Part("w", aliases=("model.a",))]
    assert the_refusal(solve, tied, keys("model.a"), removed(keys("x"), keys("model.a"), "model.a -> _"))


def test_a_target_that_nothing_feeds_takes_no_other_key_of_the_source():
    mapping = removed(keys("x"), keys("a", "b", "w.w_0"), "a -> x")
    unfed = replace(mapping, unfed=frozenset({"w", "w.w_0"}), provenance={**mapping.provenance, "w": "why"})
    problem = the_refusal(solve, [Part("w", aliases=("b",))], keys("a", "b"), unfed)
    assert (problem.what, problem.got) == ("nothing feeds a target", "why")
    assert filled([Part("w", aliases=("b", "x"))], keys("a", "b"), unfed) == {"w": Resolved("statement", "x", "x")}
    # Nor is a master weight made of its parameter then.
    source = [Part("w", dtype="float16"), Part("a"), Part("v", dtype="float16")]
    wanted = [Part("w.w_0", aliases=("v.w_0",)), Part("v.w_0")]
    rows = filled(wanted, source, replace(unfed, unfed=frozenset({"w.w_0"})), strict=False, **CONVERT)
    assert (rows["w.w_0"].how, rows["v.w_0"].how) == ("missing", "master")


# -- orders of elements ------------------------------------------------------------------------------------------------


WHOLE = (4, 24)


def part(key="w", order=FFN, **more):
    """The first of two parts."""
    return Part(key, WHOLE, shape=(4, 12), order=order, **more)


def parts(count, key="w", order=None):
    """All of them."""
    return columns(key, [24 // count] * count, order=order)


def order(count, statement="fused_ffn"):
    return Order(count, 1, statement)


def mismatch(key="w", found=None, there=4, here=2, rank=0, assumed=False, statement="fused_ffn"):
    return FusedMismatch(key, rank, found or key, 1, 24, there, here, statement, assumed)


def test_a_fused_parameter_in_other_parts_waits_for_its_statement():
    wanted = [Part("a"), part(rank=0), part("v", order=order(2), aliases=("u",))]
    source = [Part("a"), *parts(4, order=order(4)), *parts(1, "u", order(1))]
    found = solve(wanted, source)
    one, other = mismatch(), mismatch("v", "u", 1)
    assert found.rows == (
        Resolved("own", "a"), Resolved("own", "w", mismatch=one), Resolved("alias", "u", "u", mismatch=other)
    )  # fmt: skip
    assert (found.filled.tolist(), found.mismatches) == ([0], [one, other])
    assert found.statements(by_rank(source)) == ("u -> v, fused_ffn", "w -> w, fused_ffn")
    assert found.report()["fused"] == {"w": "4 parts -> 2 parts", "v": "1 parts -> 2 parts"}
    assert solve(keys("a"), source).statements(by_rank(source)) == ()


def test_statements_for_states_are_about_their_parameters():
    def statements(key, *others, source=()):
        wanted = [part(key), *others]
        there = [*source, *parts(4, key, order(4)), *(Part(other.key) for other in others)]
        return solve(wanted, there).statements(by_rank(there))

    # Names that no optimizer of Paddle uses: the parameter is in the source, among the targets, or another such.
    assert statements("w.x_0") == ("w.x_0 -> w.x_0, fused_ffn",)
    assert statements("w.x_0", source=keys("w")) == ("w -> w, fused_ffn",)
    assert statements("w.x_0", Part("w")) == ("w -> w, fused_ffn",)
    tied = [part("w.x_0"), part("w", aliases=("v",))]
    there = [*parts(4, "w.x_0", order(4)), *parts(4, "v", order(4))]
    assert solve(tied, there).statements(by_rank(there)) == ("v -> w, fused_ffn", "w -> w, fused_ffn")
    renamed = [part("u.x_0", aliases=("v.x_0",)), Part("b", aliases=("v",))]
    there = [*parts(4, "v.x_0", order(4)), Part("v")]
    assert solve(renamed, there).statements(by_rank(there)) == ("v -> u.x_0, fused_ffn",)


def test_a_fused_parameter_that_may_not_be_mended_is_refused():
    wanted, source = [part(rank=3)], parts(4, order=order(4))
    problem = the_refusal(solve, wanted, source, fused="exact")
    assert problem == mismatch(rank=3).problem()
    assert 'fused="convert"' in problem.remedy
    # What is wrong with it otherwise comes first.
    assert the_refusal(solve, [part(dtype="int8")], source, fused="exact").what == "dtypes differ"
    # Of what has no statement nothing can be mended.
    bare = order(4, None)
    problem = the_refusal(solve, [part(order=order(2, None))], parts(4, order=bare))
    assert problem == mismatch(statement=None).problem()
    # Statements know nothing of names that only the search finds.
    problem = the_refusal(solve, [part("model.w")], source)
    assert problem == mismatch("model.w", "w").problem(True)
    # Nothing is added to what the targets follow from.
    mapping = removed(keys("x"), [*source, *keys("a")], "a -> x")
    here, there = replace(targets(*wanted), mapping=mapping), by_rank([*source, *keys("a")])
    assert the_refusal(resolve, here, there, TransferOptions(), mapping) == mismatch(rank=3).problem()


def test_sides_that_contradict_each_other_are_refused():
    problem = the_refusal(solve, [part()], parts(4, order=CUT))
    assert "a parameter is fused here" in problem.what
    assert the_refusal(solve, [part(order=CUT)], parts(4, order=order(4))).key == "w"


def test_what_may_be_fused_is_told():
    wanted = [part(order=NATURAL), part("v", order=CUT), Part("u", WHOLE, order=NATURAL), part("known", order=CUT)]
    source = [*parts(4), *parts(4, "v"), *parts(3, "u"), *parts(4, "known", CUT)]
    found = solve(wanted, source)
    assert [row.maybe_fused for row in found.rows] == ["w", "v", "u", ""]
    assert found.report()["maybe_fused"] == ["u", "v", "w"]
    assert found.filled.tolist() == [0, 1, 2, 3]
    # What is cut as here is taken for the same.
    assert solve(wanted, [*parts(2), *parts(2, "v"), *parts(1, "u"), *parts(1, "known")]).report()["maybe_fused"] == []
    tied = solve([part("x", order=NATURAL, aliases=("w",))], parts(4))
    assert tied.rows[0].maybe_fused == "w"
    # Only the last axis counts, whatever the tables have room for.
    block = Part("block", (5, 4, 24))
    wide = [block, *columns("w", [6] * 4, rows=8)]
    assert solve([block, Part("w", (8, 24), shape=(4, 6), order=NATURAL)], wide).report()["maybe_fused"] == []
    assert solve([block, Part("w", (8, 24), shape=(8, 12), order=NATURAL)], wide).report()["maybe_fused"] == ["w"]
    # By its rule, a target that is cut otherwise is put right, and told too.
    (row,) = solve([part()], parts(4)).rows
    assert (row.mismatch, row.maybe_fused) == (mismatch(assumed=True), "w")
    (row,) = solve([part()], parts(1)).rows
    assert (row.mismatch, row.maybe_fused) == (mismatch(there=1), "")
    # A rule that finds nothing to put right has nothing to tell.
    (row,) = solve([part()], parts(2)).rows
    assert (row.mismatch, row.maybe_fused) == (None, "")
    (row,) = solve([Part("w", WHOLE, shape=(4, 0), order=FFN)], parts(4)).rows
    assert (row.mismatch, row.maybe_fused) == (None, "")


def test_what_statements_rename_is_looked_at_and_what_they_make_is_taken_as_it_is():
    source = [*parts(4, order=order(4)), Part("a")]
    wanted = [part("x")]
    assert solve(wanted, source, ["w -> x"]).mismatches == [mismatch("x")]
    assert the_refusal(solve, wanted, source, ["w -> x"], fused="exact") == mismatch("x").problem()
    assert solve([part()], source, ["w -> w"]).mismatches == []
    assert solve(wanted, source, ["w -> x, fused_ffn"]).mismatches == []
    # An old source may hold it in another order, whether something else has a rule or not.
    old, renamed = [*parts(4), *parts(2, "v", order(2))], [part("x", order=NATURAL), part("v")]
    for count in (1, 2):
        (row, *_) = solve(renamed[:count], old, ["w -> x"]).rows
        assert row == Resolved("statement", "x", maybe_fused="w")
    (row,) = solve(renamed[:1], parts(4), ["w -> x"]).rows
    assert row.maybe_fused == "w"
    (row,) = solve([part(order=NATURAL)], parts(4), ["w -> w"]).rows
    assert row.maybe_fused == ""
    # Targets that follow from statements are in the order that these give them.
    mapping = removed([Part("x", WHOLE)], source, "w -> x")
    here = replace(targets(*wanted), mapping=mapping)
    assert resolve(here, by_rank(source), TransferOptions(), mapping).mismatches == []
    # One side's rule is enough.
    assert solve([Part("x", WHOLE, order=NATURAL)], source, ["w -> x"]).mismatches == [mismatch("x", here=1)]
    assert solve([part("x")], [Part("w", WHOLE, order=NATURAL)], ["w -> x"]).mismatches == [mismatch("x", there=1)]


def test_targets_that_follow_from_statements_may_be_fused_where_these_leave_them_alone():
    source = [Part("a"), *parts(4, "w"), *parts(4, "v"), *parts(4, "u"), *parts(2, "n", order(2))]
    program = ["v -> v", "u -> x"]
    mapping = compile_mapping(program, by_rank(source), None, "exact")
    here = targets(*(Part(name, info.shape) for name, info in mapping.output_infos().items()))
    rows = resolve(replace(here, mapping=mapping), by_rank(source), TransferOptions(), mapping).rows
    assert [row.name for row in rows] == ["a", "n", "v", "w", "x"]
    assert [row.how for row in rows] == ["statement"] * 5
    assert [row.maybe_fused for row in rows] == ["", "", "", "w", ""]
    rows = resolve(here, by_rank(source), TransferOptions(), mapping).rows
    assert [row.maybe_fused for row in rows] == ["", "", "", "", "u"]


# -- completion --------------------------------------------------------------------------------------------------------


def completed(wanted, source, statements=None, known=None, **options):
    """Resolve twice, as a load does."""
    here, there, asked = targets(*wanted), by_rank(source), TransferOptions(**options)
    mapping = None
    if asked.aoa_config is not None:
        mapping = compile_mapping(asked.aoa_config, there, here.catalog, asked.master_weights)
    first = resolve(here, there, asked, mapping)
    texts = first.statements(there) if statements is None else statements
    return complete(first, texts, there, asked, here.catalog if known is None else known)


def test_statements_that_put_fused_parameters_right_complete_a_resolution():
    wanted = [Part("a"), part(), part("v", aliases=("u",)), part("n", order=NATURAL)]
    source = [Part("a"), *parts(4), *parts(1, "u", order(1)), *parts(4, "n")]
    mapping, again = completed(wanted, source)
    assert dict(mapping.provenance) == {
        "v": "AOA statement 1: u -> v, fused_ffn", "w": "AOA statement 2: w -> w, fused_ffn"
    }  # fmt: skip
    assert again.rows == (
        Resolved("own", "a"),
        Resolved("statement", "w", mismatch=mismatch(assumed=True), maybe_fused="w"),
        Resolved("statement", "v", "u", mismatch=mismatch("v", "u", 1)),
        Resolved("own", "n", maybe_fused="n"),
    )
    assert again.filled.tolist() == [0, 1, 2, 3]
    assert again.report()["fused"] == {"w": "4 parts -> 2 parts", "v": "1 parts -> 2 parts"}


def test_completion_keeps_the_users_statements_and_policies():
    wanted = [part(), Part("x"), Part("y.w_0")]
    source = [*parts(4, order=order(4)), Part("a"), Part("b", dtype="float16")]
    mapping, again = completed(wanted, source, aoa_config=["a -> x", "b -> y"], **CONVERT)
    assert mapping.masters == {"y.w_0": "b"}
    assert [row.how for row in again.rows] == ["statement"] * 3
    assert again.by_key("master") == {"y.w_0": "b"}


def test_a_statement_that_puts_nothing_right_is_refused():
    assert refusal(completed, [part()], parts(4, order=order(4)), ()) == [mismatch().problem()]


def test_a_state_that_lies_otherwise_than_its_parameter_is_refused():
    def told(key, got, rank=2, expected="4 parts -> 2 parts"):
        return Problem(
            "a fused parameter and its states are not in the same order",
            key,
            rank,
            None,
            expected,
            got,
            "mark parameter and states with the same FusedAxis, or give AOA statements for them",
            code="FC207",
        )

    def both(state, *there, **options):
        wanted = [replace(each, rank=2) for each in (Part("a"), state, part())]
        return refusal(completed, wanted, [Part("a"), *parts(4, order=order(4)), *there], **options)

    moment = "w.moment1_0"
    natural = parts(4, moment, NATURAL)
    assert both(part(moment, order=NATURAL), *natural) == [told(moment, "nothing to do")]
    assert both(part(moment), *natural) == [told(moment, "1 parts -> 2 parts")]
    # Where only states are there, the first of them tells.
    states = [part(f"w.moment{n}_0", order=o, rank=2) for n, o in ((2, NATURAL), (1, FFN))]
    source = [*parts(4, "w.moment1_0", order(4)), *parts(4, "w.moment2_0", NATURAL)]
    assert refusal(completed, states, source) == [told("w.moment2_0", "nothing to do")]


def test_a_state_that_lies_like_its_parameter_or_does_not_lie_at_all_is_fine():
    alike = parts(4, "w.moment1_0", order(4))
    scalar = Part("w.beta1_pow_acc_0", (1,))
    missing = part("w.moment2_0", order=NATURAL)
    other = part("v.moment1_0", order=NATURAL)
    wanted = [part(), part("w.moment1_0"), scalar, missing, other]
    source = [*parts(4, order=order(4)), *alike, scalar, *parts(4, "v.moment1_0", NATURAL)]
    _, again = completed(wanted, source, strict=False)
    assert again.missing == ["w.moment2_0"]
    assert [row.how for row in again.rows] == ["statement", "statement", "statement", "missing", "own"]
    assert again.filled.tolist() == [0, 1, 2, 4]


# -- what is used ------------------------------------------------------------------------------------------------------


def used(wanted, source, mapping=None, **options):
    found = solve(wanted, source, mapping, **options)
    if isinstance(mapping, list):
        mapping = compile_mapping(mapping, by_rank(source), targets(*wanted).catalog, options.get("master_weights"))
    there = by_rank(source)
    column = found.used(there, mapping)
    assert column.dtype == bool
    assert column.shape == (len(there.keys),)
    return [key for key, is_used in zip(there.keys, column) if is_used]


def test_what_targets_are_filled_from_is_used():
    source = keys("a", "b", "c", "w")
    assert used(keys("c", "a"), source) == ["a", "c"]
    assert used([Part("x", aliases=("b",)), Part("y")], source, strict=False) == ["b"]
    assert used([Part("w", aliases=("a",))], source) == ["w"]
    array = np.zeros((4, 12), np.float32)
    assert used([Part("a", array=array), Part("b", array=array)], source) == ["a", "b"]
    assert used([], source) == []


def test_a_parameter_and_its_master_say_the_same():
    source = [Part("w", dtype="float16"), Part("w.w_0"), Part("a")]
    assert used([Part("w")], source, **CONVERT) == ["w", "w.w_0"]
    assert used([Part("w", dtype="float16")], source, **CONVERT) == ["w"]
    assert used([Part("x"), Part("w", dtype="float16")], source, ["w -> x"], **CONVERT) == ["w", "w.w_0"]
    lone = [Part("x", dtype="float16"), Part("a")]
    assert used([Part("x.w_0")], lone, **CONVERT) == ["x"]


def test_what_statements_use_is_used_and_what_they_hide_is_not():
    source = [*keys("a", "b", "x", "c"), Part("v", dtype="float16"), Part("v.w_0")]
    assert used(keys("x", "c"), source, ["a, b -> x, sum"]) == ["a", "b", "c"]
    mapping = removed(keys("x"), source, "a -> x")
    assert used([Part("y", aliases=("x",)), Part("v")], source, mapping, **CONVERT) == ["a", "v", "v.w_0"]
    # A master that a statement makes of another key leaves neither over.
    converted = replace(mapping, masters={"x": "v.w_0"})
    assert used(keys("x"), source, converted) == ["a", "x", "v"]
    converted = replace(mapping, masters={"x": "v"})
    assert used(keys("x"), source, converted) == ["a", "x"]


def test_raw_names_of_the_source_mean_parameters():
    wanted = [
        Part("linear_0.w_0.dist_moment1_0", state_names=("a.moment1_0",)),
        Part("b.moment1_0", aliases=("c.moment1_0",), raw_names=("linear_1.w_0_moment1_0",)),
        Part("linear_2.w_0_moment1_0"),
        Part("linear_4.w_0_moment1_0"),
        Part("a"),
    ]
    source = keys("linear_0.w_0_moment1_0", "linear_1.w_0_moment1_0", "a", "linear_5.w_0_moment1_0")
    statements = ["linear_5.w_0_moment1_0 -> linear_4.w_0_moment1_0"]
    found = solve(wanted, source, statements, strict=False, raw_names="trusted")
    assert [row.how for row in found.rows] == ["raw name", "raw name", "missing", "statement", "own"]
    assert found.raw_meanings() == {"linear_0.w_0": ["a"], "linear_1.w_0": ["b", "c"]}


def test_a_report_lists_everything():
    found = solve(keys("a"), keys("a"))
    assert found.report() == {
        "keys": 1, "missing": [], "aliases": {}, "cast": {}, "masters": {}, "fused": {}, "maybe_fused": []
    }  # fmt: skip
