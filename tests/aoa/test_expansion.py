"""What macros expand to is, text for text, what the in-tree engine makes of the same statements."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence

import pytest

from paddle_flexckpt.aoa import AoaError, expand_program
from tests.aoa.small import catalog, room

pytest.importorskip("paddle")
engine = pytest.importorskip("paddle.distributed.flex_checkpoint.aoa.aoa_engine")
sharded_weight = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight")
pytestmark = [
    pytest.mark.paddle,
    # What is compared with: Paddle 3.2 does not keep what its macros made.
    pytest.mark.skipif(
        not hasattr(engine, "AOATraceback"), reason="this Paddle does not tell what its macros expand to"
    ),
]

# Shape, and optionally axis and number of tensor-parallel parts.
Side = Mapping[str, tuple]


def descriptions(side: Side) -> dict[str, list]:
    """A side as the in-tree engine takes it."""
    result = {}
    for key, (shape, *cut) in side.items():
        axis, parts = cut or (0, 1)
        local = [n // parts if i == axis else n for i, n in enumerate(shape)]
        result[key] = [
            sharded_weight.ShardedWeightDesc(
                key,
                tuple(local),
                tuple(shape),
                tuple(rank * local[i] if i == axis else 0 for i in range(len(shape))),
                "float32",
            )
            for rank in range(parts)
        ]
    return result


def in_tree(texts: Sequence[str], source: Side, target: Side) -> list[str]:
    """The in-tree engine's texts."""
    with contextlib.redirect_stdout(io.StringIO()):
        built = engine.AOAEngine({"aoa_statements": list(texts)}, descriptions(source), descriptions(target))
    return [text.strip() for text in built.lexer.final_expressions]


def ours(texts: Sequence[str], source: Side, target: Side) -> list[str]:
    catalogs = [
        catalog({key: room(*each[0]) for key, each in side.items()}, {k: e[1:] for k, e in side.items() if len(e) > 1})
        for side in (source, target)
    ]
    expanded = expand_program({"aoa_statements": list(texts)}, *catalogs)
    return [text.strip() for each in expanded for text in each.texts]


def both(texts: Sequence[str], source: Side, target: Side) -> list[str]:
    found = ours(texts, source, target)
    assert found == in_tree(texts, source, target)
    return found


W = ((4, 6),)
LAYERS = {f"m.layers.{i}.w": W for i in (0, 1, 2, 10)}
EXPERTS = {f"m.layers.{i}.experts.{j}.w": W for i in (0, 1, 10) for j in (0, 2, 11)}


@pytest.mark.parametrize(
    ("text", "source", "target", "count"),
    [
        ("a -> b", {"a": W}, {"b": W}, 1),
        ("  a   ->b ", {"a": W}, {"b": W}, 1),
        ("a -> b, c, axis=1", {"a": W}, {"b": ((4, 3),), "c": ((4, 3),)}, 1),
        ("a, b -> c, axis = 0", {"a": W, "b": W}, {"c": ((8, 6),)}, 1),
        ('a -> b, permute="[1, 0]"', {"a": W}, {"b": ((6, 4),)}, 1),
        ('a -> b, dtype="float16"', {"a": W}, {"b": W}, 1),
        ('a -> b, src_dtype="float32", dst_dtype="float16"', {"a": W}, {"b": W}, 1),
        ("_ -> b", {"a": W}, {"a": W, "b": W}, 1),
        ("a -> _", {"a": W, "b": W}, {"b": W}, 1),
        ("a^T -> b", {"a": W}, {"b": ((6, 4),)}, 2),
        ("a^T, b -> c, axis=0", {"a": W, "b": ((3, 4),)}, {"c": ((9, 4),)}, 2),
        ("a^T, a^T -> c, axis=0", {"a": W}, {"c": ((12, 4),)}, 2),
        ("m.layers.$LAYER_ID.w -> d.$LAYER_ID.x", LAYERS, {f"d.{i}.x": W for i in (0, 1, 2, 10)}, 4),
        (
            "m.layers.$LAYER_ID.w^T -> d.$LAYER_ID.x,  axis = 1",
            LAYERS,
            {f"d.{i}.x": ((6, 4),) for i in (0, 1, 2, 10)},
            8,
        ),
        (
            "m.layers.$LAYER_ID.experts.$EXPERT_ID.w -> d.$LAYER_ID.e.$EXPERT_ID",
            EXPERTS,
            {f"d.{i}.e.{j}": W for i in (0, 1, 10) for j in (0, 2, 11)},
            9,
        ),
        (
            "m.layers.$LAYER_ID.experts.$EXPERT_ID.w^T -> d.$EXPERT_ID.e.$LAYER_ID",
            EXPERTS,
            {f"d.{j}.e.{i}": ((6, 4),) for i in (0, 1, 10) for j in (0, 2, 11)},
            18,
        ),
        ("e.$EXPERT_ID.w -> f.$EXPERT_ID.w", {"e.3.w": W, "e.4.w": W}, {"f.3.w": W, "f.4.w": W}, 2),
        (
            "m.layers.$LAYER_ID_OFFSET.w -> d.$LAYER_ID_OFFSET.x",
            {f"m.layers.{i}.w": W for i in (1, 2, 10)},
            {f"d.{i}.x": W for i in (0, 1, 9)},
            3,
        ),
        ("a -> q[0:3], axis=1", {"a": W}, {f"q_{i}": ((4, 2),) for i in range(3)}, 1),
        ("q[1:4] -> a, axis=1", {f"q_{i}": ((4, 2),) for i in (1, 2, 3)}, {"a": W}, 1),
        ("q[0:2]  ,  r -> a, axis = 1", {f"{n}": ((4, 2),) for n in ("q_0", "q_1", "r")}, {"a": W}, 1),
        ("e.*.w -> a, axis=0", {f"e.{i}.w": W for i in (10, 9, 2)}, {"a": ((12, 6),)}, 1),
        ("a -> e.*.w, axis=0", {"a": ((12, 6),)}, {f"e.{i}.w": W for i in (10, 9, 2)}, 1),
        ("e.*.w, a -> b, axis = 0", {"a": W, **{f"e.{i}.w": W for i in (1, 0)}}, {"b": ((12, 6),)}, 1),
        (
            "d.$LAYER_ID -> m.layers.$LAYER_ID.experts.*.w, axis=1",
            {f"d.{i}": ((4, 18),) for i in (0, 1, 10)},
            EXPERTS,
            3,
        ),
    ],
)
def test_names_and_transposes(text: str, source: Side, target: Side, count: int):
    assert len(both([text], source, target)) == count


