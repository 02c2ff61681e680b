"""Matching against a simulation: executing the pieces reproduces the target, and writes every element once."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CatalogBuilder, Problem, ValidationError, concat, group_replicas, validate_coverage
from paddle_flexckpt.planning import matching
from paddle_flexckpt.planning.exchange_plan import plan_read
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher, concat_pieces, uncovered_targets
from tests.planning.simulate import blank, carry_out, counters, read_positions, storages
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


@st.composite
def moves(draw, unsound=0):
    """(source, target) layouts of the same tensors; ``unsound`` mutations make holes and overlaps in the source."""
    pick = Pick.from_draw(draw)
    tensors = random_tensors(pick, pick.integer(1, 3), 4, 4)
    source = layout(pick, tensors, pick.integer(1, 5))
    target = layout(pick, tensors, pick.integer(1, 5))
    for _ in range(pick.integer(1, unsound) if unsound else 0):
        source = mutate(pick, source, 5)
    return source, target


def values_of(shards):
    return whole_values({s.key: (s.dtype, s.global_shape) for s in shards})


def check_match(source, target, rows=None):
    """Executes the pieces; returns them. Elements that no source holds must stay untouched."""
    values = values_of([*source, *target])
    source_catalog, target_catalog = catalog_of(source), catalog_of(target)
    matcher = ShardMatcher(source_catalog)
    pieces = matcher.match(target_catalog, rows)
    asked = list(range(len(target))) if rows is None else rows.tolist()
    memory, written = blank(target, values), counters(target)
    carry_out(pieces, storages(source, values), memory, written)
    painted = paint(source)
    short = []
    for row, shard in enumerate(target):
        held = painted[shard.key][elements(shard)] > 0 if shard.key in painted else np.zeros(shard.size, dtype=bool)
        if row not in asked:
            held[:] = False
        elif not held.all():
            short.append((row, int(held.sum())))
        assert written[row].tolist() == held.astype(int).tolist()
        expected = shard.of(values[shard.key]).copy()
        expected[~held] = np.zeros(1, dtype=expected.dtype)
        assert memory[row].tobytes() == expected.tobytes()
    problems = uncovered_targets(pieces, target_catalog, np.asarray(asked, dtype=np.int64))
    assert [(p.key, p.rank, p.got) for p in problems] == [
        (target[row].key, target[row].rank, f"{held} elements") for row, held in short
    ]
    order = list(zip(pieces.target.tolist(), pieces.target_base.tolist()))
    assert order == sorted(order)
    assert (pieces.size > 0).all()
    check_sources(source, target, pieces)
    return pieces


def check_sources(source, target, pieces):
    """What the target's own rank holds is never taken from another one."""
    held = {}
    for shard in source:
        held.setdefault((shard.rank, shard.key), set()).update(elements(shard).tolist())
    for i, copy in enumerate(pieces.copies()):
        shard = target[int(pieces.target[i])]
        if source[int(pieces.source[i])].rank != shard.rank:
            indices = elements(shard)
            moved = copy.scatter_into(indices).reshape(-1).tolist()
            assert not held.get((shard.rank, shard.key), set()) & set(moved)


@examples(200)
@given(moves())
def test_pieces_fill_every_target_element_once_with_its_value(case):
    check_match(*case)


@examples(200)
@given(moves(unsound=4))
def test_pieces_of_overlapping_and_incomplete_sources(case):
    check_match(*case)


