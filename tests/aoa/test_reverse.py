"""aoa_config_reverse: a load by the box maps of a program with their columns swapped, bit for bit, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.aoa import AoaError, compile_program
from tests.aoa.small import assert_equal, catalog, numbered, room, run

A = numbered(4, 6)
B = numbered(4, 2, start=100)


def back(statements, made, wanted, made_cuts=None, wanted_cuts=None):
    """What a reverse load gives: ``made`` is its source, ``wanted`` its destination."""
    config = {"aoa_statements": list(statements), "aoa_config_reverse": True}
    return run((), made, wanted, made_cuts, wanted_cuts, config=config)


def there_and_back(statements, source, target, source_cuts=None, target_cuts=None):
    """Loads with the statements, then in reverse, and compares."""
    made = run(statements, source, target, source_cuts, target_cuts)
    fresh = {key: room(*array.shape, dtype=array.dtype.name) for key, array in source.items()}
    assert_equal(back(statements, made, fresh, target_cuts, source_cuts), source)


@pytest.mark.parametrize(
    ("statements", "shape"),
    [
        (["a^T -> t"], (6, 4)),
        (['a -> t, slice="[0:4, 0:6]", reshape="[4, 3, 2]", permute="[1, 0, 2]"'], (3, 4, 2)),
        (['a -> t, permute="[1, 0]", reshape="[3, 2, 4]"'], (3, 2, 4)),
        (['a -> t, pad="[[1, 2], [0, 3]]", fill=5'], (7, 9)),
        (['a -> t, resize="[6, 6]", fill=0'], (6, 6)),
        (["a -> t, repeat=3, axis=1"], (4, 18)),
        (["a -> t, repeat=2, axis=1, block=2"], (4, 12)),
        (["a -> x, y, z, axis=1", "z, y, x -> t, axis=0"], (12, 2)),
        (['a -> x, y, axis=1, sizes="[1, 5]"', "y, x -> t, axis=1"], (4, 6)),
        (["a -> x, y, z, w, unstack, axis=0", "w, z, y, x -> t, stack, axis=1"], (6, 4)),
        (["a -> b, t, copy", "b -> _"], (4, 6)),
        (["a, a -> t, axis=0"], (8, 6)),
        (['a -> t, dtype="float64"'], (4, 6)),
    ],
)
def test_moves_come_back(statements, shape):
    there_and_back(statements, {"a": A}, {"t": room(*shape)})


def test_scalars_and_tensors_without_elements_come_back():
    source = {"s": numbered(), "e": room(0, 3), "v": numbered(1)}
    target = {"t": room(), "f": room(3, 0), "w": room(1, 1)}
    there_and_back(["s -> t", "e^T -> f", 'v -> w, reshape="[1, 1]"'], source, target)


def test_a_swap_by_way_of_a_temporary():
    other = numbered(4, 6, start=50)
    there_and_back(["a -> t", "b -> a", "t -> b"], {"a": A, "b": other}, {"a": room(4, 6), "b": room(4, 6)})


@pytest.mark.parametrize("source_parts", [1, 2, 4])
@pytest.mark.parametrize("target_parts", [1, 2])
def test_interleaved_layouts_come_back_under_any_degrees(source_parts, target_parts):
    heads = "num_heads=4, num_key_value_groups=4"
    there_and_back(
        ["f -> g, fused_ffn", f"qkv -> z, fused_qkv_old, {heads}", f"q^T, k^T, v^T -> y, fused_qkv, {heads}"],
        {
            "f": numbered(3, 8),
            "qkv": numbered(3, 12, start=30),
            **{name: numbered(4, 3, start=100 + i * 20) for i, name in enumerate("qkv")},
        },
        {"g": room(3, 8), "z": room(3, 12), "y": room(3, 12)},
        {"f": (1, source_parts), "qkv": (1, source_parts)},
        {"g": (1, target_parts), "z": (1, target_parts), "y": (1, target_parts)},
    )


def test_slices_that_cover_the_source_together():
    statements = ['a -> x, slice="[0:3, :]"', 'a^T -> y, slice="[1:6, 2:4]"', 'a -> z, slice="[3, 0:1]"']
    there_and_back(statements, {"a": A}, {"x": room(3, 6), "y": room(5, 2), "z": room(1)})
    with pytest.raises(AoaError, match=r"AOA statement 1: has no exact inverse: 'a' .* elements \[3:4, 0:1\]"):
        back(statements[:2], {"x": room(3, 6), "y": room(5, 2)}, {"a": room(4, 6)})


def test_an_exact_branch_goes_before_a_lossy_one():
    statements = ['a -> h, dtype="float16"', "a -> e"]
    source = {"a": numbered(4, 6, start=5000)}
    there_and_back(statements, source, {"h": room(4, 6, dtype="float16"), "e": room(4, 6)})


def test_states_follow_their_parameter_but_for_statements_of_their_own():
    states = {"a.w_0": A + 1, "a.moment1_0": A + 2, "a.beta1_pow_acc_0": numbered(1, start=3)}
    narrow = {key.replace("a", "b", 1): v[:, :2] if v.ndim > 1 else v for key, v in states.items()}
    source = {"a": A, "b": B, **states, **narrow}
    target = {f"t{key[1:]}": room(*(4, 8) if v.ndim > 1 else (1,)) for key, v in {"a": A, **states}.items()}
    there_and_back(["a, b -> t, axis=1"], source, target)
    own = {"a": A, "a.moment1_0": A + 2, "c.moment1_0": A + 3, "c": A + 4}
    there_and_back(
        ["a^T -> t", "a.moment1_0 -> s.moment1_0", "c.moment1_0^T -> t.moment1_0", "c -> s"],
        own,
        {"t": room(6, 4), "t.moment1_0": room(6, 4), "s": room(4, 6), "s.moment1_0": room(4, 6)},
    )


def test_a_rounding_cast_is_undone_by_the_opposite_and_what_was_removed_is_kept():
    statements = ['a -> t, src_dtype="float32", dst_dtype="float16"', "gone -> _"]
    found = back(statements, {"t": A.astype(np.float16)}, {"a": room(4, 6), "gone": room(2)})
    assert_equal(found, {"a": A, "gone": room(2)})


def test_what_was_added_is_not_used_and_what_was_lost_is_not_fed():
    made = {"b": A, "new": room(2)}
    config = {"aoa_statements": ["a -> b", "_ -> new, fill=0"], "aoa_config_reverse": True}
    mapping = compile_program(config, catalog(made), catalog({"a": A, "b": B}))
    assert mapping.removed >= {"new"}
    # The b of the destination was overwritten: what the source has under that name is a.
    assert mapping.unfed == {"b"}
    assert mapping.copied_keys(["a"]) == {"a": "b"}


def test_a_part_of_what_a_statement_reads():
    made = {"t": np.concatenate([A, A + 50], axis=1), "y": B.T.copy()}
    statements = ['a, b -> t, axis=1, sizes="[6, 6]"', "x^T -> y"]
    assert_equal(back(statements, made, {"b": room(4, 6)}), {"b": A + 50})
    assert_equal(back(statements, made, {"x": room(4, 2)}), {"x": B})
    with pytest.raises(AoaError, match=r'give sizes="\[\.\.\]"'):
        back(["a, b, c -> t, axis=1"], made, {"b": room(4, 6)})


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("a -> t, scale=2.0", r"it is only computed with, to make \['t'\]"),
        ("a, b -> t, sum", "it is only computed with"),
        ('a -> t, slice="[0:2]"', r"its elements \[2:4, 0:6\] are not in \['t'\]"),
        ('a -> t, resize="[4, 5]"', r"its elements \[0:4, 5:6\] are not in"),
        ("a -> u", "the source of this reverse load has no tensor that it was used for"),
    ],
)
def test_what_cannot_be_had_back_names_the_statement(statement, why):
    shape = {"slice": (2, 6), "resize": (4, 5)}.get(statement.partition(", ")[2].partition("=")[0], (4, 6))
    with pytest.raises(AoaError, match="AOA statement 2: has no exact inverse: 'a' cannot be restored, as " + why):
        back(["x -> y", statement], {"y": B, "t": room(*shape)}, {"x": room(4, 2), "a": room(4, 6), "b": room(4, 6)})


def test_another_shape_is_an_error():
    with pytest.raises(AoaError, match=r"gives 't' the shape \[6, 4\]; expected \[4, 6\]"):
        back(["a^T -> t"], {"t": A}, {"a": room(4, 6)})


def test_without_a_destination_the_statements_alone_tell_the_way_back():
    config = {"aoa_statements": ['a^T, b^T -> t, axis=0, sizes="[6, 2]"'], "aoa_config_reverse": True}
    mapping = compile_program(config, catalog({"t": room(8, 4)}), None)
    assert {key: mapping.tensors[key].shape for key in mapping.outputs} == {"a": (4, 6), "b": (4, 2)}
