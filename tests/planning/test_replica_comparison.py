"""Which bytes of replicas are compared: what is written on two ranks, in a ring that turns, and a sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog.validate import group_replicas
from paddle_flexckpt.planning.replica_comparison import (
    SAMPLE_BYTES,
    compare_samples,
    compare_whole,
    compare_written,
    ring_neighbour,
)
from paddle_flexckpt.planning.write_plan import Items, plan_write
from tests.property.layouts import Shard, catalog_of, layouts

TURNS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("count", range(2, 18))
def test_every_turn_is_one_ring_and_in_time_everybody_meets_everybody(count):
    positions, met = np.arange(count), set()
    for turn in range(1000, 1000 + 2 * count):
        following = ring_neighbour(positions, np.full(count, count), turn)
        here, seen = 0, []
        for _ in range(count):
            seen.append(here)
            here = int(following[here])
        assert here == 0 and sorted(seen) == list(range(count))
        met.update(enumerate(following.tolist()))
    assert met == {(a, b) for a in range(count) for b in range(count) if a != b}


def plan_of(catalog):
    return plan_write(catalog, lambda rank: f"{rank}.safetensors", min_split_bytes=8)


def items_of(plan):
    return Items(plan.source, plan.source_start, plan.source_start + plan.catalog.size)


def lines_of(comparison):
    return list(zip(comparison.row.tolist(), comparison.start.tolist(), comparison.stop.tolist()))


@given(layouts(max_tensors=4, max_world=8), TURNS)
def test_what_is_written_of_replicas_is_compared_on_its_writer_and_one_other_rank(shards, turn):
    catalog = catalog_of(shards)
    groups, plan = group_replicas(catalog), plan_of(catalog)
    comparison = compare_written(items_of(plan), catalog, groups, np.ones(len(groups), dtype=bool), turn)
    lines, pairs = lines_of(comparison), {}
    for line, first in zip(lines, comparison.first.tolist()):
        pairs.setdefault(first, []).append(line)
    replicated = (groups.count > 1)[groups.of_row[plan.source]] & (plan.catalog.size > 0)
    items = lines_of(items_of(plan))
    assert [pair[0] for pair in pairs.values()] == [item for item, kept in zip(items, replicated) if kept]
    for pair in pairs.values():
        assert len(pair) == len({int(catalog.rank[row]) for row, *_ in pair}) == 2
        assert len({(int(groups.of_row[row]), *span) for row, *span in pair}) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_a_rank_reads_at_most_twice_its_share(ranks):
    shards = [Shard("w", "float32", (1 << 20,), (0,), (1 << 20,), None, rank) for rank in range(ranks)]
    catalog = catalog_of(shards)
    groups = group_replicas(catalog)
    for turn in range(5):
        comparison = compare_written(
            items_of(plan_of(catalog)), catalog, groups, np.ones(len(groups), dtype=bool), turn
        )
        read = np.zeros(ranks, dtype=np.int64)
        np.add.at(read, catalog.rank[comparison.row], (comparison.stop - comparison.start) * 4)
        assert read.max() <= 2 * (4 << 20) / ranks + 8


@given(layouts(max_tensors=4, max_world=8, max_extent=9), TURNS)
def test_a_sample_is_the_same_stretch_of_every_replica_of_more_than_two(shards, turn):
    catalog = catalog_of(shards)
    groups = group_replicas(catalog)
    comparison = compare_samples(catalog, groups, np.ones(len(groups), dtype=bool), turn)
    expected = (groups.count > 2) & (catalog.size[groups.first] > 0)
    assert sorted(comparison.row.tolist()) == np.flatnonzero(expected[groups.of_row]).tolist()
    for row, start, stop in lines_of(comparison):
        width = int(catalog.itemsize[row])
        assert 0 <= start < stop <= catalog.size[row]
        assert (stop - start) * width <= SAMPLE_BYTES
        assert (stop - start) * width == SAMPLE_BYTES or stop == catalog.size[row]
    first = comparison.first
    assert (groups.of_row[comparison.row] == groups.of_row[comparison.row[first]]).all()
    assert (comparison.start == comparison.start[first]).all() and (comparison.stop == comparison.stop[first]).all()


def test_a_sample_wanders_through_the_replica():
    catalog = catalog_of([Shard("w", "uint8", (640,), (0,), (640,), None, rank) for rank in range(3)])
    groups = group_replicas(catalog)
    starts = {int(compare_samples(catalog, groups, np.asarray([True]), turn).start[0]) for turn in range(10)}
    assert starts == set(range(0, 640, 64))


@given(layouts(max_tensors=4, max_world=5))
def test_all_of_all_replicas(shards):
    catalog = catalog_of(shards)
    groups = group_replicas(catalog)
    comparison = compare_whole(catalog, groups)
    several = (groups.count > 1)[groups.of_row] & (catalog.size > 0)
    assert sorted(comparison.row.tolist()) == np.flatnonzero(several).tolist()
    for row, start, stop in lines_of(comparison):
        assert (start, stop) == (0, catalog.size[row])


@given(layouts(max_tensors=3, max_world=5), TURNS, st.integers(0, 5))
def test_the_lines_of_a_rank_and_some_lines_are_those_of_the_table(shards, turn, rank):
    catalog = catalog_of(shards)
    groups = group_replicas(catalog)
    every = np.ones(len(groups), dtype=bool)
    table = compare_samples(catalog, groups, every, turn).concat(compare_whole(catalog, groups))
    assert table.first.tolist() == [table.first[first] for first in table.first]
    mine = np.flatnonzero(catalog.rank[table.row] == rank)
    assert lines_of(table.of_rank(catalog, rank)) == [lines_of(table)[line] for line in mine]
    which = catalog.key[table.row] == 0
    some = table.take(which)
    assert lines_of(some) == [line for line, kept in zip(lines_of(table), which) if kept]
    kept = np.flatnonzero(which)
    assert kept[some.first].tolist() == table.first[which].tolist()