@examples(60)
@given(moves(unsound=2), st.integers(1, 5))
def test_pairs_are_looked_at_in_portions_with_the_same_result(case, portion):
    source, target = (catalog_of(shards) for shards in case)
    expected = ShardMatcher(source).match(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_flexckpt.planning.matching.PAIRS_AT_ONCE", portion)
        got = ShardMatcher(source).match(target)
    assert_same(got, expected)


def assert_same(got, expected):
    for name in Pieces.COLUMNS:
        assert (getattr(got, name) == getattr(expected, name)).all(), name
        assert getattr(got, name).shape == getattr(expected, name).shape


@examples(60)
@given(moves(unsound=2), st.data())
def test_rows_that_were_asked_for_are_filled_and_no_others(case, data):
    source, target = case
    rows = np.asarray(sorted(data.draw(st.sets(st.integers(0, len(target) - 1)))), dtype=np.int64)
    check_match(source, target, rows)


@examples(40)
@given(moves(unsound=2))
def test_groups_and_coverage_that_the_caller_has_make_no_difference(case):
    source, target = (catalog_of(shards) for shards in case)
    groups = group_replicas(source)
    ready = ShardMatcher(source, groups, validate_coverage(source, groups))
    assert_same(ready.match(target), ShardMatcher(source).match(target))


def test_groups_that_were_narrowed_are_read_from_what_is_left_of_them():
    source = catalog_of(whole_on(range(4)))
    groups = group_replicas(source).narrowed_to(np.asarray([2]))
    pieces = ShardMatcher(source, groups).match(catalog_of(whole_on(range(6))))
    assert pieces.source.tolist() == [2] * 6


def test_too_many_overlaps_that_the_caller_has_found_are_an_error():
    source = catalog_of(whole_on([0]))
    problem = Problem("too many shards overlap", key="w")
    coverage = replace(validate_coverage(source, group_replicas(source)), too_many_overlaps=[problem])
    with pytest.raises(ValidationError) as caught:
        ShardMatcher(source, coverage=coverage)
    assert list(caught.value.problems) == [problem]


@examples(60)
@given(st.integers(0, 2**32))
def test_one_rank_with_the_full_tensor_and_others_with_parts(seed):
    pick = Pick.from_seed(seed)
    tensors = random_tensors(pick, 2, 3, 6)
    source = layout(pick, tensors, 4)
    for key, (dtype, shape) in tensors.items():
        for rank in pick.some(0, 3, 2):
            source.append(Shard(key, dtype, shape, (0,) * len(shape), shape, None, rank))
    check_match(by_rank(source), layout(pick, tensors, 4))


def test_halves_are_preferred_on_their_own_ranks_to_the_full_tensor_elsewhere():
    full = Shard("w", "uint8", (8,), (0,), (8,), None, 0)
    halves = [Shard("w", "uint8", (8,), (4 * i,), (4,), None, 1 + i) for i in range(2)]
    target = [Shard("w", "uint8", (8,), (2,), (4,), None, rank) for rank in range(4)]
    source = [full, *halves]
    pieces = check_match(source, target)
    taken = [
        [(source[s].rank, n) for s, t, n in zip(pieces.source, pieces.target, pieces.size) if t == row]
        for row in range(4)
    ]
    assert taken[0] == [(0, 4)]
    # What the own half does not have comes from anybody.
    assert [n for rank, n in taken[1] if rank == 1] == [2]
    assert [n for rank, n in taken[2] if rank == 2] == [2]
    assert sum(n for _, n in taken[1]) == sum(n for _, n in taken[2]) == 4
    assert sum(n for _, n in taken[3]) == 4


# --- which replica ------------------------------------------------------------------------------------------------


def whole_on(ranks):
    return [Shard("w", "uint8", (4, 4), (0, 0), (4, 4), None, rank) for rank in ranks]


@pytest.mark.parametrize(
    ("replicas", "readers"),
    [
        (range(4), range(4, 12)),
        (range(4), range(8, 24, 2)),
        (range(0, 16, 2), range(1, 16, 4)),
        ((0, 1), (4, 6, 8, 10)),
        (range(0, 64, 8), range(1, 64, 8)),
        ((3, 9, 20), range(24, 48, 3)),
    ],
    ids=str,
)
def test_replicas_elsewhere_are_read_evenly(replicas, readers):
    """Readers are seldom consecutive ranks: those of one tensor-parallel index are a step apart."""
    pieces = check_match(whole_on(replicas), whole_on(readers))
    load = np.bincount(pieces.source, minlength=len(replicas))
    assert load.max() <= math.ceil(len(readers) / len(replicas)) + 1


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_which_replica_is_read_follows_from_the_digits_of_the_rank(replicas):
    ranks = range(0, 130)
    source = catalog_of(whole_on(range(1000, 1000 + replicas)))
    pieces = ShardMatcher(source).match(catalog_of(whole_on(ranks)))
    for rank, row in zip(ranks, pieces.source.tolist()):
        digits, rest = 0, rank
        while rest:
            digits, rest = digits + rest % replicas, rest // replicas
        assert source.rank[row] == 1000 + digits % replicas


def test_a_wider_tensor_parallel_group_is_fed_by_all_holders():
    """1 x TP 2 x DP 32 becomes TP 8 x DP 8: no rank sends more than twice the mean of those that have to be asked."""
    source, target = [], []
    for rank in range(64):
        source.append(Shard("w", "uint8", (8,), (rank % 2 * 4,), (4,), None, rank))
        target.append(Shard("w", "uint8", (8,), (rank % 8,), (1,), None, rank))
    pieces = check_match(source, target)
    sender = np.asarray([source[s].rank for s in pieces.source])
    receiver = np.asarray([target[t].rank for t in pieces.target])
    sent = np.bincount(sender[sender != receiver], minlength=64)
    assert sent.sum() == 32
    assert sent.max() <= 2


def test_the_own_replica_is_preferred_to_any_other():
    pieces = check_match(whole_on(range(5)), whole_on(range(5)))
    assert pieces.source.tolist() == pieces.target.tolist() == [0, 1, 2, 3, 4]


def test_a_reader_without_a_rank_number_has_no_own_replica():
    """Rank -1 (a program outside the job) must not be mistaken for the last rank of another shard."""
    source = catalog_of([Shard("w", "uint8", (8,), (4 * i,), (4,), None, rank) for rank in range(2) for i in range(2)])
    builder = CatalogBuilder(-1)
    builder.add("w", "uint8", (8,), (0,), (8,))
    pieces = ShardMatcher(source).match(builder.build())
    assert pieces.target_base.tolist() == [0, 4]
    assert [source.offset[row, 0] for row in pieces.source] == [0, 4]


# --- degenerate ---------------------------------------------------------------------------------------------------


def test_no_shards_on_either_side():
    empty, some = concat([]), catalog_of(whole_on([0]))
    for source, target in ((empty, empty), (empty, some), (some, empty)):
        pieces = ShardMatcher(source).match(target)
        assert len(pieces) == 0
        assert pieces.extents.shape == (0, max(source.width, target.width))
        assert list(pieces.copies()) == []
    assert len(ShardMatcher(some).match(some, np.zeros(0, dtype=np.int64))) == 0


def test_keys_on_one_side_alone_are_left_out():
    source = [Shard(key, "uint8", (4,), (0,), (4,), None, 0) for key in ("only source", "both")]
    target = [Shard(key, "uint8", (4,), (0,), (4,), None, 0) for key in ("both", "only target")]
    pieces = check_match(source, target)
    assert pieces.target.tolist() == [0]
    assert pieces.source.tolist() == [1]


def test_keys_are_matched_by_name_whatever_their_order():
    names = [f"k{i}" for i in range(6)]
    source = [Shard(name, "uint8", (4,), (0,), (4,), None, 0) for name in names]
    pieces = check_match(source, source[::-1])
    assert pieces.source.tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 4, 1), (1, 1, 1, 1, 1)], ids=str)