def test_order_of_a_program():
    source = {**LAYERS, "e": W, "n": ((4,),)}
    target = {**{f"d.{i}.x": ((6, 4),) for i in (0, 1, 2, 10)}, "emb": W, "norm": ((4,),)}
    texts = ["n -> norm", "m.layers.$LAYER_ID.w^T -> d.$LAYER_ID.x", "e -> t", "t -> emb"]
    assert len(both(texts, source, target)) == 11


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2), (6, 3), (4, 1)])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_fused_qkv(heads: int, groups: int, axis: int | None):
    def shape(count: int) -> tuple:
        return ((count * 2, 4),) if axis == 0 else ((4, count * 2),)

    split = {"q": shape(heads), "k": shape(groups), "v": shape(groups)}
    whole = {"qkv": shape(heads + 2 * groups)}
    attributes = f"fused_qkv, num_heads={heads}, num_key_value_groups={groups}"
    attributes += "" if axis is None else f", axis={axis}"
    assert len(both([f"qkv -> q, k, v, {attributes}"], whole, split)) == 4
    assert len(both([f"q, k, v -> qkv, {attributes}"], split, whole)) == 4


def test_fused_qkv_of_layers_with_transposes():
    source = {f"m.{i}.{n}": ((c * 2, 4),) for i in (0, 1) for n, c in (("q", 4), ("k", 2), ("v", 2))}
    target = {f"d.{i}.qkv": ((4, 16),) for i in (0, 1)}
    text = (
        "m.$LAYER_ID.q^T, m.$LAYER_ID.k, m.$LAYER_ID.v -> d.$LAYER_ID.qkv, fused_qkv, num_heads=4, "
        "num_key_value_groups=2"
    )
    source.update({f"m.{i}.{n}": ((4, 4),) for i in (0, 1) for n in "kv"})
    assert len(both([text], source, target)) == 10


DEGREES = [1, 2, 4]


@pytest.mark.parametrize("source_parts", DEGREES)
@pytest.mark.parametrize("target_parts", DEGREES)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("renames", [0, 1, 3])
def test_fused_between_tensor_parallel_degrees(source_parts: int, target_parts: int, axis: int | None, renames: int):
    """All three forms of the two layouts that depend on degrees, directly and through names in between."""
    along = 1 if axis is None else axis

    def side(counts: Mapping[str, int], parts: int) -> Side:
        return {n: ((4, c * 2) if along else (c * 2, 4), along, parts) for n, c in counts.items()}

    suffix = "" if axis is None else f", axis={axis}"
    for tag, split in (
        ("fused_ffn", {"g": 8, "u": 8}),
        ("fused_qkv_old, num_heads=8, num_key_value_groups=4", {"q": 8, "k": 4, "v": 4}),
    ):
        whole = {"a": 16}
        before = [f"{'a' if i == 0 else f'before{i}'} -> before{i + 1}" for i in range(renames)]
        after = [f"after{i} -> {'b' if i == 1 else f'after{i - 1}'}" for i in range(renames, 0, -1)]
        left, right = f"before{renames}" if renames else "a", f"after{renames}" if renames else "b"
        names = ", ".join(split)
        texts = [*before, f"{left} -> {right}, {tag}{suffix}", *after]
        found = both(texts, side(whole, source_parts), side({"b": 16}, target_parts))
        assert len(found) == 2 + 2 * renames
        texts = [*before, f"{left} -> {names}, {tag}{suffix}"]
        both(texts, side(whole, source_parts), side(split, target_parts))
        texts = [f"{names} -> {right}, {tag}{suffix}", *after]
        both(texts, side(split, source_parts), side({"b": 16}, target_parts))


