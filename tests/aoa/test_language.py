"""Every sentence of docs/aoa.md and every statement of the in-tree language, on numpy arrays; and in-tree defects."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.aoa import AoaError, compile_program, unused_sources
from paddle_flexckpt.aoa.compile import explain
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.optimizer_states import split_state
from tests.aoa.small import assert_equal, catalog, compiled, numbered, room, run

bf16 = np.dtype("bfloat16")
A = numbered(4, 6)
B = numbered(4, 6, start=100)


def one(text: str, *arrays: np.ndarray, like: np.ndarray | None = None, **options) -> np.ndarray:
    """``out`` of a statement about ``a``, ``b``, ``c``; ``like`` is what the target holds before."""
    source = dict(zip("abc", arrays))
    target = {"out": room(*arrays[0].shape) if like is None else like}
    return run([text], source, target, **options)["out"]


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert_equal({"": got}, {"": expected})


class TestStatements:
    """The first table, row by row."""

    def test_rename(self):
        same(one("a -> out", A), A)

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4)])
    def test_transpose_reverses_all_axes(self, shape):
        array = numbered(*shape)
        same(one("a^T -> out", array, like=room(*shape[::-1])), array.T)

    def test_transpose_on_the_right_is_refused(self):
        with pytest.raises(AoaError, match="cannot be assigned: it is a view"):
            one("a -> out^T", A)

    @pytest.mark.parametrize("axis", [0, 1, -1, -2])
    def test_cut_into_equal_parts(self, axis):
        parts = np.split(A, 2, axis)
        target = {"x": room(*parts[0].shape), "y": room(*parts[0].shape)}
        got = run([f"a -> x, y, axis={axis}"], {"a": A}, target)
        assert_equal(got, {"x": parts[0], "y": parts[1]})

    def test_unequal_parts_need_sizes(self):
        with pytest.raises(AoaError, match="extent 4, which 3 equal parts do not divide"):
            run(["a -> x, y, z, axis=0"], {"a": A}, {n: room(1, 6) for n in "xyz"})

    @pytest.mark.parametrize("sizes", ["[1, 5]", "[1, -1]", "[-1, 5]", "auto"])
    def test_cut_into_sizes(self, sizes):
        got = run([f'a -> x, y, axis=1, sizes="{sizes}"'], {"a": A}, {"x": room(4, 1), "y": room(4, 5)})
        assert_equal(got, {"x": A[:, :1], "y": A[:, 1:]})

    @pytest.mark.parametrize("sizes", ["[1, 4]", "[7, -1]", "[1, 2, 3]", "[-1, -1]", "[-2, 8]", "6"])
    def test_sizes_have_to_fit(self, sizes):
        with pytest.raises(AoaError, match="sizes"):
            run([f'a -> x, y, axis=1, sizes="{sizes}"'], {"a": A}, {"x": room(4, 1), "y": room(4, 5)})

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_join(self, axis):
        expected = np.concatenate([A, B], axis)
        same(one(f"a, b -> out, axis={axis}", A, B, like=room(*expected.shape)), expected)

    def test_join_of_one_tensor_with_itself(self):
        same(one("a, a^T -> out, axis=0", A[:, :4], like=room(8, 4)), np.concatenate([A[:, :4], A[:, :4].T]))

    def test_join_needs_equal_dtypes(self):
        with pytest.raises(AoaError, match="dtype"):
            one("a, b -> out, axis=0", A, B.astype(bf16), like=room(8, 6))

    def test_pairs_are_assigned_at_once(self):
        got = run(["a, b -> b, a"], {"a": A, "b": B}, {"a": room(4, 6), "b": room(4, 6)})
        assert_equal(got, {"a": B, "b": A})

    def test_copy(self):
        got = run(["a -> x, y, z, copy"], {"a": A}, {n: room(4, 6) for n in "xyz"})
        assert_equal(got, {n: A for n in "xyz"})

    @pytest.mark.parametrize("axis", [0, 1, 2, -1])
    def test_stack(self, axis):
        expected = np.stack([A, B], axis)
        same(one(f"a, b -> out, stack, axis={axis}", A, B, like=room(*expected.shape)), expected)

    @pytest.mark.parametrize("axis", [0, -2])
    def test_unstack(self, axis):
        got = run([f"a -> w, x, y, z, unstack, axis={axis}"], {"a": A}, {n: room(6) for n in "wxyz"})
        assert_equal(got, {name: A[i] for i, name in enumerate("wxyz")})

    def test_remove(self):
        mapping = compiled(["a -> _"], {"a": A, "b": B}, {"b": room(4, 6)})
        assert mapping.removed == {"a"}
        assert unused_sources(mapping, ["a", "b", "c"], ["b"]) == ["c"]

    def test_what_is_removed_feeds_no_key_of_that_name(self):
        mapping = compiled(["a -> _"], {"a": A}, {"a": room(4, 6)})
        assert mapping.unfed == {"a"}
        assert "removes" in mapping.provenance["a"]
        with pytest.raises(LookupError):
            run(["a -> _"], {"a": A}, {"a": room(4, 6)})

    def test_add_keeps_what_there_is(self):
        got = run(["_ -> b"], {"a": A, "b": B}, {"a": room(4, 6), "b": room(4, 6)})
        assert_equal(got, {"a": A, "b": room(4, 6)})

    @pytest.mark.parametrize(("fill", "dtype", "value"), [("0", "float32", 0), ("-1.5", "bfloat16", -1.5),
                                                          ("1e-3", "float32", 1e-3), ("3", "int8", 3),
                                                          ('"0.5"', "float64", 0.5)])  # fmt: skip
    def test_fill(self, fill, dtype, value):
        got = run([f"_ -> b, fill={fill}"], {"a": A}, {"b": room(2, 3, dtype=dtype)})
        same(got["b"], np.full((2, 3), value).astype(np.dtype(dtype)))

    def test_sum_and_weights(self):
        same(one("a, b -> out, sum", A, B), A + B)
        f = np.float32
        same(one('a, b -> out, sum, weights="[0.3, -0.7]"', A, B), f(0.3) * A + f(-0.7) * B)

    def test_average(self):
        same(one("a, b, c -> out, average", A, B, A * 3), ((A + B) + A * 3) / np.float32(3))

    def test_lora_merge(self):
        a, b = numbered(4, 2), numbered(2, 6)
        same(one("a, b, c -> out, lora_merge, scale=2.0", A, a, b), A + np.float32(2) * (a @ b))
        same(one("a, b, c -> out, lora_merge", A, a, b), A + a @ b)

    def test_dequant_fp8(self):
        codes = (numbered(4, 6) % 5 - 2).astype(ml_dtypes.float8_e4m3fn)
        scales = numbered(2, 2, start=1)
        expected = codes.astype(np.float32) * scales.repeat(2, 0).repeat(4, 1)[:, :6]
        same(one('a, b -> out, dequant="fp8", block="[2, 4]"', codes, scales, like=room(4, 6)), expected)

    def test_dequant_mxfp4(self):
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        codes = (numbered(2, 3, 4) * 37 % 256).astype(np.uint8)
        scales = np.array([[127, 128, 120], [130, 127, 126]], np.uint8)
        nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(2, 3, 8)
        expected = (table[nibbles] * np.float32(2) ** (scales.astype(np.float32) - 127)[..., None]).reshape(2, 24)
        same(one('a, b -> out, dequant="mxfp4"', codes, scales, like=room(2, 24)), expected)


class TestAttributes:
    """The second table, row by row."""

    @pytest.mark.parametrize(
        ("given", "axes"), [("[2, 0, 1]", (2, 0, 1)), ("[]", (2, 1, 0)), ("[-1, 0, -2]", (2, 0, 1))]
    )
    def test_permute(self, given, axes):
        array = numbered(2, 3, 4)
        expected = array.transpose(axes)
        same(one(f'a -> out, permute="{given}"', array, like=room(*expected.shape)), np.ascontiguousarray(expected))

    @pytest.mark.parametrize("given", ["[0, 0, 1]", "[0, 1]", "[0, 1, 3]"])
    def test_permute_has_to_be_one(self, given):
        with pytest.raises(AoaError, match="permut"):
            one(f'a -> out, permute="{given}"', numbered(2, 3, 4))

    @pytest.mark.parametrize("given", ["[2, 12]", "[2, -1]", "auto", "[-1, 12]"])
    def test_reshape(self, given):
        same(one(f'a -> out, reshape="{given}"', A, like=room(2, 12)), A.reshape(2, 12))

    @pytest.mark.parametrize("given", ["[5, 5]", "[-1, -1]", "[7, -1]", "[10000000000, 1]"])
    def test_reshape_has_to_fit(self, given):
        with pytest.raises(AoaError, match="reshape"):
            one(f'a -> out, reshape="{given}"', A, like=room(2, 12))

    @pytest.mark.parametrize(
        ("given", "index"),
        [
            ("[0:2, 1:3]", np.s_[0:2, 1:3]),
            ("[:, 3]", np.s_[:, 3]),
            ("[-3:-1]", np.s_[-3:-1]),
            ("[1, -1:]", np.s_[1, -1:]),
            ("[:2, :]", np.s_[:2, :]),
        ],
    )
    def test_slice(self, given, index):
        expected = np.ascontiguousarray(A[index])
        same(one(f'a -> out, slice="{given}"', A, like=room(*expected.shape)), expected)

    def test_pad(self):
        got = one('a -> out, pad="[[0, 1], [2, 0]]", fill=9', A, like=room(5, 8))
        same(got, np.pad(A, ((0, 1), (2, 0)), constant_values=9))

    def test_pad_and_growth_need_fill(self):
        for text, shape in (('a -> out, pad="[[0, 1], [0, 0]]"', (5, 6)), ('a -> out, resize="[5, -1]"', (5, 6))):
            with pytest.raises(AoaError, match="fill"):
                one(text, A, like=room(*shape))

    @pytest.mark.parametrize("given", ["[3, 8]", "auto"])
    def test_resize(self, given):
        got = one(f'a -> out, resize="{given}", fill=0', A, like=room(3, 8))
        same(got, np.pad(A[:3], ((0, 0), (0, 2))))

    def test_resize_that_cuts_needs_no_fill(self):
        same(one('a -> out, resize="[2, -1]"', A, like=room(2, 6)), A[:2])

    def test_fill_keep(self):
        expected = room(6, 6)
        expected[:4] = A
        same(one('a -> out, resize="[6, -1]", fill="keep"', A, like=room(6, 6)), expected)

    def test_repeat(self):
        same(one("a -> out, repeat=3, axis=1", A, like=room(4, 18)), np.tile(A, (1, 3)))
        expected = A.reshape(4, 3, 2)[:, :, None].repeat(3, 2).reshape(4, 18)
        same(one("a -> out, repeat=3, axis=1, block=2", A, like=room(4, 18)), expected)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn", "int32", "uint8", "bool"])
    def test_dtype(self, dtype):
        same(one(f'a -> out, dtype="{dtype}"', A, like=room(4, 6, dtype=dtype)), A.astype(np.dtype(dtype)))

    def test_a_cast_rounds_before_the_target_widens(self):
        array = np.array([1.001, 2.003], np.float32)
        same(one('a -> out, dtype="bfloat16"', array, like=room(2)), array.astype(bf16).astype(np.float32))

    def test_source_and_destination_dtype(self):
        for text in ('src_dtype="float32", dst_dtype="bfloat16"', 'dst_dtype="bfloat16", src_dtype="float32"'):
            same(one(f"a -> out, {text}", A, like=room(4, 6, dtype="bfloat16")), A.astype(bf16))
        with pytest.raises(AoaError, match="src_dtype is 'float16', but the value is of float32"):
            one('a -> out, src_dtype="float16", dst_dtype="bfloat16"', A)

    def test_unknown_dtype(self):
        with pytest.raises(AoaError, match="float12"):
            one('a -> out, dtype="float12"', A)

    def test_scale(self):
        same(one("a -> out, scale=0.5", A), A * np.float32(0.5))
        array = np.array([1.0078125, 3.0], bf16)
        same(one("a -> out, scale=0.3", array, like=room(2, dtype="bfloat16")),
             (array.astype(np.float32) * np.float32(0.3)).astype(bf16))  # fmt: skip

    def test_optional(self):
        got = run(["x -> a, optional", "l.$LAYER_ID.x -> l.$LAYER_ID.y, optional"], {"a": A}, {"a": room(4, 6)})
        assert_equal(got, {"a": A})
        got = run(["b -> a, optional"], {"a": A, "b": B}, {"a": room(4, 6)})
        assert_equal(got, {"a": B})

    def test_several_attributes_in_order(self):
        got = one('a -> out, slice="[0:2]", permute="[1, 0]", reshape="[3, 4]", scale=2.0, dtype="bfloat16"', A,
                  like=room(3, 4, dtype="bfloat16"))  # fmt: skip
        same(got, (A[:2].T.reshape(3, 4) * 2).astype(bf16))
        other = one('a -> out, permute="[1, 0]", slice="[0:2]", reshape="[4, 2]"', A, like=room(4, 2))
        same(other, A.T[:2].reshape(4, 2))

    def test_attributes_before_and_after_a_join(self):
        before = one('a, b -> out, slice="[0:2]", axis=0', A, B, like=room(4, 6))
        same(before, np.concatenate([A[:2], B[:2]]))
        after = one('a, b -> out, axis=0, slice="[0:2]"', A, B, like=room(2, 6))
        same(after, A[:2])

    def test_attributes_after_a_cut_act_on_every_right_name(self):
        got = run(['a -> x, y, axis=0, permute="[]"'], {"a": A}, {"x": room(6, 2), "y": room(6, 2)})
        assert_equal(got, {"x": np.ascontiguousarray(A[:2].T), "y": np.ascontiguousarray(A[2:].T)})

    def test_axis_of_a_rename_means_nothing(self):
        same(one("a -> out, axis=7", A), A)

    @pytest.mark.parametrize("text", ["a -> out, num_heads=4", "a -> out, block=4", 'a -> out, weights="[1]"',
                                      "a -> out, fill=1", 'a -> out, src_dtype="float32"'])  # fmt: skip
    def test_attributes_without_their_partner(self, text):
        with pytest.raises(AoaError, match="means nothing here"):
            one(text, A)


class TestNames:
    def test_same_name_needs_no_statement(self):
        assert_equal(run([], {"a": A, "b": B}, {"a": room(4, 6)}), {"a": A})

    def test_the_last_assignment_wins(self):
        same(one("a -> out b -> out", A, B), B)

    def test_statements_run_in_order_and_do_not_swap(self):
        got = run(["a -> b", "b -> a"], {"a": A, "b": B}, {"a": room(4, 6), "b": room(4, 6)})
        assert_equal(got, {"a": A, "b": A})

    @pytest.mark.parametrize("between", [" ", "\n", '  # comment, with -> and "quotes\n', "\r\n\t"])
    def test_several_statements_in_one_text(self, between):
        got = run([f"a -> x{between}b -> y, dtype='float64'{between}x -> z"], {"a": A, "b": B},
                  {"x": room(4, 6), "y": room(4, 6, dtype="float64"), "z": room(4, 6)})  # fmt: skip
        assert_equal(got, {"x": A, "y": B.astype(np.float64), "z": A})

    def test_comments(self):
        assert_equal(run(["# nothing", "a -> x # why", "#"], {"a": A}, {"x": room(4, 6)}), {"x": A})

    @pytest.mark.parametrize(
        "name", ["0.weight", "decoder/w-0", "a b", "copy", "axis", "x^T", "层", "a->b", "#", "fused_ffn"]
    )
    def test_quoted_names(self, name):
        same(
            one(f'"{name}" -> out', A)
            if name == "a"
            else run([f'"{name}" -> out'], {name: A}, {"out": room(4, 6)})["out"],
            A,
        )
        same(run([f"a -> '{name}'"], {"a": A}, {name: room(4, 6)})[name], A)
        got = run([f"'{name}'^T -> out"], {name: A}, {"out": room(6, 4)})["out"]
        same(got, np.ascontiguousarray(A.T))

    def test_a_tag_ends_the_right_names_and_a_quoted_one_does_not(self):
        got = run(["a -> copy, b, copy"], {"a": A}, {"copy": room(4, 6), "b": room(4, 6)})
        assert_equal(got, {"copy": A, "b": A})
        got = run(['a -> b, "copy", copy'], {"a": A}, {"copy": room(4, 6), "b": room(4, 6)})
        assert_equal(got, {"copy": A, "b": A})

    @pytest.mark.parametrize("text", [r"l.\$LAYER_ID.w -> m.\$LAYER_ID.w", "l.$LAYER_ID.w -> m.$LAYER_ID.w"])
    def test_an_escaped_dollar_is_a_dollar(self, text):
        source = {f"l.{i}.w": A + i for i in (0, 3)}
        assert_equal(run([text], source, {f"m.{i}.w": room(4, 6) for i in (0, 3)}), {f"m.{i}.w": A + i for i in (0, 3)})

    def test_an_escaped_dollar_beside_a_star(self):
        source = {"l.0.e.1": A, "l.0.e.0": B}
        got = run([r"l.\$LAYER_ID.e.* -> m.\$LAYER_ID, axis=0"], source, {"m.0": room(8, 6)})
        assert_equal(got, {"m.0": np.concatenate([B, A])})

    def test_configurations(self, tmp_path):
        pytest.importorskip("yaml")
        texts = ["a -> b"]
        config = {"aoa_statements": texts, "enable_traceback": True, "aoa_config_reverse": False}
        (tmp_path / "aoa.json").write_text(json.dumps(config))
        (tmp_path / "aoa.yaml").write_text("aoa_statements:\n  - a -> b\n")
        (tmp_path / "outer.yaml").write_text("aoa_config:\n  aoa_statements:\n    - a -> b\n")
        (tmp_path / "list.yaml").write_text("aoa_config:\n  - a -> b\n")
        files = [tmp_path / name for name in ("aoa.json", "aoa.yaml", "outer.yaml", "list.yaml")]
        for given in (config, {"aoa_config": config}, json.dumps({"aoa_config": config}), str(files[0]), *files):
            assert_equal(run((), {"a": A}, {"b": room(4, 6)}, config=given), {"b": A})
        with pytest.raises(AoaError, match="unknown keys"):
            run((), {"a": A}, {"b": room(4, 6)}, config={**config, "statements": []})
        with pytest.raises(AoaError, match=r"unknown keys \['aoa_config'\]"):
            run((), {"a": A}, {"b": room(4, 6)}, config={**config, "aoa_config": config})

    def test_without_a_destination_the_outputs_are_derived(self):
        mapping = compiled(["a -> t", "t^T -> x", "b -> _"], {"a": A, "b": B, "c": A, "a.moment1_0": A}, None)
        assert mapping.outputs == ("c", "x", "x.moment1_0")
        assert mapping.tensors["x"].shape == mapping.tensors["x.moment1_0"].shape == (6, 4)

    def test_outputs_that_a_statement_asks_for_and_another_reads(self):
        """``a -> a`` says that the source's a stays; ``a^T -> a`` makes a variable, which others use up."""
        source = {"a": A, "b": B, "a.moment1_0": A}
        kept = compiled(["a -> a", "a^T -> x"], source, None)
        assert kept.outputs == ("a", "a.moment1_0", "b", "x", "x.moment1_0")
        assert compiled(["a^T -> x", "a -> a"], source, None).outputs == kept.outputs
        assert compiled(["a -> t", "t -> a", "a -> x"], source, None).outputs == kept.outputs
        assert compiled(["a^T -> a", "a -> x"], source, None).outputs == ("b", "x", "x.moment1_0")
        assert compiled(["b -> a", "a -> x"], source, None).outputs == ("x",)
        assert compiled(["a -> a", "a -> x", "a -> _"], source, None).outputs == ("b", "x", "x.moment1_0")


