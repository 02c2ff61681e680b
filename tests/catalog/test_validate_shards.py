"""Each kind of problem of single shards, found and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from paddle_flexckpt.catalog import CatalogBuilder, concat, validate_shards
from paddle_flexckpt.catalog.validate import MAX_ROWS
from tests.property import examples
from tests.property.layouts import catalog_of, layouts

GOOD = ("good", "float32", (4, 4), (0, 0), (4, 4))


def one(*shard, rank=0, file=None):
    builder = CatalogBuilder(rank, file)
    builder.add(*shard)
    return builder.build()


def with_good(*shard, **where):
    """A catalog of a good shard and the given one, on rank 3 in a file."""
    return concat([one(*GOOD), one(*shard, rank=3, file="3_0.safetensors", **where)])


def only(problems):
    assert len(problems) == 1, [str(p) for p in problems]
    problem = problems[0]
    assert (problem.key, problem.rank, problem.file) == ("w", 3, "3_0.safetensors")
    assert problem.remedy
    return problem


@examples(100)
@given(layouts(max_tensors=4, max_ndim=5))
def test_valid_layouts_have_no_problems(shards):
    assert validate_shards(catalog_of(shards)) == []


def test_no_shards_no_problems():
    assert validate_shards(concat([])) == []


@pytest.mark.parametrize(("offset", "shape"), [((0, 0), (2, 0)), ((4, 0), (0, 4)), ((4, 4), (0, 0))])
def test_an_empty_shard_of_a_tensor_with_elements(offset, shape):
    """What the last rank of uneven rows holds."""
    assert validate_shards(with_good("w", "float32", (4, 4), offset, shape)) == []


def test_a_negative_extent():
    problem = only(validate_shards(with_good("w", "float32", (4, 4), (2, 0), (-1, 4))))
    assert "negative extent" in problem.what
    assert problem.expected == "extents of 0 or more"
    assert problem.got == "float32 [2:1, 0:4] of [4, 4]"


@pytest.mark.parametrize(
    ("offset", "shape", "got"),
    [((2, 0), (3, 4), "[2:5, 0:4]"), ((0, -1), (4, 4), "[0:4, -1:3]"), ((4, 0), (1, 4), "[4:5, 0:4]")],
)
def test_a_box_outside_its_tensor(offset, shape, got):
    problem = only(validate_shards(with_good("w", "float32", (4, 4), offset, shape)))
    assert "outside its global shape" in problem.what
    assert problem.expected == "offset >= 0 and offset + shape <= global"
    assert problem.got == f"float32 {got} of [4, 4]"


@pytest.mark.parametrize("flat", [(3, 9), (5, 3), (9, 9)])
def test_a_flattened_range_outside_its_box(flat):
    problem = only(validate_shards(with_good("w", "float32", (4, 4), (0, 0), (2, 4), flat)))
    assert "flattened range outside its box" in problem.what
    assert problem.expected == "0 <= start <= stop <= elements of local_shape"
    assert problem.got == f"float32 [0:2, 0:4] of [4, 4], flattened range [{flat[0]}, {flat[1]})"


@pytest.mark.parametrize("flat", [(-2, 3), (-1, 3), (0, -1), (3, -1)])
def test_a_negative_flattened_range_in_columns_that_no_builder_made(flat):
    catalog = with_good("w", "float32", (4, 4), (0, 0), (2, 4), (0, 8))
    start, stop = catalog.flat_start.copy(), catalog.flat_stop.copy()
    start[1], stop[1] = flat
    problem = only(validate_shards(replace(catalog, flat_start=start, flat_stop=stop)))
    assert "flattened range outside its box" in problem.what


def test_two_dtypes_of_one_key():
    catalog = concat([one("w", "float32", (4,), (0,), (2,)), with_good("w", "bfloat16", (4,), (2,), (2,))])
    problem = only(validate_shards(catalog))
    assert problem.what == "shards of one key differ in dtype"
    assert problem.expected == "float32 [0:2] of [4] as on rank 0"
    assert problem.got == "bfloat16 [2:4] of [4]"


def test_two_global_shapes_of_one_key():
    catalog = concat([one("w", "float32", (4,), (0,), (2,)), with_good("w", "float32", (6,), (2,), (2,))])
    problem = only(validate_shards(catalog))
    assert problem.what == "shards of one key differ in global shape"
    assert problem.expected == "float32 [0:2] of [4] as on rank 0"
    assert problem.got == "float32 [2:4] of [6]"


def test_shapes_that_differ_in_unit_axes_alone_differ():
    catalog = concat([one("w", "float32", (4,), (0,), (4,)), with_good("w", "float32", (1, 4), (0, 0), (1, 4))])
    problem = only(validate_shards(catalog))
    assert problem.what == "shards of one key differ in global shape"


def test_a_tensor_without_elements_is_fine_in_any_cut():
    builder = CatalogBuilder(0)
    builder.add("w", "float32", (0, 4), (0, 0), (0, 4))
    builder.add("w", "float32", (0, 4), (0, 2), (0, 2))
    builder.add("w", "float32", (0, 4), (0, 0), (0, 4), (0, 0))
    assert validate_shards(builder.build()) == []


def test_empty_ranges_are_fine_anywhere_in_the_box():
    builder = CatalogBuilder(0)
    for at in (0, 2, 4):
        builder.add("w", "float32", (4,), (0,), (4,), (at, at))
    assert validate_shards(builder.build()) == []


def test_one_shard_may_have_several_problems():
    problems = validate_shards(with_good("w", "float32", (4, 4), (3, 0), (2, -1), (0, 1)))
    assert {p.what.split()[0] for p in problems} == {"shard", "flattened"}
    assert len(problems) == 3


def test_problems_of_one_kind_are_listed_up_to_a_limit():
    builder = CatalogBuilder(0)
    for i in range(MAX_ROWS + 10):
        builder.add(f"k{i}", "int8", (4,), (0,), (5,))
    assert len(validate_shards(builder.build())) == MAX_ROWS


def test_a_key_without_rows_is_no_problem():
    catalog = with_good("w", "float32", (4, 4), (0, 0), (4, 4))
    assert validate_shards(catalog.take(np.asarray([1]))) == []
