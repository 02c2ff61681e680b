"""invert: what loading with a program made of a source is given back, bit for bit; or the error names the statement."""

from __future__ import annotations

import re

import numpy as np
import pytest

from paddle_flexckpt.aoa import AoaError, compile_program, invert
from tests.aoa.small import assert_equal, catalog, numbered, room, run

A = numbered(4, 6)
B = numbered(4, 2, start=100)


def texts_of(*statements: str, **catalogs) -> list[str]:
    return invert({"aoa_statements": list(statements)}, **catalogs)["aoa_statements"]


def there_and_back(statements, source, target, source_cuts=None, target_cuts=None, known=False):
    """Loads with the statements, then with their inverse, and compares."""
    catalogs = {"source": catalog(source, source_cuts), "target": catalog(target, target_cuts)} if known else {}
    made = run(statements, source, target, source_cuts, target_cuts)
    inverse = texts_of(*statements, **catalogs)
    fresh = {key: room(*array.shape, dtype=array.dtype.name) for key, array in source.items()}
    assert_equal(run(inverse, made, fresh, target_cuts, source_cuts), source)
    return inverse


def test_what_is_printed_is_readable():
    assert texts_of("l.$LAYER_ID.w^T -> m.$LAYER_ID.w") == ["m.$LAYER_ID.w^T -> l.$LAYER_ID.w"]
    assert texts_of("q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2") == [
        "qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2"
    ]
    assert texts_of("m.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w") == ["l.${LAYER_ID-1}.w -> m.$LAYER_ID.w"]
    assert texts_of('"a-b" -> c, permute="[1, 2, 0]"') == ['c -> "a-b", permute="[2, 0, 1]"']


@pytest.mark.parametrize(
    ("statements", "shape"),
    [
        (["a^T -> t"], (6, 4)),
        (['a -> t, slice="[0:4, 0:6]", reshape="[4, 3, 2]", permute="[1, 0, 2]"'], (3, 4, 2)),
        (['a -> t, reshape="[2, 2, 6]"'], (2, 2, 6)),
        (['a -> t, pad="[[1, 2], [0, 3]]", fill=5'], (7, 9)),
        (['a -> t, resize="[6, 6]", fill=0'], (6, 6)),
        (["a -> t, repeat=3, axis=1"], (4, 18)),
        (["a -> t, repeat=2, axis=1, block=2"], (4, 12)),
        (["a -> x, y, z, axis=1", "z, y, x -> t, axis=0"], (12, 2)),
        (['a -> x, y, axis=1, sizes="[1, 5]"', "y, x -> t, axis=1"], (4, 6)),
        (["a -> x, y, z, w, unstack, axis=0", "w, z, y, x -> t, stack, axis=1"], (6, 4)),
        (["a -> b, t, copy", "b -> _"], (4, 6)),
    ],
)
def test_moves_come_back(statements, shape):
    there_and_back(statements, {"a": A}, {"t": room(*shape)}, known=True)


def test_a_swap_by_way_of_a_temporary():
    other = numbered(4, 6, start=50)
    there_and_back(["a -> t", "b -> a", "t -> b"], {"a": A, "b": other}, {"a": room(4, 6), "b": room(4, 6)})


def test_a_join_of_unequal_sizes_takes_them_from_the_destination_or_from_sizes():
    source, target = {"a": A, "b": B}, {"t": room(4, 8)}
    assert there_and_back(["a, b -> t, axis=1"], source, target) == ['t -> a, b, axis=1, sizes="auto"']
    with pytest.raises(AoaError, match=re.escape('give sizes="[..]"')):
        compile_program(texts_of("a, b -> t, axis=1"), catalog(target), None)
    inverse = texts_of('a, b -> t, axis=1, sizes="[6, 2]"')
    assert inverse == ['t -> a, b, axis=1, sizes="[6, 2]"']
    assert set(compile_program(inverse, catalog(target), None).outputs) == {"a", "b"}


@pytest.mark.parametrize("source_parts", [1, 2, 4])
@pytest.mark.parametrize("target_parts", [1, 2])
def test_interleaved_layouts_come_back_under_any_degrees(source_parts, target_parts):
    heads = "num_heads=4, num_key_value_groups=4"
    cuts = {"f": (1, source_parts), "qkv": (1, source_parts)}
    back = {"g": (1, target_parts), "z": (1, target_parts)}
    there_and_back(
        ["f -> g, fused_ffn", f"qkv -> z, fused_qkv_old, {heads}"],
        {"f": numbered(3, 8), "qkv": numbered(3, 12, start=30)},
        {"g": room(3, 8), "z": room(3, 12)},
        cuts,
        back,
    )
    there_and_back(
        [f"q, k, v -> z, fused_qkv_old, {heads}", "u, w -> g, fused_ffn"],
        {name: numbered(3, 4, start=i * 20) for i, name in enumerate("qkvuw")},
        {"g": room(3, 8), "z": room(3, 12)},
        None,
        back,
    )