def family(pattern: str, *ids: object, start: int = 0) -> dict[str, np.ndarray]:
    return {pattern.format(*(i if isinstance(i, tuple) else (i,))): A + start + 100 * n for n, i in enumerate(ids)}


def rooms(*names: str, shape: tuple[int, ...] = (4, 6)) -> dict[str, np.ndarray]:
    return {name: room(*shape) for name in names}


class TestPatterns:
    """The table of placeholders, row by row."""

    def test_any_upper_case_placeholder(self):
        source = family("s.{}.h.{}", (1, 2), (1, 10), (7, 0))
        got = run(["s.$STAGE.h.$H -> d.$H.$STAGE"], source, rooms("d.2.1", "d.10.1", "d.0.7"))
        assert_equal(got, {"d.2.1": source["s.1.h.2"], "d.10.1": source["s.1.h.10"], "d.0.7": source["s.7.h.0"]})

    @pytest.mark.parametrize(
        ("right", "number"),
        [("${L+1}", 7), ("${L-1}", 5), ("${L*2+1}", 13), ("${L//4}", 1), ("${L%4}", 2), ("${ L + 1 }", 7)],
    )
    def test_arithmetic(self, right, number):
        assert_equal(run([f"a.$L -> b.{right}"], {"a.6": A}, rooms(f"b.{number}")), {f"b.{number}": A})

    def test_arithmetic_on_the_left(self):
        source = family("a.{}", 0, 1, 2, 5)
        got = run(["a.${L*2+1} -> b.$L"], source, rooms("b.0", "b.2"))
        assert_equal(got, {"b.0": source["a.1"], "b.2": source["a.5"]})

    def test_negative_numbers_are_no_names(self):
        with pytest.raises(AoaError, match="negative number"):
            run(["a.$L -> b.${L-1}"], {"a.0": A}, rooms("b.0"))

    def test_layer_id_offset(self):
        source = family("a.{}", 1, 2, 10)
        got = run(["a.$LAYER_ID_OFFSET -> b.$LAYER_ID_OFFSET"], source, rooms("b.0", "b.1", "b.9"))
        assert_equal(got, {"b.0": source["a.1"], "b.1": source["a.2"], "b.9": source["a.10"]})

    def test_a_star_sorts_by_number(self):
        source = family("e.{}.w", 10, 9, 2)
        got = run(["e.*.w -> out, axis=0"], source, rooms("out", shape=(12, 6)))
        same(got["out"], np.concatenate([source["e.2.w"], source["e.9.w"], source["e.10.w"]]))
        got = run(["a -> e.*.w, axis=0"], {"a": np.concatenate([A, B])}, rooms("e.10.w", "e.9.w"))
        assert_equal(got, {"e.9.w": A, "e.10.w": B})

    def test_a_star_on_both_sides(self):
        source = family("e.{}.w", 1, 2)
        got = run(["e.*.w -> f.*.w"], source, rooms("f.10.w", "f.9.w"))
        assert_equal(got, {"f.9.w": source["e.1.w"], "f.10.w": source["e.2.w"]})

    def test_a_star_in_every_layer(self):
        source = family("l.{}.e.{}", (0, 0), (0, 1), (3, 2), (3, 10))
        got = run(
            ["l.$LAYER_ID.e.* -> l.$LAYER_ID.all, stack, axis=0"], source, rooms("l.0.all", "l.3.all", shape=(2, 4, 6))
        )
        assert_equal(got, {"l.0.all": np.stack([source["l.0.e.0"], source["l.0.e.1"]]),
                           "l.3.all": np.stack([source["l.3.e.2"], source["l.3.e.10"]])})  # fmt: skip

    def test_arrays(self):
        got = run(["a -> q[1:3], axis=0"], {"a": A}, rooms("q_1", "q_2", shape=(2, 6)))
        assert_equal(got, {"q_1": A[:2], "q_2": A[2:]})
        got = run(["q[1:3] -> a, axis=0"], {"q_1": A[:2], "q_2": A[2:]}, rooms("a"))
        assert_equal(got, {"a": A})

    def test_further_left_names_bind_what_is_open(self):
        source = {"l.0.s": A, "l.1.s": A + 1, **family("l.{}.e.{}", (0, 0), (1, 4), start=1000)}
        got = run(["l.$L.s, l.$L.e.$E -> o.$L.$E, axis=0"], source, rooms("o.0.0", "o.1.4", shape=(8, 6)))
        assert_equal(got, {"o.0.0": np.concatenate([A, source["l.0.e.0"]]),
                           "o.1.4": np.concatenate([A + 1, source["l.1.e.4"]])})  # fmt: skip

    def test_every_right_name_has_all_placeholders(self):
        with pytest.raises(AoaError, match=r"'out' lacks \$L: it would be assigned once for every id"):
            run(["a.$L -> out"], {"a.0": A}, rooms("out"))


