"""Matching through box maps: every target element comes once, from the source element that the maps say.

Elements are numbers that tell source elements apart, so that equal values mean the same origin.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.planning.exchange_plan import plan_exchange, plan_read
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher, uncovered_targets
from tests.planning.simulate import carry_out
from tests.property import examples
from tests.property.layouts import Pick, Shard, by_rank, catalog_of, layout, mutate
from tests.property.mappings import Move, box_maps, random_program


class Case:
    """A program, sources and targets on some ranks; targets also of a key that the program does not define."""

    def __init__(self, pick, world=4, unsound=0):
        self.world = world
        program = random_program(pick, pick.integer(1, 3), dtypes=("float64",))
        program.sources["plain"] = ("float64", pick.shape(3, 4))
        self.program, self.maps = program, box_maps(program.tensors, program.moves)
        targets = {name: (info.dtype, info.shape) for name, info in program.tensors.items()}
        targets["plain"] = program.sources["plain"]
        self.source = layout(pick, program.sources, world)
        for _ in range(unsound):
            self.source = mutate(pick, self.source, world)
        self.target = layout(pick, targets, world)
        first, self.ids = 0, {}
        for key, (_, shape) in program.sources.items():
            self.ids[key] = np.arange(first, first + math.prod(shape)).reshape(shape)
            first += math.prod(shape)
        self.whole = {
            name: program.fold(name, self.ids.__getitem__, None, dtype=np.dtype(np.int64)) for name in program.tensors
        }
        self.whole["plain"] = self.ids["plain"]
        self.held = [self.held_on({rank}) for rank in range(world)]
        self.anywhere = self.held_on(set(range(world)))

    def held_on(self, ranks):
        held = np.zeros(1 + max(int(ids.max()) for ids in self.ids.values()), dtype=bool)
        for shard in self.source:
            if shard.rank in ranks:
                held[shard.of(self.ids[shard.key])] = True
        return held

    def memory(self):
        return [shard.of(self.ids[shard.key]).copy() for shard in self.source]

    def blank(self):
        return [np.full(shard.size, -1, dtype=np.int64) for shard in self.target]

    def expected(self):
        """What every target gets; -1 where no source holds it."""
        found = [shard.of(self.whole[shard.key]) for shard in self.target]
        return [np.where(self.anywhere[ids], ids, -1) for ids in found]


def check(case: Case) -> Pieces:
    source, target = catalog_of(case.source), catalog_of(case.target)
    pieces = ShardMatcher(source).match(target, maps=case.maps)
    memory, written = case.blank(), [np.zeros(s.size, dtype=np.int64) for s in case.target]
    carry_out(pieces, case.memory(), memory, written)
    short = []
    for row, expected in enumerate(case.expected()):
        assert memory[row].tolist() == expected.tolist()
        assert written[row].tolist() == (expected >= 0).astype(int).tolist()
        if (expected < 0).any():
            short.append(row)
    assert int(pieces.size.sum()) == sum(int((expected >= 0).sum()) for expected in case.expected())
    problems = uncovered_targets(pieces, target, np.arange(len(target)))
    assert [(p.key, p.rank) for p in problems] == [(case.target[row].key, case.target[row].rank) for row in short]
    lacked = np.asarray([int((expected < 0).sum()) for expected in case.expected()], dtype=np.int64)
    assert uncovered_targets(pieces, target, np.arange(len(target)), lacked) == []
    order = list(zip(pieces.target.tolist(), pieces.target_base.tolist()))
    assert order == sorted(order)
    for i in range(len(pieces)):
        # Along the source's axes, so that what is contiguous in a file is seen to be.
        strides = [s for s, n in zip(pieces.source_strides[i], pieces.extents[i]) if n > 1]
        assert strides == sorted(strides, reverse=True)
        sender, receiver = case.source[pieces.source[i]].rank, case.target[pieces.target[i]].rank
        if sender != receiver:
            moved = pieces.copy(i).gather_from(case.memory()[pieces.source[i]])
            assert not case.held[receiver][moved].any()
    return pieces


def check_exchange(case: Case) -> None:
    source, target = catalog_of(case.source), catalog_of(case.target)
    matcher = ShardMatcher(source)
    plans = [plan_exchange(matcher, target, rank, maps=case.maps) for rank in range(case.world)]
    memory, written = case.blank(), [np.zeros(s.size, dtype=np.int64) for s in case.target]
    for rank, plan in enumerate(plans):
        for peer, pieces in plan.incoming.items():
            other = plans[peer].outgoing[rank]
            assert all(np.array_equal(getattr(pieces, f.name), getattr(other, f.name)) for f in fields(Pieces))
            carry_out(pieces, case.memory(), memory, written)
        assert all(rank in plans[peer].incoming for peer in plan.outgoing)
        carry_out(plan.local, case.memory(), memory, written)
        wanted = [e[e >= 0] for e, shard in zip(case.expected(), case.target) if shard.rank == rank]
        lacking = sum(int((~case.held[rank][ids]).sum()) for ids in wanted)
        received = sum(int(pieces.size.sum()) for pieces in plan.incoming.values())
        assert received + int(plan.repeated.size.sum()) == lacking
        if wanted:
            assert received >= int((~case.held[rank][np.unique(np.concatenate(wanted))]).sum())
    for plan in plans:
        carry_out(plan.repeated, memory, memory, written)
    for row, expected in enumerate(case.expected()):
        assert memory[row].tolist() == expected.tolist()
        assert written[row].tolist() == (expected >= 0).astype(int).tolist()


@examples(120)
@given(st.data())
def test_small_programs(data):
    case = Case(Pick.from_draw(data.draw), 3)
    check(case)
    check_exchange(case)


@examples(120)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_random_programs(seed, world):
    case = Case(Pick.from_seed(seed), world)
    check(case)
    check_exchange(case)


@examples(80)
@given(st.integers(0, 2**32))
def test_sources_that_overlap_or_have_holes(seed):
    pick = Pick.from_seed(seed)
    case = Case(pick, 4, unsound=pick.integer(1, 4))
    check(case)
    check_exchange(case)


@examples(40)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_pairs_are_looked_at_in_portions_with_the_same_result(seed, portion):
    case = Case(Pick.from_seed(seed), unsound=1)
    expected = check(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_flexckpt.planning.matching.PAIRS_AT_ONCE", portion)
        got = check(case)
        check_exchange(case)
    assert all(np.array_equal(getattr(got, f.name), getattr(expected, f.name)) for f in fields(Pieces))


@examples(30)
@given(st.integers(0, 2**32))
def test_a_read_plan_needs_the_bytes_of_its_rows(seed):
    pick = Pick.from_seed(seed)
    case = Case(pick)
    rows = np.asarray(pick.some(0, len(case.target) - 1, 3), dtype=np.int64)
    source = replace(catalog_of(case.source, "{}".format), byte_offset=np.arange(len(case.source)) * 1000)
    plan = plan_read(ShardMatcher(source), catalog_of(case.target), rows, case.maps)
    assert set(plan.pieces.target.tolist()) <= set(rows.tolist())
    assert plan.needed_bytes == 8 * sum(case.target[row].size for row in rows)


def shard(key, shape, rank, offset=None, box=None, flat=None):
    return Shard(key, "float64", shape, offset or (0,) * len(shape), box or shape, flat, rank)


def test_a_transposed_column_cut_is_one_stretch_of_the_file():
    maps = box_maps(("w",), {"w": [Move((0, 0), (4, 6), "v", (0, 0), (1, 0))]})
    target = catalog_of([shard("w", (4, 6), 0, (0, 2), (4, 2))])
    pieces = ShardMatcher(catalog_of([shard("v", (6, 4), 1)])).match(target, maps=maps)
    copy = pieces.copy(0)
    assert (copy.extents, copy.source_base, copy.target_strides) == ((2, 4), 8, (1, 2))
    assert copy.is_contiguous() == (True, False)


def test_a_key_that_is_defined_as_nothing_takes_nothing_from_its_name_sake():
    maps = box_maps(("w",), {})
    pieces = ShardMatcher(catalog_of([shard("w", (4,), 0)])).match(catalog_of([shard("w", (4,), 0)]), maps=maps)
    assert len(pieces) == 0


def test_a_source_that_is_not_there_leaves_a_hole():
    maps = box_maps(("w",), {"w": [Move((0,), (2,), "a", (0,), (0,)), Move((2,), (2,), "gone", (0,), (0,))]})
    target = catalog_of([shard("w", (4,), 0)])
    pieces = ShardMatcher(catalog_of([shard("a", (2,), 0)])).match(target, maps=maps)
    (problem,) = uncovered_targets(pieces, target, np.arange(1))
    assert (problem.expected, problem.got) == ("4 elements for float64 [0:4] of [4]", "2 elements")


def test_a_rank_looks_only_at_the_maps_that_its_shards_serve():
    names = [f"e{i}" for i in range(8)]
    maps = box_maps(("w",), {"w": [Move((i, 0), (1, 4), name, (0,), (1,)) for i, name in enumerate(names)]})
    source = by_rank([shard(name, (4,), i) for i, name in enumerate(names)])
    matcher = ShardMatcher(catalog_of(source))
    assert matcher.reaching(maps).target_offset[:, 0].tolist() == list(range(8))
    mine = matcher.held_by(3).reaching(maps)
    assert (mine.targets, mine.sources, mine.target_offset[:, 0].tolist()) == (("w",), tuple(names), [3])
    plan = plan_exchange(matcher, catalog_of([shard("w", (8, 4), rank) for rank in range(8)]), 3, maps=maps)
    assert {rank: pieces.size.tolist() for rank, pieces in plan.outgoing.items()} == {
        rank: [4] for rank in range(8) if rank != 3
    }


def tied(dtype="float64"):
    """Rank 0 holds an embedding; rank 1 wants it as it is and transposed."""
    source = catalog_of([shard("e", (4, 3), 0)])
    both = [Move((0, 0), (4, 3), "e", (0, 0), (0, 1)), Move((0, 0), (3, 4), "e", (0, 0), (1, 0))]
    maps = box_maps(("emb", "head"), {"emb": both[:1], "head": both[1:]})
    targets = [shard("emb", (4, 3), 1), replace(shard("head", (3, 4), 1), dtype=dtype)]
    return source, targets, maps


def test_what_two_targets_want_is_sent_once():
    source, targets, maps = tied()
    target = catalog_of(targets)
    giver, taker = (plan_exchange(ShardMatcher(source), target, rank, maps=maps) for rank in (0, 1))
    assert giver.outgoing[1].size.tolist() == taker.incoming[0].size.tolist() == [12]
    assert (taker.repeated.size.tolist(), taker.repeated_bytes) == ([12], 96)
    assert (len(giver.repeated), giver.repeated_bytes) == (0, 0)
    memory, written = [np.zeros(12), np.zeros(12)], [np.zeros(12, dtype=int), np.zeros(12, dtype=int)]
    carry_out(taker.incoming[0], [np.arange(12.0)], memory, written)
    carry_out(taker.repeated, memory, memory, written)
    assert (
        memory[0].reshape(4, 3).tolist() == memory[1].reshape(3, 4).T.tolist() == np.arange(12.0).reshape(4, 3).tolist()
    )


@pytest.mark.parametrize("narrow", [0, 1])
def test_a_copy_never_starts_from_a_rounded_target(narrow):
    source, targets, maps = tied()
    targets[narrow] = replace(targets[narrow], dtype="float32")
    taker = plan_exchange(ShardMatcher(source), catalog_of(targets), 1, maps=maps)
    assert taker.incoming[0].target.tolist() == [1 - narrow]
    assert (taker.repeated.source.tolist(), taker.repeated.target.tolist()) == ([1 - narrow], [narrow])


def test_targets_of_two_other_dtypes_are_both_sent():
    source, targets, maps = tied("float16")
    targets[0] = replace(targets[0], dtype="float32")
    taker = plan_exchange(ShardMatcher(source), catalog_of(targets), 1, maps=maps)
    assert (len(taker.incoming[0]), len(taker.repeated)) == (2, 0)
