"""assign_sharded_slice against numpy slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.memory.tensors import assign_sharded_slice
from paddle_flexckpt.sharded_weight import ShardedWeight, ShardedWeightDesc
from tests.property import examples
from tests.property.layouts import Pick

WHOLE = (100, 100, 100)


def shard(array: np.ndarray, offset, flat=None) -> ShardedWeight:
    whole = WHOLE[: len(offset)]
    return ShardedWeight("w", array, array.shape if flat is None else (4,), whole, offset, flat is not None, flat)


def desc(offset, shape) -> ShardedWeightDesc:
    return ShardedWeightDesc("w", tuple(shape), WHOLE[: len(offset)], tuple(offset), "float32")


def place(pick: Pick, shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(pick.integer(0, whole - inner) for whole, inner in zip(shape, part))


@examples(100)
@given(st.data())
def test_the_slice_and_nothing_else_is_assigned(data):
    pick = Pick.from_draw(data.draw)
    ndim = pick.integer(0, 3)
    part = tuple(pick.integer(1, 4) for _ in range(ndim))
    sides = []
    for _ in range(2):
        shape = tuple(extent + pick.integer(0, 3) for extent in part)
        sides.append((shape, place(pick, shape, part), tuple(pick.integer(0, 50) for _ in part)))
    (src_shape, src_at, src_offset), (dst_shape, dst_at, dst_offset) = sides
    source = np.arange(1, 1 + int(np.prod(src_shape)), dtype=np.float32).reshape(src_shape)
    expected = np.arange(-int(np.prod(dst_shape)), 0, dtype=np.float32).reshape(dst_shape)
    target = expected.copy()
    if pick.integer(0, 1) and ndim:
        target = np.asfortranarray(target)
    expected[tuple(slice(a, a + n) for a, n in zip(dst_at, part))] = source[
        tuple(slice(a, a + n) for a, n in zip(src_at, part))
    ]
    assign_sharded_slice(
        desc([o + a for o, a in zip(src_offset, src_at)], part),
        shard(source, src_offset),
        desc([o + a for o, a in zip(dst_offset, dst_at)], part),
        shard(target, dst_offset),
    )
    assert (target == expected).all()


def test_a_description_that_reaches_beyond_its_shard_means_the_common_part():
    target = np.zeros((2, 2), dtype=np.float32)
    assign_sharded_slice(
        desc((0, 0), (9, 9)),
        shard(np.ones((2, 2), dtype=np.float32), (3, 3)),
        desc((0, 0), (9, 9)),
        shard(target, (5, 5)),
    )
    assert (target == 1).all()


@pytest.mark.parametrize(
    ("source", "target", "options", "words"),
    [
        ((desc((9, 9), (1, 1)), shard(np.ones((2, 2)), (0, 0))), None, {}, "source shard 'w'.*no overlap"),
        (None, (desc((9, 9), (1, 1)), shard(np.ones((2, 2)), (0, 0))), {}, "target shard 'w'.*no overlap"),
        ((desc((0, 0), (1, 2)), shard(np.ones((2, 2)), (0, 0))), None, {}, "overlap shape mismatch"),
        ((desc((0, 0), (2, 2)), shard(np.ones((2, 2), dtype=np.int64), (0, 0))), None, {}, "dtype.*int64.*float64"),
        ((desc((0,), (2,)), shard(np.ones(2), (0,), slice(0, 2))), None, {}, "source shard 'w' is flattened"),
        (None, (desc((0,), (2,)), shard(np.ones(2), (0,), slice(0, 2))), {}, "target shard 'w' is flattened"),
        (None, None, {"postprocess_list": [abs]}, "postprocess_list is not available"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(source, target, options, words):
    memory = np.zeros((2, 2))
    source = source or (desc((0, 0), (2, 2)), shard(np.ones((2, 2)), (0, 0)))
    target = target or (desc((0, 0), (2, 2)), shard(memory, (0, 0)))
    with pytest.raises(ValidationError, match=words):
        assign_sharded_slice(*source, *target, **options)
    assert not memory.any()


@pytest.mark.paddle
def test_paddle_tensors_are_assigned_in_place():
    paddle = pytest.importorskip("paddle")
    source = paddle.arange(12, dtype="float32").reshape([3, 4])
    base = paddle.zeros([4, 6])
    assign_sharded_slice(
        desc((1, 1), (2, 2)), shard(source, (0, 0)), desc((0, 0), (2, 2)), shard(base[1:3, 2:4], (0, 0))
    )
    expected = np.zeros((4, 6))
    expected[1:3, 2:4] = [[5, 6], [9, 10]]
    assert (base.numpy() == expected).all()
