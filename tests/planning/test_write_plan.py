"""Write plans: every element once, at the right place, and as many bytes for every rank."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import concat, validate_coverage, validate_shards
from paddle_flexckpt.catalog.validate import group_replicas
from paddle_flexckpt.planning.write_plan import MIN_SPLIT_BYTES, plan_write
from tests.planning.simulate import file_storages, storages, write_files
from tests.property import examples
from tests.property.layouts import (
    ITEMSIZE,
    Pick,
    Shard,
    catalog_of,
    elements,
    grid,
    layouts,
    mutate,
    random_tensors,
    shard_of_row,
    whole_values,
)

SPLITS = st.sampled_from((1, 16, 64, MIN_SPLIT_BYTES))


def file_name(rank):
    return f"{rank}_7.safetensors"


def plan_of(shards, **options):
    return plan_write(catalog_of(shards), file_name, **options)


def items_of(plan):
    return [shard_of_row(plan.catalog, row) for row in range(len(plan.catalog))]


def check_items(shards, plan):
    """Every item is the stretch of the writing rank's own shard that `source` and `source_start` say."""
    ranks = sorted({s.rank for s in shards})
    for row, item in enumerate(items_of(plan)):
        shard, start = shards[int(plan.source[row])], int(plan.source_start[row])
        assert (item.key, item.dtype, item.global_shape) == (shard.key, shard.dtype, shard.global_shape)
        assert item.rank == shard.rank
        assert (item.flat is None) == (shard.flat is None)
        assert start >= 0 and start + item.size <= shard.size
        assert elements(item).tolist() == elements(shard)[start : start + item.size].tolist()
        assert plan.catalog.file_name(row) == file_name(shard.rank)
    assert plan.catalog.files == tuple(map(file_name, ranks))
    assert validate_shards(plan.catalog) == []


def check_files(shards, plan):
    """Items tile every file, aligned to their element size."""
    ranks = sorted({s.rank for s in shards})
    assert len(plan.rank_bytes) == len(ranks)
    catalog = plan.catalog
    for index, rank in enumerate(ranks):
        rows = np.flatnonzero(catalog.rank == rank)
        assert (catalog.file[rows] == index).all()
        position = 0
        for row in rows[np.lexsort((catalog.byte_length[rows], catalog.byte_offset[rows]))]:
            assert catalog.byte_offset[row] == position
            assert position % catalog.itemsize[row] == 0
            position += int(catalog.byte_length[row])
        assert position == plan.rank_bytes[index]
    for column in (catalog.byte_offset, catalog.offset, catalog.shape, catalog.flat_start, catalog.flat_stop):
        assert column.dtype == np.int64
    assert (catalog.rank.dtype, catalog.file.dtype) == (np.int32, np.int32)
    assert (plan.source.dtype, plan.source_start.dtype, plan.rank_bytes.dtype) == (np.int64,) * 3
    assert plan.total_bytes == catalog.byte_length.sum()
    mean = plan.rank_bytes.sum() / max(len(ranks), 1)
    assert plan.imbalance == pytest.approx(plan.rank_bytes.max() / mean if mean else 1.0)


def painted_by(items):
    counts = {item.key: np.zeros(math.prod(item.global_shape), dtype=np.int64) for item in items}
    for item in items:
        counts[item.key][elements(item)] += 1
    return counts


def check_everything(shards, plan):
    check_items(shards, plan)
    check_files(shards, plan)
    counts = painted_by(items_of(plan))
    assert set(counts) == {s.key for s in shards}
    assert all((count == 1).all() for count in counts.values())


@examples(150)
@given(layouts(max_tensors=4), SPLITS)
def test_every_element_is_written_once_by_a_rank_that_holds_it(shards, min_split_bytes):
    check_everything(shards, plan_of(shards, min_split_bytes=min_split_bytes))


@examples(100)
@given(layouts(max_tensors=3, max_ndim=3, max_extent=7, max_world=8), st.sampled_from((1, 2, 5)))
def test_files_hold_the_values(shards, min_split_bytes):
    values = whole_values({s.key: (s.dtype, s.global_shape) for s in shards})
    plan = plan_of(shards, min_split_bytes=min_split_bytes)
    stored = file_storages(plan, write_files(plan, storages(shards, values)), values)
    for item, data in zip(items_of(plan), stored):
        assert data.tobytes() == item.of(values[item.key]).tobytes()


