"""Mappings of a load: which statements are compiled, what puts tensors into natural order, what is refused."""

from __future__ import annotations

import hashlib
import json

import pytest

from paddle_flexckpt.aoa import AoaError, TensorInfo
from paddle_flexckpt.catalog import CUT, NATURAL, Order, Problem, ValidationError
from paddle_flexckpt.transfer.mapping import compile_mapping, config_digest, tensor_infos, whole_mapping
from tests.transfer.samples import Part, catalog, columns, refusal, the_refusal

FFN = Order(2, 1, "fused_ffn")


def fused(key="w", order=FFN, **more):
    return columns(key, (6, 6), order=order, **more)


def by_rank(*parts):
    return catalog(*sorted(parts, key=lambda part: part.rank))


# -- with targets ------------------------------------------------------------------------------------------------------


def test_statements_are_compiled_for_the_targets_and_others_follow():
    source, target = catalog(Part("a"), Part("b")), catalog(Part("x"), Part("y"), Part("b"))
    mapping = compile_mapping(["a -> x"], source, target, "exact", ["b -> y"])
    assert mapping.copied_keys("xyb") == {"x": "a", "y": "b"}
    assert mapping.outputs == ()
    assert compile_mapping(None, source, target, "exact").tensors == {}
    assert set(compile_mapping(None, source, target, "exact", ["b -> y"]).tensors) == {"y"}


def test_what_is_compiled_already_is_no_statement():
    mapping = compile_mapping(["a -> x"], catalog(Part("a")), catalog(Part("x")), "exact")
    for refused in (
        lambda: compile_mapping(mapping, catalog(Part("a")), catalog(Part("x")), "exact"),
        lambda: whole_mapping(mapping, catalog(Part("a"))),
        lambda: config_digest(mapping),
    ):
        with pytest.raises(AoaError, match="aoa_config has to be a dict with 'aoa_statements'; got a TensorMapping"):
            refused()


def test_masters_are_converted_where_that_is_allowed():
    source, target = catalog(Part("a")), catalog(Part("x"), Part("x.w_0"))
    assert compile_mapping(["a -> x"], source, target, "convert").masters == {"x.w_0": "a"}
    assert compile_mapping(["a -> x"], source, target, "exact").masters == {}


def test_ranks_want_what_statements_make_in_one_dtype():
    def wanted(second):
        return catalog(
            Part("first", dtype="float16"), Part("x"), Part("free"), Part("x", dtype=second, rank=1),
            Part("free", dtype="float64", rank=1), Part("more", dtype="float16", rank=1),
        )  # fmt: skip

    source = catalog(Part("a"), Part("free"), Part("first"), Part("more"))
    assert "x" in compile_mapping(["a -> x"], source, wanted("float32"), "exact").tensors
    problem = the_refusal(compile_mapping, ["a -> x"], source, wanted("bfloat16"), "exact")
    assert problem == Problem(
        "ranks want a tensor that AOA statements make in different dtypes",
        key="x",
        expected="one dtype",
        got=["bfloat16", "float32"],
    )
    problems = refusal(compile_mapping, ["a -> x", "a -> free"], source, wanted("float64"), "exact")
    assert [(each.key, each.got) for each in problems] == [
        ("x", ["float32", "float64"]), ("free", ["float32", "float64"])
    ]  # fmt: skip


# -- whole tensors in natural order ------------------------------------------------------------------------------------


def made(mapping):
    return dict(mapping.provenance)


def test_whole_tensors_are_the_sources_where_nothing_is_fused():
    source = by_rank(*fused("cut", CUT), *fused("natural", NATURAL), *fused("one", Order(1, 1, "fused_ffn")), Part("a"))
    assert whole_mapping(None, source) is None
    assert whole_mapping(None, source, ["a", "cut"]) is None
    assert whole_mapping(None, by_rank(*fused(), Part("a")), ["a", "unknown"]) is None
    assert made(whole_mapping(["a -> b"], source)) == {"b": "AOA statement 1: a -> b"}
    assert whole_mapping(["a -> b"], source).outputs == ("b", "cut", "natural", "one")