class TestStates:
    def states(self, name: str, shape=(4, 6), start: int = 0) -> dict[str, np.ndarray]:
        return {
            name: numbered(*shape, dtype="bfloat16", start=start),
            f"{name}.w_0": numbered(*shape, start=start) + np.float32(0.123),
            f"{name}.moment1_0": numbered(*shape, start=start + 7),
            f"{name}.moment2_0": numbered(*shape, start=start + 9) ** 2,
            f"{name}.beta1_pow_acc_0": np.array([0.9], np.float32),
            f"{name}.beta2_pow_acc_0": np.array([0.99], np.float32),
        }

    def test_they_follow_every_move(self):
        source = {**self.states("a"), **self.states("b", start=50)}
        target = {k.replace("a", "c", 1): room(12, 4, dtype=v.dtype.name) for k, v in self.states("a").items()}
        target.update({k: room(1) for k in target if "pow" in k})
        target = {k.replace("c.betc", "c.beta"): v for k, v in target.items()}
        got = run(["a^T, b^T -> c, axis=0"], source, target)
        expected = {}
        for key in target:
            a, b = source[key.replace("c", "a", 1)], source[key.replace("c", "b", 1)]
            expected[key] = a if "pow" in key else np.concatenate([a.T, b.T])
        assert_equal(got, expected)

    def test_an_element_wise_step_reaches_the_master_weight_alone(self):
        source = self.states("a")
        target = {"b": room(4, 6, dtype="bfloat16"), "b.w_0": room(4, 6), "b.moment1_0": room(4, 6)}
        mapping = compiled(["a -> b, scale=0.5"], source, target)
        assert mapping.unfed == {"b.moment1_0"}
        assert "computed element by element" in mapping.provenance["b.moment1_0"]
        texts = ["a -> b, scale=0.5", '_ -> b, fill=0, states="moment1_0"']
        got = run(texts, source, target)
        half = np.float32(0.5)
        assert_equal(got, {"b": (source["a"].astype(np.float32) * half).astype(bf16), "b.w_0": source["a.w_0"] * half,
                           "b.moment1_0": np.zeros((4, 6), np.float32)})  # fmt: skip

    @pytest.mark.parametrize("first", [True, False])
    def test_a_statement_about_states_goes_first_wherever_it_stands(self, first):
        source = {**self.states("a"), **self.states("b", start=50)}
        texts = ["a -> c", 'b -> c, states="moment1_0, moment2_0"']
        got = run(
            texts if first else texts[::-1], source, {f"c.{s}": room(4, 6) for s in ("w_0", "moment1_0", "moment2_0")}
        )
        assert_equal(got, {"c.w_0": source["a.w_0"], "c.moment1_0": source["b.moment1_0"],
                           "c.moment2_0": source["b.moment2_0"]})  # fmt: skip

    def test_keys_of_states_may_be_named(self):
        source = {**self.states("a"), **self.states("b", start=50)}
        got = run(["a -> c", "b.moment1_0 -> c.moment1_0"], source, rooms("c.w_0", "c.moment1_0"))
        assert_equal(got, {"c.w_0": source["a.w_0"], "c.moment1_0": source["b.moment1_0"]})

    def test_a_statement_about_the_model_alone(self):
        source = self.states("a")
        target = {"a": room(4, 6, dtype="bfloat16"), "a.w_0": room(4, 6)}
        got = run(['a -> a, scale=2.0, states="model"'], source, target)
        assert_equal(got, {"a": (source["a"].astype(np.float32) * 2).astype(bf16), "a.w_0": source["a.w_0"]})

    def test_scalars_that_differ_are_an_error(self):
        source = {**self.states("a"), **self.states("b")}
        source["b.beta1_pow_acc_0"] = np.array([0.5], np.float32)
        with pytest.raises(CheckpointError, match="go to one target and have to be equal"):
            run(["a, b -> c, axis=0"], source, {"c.beta1_pow_acc_0": room(1)})

    def test_scalars_of_parts(self):
        source = self.states("a")
        got = run(["a -> x, y, axis=0"], source, {f"{n}.beta1_pow_acc_0": room(1) for n in "xy"})
        assert_equal(got, {f"{n}.beta1_pow_acc_0": source["a.beta1_pow_acc_0"] for n in "xy"})

    def test_new_elements_of_moments_are_zero(self):
        source = self.states("a")
        got = run(['a -> b, resize="[6, -1]", fill=5'], source, rooms("b.w_0", "b.moment1_0", shape=(6, 6)))
        grown = np.full((2, 6), 5, np.float32)
        assert_equal(got, {"b.w_0": np.concatenate([source["a.w_0"], grown]),
                           "b.moment1_0": np.concatenate([source["a.moment1_0"], grown * 0])})  # fmt: skip

    def test_a_checkpoint_of_an_optimizer_alone(self):
        states = {k: v for k, v in self.states("l.0.a").items() if k != "l.0.a"}
        target = {k.replace("l.0.a", "m.0.b"): room(*v.T.shape, dtype=v.dtype.name) for k, v in states.items()}
        got = run(["l.$LAYER_ID.a^T -> m.$LAYER_ID.b"], states, target)
        assert_equal(got, {k.replace("l.0.a", "m.0.b"): np.ascontiguousarray(v.T) for k, v in states.items()})

    def test_tied_targets_have_the_states_of_their_source(self):
        source = self.states("e")
        target = {"emb.moment1_0": room(4, 6), "head.moment1_0": room(6, 4)}
        got = run(["e -> emb", "e^T -> head"], source, target)
        assert_equal(
            got,
            {"emb.moment1_0": source["e.moment1_0"], "head.moment1_0": np.ascontiguousarray(source["e.moment1_0"].T)},
        )

    def test_a_parameter_that_is_named_like_a_master_weight(self):
        source = {"block.w_0": A, "block.w_0.moment1_0": B}
        target = {"out.w_0": room(6, 4), "out.w_0.moment1_0": room(6, 4)}
        got = run(["block.w_0^T -> out.w_0"], source, target)
        assert_equal(got, {"out.w_0": np.ascontiguousarray(A.T), "out.w_0.moment1_0": np.ascontiguousarray(B.T)})

    def test_a_named_key_of_a_state_is_the_key_whatever_became_of_the_parameter(self):
        """A variable that was assigned, or else a key of the source: so the state is not moved twice."""
        source = {**self.states("a"), **self.states("b", start=50)}
        texts = ["b^T -> a", "a.moment1_0^T -> c.moment1_0", "a^T -> d", "c.moment1_0^T -> e.moment1_0"]
        target = {
            "a.moment1_0": room(6, 4),
            "c.moment1_0": room(6, 4),
            "d.moment1_0": room(4, 6),
            "e.moment1_0": room(4, 6),
        }
        moments = {n: source[f"{n}.moment1_0"] for n in "ab"}
        expected = {"a.moment1_0": moments["b"].T, "c.moment1_0": moments["a"].T, "d.moment1_0": moments["b"],
                    "e.moment1_0": moments["a"]}  # fmt: skip
        assert_equal(run(texts, source, target), {key: np.ascontiguousarray(x) for key, x in expected.items()})

    @pytest.mark.parametrize("text", ["a.w_0 -> b", "a -> b.w_0", "a.w_0 -> b.moment1_0", "a.w_0, a -> b.w_0, axis=0"])
    def test_a_statement_is_not_about_a_parameter_and_a_state_at_once(self, text):
        source = self.states("a")
        with pytest.raises(AoaError, match="w_0' is a state, and the other names are no states of that kind"):
            run([text], source, {"b": room(4, 6), "b.w_0": room(4, 6), "b.moment1_0": room(4, 6)})

    @pytest.mark.parametrize("raw", ["l_0.w_0_moment1_0", "opt.l_0.w_0.dist_moment1_1", "masters.l_0.w_0", "l_0.w_0"])
    @pytest.mark.parametrize("state", ["moment1_0", "w_0"])
    def test_a_rename_makes_a_state_of_a_key_that_is_none_and_back(self, raw, state):
        got = run([f"{raw} -> a.{state}"], {"a": A, raw: B}, {"a": room(4, 6), f"a.{state}": room(4, 6)})
        assert_equal(got, {"a": A, f"a.{state}": B})
        got = run([f"a.{state} -> {raw}"], {"a": A, f"a.{state}": B}, {"a": room(4, 6), raw: room(4, 6)})
        assert_equal(got, {"a": A, raw: B})
        got = run([f"{raw} -> b.{state}", f"b.{state} -> {raw}x"], {"a": A, raw: B}, {f"{raw}x": room(4, 6)})
        assert_equal(got, {f"{raw}x": B})
        # What the parameter's own statement says of its states comes second.
        got = run(["a -> b", f"{raw} -> b.{state}"], {"a": A, raw: B, "a.velocity_0": A},
                  {"b": room(4, 6), f"b.{state}": room(4, 6), "b.velocity_0": room(4, 6)})  # fmt: skip
        assert_equal(got, {"b": A, f"b.{state}": B, "b.velocity_0": A})

    @pytest.mark.parametrize("text", ["x^T -> a.w_0", "x -> a.w_0, scale=2", "x, y -> a.w_0, axis=0", "x -> a.w_0, y"])
    def test_more_than_a_rename_is_not_about_a_state_and_what_is_none(self, text):
        with pytest.raises(AoaError, match="w_0' is a state, and the other names are no states of that kind"):
            run([text], {"a": A, "x": A, "y": B}, {"a.w_0": room(4, 6), "y": room(4, 6)})

    def test_keys_of_unknown_states_may_be_named(self):
        got = run(["a.my_3^T -> b.my_3"], {"a": A, "b": A, "a.my_3": B}, {"b": room(4, 6), "b.my_3": room(6, 4)})
        assert_equal(got, {"b": A, "b.my_3": np.ascontiguousarray(B.T)})

    @pytest.mark.parametrize("right", ["out.w_0", "x.weight"])
    def test_a_parameter_named_like_a_master_weight_under_any_name(self, right):
        source = {"l.0.w_0": A, "l.0.w_0.moment1_0": B}
        got = run(
            [f"l.$L.w_0 -> m.$L.{right}"], source, {f"m.0.{right}": room(4, 6), f"m.0.{right}.moment1_0": room(4, 6)}
        )
        assert_equal(got, {f"m.0.{right}": A, f"m.0.{right}.moment1_0": B})

    def test_a_key_is_not_taken_for_a_state_of_nothing(self):
        got = run(["a.conv_0 -> b.conv_0"], {"a.conv_0": A}, rooms("b.conv_0"))
        assert_equal(got, {"b.conv_0": A})


