"""Lines that several planners lay: together they write everything once, and every rank its share."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import group_replicas
from paddle_flexckpt.planning.holder_sets import HolderSets, SharedLines
from paddle_flexckpt.planning.write_plan import lay_lines
from tests.property import examples
from tests.property.layouts import Shard, catalog_of, elements, layouts, shard_of_row


def share_all(planners, world):
    """What each planner learns; messages go to the places that they are for, and nowhere else."""
    boxes = [{} for _ in range(world)]
    for place, lines in enumerate(planners):
        for owner, message in lines.ask().items():
            boxes[owner][place] = message
    answers, told = [{} for _ in range(world)], {}
    for owner, asked in enumerate(boxes):
        note, replies = SharedLines.answer(asked)
        if note:
            told[owner] = note
        for place, reply in replies.items():
            answers[place][owner] = reply
    return [lines.share(told, answers[place], world) for place, lines in enumerate(planners)]


def cut_all(catalog, parts, world, min_split_bytes=1):
    """The items of all planners, each of which has every ``parts``-th key."""
    some = [catalog.take(catalog.key % parts == part) for part in range(parts)]
    laid = [lay_lines(each, group_replicas(each), each.rank.astype(np.int64)) for each in some]
    shares = share_all([SharedLines(lines.sets, lines.amount) for lines in laid], world)
    found = []
    for each, lines, (share, before) in zip(some, laid, shares):
        items = lines.cut(share, min_split_bytes, before)
        found += [(shard_of_row(each, row), *span) for row, *span in zip(items.row, items.start, items.stop)]
    return found


def loads_of(items, world):
    load = np.zeros(world, dtype=np.int64)
    for shard, start, stop in items:
        load[shard.rank] += stop - start
    return load


@examples(100)
@given(layouts(max_tensors=6, max_world=7), st.integers(1, 7), st.sampled_from((1, 16, 1 << 20)))
def test_every_element_is_written_once(shards, parts, min_split_bytes):
    counts = {s.key: np.zeros(int(np.prod(s.global_shape)), dtype=np.int64) for s in shards}
    for shard, start, stop in cut_all(catalog_of(shards), parts, 7, min_split_bytes):
        counts[shard.key][elements(shard)[start:stop]] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("parts", [1, 3, 16])
def test_every_rank_gets_its_share(parts):
    """Two tensors of one rank each, others of four, of eight, of all: what fills up the rest levels it."""
    world, shards = 16, []
    for i in range(40):
        k = i // 4
        kinds = {0: [k], 1: range(4 * (k % 4), 4 * (k % 4) + 4), 2: range(k % 2, 16, 2), 3: range(16)}
        shards += [Shard(f"t{i:02}", "uint8", (400, 3), (0, 0), (400, 3), None, rank) for rank in kinds[i % 4]]
    items = cut_all(catalog_of(sorted(shards, key=lambda s: s.rank)), parts, world)
    load = loads_of(items, world)
    assert load.sum() == 40 * 1200
    assert load.max() <= 1.02 * load.mean()


def test_planners_cut_what_one_alone_would():
    shards = [Shard(f"t{i}", "uint8", (100,), (0,), (100,), None, rank) for rank in range(4) for i in range(6)]
    alone = loads_of(cut_all(catalog_of(shards), 1, 4), 4)
    assert loads_of(cut_all(catalog_of(shards), 4, 4), 4).tolist() == alone.tolist() == [150] * 4


@pytest.mark.parametrize("count", [1, 2, 16, 17, 10_000])
def test_sets_travel_in_few_bytes(count):
    members = np.arange(count, dtype=np.int64) * 3 + 2
    lines = SharedLines(HolderSets(members, np.asarray([0, count])), np.asarray([1000]))
    ((owner, message),) = lines.ask().items()
    assert owner in members
    assert len(message) <= 100
    note, answers = SharedLines.answer({5: message, 9: message})
    share, before = lines.share({owner: note}, {owner: answers[9]}, 30_003)
    assert (share.sum(), before.tolist()) == (2000, [1000])


def test_sets_are_told_apart_where_hosts_compress_in_other_ways(monkeypatch):
    members = np.arange(40, dtype=np.int64)
    sets = HolderSets(members, np.asarray([0, 40]))
    one = SharedLines(sets, np.asarray([30]))
    compress = zlib.compress
    monkeypatch.setattr(zlib, "compress", lambda data: compress(data, 1))
    other = SharedLines(sets, np.asarray([50]))
    (first, second) = share_all([one, other], 40)
    assert first[0].tolist() == second[0].tolist() == [2] * 40
    assert (first[1].tolist(), second[1].tolist()) == ([0], [30])


def test_a_planner_without_keys_takes_part():
    shards = [Shard("t", "uint8", (8,), (0,), (8,), None, rank) for rank in range(2)]
    assert loads_of(cut_all(catalog_of(shards), 5, 7), 7).tolist() == [4, 4, 0, 0, 0, 0, 0]