def test_scalars_and_unit_axes(shape):
    zeros, size = (0,) * len(shape), math.prod(shape)
    source = [Shard("w", "float32", shape, zeros, shape, None, 0)]
    flattened = [Shard("w", "float32", shape, zeros, shape, (a, a + 1), a) for a in range(size)]
    check_match(source, source)
    check_match(source, flattened)
    check_match(flattened, source)


def test_a_scalar_beside_a_five_dimensional_tensor():
    shape = (2, 1, 2, 1, 3)
    source = [
        Shard("s", "float32", (), (), (), None, 0),
        Shard("t", "uint8", shape, (0,) * 5, shape, (0, 5), 0),
        Shard("t", "uint8", shape, (0,) * 5, shape, (5, 12), 1),
    ]
    target = [
        Shard("s", "float32", (), (), (), (0, 1), 0),
        Shard("t", "uint8", shape, (1, 0, 0, 0, 0), (1, 1, 2, 1, 3), None, 0),
        Shard("t", "uint8", shape, (0, 0, 1, 0, 1), (2, 1, 1, 1, 2), None, 1),
    ]
    check_match(source, target)


def test_sides_of_different_width():
    """The padding of one catalog depends on its other tensors."""
    matrix = [Shard("m", "uint8", (4, 4), (0, 0), (4, 4), None, 0)]
    wide = [*matrix, Shard("z", "uint8", (1, 2, 1, 2), (0,) * 4, (1, 2, 1, 2), None, 0)]
    check_match(matrix, wide)
    check_match(wide, matrix)


def test_empty_ranges_need_nothing_and_lack_nothing():
    target = [Shard("w", "uint8", (4, 4), (0, 0), (4, 4), (at, at), 0) for at in (0, 7, 16)]
    assert len(check_match(whole_on([1]), target)) == 0
    assert len(check_match([*target[:1], *whole_on([1])], target)) == 0


def test_tensors_without_elements():
    empty = [Shard("e", "uint8", (0, 4), (0, 0), (0, 4), None, 0)]
    assert len(check_match(empty, empty)) == 0


def test_a_hole_is_reported_for_each_target_that_it_meets():
    source = [Shard("w", "uint8", (8,), (0,), (3,), None, 0)]
    target = [Shard("w", "uint8", (8,), (2 * i,), (2,), None, i) for i in range(4)]
    source_catalog, target_catalog = catalog_of(source), catalog_of(target)
    pieces = ShardMatcher(source_catalog).match(target_catalog)
    problems = uncovered_targets(pieces, target_catalog, np.arange(4))
    assert [(p.key, p.rank, p.got) for p in problems] == [
        ("w", 1, "1 elements"),
        ("w", 2, "0 elements"),
        ("w", 3, "0 elements"),
    ]
    assert problems[0].expected == "2 elements for uint8 [2:4] of [8]"
    assert problems[0].remedy
    assert uncovered_targets(pieces, target_catalog, np.asarray([0])) == []


# --- pieces -------------------------------------------------------------------------------------------------------