class TestFused:
    def qkv(self, heads: int, groups: int, width: int = 2) -> tuple[np.ndarray, ...]:
        return tuple(numbered(3, count * width, start=1000 * i) for i, count in enumerate((heads, groups, groups)))

    def grouped(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, groups: int) -> np.ndarray:
        return np.concatenate([x for each in zip(*(np.split(y, groups, 1) for y in (q, k, v))) for x in each], 1)

    @pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2), (4, 1)])
    def test_qkv(self, heads, groups):
        q, k, v = self.qkv(heads, groups)
        fused = self.grouped(q, k, v, groups)
        tail = f"fused_qkv, num_heads={heads}, num_key_value_groups={groups}"
        target = {n: room(*x.shape) for n, x in zip("qkv", (q, k, v))}
        assert_equal(run([f"a -> q, k, v, {tail}"], {"a": fused}, target), {"q": q, "k": k, "v": v})
        got = run([f"q, k, v -> a, {tail}"], {"q": q, "k": k, "v": v}, {"a": room(*fused.shape)},
                  target_cuts={"a": (1, 2 if fused.shape[1] % 2 == 0 else 1)})  # fmt: skip
        assert_equal(got, {"a": fused})

    @pytest.mark.parametrize("parts", [(1, 2), (2, 1), (2, 4), (4, 2), (4, 4)])
    def test_old_qkv(self, parts):
        q, k, v = self.qkv(8, 4)
        source, target = (self.grouped(q, k, v, n) for n in parts)
        tail = "fused_qkv_old, num_heads=8, num_key_value_groups=4"
        cuts = {"source_cuts": {"a": (1, parts[0])}, "target_cuts": {"b": (1, parts[1])}}
        split = {n: room(*x.shape) for n, x in zip("qkv", (q, k, v))}
        assert_equal(run([f"a -> b, {tail}"], {"a": source}, {"b": room(*target.shape)}, **cuts), {"b": target})
        assert_equal(run([f"a -> q, k, v, {tail}"], {"a": source}, split, **cuts), {"q": q, "k": k, "v": v})
        got = run([f"q, k, v -> b, {tail}"], {"q": q, "k": k, "v": v}, {"b": room(*target.shape)}, **cuts)
        assert_equal(got, {"b": target})

    @pytest.mark.parametrize("parts", [(1, 2), (2, 3), (6, 4)])
    @pytest.mark.parametrize("axis", [0, 1])
    def test_ffn(self, parts, axis):
        gate, up = numbered(24, 24), numbered(24, 24, start=1000)

        def fused(n: int) -> np.ndarray:
            return np.concatenate(
                [x for each in zip(np.split(gate, n, axis), np.split(up, n, axis)) for x in each], axis
            )

        cuts = {"source_cuts": {"a": (axis, parts[0])}, "target_cuts": {"b": (axis, parts[1])}}
        like = room(*fused(1).shape)
        tail = "fused_ffn" if axis == 1 else "fused_ffn, axis=0"
        assert_equal(run([f"a -> b, {tail}"], {"a": fused(parts[0])}, {"b": like}, **cuts), {"b": fused(parts[1])})
        got = run([f"a -> g, u, {tail}"], {"a": fused(parts[0])}, rooms("g", "u", shape=(24, 24)), **cuts)
        assert_equal(got, {"g": gate, "u": up})
        got = run([f"g, u -> b, {tail}"], {"g": gate, "u": up}, {"b": like}, **cuts)
        assert_equal(got, {"b": fused(parts[1])})

    def test_bias_needs_axis_0(self):
        bias = numbered(8)
        cuts = {"target_cuts": {"b": (0, 2)}}
        with pytest.raises(AoaError, match="axis 1 is out of range.*Remedy .FC603.: give axis="):
            run(["a -> b, fused_ffn"], {"a": bias}, {"b": room(8)}, **cuts)
        got = run(["a -> b, fused_ffn, axis=0"], {"a": bias}, {"b": room(8)}, **cuts)
        same(got["b"], bias[[0, 1, 4, 5, 2, 3, 6, 7]])


