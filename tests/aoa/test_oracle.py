"""The oracle of the differential test, against results worked out by hand: every construct of docs/aoa.md."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.aoa.oracle import Oracle, OracleError, Source, Target, parse, run_program

F32 = np.float32


def array(*rows, dtype=F32) -> np.ndarray:
    return np.asarray(rows, dtype=dtype)


def run(program, source, targets=None, parts=None, target_parts=None) -> dict[str, np.ndarray]:
    """Results by key; ``targets`` gives shapes and dtypes where they cannot be taken from the run itself."""
    texts = [program] if isinstance(program, str) else program
    parts, target_parts = parts or {}, target_parts or {}
    sources = {key: Source(np.asarray(value), parts.get(key, 1)) for key, value in source.items()}
    destination = {
        key: Target(np.shape(like), str(np.asarray(like).dtype), target_parts.get(key, 1))
        for key, like in (targets or {}).items()
    }
    return {key: value.array for key, value in run_program(texts, sources, destination).items()}


def check(program, source, expected, **options) -> None:
    results = run(program, source, expected, **options)
    for key, value in expected.items():
        assert results[key].tobytes() == np.ascontiguousarray(value).tobytes(), (key, results[key])


A = array([1, 2, 3], [4, 5, 6])
B = array([7, 8, 9], [10, 11, 12])


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("a -> x", {"x": A}),
        ("a^T -> x", {"x": array([1, 4], [2, 5], [3, 6])}),
        ("a -> x, axis=0", {"x": A}),
        ("a -> x, y, axis=0", {"x": array([1, 2, 3]), "y": array([4, 5, 6])}),
        ("a -> x, y, z, axis=-1", {"x": array([1], [4]), "y": array([2], [5]), "z": array([3], [6])}),
        ('a -> x, y, axis=1, sizes="[2, 1]"', {"x": array([1, 2], [4, 5]), "y": array([3], [6])}),
        ('a -> x, y, axis=1, sizes="[-1, 2]"', {"x": array([1], [4]), "y": array([2, 3], [5, 6])}),
        ('a -> x, y, axis=1, sizes="auto"', {"x": array([1], [4]), "y": array([2, 3], [5, 6])}),
        ("a, b -> x, axis=0", {"x": array([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12])}),
        ("a, b^T^T -> x, axis=1", None),
        ("a, b -> x, axis=-1", {"x": array([1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11, 12])}),
        ("a, b -> x, y", {"x": A, "y": B}),
        ("a, b^T -> x, y", {"x": A, "y": B.T}),
        ("a, b -> b, a", {"a": B, "b": A}),
        (["a -> b", "b -> a"], {"a": A, "b": A}),
        ("a -> x, y, copy", {"x": A, "y": A}),
        ("a, b -> x, stack, axis=0", {"x": array([[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]])}),
        ("a, b -> x, stack, axis=-1", {"x": array([[1, 7], [2, 8], [3, 9]], [[4, 10], [5, 11], [6, 12]])}),
        ("a -> x, y, unstack, axis=0", {"x": array(1, 2, 3), "y": array(4, 5, 6)}),
        ("a -> x, y, z, unstack, axis=1", {"x": array(1, 4), "y": array(2, 5), "z": array(3, 6)}),
        ("_ -> x, fill=2.5", {"x": array(2.5, 2.5)}),
        ("a, b -> x, sum", {"x": array([8, 10, 12], [14, 16, 18])}),
        ('a, b -> x, sum, weights="[2, -1]"', {"x": array([-5, -4, -3], [-2, -1, 0])}),
        ("a, b -> x, average", {"x": array([4, 5, 6], [7, 8, 9])}),
    ],
)
def test_statements(program, expected):
    if expected is None:
        with pytest.raises(OracleError):
            run(program, {"a": A, "b": B})
        return
    check(program, {"a": A, "b": B}, expected)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ('permute="[]"', A.T),
        ('permute="[-1, 0]"', A.T),
        ('reshape="[3, -1]"', array([1, 2], [3, 4], [5, 6])),
        ('reshape="auto"', array(1, 2, 3, 4, 5, 6)),
        ('slice="[:, 1]"', array(2, 5)),
        ('slice="[1, -2:3]"', array(5, 6)),
        ('slice="[0:1]"', array([1, 2, 3])),
        ('pad="[[1, 0], [0, 2]]", fill=9', array([9] * 5, [1, 2, 3, 9, 9], [4, 5, 6, 9, 9])),
        ('resize="[3, 2]", fill=0', array([1, 2], [4, 5], [0, 0])),
        ('resize="[-1, 1]"', array([1], [4])),
        ('fill=0.5, resize="auto"', array([1, 2, 3, 0.5], [4, 5, 6, 0.5])),
        ("repeat=2, axis=0", array([1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6])),
        ("repeat=2, axis=0, block=1", array([1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6])),
        ("repeat=2, axis=-1, block=3", array([1, 2, 3, 1, 2, 3], [4, 5, 6, 4, 5, 6])),
        ('dtype="int64"', A.astype(np.int64)),
        ('dtype="complex64"', A.astype(np.complex64)),
        ('src_dtype="float32", dst_dtype="bfloat16"', A.astype(ml_dtypes.bfloat16)),
        ('dst_dtype="bfloat16", src_dtype="float32"', A.astype(ml_dtypes.bfloat16)),
        ("scale=0.5", array([0.5, 1, 1.5], [2, 2.5, 3])),
        # In the order in which they are written.
        ('permute="[1, 0]", reshape="[6]"', array(1, 4, 2, 5, 3, 6)),
        ('reshape="[6]", slice="[1:3]"', array(2, 3)),
        ('slice="[0]", pad="[[1, 0]]", fill=7, scale=2', array(14, 2, 4, 6)),
        ('dtype="bfloat16", scale=1.01', (A * F32(1.01)).astype(ml_dtypes.bfloat16)),
        ('scale=1.01, dtype="bfloat16"', (A * F32(1.01)).astype(ml_dtypes.bfloat16)),
    ],
)
def test_attributes_of_single_variables(attributes, expected):
    check(f"a -> x, {attributes}", {"a": A}, {"x": expected})


def test_attributes_before_and_after_what_turns_left_variables_into_right_ones():
    check(
        'a, b -> x, permute="[]", axis=0, reshape="[3, 4]"',
        {"a": A, "b": B},
        {"x": np.vstack([A.T, B.T]).reshape(3, 4)},
    )
    check("a -> x, y, axis=0, scale=2", {"a": A}, {"x": 2 * A[:1], "y": 2 * A[1:]})
    check('a -> x, y, copy, slice="[0]"', {"a": A}, {"x": A[0], "y": A[0]})
    # sum rounds to the first operand's dtype, a dtype that follows rounds again.
    small = (A / 3).astype(np.float16)
    total = (small.astype(F32) + B).astype(np.float16)
    check('a, b -> x, sum, dtype="float64"', {"a": small, "b": B}, {"x": total.astype(np.float64)})
    check('a, b -> x, dtype="float64", sum', {"a": small, "b": B}, {"x": small.astype(np.float64) + B})


def test_casts_happen_one_after_the_other():
    values = array(0.1, 0.2, 0.3)
    check(
        'a -> x, dtype="bfloat16", dtype="float32"', {"a": values}, {"x": values.astype(ml_dtypes.bfloat16).astype(F32)}
    )


def test_what_is_kept():
    sources = {"a": Source(A)}
    targets = {"x": Target((2, 4), "float32"), "y": Target((3,), "int8"), "z": Target((4, 2), "float32")}
    texts = [
        'a -> x, resize="[2, 4]", fill="keep"',
        "_ -> y",
        'a -> t, pad="[[0, 0], [1, 0]]", fill="keep"',
        "t^T -> z",
    ]
    results = run_program(texts, sources, targets)
    assert results["x"].keep.tolist() == [[False, False, False, True]] * 2
    assert results["x"].array[:, :3].tolist() == A.tolist()
    assert results["y"].keep.all()
    assert results["z"].keep.tolist() == [[True, True], [False, False], [False, False], [False, False]]
    assert results["z"].array[1:].tolist() == A.T.tolist()


def test_what_is_not_mentioned_keeps_its_name_and_what_is_removed_feeds_nothing():
    check("a -> x", {"a": A, "b": B}, {"x": A, "a": A, "b": B})
    with pytest.raises(OracleError, match="nothing feeds a"):
        check("a -> _", {"a": A}, {"a": A})
    with pytest.raises(OracleError, match="nothing feeds c"):
        check("a -> x", {"a": A}, {"c": A})


def test_lora_merge():
    w, a, b = array([1, 2], [3, 4]), array([1, 2], [0, 1]), array([1, 0], [1, 1])
    # a @ b = [[3, 2], [1, 1]]
    check("w, a, b -> x, lora_merge, scale=2.0", {"w": w, "a": a, "b": b}, {"x": array([7, 6], [5, 6])})
    # The order of additions: (1e8 - 1e8) + 1, not 1e8 + (-1e8 + 1).
    w, a, b = array([0]), array([1, 1, 1]), array([1e8], [-1e8], [1])
    check("w, a, b -> x, lora_merge, scale=1", {"w": w, "a": a, "b": b}, {"x": array([1])})


def test_sums_are_computed_from_left_to_right_in_float32():
    values = {"a": array(1e8), "b": array(-1e8), "c": array(1)}
    check("a, b, c -> x, sum", values, {"x": array(1)})
    check("c, a, b -> x, sum", values, {"x": array(0)})
    check("c, a, b -> x, sum", {**values, "b": values["b"].astype(np.float64)}, {"x": array(1)})


def test_dequant_fp8():
    w = np.asarray([[1, 2, 4], [8, 16, 32], [1, 1, 1]], dtype=ml_dtypes.float8_e4m3fn)
    s = array([2, 3], [5, 7])
    check(
        'w, s -> x, dequant="fp8", block="[2, 2]"', {"w": w, "s": s}, {"x": array([2, 4, 12], [16, 32, 96], [5, 5, 7])}
    )


def test_dequant_mxfp4():
    # Low nibbles first: 0x10 is 0, 0.5; 0xF2 is 1, -6; 0x89 is -0.5, -0.
    w, s = np.asarray([[0x10, 0xF2], [0x89, 0x77]], dtype=np.uint8), np.asarray([127, 129], dtype=np.uint8)
    check('w, s -> x, dequant="mxfp4"', {"w": w, "s": s}, {"x": array(0, 0.5, 1, -6, -2, -0.0, 24, 24)})
    check('w, s -> x, dequant="mxfp4"', {"w": w[None], "s": s[None]}, {"x": array([0, 0.5, 1, -6, -2, -0.0, 24, 24])})
    tiny = {"w": np.asarray([[0x11]], dtype=np.uint8), "s": np.asarray([0], dtype=np.uint8)}
    check('w, s -> x, dequant="mxfp4"', tiny, {"x": array(2.0**-128, 2.0**-128)})


LAYERS = {"l.0.w": A, "l.2.w": B, "l.10.w": 2 * A}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("l.$LAYER_ID.w -> m.$LAYER_ID", {"m.0": A, "m.2": B, "m.10": 2 * A}),
        ("l.$L.w^T -> m$L", {"m0": A.T, "m2": B.T, "m10": 2 * A.T}),
        ("l.$L.w -> m.${L+1}", {"m.1": A, "m.3": B, "m.11": 2 * A}),
        ("l.$L.w -> m.${L*2+1}.${L//2}.${L%4}", {"m.1.0.0": A, "m.5.1.2": B, "m.21.5.2": 2 * A}),
        ("l.$L.w -> m.$L.a, m.$L.b, axis=0", {"m.2.a": B[:1], "m.10.b": 2 * A[1:]}),
        (["l.$L.w -> t.$L", "t.$LAYER_ID -> m.$LAYER_ID"], {"m.0": A, "m.2": B, "m.10": 2 * A}),
        ("l.*.w -> m, stack, axis=0", {"m": np.stack([A, B, 2 * A])}),
        ("m.s -> m.*.x, unstack, axis=0", {"m.3.x": A, "m.20.x": B}),
        ("q[0:2] -> m, axis=1", {"m": np.hstack([A, B])}),
        ("q_0 -> z[3:5], axis=0", {"z_3": A[:1], "z_4": A[1:]}),
        ("_ -> n.$L.b, fill=1", {"n.4.b": array(1, 1), "n.7.b": array(1)}),
        ("none.$L -> m.$L, optional", {"l.0.w": A}),
        ("none.* -> m, stack, axis=0, optional", {"l.0.w": A}),
        ("none -> q_0, optional", {"q_0": A}),
    ],
)
def test_placeholders_and_patterns(program, expected):
    check(program, {**LAYERS, "m.s": np.stack([A, B]), "q_0": A, "q_1": B}, expected)


def test_layer_id_offset_is_one_less_on_the_right():
    check("l.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET", {"l.1.w": A, "l.2.w": B}, {"m.0": A, "m.1": B})


def test_ragged_experts():
    source = {"l.0.e.0.w": A, "l.0.e.1.w": B, "l.3.e.0.w": 2 * A}
    check("l.$L.e.$E.w -> m.$L.$E", source, {"m.0.0": A, "m.0.1": B, "m.3.0": 2 * A})
    check("l.$L.e.*.w -> m.$L, stack, axis=0", source, {"m.0": np.stack([A, B]), "m.3": np.stack([2 * A])})


def test_later_left_names_bind_what_is_open():
    source = {"a.1": A, "a.2": A, "b.1.5": B, "b.2.6": 2 * B}
    check("a.$X, b.$X.$Y -> m.$X.$Y, sum", source, {"m.1.5": A + B, "m.2.6": A + 2 * B})


def test_optional_leaves_out_what_has_no_partner():
    source = {"a.1": A, "a.2": A, "b.1": B}
    check("a.$X, b.$X -> m.$X, axis=0, optional", source, {"m.1": np.vstack([A, B]), "a.2": A})
    with pytest.raises(OracleError, match="no such name"):
        run("a.$X, b.$X -> m.$X, axis=0", source)
    with pytest.raises(OracleError, match="nothing matches"):
        run("none.$L -> m.$L", source)


def fused_qkv(heads, groups, width, parts) -> tuple[np.ndarray, list[np.ndarray]]:
    """A fused row in the old layout whose elements say what they are, and q, k, v by themselves."""
    q = array(*(100 + i for i in range(heads * width)))
    k = array(*(200 + i for i in range(groups * width)))
    v = array(*(300 + i for i in range(groups * width)))
    cells = [np.split(each, parts) for each in (q, k, v)]
    return np.concatenate([each[part] for part in range(parts) for each in cells]), [q, k, v]


def test_fused_qkv_is_group_by_group():
    fused, (q, k, v) = fused_qkv(heads=4, groups=2, width=1, parts=2)
    assert fused.tolist() == [100, 101, 200, 300, 102, 103, 201, 301]
    tail = ", fused_qkv, num_heads=4, num_key_value_groups=2, axis=0"
    check(f"a -> q, k, v{tail}", {"a": fused}, {"q": q, "k": k, "v": v}, parts={"a": 1})
    check(f"q, k, v -> a{tail}", {"q": q, "k": k, "v": v}, {"a": fused}, target_parts={"a": 4})


def test_fused_qkv_old_depends_on_the_tensor_parallel_parts():
    tail = ", fused_qkv_old, num_heads=8, num_key_value_groups=4, axis=0"
    one, (q, k, v) = fused_qkv(8, 4, 2, parts=1)
    two, four = (fused_qkv(8, 4, 2, parts)[0] for parts in (2, 4))
    check(f"a -> b{tail}", {"a": one}, {"b": four}, target_parts={"b": 4})
    check(f"a -> a{tail}", {"a": four}, {"a": two}, parts={"a": 4}, target_parts={"a": 2})
    check(f"a -> q, k, v{tail}", {"a": two}, {"q": q, "k": k, "v": v}, parts={"a": 2})
    check(f"q, k, v -> a{tail}", {"q": q, "k": k, "v": v}, {"a": four}, target_parts={"a": 4})


def test_fused_ffn():
    gate, up = array([1, 2, 3, 4]), array([5, 6, 7, 8])
    one, two = array([1, 2, 3, 4, 5, 6, 7, 8]), array([1, 2, 5, 6, 3, 4, 7, 8])
    check("a -> b, fused_ffn", {"a": one}, {"b": two}, target_parts={"b": 2})
    check("a -> b, fused_ffn", {"a": two}, {"b": one}, parts={"a": 2})
    check("a -> gate, up, fused_ffn", {"a": two}, {"gate": gate, "up": up}, parts={"a": 2})
    check("g^T, u^T -> b, fused_ffn", {"g": gate.T, "u": up.T}, {"b": two}, target_parts={"b": 2})


MASTERED = {"a": A.astype(ml_dtypes.bfloat16), "a.w_0": A + F32(0.125), "a.moment1_0": 10 * A}
SCALAR = {"a.beta1_pow_acc_0": array(0.5)}


def test_states_follow_the_moves_of_their_parameters_without_the_casts():
    check(
        'a^T -> x, dtype="float16"',
        {**MASTERED, **SCALAR},
        {
            "x": A.T.astype(np.float16),
            "x.w_0": A.T + F32(0.125),
            "x.moment1_0": 10 * A.T,
            "x.beta1_pow_acc_0": array(0.5),
        },
    )
    check("a -> x, y, axis=0", {**MASTERED, **SCALAR}, {"y.moment1_0": 10 * A[1:], "y.beta1_pow_acc_0": array(0.5)})


def test_steps_apply_to_master_weights_and_to_no_other_state():
    check("a -> x, scale=2", MASTERED, {"x.w_0": 2 * A + F32(0.25)})
    with pytest.raises(OracleError, match=r"nothing feeds x\.moment1_0"):
        check("a -> x, scale=2", MASTERED, {"x.moment1_0": A})
    check(["a -> x, scale=2", "_ -> x.moment1_0, fill=0"], MASTERED, {"x.moment1_0": 0 * A})


def test_scalars_have_to_be_equal_where_sources_meet():
    source = {"a": A, "b": B, "a.beta1_pow_acc_0": array(0.5), "b.beta1_pow_acc_0": array(0.5)}
    check("a, b -> x, axis=0", source, {"x.beta1_pow_acc_0": array(0.5)})
    with pytest.raises(OracleError, match="scalars differ"):
        check("a, b -> x, axis=0", {**source, "b.beta1_pow_acc_0": array(0.25)}, {"x.beta1_pow_acc_0": array(0.5)})


def test_statements_about_states_alone_go_first():
    source = {"a": A, "b": B, "a.moment1_0": 10 * A, "b.moment1_0": 10 * B, "b.w_0": 3 * B, "a.w_0": 3 * A}
    for texts in (
        ["a -> x", "b.moment1_0 -> x.moment1_0"],
        ["b.moment1_0 -> x.moment1_0", "a -> x"],
        ["a -> x", 'b -> x, states="moment1_0"'],
        ['b -> x, states="moment1_0, velocity_0"', "a -> x"],
        ['a -> x, states="model, w_0"', 'b -> x, states="moment1_0"'],
    ):
        check(texts, source, {"x": A, "x.moment1_0": 10 * B, "x.w_0": 3 * A})
    check('a -> b, states="model"', source, {"b": A, "b.moment1_0": 10 * B})


def test_parsing():
    statements = parse(
        '# a comment -> b\n "a b"^T,c -> "d/e" , f,stack,axis=-1 # another, "one"\n\n x -> y z -> "copy", w'
    )
    assert [[name.pattern for name in each.left] for each in statements] == [["a b", "c"], ["x"], ["z"]]
    assert [name.transposed for name in statements[0].left] == [True, False]
    assert [[name.pattern for name in each.right] for each in statements] == [["d/e", "f"], ["y"], ["copy", "w"]]
    assert statements[0].attributes == (("stack", True), ("axis", -1))
    assert parse('a -> b, sizes="[1, 2]", scale=1e-3')[0].attributes == (("sizes", "[1, 2]"), ("scale", 0.001))
    assert Oracle({"a$b": Source(A)}, {}).run('"a\\$b" -> c')[0].left == ("a$b",)
    assert Oracle({"^T5": Source(A)}, {}).run('"^T5" -> c')[0].transposed == (False,)
