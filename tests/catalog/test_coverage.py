"""Holes and overlaps against an oracle that paints every element."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import (
    CatalogBuilder,
    Problem,
    concat,
    group_replicas,
    validate,
    validate_coverage,
    validate_shards,
)
from paddle_flexckpt.catalog.validate import MAX_HOLES, Coverage, row_boxes
from tests.property import examples
from tests.property.layouts import (
    Pick,
    Shard,
    by_rank,
    catalog_of,
    elements,
    index_array,
    layouts,
    mutate,
    paint,
    shard_of_row,
)


def coverage_of(catalog):
    return validate_coverage(catalog, group_replicas(catalog))


def overlap_oracle(shards):
    """Unordered pairs of shards, not replicas of each other, that have an element in common."""
    distinct: dict = {}
    for shard in {s.identity: s for s in shards}.values():
        distinct.setdefault(shard.key, []).append((shard.identity, set(elements(shard).tolist())))
    return {
        frozenset((a, b))
        for members in distinct.values()
        for (a, in_a), (b, in_b) in itertools.combinations(members, 2)
        if in_a & in_b
    }


def check_against_paint(shards):
    catalog = catalog_of(shards)
    assert validate_shards(catalog) == []
    found = coverage_of(catalog)
    painted = paint(shards)
    shapes = {s.key: s.global_shape for s in shards}
    missing = {key: int((count == 0).sum()) for key, count in painted.items()}
    assert {p.key for p in found.problems} == {key for key, n in missing.items() if n}
    for key in missing:
        of_key = [p for p in found.problems if p.key == key]
        assert len(of_key) <= MAX_HOLES
        for problem in of_key:
            assert problem.got == f"{missing[key]} elements that nobody holds"
            assert f"all {painted[key].size} elements of {list(shapes[key])}" in problem.expected
            # The box that is named is in fact held by nobody.
            named = re.search(r"\[(.*)\]", problem.what).group(1)
            cut = tuple(slice(*map(int, axis.split(":"))) for axis in named.split(", ")) if named else ()
            inside = index_array(shapes[key])[cut].reshape(-1)
            assert inside.size and not painted[key][inside].any()
    got = [frozenset(shard_of_row(catalog, row).identity for row in pair) for pair in found.overlaps]
    assert set(got) == overlap_oracle(shards)
    assert len(set(got)) == len(got)


@examples(150)
@given(layouts(max_tensors=3))
def test_sound_layouts_have_neither_holes_nor_overlaps(shards):
    assert all((count == 1).all() for count in paint(shards).values())
    found = coverage_of(catalog_of(shards))
    assert (found.problems, found.overlaps) == ([], [])


@examples(300)
@given(layouts(max_tensors=2, max_ndim=3, max_extent=4), st.data())
def test_holes_and_overlaps_are_those_that_paint_shows(shards, data):
    pick = Pick.from_draw(data.draw)
    for _ in range(pick.integer(1, 3)):
        shards = mutate(pick, shards, 6)
    check_against_paint(shards)


@examples(60)
@given(st.integers(0, 2**32))
def test_holes_and_overlaps_of_arbitrary_boxes(seed):
    pick = Pick.from_seed(seed)
    shape = tuple(pick.integer(1, 4) for _ in range(pick.integer(1, 3)))
    shards = [Shard("k", "int8", shape, (0,) * len(shape), (1,) * len(shape), None, 0)]
    for _ in range(pick.integer(0, 8)):
        shards = mutate(pick, shards, 4)
    check_against_paint(shards)


def line(*boxes, size=8, rank=0):
    """Shards [start, stop) of a line; a third number pair is a flattened range of the box."""
    builder = CatalogBuilder(rank)
    for start, stop, *flat in boxes:
        builder.add("w", "int8", (size,), (start,), (stop - start,), tuple(flat) if flat else None)
    return builder.build()


def test_a_hole_is_named():
    (problem,) = coverage_of(line((0, 3), (5, 8))).problems
    assert problem.what == "no rank holds [3:5]"
    assert (problem.key, problem.got) == ("w", "2 elements that nobody holds")
    assert "all 8 elements of [8]" in problem.expected
    assert problem.remedy


@pytest.mark.parametrize("boxes", [[(1, 8)], [(0, 7)], [(0, 3), (4, 8)]], ids=str)
def test_holes_at_the_ends_and_in_the_middle(boxes):
    assert len(coverage_of(line(*boxes)).problems) == 1


def test_a_missing_end_of_a_chain_of_ranges():
    (problem,) = coverage_of(line((0, 8, 0, 3), (0, 8, 3, 7))).problems
    assert problem.what == "no rank holds [7:8]"


def test_a_shard_that_only_has_an_empty_range_does_not_hide_the_hole():
    """The rank with the data is missing and the one inside the padding is not: ZeRO's last rank."""
    (problem,) = coverage_of(line((0, 8, 8, 8))).problems
    assert (problem.what, problem.got) == ("no rank holds [0:8]", "8 elements that nobody holds")


