"""Exchange plans, carried out for every rank of a simulated world."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import intersect_boxes
from paddle_flexckpt.catalog import concat
from paddle_flexckpt.planning import matching
from paddle_flexckpt.planning.exchange_plan import plan_exchange
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher
from tests.planning.simulate import blank, carry_out, counters, storages
from tests.property import examples
from tests.property.layouts import (
    ITEMSIZE,
    Pick,
    Shard,
    by_rank,
    catalog_of,
    elements,
    layout,
    mutate,
    paint,
    random_tensors,
    whole_values,
)


def same(a, b):
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Pieces))


def nbytes(pieces, shards):
    return sum(int(n) * ITEMSIZE[shards[int(row)].dtype] for row, n in zip(pieces.target, pieces.size))


def lacking(rank, source, target, rows):
    """The oracle: bytes of a rank's targets that some source holds, but none on that rank."""
    anywhere = paint(source)
    mine = {s.key: np.zeros_like(anywhere[s.key], dtype=bool) for s in source}
    for shard in source:
        if shard.rank == rank:
            mine[shard.key][elements(shard)] = True
    total = 0
    for row in rows:
        shard = target[row]
        if shard.rank == rank and shard.key in anywhere:
            at = elements(shard)
            total += int(((anywhere[shard.key][at] > 0) & ~mine[shard.key][at]).sum()) * ITEMSIZE[shard.dtype]
    return total


def check_exchange(source, target, world, rows=None):
    """Plans and carries out the exchange of all ranks; returns the plans."""
    values = whole_values({s.key: (s.dtype, s.global_shape) for s in [*source, *target]})
    target_catalog = catalog_of(target)
    matcher = ShardMatcher(catalog_of(source))
    plans = [plan_exchange(matcher, target_catalog, rank, rows) for rank in range(world)]
    asked = list(range(len(target))) if rows is None else rows.tolist()
    memory, written, held = blank(target, values), counters(target), storages(source, values)
    for rank, plan in enumerate(plans):
        assert rank not in plan.incoming
        assert rank not in plan.outgoing
        for peer, pieces in plan.incoming.items():
            assert len(pieces)
            assert {source[row].rank for row in pieces.source} == {peer}
            assert {target[row].rank for row in pieces.target} == {rank}
            assert same(pieces, plans[peer].outgoing[rank])
            carry_out(pieces, held, memory, written)
        # Nothing is sent that nobody waits for.
        assert all(rank in plans[peer].incoming for peer in plan.outgoing)
        assert {source[row].rank for row in plan.local.source} <= {rank}
        assert {target[row].rank for row in plan.local.target} <= {rank}
        carry_out(plan.local, held, memory, written)
        received = sum(nbytes(pieces, target) for pieces in plan.incoming.values())
        assert received == lacking(rank, source, target, asked)
    painted = paint(source)
    for row, shard in enumerate(target):
        held_at = painted[shard.key][elements(shard)] > 0 if shard.key in painted else np.zeros(shard.size, dtype=bool)
        expected = held_at & (row in asked)
        assert written[row].tolist() == expected.astype(int).tolist()
        data = shard.of(values[shard.key]).copy()
        data[~expected] = np.zeros(1, dtype=data.dtype)
        assert memory[row].tobytes() == data.tobytes()
    return plans


@st.composite
def moves(draw, unsound=0):
    pick = Pick.from_draw(draw)
    tensors = random_tensors(pick, pick.integer(1, 3), 3, 4)
    world = pick.integer(1, 6)
    source, target = layout(pick, tensors, world), layout(pick, tensors, world)
    for _ in range(pick.integer(1, unsound) if unsound else 0):
        source = mutate(pick, source, world)
    return source, target, world


@examples(120)
@given(moves())
def test_ranks_receive_exactly_what_they_lack(case):
    check_exchange(*case)


@examples(120)
@given(moves(unsound=4))
def test_overlapping_and_incomplete_sources(case):
    check_exchange(*case)


@examples(40)
@given(moves(unsound=1), st.data())
def test_some_rows_alone(case, data):
    source, target, world = case
    rows = np.asarray(sorted(data.draw(st.sets(st.integers(0, len(target) - 1)))), dtype=np.int64)
    check_exchange(source, target, world, rows)


@examples(60)
@given(st.integers(0, 2**32))
def test_one_rank_with_the_full_tensor_and_others_with_parts(seed):
    pick = Pick.from_seed(seed)
    world = pick.integer(2, 8)
    tensors = random_tensors(pick, 2, 3, 6)
    source = layout(pick, tensors, world)
    for key, (dtype, shape) in tensors.items():
        for rank in pick.some(0, world - 1, 2):
            source.append(Shard(key, dtype, shape, (0,) * len(shape), shape, None, rank))
    check_exchange(by_rank(source), layout(pick, tensors, world), world)


@examples(3)
@given(st.integers(0, 2**32), st.sampled_from((16, 33, 64)))
def test_large_worlds(seed, world):
    pick = Pick.from_seed(seed)
    tensors = random_tensors(pick, 6, 3, 9)
    source = layout(pick, tensors, world)
    for _ in range(pick.integer(0, 2)):
        source = mutate(pick, source, world)
    check_exchange(source, layout(pick, tensors, world), world)


