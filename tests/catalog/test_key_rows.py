"""Rows of many ranks for those that plan their keys: nothing is lost, and all ranks tell the same of what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import Catalog, CatalogBuilder, Order, ValidationError, concat
from paddle_flexckpt.catalog.findings import inspect, raise_findings
from paddle_flexckpt.catalog.key_rows import decode_rows, encode_rows
from tests.property import examples
from tests.property.layouts import Pick, Shard, catalog_of, layouts, mutate

RANKS = (3, 4, 7, 11, 12)


def by_rank(shards, world=5):
    """A catalog for each rank, which may have none of the shards."""
    catalogs = []
    for rank in range(world):
        own = [replace(shard, rank=RANKS[rank]) for shard in shards if shard.rank == rank]
        catalogs.append(catalog_of(own) if own else CatalogBuilder(RANKS[rank]).build())
    return catalogs


def parts_of(catalogs, parts, flags=None):
    """What each of so many planners gets to know; planner ``i`` plans the keys of which ``len(key) + ord`` says so."""
    before = np.cumsum([0, *map(len, catalogs)])[:-1]
    letters = [{} for _ in range(parts)]
    for place, catalog in enumerate(catalogs):
        part = np.asarray([sum(map(ord, key)) % parts for key in catalog.keys], dtype=np.int64)
        own = np.arange(len(catalog)) if flags is None else flags[place]
        for planner, message in encode_rows(catalog, own, part).items():
            letters[planner][place] = message
    return [decode_rows(each, RANKS, before) for each in letters]


def named(catalog: Catalog):
    columns = [getattr(catalog, name).tolist() for name in ("ndim", "global_shape", "offset", "shape", "rank")]
    flat = catalog.flat_start.tolist(), catalog.flat_stop.tolist()
    keys = [catalog.key_name(row) for row in range(len(catalog))]
    return list(zip(keys, map(catalog.dtype_name, range(len(catalog))), *columns, *flat))


@examples(100)
@given(layouts(max_tensors=4, max_world=5))
def test_one_planner_gets_what_all_ranks_own(shards):
    catalogs = by_rank(shards)
    (rows,) = parts_of(catalogs, 1)
    together = concat(catalogs)
    assert named(rows.catalog) == named(together.widened(rows.catalog.width))
    assert rows.catalog.keys == together.keys
    assert rows.number.tolist() == list(range(len(together)))
    assert rows.row.tolist() == rows.flags.tolist() == [row for each in catalogs for row in range(len(each))]
    assert [RANKS[place] for place in rows.place.tolist()] == rows.catalog.rank.tolist()
    for name in Catalog.COLUMNS:
        assert getattr(rows.catalog, name).dtype == getattr(together, name).dtype, name


@examples(60)
@given(layouts(max_tensors=6, max_world=5), st.integers(2, 4))
def test_planners_together_get_each_row_once(shards, parts):
    catalogs = by_rank(shards)
    together = named(concat(catalogs))
    found = parts_of(catalogs, parts)
    numbers = np.concatenate([rows.number for rows in found])
    assert sorted(numbers.tolist()) == list(range(len(together)))
    for rows in found:
        assert (np.diff(rows.number) > 0).all()
        width = rows.catalog.width
        assert [each[0] for each in named(rows.catalog)] == [together[row][0] for row in rows.number.tolist()]
        assert all(len(each[3]) == width for each in named(rows.catalog))


@pytest.mark.parametrize("extent", [(1 << 31) - 1, 1 << 31, 1 << 40])
def test_large_extents_travel(extent):
    builder = CatalogBuilder(RANKS[0])
    builder.add("w", "uint8", (extent, 2), (extent - 1, 0), (1, 2), (0, 2))
    (rows,) = parts_of([builder.build()], 1)
    assert rows.catalog.describe(0) == builder.build().describe(0)


def test_a_shard_of_one_axis_is_a_few_dozen_bytes():
    builder = CatalogBuilder(0)
    builder.add("layers.11.mlp.down_proj.weight", "bfloat16", (4096, 4096), (512, 0), (512, 4096))
    (message,) = encode_rows(builder.build(), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)).values()
    assert len(message) <= 110


def look(rows):
    return inspect(rows.catalog, rows.number, rows.contradictions)


def errors_of(catalogs, parts):
    findings = [finding for rows in parts_of(catalogs, parts) for finding in look(rows).findings]
    with pytest.raises(ValidationError) as caught:
        raise_findings(findings, "cannot save")
    return str(caught.value)


def state(*ranks, **change):
    """Six tensors, cut by rows over the ranks; ``change`` gives other fields for a key on rank 1."""
    shards = []
    for rank in ranks:
        for i in range(6):
            shard = Shard(f"t{i}", "float32", (8, 4), (2 * rank, 0), (2, 4), None, rank)
            shards.append(replace(shard, **change.get(f"t{i}", {})) if rank == 1 else shard)
    return shards


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        (state(0, 1, 2), "no rank holds"),
        (state(0, 2), "12 problems"),
        (state(0, 1, 2, 3, t1={"dtype": "float64"}, t4={"dtype": "uint8"}), "differ in dtype"),
        (state(0, 1, 2, 3, t0={"global_shape": (9, 4)}, t5={"shape": (2, 9)}), "outside its global shape"),
        (state(0, 1, 2, t5={"flat": (5, 99)}), "flattened range outside its box"),
        (state(0, 1, 2, 3, t2={"shape": (-1, 4)}, t3={"flat": (3, 2)}), "negative extent"),
        (state(0, 1, 2, 3, t2={"shape": (1, 4)}, t3={"offset": (4, 0)}), "no rank holds"),
        ([Shard(f"t{i:03}", "uint8", (4,), (0,), (1,), None, i % 5) for i in range(90)], "... and 30 more"),
        ([Shard(f"t{i:03}", "uint8", (4,), (9,), (1,), None, i % 5) for i in range(90)], "... and 30 more"),
        ([Shard(f"t{i:03}", "uint8", (4,), (0,), (4,), (0, 0), i % 5) for i in range(9)], "9 problems"),
    ],
)
def test_the_text_of_an_error_does_not_depend_on_how_many_plan(shards, text):
    catalogs = by_rank(shards)
    expected = errors_of(catalogs, 1)
    assert text in expected
    assert [errors_of(catalogs, parts) for parts in (2, 3, 5)] == [expected] * 3


@examples(80)
@given(layouts(max_tensors=5, max_world=5), st.data(), st.integers(2, 5))
def test_planners_together_find_what_one_alone_does(shards, data, parts):
    pick = Pick.from_draw(data.draw)
    for _ in range(pick.integer(1, 3)):
        shards = mutate(pick, shards, 5)
    catalogs = by_rank(shards)
    alone, several = parts_of(catalogs, 1), parts_of(catalogs, parts)
    (one,), each = map(look, alone), list(map(look, several))
    first = min((finding.stage for finding in one.findings), default=None)
    told = [finding for layout in each for finding in layout.findings if finding.stage == first]
    assert sorted(told) == sorted(one.findings)
    if first is None:
        pairs = [
            sorted(rows.number[list(pair)]) for rows, layout in zip(several, each) for pair in layout.coverage.overlaps
        ]
        assert sorted(pairs) == sorted(sorted(pair) for pair in one.coverage.overlaps)


def ordered(*orders):
    catalogs = []
    for place, by_key in enumerate(orders):
        builder = CatalogBuilder(RANKS[place])
        for key, order in by_key.items():
            builder.add(key, "float32", (8, 8), (0, 0), (8, 8), order=order)
        catalogs.append(builder.build())
    return catalogs


FUSED, NATURAL, CUT = Order(2, 1, "fused_ffn"), Order(1), Order(None)


def test_what_ranks_know_of_orders_is_put_together():
    catalogs = ordered({"a": FUSED, "b": None}, {"a": FUSED, "b": CUT, "c": None}, {"b": NATURAL})
    together = concat(catalogs)
    for parts in (1, 2):
        found = {}
        for rows in parts_of(catalogs, parts):
            assert rows.contradictions == ()
            found |= {key: rows.catalog.order(number) for number, key in enumerate(rows.catalog.keys)}
        assert found == {key: together.order(number) for number, key in enumerate(together.keys)}
    assert found["a"] == FUSED


def test_contradictions_about_orders_are_told_alike():
    catalogs = ordered({"a": FUSED, "b": FUSED}, {"b": Order(4, 1, "fused_ffn")}, {"a": Order(2, 1, "fused_qkv")})
    with pytest.raises(ValidationError, match="ranks disagree about how a fused parameter is cut"):
        concat(catalogs)
    expected = errors_of(catalogs, 1)
    assert "'a'" in expected
    assert "'b'" in expected
    assert errors_of(catalogs, 2) == expected


def test_nothing_is_wrong_with_nothing():
    rows = decode_rows({}, RANKS, np.zeros(5, dtype=np.int64))
    layout = look(rows)
    assert (len(rows.catalog), layout.findings, len(layout.groups), layout.coverage.overlaps) == (0, [], 0, [])
    raise_findings([], "cannot save")
