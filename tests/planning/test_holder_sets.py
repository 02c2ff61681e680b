"""Sets of ranks that own the same shards, and what each of them gets of a line."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import concat
from paddle_flexckpt.catalog.validate import group_replicas
from paddle_flexckpt.planning import holder_sets
from paddle_flexckpt.planning.holder_sets import HolderSets, find_sets, least_peak, pour, share_out
from tests.property import examples
from tests.property.layouts import Shard, catalog_of


def sets_of(holders):
    return HolderSets(
        np.asarray([rank for ranks in holders for rank in ranks], dtype=np.int64),
        np.append(0, np.cumsum(list(map(len, holders)))).astype(np.int64),
    )


@examples(60)
@given(st.lists(st.frozensets(st.integers(0, 6), min_size=1), max_size=12))
def test_groups_with_the_same_holders_are_of_one_set(holders):
    shards = [
        Shard(f"t{i:02}", "uint8", (1,), (0,), (1,), None, rank)
        for rank in range(7)
        for i, ranks in enumerate(holders)
        if rank in ranks
    ]
    catalog = catalog_of(shards)
    groups = group_replicas(catalog)
    sets, of_group = find_sets(groups, catalog.rank.astype(np.int64))
    expected = {tuple(sorted(ranks)) for ranks in holders}
    found = [tuple(each.tolist()) for each in np.split(sets.members, sets.start[1:-1])] if len(sets) else []
    assert len(found) == len(expected)
    assert set(found) == expected
    assert sets.count.tolist() == sorted(map(len, expected))
    for group, number in enumerate(of_group.tolist()):
        assert found[number] == tuple(sorted(holders[int(shards[groups.first[group]].key[1:])]))


def test_sets_that_look_alike_are_compared_for_real(monkeypatch):
    """Sets of four ranks with the same first and last, and a number per rank that tells nobody apart."""
    monkeypatch.setattr(holder_sets, "_mixed", lambda holder: np.zeros(len(holder), dtype=np.uint64))
    holders = [(0, 1, 5, 6), (0, 2, 5, 6), (0, 1, 5, 6), (0, 1, 4, 6)]
    shards = [
        Shard(f"t{i}", "uint8", (1,), (0,), (1,), None, r) for r in range(7) for i, h in enumerate(holders) if r in h
    ]
    catalog = catalog_of(shards)
    sets, of_group = find_sets(group_replicas(catalog), catalog.rank.astype(np.int64))
    found = [tuple(each.tolist()) for each in np.split(sets.members, sets.start[1:-1])]
    assert [found[number] for number in of_group.tolist()] == holders


def test_no_groups():
    groups = group_replicas(concat([]))
    sets, of_group = find_sets(groups, np.zeros(0, dtype=np.int64))
    assert (len(sets), len(of_group), len(share_out(sets, np.zeros(0, dtype=np.int64), 4))) == (0, 0, 0)


@examples(200)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 300))
def test_water_is_poured_on_the_lowest(load, amount):
    share = pour(np.asarray([load], dtype=np.int64), np.asarray([amount]))[0]
    assert share.sum() == amount
    assert (share >= 0).all()
    level = np.asarray(load) + share
    # Whoever got water stands within one of the lowest: nobody lower was left dry.
    assert (level[share > 0] <= level.min() + 1).all()


def test_of_ranks_with_the_same_load_the_first_get_what_is_left_over():
    load = np.arange(64, dtype=np.int64)[None] % 2
    assert np.flatnonzero(pour(load, np.asarray([5]))[0]).tolist() == [0, 2, 4, 6, 8]
    assert np.flatnonzero(pour(load, np.asarray([32 + 3]))[0] == 2).tolist() == [0, 2, 4]


def test_no_byte_is_lost_where_there_are_very_many():
    amount = np.asarray([(1 << 61) + 1])
    assert pour(np.zeros((1, 3), dtype=np.int64), amount).sum() == amount[0]


@examples(200)
@given(
    st.lists(st.tuples(st.frozensets(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 100)), max_size=30).map(
        lambda each: sorted(each, key=lambda pair: len(pair[0]))
    ),
    st.integers(1, 6),
)
def test_lines_are_shared_out_one_after_the_other(lines, window):
    """However many are looked at together, a line finds the loads that those before it have left."""
    sets = sets_of([sorted(ranks) for ranks, _ in lines])
    amount = np.asarray([amount for _, amount in lines], dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder_sets, "_WINDOW", window)
        patch.setattr(holder_sets, "_ROUNDS", 1)
        share = share_out(sets, amount, 10)
    load, expected = np.zeros(10, dtype=np.int64), []
    for places, each in zip(np.split(sets.members, sets.start[1:-1]) if len(sets) else [], amount):
        expected += pour(load[places][None], each[None])[0].tolist()
        load[places] += expected[-len(places) :]
    assert share.tolist() == expected


def test_sets_of_one_kind_are_shared_out_together(monkeypatch):
    """1,250 data-parallel groups of 8 and 1,250 of another axis: a few steps, not one for each."""
    steps = []
    monkeypatch.setattr(holder_sets, "pour", lambda load, amount: steps.append(len(load)) or pour(load, amount))
    ranks = np.arange(10_000)
    first, second = ranks.reshape(8, 1250).T, ranks.reshape(1250, 8)
    shards = [
        (f"{kind}{i}", rank)
        for kind, sets in (("a", first), ("b", second))
        for i, each in enumerate(sets)
        for rank in each
    ]
    shards.sort(key=lambda each: each[1])
    catalog = catalog_of([Shard(key, "uint8", (8,), (0,), (8,), None, rank) for key, rank in shards])
    sets, _ = find_sets(group_replicas(catalog), catalog.rank.astype(np.int64))
    assert len(sets) == 2500
    share = share_out(sets, np.full(2500, 80, dtype=np.int64), 10_000)
    assert (np.bincount(sets.members, share) == 20).all()
    assert len(steps) <= 10


def best_peak(lines, world):
    """The least that the most loaded rank can get: some ranks share what they alone own (Hall's theorem)."""
    subsets = (frozenset(c) for size in range(1, world + 1) for c in itertools.combinations(range(world), size))
    return max(-(-sum(amount for ranks, amount in lines if ranks <= some) // len(some)) for some in subsets)


def loads_of(lines, world):
    """What ranks get of lines, by rank, and what they have at least."""
    lines = sorted(lines, key=lambda pair: (len(pair[0]), sorted(pair[0])))
    sets, amount = (
        sets_of([sorted(ranks) for ranks, _ in lines]),
        np.asarray([each for _, each in lines], dtype=np.int64),
    )
    share = share_out(sets, amount, world)
    assert (share >= 0).all()
    assert np.add.reduceat(share, sets.start[:-1]).tolist() == amount.tolist()
    load = np.bincount(sets.members, share, world).astype(np.int64)
    return load, least_peak(sets, amount, load)


@examples(100)
@given(st.dictionaries(st.frozensets(st.integers(0, 6), min_size=1), st.integers(0, 10**6), min_size=1, max_size=14))
def test_no_way_to_share_out_is_much_better(lines):
    """Whichever ranks own what: sets that cross, too, of which each alone would be levelled."""
    best = best_peak([*lines.items()], 7)
    load, least = loads_of(lines.items(), 7)
    assert least <= best <= load.max() <= 1.02 * best + 7
    assert load.max() <= 1.02 * least + 7


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 8), (16, 64)])
def test_axes_that_cross_are_levelled_together(rows, columns):
    """One row has most. Where lines are shared out once, its ranks have up to 46 % more than is needed."""
    mesh = np.arange(rows * columns).reshape(rows, columns)
    lines = [(frozenset(each.tolist()), 10**6 if i else 3 * 10**6) for i, each in enumerate(mesh)]
    lines += [(frozenset(each.tolist()), 10**6 if i else 0) for i, each in enumerate(mesh.T)]
    load, least = loads_of(lines, mesh.size)
    assert load.max() <= 1.02 * least


def test_what_few_ranks_own_alone_bounds_what_can_be_reached():
    """Ranks 0 and 1 share 10 and 2; rank 2 has 3."""
    pair, all_three = frozenset([0, 1]), frozenset([0, 1, 2])
    load, least = loads_of([(frozenset([0]), 10), (pair, 2), (frozenset([2]), 3)], 3)
    assert (sorted(load.tolist()), least) == ([2, 3, 10], 10)
    load, least = loads_of([(pair, 21), (frozenset([2]), 3), (all_three, 1)], 3)
    assert (load.max(), least) == (11, 11)


def test_sets_that_all_cross_their_neighbours_are_given_a_bounded_time(monkeypatch):
    """Each of 3,000 sets has a rank in common with the next: every one is a step of its own."""
    steps = []
    monkeypatch.setattr(holder_sets, "pour", lambda load, amount: steps.append(len(load)) or pour(load, amount))
    load, _ = loads_of([(frozenset([i, i + 1]), 10**6 * (i < 1500)) for i in range(3000)], 3001)
    assert load.sum() == 1500 * 10**6
    assert len(steps) <= 3000 + holder_sets._STEPS
