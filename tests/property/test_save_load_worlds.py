"""Whole saves and loads between random layouts, in simulated worlds of 1 to 64 ranks.

Catalogs of one layout -> validate -> write plan -> files; files -> read plan of another layout -> its memory.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import group_replicas, validate_coverage, validate_shards
from paddle_flexckpt.planning.exchange_plan import plan_read
from paddle_flexckpt.planning.matching import ShardMatcher, uncovered_targets
from paddle_flexckpt.planning.write_plan import plan_write
from tests.planning.simulate import blank, carry_out, counters, file_storages, storages, write_files
from tests.property import examples
from tests.property.layouts import Pick, catalog_of, layout, random_tensors, whole_values


def save_and_load(pick, world, other_world, tensors, save_replicas=False):
    source, target = layout(pick, tensors, world), layout(pick, tensors, other_world)
    values = whole_values(tensors)
    catalog = catalog_of(source)
    groups = group_replicas(catalog)
    assert validate_shards(catalog) == []
    coverage = validate_coverage(catalog, groups)
    assert (coverage.problems, coverage.overlaps) == ([], [])
    plan = plan_write(
        catalog, "{}_0.safetensors".format, save_replicas, min_split_bytes=pick.choice((1, 32, 1 << 20)), groups=groups
    )
    files = write_files(plan, storages(source, values))
    stored = file_storages(plan, files, values)

    memory, written = blank(target, values), counters(target)
    matcher = ShardMatcher(plan.catalog)
    targets = catalog_of(target)
    needed = 0
    for rank in range(other_world):
        rows = np.flatnonzero(targets.rank == rank)
        read = plan_read(matcher, targets, rows)
        assert uncovered_targets(read.pieces, targets, rows) == []
        carry_out(read.pieces, stored, memory, written)
        needed += read.needed_bytes
    assert needed == targets.byte_length.sum()
    for shard, data, count in zip(target, memory, written):
        assert (count == 1).all()
        assert data.tobytes() == shard.of(values[shard.key]).tobytes()
    return plan


@examples(60)
@given(st.data(), st.booleans())
def test_small_worlds(data, save_replicas):
    pick = Pick.from_draw(data.draw)
    tensors = random_tensors(pick, pick.integer(1, 3), 4, 4)
    save_and_load(pick, pick.integer(1, 5), pick.integer(1, 5), tensors, save_replicas)


@examples(60)
@given(st.integers(0, 2**32), st.integers(1, 64), st.integers(1, 64))
def test_worlds_of_up_to_sixty_four_ranks(seed, world, other_world):
    pick = Pick.from_seed(seed)
    save_and_load(pick, world, other_world, random_tensors(pick, 5, 4, 9), save_replicas=bool(seed % 2))


def test_a_world_of_sixty_four_becomes_one_rank_and_comes_back():
    for worlds in ((64, 1), (1, 64), (64, 64)):
        pick = Pick.from_seed(sum(worlds))
        save_and_load(pick, *worlds, random_tensors(pick, 12, 3, 16))