def test_what_needs_no_piece_is_not_missed():
    target = catalog_of([Shard("w", "uint8", (5,), (0,), (5,), None, 3)])
    pieces = ShardMatcher(catalog_of([Shard("w", "uint8", (5,), (0,), (2,), None, 0)])).match(target)
    rows = np.arange(1)
    assert uncovered_targets(pieces, target, rows, np.asarray([3], dtype=np.int64)) == []
    (problem,) = uncovered_targets(pieces, target, rows, np.asarray([1], dtype=np.int32))
    assert (problem.key, problem.rank, problem.expected) == ("w", 3, "5 elements for uint8 [0:5] of [5]")
    assert problem.got == "3 elements"
    assert "does not hold all" in problem.what
    assert "save again" in problem.remedy


@pytest.mark.parametrize("most", [2, 3])
def test_sources_that_overlap_too_much_are_refused_by_name(monkeypatch, most):
    """A rank's own box is taken first, and leaves four boxes of the one around it."""
    monkeypatch.setattr(matching, "MAX_PIECES", most)
    around = Shard("w", "uint8", (5, 5), (0, 0), (5, 5), None, 0)
    own = Shard("w", "uint8", (5, 5), (1, 1), (3, 3), None, 1)
    matcher, target = ShardMatcher(catalog_of([around, own])), catalog_of([replace(around, rank=1)])
    if most == 3:
        assert sorted(matcher.match(target).size.tolist()) == [3, 3, 5, 5, 9]
        return
    with pytest.raises(ValidationError) as caught:
        matcher.match(target)
    (problem,) = caught.value.problems
    assert (problem.what, problem.key) == ("too many shards overlap", "w")


def test_no_pieces_have_columns_too():
    none = concat_pieces([], 3)
    assert [getattr(none, f.name).dtype for f in fields(Pieces)] == [np.int64] * 7
    assert [getattr(none, f.name).shape for f in fields(Pieces)] == [(0,), (0,), (0, 3), (0,), (0, 3), (0,), (0, 3)]
    assert none.size.tolist() == []


def test_pieces_can_be_taken_and_joined_again():
    source, target = whole_on([0]), [Shard("w", "uint8", (4, 4), (0, i), (4, 1), None, 0) for i in range(4)]
    pieces = ShardMatcher(catalog_of(source)).match(catalog_of(target))
    parts = [pieces.take(pieces.target % 2 == odd) for odd in (0, 1)]
    assert [len(part) for part in parts] == [2, 2]
    joined = concat_pieces(parts, 2)
    assert_same(joined.take(np.argsort(joined.target, kind="stable")), pieces)
    assert len(concat_pieces([], 3)) == 0
    assert concat_pieces([], 3).extents.shape == (0, 3)


def test_a_piece_is_a_copy_on_as_few_axes_as_possible():
    pieces = ShardMatcher(catalog_of(whole_on([0]))).match(catalog_of(whole_on([1])))
    assert pieces.copy(0).extents == (16,)
    assert pieces.copy(0).is_contiguous() == (True, True)


# --- read plans ---------------------------------------------------------------------------------------------------


@examples(80)
@given(moves(unsound=2))
def test_a_read_plan_needs_the_bytes_of_the_targets_and_reads_forwards(case):
    source, target = case
    files = catalog_of(source, "{}_0.safetensors".format)
    offsets = np.zeros(len(source), dtype=np.int64)
    for rank in {s.rank for s in source}:
        mine = files.rank == rank
        offsets[mine] = np.cumsum(files.byte_length[mine]) - files.byte_length[mine]
    files.byte_offset[:] = offsets
    targets = catalog_of(target)
    plan = plan_read(ShardMatcher(files), targets)
    values = values_of([*source, *target])
    memory, written = blank(target, values), counters(target)
    carry_out(plan.pieces, storages(source, values), memory, written)
    filled = sum(int(count.sum()) * ITEMSIZE[shard.dtype] for count, shard in zip(written, target))
    assert plan.needed_bytes == filled
    assert max((int(count.max(initial=0)) for count in written), default=0) <= 1
    positions = list(zip(plan.pieces.target.tolist(), read_positions(plan, files)))
    assert positions == sorted(positions)  # target by target, and each forwards through its files


def test_a_read_plan_of_some_rows_needs_their_bytes_alone():
    source = [Shard(key, "float32", (4,), (0,), (4,), None, 0) for key in "ab"]
    plan = plan_read(ShardMatcher(catalog_of(source)), catalog_of(source), np.asarray([1]))
    assert (plan.needed_bytes, plan.pieces.target.tolist()) == (16, [1])


def test_an_empty_read_plan():
    plan = plan_read(ShardMatcher(concat([])), concat([]))
    assert (plan.needed_bytes, len(plan.pieces)) == (0, 0)