def test_casts_come_back_only_if_they_lose_nothing():
    half = A.astype(np.float16)
    there_and_back(['a -> t, src_dtype="float16", dst_dtype="float32"'], {"a": half}, {"t": room(4, 6)})
    there_and_back(['a -> t, dtype="float32"'], {"a": half}, {"t": room(4, 6)}, known=True)
    with pytest.raises(AoaError, match="from float32 to float16 loses digits"):
        texts_of('a -> t, src_dtype="float32", dst_dtype="float16"')
    with pytest.raises(AoaError, match="does not tell the dtype that there was"):
        texts_of('a -> t, dtype="float32"')


def test_a_lossy_branch_does_not_hide_an_exact_one():
    statements = ["a -> e", 'a -> h, src_dtype="float32", dst_dtype="float16"']
    target = {"e": room(4, 6), "h": room(4, 6, dtype="float16")}
    assert there_and_back(statements, {"a": A}, target) == ["e -> a"]
    assert texts_of(*reversed(statements)) == ["e -> a"]


def test_slices_that_cover_the_source_together():
    statements = ['a -> x, slice="[0:3, :]"', 'a^T -> y, slice="[1:6, 2:4]"', 'a -> z, slice="[3, 0:1]"']
    target = {"x": room(3, 6), "y": room(5, 2), "z": room(1)}
    there_and_back(statements, {"a": A}, target, known=True)
    with pytest.raises(AoaError, match="AOA statement 3: has no exact inverse: 'a' .* a slice leaves elements out"):
        texts_of(*statements)
    short = {"x": room(3, 6), "y": room(5, 2)}
    with pytest.raises(AoaError, match="leaves elements out"):
        texts_of(*statements[:2], source=catalog({"a": A}), target=catalog(short))


def test_a_source_key_that_gets_lost_is_an_error_where_the_source_is_known():
    with pytest.raises(AoaError, match="no statement uses source key 'b', which gets lost"):
        texts_of("a -> b", source=catalog({"a": A, "b": A}), target=catalog({"b": A}))


def test_ids_that_a_name_does_not_tell():
    with pytest.raises(AoaError, match="the id L cannot be told"):
        texts_of("a.$L -> b.${L//2}.c.${L%2}")


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("a -> t, scale=2.0", "a product is rounded"),
        ("a, b -> t, sum", "a sum does not tell its terms"),
        ("a, b -> t, average", "a mean does not tell its terms"),
        ("a, b, c -> t, lora_merge", "does not tell its factors"),
        ('a, b -> t, dequant="mxfp4"', "does not tell its scales"),
        ('a -> t, slice="[0:2]"', "leaves elements out"),
        ("a -> _", "it is removed"),
    ],
)
def test_what_has_no_inverse_names_the_statement(statement, why):
    with pytest.raises(AoaError) as error:
        texts_of("x -> y", statement)
    assert "AOA statement 2: has no exact inverse: 'a' cannot be had back" in str(error.value)
    assert why in str(error.value)


def test_aoa_config_reverse_runs_the_inverse():
    config = {"aoa_statements": ["a, b -> t, axis=1", "x^T -> y"], "aoa_config_reverse": True}
    made = {"t": np.concatenate([A, B], axis=1), "y": A.T.copy()}
    wanted = {"a": room(4, 6), "b": room(4, 2), "x": room(4, 6)}
    assert_equal(run([], made, wanted, config=config), {"a": A, "b": B, "x": A})


def test_aoa_config_reverse_reverses_casts_and_keeps_what_was_removed():
    config = {
        "aoa_statements": ['a -> t, src_dtype="float32", dst_dtype="float16"', "gone -> _"],
        "aoa_config_reverse": True,
    }
    wanted = {"a": room(4, 6), "gone": room(2)}
    found = run([], {"t": A.astype(np.float16)}, wanted, config=config)
    assert_equal(found, {"a": A, "gone": room(2)})


def test_the_inverse_of_an_inverse():
    statements = ["l.$LAYER_ID.w^T -> m.$LAYER_ID.w", "a -> b"]
    assert texts_of(*texts_of(*statements)) == statements