def test_every_key_that_nobody_holds_is_named_once():
    builder = CatalogBuilder(0)
    for key in ("a", "b"):
        for at in (0, 4):
            builder.add(key, "int8", (2, 2), (0, 0), (2, 2), (at, at))
    builder.add("c", "int8", (2, 2), (0, 0), (2, 2))
    builder.add("d", "int8", (0, 2), (0, 0), (0, 2))
    assert [p.key for p in coverage_of(builder.build()).problems] == ["a", "b"]


def test_empty_ranges_in_a_chain_are_no_problem():
    found = coverage_of(line((0, 8, 0, 0), (0, 8, 0, 5), (0, 8, 5, 5), (0, 8, 5, 8), (0, 8, 8, 8)))
    assert (found.problems, found.overlaps) == ([], [])


def test_replicas_do_not_overlap():
    catalog = concat([line((0, 8), rank=rank) for rank in range(3)])
    assert coverage_of(catalog).overlaps == []


def test_a_box_and_its_whole_range_overlap():
    assert coverage_of(line((0, 8), (0, 8, 0, 8))).overlaps == [(0, 1)]


def test_a_full_tensor_beside_its_halves():
    catalog = concat([line((0, 8)), line((0, 4), rank=1), line((4, 8), rank=2)])
    found = coverage_of(catalog)
    assert found.problems == []
    assert {frozenset(pair) for pair in found.overlaps} == {frozenset((0, 1)), frozenset((0, 2))}


def test_cells_of_two_grids_make_no_grid():
    """As many cells and the same cuts as a sound grid, but one cell twice its size."""
    builder = CatalogBuilder(0)
    for offset, shape in (((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))):
        builder.add("w", "int8", (4, 4), offset, shape)
    found = coverage_of(builder.build())
    assert (found.problems, found.overlaps) == ([], [])


def test_no_rows():
    found = coverage_of(concat([]))
    assert (found.problems, found.overlaps) == ([], [])


def test_no_more_holes_are_named_than_the_limit_but_all_are_counted():
    catalog = line(*[(i, i + 1) for i in range(0, 8, 2)])
    problems = coverage_of(catalog).problems
    assert len(problems) == MAX_HOLES
    assert {p.got for p in problems} == {"4 elements that nobody holds"}


def test_a_grid_of_a_thousand_cells_is_looked_at_in_columns(monkeypatch):
    """Box-by-box inspection is for unsound keys only."""
    monkeypatch.setattr("paddle_flexckpt.catalog.validate._inspect_key", lambda *_: pytest.fail("looked at box by box"))
    builder = CatalogBuilder(0)
    for i, j in itertools.product(range(32), range(32)):
        for flat in ((0, 5), (5, 6)):
            builder.add("w", "int8", (64, 96), (2 * i, 3 * j), (2, 3), flat)
    found = coverage_of(builder.build())
    assert (found.problems, found.overlaps) == ([], [])


def test_many_overlaps_are_found_in_one_pass():
    """Every pair of 300 nested boxes: 44,850 overlaps."""
    found = coverage_of(line(*[(0, i) for i in range(1, 301)], size=300))
    assert len(found.overlaps) == 300 * 299 // 2


def limited(monkeypatch, **limits):
    for name, limit in limits.items():
        monkeypatch.setattr(f"paddle_flexckpt.catalog.validate.{name}", limit)


@pytest.mark.parametrize("name", ["MAX_OVERLAPS", "MAX_COMPARED"])
def test_a_key_of_which_too_many_shards_overlap_is_a_problem(monkeypatch, name):
    """Four nested boxes: six pairs."""
    nested = line(*[(0, i) for i in range(1, 5)], size=4)
    limited(monkeypatch, **{name: 6})
    assert len(coverage_of(nested).overlaps) == 6
    limited(monkeypatch, **{name: 5})
    found = coverage_of(nested)
    limit = 5 if name == "MAX_OVERLAPS" else 100_000
    expected = Problem(
        "too many shards overlap",
        key="w",
        expected=f"shards of which few share elements without being the same, in at most {limit} pairs",
        remedy="describe replicas by the same offset and shape on every rank; or load another checkpoint",
        code="FC105",
    )
    assert (found.problems, found.too_many_overlaps, found.overlaps) == ([expected], [expected], [])


def test_many_pairs_are_compared_a_few_at_a_time(monkeypatch):
    limited(monkeypatch, COMPARED_AT_ONCE=4)
    assert len(coverage_of(line(*[(0, i) for i in range(1, 6)], size=5)).overlaps) == 10