class TestDefectsOfTheInTreeEngine:
    """Each of these goes wrong in Paddle 3.3.1, silently (a) or with an unrelated error (b)."""

    def test_a3_one_source_for_several_targets(self):
        target = {"emb": room(4, 6), "head": room(6, 4), "half": room(4, 6, dtype="bfloat16"), "row": room(2, 6)}
        texts = ["e -> emb", "e^T -> head", 'e -> half, dtype="bfloat16"', 'e -> row, slice="[0:2]"']
        expected = {"emb": A, "head": np.ascontiguousarray(A.T), "half": A.astype(bf16), "row": A[:2]}
        assert_equal(run(texts, {"e": A}, target), expected)

    def test_a4_casts_are_not_applied_to_states(self):
        master = numbered(4, 6) + np.float32(0.123)
        source = {"a": A.astype(bf16), "a.w_0": master, "a.moment1_0": master * 3}
        target = {"b": room(4, 6, dtype="float16"), "b.w_0": room(4, 6), "b.moment1_0": room(4, 6)}
        got = run(['a -> b, dtype="float16"'], source, target)
        assert_equal(got, {"b": A.astype(np.float16), "b.w_0": master, "b.moment1_0": master * 3})

    def test_a7_joins_of_other_extents(self):
        with pytest.raises(AoaError, match="join along axis 0 takes values with all other extents equal"):
            one("a, b -> out, axis=0", numbered(2, 4), numbered(2, 2), like=room(4, 4))

    def test_a7_renames_to_another_shape(self):
        with pytest.raises(AoaError, match=r"gives 'out' the shape \[4, 6\]; expected \[6, 4\]"):
            one("a -> out", A, like=room(6, 4))

    def test_a8_parts_along_other_axes_are_not_counted(self):
        gate_up = numbered(4, 8)
        got = run(["a -> a, fused_ffn"], {"a": gate_up}, {"a": room(4, 8)}, target_cuts={"a": (0, 4)})
        assert_equal(got, {"a": gate_up})

    @pytest.mark.parametrize("parts", [1, 2, 4])
    def test_a9_the_reverse_of_fused_ffn_knows_the_parts(self, parts):
        gate, up = numbered(3, 8), numbered(3, 8, start=100)
        fused = np.concatenate([x for each in zip(np.split(gate, parts, 1), np.split(up, parts, 1)) for x in each], 1)
        config = {"aoa_statements": ["gate, up -> fused, fused_ffn"], "aoa_config_reverse": True}
        got = run((), {"fused": fused}, {"gate": room(3, 8), "up": room(3, 8)}, {"fused": (1, parts)}, config=config)
        assert_equal(got, {"gate": gate, "up": up})

    def test_a9_the_reverse_of_grouped_attention(self):
        q, k, v = numbered(3, 16), numbered(3, 4, start=100), numbered(3, 4, start=200)
        fused = TestFused().grouped(q, k, v, 2)
        text = "q, k, v -> qkv, fused_qkv, num_heads=8, num_key_value_groups=2"
        config = {"aoa_statements": [text], "aoa_config_reverse": True}
        got = run((), {"qkv": fused}, {"q": room(3, 16), "k": room(3, 4), "v": room(3, 4)}, config=config)
        assert_equal(got, {"q": q, "k": k, "v": v})

    def test_a10_temporaries_do_not_hide_parameters(self):
        q, k, v = numbered(3, 8), numbered(3, 8, start=100), numbered(3, 8, start=200)
        real = {"q1": A, "k0": B, "a_transpose_tmp": A + 3, "q.k.v.tmp": B + 3, "fused_qkv_old_tmp.Q_0": A + 5}
        source = {"q": q, "k": k, "v": v, "a": A, **real}
        texts = ["q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=4", "a^T -> t",
                 "q, k, v -> old, fused_qkv_old, num_heads=4, num_key_value_groups=4"]  # fmt: skip
        target = {"qkv": room(3, 24), "old": room(3, 24), "t": room(6, 4), **{key: room(4, 6) for key in real}}
        got = run(texts, source, target)
        expected = {
            "qkv": TestFused().grouped(q, k, v, 4),
            "old": np.concatenate([q, k, v], 1),
            "t": np.ascontiguousarray(A.T),
        }
        assert_equal(got, {**expected, **real})

    def test_a20_a_pattern_without_a_match_is_an_error(self):
        with pytest.raises(AoaError, match=r"no source key or variable matches 'layer.\$LAYER_ID.w'.*layers.0.w"):
            run(["layer.$LAYER_ID.w -> l.$LAYER_ID.w"], {"layers.0.w": A}, rooms("layers.0.w"))

    def test_a21_a_cast_to_bfloat16_for_a_float16_target(self):
        array = np.array([1.001, 300.7], np.float32)
        got = one('a -> out, dtype="bfloat16"', array, like=room(2, dtype="float16"))
        same(got, array.astype(bf16).astype(np.float16))

    def test_b7_a_cut_with_states_of_another_dtype(self):
        source = {"a": A.astype(bf16), "a.moment1_0": B, "a.w_0": A}
        target = {
            f"{n}{s}": room(2, 6, dtype="float32" if s else "bfloat16")
            for n in "xy"
            for s in ("", ".moment1_0", ".w_0")
        }
        got = run(["a -> x, y, axis=0"], source, target)
        expected = {f"{n}{s}": source[f"a{s}"][rows] for n, rows in (("x", np.s_[:2]), ("y", np.s_[2:]))
                    for s in ("", ".moment1_0", ".w_0")}  # fmt: skip
        assert_equal(got, expected)

    def test_b8_an_added_parameter_with_states(self):
        target = {"n": room(4, 6), "n.moment1_0": room(4, 6), "n.beta1_pow_acc_0": room(1)}
        assert_equal(run(["_ -> n"], {"a": A}, target), target)
        got = run(["_ -> n, fill=0"], {"a": A}, {"n": room(4, 6), "n.moment1_0": room(4, 6)})
        assert_equal(got, {"n": A * 0, "n.moment1_0": A * 0})

    def test_b9_remove_and_add_in_every_layer(self):
        source = {**family("l.{}.old", 0, 1), **family("l.{}.w", 0, 1, start=1000)}
        texts = ["l.$LAYER_ID.old -> _", "_ -> l.$LAYER_ID.new", "_ -> l.$LAYER_ID.zero, fill=0"]
        target = rooms(*(f"l.{i}.{n}" for i in (0, 1) for n in ("w", "new", "zero")))
        got = run(texts, source, target)
        expected = {
            f"l.{i}.{n}": x
            for i in (0, 1)
            for n, x in (("w", source[f"l.{i}.w"]), ("new", room(4, 6)), ("zero", A * 0))
        }
        assert_equal(got, expected)
        assert compiled(texts, source, target).removed == {"l.0.old", "l.1.old"}

    def test_b10_ragged_experts(self):
        source = family("l.{}.e.{}.w", (0, 0), (1, 0), (1, 1), (4, 7))
        target = {key.replace("l", "m"): room(6, 4) for key in source}
        got = run(["l.$LAYER_ID.e.$EXPERT_ID.w^T -> m.$LAYER_ID.e.$EXPERT_ID.w"], source, target)
        assert_equal(got, {k.replace("l", "m"): np.ascontiguousarray(v.T) for k, v in source.items()})

    def test_b11_a_placeholder_twice_in_one_name(self):
        source = {"l.1.b.1": A, "l.1.b.2": B, "l.10.b.10": A + 5}
        got = run(["l.$LAYER_ID.b.$LAYER_ID -> m.$LAYER_ID"], source, rooms("m.1", "m.10"))
        assert_equal(got, {"m.1": A, "m.10": A + 5})

    def test_b12_two_stars(self):
        source = family("l.{}.e.{}", (0, 1), (0, 10), (1, 2), (10, 0))
        got = run(["l.*.e.* -> out, stack, axis=0"], source, rooms("out", shape=(4, 4, 6)))
        same(got["out"], np.stack(list(source.values())))

    def test_b13_an_unmatched_star(self):
        for text in ("e.*.v -> out, axis=0", "a -> e.*.v, axis=0"):
            with pytest.raises(AoaError, match=r"matches 'e\.\*\.v'"):
                run([text], {"e.0.w": A, "a": B}, rooms("out"))

    def test_b15_fewer_key_value_heads_than_parts(self):
        with pytest.raises(AoaError, match="2 K heads cannot be cut into 4 equal tensor-parallel parts"):
            run(["a -> a, fused_qkv_old, num_heads=8, num_key_value_groups=2"], {"a": numbered(4, 24)},
                {"a": room(4, 24)}, target_cuts={"a": (1, 4)})  # fmt: skip

    def test_b20_whole_tensors_are_targets_too(self):
        assert_equal(run(["a -> renamed"], {"a": A}, rooms("renamed"), source_cuts={"a": (0, 2)}), {"renamed": A})

    @pytest.mark.parametrize("state", ["moment2_max_0", "velocity_0", "my_state_3"])
    def test_b21_any_accumulator_follows(self, state):
        target = {"b": room(6, 4), f"b.{state}": room(6, 4)}
        got = run(["a^T -> b"], {"a": A, f"a.{state}": B}, target)
        assert_equal(got, {"b": np.ascontiguousarray(A.T), f"b.{state}": np.ascontiguousarray(B.T)})

    def test_b22_a_master_weight_from_the_parameter(self):
        source, target = {"a": A.astype(bf16)}, {"b": room(6, 4, dtype="bfloat16"), "b.w_0": room(6, 4)}
        mapping = compiled(["a^T -> b"], source, target)
        assert mapping.unfed == {"b.w_0"}
        assert "the source has no key 'a.w_0'" in mapping.provenance["b.w_0"]
        got = run(["a^T -> b"], source, target, master_weights="convert")
        assert_equal(got, {"b": np.ascontiguousarray(A.T.astype(bf16)), "b.w_0": np.ascontiguousarray(A.T)})
        assert compiled(["a^T -> b"], source, target, master_weights="convert").masters == {"b.w_0": "a"}

    def test_intermediate_variables_in_every_layer(self):
        source = family("l.{}.w", 0, 1)
        texts = [
            "l.$LAYER_ID.w -> t.$LAYER_ID.x, t.$LAYER_ID.y, axis=0",
            "t.$LAYER_ID.y, t.$LAYER_ID.x -> m.$LAYER_ID.w, axis=0",
        ]
        got = run(texts, source, rooms("m.0.w", "m.1.w"))
        assert_equal(got, {f"m.{i}.w": np.roll(source[f"l.{i}.w"], 2, 0) for i in (0, 1)})