@pytest.mark.parametrize(("source_parts", "target_parts"), [(2, 3), (6, 4), (1, 12)])
def test_fused_ffn_cuts_into_the_least_common_multiple(source_parts: int, target_parts: int):
    source, target = {"a": ((4, 24), 1, source_parts)}, {"a": ((4, 24), 1, target_parts)}
    both(["a -> a, fused_ffn"], source, target)


def test_fused_layouts_of_layers_with_names_and_transposes():
    source = {f"m.{i}.{n}": ((8, 4),) for i in (0, 2) for n in ("gate", "up")}
    target = {f"m.{i}.fused": ((4, 16), 1, 2) for i in (0, 2)}
    text = "m.$LAYER_ID.gate, m.$LAYER_ID.up^T -> m.$LAYER_ID.fused, fused_ffn"
    source.update({f"m.{i}.gate": ((4, 8),) for i in (0, 2)})
    assert len(both([text], source, target)) == 8


def test_a_star_with_a_fused_layout():
    source = {f"e.{i}.w": ((4, 8),) for i in (0, 1)}
    both(["e.*.w -> f, fused_ffn"], source, {"f": ((4, 16), 1, 2)})


def test_states_count_where_a_parameter_has_no_key():
    source = {"a.moment1_0": ((4, 8), 1, 2), "a.w_0": ((4, 8), 1, 2)}
    target = {"a.moment1_0": ((4, 8), 1, 4), "a.w_0": ((4, 8), 1, 4)}
    assert "UP_3" in both(["a -> a, fused_ffn"], source, target)[0]


# Where the two differ, and why: defects of the in-tree engine (Paddle 3.3.1).


def test_exception_order_of_several_transposes():
    """In-tree they are in a set: their order depends on the hash seed. Ours is the order of the statement."""
    source, target = {"b": W, "a": W}, {"c": ((12, 4),)}
    text = "b^T, a^T -> c, axis=0"
    found = ours([text], source, target)
    assert [each.split()[0] for each in found[:2]] == ["b", "a"]
    assert sorted(found[:2]) == sorted(in_tree([text], source, target)[:2])
    assert found[2:] == in_tree([text], source, target)[2:]


def test_exception_ragged_experts():
    """In-tree ids are combined freely, and a combination that does not exist is an error."""
    source = {"m.0.e.0": W, "m.1.e.0": W, "m.1.e.1": W}
    target = {"d.0.e.0": W, "d.1.e.0": W, "d.1.e.1": W}
    text = "m.$LAYER_ID.e.$EXPERT_ID -> d.$LAYER_ID.e.$EXPERT_ID"
    assert len(ours([text], source, target)) == 3
    with pytest.raises(ValueError, match="assigned before"):
        in_tree([text], source, target)


def test_exception_parts_along_other_axes():
    """In-tree the parts along any axis are counted: rows of an FSDP-like layout are taken for tensor parallelism."""
    source, target = {"a": ((4, 8), 1, 2)}, {"a": ((4, 8), 0, 4)}
    text = "a -> a, fused_ffn"
    assert ours([text], source, target) == both([text], source, {"a": ((4, 8),)})
    assert ours([text], source, target) != in_tree([text], source, target)


def test_exception_fewer_key_value_heads_than_parts():
    """In-tree a text with empty names comes out, and the parser fails on it. Here the reason is said."""
    source, target = {"a": ((4, 24),)}, {"a": ((4, 24), 1, 4)}
    text = "a -> a, fused_qkv_old, num_heads=8, num_key_value_groups=2"
    with pytest.raises(SyntaxError):
        in_tree([text], source, target)
    with pytest.raises(AoaError, match="2 K heads cannot be cut into 4 equal tensor-parallel parts"):
        ours([text], source, target)


def test_exception_a_pattern_without_a_match():
    """In-tree it expands to nothing, which hides misspelled names."""
    source, target = dict(LAYERS), {f"m.layers.{i}.w": W for i in (0, 1, 2, 10)}
    text = "m.layer.$LAYER_ID.w -> m.layers.$LAYER_ID.w"
    assert in_tree([text], source, target) == []
    with pytest.raises(AoaError, match="no source key or variable matches"):
        ours([text], source, target)


def test_exception_a_star_in_the_name_that_binds_ids():
    """In-tree such a name is compared with the keys literally, matches none, and the statement is lost."""
    target = {f"d.{i}": ((4, 18),) for i in (0, 1, 10)}
    text = "m.layers.$LAYER_ID.experts.*.w -> d.$LAYER_ID, axis=1"
    with pytest.raises(KeyError, match="d.0"):
        in_tree([text], EXPERTS, target)
    assert ours([text], EXPERTS, target) == [
        ",".join(f"m.layers.{i}.experts.{j}.w" for j in (0, 2, 11)) + f"->d.{i},axis=1" for i in (0, 1, 10)
    ]