@examples(60)
@given(layouts(max_tensors=3), st.data(), SPLITS)
def test_every_distinct_shard_of_an_unsound_layout_is_written_once(shards, data, min_split_bytes):
    """Overlaps are the caller's business: nothing may be lost of either shard."""
    pick = Pick.from_draw(data.draw)
    for _ in range(pick.integer(1, 2)):
        shards = mutate(pick, shards, 6)
    plan = plan_of(shards, min_split_bytes=min_split_bytes)
    check_items(shards, plan)
    check_files(shards, plan)
    by_source: dict = {}
    for row, item in enumerate(items_of(plan)):
        by_source.setdefault(shards[int(plan.source[row])].identity, []).append(item)
    for shard in shards:
        if shard.size:
            got = [e for item in by_source[shard.identity] for e in elements(item).tolist()]
            assert sorted(got) == sorted(elements(shard).tolist())


@examples(60)
@given(layouts(max_tensors=3))
def test_save_replicas_writes_what_every_rank_holds(shards):
    plan = plan_of(shards, save_replicas=True)
    check_items(shards, plan)
    check_files(shards, plan)
    expected = [s for s in shards if s.size or 0 in s.global_shape]
    assert sorted(map(repr, items_of(plan))) == sorted(map(repr, expected))
    assert not plan.source_start.any()


def tensors_on_all(pick, count, world, max_extent=12):
    shards = []
    for key, (dtype, shape) in random_tensors(pick, count, 3, max_extent).items():
        shards += [Shard(key, dtype, shape, (0,) * len(shape), shape, None, rank) for rank in range(world)]
    return sorted(shards, key=lambda s: s.rank)


def unit_bytes(shard, min_split_bytes):
    """The least that can be given to a rank of a shard."""
    width = ITEMSIZE[shard.dtype]
    if shard.size * width < min_split_bytes:
        return shard.size * width
    if shard.flat is not None:
        return width
    extents = [extent for extent in shard.shape if extent > 1]
    return math.prod(extents[1:]) * width