def test_explain_names_the_statement_and_the_sources():
    source, target = {"l.3.w": A, "x": B}, {"m.3.w": room(6, 4), "y": room(4, 6)}
    text = explain({"aoa_statements": ["l.$L.w^T -> m.$L.w", "x -> _"]}, catalog(source), catalog(target))
    assert "m.3.w  float32 [6, 4]" in text
    assert "AOA statement 1: l.3.w^T -> m.3.w" in text
    assert "l.3.w [0:4, 0:6], axes (1, 0)" in text
    assert "nothing feeds y" in text


def test_nothing_is_read_twice_for_what_is_moved_once():
    """A transpose of a shard of the target takes a box of the source, not the whole."""
    mapping = compile_program(
        {"aoa_statements": ["a^T -> b"]}, catalog({"a": A}), catalog({"b": room(6, 4)}, {"b": (0, 3)})
    )
    assert len(mapping.maps) == 1
    assert not mapping.nodes
    assert not mapping.regions


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        (["linear_0.w_0", "linear_0.b_0"], "linear_0.w_0", ("linear_0.w_0", "")),
        (["linear_0.w_0", "linear_0.w_0.w_0"], "linear_0.w_0.w_0", ("linear_0.w_0", "w_0")),
        (["linear_0.w_0", "linear_0.moment1_0"], "linear_0.w_0", ("linear_0", "w_0")),
        (["linear_0", "linear_0.w_0"], "linear_0.w_0", ("linear_0", "w_0")),
        (["fc.weight.w_0"], "fc.weight.w_0", ("fc.weight", "w_0")),
        (["m.linear_0.w_0"], "m.linear_0.w_0", ("m.linear_0.w_0", "")),
    ],
)
def test_names_that_paddle_gives_to_parameters(keys, key, expected):
    assert split_state(key, set(keys)) == expected


