"""Catalogs keep what was put into them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import (
    CUT,
    NATURAL,
    Catalog,
    CatalogBuilder,
    Order,
    Problem,
    ValidationError,
    check_extra_names,
    concat,
    may_be_fused,
    without_extra_state,
)
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog
from tests.property import examples
from tests.property.layouts import ITEMSIZE, Shard, catalog_of, layouts, shard_of_row

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
    axes = f"{len(global_shape)}, {len(offset)} and {len(shape)}"
    what = "global shape, offset and shape of a shard differ in their number of axes"
    assert problem == Problem(what, "a", 3, None, "the same number of axes", axes)


@pytest.mark.parametrize("flat_range", [(-1, 5), (-1, -1), (-2, 1), (0, -1)])
def test_a_negative_flattened_range_is_not_taken_for_none(flat_range):
    """-1 in the columns means "not flattened"."""
    with pytest.raises(ValidationError) as caught:
        CatalogBuilder(3, "file").add("a", "int8", (8,), (0,), (8,), flat_range)
    (problem,) = caught.value.problems
    assert problem == Problem("negative flattened range", "a", 3, "file", ">= 0", str(flat_range))


def test_many_shards_are_added_at_once():
    builder = CatalogBuilder(4, "file")
    builder.add("first", "int8", (8,), (0,), (8,), byte_offset=16)
    keys, dtypes = ["b", "first", "b"], ["float32", "paddle.int8", "float32"]
    whole, offsets, shapes = [(4, 6), (8,), (4, 6)], [(0, 0), (0,), (2, 0)], [(2, 6), (8,), (2, 6)]
    builder.add_many(keys, dtypes, whole, offsets, shapes, [None, (2, 5), None], [NATURAL, None, CUT])
    catalog = builder.build()
    check_types(catalog)
    assert [catalog.describe(row) for row in range(4)] == [
        "int8 [0:8] of [8]",
        "float32 [0:2, 0:6] of [4, 6]",
        "int8 [0:8] of [8], flattened range [2, 5)",
        "float32 [2:4, 0:6] of [4, 6]",
    ]
    assert (catalog.keys, catalog.dtypes, catalog.files) == (("first", "b"), ("int8", "float32"), ("file",))
    assert (catalog.order(0), catalog.order(1)) == (None, NATURAL)
    assert catalog.byte_offset.tolist() == [16, 0, 0, 0]
    for name, bad in (("axes", [(0, 0), (0,), (2,)]), ("flattened", None)):
        flat = [None, (2, 5), (0, -3)] if bad is None else [None] * 3
        with pytest.raises(ValidationError, match=name) as caught:
            builder.add_many(["x", "y", "z"], dtypes, whole, bad or offsets, shapes, flat, [None] * 3)
        assert [problem.key for problem in caught.value.problems] == ["z"]


def test_what_may_be_fused_is_cut_along_its_last_axis_and_has_no_order():
    builder = CatalogBuilder(0)
    builder.add("scalar", "int8", (), (), ())
    builder.add("whole", "int8", (8, 6, 4), (2, 0, 0), (2, 6, 4))
    for start in (0, 2):
        builder.add("cut", "int8", (8, 4), (0, start), (8, 2))
        builder.add("ordered", "int8", (8, 4), (0, start), (8, 2), order=CUT)
        builder.add("empty", "int8", (0, 4), (0, start), (0, 2))
        builder.add("line", "int8", (4,), (start,), (2,))
    builder.add("one", "int8", (2, 2), (0, 0), (2, 1))
    builder.add("one", "int8", (1, 2), (0, 1), (1, 1))
    builder.add("small", "int8", (1, 4), (0, 0), (1, 2), (0, 1))
    builder.add("mixed", "int8", (8, 4), (0, 0), (8, 4))
    builder.add("mixed", "int8", (8, 4), (0, 0), (8, 2))
    builder.add("filled", "int8", (8, 4), (0, 0), (8, 2))
    builder.add("filled", "int8", (8, 4), (8, 0), (0, 4))
    catalog = builder.build()
    names = [catalog.keys[number] for number in np.flatnonzero(may_be_fused(catalog)).tolist()]
    assert names == ["cut", "line", "small", "filled"]
    found = may_be_fused(catalog.with_orders({}))
    assert (found.dtype, found.shape) == (bool, (len(catalog.keys),))
    assert [catalog.keys[number] for number in np.flatnonzero(found).tolist()] == [
        "cut", "ordered", "line", "small", "filled"
    ]  # fmt: skip
    assert may_be_fused(concat([])).tolist() == []


def test_extra_state_is_told_from_a_model():
    builder = CatalogBuilder(0)
    for key in ("a", "extra_state.common.step", "extra_state", "b", "extra_state.rng.rank3"):
        builder.add(key, "int8", (1,), (0,), (1,))
    catalog = builder.build()
    rest = without_extra_state(catalog)
    assert [rest.key_name(row) for row in range(len(rest))] == ["a", "extra_state", "b"]
    assert without_extra_state(rest.take(np.asarray([0, 2]))).key.tolist() == [0, 3]
    model = catalog_of([Shard("a", "int8", (1,), (0,), (1,), None, 0)])
    assert without_extra_state(model) is model


def test_a_model_may_not_have_names_of_extra_state():
    ours = ["common", "manager.x", "ema", "rng.rank0", "dataloader.rank12", "dataloader.rank12.x"]
    ours += ["data.split0", "data.split11.x"]
    check_extra_names(["a", "extra_state", *(f"extra_state.{name}" for name in ours)])
    bad = ["extra_state.commons", "extra_state.rng", "extra_state.rng.rankx", "extra_state.data", "extra_state."]
    with pytest.raises(ValidationError) as caught:
        check_extra_names(["a", *bad, "extra_state.common"])
    assert caught.value.problems == [
        Problem(
            "names that begin with 'extra_state.' are those of a run's extra state, which no model gets back",
            key=key,
            remedy="rename the layer or entry; values of the run go through collect_extra_state(name=value)",
            code="FC108",
        )
        for key in bad
    ]


def changed(catalog, **arrays):
    return {**catalog.to_arrays(), **arrays}


@pytest.mark.parametrize(("arrays", "said"), [
    ({"keys": np.frombuffer(b'{"a": 1}', np.uint8)}, "keys is not a list of names"),
    ({"dtypes": np.frombuffer(b"[1]", np.uint8)}, "dtypes is not a list of names"),
    ({"rank": np.zeros(3, np.int32)}, "the columns differ in length"),
    ({"orders": np.frombuffer(b'{}', np.uint8)}, "the orders are not a list, or too many"),
    ({"key_order": np.zeros(1, np.int16)}, "the orders are not one for each key"),
    ({"key_order": np.asarray([0, -2], np.int16)}, "the orders are not one for each key"),
    ({"key_order": np.asarray([0, 1], np.int16)}, "column key_order points beyond its table"),
])  # fmt: skip
def test_arrays_that_are_no_catalog_are_refused(arrays, said):
    builder = CatalogBuilder(0)
    builder.add("a", "int8", (4,), (0,), (4,), order=NATURAL)
    builder.add("b", "int8", (4,), (0,), (4,))
    catalog = builder.build()
    assert Catalog.from_arrays(changed(catalog)).order(0) == NATURAL
    narrow = {name: getattr(catalog, name).astype(np.int8) for name in COLUMN_TYPES}
    check_types(Catalog.from_arrays(changed(catalog, **narrow)))
    with pytest.raises(ValueError) as caught:
        Catalog.from_arrays(changed(catalog, **arrays))
    assert str(caught.value) == said


def test_there_may_be_no_more_orders_than_the_column_can_number():
    builder = CatalogBuilder(0)
    builder.add("a", "int8", (4,), (0,), (4,), order=NATURAL)
    for count, good in ((32767, True), (32768, False)):
        arrays = changed(
            builder.build(),
            orders=np.frombuffer(str([[1, 0, None]] * count).replace("None", "null").encode(), np.uint8),
        )
        if good:
            assert len(Catalog.from_arrays(arrays).orders) == count
        else:
            with pytest.raises(ValueError, match="too many"):
                Catalog.from_arrays(arrays)


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


def test_shards_that_are_described_alike_have_equal_descriptions():
    builder = CatalogBuilder(0)
    for key, dtype, offset, flat in (
        ("a", "int8", (0, 2), None), ("b", "int8", (0, 2), None), ("b", "int16", (0, 2), None),
        ("b", "int8", (0, 0), None), ("b", "int8", (0, 2), (1, 3)),
    ):  # fmt: skip
        builder.add(key, dtype, (4, 4), offset, (4, 2), flat)
    builder.add("c", "int8", (4, 5), (0, 2), (4, 2))
    builder.add("d", "int8", (4, 4), (0, 2), (4, 1))
    builder.add("e", "int8", (4, 4), (0, 2), (4, 2), order=Order(2, 1, None))
    first, second, *others = builder.build().descriptions()
    assert first == second
    assert len({first, *others}) == 1 + len(others)


def test_names_and_statements_are_written_as_they_are():
    builder = CatalogBuilder(0)
    builder.add("schlüssel", "int8", (4, 4), (0, 0), (4, 4), order=Order(2, 1, "größe"))
    arrays = builder.build().to_arrays()
    assert arrays["keys"].tobytes().decode() == '["schlüssel"]'
    assert arrays["orders"].tobytes().decode() == '[[2, 1, "größe"]]'