@pytest.mark.parametrize("names", [None, ["v"], ["a", "v.moment1_0"]])
def test_fused_parameters_and_their_states_are_put_right(names):
    source = by_rank(*fused("w", CUT), Part("a"), *fused("v"), *fused("v.moment1_0"), Part("c", order=NATURAL))
    mapping = whole_mapping(None, source, names)
    assert mapping.outputs == ("a", "c", "v", "v.moment1_0", "w")
    assert mapping.copied_keys(mapping.outputs) == {"a": "a", "c": "c", "w": "w"}
    assert set(made(mapping).values()) == {"AOA statement 1: v -> v, fused_ffn"}
    assert mapping.moved_keys(mapping.outputs) == {"v", "v.moment1_0"}


def test_what_statements_rename_is_put_right_too_after_them():
    source = by_rank(*fused("a"), *fused("b"), *fused("c", Order(2, 1, "fused_qkv_old, num_heads=2")), Part("d"))
    program = ["a -> x", "b -> b", "c -> _", "d -> y"]
    mapping = whole_mapping(program, source)
    assert mapping.outputs == ("b", "x", "y")
    assert mapping.copied_keys(mapping.outputs) == {"b": "b", "y": "d"}
    # A statement that makes a key of itself takes it as it is.
    assert made(mapping) == {
        "x": "AOA statement 5: x -> x, fused_ffn",
        "b": "AOA statement 2: b -> b",
        "y": "AOA statement 4: d -> y",
    }


def test_the_statement_names_its_axis():
    parts = [Part("w", shape=(2, 12), offset=(2 * n, 0), rank=n, order=Order(2, 0, "fused_ffn")) for n in (0, 1)]
    assert made(whole_mapping(None, catalog(*parts))) == {"w": "AOA statement 1: w -> w, fused_ffn, axis=0"}


def test_without_a_statement_natural_order_is_refused():
    unknown = Order(2, 1, None)
    source = by_rank(*fused("a", unknown), *fused("b"), *fused("c", unknown), Part("d"))

    def told(key):
        return Problem(
            "a fused parameter is not in natural order, and no AOA statement is known that would put it right",
            key=key,
            expected="a FusedAxis with a statement at the save",
            got="fused, by no known statement, along axis 1, 2 parts",
            remedy=f'take it as it is stored, by the AOA statement "{key} -> {key}"',
            code="FC207",
        )

    assert refusal(whole_mapping, None, source) == [told("a"), told("c")]
    assert refusal(whole_mapping, ["a -> x", "c -> c"], source) == [told("x")]
    assert whole_mapping(["a -> a", "c -> c"], source).copied_keys("abc") == {"a": "a", "c": "c"}


# -- what the source says ----------------------------------------------------------------------------------------------


def test_a_program_has_one_digest_however_it_is_given():
    text = json.dumps({"statements": ["a -> x"], "reverse": False})
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert config_digest(["a -> x"]) == config_digest({"aoa_statements": ["a -> x"]}) == digest
    assert config_digest({"aoa_statements": ["a -> x"], "aoa_config_reverse": True}) != digest
    assert config_digest(None) is None
    with pytest.raises(ValidationError):
        config_digest(1)


def test_every_key_has_its_global_shape_and_dtype():
    source = by_rank(
        Part("extra_state.common.step", (), "int64"),
        *fused(),
        Part("late", (3,), "float16", rank=1),
        Part("b", (2, 2, 2)),
    )
    infos = {
        "w": TensorInfo((4, 12), "float32"),
        "late": TensorInfo((3,), "float16"),
        "b": TensorInfo((2, 2, 2), "float32"),
    }
    assert tensor_infos(source) == infos
    extra = {"extra_state.common.step": TensorInfo((), "int64")}
    assert tensor_infos(source, None, True) == {**infos, **extra}
    mapping = whole_mapping(["w^T -> t", "late -> _"], source)
    made = {"t": TensorInfo((12, 4), "float32"), "b": infos["b"]}
    assert tensor_infos(source, mapping) == made
    assert tensor_infos(source, mapping, True) == {**made, **extra}
    with pytest.raises(ValidationError, match="statements keep what a target has"):
        tensor_infos(source, whole_mapping(['late -> late, resize="[4]", fill="keep"'], source))