def test_sixty_four_ranks_from_one_hybrid_layout_to_another():
    """TP 8 x DP 8 with flattened states becomes TP 2 x DP 32 with others; every rank holds something of every key."""
    source, target = [], []
    for rank in range(64):
        for shards, tp, dp in ((source, 8, 8), (target, 2, 32)):
            t, d = rank % tp, rank // tp
            box = ((t * 16 // tp, 0), (16 // tp, 33))
            size = 16 // tp * 33
            shards.append(Shard("w", "bfloat16", (16, 33), *box, None, rank))
            shards.append(Shard("m", "float32", (16, 33), *box, (d * size // dp, (d + 1) * size // dp), rank))
            shards.append(Shard("norm", "float32", (33,), (0,), (33,), None, rank))
    plans = check_exchange(source, target, 64)
    # Weights grow from two rows to eight: a rank that has two of them lacks six.
    weights, key = catalog_of(target).keys.index("w"), catalog_of(target).key
    for rank, plan in enumerate(plans):
        grown = sum(int(pieces.size[key[pieces.target] == weights].sum()) for pieces in plan.incoming.values())
        own = rank % 8 // 4 == rank % 2
        assert grown == (6 if own else 8) * 33


def test_the_same_layout_moves_nothing_between_ranks():
    pick = Pick.from_seed(1)
    shards = layout(pick, random_tensors(pick, 5), 6)
    for plan in check_exchange(shards, shards, 6):
        assert plan.incoming == plan.outgoing == {}


def test_a_rank_without_source_or_target():
    source = [Shard("w", "uint8", (4,), (0,), (4,), None, 0)]
    target = [Shard("w", "uint8", (4,), (0,), (4,), None, 2)]
    giver, idle, taker = check_exchange(source, target, 3)
    assert (list(giver.outgoing), list(taker.incoming)) == ([2], [0])
    assert len(idle.local) == 0
    assert idle.outgoing == idle.incoming == {}


@pytest.mark.parametrize("side", ["source", "target", "both"])
def test_no_shards(side):
    some = catalog_of([Shard("w", "uint8", (4,), (0,), (4,), None, 0)])
    source = concat([]) if side in ("source", "both") else some
    target = concat([]) if side in ("target", "both") else some
    plan = plan_exchange(ShardMatcher(source), target, 0)
    assert (len(plan.local), plan.incoming, plan.outgoing) == (0, {}, {})


def test_keys_on_one_side_alone():
    source = [Shard("a", "uint8", (4,), (0,), (4,), None, 0), Shard("b", "uint8", (4,), (0,), (4,), None, 1)]
    target = [Shard("b", "uint8", (4,), (0,), (4,), None, 0), Shard("c", "uint8", (4,), (0,), (4,), None, 1)]
    plans = check_exchange(source, target, 2)
    assert list(plans[1].outgoing) == [0]
    assert plans[0].outgoing == {}


def test_two_targets_of_one_rank_with_the_same_elements_are_both_filled():
    source = [Shard("w", "uint8", (4,), (0,), (4,), None, 0)]
    target = [Shard("w", "uint8", (4,), (0,), (4,), None, 1), Shard("w", "uint8", (4,), (1,), (2,), None, 1)]
    check_exchange(source, target, 2)


@pytest.mark.parametrize("flattened", [False, True])
def test_one_ranks_planning_grows_with_the_world_and_not_with_its_square(monkeypatch, flattened):
    """Counted, not timed: pairs of boxes that one rank's planning intersects, in worlds of 32 and 64 ranks."""
    looked_at = []

    def counting(offset_a, *rest):
        looked_at.append(len(offset_a))
        return intersect_boxes(offset_a, *rest)

    monkeypatch.setattr(matching, "intersect_boxes", counting)
    counts = []
    for world in (32, 64):
        source, target = [], []
        for rank in range(world):
            for shards, tp in ((source, 4), (target, 8)):
                box = ((rank % tp * 64 // tp, 0), (64 // tp, 64))
                size, dp = 64 // tp * 64, world // tp
                flat = (rank // tp * size // dp, (rank // tp + 1) * size // dp) if flattened else None
                shards.append(Shard("w", "float32", (64, 64), *box, flat, rank))
        matcher = ShardMatcher(catalog_of(source))
        looked_at.clear()
        plan_exchange(matcher, catalog_of(target), 5)
        counts.append(sum(looked_at))
    assert counts[0] > 0
    assert counts[1] <= 2.5 * counts[0]


def test_what_several_targets_want_of_several_tensors_and_peers_is_sent_once_each():
    tensors = {"once": ("uint8", 3, 0), "a": ("uint8", 4, 0), "b": ("float32", 5, 0), "c": ("float64", 6, 1)}

    def shard(key, rank):
        dtype, length, _ = tensors[key]
        return Shard(key, dtype, (length,), (0,), (length,), None, rank)

    source = [shard(key, rank) for key, (_, _, rank) in tensors.items()]
    target = [replace(shard("once", 2), offset=(1,), shape=(2,)), *(shard(key, 2) for key in "abccba")]
    matcher, wanted = ShardMatcher(catalog_of(source)), catalog_of(target)
    first, second, taker = (plan_exchange(matcher, wanted, rank) for rank in range(3))
    assert same(first.outgoing[2], taker.incoming[0])
    assert same(second.outgoing[2], taker.incoming[1])
    assert sorted(taker.incoming[0].size.tolist()) == [2, 4, 5]
    assert taker.incoming[1].size.tolist() == [6]
    assert sorted(taker.repeated.size.tolist()) == [4, 5, 6]
    assert taker.repeated_bytes == 4 * 1 + 5 * 4 + 6 * 8
    values = whole_values({s.key: (s.dtype, s.global_shape) for s in source})
    memory, written = blank(target, values), counters(target)
    for pieces in taker.incoming.values():
        carry_out(pieces, storages(source, values), memory, written)
    carry_out(taker.repeated, memory, memory, written)
    assert [m.tobytes() for m in memory] == [m.tobytes() for m in storages(target, values)]
    assert all((count == 1).all() for count in written)
