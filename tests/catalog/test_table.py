"""Catalogs keep what was put into them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CUT, NATURAL, CatalogBuilder, Order, ValidationError, concat
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog
from tests.property import examples
from tests.property.layouts import ITEMSIZE, catalog_of, layouts, shard_of_row

COLUMN_TYPES = {
    "key": np.int32,
    "dtype": np.int16,
    "ndim": np.int16,
    "global_shape": np.int64,
    "offset": np.int64,
    "shape": np.int64,
    "flat_start": np.int64,
    "flat_stop": np.int64,
    "rank": np.int32,
    "file": np.int32,
    "byte_offset": np.int64,
}
MIXED = layouts(max_tensors=4, max_ndim=5, max_extent=3)


def rows_of(catalog):
    return [shard_of_row(catalog, row) for row in range(len(catalog))]


def check_types(catalog):
    for name, dtype in COLUMN_TYPES.items():
        column = getattr(catalog, name)
        assert column.dtype == dtype, name
        assert column.shape == ((len(catalog), catalog.width) if column.ndim == 2 else (len(catalog),))


@examples(80)
@given(MIXED)
def test_every_row_comes_back_as_it_was_added(shards):
    catalog = catalog_of(shards)
    check_types(catalog)
    assert rows_of(catalog) == shards
    assert catalog.size.tolist() == [s.size for s in shards]
    assert catalog.itemsize.tolist() == [ITEMSIZE[s.dtype] for s in shards]
    assert catalog.byte_length.tolist() == [s.size * ITEMSIZE[s.dtype] for s in shards]
    assert catalog.is_flattened.tolist() == [s.flat is not None for s in shards]
    assert len(set(catalog.keys)) == len(catalog.keys) == len({s.key for s in shards})


@examples(80)
@given(MIXED, st.data())
def test_take_keeps_the_rows_that_were_asked_for(shards, data):
    catalog = catalog_of(shards)
    indices = data.draw(st.lists(st.integers(0, len(shards) - 1), max_size=8))
    assert rows_of(catalog.take(np.asarray(indices, dtype=np.int64))) == [shards[i] for i in indices]
    mask = np.zeros(len(shards), dtype=bool)
    mask[indices] = True
    assert rows_of(catalog.take(mask)) == [s for i, s in enumerate(shards) if i in indices]


@examples(80)
@given(MIXED, st.integers(0, 8))
def test_widened_changes_no_shard(shards, width):
    catalog = catalog_of(shards)
    wide = catalog.widened(width)
    assert wide.width == max(width, catalog.width)
    check_types(wide)
    assert rows_of(wide) == shards
    assert (wide.size == catalog.size).all()


@examples(80)
@given(st.lists(MIXED, max_size=3), st.booleans())
def test_concat_keeps_all_rows_in_order(parts, with_files):
    file_of = (lambda rank: f"vfile_{rank}") if with_files else None
    catalogs = [catalog_of(shards, file_of) for shards in parts]
    joined = concat(catalogs)
    check_types(joined)
    assert rows_of(joined) == [s for shards in parts for s in shards]
    expected = [f"vfile_{s.rank}" if with_files else None for shards in parts for s in shards]
    assert [joined.file_name(row) for row in range(len(joined))] == expected
    for table in (joined.keys, joined.dtypes, joined.files):
        assert len(set(table)) == len(table)


def test_concat_of_rows_with_and_without_a_file():
    first, second = CatalogBuilder(0, "a"), CatalogBuilder(1)
    first.add("x", "int8", (2,), (0,), (1,), byte_offset=40)
    second.add("x", "int8", (2,), (1,), (1,))
    for order in ([first, second], [second, first]):
        joined = concat([builder.build() for builder in order])
        names = {int(joined.rank[row]): joined.file_name(row) for row in range(2)}
        assert names == {0: "a", 1: None}
        assert joined.byte_offset[joined.rank == 0].tolist() == [40]


def test_concat_of_nothing_is_an_empty_catalog():
    empty = concat([])
    assert (len(empty), empty.width, empty.keys) == (0, 1, ())
    assert empty.size.tolist() == empty.itemsize.tolist() == empty.byte_length.tolist() == []
    check_types(empty)
    check_types(concat([empty, CatalogBuilder(3, "f").build()]))


def test_padding_is_on_the_left_and_leaves_the_numbers_of_axes():
    builder = CatalogBuilder(0)
    builder.add("scalar", "float32", (), (), ())
    builder.add("matrix", "float32", (4, 6), (2, 0), (2, 6))
    catalog = builder.build()
    assert catalog.ndim.tolist() == [0, 2]
    assert catalog.global_shape.tolist() == [[1, 1], [4, 6]]
    assert catalog.offset.tolist() == [[0, 0], [2, 0]]
    assert catalog.unpadded(0, catalog.shape) == ()
    assert catalog.size.tolist() == [1, 12]


def test_add_returns_the_row_and_merges_names():
    builder = CatalogBuilder(2)
    assert builder.add("a", "paddle.float32", (2,), (0,), (1,)) == 0
    assert builder.add("b", "int64", (2,), (0,), (1,)) == 1
    assert builder.add("a", "float32", (2,), (1,), (1,)) == 2
    catalog = builder.build()
    assert (catalog.keys, catalog.dtypes) == (("a", "b"), ("float32", "int64"))
    assert catalog.key.tolist() == [0, 1, 0]
    assert catalog.dtype.tolist() == [0, 1, 0]
    assert set(catalog.rank.tolist()) == {2}


def test_add_takes_numpy_integers():
    builder = CatalogBuilder(0)
    builder.add("a", "int8", np.asarray([4, 4]), np.asarray([0, 2]), np.asarray([4, 2]), (np.int64(1), np.int64(5)))
    assert builder.build().describe(0) == "int8 [0:4, 2:4] of [4, 4], flattened range [1, 5)"


def test_describe():
    builder = CatalogBuilder(0)
    builder.add("a", "bfloat16", (), (), ())
    builder.add("a", "bfloat16", (3, 4), (1, 0), (2, 4))
    catalog = builder.build()
    assert catalog.describe(0) == "bfloat16 [] of []"
    assert catalog.describe(1) == "bfloat16 [1:3, 0:4] of [3, 4]"


def test_a_billion_elements_and_more_do_not_overflow():
    builder = CatalogBuilder(0)
    builder.add("a", "float64", (1 << 20, 1 << 20), (0, 0), (1 << 20, 1 << 20))
    catalog = builder.build()
    assert catalog.byte_length.tolist() == [1 << 43]
    assert math.prod(catalog.shape[0].tolist()) == 1 << 40


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValidationError, match="'float7'"):
        CatalogBuilder(0).add("a", "float7", (1,), (0,), (1,))


@pytest.mark.parametrize(
    ("global_shape", "offset", "shape"),
    [((8, 8), (4,), (4,)), ((8,), (0, 4), (8, 4)), ((8, 8), (0, 0), (8,)), ((8, 8), (), (8, 8)), ((), (0,), ())],
)
def test_numbers_of_axes_that_differ_are_refused(global_shape, offset, shape):
    """Padding would turn offset [4] of a matrix into [0, 4]: another shard."""
    with pytest.raises(ValidationError) as caught:
        CatalogBuilder(3).add("a", "int8", global_shape, offset, shape)
    (problem,) = caught.value.problems
    assert (problem.key, problem.rank) == ("a", 3)


@pytest.mark.parametrize("flat_range", [(-1, 5), (-1, -1), (-2, 1)])
def test_a_negative_flattened_range_is_not_taken_for_none(flat_range):
    """-1 in the columns means "not flattened"."""
    with pytest.raises(ValidationError) as caught:
        CatalogBuilder(3).add("a", "int8", (8,), (0,), (8,), flat_range)
    (problem,) = caught.value.problems
    assert (problem.key, problem.rank) == ("a", 3)


def test_a_catalog_is_frozen():
    catalog = CatalogBuilder(0).build()
    with pytest.raises(AttributeError):
        catalog.keys = ("x",)
    assert replace(catalog, keys=("x",)).keys == ("x",)


def test_orders_go_with_their_keys():
    permuted = Order(2, 1, "fused_ffn")
    catalogs = []
    said = ({"a": permuted, "b": NATURAL}, {"b": CUT, "c": permuted}, {"d": None, "a": permuted})
    for rank, orders in enumerate(said):
        builder = CatalogBuilder(rank)
        for key, order in orders.items():
            builder.add(key, "float32", (2, 4), (0, 0), (2, 4), order=order)
        catalogs.append(decode_catalog(encode_catalog(builder.build())))
    merged = concat(catalogs).take(np.asarray([0]))
    orders = {key: merged.order(number) for number, key in enumerate(merged.keys)}
    assert orders == {"a": permuted, "b": CUT, "c": permuted, "d": None}
    with pytest.raises(ValidationError, match="ranks disagree .*'a'.*expected fused_ffn, along axis 1, 2 parts"):
        concat([catalogs[0], catalogs[1].with_orders({}), catalogs[2].with_orders({"a": NATURAL})])
    assert not len(merged.with_orders({}).key_order)
