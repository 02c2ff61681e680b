"""Remedies of AOA programs, each provoked and followed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.aoa import AoaError, read_config, structure
from paddle_flexckpt.aoa.invert import invert
from paddle_flexckpt.aoa.model_rules import rules_of_config
from tests.aoa.small import Arrays, assert_equal, compiled, numbered, room, run
from tests.remedies.following import Advice, advised, provoked

A, B = numbered(4, 6), numbered(4, 6, start=100)
SQUARE = numbered(4, 4)
QKV = numbered(2, 16)
PARTS = np.split(QKV, 4, axis=1)
# [gate | up] along the last axis, in the parts of two ranks.
GATE, UP = numbered(4, 4), numbered(4, 4, start=50)
FUSED = np.concatenate([GATE[:, :2], UP[:, :2], GATE[:, 2:], UP[:, 2:]], axis=1)


@dataclass(frozen=True)
class Followed:
    """A program whose error has a remedy, and what each way to follow it gives."""

    advice: Advice
    wrong: str
    right: Mapping[str, Arrays]
    source: Arrays = field(default_factory=lambda: {"a": A, "b": B})
    target: Arrays = field(default_factory=dict)
    cuts: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)

    def targets(self, expected: Arrays) -> Arrays:
        return self.target or {key: room(*array.shape, dtype=array.dtype.name) for key, array in expected.items()}


SCENARIOS = [
    Followed(
        Advice("aoa/casts.py", "scale the values first, or cast to a floating-point dtype"),
        'a -> x, dtype="int8"',
        {'a -> x, scale=0.125, dtype="int8"': {"x": (A * 40 * 0.125).astype("int8")}},
        {"a": A * 40},
        {"x": room(4, 6, dtype="int8")},
    ),
    Followed(
        Advice("aoa/casts.py", "scale the values first, or cast to a floating-point dtype"),
        'a -> x, dtype="int8"',
        {'a -> x, dtype="float16"': {"x": (A * 50).astype("float16")}},
        {"a": A * 50},
        {"x": room(4, 6, dtype="float16")},
    ),
    Followed(
        Advice("aoa/macros.py", "if every rank holds [Q | K | V] of its own heads, write fused_qkv_old"),
        "a -> x, fused_qkv, num_heads=4, num_key_value_groups=2",
        {"a -> x": {"x": QKV}},
        {"a": QKV},
    ),
    Followed(
        Advice("aoa/macros.py", "num_key_value_groups= is the number of key-value heads"),
        "a -> q, k, v, fused_qkv_old, num_heads=8, num_key_value_groups=2",
        {
            "a -> q, k, v, fused_qkv_old, num_heads=8, num_key_value_groups=4": {
                "q": np.concatenate([PARTS[i][:, :2] for i in range(4)], axis=1),
                "k": np.concatenate([PARTS[i][:, 2:3] for i in range(4)], axis=1),
                "v": np.concatenate([PARTS[i][:, 3:] for i in range(4)], axis=1),
            }
        },
        {"a": QKV},
        cuts={"source_cuts": {"a": (1, 4)}},
    ),
    Followed(
        Advice("aoa/operations.py", "join them into one first and cut that, or give as many names on both sides"),
        "a, b -> x, y, z, axis=0",
        {
            "a, b -> t, axis=0 ; t -> x, y, z, u, axis=0": {
                "x": A[:2],
                "y": A[2:],
                "z": B[:2],
                "u": B[2:],
            },
            "a, b -> x, y": {"x": A, "y": B},
        },
    ),
    Followed(
        Advice("aoa/operations.py", 'give sizes="[..]"'),
        "a -> x, y, axis=0",
        {'a -> x, y, axis=0, sizes="[1, 2]"': {"x": A[:1], "y": A[1:3]}},
        {"a": A[:3]},
    ),
    Followed(
        Advice("aoa/operations.py", 'give sizes="[..]" or sizes="equal"'),
        'a -> x, y, axis=0, sizes="auto" ; x, y -> z, axis=0',
        {
            'a -> x, y, axis=0, sizes="[1, 3]" ; y, x -> z, axis=0': {"z": np.concatenate([A[1:], A[:1]])},
            'a -> x, y, axis=0, sizes="equal" ; y, x -> z, axis=0': {"z": np.concatenate([A[2:], A[:2]])},
        },
        target={"z": room(4, 6)},
    ),
    Followed(
        Advice("aoa/operations.py", "correct it, or write dtype="),
        'a -> x, src_dtype="float16", dst_dtype="float64"',
        {
            'a -> x, src_dtype="float32", dst_dtype="float64"': {"x": A.astype("float64")},
            'a -> x, dtype="float64"': {"x": A.astype("float64")},
        },
    ),
    Followed(
        Advice("aoa/parser.py", "or that begin with a digit, between quotes"),
        "0.weight -> x",
        {'"0.weight" -> x': {"x": A}},
        {"0.weight": A},
    ),
    Followed(
        Advice("aoa/parser.py", "in a list of Python, put a comma between the two texts, which it joins otherwise"),
        "a -> x, scale=2b -> y",
        {"a -> x, scale=2 ; b -> y": {"x": A * 2, "y": B}},
    ),
    Followed(
        Advice("aoa/parser.py", "put a line break between them; in a list of Python, a comma between the two texts"),
        "a -> xb -> y",
        {"a -> x ; b -> y": {"x": A, "y": B}, "a -> x\nb -> y": {"x": A, "y": B}},
    ),
    Followed(
        Advice("aoa/parser.py", "transpose on the left, "),
        "a -> x^T",
        {"a^T -> x": {"x": A.T}},
    ),
    Followed(
        Advice("aoa/rule.py", "apply the fused layout to the source key itself"),
        "a, b -> t, axis=1 ; t -> g, u, fused_ffn",
        {"a -> g, u, fused_ffn": {"g": GATE, "u": UP}},
        {"a": FUSED, "b": FUSED},
        cuts={"source_cuts": {"a": (1, 2), "b": (1, 2)}},
    ),
    Followed(
        Advice("aoa/rule.py", "apply the fused layout last, to the destination key itself"),
        'g, u -> t, fused_ffn ; t -> x, slice="[0:2, :]"',
        {'g -> i, slice="[0:2, :]" ; u -> j, slice="[0:2, :]" ; i, j -> x, fused_ffn': {"x": FUSED[:2]}},
        {"g": GATE, "u": UP},
        cuts={"target_cuts": {"x": (1, 2)}},
    ),
    Followed(
        Advice("aoa/rule.py", "give axis= (a fused layout takes 1 by default)"),
        "g, u -> b, fused_ffn",
        {"g, u -> b, fused_ffn, axis=0": {"b": np.float32([0, 1, 4, 5, 2, 3, 6, 7])}},
        {"g": numbered(4), "u": numbered(4, start=4)},
        cuts={"target_cuts": {"b": (0, 2)}},
    ),
    Followed(
        Advice("aoa/program.py", "or add the tag 'optional'"),
        "_ -> new, fill=0 ; a -> x",
        {"_ -> new, fill=0, optional ; a -> x": {"x": A}, "a -> x": {"x": A}, "_ -> x, fill=0": {"x": A * 0}},
    ),
    Followed(
        Advice("aoa/program.py", "correct the name"),
        "aa^T -> a",
        {"a^T -> a": {"a": SQUARE.T}},
        {"a": SQUARE},
    ),
    Followed(
        Advice("aoa/program.py", "correct the name"),
        "aa -> b ; a^T -> x",
        {"a -> b ; a^T -> x": {"x": A.T}, "aa -> b, optional ; a^T -> x": {"x": A.T}},
    ),
    Followed(
        Advice("aoa/program.py", "correct the pattern"),
        "l.$L.ww^T -> l.$L.w",
        {"l.$L.w^T -> l.$L.w": {"l.0.w": SQUARE.T}},
        {"l.0.w": SQUARE},
    ),
    Followed(
        Advice("aoa/structure_values.py", "give them a number with fill="),
        'a -> x, resize="[5, 6]", fill="keep", scale=2.0',
        {'a -> x, resize="[5, 6]", fill=3, scale=2.0': {"x": np.concatenate([A * 2, np.full((1, 6), 6, "float32")])}},
    ),
    Followed(
        Advice("aoa/rule.py", "name the same state everywhere, or the parameters alone"),
        "a.moment1_0 -> x",
        {
            "a -> x": {"x": A, "x.moment1_0": B},
            "a.moment1_0 -> x.moment1_0 ; a -> x": {"x": A, "x.moment1_0": B},
        },
        {"a": A, "a.moment1_0": B},
        {"x": room(4, 6), "x.moment1_0": room(4, 6)},
    ),
]


@pytest.mark.parametrize(
    ("statement", "source", "target", "prefix"),
    [
        ("student.* -> *", "student.", "", "student."),
        ("student.$NAME -> $NAME", "student.", "", "student."),
        ("* -> teacher.*", "", "teacher.", "teacher."),
        ("$ANY -> teacher.$ANY", "", "teacher.", "teacher."),
    ],
)
def test_a_prefix_of_all_keys_is_taken_off_or_given_by_the_statements_of_the_error(
    tmp_path, statement, source, target, prefix
):
    names = {"a.weight": A, "layers.0.w": B, "a.weight.moment1_0": A + 1}
    fc.save_state_dict({f"{source}{key}": value for key, value in names.items()}, tmp_path)
    state_dict = {f"{target}{key}": np.zeros_like(value) for key, value in names.items()}
    with pytest.raises(fc.ValidationError) as caught:
        fc.load_state_dict(state_dict, tmp_path, aoa_config=[statement])
    assert "'*' and $NAME stand for numbers alone: for all keys give " in str(caught.value)
    text = re.search(r"for all keys give (\[.*\]), a statement", str(caught.value))[1].replace("PREFIX.", prefix)
    statements = eval(text, {"state_dict": state_dict})  # what the error says
    fc.load_state_dict(state_dict, tmp_path, aoa_config=statements)
    assert {key: value.tolist() for key, value in state_dict.items()} == {
        f"{target}{key}": value.tolist() for key, value in names.items()
    }


def test_the_prefixes_of_paddles_own_state_dicts_need_no_statement(tmp_path):
    fc.save_state_dict({"model.a.weight": A}, tmp_path)
    with pytest.raises(fc.ValidationError) as caught:
        fc.load_state_dict({"a.weight": A * 0}, tmp_path, aoa_config=["model.* -> *"])
    assert "the prefixes model., optimizer. and _layers. need none" in str(caught.value)
    target = {"a.weight": A * 0}
    fc.load_state_dict(target, tmp_path)
    assert (target["a.weight"] == A).all()


@pytest.mark.parametrize("each", SCENARIOS, ids=lambda each: f"{each.advice.module}-{each.wrong}")
def test_a_statement_is_corrected_as_the_error_says(each: Followed):
    expected = next(iter(each.right.values()))
    with provoked(*each.advice):
        run(each.wrong.split(" ; "), each.source, each.targets(expected), **each.cuts)
    for text, expected in each.right.items():
        got = run(text.replace("\n", " ; ").split(" ; "), each.source, each.targets(expected), **each.cuts)
        assert_equal(got, expected)


def test_a_cast_that_is_inverted_names_both_dtypes():
    source, made = {"a": A.astype("float16")}, {"x": A}
    with provoked("aoa/invert.py", 'write src_dtype="...", dst_dtype="'):
        invert({"aoa_statements": ['a -> x, dtype="float32"']})
    statements = ['a -> x, src_dtype="float16", dst_dtype="float32"']
    assert_equal(run(statements, source, {"x": room(4, 6)}), made)
    back = invert({"aoa_statements": statements})["aoa_statements"]
    assert_equal(run(back, made, {"a": room(4, 6, dtype="float16")}), source)


def test_new_elements_without_a_target_are_given_a_value():
    longer = 'a -> x, resize="[6, -1]"'
    with provoked("aoa/element_maps.py", "say what new elements hold, as with fill=0"):
        compiled([f'{longer}, fill="keep"'], {"a": A}, None).output_infos()
    assert list(compiled([f"{longer}, fill=0"], {"a": A}, None).output_infos()) == ["x"]
    assert_equal(run([f"{longer}, fill=0"], {"a": A}, {"x": room(6, 6)}), {"x": np.concatenate([A, A[:2] * 0])})


def test_a_state_of_a_computed_parameter_has_a_statement_of_its_own():
    source = {"a": A, "a.moment1_0": B, "b": B, "b.moment1_0": A}
    targets = {"x": room(4, 6), "x.moment1_0": room(4, 6)}
    mapping = compiled(["a, b -> x, sum"], source, targets)
    advised("aoa/sides.py", "add a statement for ", mapping.provenance["x.moment1_0"])
    got = run(["a, b -> x, sum", 'a -> x, states="moment1_0"'], source, targets)
    assert_equal(got, {"x": A + B, "x.moment1_0": B})


def test_scalars_that_disagree_are_chosen_by_a_statement():
    source = {name + ".beta1_pow_acc_0": np.float32([value]) for name, value in (("a", 0.5), ("b", 0.25))}
    source |= {"a": A, "b": B}
    target = {"c": room(8, 6), "c.beta1_pow_acc_0": room(1)}
    join, both = "a, b -> c, axis=0", np.concatenate([A, B])
    with provoked("aoa/steps.py", "say in a statement which of them the target shall take"):
        run([join], source, target)
    for name in "ab":
        got = run([join, f'{name} -> c, states="beta1_pow_acc_0"'], source, target)
        assert_equal(got, {"c": both, "c.beta1_pow_acc_0": source[f"{name}.beta1_pow_acc_0"]})


def test_blocks_that_are_repeated_too_often_are_larger():
    a = numbered(600_000)
    with provoked("aoa/structure_ops.py", "repeat larger blocks"):
        run(["a -> x, repeat=2, axis=0, block=1"], {"a": a}, {"x": room(1_200_000)})
    got = run(["a -> x, repeat=2, axis=0, block=100"], {"a": a}, {"x": room(1_200_000)})
    assert_equal(got, {"x": a.reshape(-1, 100).repeat(2, axis=0).reshape(-1)})


QUANTIZED = {"model_type": "llama", "num_attention_heads": 8, "quantization_config": {"quant_method": "awq"}}
KEYS = ["model.embed_tokens.weight", "lm_head.weight"]


def test_a_model_without_rules_takes_those_of_a_family_by_name():
    with provoked("aoa/model_rules.py", "name a family whose tensors have the same names, or give AOA statements"):
        rules_of_config({"model_type": "my_llama", "num_attention_heads": 8}, "from_hf", KEYS)
    rules = rules_of_config({"model_type": "my_llama", "num_attention_heads": 8}, "from_hf", KEYS, "llama")
    assert rules == rules_of_config({"model_type": "llama", "num_attention_heads": 8}, "from_hf", KEYS)


def test_quantized_weights_are_read_by_the_variant_that_dequantizes():
    config = {"model_type": "gpt_oss", "num_local_experts": 2, "quantization_config": {"quant_method": "mxfp4"}}
    with provoked("aoa/model_rules.py", "take the variant "):
        rules_of_config(config, "from_hf", KEYS, None, "plain")
    assert any("dequant" in text for text in rules_of_config(config, "from_hf", KEYS, None, "mxfp4")["aoa_statements"])
    with provoked("aoa/model_rules.py", "write them out dequantized first, by the library that quantized them"):
        rules_of_config(QUANTIZED, "from_hf", KEYS)
    plain = {key: value for key, value in QUANTIZED.items() if key != "quantization_config"}
    assert rules_of_config(plain, "from_hf", KEYS) == rules_of_config(
        {**plain, "quantization_config": None}, "from_hf", KEYS
    )


def test_a_statement_about_one_state_comes_last(tmp_path) -> None:
    source = {"a": A, "a.moment1_0": A + 100, "b": B, "b.moment1_0": B + 100}
    fc.save_state_dict(source, tmp_path)
    target = {"c": room(4, 6), "c.moment1_0": room(4, 6)}
    with provoked("aoa/program.py", "last, with the name of the target on its right"):
        fc.load_state_dict(target, tmp_path, aoa_config=['a -> b, states="moment1_0"', "b -> c"])
    last = ["b -> c", 'a -> c, states="moment1_0"', "b.moment1_0 -> _"]
    fc.load_state_dict(target, tmp_path, aoa_config=last)
    assert_equal(target, {"c": B, "c.moment1_0": A + 100})


def test_axes_whose_inner_extents_are_short_are_not_split(monkeypatch):
    monkeypatch.setattr(structure, "MAX_FRAGMENTS", 4)
    with provoked(
        "aoa/structure.py", "split or merge only axes whose inner extents are long, and do it before axes are"
    ):
        run(['a -> t, permute="[1, 0]"', 't -> x, reshape="[3, 8]"'], {"a": A}, {"x": room(3, 8)})
    got = run(['a -> t, reshape="[2, 2, 6]"', 't -> x, permute="[2, 0, 1]"'], {"a": A}, {"x": room(6, 2, 2)})
    assert_equal(got, {"x": A.reshape(2, 2, 6).transpose(2, 0, 1)})


def test_a_fill_without_a_destination():
    for wrong, right in (
        (["_ -> new, fill=0", "a -> x"], ["a -> x"]),
        (["_ -> n, fill=0"], ["_ -> n, fill=0, optional"]),
    ):
        with provoked("aoa/program.py", "leave the statement out"):
            compiled(wrong, {"a": A}, None)
        assert not {"new", "n"} & {*compiled(right, {"a": A}, None).outputs}


def test_states_that_cannot_be_joined_are_given_by_statements_of_their_own(tmp_path):
    half = (B * 2).astype("float16")
    fc.save_state_dict({"a": A, "b": B, "a.moment1_0": A + 1, "b.moment1_0": half}, tmp_path)
    target = {"x": room(8, 6), "x.moment1_0": room(8, 6)}
    with provoked(
        "aoa/structure_values.py", "say in statements for these states where they come from, with dtype= for those of"
    ):
        fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": ["a, b -> x, axis=0"]})
    statements = [
        "a, b -> x, axis=0",
        'b.moment1_0 -> t.moment1_0, dtype="float32"',
        "a.moment1_0, t.moment1_0 -> x.moment1_0, axis=0",
    ]
    fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": statements})
    assert_equal(target, {"x": np.concatenate([A, B]), "x.moment1_0": np.concatenate([A + 1, half.astype("float32")])})


def test_an_arrow_of_another_kind():
    with provoked("aoa/parser.py", "did you mean `->`? It stands between the two sides of a statement"):
        compiled(["a => x"], {"a": A}, {"x": room(4, 6)})
    for statement in ("a > x", "a => x", "a → x"):  # as --aoa takes it too: not a path
        with pytest.raises(AoaError, match=r"AOA statement 1, column .*did you mean `->`"):
            compiled(read_config(statement).statements, {"a": A}, {"x": room(4, 6)})
    assert_equal(run(["a -> x"], {"a": A}, {"x": room(4, 6)}), {"x": A})


def test_a_misspelt_tag_is_corrected_or_put_between_quotes():
    sources, targets = {"a": A, "b": A + 1}, {"x": room(4, 6), "coppy": room(4, 6)}
    with provoked("aoa/parser.py", "correct it; if it is a tensor's name, put it between quotes"):
        compiled(["a -> x, coppy"], sources, targets)
    assert_equal(run(["a -> x, y, copy"], {"a": A}, {"x": room(4, 6), "y": room(4, 6)}), {"x": A, "y": A})
    assert_equal(run(['a, b -> x, "coppy"'], sources, targets), {"x": A, "coppy": A + 1})
    # The library puts it between quotes itself.
    (back,) = invert(['x, "coppy" -> a, b'])["aoa_statements"]
    assert_equal(run([back], sources, targets), {"x": A, "coppy": A + 1})


def test_a_direction_in_place_of_a_variant():
    with provoked("aoa/model_rules.py", "give it by name, direction="):
        fc.model_rules("llama", "to_hf")
    assert fc.model_rules("llama", direction="to_hf")["aoa_statements"]


def test_the_reverse_of_a_sum_is_written_by_hand(tmp_path):
    fc.save_state_dict({"x": A + B}, tmp_path)
    target = {"a": np.zeros_like(A), "b": np.zeros_like(B)}
    config = {"aoa_statements": ["a, b -> x, sum"], "aoa_config_reverse": True}
    with provoked("aoa/statements.py", "write the statements of that direction by hand, with what") as caught:
        fc.load_state_dict(target, tmp_path, aoa_config=config)
    assert "has no exact inverse" in str(caught.value) and not target["a"].any()
    fc.load_state_dict(target, tmp_path, aoa_config=["x -> a", "_ -> b, fill=0"])
    assert (target["a"] == A + B).all() and not target["b"].any()
