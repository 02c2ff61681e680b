"""Element-wise steps: against plain definitions, and any box of a result against the whole."""

from __future__ import annotations

import itertools
import math
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa.casts import FLOATS, converted, number_in, simplify_chain
from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.steps import (
    Average,
    Constant,
    Convert,
    DequantFp8,
    DequantMxfp4,
    LoraMerge,
    Same,
    Scale,
    WeightedSum,
    bound,
)
from paddle_flexckpt.aoa.structure import StructureError
from paddle_flexckpt.catalog import CheckpointError, dtype_of
from tests.property import examples
from tests.property.layouts import Pick

f32 = np.float32


def numbers(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers of all magnitudes, with zeros, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    if dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    array = rng.normal(size=shape) * 2.0 ** rng.integers(-12, 12, shape)
    special = rng.integers(0, 40, shape)
    for code, value in enumerate([0.0, -0.0, np.inf, -np.inf, np.nan]):
        array = np.where(special == code, value, array)
    return converted(np.asarray(array), dtype)


def run(step, *operands: np.ndarray, box: Box | None = None) -> np.ndarray:
    """The step on a box of its result, of which it gets just what it asks for."""
    infos = [TensorInfo(operand.shape, operand.dtype.name) for operand in operands]
    result = step.result(infos)
    box = box or Box((0,) * len(result.shape), result.shape)
    boxes = step.operand_boxes(box)
    assert len(boxes) == len(operands)
    parts = []
    for each, operand in zip(boxes, operands):
        assert all(0 <= a <= b <= size for a, b, size in zip(each.offset, each.stop, operand.shape)), each
        parts.append(np.array(operand[tuple(slice(a, b) for a, b in zip(each.offset, each.stop))]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        array = step.run(box, parts)
    assert (array.shape, array.dtype.name) == (box.shape, result.dtype)
    return array


def one_nan(array: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array)


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    return got.shape == expected.shape and got.dtype == expected.dtype and got.tobytes() == expected.tobytes()


def any_step(pick: Pick):
    """A step with operands of shapes that suit it."""
    seed = pick.integer(0, 10_000)
    dtype, other = (pick.choice(list(FLOATS)) for _ in range(2))
    shape = tuple(pick.integer(1, 9) for _ in range(pick.integer(0, 3)))
    kind = pick.choice(["scale", "sum", "average", "lora", "fp8", "mxfp4", "convert", "same"])
    first, second = numbers(seed, shape, dtype), numbers(seed + 1, shape, other)
    if kind == "scale":
        return Scale(0.37), [first]
    if kind == "sum":
        return WeightedSum((0.3, -1.7, 1.0)), [first, second, first]
    if kind == "average":
        return Average(3), [first, second, second]
    if kind == "convert":
        wide = first.astype(f32)
        is_large = np.abs(wide) > 400  # no number of some types
        return Convert((other, "bfloat16")), [np.where(is_large, first.dtype.type(1), first)]
    if kind == "same":
        return Same(("a", "b")), [first, first.copy()]
    if kind == "lora":
        n, m, r = pick.integer(1, 9), pick.integer(1, 9), pick.integer(0, 5)
        return LoraMerge(0.7, r), [
            numbers(seed, (n, m), dtype), numbers(seed + 1, (n, r), other), numbers(seed + 2, (r, m), other)
        ]  # fmt: skip
    if kind == "fp8":
        block = tuple(pick.integer(1, 4) for _ in shape)
        scales = tuple(-(-extent // b) for extent, b in zip(shape, block))
        return DequantFp8(block), [first, numbers(seed + 1, scales, other)]
    groups = (*shape, pick.integer(1, 4))
    size = pick.integer(1, 4)
    return DequantMxfp4(size), [numbers(seed, (*groups, size), "uint8"), numbers(seed + 1, groups, "uint8")]


@examples(400)
@given(st.data())
def test_any_box_of_a_result_is_that_box_of_the_whole_bit_for_bit(data):
    pick = Pick.from_draw(data.draw)
    step, operands = any_step(pick)
    whole = run(step, *operands)
    offset = tuple(pick.integer(0, extent) for extent in whole.shape)
    shape = tuple(pick.integer(0, extent - o) for o, extent in zip(offset, whole.shape))
    box = Box(offset, shape)
    part = np.ascontiguousarray(whole[tuple(slice(a, b) for a, b in zip(box.offset, box.stop))]).reshape(shape)
    assert same(run(step, *operands, box=box), part)


@examples(100)
@given(st.data())
def test_operands_may_be_strided(data):
    pick = Pick.from_draw(data.draw)
    step, operands = any_step(pick)
    whole = run(step, *operands)
    box = Box((0,) * whole.ndim, whole.shape)
    assert same(
        step.run(box, [np.asfortranarray(operand) for operand in operands]).reshape(whole.shape, order="C"), whole
    )


def test_scale_rounds_once_from_float32():
    array = numbers(1, (50,), "bfloat16")
    expected = one_nan(array.astype(f32) * f32(0.1)).astype(ml_dtypes.bfloat16)
    assert same(run(Scale(0.1), array), expected)
    wide = numbers(1, (50,), "float64")
    assert same(run(Scale(0.1), wide), one_nan(wide * 0.1))


def test_sum_goes_from_left_to_right_in_float32():
    a, b, c = (np.array([x], f32) for x in (1e8, 1.0, -1e8))
    assert run(WeightedSum((1.0, 1.0, 1.0)), a, b, c).tolist() == [0.0]
    assert run(WeightedSum((1.0, 1.0, 1.0)), a, c, b).tolist() == [1.0]
    halves = [numbers(seed, (40,), "float16") for seed in (2, 3)]
    with np.errstate(all="ignore"):
        expected = one_nan(halves[0].astype(f32) * f32(0.3) + halves[1].astype(f32) * f32(0.7)).astype(np.float16)
    assert same(run(WeightedSum((0.3, 0.7)), *halves), expected)


def test_float64_where_an_operand_is_and_one_rounding_from_there():
    # 1 + 2**-8 lies half way between two bfloat16; what float64 adds to it decides.
    small = np.array([2.0**-8 + 2.0**-40])
    total = run(WeightedSum((1.0, 1.0)), np.array([1], ml_dtypes.bfloat16), small)
    assert (total.dtype.name, float(total[0])) == ("bfloat16", 1.0078125)


def test_average_divides_the_sum():
    a, b, c = (numbers(seed, (30,), "float32") for seed in (4, 5, 6))
    with np.errstate(all="ignore"):
        assert same(run(Average(3), a, b, c), one_nan((a + b + c) / f32(3)))


def test_there_is_one_nan_whatever_the_operands_have():
    """Which bits a NaN has depends on whether vector or scalar code made it, and so on the place in the array."""
    plus, minus = np.full(19, np.nan, f32), np.full(19, -np.nan, f32)
    infinite, zero = np.full(19, np.inf, f32), np.zeros(19, f32)
    for got in (
        run(WeightedSum((1.0, 1.0)), plus, minus),
        run(WeightedSum((1.0, -1.0)), minus, plus),
        run(Average(2), infinite, -infinite),
        run(Scale(0.0), infinite),
        run(DequantFp8((4,)), infinite, zero[:5]),
        run(LoraMerge(1.0, 1), minus[:3, None], infinite[:3, None], zero[:1, None])[:, 0],
    ):
        assert got.tobytes() == plus[: len(got)].tobytes()


def test_lora_merge_adds_one_rank_after_the_other():
    w, a, b = (numbers(s, shape, "bfloat16") for s, shape in enumerate([(5, 7), (5, 3), (3, 7)]))
    got = run(LoraMerge(0.3, 3), w, a, b)
    with np.errstate(all="ignore"):
        for i, j in itertools.product(range(5), range(7)):
            total = f32(a[i, 0]) * f32(b[0, j])
            for k in (1, 2):
                total = total + f32(a[i, k]) * f32(b[k, j])
            expected = one_nan(np.asarray(f32(w[i, j]) + f32(0.3) * total)).astype(ml_dtypes.bfloat16)
            assert got[i, j].tobytes() == expected.tobytes()


def test_lora_merge_without_ranks_is_the_weight():
    w = numbers(1, (3, 4), "float16")
    assert same(run(LoraMerge(2.0, 0), w, np.zeros((3, 0), np.float16), np.zeros((0, 4), np.float16)), w)


def test_fp8_takes_the_scale_of_the_block():
    w, s = numbers(1, (5, 7), "float8_e4m3fn"), numbers(2, (3, 2), "float32")
    got = run(DequantFp8((2, 4)), w, s)
    with np.errstate(all="ignore"):
        for i, j in itertools.product(range(5), range(7)):
            assert got[i, j].tobytes() == one_nan(f32(w[i, j]) * s[i // 2, j // 4]).tobytes()
    assert DequantFp8((2, 4)).operand_boxes(Box((3, 4), (2, 3))) == (Box((3, 4), (2, 3)), Box((1, 1), (2, 1)))


def test_mxfp4_low_nibble_first():
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    w = np.array([[0x21, 0xF8], [0x7A, 0x90]], np.uint8)
    s = np.array([127, 130], np.uint8)
    expected = [0.5, 1.0, -0.0, -6.0, -1.0 * 8, 6.0 * 8, 0.0, -0.5 * 8]
    got = run(DequantMxfp4(2), w, s)
    assert same(got, np.array(expected, f32))
    # All bytes under the smallest and the largest scale: exact, subnormal numbers and infinity included.
    every = np.arange(256, dtype=np.uint8).reshape(2, 128)
    for scale in (0, 1, 127, 254, 255):
        got = run(DequantMxfp4(128), every, np.full(2, scale, np.uint8))
        values = [
            math.ldexp(table[n & 7], scale - 127) * (-1) ** (n >> 3) for b in range(256) for n in (b & 15, b >> 4)
        ]
        with np.errstate(over="ignore"):
            assert (got == np.array(values).astype(f32)).all()


def test_mxfp4_reads_the_groups_that_it_touches():
    step = DequantMxfp4(16)
    assert step.operand_boxes(Box((3, 40), (2, 30))) == (Box((3, 1, 0), (2, 2, 16)), Box((3, 1), (2, 2)))


def test_constants():
    assert same(Constant(3, "int64").run(Box((5, 1), (2, 3)), []), np.full((2, 3), 3))
    assert same(Constant(0.1, "bfloat16").run(Box((), ()), []), np.array(0.1, ml_dtypes.bfloat16))
    assert Constant(2**53 + 1, "int64").run(Box((0,), (1,)), []).tolist() == [2**53 + 1]
    assert Constant(2**64 - 1, "uint64").run(Box((0,), (1,)), []).tolist() == [2**64 - 1]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(256, "uint8"), (-1, "uint64"), (0.5, "int8"), (2, "bool"), (1e6, "float8_e4m3fn"), (70000, "float16"),
     (math.nan, "int32"), (math.inf, "int32"), (10**400, "float64"), (1e39, "complex64")],
)  # fmt: skip
def test_numbers_that_a_dtype_does_not_have(value, dtype):
    with pytest.raises(StructureError, match=rf"is no number of dtype {dtype}"):
        number_in(value, dtype)


def test_same_gives_the_first_or_names_what_differs():
    a = np.array([0.9, np.nan], f32)
    assert same(run(Same(("x", "y")), a, a.copy()), a)
    assert same(run(Same(("x", "y")), a[0], a[0].copy()), a[0])
    with pytest.raises(CheckpointError) as caught:
        run(Same(("x", "y", "z")), np.zeros((2, 3)), np.zeros((2, 3)), np.eye(3)[1:], box=Box((1, 1), (1, 2)))
    text = str(caught.value)
    assert "'x' and 'z' go to one target and have to be equal; at element [1, 2]" in text
    assert "'x' has 0.0, 'y' has 0.0, 'z' has 1.0. Remedy (FC603): " in text
    with pytest.raises(CheckpointError, match=r"at element \[\] 'x' has 0.0, 'y' has -0.0"):
        run(Same(("x", "y")), np.asarray(f32(0.0)), np.asarray(f32(-0.0)))


# Casts


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_float64_is_rounded_once(dtype):
    """Numbers half way between two neighbours, and next to half way, against the neighbours themselves."""
    target = dtype_of(dtype).numpy
    bits = min(target.itemsize * 8, 16)
    if dtype == "float32":
        every = (np.random.default_rng(0).integers(0, 2**31, 20000).astype(np.uint32)).view(f32).astype(np.float64)
        every = np.unique(every[np.isfinite(every)])
        upper = np.nextafter(every.astype(f32), f32(np.inf)).astype(np.float64)
    else:
        every = np.arange(2 ** (bits - 1)).astype(f"uint{bits}").view(target).astype(np.float64)
        every = every[np.isfinite(every)]
        every, upper = every[:-1], every[1:]
    finite = np.isfinite(upper)
    low, high = every[finite], upper[finite]
    middle = low + (high - low) / 2
    even = (low.astype(target).view(f"uint{target.itemsize * 8}") & 1) == 0
    for sign in (1, -1):
        assert (converted(sign * middle, dtype).astype(np.float64) == sign * np.where(even, low, high)).all()
        assert (converted(sign * np.nextafter(middle, np.inf), dtype).astype(np.float64) == sign * high).all()
        assert (converted(sign * np.nextafter(middle, -np.inf), dtype).astype(np.float64) == sign * low).all()
        assert (converted(sign * low, dtype).astype(np.float64) == sign * low).all()


def test_special_numbers_survive_casts():
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-300, -1e-300])
    got = converted(special, "bfloat16").astype(np.float64)
    assert np.array_equal(got, [0, 0, np.inf, -np.inf, np.nan, 0, 0], equal_nan=True)
    assert np.signbit(got[[1, 6]]).all() and not np.signbit(got[[0, 5]]).any()


def test_integers_wrap_and_are_rounded_once():
    assert converted(np.array([300, -1]), "uint8").tolist() == [44, 255]
    assert float(converted(np.array([2**24 + 2**16 + 1]), "bfloat16")[0]) == 2**24 + 2**17


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -200.0, 128.0])
def test_numbers_without_an_integer_are_refused(value, dtype):
    array = converted(np.array([1.9, -1.9, value]), dtype)
    assert converted(array[:2], "int8").tolist() == [1, -1]
    with pytest.raises(CheckpointError, match=r"to int8 met .*; expected numbers from -128 to 127. Remedy .FC206.: "):
        converted(array, "int8")


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
def test_signalling_nans_are_cast_as_others_are(source):
    """Whatever their bits are: memory that was never filled is cast, too."""
    numpy = dtype_of(source).numpy
    bits = np.array([np.inf, -np.inf], numpy).view(f"u{numpy.itemsize}") + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [converted(bits.view(numpy), target) for target in (*FLOATS, "complex64", "complex128")]
        with pytest.raises(CheckpointError, match="met nan; expected numbers"):
            converted(bits.view(numpy), "int8")
    with np.errstate(invalid="ignore"):
        assert all(np.isnan(each.astype(np.complex128)).all() for each in found)


def test_the_largest_integers_are_those_of_the_dtype():
    assert converted(np.array([-(2.0**63), 2.0**63 - 1024]), "int64").tolist() == [-(2**63), 2**63 - 1024]
    with pytest.raises(CheckpointError, match="met 9.2"):
        converted(np.array([2.0**63]), "int64")
    assert converted(np.array([255.9], f32), "uint8").tolist() == [255]


def every_number(dtype: str) -> np.ndarray:
    """All numbers of a narrow dtype, many of a wide one; NaN of one kind only."""
    target = dtype_of(dtype).numpy
    if target == np.bool_:
        return np.array([False, True])
    if target.itemsize <= 2:
        array = np.arange(2 ** (8 * target.itemsize)).astype(f"uint{8 * target.itemsize}").view(target)
    else:
        array = np.random.default_rng(1).integers(0, 2**63, 4000).astype(np.int64).view(target)
    if target.kind in "iub":
        return array
    return np.where(np.isnan(array), np.asarray(np.nan, target), array).astype(target)


NAMES = ["bool", "uint8", "int8", "int16", "int32", "uint32", "int64", *FLOATS, "complex64", "complex128"]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("source", NAMES)
def test_casts_that_are_dropped_change_no_number(source):
    array = every_number(source)
    dropped = 0
    for chain in itertools.product(NAMES, repeat=2):
        short = simplify_chain(source, chain)
        assert (source, *short)[-1] == chain[-1]
        if short == chain:
            continue
        dropped += 1
        with np.errstate(all="ignore"):
            try:
                long_way = converted(converted(array, chain[0]), chain[1])
            except CheckpointError:
                # Nothing is left of such a chain but one of its casts, which refuses the same numbers.
                with pytest.raises(CheckpointError):
                    for dtype in short:
                        array = converted(array, dtype)
                continue
            short_way = array
            for dtype in short:
                short_way = converted(short_way, dtype)
        assert short_way.dtype == long_way.dtype
        equal = (short_way == long_way) | ((short_way != short_way) & (long_way != long_way))
        assert equal.all(), (source, chain, short)
    assert dropped >= len(NAMES)


@pytest.mark.parametrize(
    ("source", "chain", "expected"),
    [
        ("bfloat16", (), ()),
        ("bfloat16", ("bfloat16",), ()),
        ("bfloat16", ("float32", "bfloat16"), ()),
        ("bfloat16", ("float32", "float64", "float16"), ("float16",)),
        ("float32", ("bfloat16", "float32"), ("bfloat16", "float32")),
        ("float32", ("bfloat16", "float32", "bfloat16"), ("bfloat16",)),
        ("float32", ("float16", "bfloat16"), ("float16", "bfloat16")),
        ("float32", ("float64", "float32", "float16", "float16"), ("float16",)),
        ("int8", ("int32", "uint8"), ("uint8",)),
        ("int32", ("float64", "float32"), ("float64", "float32")),
        ("float16", ("float32", "int32"), ("float32", "int32")),
        ("float32", ("complex64", "float32"), ("complex64", "float32")),
    ],
)
def test_chains_are_as_short_as_they_can_be(source, chain, expected):
    assert simplify_chain(source, chain) == expected


# What does not fit

F = "float32"


@pytest.mark.parametrize(
    ("step", "infos", "message"),
    [
        (Scale(2.0), [((2,), "int32")], "scale takes floating-point numbers; got int32 (operand 1)"),
        (Scale(2.0), [((2,), "complex64")], "scale takes floating-point numbers; got complex64 (operand 1)"),
        (Scale(2.0), [], "scale takes 1 operand; got 0"),
        (WeightedSum((1.0, 1.0)), [((2,), F)], "sum takes 2 operands; got 1"),
        (WeightedSum((1.0, 1.0)), [((2,), F), ((2,), "bool")], "got bool (operand 2)"),
        (WeightedSum((1.0, 1.0)), [((2,), F), ((3,), F)], "expected [2] as operand 1 has, got [3] (operand 2)"),
        (Average(2), [((2,), F), ((2, 1), F)], "average takes operands of equal shape"),
        (LoraMerge(1.0, 2), [((4, 6), F), ((4, 2), F), ((3, 6), F)], "expected B [2, 6], got [3, 6]"),
        (LoraMerge(1.0, 2), [((4, 6), F), ((2, 4), F), ((2, 6), F)], "expected A [4, 2], got [2, 4]"),
        (LoraMerge(1.0, 2), [((4,), F), ((4, 2), F), ((2, 6), F)], "lora_merge takes a matrix W; got shape [4]"),
        (DequantFp8((2, 2)), [((5, 4), F), ((2, 2), F)], "expected scales of shape [3, 2], got [2, 2]"),
        (DequantFp8((2,)), [((4, 4), F), ((2, 2), F)], "one positive block extent for each axis of W; got block [2]"),
        (DequantFp8((2, 0)), [((4, 4), F), ((2, 2), F)], "got block [2, 0]"),
        (DequantFp8((2, 2)), [((4, 4), "uint8"), ((2, 2), F)], "got uint8 (operand 1)"),
        (DequantMxfp4(4), [((2, 4), "uint8"), ((2,), F)], "takes S of dtype uint8; got float32"),
        (DequantMxfp4(4), [((2, 5), "uint8"), ((2,), "uint8")], "takes W of shape [..., groups, 4]; got [2, 5]"),
        (DequantMxfp4(4), [((2, 4), "uint8"), ((3,), "uint8")], "expected S [2], got [3]"),
        (Same(("a", "b")), [((), F), ((1,), F)], "'a' and 'b' have to be equal; got float32 [] and float32 [1]"),
        (Convert(("complex64", F)), [((2,), F)], "a cast of complex64 to float32 would drop the imaginary parts"),
        (Constant(0, F), [], "a constant's shape does not follow from operands"),
    ],
)
def test_operands_that_do_not_fit_are_refused(step, infos, message):
    with pytest.raises(StructureError) as caught:
        step.result([TensorInfo(*info) for info in infos])
    assert message in str(caught.value)


def test_complex_numbers_are_not_made_real():
    with pytest.raises(CheckpointError, match="a cast of complex64 to float32 would drop the imaginary parts"):
        converted(np.zeros(2, np.complex64), "float32")


def test_steps_that_do_not_know_extents_are_told_them():
    weight = TensorInfo((4, 6), F)
    infos = [weight, TensorInfo((4, 2), F), TensorInfo((2, 6), F)]
    assert bound(LoraMerge(1.0), infos) == LoraMerge(1.0, 2)
    assert bound(DequantMxfp4(), [TensorInfo((2, 16), "uint8"), TensorInfo((2,), "uint8")]) == DequantMxfp4(16)
    assert bound(Scale(1.0), [weight]) == Scale(1.0)