@examples(80)
@given(st.integers(0, 2**32), st.integers(1, 9), SPLITS)
def test_replicated_tensors_are_balanced_to_one_unit(seed, world, min_split_bytes):
    """Each cut of the line is off by half a unit at the most, and a rank has two cuts."""
    pick = Pick.from_seed(seed)
    shards = tensors_on_all(pick, pick.integer(1, 12), world)
    plan = plan_of(shards, min_split_bytes=min_split_bytes)
    unit = max(unit_bytes(s, min_split_bytes) for s in shards)
    assert plan.rank_bytes.max() <= -(-plan.total_bytes // world) + unit
    assert plan.rank_bytes.min() >= plan.total_bytes // world - unit


def sound_optimum(shards):
    """Lower bound of the most loaded rank's bytes: bytes that only a set of ranks holds, over its size."""
    ranks = sorted({s.rank for s in shards})
    holders: dict = {}
    for s in shards:
        holders.setdefault(s.identity, (s, set()))[1].add(s.rank)
    best = 0.0
    for count in range(1, len(ranks) + 1):
        for chosen in itertools.combinations(ranks, count):
            inside = sum(s.size * ITEMSIZE[s.dtype] for s, held in holders.values() if held <= set(chosen))
            best = max(best, inside / count)
    return best


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from((1, 16, MIN_SPLIT_BYTES)))
def test_hybrid_parallel_states_are_as_balanced_as_can_be(seed, min_split_bytes):
    """TP x DP: norms on all ranks, matrices on the ranks of one TP index, ZeRO states on one rank each."""
    pick = Pick.from_seed(seed)
    tp, dp = pick.integer(1, 3), pick.integer(1, 3)
    shards = []
    for i in range(pick.integer(1, 8)):
        dtype, kind = pick.choice(("bfloat16", "float32")), pick.choice(("all", "tp", "zero"))
        rows, columns = tp * pick.integer(1, 9), pick.integer(1, 9)
        cells = (
            [((0, 0), (rows, columns))]
            if kind == "all"
            else [((t * rows // tp, 0), (rows // tp, columns)) for t in range(tp)]
        )
        for t, (offset, shape) in enumerate(cells):
            owner = pick.integer(0, dp - 1)
            for d in range(dp):
                for rank in range(d * tp, d * tp + tp) if kind == "all" else [d * tp + t]:
                    if kind != "zero" or d == owner:
                        shards.append(Shard(f"{kind}{i}", dtype, (rows, columns), offset, shape, None, rank))
    shards.sort(key=lambda s: s.rank)
    plan = plan_of(shards, min_split_bytes=min_split_bytes)
    check_everything(shards, plan)
    # Sets of holders are nested three deep here, and each level may be off by a unit.
    unit = max(unit_bytes(s, min_split_bytes) for s in shards)
    assert plan.rank_bytes.max() <= math.ceil(sound_optimum(shards)) + 3 * unit


@examples(80)
@given(layouts(max_tensors=5, max_world=6))
def test_sets_of_holders_that_cross_are_balanced_within_a_factor_of_two(shards):
    plan = plan_of(shards, min_split_bytes=1)
    levels = len({frozenset(s.rank for s in shards if s.identity == one.identity) for one in shards})
    unit = max((unit_bytes(s, 1) for s in shards), default=0)
    if len(plan.rank_bytes):
        assert plan.rank_bytes.max() <= 2 * sound_optimum(shards) + levels * unit


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("world", [1, 2, 7, 8, 64])
def test_one_big_replicated_tensor_is_split_among_all_holders(world, flattened):
    shape = (64, 128, 128)
    flat = (0, math.prod(shape)) if flattened else None
    assert math.prod(shape) * 4 >= MIN_SPLIT_BYTES
    shards = [Shard("big", "float32", shape, (0, 0, 0), shape, flat, rank) for rank in range(world)]
    plan = plan_of(shards)
    check_everything(shards, plan)
    assert sorted(plan.catalog.rank.tolist()) == list(range(world))
    row = 4 if flattened else 128 * 128 * 4
    assert plan.rank_bytes.max() - plan.rank_bytes.min() <= row


def test_one_small_replicated_tensor_is_not_split():
    shards = [Shard("small", "float32", (1024,), (0,), (1024,), None, rank) for rank in range(8)]
    assert len(plan_of(shards).catalog) == 1
    assert len(plan_of(shards, min_split_bytes=1024).catalog) == 8


def test_a_cut_inside_a_small_shard_moves_to_its_nearer_end():
    """90 + 10 bytes for two ranks: the first shard is nearer to a half than nothing is."""
    shards = [Shard(f"k{n}", "uint8", (n,), (0,), (n,), None, rank) for rank in range(2) for n in (90, 10)]
    assert sorted(plan_of(shards).rank_bytes.tolist()) == [10, 90]
    rows = [Shard("w", "uint8", (3, 10), (0, 0), (3, 10), None, rank) for rank in range(2)]
    own = [Shard("own", "uint8", (3,), (0,), (3,), None, 0)]
    # Rank 1 should get 16.5 bytes of the three rows of ten: two rows are nearer than one.
    plan = plan_of(sorted(rows + own, key=lambda s: s.rank), min_split_bytes=1)
    assert plan.rank_bytes.tolist() == [13, 20]


def test_a_cut_between_two_shards_or_two_elements_stays_where_it_is():
    def on_both(key, size, flat):
        return [Shard(key, "uint8", (size,), (0,), (size,), (0, size) if flat else None, rank) for rank in range(2)]

    for flat in (False, True):
        between = sorted(on_both("a", 4, flat) + on_both("b", 4, flat), key=lambda s: s.rank)
        plan = plan_of(between, min_split_bytes=1)
        assert [(item.key, item.size, item.rank) for item in items_of(plan)] == [("a", 4, 0), ("b", 4, 1)]
        assert plan_of(on_both("a", 6, flat), min_split_bytes=1).rank_bytes.tolist() == [3, 3]


def test_the_smallest_shard_that_is_split_has_as_many_bytes_as_the_option_says():
    shards = [Shard("w", "float32", (4,), (0,), (4,), None, rank) for rank in range(2)]
    assert plan_of(shards, min_split_bytes=16).rank_bytes.tolist() == [8, 8]
    assert sorted(plan_of(shards, min_split_bytes=17).rank_bytes.tolist()) == [0, 16]


def test_a_shard_without_elements_belongs_to_the_first_holder_wherever_it_stands():
    """It stands in the middle rank's stretch of the line."""
    tensors = {"a": (60,), "between": (0, 3), "c": (60,)}
    shards = [Shard(k, "uint8", s, (0,) * len(s), s, None, rank) for rank in range(3) for k, s in tensors.items()]
    plan = plan_of(shards, min_split_bytes=1)
    assert plan.rank_bytes.tolist() == [40, 40, 40]
    assert [item.rank for item in items_of(plan) if item.key == "between"] == [0]


def test_unit_axes_before_the_first_long_one_do_not_prevent_a_split():
    shards = [Shard("w", "uint8", (1, 1, 8, 3), (0,) * 4, (1, 1, 8, 3), None, r) for r in range(4)]
    plan = plan_of(shards, min_split_bytes=1)
    check_everything(shards, plan)
    assert plan.rank_bytes.tolist() == [6, 6, 6, 6]
    assert [item.shape for item in items_of(plan)] == [(1, 1, 2, 3)] * 4


def test_what_only_one_rank_holds_is_counted_before_what_can_be_shifted():
    own = [Shard("own", "uint8", (600,), (0,), (600,), None, 0)]
    shared = [Shard("shared", "uint8", (1000,), (0,), (1000,), None, rank) for rank in range(2)]
    plan = plan_of(sorted(own + shared, key=lambda s: s.rank), min_split_bytes=1)
    assert plan.rank_bytes.tolist() == [800, 800]
    assert plan.imbalance == 1.0


def test_what_some_ranks_got_is_counted_in_bytes_when_more_ranks_share():
    """One rank alone holds 600 bytes, two 1200, three 1800: each can write 1200."""
    shards = [
        Shard(key, "float32", (length,), (0,), (length,), None, rank)
        for rank in range(3)
        for key, length, holders in (("own", 150, 1), ("pair", 300, 2), ("trio", 450, 3))
        if rank < holders
    ]
    assert plan_of(shards, min_split_bytes=1).rank_bytes.tolist() == [1200, 1200, 1200]


@pytest.mark.parametrize("whole", ["abcd", "a", "bd", ""])
@pytest.mark.parametrize("marked_by", [0, 2])
def test_a_shard_that_one_replica_says_is_indivisible_is_written_by_one_rank(whole, marked_by):
    shards = [Shard(key, "uint8", (9,), (0,), (9,), None, rank) for rank in range(3) for key in "abcd"]
    marked = np.asarray([s.key in whole and s.rank == marked_by for s in shards])
    plan = plan_of(shards, min_split_bytes=1, indivisible=marked)
    check_everything(shards, plan)
    parts = {key: [item.size for item in items_of(plan) if item.key == key] for key in "abcd"}
    assert all(parts[key] == [9] for key in whole)
    # 36 bytes for three ranks: cuts at 12 and 24, within the second and the third.
    assert (len(parts["b"]), len(parts["c"])) == (1 if "b" in whole else 2, 1 if "c" in whole else 2)


def test_ranks_need_not_be_consecutive():
    shards = [Shard("w", "uint8", (8,), (0,), (8,), None, rank) for rank in (3, 11)]
    plan = plan_of(shards, min_split_bytes=1)
    assert plan.catalog.rank.tolist() == [3, 11]
    assert plan.catalog.files == ("3_7.safetensors", "11_7.safetensors")
    check_everything(shards, plan)


def test_a_rank_that_holds_a_shard_twice_writes_it_once():
    shards = [Shard("w", "uint8", (8,), (0,), (8,), None, rank) for rank in (0, 0, 1)]
    check_everything(shards, plan_of(shards, min_split_bytes=1))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("flat", [None, (0, 0)])
@pytest.mark.parametrize("save_replicas", [False, True])
def test_a_tensor_without_elements_keeps_its_key(shape, flat, save_replicas):
    zeros = (0,) * len(shape)
    shards = [Shard("empty", "float32", shape, zeros, shape, flat, rank) for rank in range(3)]
    shards += [Shard("full", "uint8", (5,), (0,), (5,), None, rank) for rank in range(3)]
    shards.sort(key=lambda s: s.rank)
    plan = plan_of(shards, save_replicas=save_replicas, min_split_bytes=1)
    check_items(shards, plan)
    check_files(shards, plan)
    empties = [item for item in items_of(plan) if item.key == "empty"]
    assert len(empties) == (3 if save_replicas else 1)
    assert all((item.global_shape, item.shape, item.flat) == (shape, shape, flat) for item in empties)


def test_an_empty_range_is_not_written():
    shards = [Shard("w", "uint8", (4,), (0,), (4,), flat, 0) for flat in ((0, 0), (0, 4), (4, 4))]
    assert [item.flat for item in items_of(plan_of(shards))] == [(0, 4)]
    shards.append(Shard("empty", "uint8", (0, 2), (0, 0), (0, 2), None, 0))
    for save_replicas in (False, True):
        found = [item.flat for item in items_of(plan_of(shards, save_replicas=save_replicas)) if item.key == "w"]
        assert found == [(0, 4)]


@pytest.mark.parametrize("save_replicas", [False, True])
def test_what_groups_leave_out_is_not_written(save_replicas):
    """Of replicas that may differ one counts, and no other may be written beside or instead of it."""
    shards = [Shard(key, "uint8", (6,), (0,), (6,), None, rank) for rank in range(3) for key in "ab"]
    groups = group_replicas(catalog_of(shards)).narrowed_to(np.asarray([shards.index(replace(shards[0], rank=2))]))
    plan = plan_of(shards, save_replicas=save_replicas, min_split_bytes=1, groups=groups)
    check_items(shards, plan)
    check_files(shards, plan)
    assert [(item.rank, item.size) for item in items_of(plan) if item.key == "a"] == [(2, 6)]
    others = {item.rank for item in items_of(plan) if item.key == "b"}
    assert others == ({0, 1, 2} if save_replicas else {0, 1})
    assert plan.source.tolist() == sorted(plan.source.tolist(), key=lambda row: (shards[row].rank, row))


def test_the_shards_of_a_tensor_stand_in_a_file_in_the_order_of_their_elements():
    cells = [(row, column) for column in (0, 2) for row in (0, 3)]
    shards = [Shard("w", "uint8", (6, 4), cell, (3, 2), None, 0) for cell in cells]
    assert [item.offset for item in items_of(plan_of(shards))] == sorted(cells)


@examples(60)
@given(st.integers(0, 2**32), st.booleans())
def test_element_sizes_in_one_file_are_aligned_without_gaps(seed, save_replicas):
    pick = Pick.from_seed(seed)
    shards = tensors_on_all(pick, 10, 3, max_extent=5)
    assert len({s.dtype for s in shards}) > 1
    check_files(shards, plan_of(shards, save_replicas=save_replicas, min_split_bytes=1))


def stored(plan):
    """All that a plan says, without the numbers of the rows it was made from."""
    return list(zip(items_of(plan), plan.source_start.tolist(), plan.catalog.byte_offset.tolist()))


@examples(60)
@given(layouts(max_tensors=4), st.randoms(use_true_random=False), SPLITS)
def test_the_plan_does_not_depend_on_the_order_of_the_rows(shards, random, min_split_bytes):
    catalog = catalog_of(shards)
    plan = plan_write(catalog, file_name, min_split_bytes=min_split_bytes)
    again = plan_write(catalog, file_name, min_split_bytes=min_split_bytes)
    order = list(range(len(shards)))
    random.shuffle(order)
    shuffled = plan_write(catalog.take(np.asarray(order)), file_name, min_split_bytes=min_split_bytes)
    assert stored(again) == stored(plan)
    assert again.source.tolist() == plan.source.tolist()
    assert stored(shuffled) == stored(plan)
    assert [order[row] for row in shuffled.source] == plan.source.tolist()


@examples(40)
@given(layouts(max_tensors=3))
def test_groups_that_the_caller_has_make_the_same_plan(shards):
    catalog = catalog_of(shards)
    assert stored(plan_write(catalog, file_name, groups=group_replicas(catalog))) == stored(plan_of(shards))


@examples(40)
@given(layouts(max_tensors=3), SPLITS)
def test_what_is_written_covers_everything_without_overlaps(shards, min_split_bytes):
    plan = plan_of(shards, min_split_bytes=min_split_bytes)
    coverage = validate_coverage(plan.catalog, group_replicas(plan.catalog))
    assert (coverage.problems, coverage.overlaps) == ([], [])
    assert (group_replicas(plan.catalog).count == 1).all()


def test_no_shards():
    for save_replicas in (False, True):
        plan = plan_write(concat([]), file_name, save_replicas=save_replicas)
        assert (len(plan.catalog), plan.total_bytes, plan.imbalance) == (0, 0, 1.0)
        check_files([], plan)
        assert len(plan.catalog.byte_offset) == len(plan.source) == 0


def test_a_large_world_in_which_every_shard_has_other_holders():
    pick = Pick.from_seed(5)
    shards = []
    for i, (offset, shape) in enumerate(grid(pick, (40, 40), most=12)):
        for rank in pick.some(0, 63, 1 + i % 5):
            shards.append(Shard("w", "bfloat16", (40, 40), offset, shape, None, rank))
    shards.sort(key=lambda s: s.rank)
    check_everything(shards, plan_of(shards, min_split_bytes=8))
