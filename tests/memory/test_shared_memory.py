"""Targets that share memory with sources or with each other: refused, unless nothing can go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.remedies.following import provoked

SHAPE = (4, 6)


def rows(array: np.ndarray, rank: int) -> ShardedWeight:
    return ShardedWeight("w", array, (2, 6), SHAPE, (2 * rank, 0))


def columns(array: np.ndarray, rank: int) -> ShardedWeight:
    return ShardedWeight("w", array, (4, 3), SHAPE, (0, 3 * rank))


def reshard(make) -> list:
    """``make(rank, base)`` gives (source, target) within a base array of 24 elements per rank."""
    bases = [np.arange(24, dtype=np.float32) + 100 * rank for rank in (0, 1)]

    def job(comm):
        source, target = make(comm.position, bases[comm.position])
        return reshard_sharded_state_dict({"w": source}, {"w": target}, comm)

    return SimulatedWorld(2).run_all(job)


def test_the_same_memory_in_another_layout_is_refused_on_every_rank():
    def make(rank, base):
        if rank == 0:
            return rows(base[:12].reshape(2, 6), 0), columns(base[:12].reshape(4, 3), 0)
        return rows(base[:12].reshape(2, 6), 1), columns(base[12:].reshape(4, 3), 1)

    outcomes = reshard(make)
    assert all(isinstance(outcome, ValidationError) for outcome in outcomes)
    (text,) = {str(outcome) for outcome in outcomes}
    for words in ("shares memory with a source", "'w'", "rank 0", "[0:2, 0:6]", "clone one of the two"):
        assert words in text


@pytest.mark.parametrize("shift", [1, 6, 11])
def test_memory_that_overlaps_in_part_is_refused(shift):
    outcomes = reshard(
        lambda rank, base: (rows(base[:12].reshape(2, 6), rank), rows(base[shift : shift + 12].reshape(2, 6), rank))
    )
    assert all(isinstance(outcome, ValidationError) for outcome in outcomes)


def test_memory_next_to_each_other_is_allowed():
    targets = []

    def make(rank, base):
        targets.append((rank, base[12:]))
        return rows(base[:12].reshape(2, 6), rank), columns(base[12:].reshape(4, 3), rank)

    assert [report.bytes_received for report in reshard(make)] == [24, 24]
    whole = np.concatenate([np.arange(12).reshape(2, 6), np.arange(12).reshape(2, 6) + 100])
    for rank, memory in targets:
        assert (memory.reshape(4, 3) == whole[:, 3 * rank : 3 * rank + 3]).all()


def test_the_very_same_shard_is_allowed_and_stays_what_it_is():
    seen = []

    def make(rank, base):
        seen.append(base[:12])
        return rows(base[:12].reshape(2, 6), rank), rows(base[:12].reshape(2, 6), rank)

    assert [report.bytes_received for report in reshard(make)] == [0, 0]
    assert sorted(memory.tolist() for memory in seen) == [list(range(12)), [n + 100 for n in range(12)]]


def test_the_very_same_memory_in_another_order_is_another_shard():
    memory = np.arange(9.0).reshape(3, 3)
    with provoked("memory/sources.py", "clone one of the two"):
        SimulatedWorld(1).run(lambda comm: reshard_sharded_state_dict({"w": memory}, {"w": memory.T}, comm))
    assert memory.ravel().tolist() == list(range(9))
    into = memory.T.copy()
    SimulatedWorld(1).run(lambda comm: reshard_sharded_state_dict({"w": memory}, {"w": into}, comm))
    assert into.ravel().tolist() == list(range(9))


def test_the_same_memory_under_two_names_is_refused():
    memory, other = np.arange(3, dtype=np.float32), np.zeros(3, dtype=np.float32)
    with pytest.raises(ValidationError, match="shares memory"):
        SimulatedWorld(1).run(lambda comm: reshard_sharded_state_dict({"a": memory, "b": other}, {"b": memory}, comm))
    assert memory.tolist() == [0, 1, 2]


def fill(a, b):
    """Fill two targets from sources of their shapes; return what went into them."""
    sources = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(10, 16, dtype=np.float32).reshape(2, 3),
    }
    SimulatedWorld(1).run(lambda comm: reshard_sharded_state_dict(sources, {"a": a, "b": b}, comm))
    return sources


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_targets_that_overlap_are_refused(shift):
    memory = np.zeros(12, dtype=np.float32)
    part = {"global_shape": (2, 3), "global_offset": (0, 0), "local_shape": (2, 3)}
    one = ShardedWeight("a", memory[:6].reshape(2, 3), **part)
    # With no shift the memory is all the same, and the part of the tensor is not.
    other = ShardedWeight("b", memory[shift : shift + 6], **part, is_flattened=True, flattened_range=slice(0, 6))
    with pytest.raises(ValidationError, match="one would overwrite the other") as caught:
        fill(one, other)
    assert "memory of target a" in str(caught.value) or "memory of target b" in str(caught.value)
    assert not memory.any()


@pytest.mark.parametrize("of_paddle", [False, True])
def test_columns_of_one_buffer_are_targets_of_their_own(of_paddle):
    memory = np.zeros((2, 6), dtype=np.float32)
    if of_paddle:
        paddle = pytest.importorskip("paddle")
        memory = paddle.zeros([2, 6])
    sources = fill(memory[:, :3], memory[:, 3:])
    assert np.asarray(memory).tolist() == np.concatenate([sources["a"], sources["b"]], axis=1).tolist()
    with pytest.raises(ValidationError, match="one would overwrite the other"):
        fill(memory[:, :3], memory[:, 2:5])


def square() -> dict:
    return {"a": np.arange(9, dtype=np.float32).reshape(3, 3), "b": np.arange(10, 19, dtype=np.float32).reshape(3, 3)}


@pytest.mark.parametrize("view", [lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::-1]])
@pytest.mark.parametrize("values", ["other", "same"])
def test_two_views_of_one_memory_in_another_order_are_refused(move, view, values):
    source, memory = square(), np.zeros((3, 3), np.float32)
    if values == "same":
        source["b"] = source["a"]
    targets = {"a": memory, "b": view(memory)}
    with provoked("transfer/targets.py", "load into a clone of one of the two, and use that in its place"):
        move(source, targets)
    assert not memory.any()
    targets["b"] = targets["b"].copy()
    move(source, targets)
    assert {key: array.tolist() for key, array in targets.items()} == {k: v.tolist() for k, v in source.items()}


@pytest.mark.parametrize("of_paddle", [False, True])
@pytest.mark.parametrize("view", ["steps of less than a row", "steps of nothing"])
def test_a_target_whose_elements_share_memory_is_refused(move, view, of_paddle):
    source = {"w": np.arange(12, dtype=np.float32).reshape(4, 3)}
    memory, (shape, steps) = np.zeros(12, np.float32), ((4, 3), (1, 1) if "row" in view else (0, 1))
    target = np.lib.stride_tricks.as_strided(memory, shape, [4 * step for step in steps])
    if of_paddle:
        paddle = pytest.importorskip("paddle")
        memory = paddle.zeros([12])
        target = memory.as_strided(shape, steps)
    with provoked("transfer/targets.py", "load into a contiguous copy of it, and use that in its place"):
        move(source, {"w": target})
    assert not np.asarray(memory).any()
    copy = target.contiguous() if of_paddle else np.ascontiguousarray(target)
    move(source, {"w": copy})
    assert np.asarray(copy).tolist() == source["w"].tolist()


def test_a_kept_plan_is_not_for_another_order(tmp_path):
    def job(comm):
        source, memory = square(), np.zeros((3, 3), np.float32)
        source["b"] = source["a"]
        save_state_dict(source, tmp_path, comm)
        for _ in range(2):
            load_state_dict({"a": memory, "b": memory}, tmp_path, comm)
            load_state_dict({"a": memory}, tmp_path, comm)
        for targets in ({"a": memory, "b": memory.T}, {"a": np.lib.stride_tricks.as_strided(memory, (3, 3), (0, 4))}):
            with pytest.raises(ValidationError, match="overwrite"):
                load_state_dict(targets, tmp_path, comm)

    SimulatedWorld(1).run(job)
