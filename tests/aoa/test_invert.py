"""invert: statements the other way round give the source back, bit for bit; or the error names the statement."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from paddle_flexckpt.aoa import AoaError, compile_program
from paddle_flexckpt.aoa.invert import invert
from tests.aoa.reassigned import check_undone
from tests.aoa.small import assert_equal, catalog, numbered, room, run

A = numbered(4, 6)
B = numbered(4, 2, start=100)


def texts_of(*statements: str) -> list[str]:
    return invert({"aoa_statements": list(statements)})["aoa_statements"]


def there_and_back(statements, source, target, source_cuts=None, target_cuts=None):
    """Loads with the statements, then with their inverse, and compares."""
    made = run(statements, source, target, source_cuts, target_cuts)
    inverse = texts_of(*statements)
    fresh = {key: room(*array.shape, dtype=array.dtype.name) for key, array in source.items()}
    assert_equal(run(inverse, made, fresh, target_cuts, source_cuts), source)
    return inverse


@pytest.mark.parametrize(
    ("statement", "inverse"),
    [
        ("l.$LAYER_ID.w^T -> m.$LAYER_ID.w", ["m.$LAYER_ID.w^T -> l.$LAYER_ID.w"]),
        (
            "q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2",
            ["qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2"],
        ),
        ("m.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w", ["l.${LAYER_ID-1}.w -> m.$LAYER_ID.w"]),
        ('"a-b" -> c, permute="[1, 2, 0]"', ['c -> "a-b", permute="[2, 0, 1]"']),
        ("a^T, b^T -> c, axis=0", ['c^T -> a, b, axis=-1, sizes="auto"']),
        (
            'a -> t, permute="[1, 0, 2]", src_dtype="float16", dst_dtype="float32"',
            ['t -> a, src_dtype="float32", dst_dtype="float16", permute="[1, 0, 2]"'],
        ),
        ("a -> b, c, axis=1, optional", ["b, c -> a, axis=1, optional"]),
    ],
)
def test_what_is_printed_is_readable(statement, inverse):
    assert texts_of(statement) == inverse


@pytest.mark.parametrize(
    ("statements", "shape"),
    [
        (["a^T -> t"], (6, 4)),
        (['a^T -> t, permute="[1, 0]"'], (4, 6)),
        (['a -> t, reshape="[2, 2, 6]"'], (2, 2, 6)),
        (['a -> t, reshape="[4, 3, 2]", permute="[1, 0, 2]"'], (3, 4, 2)),
        (['a -> t, pad="[[1, 2], [0, 3]]", fill=5'], (7, 9)),
        (["a -> x, y, z, axis=1", 'z, y, x -> t, axis=0, sizes="equal"'], (12, 2)),
        (['a -> x, y, axis=1, sizes="[1, 5]"', 'y, x -> t, axis=1, sizes="[5, 1]"'], (4, 6)),
        (["a -> x, y, z, w, unstack, axis=0", "w, z, y, x -> t, stack, axis=1"], (6, 4)),
        (["a -> b, t, copy", "b -> _"], (4, 6)),
        (['a -> x, y, axis=0, permute="[1, 0]"', "x^T, y -> z, w", 'z, w^T -> t, axis=0, sizes="equal"'], (4, 6)),
    ],
)
def test_moves_come_back(statements, shape):
    there_and_back(statements, {"a": A}, {"t": room(*shape)})


@pytest.mark.parametrize("name", ["my_step_x", "step_1", "global_step_count", "_step_2.w"])
def test_a_name_that_looks_like_a_temporary(name: str) -> None:
    inverse = texts_of(f'a^T -> {name}, permute="[1, 0]"')
    assert inverse[0].startswith(f"{name} -> ")
    assert inverse[-1].endswith(" -> a")


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


@pytest.mark.parametrize("source_parts", [1, 4])
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
        [f"q^T, k^T, v^T -> z, fused_qkv_old, {heads}", "u, w^T -> g, fused_ffn"],
        {**{name: numbered(4, 3, start=i * 20) for i, name in enumerate("qkvw")}, "u": numbered(3, 4, start=90)},
        {"g": room(3, 8), "z": room(3, 12)},
        None,
        back,
    )


def test_casts_come_back_only_if_they_lose_nothing():
    half = A.astype(np.float16)
    there_and_back(['a -> t, src_dtype="float16", dst_dtype="float32"'], {"a": half}, {"t": room(4, 6)})
    with pytest.raises(AoaError, match="from float32 to float16 loses digits"):
        texts_of('a -> t, src_dtype="float32", dst_dtype="float16"')
    with pytest.raises(AoaError, match="does not tell the dtype that there was"):
        texts_of('a -> t, dtype="float32"')


def test_a_lossy_branch_does_not_hide_an_exact_one():
    statements = ["a -> e", 'a -> h, src_dtype="float32", dst_dtype="float16"']
    target = {"e": room(4, 6), "h": room(4, 6, dtype="float16")}
    assert there_and_back(statements, {"a": A}, target) == ["e -> a"]
    assert texts_of(*reversed(statements)) == ["e -> a"]


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
        ("a -> t, repeat=3, axis=1", "repeat does not tell the shape that there was"),
        ('a -> t, permute="[1, 0]", reshape="[24]"', "reshape does not tell the shape that there was"),
        ("a -> _", "it is removed"),
    ],
)
def test_what_has_no_inverse_names_the_statement(statement, why):
    with pytest.raises(AoaError) as error:
        texts_of("x -> y", statement)
    assert "AOA statement 2: has no exact inverse: 'a' cannot be restored" in str(error.value)
    assert why in str(error.value)


def test_the_inverse_of_an_inverse():
    statements = ["l.$LAYER_ID.w^T -> m.$LAYER_ID.w", "a -> b"]
    assert texts_of(*texts_of(*statements)) == statements
    reverse = {"aoa_statements": texts_of(*statements), "aoa_config_reverse": True}
    assert invert(reverse)["aoa_statements"] == texts_of(*statements)


SQUARE = numbered(4, 4)


@pytest.mark.parametrize(
    ("statements", "keys", "made"),
    [
        (["src -> t", "t^T -> t", "t -> dst"], ["src"], ["dst"]),
        (["a, b -> b, a", "a -> x", "b -> y"], "ab", "xy"),
        (["l.$L.w -> l.${L+1}.w", "l.$L.w -> m.$L"], ["l.0.w", "l.1.w"], ["m.0", "m.1", "m.2"]),
        (["l.$L.w^T -> l.$L.w", "l.0.w -> x", "l.$L.w -> l.$L.w"], ["l.0.w", "l.1.w"], ["x", "l.1.w"]),
        (["l.$L.w -> l.${L+1}.w", "emb^T -> l.0.w", "l.$L.w^T -> l.$L.w"], ["l.0.w", "emb"], ["l.0.w", "l.1.w"]),
        (["a^T -> a", "a -> x, y, axis=0", "y^T -> y", 'x^T, y -> z, axis=1, sizes="equal"'], "a", "z"),
        (["x -> y", "a -> x", "x^T -> x"], "ax", "xy"),
        (["l.$L.w -> k.$L", "k.0 -> l.0.w"], ["l.0.w", "l.1.w"], ["l.0.w", "k.1"]),
        (["a^T -> t.0", "b -> t.1", "t.$L^T -> t.$L"], "ab", ["t.0", "t.1"]),
    ],
)
def test_names_that_are_assigned_again(statements, keys, made):
    source = {key: numbered(4, 4, start=100 * i) for i, key in enumerate(keys)}
    there_and_back(statements, source, {key: room(4, 4) for key in made})


def test_a_fused_layout_that_is_made_in_place():
    there_and_back(["a -> a, fused_ffn", "a -> b"], {"a": numbered(3, 8)}, {"b": room(3, 8)}, None, {"b": (1, 2)})


@pytest.mark.parametrize(
    ("statements", "why"),
    [
        (["a -> m", "x -> m"], "'a' cannot be restored, as AOA statement 2 overwrites 'm'"),
        (["l.$L -> m.$L", "x -> m.0"], "'l.$L' cannot be restored, as AOA statement 2 overwrites 'm.0'"),
        (["l.0 -> m.0", "x.$L -> m.$L"], "'l.0' cannot be restored, as AOA statement 2 overwrites 'm.$L'"),
        (["a, b -> f, axis=0", "f -> b, b, axis=0"], "'a' cannot be restored, as AOA statement 2 makes a name twice"),
        (["a -> m", "x -> m, optional"], "'a' cannot be restored, as AOA statement 2 overwrites 'm'"),
        (["a.*.w -> s, stack, axis=0", "x -> s"], "cannot be restored, as AOA statement 2 overwrites 's'"),
        (["a -> a, scale=2.0", "a -> b"], "a product is rounded"),
        (["l.$L -> l.${L//2}", "l.$L -> m.$L"], "the id L cannot be told"),
        (
            ["a -> b", 'c -> b, states="moment1_0"'],
            "states of parameters that AOA statement 1 makes or reads otherwise",
        ),
        (["a^T -> a", 'a -> a, states="moment1_0", permute="[1, 0]"'], "AOA statement 2: has no exact inverse"),
        (['a -> b, states="w_0"', "b -> c"], "AOA statement 1: has no exact inverse: it is about states"),
        (["a -> b", "b.moment1_0 -> b.moment1_0, scale=0.5"], "AOA statement 2: has no exact inverse"),
    ],
)
def test_what_is_overwritten_is_lost(statements, why):
    with pytest.raises(AoaError, match=re.escape(why)):
        texts_of(*statements)


def test_statements_about_states_are_undone_beside_those_of_their_parameters():
    inverse = texts_of("a -> b", 'a -> b, states="moment1_0", permute="[1, 0]"', '_ -> b, states="w_0", fill=0')
    assert inverse[1:] == ['b -> a, permute="[1, 0]", states="moment1_0"', "b -> a"]
    source = {"a": SQUARE, "a.moment1_0": SQUARE + 50}
    there_and_back(
        ["a -> b", 'a -> b, states="moment1_0", permute="[1, 0]"'], source, {"b": room(4, 4), "b.moment1_0": room(4, 4)}
    )


def test_a_key_that_was_overwritten_is_fed_by_nothing_where_the_destination_has_a_part():
    config = {"aoa_statements": ["a -> b", "c -> d"], "aoa_config_reverse": True}
    source = {"b": SQUARE, "d": SQUARE + 50}
    assert_equal(run([], source, {"c": room(4, 4)}, config=config), {"c": SQUARE + 50})
    with pytest.raises(LookupError, match=re.escape("nothing feeds ['b']")):
        run([], source, {"b": room(4, 4), "c": room(4, 4)}, config=config)


def test_random_programs_that_assign_names_again():
    outcomes = Counter(check_undone(seed) for seed in range(400))
    assert min(outcomes["undone"], outcomes["refused"]) > 80
