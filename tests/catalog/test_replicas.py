"""Replica groups against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CatalogBuilder, concat, group_replicas
from tests.property import examples
from tests.property.layouts import Pick, catalog_of, layouts, mutate


def check_groups(shards):
    catalog = catalog_of(shards)
    groups = group_replicas(catalog)
    expected: dict = {}
    for row, shard in enumerate(shards):
        expected.setdefault(shard.identity, []).append(row)
    got = [groups.order[a:b].tolist() for a, b in zip(groups.start[:-1], groups.start[1:])]
    assert sorted(map(sorted, got)) == sorted(expected.values())
    assert len(groups) == len(expected)
    assert groups.count.tolist() == [len(rows) for rows in got]
    assert groups.first.tolist() == [rows[0] for rows in got]
    assert sorted(groups.order.tolist()) == list(range(len(shards)))
    for rows in got:
        assert [shards[row].rank for row in rows] == sorted(shards[row].rank for row in rows)
    # Groups are numbered by key, offset, shape, then range, each as its (padded) columns say.
    columns = [
        catalog.key[:, None],
        catalog.offset,
        catalog.shape,
        catalog.flat_start[:, None],
        catalog.flat_stop[:, None],
    ]
    place = np.concatenate(columns, axis=1)[groups.first].tolist()
    assert place == sorted(place)


@examples(120)
@given(layouts(max_tensors=4, max_ndim=5))
def test_groups_are_those_of_a_dict(shards):
    check_groups(shards)


@examples(80)
@given(layouts(), st.data())
def test_groups_of_unsound_layouts_are_those_of_a_dict(shards, data):
    pick = Pick.from_draw(data.draw)
    for _ in range(pick.integer(1, 3)):
        shards = mutate(pick, shards, 6)
    check_groups(shards)


def test_one_rank_may_hold_a_shard_twice():
    builder = CatalogBuilder(0)
    for _ in range(2):
        builder.add("a", "int8", (4,), (0,), (4,))
    groups = group_replicas(builder.build())
    assert groups.count.tolist() == [2]


def test_a_whole_box_and_its_whole_range_are_two_shards():
    builder = CatalogBuilder(0)
    builder.add("a", "int8", (4,), (0,), (4,))
    builder.add("a", "int8", (4,), (0,), (4,), (0, 4))
    assert len(group_replicas(builder.build())) == 2


def test_no_rows_no_groups():
    groups = group_replicas(concat([]))
    assert (len(groups), groups.count.tolist(), groups.first.tolist()) == (0, [], [])


def test_rows_that_differ_in_the_rank_alone_are_one_group():
    catalog = concat([_one("a", rank) for rank in (5, 3, 4)])
    groups = group_replicas(catalog)
    assert groups.count.tolist() == [3]
    assert catalog.rank[groups.order].tolist() == [3, 4, 5]


def test_groups_of_which_some_have_one_member_left():
    catalog = concat([_one(key, rank) for key, rank in (("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2))])
    groups = group_replicas(catalog)
    assert groups.order.tolist() == [0, 3, 5, 1, 4, 2]
    left = groups.narrowed_to(np.asarray([3, 4]))
    assert (left.order.tolist(), left.start.tolist()) == ([3, 4, 2], [0, 1, 2, 3])
    left = groups.narrowed_to(np.asarray([1]))
    assert (left.order.tolist(), left.start.tolist()) == ([0, 3, 5, 1, 2], [0, 3, 4, 5])
    left = groups.narrowed_to(np.asarray([0, 2]))
    assert (left.order.tolist(), left.start.tolist()) == ([0, 1, 4, 2], [0, 1, 3, 4])
    same = groups.narrowed_to(np.zeros(0, dtype=np.int64))
    assert (same.order.tolist(), same.start.tolist()) == (groups.order.tolist(), groups.start.tolist())


def _one(key, rank):
    builder = CatalogBuilder(rank)
    builder.add(key, "int8", (4,), (0,), (4,))
    return builder.build()