def test_one_ranks_shards_tell_the_number_of_parts():
    texts = ["f -> g, fused_ffn"]
    whole = catalog({"f": numbered(3, 16)}, {"f": (1, 4)})
    target = catalog({"g": numbered(3, 16)}, {"g": (1, 2)})
    own, own_target = whole.take(whole.rank == 2), target.take(target.rank == 1)
    expected = explain(texts, whole, target)
    # gate and up of two source parts side by side in each target part
    assert "[0:3, 2:4] <- f [0:3, 4:6]" in expected
    assert explain(texts, own, target) == explain(texts, whole, own_target) == expected


@pytest.mark.parametrize(("statements", "lost"), [
    (['a -> b, states="moment1_0"', "b -> c"], ["c.moment1_0"]),
    (["a.moment1_0 -> b.moment1_0", "b^T -> t", "t^T -> c"], ["c.moment1_0"]),
    (['a -> b, states="model"', "b -> c"], ["c"]),
    (["a.moment1_0 -> b.moment1_0", "b, a -> c, d"], ["c.moment1_0"]),
    (["a.moment1_0 -> b.moment1_0", "b -> c", "a -> c"], []),
    (["a.moment1_0 -> b.moment1_0", "b -> c", "a.moment1_0 -> c.moment1_0"], []),
    (["b -> c", "a.moment1_0 -> b.moment1_0"], []),
    (["a.moment1_0 -> b.moment1_0", "b -> b"], []),
    (["a.moment1_0 -> b.moment1_0", "a -> c", "x, b -> c, axis=0, optional"], []),
])  # fmt: skip
def test_a_state_that_was_made_apart_is_not_taken_from_somewhere_else(statements, lost):
    """What is made of a name after a statement about one of its states would have the state that it had before."""
    source = {"a": A, "a.moment1_0": A + 100, "b": A + 1, "b.moment1_0": A + 101}
    target = {"c": A, "c.moment1_0": A}
    mapping = compiled(statements, source, target)
    assert sorted(mapping.unfed) == lost
    assert all("give the statement about" in mapping.provenance[key] for key in lost)
    assert set(lost).isdisjoint(compiled(statements, source, None).outputs)