UNTOLD = "no rank holds some elements, or too many shards overlap to be told"


@pytest.mark.parametrize(("most", "what", "got", "pieces"), [
    (1, UNTOLD, "2 elements", 1), (2, "no rank holds [3:5]", "2 elements", 2)
])  # fmt: skip
def test_holes_are_looked_for_in_so_many_boxes(monkeypatch, most, what, got, pieces):
    limited(monkeypatch, MAX_PIECES=most - 2 * 8)
    found = coverage_of(line((0, 3), (5, 8)))
    assert [(problem.what, problem.got) for problem in found.problems] == [(what, f"{got} that nobody holds")]
    assert found.pieces == pieces


@pytest.mark.parametrize(("most", "what", "got"), [
    (2, UNTOLD, "some elements"), (3, "no rank holds [4:6]", "2 elements")
])  # fmt: skip
def test_elements_that_are_missing_beside_overlaps_are_counted_if_they_are_found(monkeypatch, most, what, got):
    limited(monkeypatch, MAX_PIECES=most - 3 * 8)
    found = coverage_of(line((0, 3), (2, 4), (6, 8)))
    assert [(problem.what, problem.got) for problem in found.problems] == [(what, f"{got} that nobody holds")]
    assert found.overlaps == [(0, 1)]


def of_keys(names):
    builder = CatalogBuilder(0)
    for key in names:
        for begin, end in ((0, 3), (5, 8)):
            builder.add(key, "int8", (8,), (begin,), (end - begin,))
    return builder.build()


def test_keys_share_the_boxes_in_which_holes_are_looked_for(monkeypatch):
    for most, told in ((4, ["[3:5]", "[3:5]"]), (3, ["[3:5]", "told"]), (1, ["told", "told"])):
        limited(monkeypatch, MAX_PIECES=most - 4 * 8)
        assert [problem.what.split()[-1] for problem in coverage_of(of_keys("ab")).problems] == told


def test_holes_of_so_many_keys_are_listed(monkeypatch):
    limited(monkeypatch, MAX_ROWS=1)
    assert [problem.key for problem in coverage_of(of_keys("abcd")).problems] == ["a", "b"]


@examples(80)
@given(layouts(max_tensors=3, max_ndim=5), st.data())
def test_boxes_of_rows_hold_the_elements_of_the_rows(shards, data):
    catalog = catalog_of(shards)
    rows = np.asarray(data.draw(st.lists(st.integers(0, len(shards) - 1), max_size=6)), dtype=np.int64)
    part, offset, shape = row_boxes(catalog, rows)
    assert (shape > 0).all()
    for i, row in enumerate(rows):
        shard = shards[row]
        whole = index_array(catalog.global_shape[row])
        mine = [
            whole[tuple(slice(o, o + s) for o, s in zip(a, b))].reshape(-1).tolist()
            for a, b in zip(offset[part == i], shape[part == i])
        ]
        got = [element for box in mine for element in box]
        assert sorted(got) == sorted(elements(shard).tolist())


def test_order_of_ranks_does_not_matter():
    shards = [Shard("w", "int8", (8,), (a,), (b - a,), None, r) for r, (a, b) in enumerate(((4, 8), (0, 2), (1, 3)))]
    check_against_paint(by_rank(shards))
    check_against_paint(by_rank([Shard(**{**s.__dict__, "rank": 2 - s.rank}) for s in shards]))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_keys_cut_along_one_axis_are_recognised_together(axis, monkeypatch):
    monkeypatch.setattr(validate, "_is_grid", lambda *_: pytest.fail("looked at by itself"))
    shards = []
    for key, cuts in (("a", (0, 2, 6)), ("b", (0, 1, 2, 6)), ("c", (0, 6))):
        for rank, (begin, end) in enumerate(zip(cuts, cuts[1:])):
            offset, shape = [0, 0, 0], [6, 6, 6]
            offset[axis], shape[axis] = begin, end - begin
            shards.append(Shard(key, "int8", (6, 6, 6), tuple(offset), tuple(shape), None, rank))
    assert coverage_of(catalog_of(shards)) == Coverage()
    check_against_paint(shards)


@pytest.mark.parametrize(
    "spans", [((0, 2), (3, 6)), ((1, 3), (3, 6)), ((0, 3), (3, 5)), ((0, 4), (3, 6)), ((0, 6), (0, 3))]
)
def test_slices_with_holes_or_overlaps_are_looked_at(spans):
    shards = [
        Shard("a", "int8", (4, 6), (0, begin), (4, end - begin), None, rank) for rank, (begin, end) in enumerate(spans)
    ]
    check_against_paint([*shards, Shard("b", "int8", (6,), (0,), (6,), None, 0)])
    found = coverage_of(catalog_of(shards))
    assert found.problems or found.overlaps
