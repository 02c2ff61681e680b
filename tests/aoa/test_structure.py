"""Structures against plain numpy: operations on whole arrays, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import structure_ops as ops
from paddle_flexckpt.aoa.casts import converted
from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.steps import Average, Convert, DequantFp8, LoraMerge, Scale, WeightedSum
from paddle_flexckpt.aoa.structure import Derived, Structure, StructureError
from paddle_flexckpt.catalog import dtype_of
from tests.property import examples
from tests.property.layouts import Pick

KEPT = 77


def evaluate(structure: Structure, arrays: list[np.ndarray], is_operand: bool = False) -> np.ndarray:
    """The value, made piece by piece; what the target keeps is KEPT. Checks all that a structure promises."""
    rank, width = len(structure.shape), structure.fragments.leaf_offset.shape[1]
    assert [TensorInfo(a.shape, a.dtype.name) for a in arrays] == list(structure.inputs)
    assert structure.fragments.offset.shape == structure.fragments.extent.shape == (len(structure), rank)
    assert structure.fragments.value_axis.shape == structure.fragments.leaf_offset.shape == (len(structure), width)
    shown = [len(structure.leaf_info(int(leaf)).shape) for leaf in structure.fragments.leaf]
    assert width == max(shown, default=0)
    # An operand numbers the inputs of its holder, and need not use all of them.
    assert is_operand or structure.slots == set(range(len(arrays)))
    assert set(-1 - structure.fragments.leaf[structure.fragments.leaf < 0]) == set(range(len(structure.nodes)))
    assert len(structure) == 0 or set(structure.fragments.chain) == set(range(len(structure.chains)))
    made = {}
    for number, node in enumerate(structure.nodes):
        if node.step is None:
            made[-1 - number] = np.full(node.info.shape, KEPT).astype(dtype_of(node.info.dtype).numpy)
            continue
        operands = []
        for operand in node.operands:
            assert operand.inputs is structure.inputs
            operands.append(evaluate(operand, arrays, is_operand=True))
        made[-1 - number] = result = node.step.run(Box((0,) * len(node.info.shape), node.info.shape), operands)
        assert TensorInfo(result.shape, result.dtype.name) == node.info
    value = np.zeros(structure.shape, dtype_of(structure.dtype).numpy)
    count = np.zeros(structure.shape, int)
    for row in range(len(structure)):
        leaf = (
            made[int(structure.fragments.leaf[row])]
            if structure.fragments.leaf[row] < 0
            else arrays[structure.fragments.leaf[row]]
        )
        pad = width - leaf.ndim
        assert (structure.fragments.value_axis[row, :pad] == -1).all()
        axes = structure.fragments.value_axis[row, pad:].tolist()
        start, extent = structure.fragments.offset[row].tolist(), structure.fragments.extent[row].tolist()
        assert min(extent, default=1) > 0
        along = [axis for axis in axes if axis >= 0]
        assert len(set(along)) == len(along)
        assert all(extent[axis] == 1 for axis in range(rank) if axis not in along)
        first = structure.fragments.leaf_offset[row, pad:].tolist()
        assert all(0 <= f and f + (1 if a < 0 else extent[a]) <= size for f, a, size in zip(first, axes, leaf.shape))
        part = leaf[tuple(slice(f, f + (1 if a < 0 else extent[a])) for f, a in zip(first, axes))]
        part = part.transpose([axes.index(a) for a in sorted(along)] + [i for i, a in enumerate(axes) if a < 0])
        part = part.reshape(extent)
        for dtype in structure.chains[structure.fragments.chain[row]]:
            part = converted(part, dtype)
        assert part.dtype == value.dtype or (structure.fragments.leaf[row] < 0 and part.dtype.name == structure.dtype)
        where = tuple(slice(a, a + e) for a, e in zip(start, extent))
        value[where] = part
        count[where] += 1
    assert (count == 1).all()
    return value


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    return got.shape == expected.shape and got.dtype == expected.dtype and got.tobytes() == expected.tobytes()


class Pair:
    """A structure with its inputs, and the array that it has to give."""

    def __init__(self, structure: Structure, inputs: list[np.ndarray], array: np.ndarray) -> None:
        self.structure, self.inputs, self.array = structure, inputs, array

    def after(self, derived: Derived, array: np.ndarray) -> Pair:
        return Pair(derived.structure, [self.inputs[slot] for slot in derived.slots], array)

    def check(self) -> None:
        assert self.structure.shape == self.array.shape
        assert same(evaluate(self.structure, self.inputs), np.ascontiguousarray(self.array).reshape(self.array.shape))


def fresh(pick: Pick, shape: tuple[int, ...], dtype: str = "int32") -> Pair:
    array = np.asarray(pick.integer(0, 99) * 500 + np.arange(math.prod(shape))).reshape(shape)
    array = array.astype(dtype_of(dtype).numpy)
    return Pair(ops.source(TensorInfo(shape, dtype)).structure, [array] if array.size else [], array)


def shuffled(pick: Pick, items) -> list:
    rest = list(items)
    return [rest.pop(pick.integer(0, len(rest) - 1)) for _ in range(len(rest))]


def shape_of(pick: Pick, low: int = 0) -> tuple[int, ...]:
    return tuple(pick.integer(low, 4) for _ in range(pick.integer(0, 3)))


def combined(pairs: list[Pair], derived: Derived, array: np.ndarray) -> Pair:
    inputs = [each for pair in pairs for each in pair.inputs]
    return Pair(derived.structure, [inputs[slot] for slot in derived.slots], array)


def factorisation(pick: Pick, total: int) -> tuple[int, ...]:
    shape = []
    while total > 1 and len(shape) < 4:
        factor = pick.choice([f for f in range(1, total + 1) if total % f == 0])
        shape.append(factor)
        total //= factor
    return (*shape, total) if total > 1 or pick.integer(0, 1) else tuple(shape)


def one_operation(pick: Pick, pair: Pair) -> Pair:
    """A random operation on both."""
    s, array = pair.structure, pair.array
    kind = pick.choice(["cut", "join", "stack", "permute", "reshape", "slice", "pad", "resize", "repeat", "index"])
    axis = pick.integer(0, array.ndim - 1) if array.ndim else 0
    signed = axis - array.ndim if pick.integer(0, 1) else axis
    if kind == "permute":
        axes = shuffled(pick, range(array.ndim))
        given_axes = [a - array.ndim if pick.integer(0, 1) else a for a in axes]
        return pair.after(ops.permute(s, given_axes), array.transpose(axes))
    if kind == "reshape" and array.size:
        shape = factorisation(pick, array.size)
        given_shape = list(shape)
        if shape and pick.integer(0, 1):
            given_shape[pick.integer(0, len(shape) - 1)] = -1
        return pair.after(ops.reshape(s, given_shape), array.reshape(shape))
    if kind == "stack":
        others = [pair] + [fresh(pick, array.shape, s.dtype) for _ in range(pick.integer(0, 2))]
        axis = pick.integer(0, array.ndim)
        derived = ops.stack([other.structure for other in others], axis - array.ndim - 1)
        return combined(others, derived, np.stack([other.array for other in others], axis))
    if kind == "pad" and array.size < 400:
        before, after = ([pick.integer(0, 2) for _ in array.shape] for _ in range(2))
        fill = pick.choice([0, 5, ops.KEEP])
        value = KEPT if fill == ops.KEEP else fill
        derived = ops.pad(s, before, after, fill)
        padded = np.full([b + e + a for b, e, a in zip(before, array.shape, after)], value).astype(array.dtype)
        padded[tuple(slice(b, b + e) for b, e in zip(before, array.shape))] = array
        return pair.after(derived, padded)
    if kind == "slice":
        items, places = [], []
        for extent in array.shape:
            low = pick.integer(0, extent)
            high = pick.integer(low, extent)
            if pick.integer(0, 2) == 0 and low < extent:
                items.append(low - extent if pick.integer(0, 1) else low)
                places.append(low)
            else:
                items.append((low - extent if low < extent else low, None if high == extent else high))
                places.append(slice(low, high))
        count = pick.integer(0, array.ndim)
        return pair.after(ops.slice_(s, items[:count]), array[tuple(places[:count])])
    if not array.ndim:
        return pair
    extent = array.shape[axis]
    if kind == "cut":
        low = pick.integer(0, extent)
        high = pick.integer(low, extent)
        return pair.after(ops.cut(s, signed, low, high), array.take(range(low, high), axis))
    if kind == "index" and extent:
        i = pick.integer(0, extent - 1)
        return pair.after(ops.index(s, signed, i - extent), array.take(i, axis))
    if kind == "join":
        others = [pair]
        for _ in range(pick.integer(0, 2)):
            shape = (*array.shape[:axis], pick.integer(0, 3), *array.shape[axis + 1 :])
            others.append(fresh(pick, shape, s.dtype))
        others = shuffled(pick, others)
        derived = ops.join([other.structure for other in others], signed)
        return combined(others, derived, np.concatenate([other.array for other in others], axis))
    if kind == "resize":
        shape = [pick.integer(0, e + 2) if pick.integer(0, 1) else -1 for e in array.shape]
        wanted = [e if new == -1 else new for e, new in zip(array.shape, shape)]
        fill = None if all(w <= e for w, e in zip(wanted, array.shape)) else 3
        resized = np.full(wanted, 3).astype(array.dtype)
        common = tuple(slice(0, min(w, e)) for w, e in zip(wanted, array.shape))
        resized[common] = array[common]
        return pair.after(ops.resize(s, shape, fill), resized)
    if kind == "repeat" and extent and array.size < 400:
        block = pick.choice([b for b in range(1, extent + 1) if extent % b == 0])
        times = pick.integer(1, 3)
        parts = np.split(array, extent // block, axis)
        repeated = np.concatenate([part for part in parts for _ in range(times)], axis)
        given_block = None if block == extent and pick.integer(0, 1) else block
        return pair.after(ops.repeat(s, signed, times, given_block), repeated)
    return pair


@examples(400)
@given(st.data())
def test_operations_move_what_numpy_moves(data):
    pick = Pick.from_draw(data.draw)
    pair = fresh(pick, shape_of(pick))
    for _ in range(pick.integer(1, 5)):
        pair = one_operation(pick, pair)
        pair.check()


@examples(200)
@given(st.data())
def test_steps_casts_and_moves_together(data):
    pick = Pick.from_draw(data.draw)
    pair = fresh(pick, shape_of(pick, 1), pick.choice(["bfloat16", "float16", "float32"]))
    for _ in range(pick.integer(1, 6)):
        s, array = pair.structure, pair.array
        kept = any(node.step is None for node in s.nodes)
        kind = pick.choice(["move", "move", "cast", "scale", "sum"])
        if kind == "cast" and not kept:
            dtype = pick.choice(["bfloat16", "float16", "float32", "float64"])
            pair = pair.after(ops.cast(s, dtype), converted(array, dtype))
        elif kind == "scale" and not kept:
            step = Scale(0.3)
            derived = ops.computed(step, s.info, [s])
            pair = pair.after(derived, step.run(Box((0,) * array.ndim, array.shape), [array]))
        elif kind == "sum" and not kept:
            other = fresh(pick, array.shape, "bfloat16")
            step = WeightedSum((0.5, 0.3, 0.1))
            operands = [pair, other, pair]
            derived = ops.computed(step, None, [each.structure for each in operands])
            whole = step.run(Box((0,) * array.ndim, array.shape), [each.array for each in operands])
            pair = combined(operands, derived, whole)
        else:
            pair = one_operation(pick, pair)
        pair.check()


@examples(150)
@given(st.data())
def test_reshape_and_back_gives_the_pieces_that_there_were(data):
    pick = Pick.from_draw(data.draw)
    pair = fresh(pick, shape_of(pick, 1))
    shape = factorisation(pick, pair.array.size)
    there = pair.after(ops.reshape(pair.structure, shape), pair.array.reshape(shape))
    back = there.after(ops.reshape(there.structure, pair.array.shape), pair.array)
    back.check()
    assert len(back.structure) == 1


@pytest.mark.parametrize(
    ("old", "new", "pieces"),
    [
        ((24, 5), (4, 6, 5), 4),
        ((4, 6, 5), (24, 5), 4),
        ((4, 6, 5), (4, 30), 6),
        ((4, 6), (1, 4, 1, 6, 1), 1),
        ((1, 4, 6), (4, 6), 1),
        ((4, 6), (6, 4), 8),
        ((8, 3, 4), (2, 4, 12), 6),
        ((1,), (), 1),
        ((), (1, 1), 1),
        ((0, 3), (3, 0, 2), 0),
    ],
)
def test_reshape_needs_as_many_pieces_as_rows_in_common(old, new, pieces):
    structure = ops.reshape(ops.source(TensorInfo(old, "float32")).structure, new).structure
    assert (structure.shape, len(structure)) == (new, pieces)


def test_reshape_of_permuted_axes():
    """Merged axes need not be neighbours in the leaf: [R, B, W] becomes [B * W, R]."""
    array = np.arange(2 * 3 * 5, dtype=np.float32).reshape(5, 3, 2)
    permuted = ops.permute(ops.source(TensorInfo((5, 3, 2), "float32")).structure, [1, 2, 0]).structure
    structure = ops.reshape(permuted, [6, -1]).structure
    assert len(structure) == 3
    assert same(evaluate(structure, [array]), np.ascontiguousarray(array.transpose(1, 2, 0)).reshape(6, 5))


def test_too_many_pieces_are_refused_before_they_are_made():
    wide = ops.source(TensorInfo((3_000_000_000, 4), "float32")).structure
    with pytest.raises(
        StructureError, match=r"3,000,000,000 boxes or more; at most 1,000,000 are supported. Remedy .FC603.: "
    ):
        ops.reshape(wide, [12_000_000_000])
    with pytest.raises(StructureError, match="repeat makes 2,000,000 boxes"):
        ops.repeat(ops.source(TensorInfo((500_000, 2), "float32")).structure, 0, 4, 1)


def test_inputs_that_are_not_needed_are_gone():
    infos = [TensorInfo((4, 2), "float32") for _ in range(256)]
    joined = ops.join([ops.source(info).structure for info in infos], 0)
    assert joined.slots == tuple(range(256))
    part = ops.cut(joined.structure, 0, 401, 403)
    assert (part.slots, len(part.structure.inputs), len(part.structure)) == ((100,), 1, 1)
    assert part.structure.fragments.leaf_offset.tolist() == [[1, 0]]
    assert ops.cut(joined.structure, 0, 3, 9).slots == (0, 1, 2)
    assert ops.cut(joined.structure, 0, 5, 5).slots == ()


def test_nodes_that_are_not_needed_are_gone_with_their_inputs():
    info = TensorInfo((4,), "float32")
    leaf = ops.source(info).structure
    total = ops.computed(Average(2), info, [leaf, leaf]).structure
    scaled = ops.computed(Scale(2.0), info, [leaf]).structure
    joined = ops.join([total, leaf, scaled], 0)
    assert (joined.slots, len(joined.structure.nodes)) == ((0, 1, 2, 3), 2)
    part = ops.cut(joined.structure, 0, 6, 12)
    assert (part.slots, len(part.structure.nodes)) == ((2, 3), 1)
    assert part.structure.nodes[0].operands[0].fragments.leaf.tolist() == [1]
    arrays = [np.arange(4, dtype=np.float32) + 10 * i for i in range(2)]
    assert same(evaluate(part.structure, arrays), np.concatenate([arrays[0][2:], arrays[1] * 2]))


def test_nothing_is_done_where_nothing_changes():
    structure = ops.source(TensorInfo((4, 2), "float32")).structure
    for derived in (
        ops.cut(structure, 0, 0, 4),
        ops.permute(structure, [0, 1]),
        ops.reshape(structure, [-1, 2]),
        ops.slice_(structure, [(None, None)]),
        ops.pad(structure, [0, 0], [0, 0], 1),
        ops.resize(structure, [-1, 2], None),
        ops.repeat(structure, 0, 1),
        ops.cast(structure, "float32"),
        ops.join([structure], 1),
    ):
        assert derived.structure is structure
        assert derived.slots == (0,)


def test_casts_that_change_nothing_leave_no_chain():
    leaf = ops.source(TensorInfo((4,), "bfloat16")).structure
    wide = ops.cast(leaf, "float32").structure
    assert (wide.dtype, wide.chains) == ("float32", (("float32",),))
    assert ops.cast(wide, "bfloat16").structure.chains == ((),)
    exact = ops.source(TensorInfo((4,), "float32")).structure
    mixed = ops.join([wide, exact], 0).structure
    assert mixed.chains == (("float32",), ())
    narrow = ops.cast(mixed, "bfloat16").structure
    assert narrow.chains == ((), ("bfloat16",))
    again = ops.cast(narrow, "float32").structure
    assert again.chains == (("float32",), ("bfloat16", "float32"))


def test_kept_elements_follow_the_dtype_of_the_value():
    padded = ops.pad(ops.source(TensorInfo((2,), "bfloat16")).structure, [0], [1], ops.KEEP).structure
    structure = ops.cast(padded, "float32").structure
    assert structure.nodes[0].info == TensorInfo((3,), "float32")
    array = np.array([1, 2], dtype_of("bfloat16").numpy)
    assert same(evaluate(structure, [array]), np.array([1, 2, KEPT], np.float32))


def test_states_follow_the_moves_without_the_casts():
    leaf = ops.source(TensorInfo((4, 6), "bfloat16")).structure
    cast = ops.cast(ops.permute(leaf, [1, 0]).structure, "float16").structure
    padded = ops.pad(cast, [0, 0], [1, 0], 0.1).structure
    scaled = ops.computed(Scale(0.3), None, [ops.cast(padded, "bfloat16").structure]).structure
    rounded = ops.cast(scaled, "float8_e4m3fn").structure
    twin = ops.with_inputs(rounded, [TensorInfo((4, 6), "float32")])
    assert (twin.dtype, twin.chains, twin.nodes[0].info.dtype) == ("float32", ((),), "float32")
    array = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = np.pad(array.T, ((0, 1), (0, 0)), constant_values=np.float32(0.1)) * np.float32(0.3)
    assert same(evaluate(twin, [array]), np.ascontiguousarray(expected))
    again = ops.with_inputs(rounded, rounded.inputs, casts=True)
    assert (again.dtype, again.chains) == (rounded.dtype, rounded.chains)


def test_a_cast_that_is_a_node_is_dropped_for_states():
    leaf = ops.source(TensorInfo((3,), "float32")).structure
    node = ops.computed(Convert(("float16", "bfloat16")), None, [leaf]).structure
    assert node.dtype == "bfloat16"
    assert ops.with_inputs(node, node.inputs).dtype == "float32"
    assert ops.with_inputs(node, node.inputs, casts=True).dtype == "bfloat16"


def test_states_of_different_dtypes_cannot_be_one_value():
    leaf = ops.source(TensorInfo((3,), "bfloat16")).structure
    joined = ops.join([leaf, leaf], 0).structure
    with pytest.raises(StructureError, match="would have different dtypes: float32 and float64; expected one"):
        ops.with_inputs(joined, [TensorInfo((3,), "float32"), TensorInfo((3,), "float64")])
    with pytest.raises(StructureError, match=r"input 2: expected shape \[3\], got \[4\]"):
        ops.with_inputs(joined, [TensorInfo((3,), "float32"), TensorInfo((4,), "float32")])
    with pytest.raises(StructureError, match="expected 2 inputs; got 1"):
        ops.with_inputs(joined, [TensorInfo((3,), "float32")])


def test_steps_that_mean_nothing_for_states_say_so():
    weight = ops.source(TensorInfo((4, 4), "float32")).structure
    scaled = ops.computed(Scale(2.0), None, [weight]).structure
    with pytest.raises(StructureError, match="scale takes floating-point numbers; got int64"):
        ops.with_inputs(scaled, [TensorInfo((4, 4), "int64")])


def test_steps_that_need_extents_of_operands_find_them():
    infos = [TensorInfo((4, 6), "float32"), TensorInfo((4, 2), "float32"), TensorInfo((2, 6), "float32")]
    merged = ops.computed(LoraMerge(2.0), None, [ops.source(info).structure for info in infos]).structure
    assert merged.nodes[0].step == LoraMerge(2.0, 2)


W = TensorInfo((4, 6), "float32")
BAD = [
    (lambda s: ops.cut(s, 2, 0, 1), "axis 2 is out of range for a value of 2 axes; expected -2 to 1"),
    (lambda s: ops.cut(s, -3, 0, 1), "axis -3 is out of range"),
    (lambda s: ops.cut(s, "0", 0, 1), "axis has to be an integer; got '0'"),
    (lambda s: ops.cut(s, True, 0, 1), "axis has to be an integer; got True"),
    (lambda s: ops.cut(s, 1, 2, 7), "cut of [2, 7) along axis 1 of shape [4, 6]; expected 0 <= start <= stop <= 6"),
    (lambda s: ops.cut(s, 1, 3, 2), "cut of [3, 2)"),
    (lambda s: ops.cut(s, 1, -1, 2), "cut of [-1, 2)"),
    (lambda s: ops.index(s, 0, 4), "index 4 is out of range for axis 0 of shape [4, 6]"),
    (lambda s: ops.index(s, 1, -7), "index -7 is out of range for axis 1"),
    (lambda s: ops.slice_(s, [0, 0, 0]), "slice of 3 axes; the value has shape [4, 6]"),
    (lambda s: ops.slice_(s, [(1, 9)]), "slice 1:9 of axis 0 of shape [4, 6]; expected bounds in ascending order"),
    (lambda s: ops.slice_(s, [(3, -2)]), "slice 3:-2 of axis 0"),
    (lambda s: ops.join([], 0), "join takes at least one value"),
    (lambda s: ops.stack([], 0), "stack takes at least one value"),
    (
        lambda s: ops.join([s, ops.cast(s, "bfloat16").structure], 0),
        "join takes values of equal dtype; expected float32 as value 1 has, got bfloat16 (value 2)",
    ),
    (
        lambda s: ops.join([s, ops.cut(s, 1, 0, 5).structure], 0),
        "all other extents equal; expected as [4, 6] (value 1), got [4, 5] (value 2)",
    ),
    (lambda s: ops.join([s, ops.index(s, 1, 0).structure], 1), "got [4] (value 2)"),
    (lambda s: ops.join([ops.index(s, 1, 0).structure, s], 0), "got [4, 6] (value 2)"),
    (
        lambda s: ops.stack([s, ops.cut(s, 0, 0, 2).structure], 0),
        "takes values of equal shape; expected as [4, 6] (value 1), got [2, 6] (value 2)",
    ),
    (lambda s: ops.stack([s, s], 3), "axis 3 is out of range for a value of 3 axes"),
    (lambda s: ops.permute(s, [0, 0]), "permute of shape [4, 6] takes every axis from 0 to 1 once; got [0, 0]"),
    (lambda s: ops.permute(s, [0]), "permute of shape [4, 6]"),
    (lambda s: ops.permute(s, [0, 2]), "permute of shape [4, 6]"),
    (lambda s: ops.reshape(s, [5, 5]), "changes the number of elements; expected 24, got 25"),
    (lambda s: ops.reshape(s, [-1, -1]), "reshape takes -1 at most once; got [-1, -1]"),
    (lambda s: ops.reshape(s, [-1, 7]), "the other extents make 7, of which 24 is no multiple"),
    (lambda s: ops.reshape(s, [-1, 0]), "the other extents make 0"),
    (lambda s: ops.reshape(s, [-2, 12]), "reshape takes extents >= 0, or -1 once; got -2"),
    (lambda s: ops.pad(s, [1], [0, 0], 0), "pad takes one number for each axis of shape [4, 6]; got [1] (before)"),
    (lambda s: ops.pad(s, [0, 0], [0, -1], 0), "pad takes numbers >= 0; got [0, -1] (after)"),
    (lambda s: ops.pad(s, [0, 0], [0, 1], 1e39), "fill=1e+39 is no number of dtype float32"),
    (lambda s: ops.pad(s, [0, 0], [0, 1], None), "fill= takes a number; got None"),
    (lambda s: ops.resize(s, [4], 0), "resize takes one extent for each axis of shape [4, 6]; got [4]"),
    (lambda s: ops.resize(s, [4, -2], 0), "resize takes extents >= 0, or -1; got [4, -2]"),
    (lambda s: ops.resize(s, [4, 7], None), "resize of [4, 6] to [4, 7] adds elements; expected fill="),
    (lambda s: ops.repeat(s, 0, 0), "repeat takes a number of copies >= 1; got 0"),
    (lambda s: ops.repeat(s, 1, 2, 4), "blocks of 4 along axis 1 of shape [4, 6]: 6 is no multiple of the block"),
    (lambda s: ops.repeat(s, 1, 2, 0), "repeat of blocks of 0"),
    (lambda s: ops.cast(s, "float7"), "dtype 'float7' is not supported"),
    (
        lambda s: ops.cast(ops.source(TensorInfo((2,), "complex64")).structure, "float32"),
        "a cast of complex64 to float32 would drop the imaginary parts",
    ),
    (lambda s: ops.constant(TensorInfo((2,), "uint8"), -1), "fill=-1 is no number of dtype uint8"),
    (lambda s: ops.constant(TensorInfo((2,), "int32"), 0.5), "fill=0.5 is no number of dtype int32"),
    (
        lambda s: ops.computed(Scale(2.0), TensorInfo((4, 6), "bfloat16"), [s]),
        "gives float32 [4, 6]; expected bfloat16 [4, 6]",
    ),
    (
        lambda s: ops.computed(Scale(2.0), None, [ops.pad(s, [0, 0], [1, 0], ops.KEEP).structure]),
        "operand 1 has elements that keep what the target has",
    ),
    (
        lambda s: ops.computed(DequantFp8((2, 2)), None, [s, s]),
        "expected scales of shape [2, 3], got [4, 6]",
    ),
]


@pytest.mark.parametrize(("operation", "message"), BAD, ids=[message for _, message in BAD])
def test_what_does_not_fit_is_told(operation, message):
    with pytest.raises(StructureError) as caught:
        operation(ops.source(W).structure)
    assert message in str(caught.value)
