"""Plans of what is filled: tiles of computed values, the scratch that they need, and in which order it comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paddle_flexckpt.algebra import Box, StridedCopy
from paddle_flexckpt.aoa import Node, Region, TensorInfo
from paddle_flexckpt.aoa.steps import Constant
from paddle_flexckpt.catalog import NATURAL, Order
from paddle_flexckpt.planning.matching import ShardMatcher
from paddle_flexckpt.transfer import plan as plan_module
from paddle_flexckpt.transfer.copies import write_values
from paddle_flexckpt.transfer.files import plan_reads
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.plan import plan_fill, split_tiles
from tests.native.samples import whole
from tests.property.layouts import Pick, Shard, catalog_of, elements, layout, shard_of_row
from tests.property.mappings import Move, Program, Weighted, random_program, random_values, window
from tests.remedies.following import provoked
from tests.transfer.held import targets_of

# -- tiles -------------------------------------------------------------------------------------------------------------


def test_tiles_follow_each_other_and_are_cut_at_powers_of_two():
    whole = Box((3, 5), (9, 20))
    tiles = list(split_tiles(whole, 100))
    assert [(t.offset, t.shape) for t in tiles] == [
        ((3, 5), (1, 20)), ((4, 5), (4, 20)), ((8, 5), (4, 20)),
    ]  # fmt: skip
    rows = list(split_tiles(whole, 16))
    assert [(t.offset, t.shape) for t in rows[:2]] == [((3, 5), (1, 11)), ((3, 16), (1, 9))]
    assert sum(t.size for t in rows) == whole.size
    assert list(split_tiles(whole, 180)) == [whole]
    assert list(split_tiles(Box((), ()), 1)) == [Box((), ())]
    assert len(list(split_tiles(whole, 1))) == 180


@pytest.mark.parametrize("seed", range(40))
def test_tiles_are_all_of_a_box_in_its_order_and_as_long_as_they_may_be(seed):
    pick = Pick.from_seed(seed)
    shape = tuple(pick.integer(1, 7) for _ in range(pick.integer(1, 4)))
    offset = tuple(pick.integer(0, 9) for _ in shape)
    limit = pick.integer(1, 2 * math.prod(shape))
    tiles = list(split_tiles(Box(offset, shape), limit))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    inside = [numbers[window([o - f for o, f in zip(t.offset, offset)], t.shape)].reshape(-1) for t in tiles]
    assert np.concatenate(inside).tolist() == list(range(numbers.size))
    assert all(t.size <= limit for t in tiles)
    if len(tiles) == 1:
        assert tiles == [Box(offset, shape)]
        return
    # The axis that is cut: all before it has extent 1, and all behind it is whole.
    axis = next(a for a in range(len(shape)) if math.prod(shape[a + 1 :]) <= limit)
    step = 2 ** int(math.log2(limit // math.prod(shape[axis + 1 :])))
    for tile in tiles:
        assert tile.shape[:axis] == (1,) * axis
        assert (tile.offset[axis + 1 :], tile.shape[axis + 1 :]) == (offset[axis + 1 :], shape[axis + 1 :])
        first, end = tile.offset[axis], tile.offset[axis] + tile.shape[axis]
        assert first % step == 0 or first == offset[axis]
        assert end % step == 0 or end == offset[axis] + shape[axis]
        assert tile.shape[axis] <= step


# -- plans without statements ------------------------------------------------------------------------------------------


def test_without_statements_rows_are_filled_as_they_are():
    shards = [whole("a", "float32", (2, 3)), Shard("b", "int8", (9,), (4,), (5,), (1, 4), 0), whole("c", "bool", ())]
    catalog = catalog_of(shards)
    plan = plan_fill(catalog, np.asarray([2, 0]), None)
    assert (plan.targets, plan.tiles, plan.kept, plan.covered) == (3, (), {}, None)
    assert plan.order.tolist() == [2, 0]
    assert [plan.in_order.key_name(turn) for turn in (0, 1)] == ["c", "a"]
    assert len(plan.in_order) == 2
    assert plan.turn.tolist() == [1, 0, 0]
    assert plan.size.tolist() == [6, 3, 1]
    assert plan.covered_in_order is None
    assert plan.computed == set()
    assert [plan.is_target(row) for row in (0, 2, 3)] == [True, True, False]


def test_targets_of_one_name_may_have_two_orders():
    """Renamed, they are boxes of one tensor, with scratch beside them."""
    made = program("t", Weighted((2.0,)), {"w": ("float32", (4,))})
    targets = targets_of({"t": np.zeros(4, np.float32), "u": np.zeros(4, np.float32)},
                         orders={"t": NATURAL, "u": Order(2, 0, "fused_ffn")}).catalog  # fmt: skip
    plan = plan_fill(replace(targets, keys=("t", "t")), np.arange(2), made.mapping())
    assert plan.order.tolist() == [0, 2, 1, 3]
    assert [plan.catalog.key_name(row) for row in range(4)] == ["t", "t", "#w", "#w"]
    assert plan.catalog.orders == ()


# -- plans of computed values ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outer:
    """``W[i, j] + A[i] * B[j]``: every tile needs all of B that is above it."""

    def operand_boxes(self, box):
        (i, j), (n, m) = box.offset, box.shape
        return box, Box((i,), (n,)), Box((j,), (m,))

    def run(self, box, operands):
        w, a, b = operands
        return w + a[:, None] * b


def program(target, step, operands):
    """``target = step(operands)``: names and shapes of the operands, each of which is a source."""
    made = Program()
    for name, (dtype, shape) in operands.items():
        made.sources[name] = (dtype, shape)
        zeros = (0,) * len(shape)
        made.tensors[f"#{name}"] = TensorInfo(shape, dtype)
        made.moves[f"#{name}"] = [Move(zeros, shape, name, zeros, tuple(range(len(shape))))]
    shape = next(iter(operands.values()))[1]
    made.nodes.append(Node(step, TensorInfo(shape, "float32"), tuple(made.tensors)))
    made.tensors[target] = TensorInfo(shape, "float32")
    made.regions[target] = [Region((0,) * len(shape), shape, 0, (0,) * len(shape), tuple(range(len(shape))))]
    return made


def boxes_of(plan):
    """Name, offset and shape of every row."""
    catalog = plan.catalog
    return [(catalog.key_name(row), *(catalog.unpadded(row, c) for c in (catalog.offset, catalog.shape)))
            for row in range(len(catalog))]  # fmt: skip


def test_scratch_of_a_tile_follows_its_target_and_is_shared_by_neighbours(monkeypatch):
    monkeypatch.setattr(plan_module, "TILE_ELEMENTS", 8)
    made = program("t", Outer(), {"w": ("float64", (4, 4)), "a": ("float32", (4,)), "b": ("float32", (4,))})
    shards = [whole("before", "int8", (2,), 3), Shard("t", "float32", (4, 4), (0, 1), (4, 3), None, 3),
              whole("after", "int8", (2,), 3)]  # fmt: skip
    plan = plan_fill(catalog_of(shards), np.asarray([0, 1, 2]), made.mapping())
    assert boxes_of(plan)[3:] == [
        ("#w", (0, 1), (2, 3)), ("#a", (0,), (2,)), ("#b", (1,), (3,)), ("#w", (2, 1), (2, 3)), ("#a", (2,), (2,)),
    ]  # fmt: skip
    assert plan.catalog.rank.tolist() == [3] * 8
    assert [plan.catalog.dtype_name(row) for row in (3, 4, 5)] == ["float64", "float32", "float32"]
    assert plan.catalog.unpadded(3, plan.catalog.global_shape) == (4, 4)
    assert plan.order.tolist() == [0, 1, 3, 4, 5, 6, 7, 2]
    assert plan.order.dtype == plan.turn.dtype == plan.covered.dtype == np.int64
    assert plan.turn.tolist() == [0, 1, 7, 2, 3, 4, 5, 6]
    first, second = plan.tiles
    assert (first.row, first.box, first.dtype, first.step) == (1, Box((0, 1), (2, 3)), np.dtype(np.float32), Outer())
    assert first.copy == StridedCopy((2, 3), 0, (3, 1), 0, (3, 1))
    assert (first.operands, first.shapes, first.freed, first.after) == ((3, 4, 5), ((2, 3), (2,), (3,)), (3, 4), 4)
    assert (second.row, second.box, second.copy) == (1, Box((2, 1), (2, 3)), StridedCopy((2, 3), 0, (3, 1), 6, (3, 1)))
    assert (second.operands, second.shapes, second.after) == ((6, 7, 5), ((2, 3), (2,), (3,)), 6)
    assert sorted(second.freed) == [5, 6, 7]
    assert plan.covered.tolist() == [0, 12, 0, 0, 0, 0, 0, 0]
    assert plan.covered_in_order.tolist() == [0, 12, 0, 0, 0, 0, 0, 0]
    assert (plan.targets, plan.kept, plan.computed) == (3, {}, {1})
    assert plan.size.tolist() == [2, 12, 2, 6, 2, 3, 6, 2]


def test_operands_that_are_computed_come_first():
    made = program("u", Weighted((3.0,)), {"w": ("float32", (4,))})
    made.nodes.append(Node(Weighted((2.0,), "bfloat16"), TensorInfo((4,), "bfloat16"), ("u",)))
    made.tensors["t"] = TensorInfo((4,), "float32")
    made.regions["t"] = [Region((1,), (3,), 1, (0,), (0,)), Region((0,), (1,))]
    plan = plan_fill(catalog_of([whole("t", "float32", (4,))]), np.arange(1), made.mapping())
    assert boxes_of(plan)[1:] == [("u", (0,), (3,)), ("#w", (0,), (3,))]
    assert plan.order.tolist() == [0, 1, 2]
    inner, outer = plan.tiles
    assert (inner.row, inner.operands, inner.freed, inner.after) == (1, (2,), (2,), 2)
    assert (outer.row, outer.operands, outer.freed, outer.after) == (0, (1,), (1,), 2)
    assert (inner.dtype.name, outer.dtype.name) == ("float32", "bfloat16")
    assert outer.copy == StridedCopy((3,), 0, (1,), 1, (1,))
    assert plan.kept == {0: [StridedCopy((1,), 0, (1,), 0, (1,))]}
    assert plan.covered.tolist() == [4, 3, 0]
    assert plan.computed == {0}


def test_axes_of_a_value_that_no_axis_of_the_target_runs_along():
    """The value is (1, 4, 3); of its last two axes the target (2, 3, 4) takes elements from (1, 1) on, turned."""
    made = Program()
    made.nodes.append(Node(Weighted(()), TensorInfo((1, 4, 3), "float32"), ()))
    made.tensors["t"] = TensorInfo((2, 3, 4), "float32")
    made.regions["t"] = [Region((1, 1, 2), (1, 2, 2), 0, (0, 1, 1), (-1, 2, 1))]
    plan = plan_fill(catalog_of([whole("t", "float32", (2, 3, 4))]), np.arange(1), made.mapping())
    (tile,) = plan.tiles
    assert tile.box == Box((0, 1, 1), (1, 2, 2))
    assert tile.copy == StridedCopy((1, 2, 2), 0, (4, 2, 1), 12 + 4 + 2, (0, 1, 4))
    assert (tile.operands, tile.shapes, tile.freed, tile.after) == ((), (), (), 0)


def test_a_value_without_axes():
    made = Program()
    made.nodes.append(Node(Weighted(()), TensorInfo((), "float32"), ()))
    made.tensors["t"], made.regions["t"] = TensorInfo((), "float32"), [Region((), (), 0, (), ())]
    plan = plan_fill(catalog_of([whole("t", "float32", ())]), np.arange(1), made.mapping())
    assert [(tile.box, tile.copy) for tile in plan.tiles] == [(Box((), ()), StridedCopy((), 0, (), 0, ()))]
    assert plan.covered.tolist() == [1]


def test_a_rank_without_targets_has_nothing_to_fill():
    made = program("t", Weighted((2.0,)), {"w": ("float32", (4,))})
    plan = plan_fill(catalog_of([]), np.zeros(0, np.int64), made.mapping())
    assert (plan.order.tolist(), plan.tiles, len(plan.catalog), plan.covered.tolist()) == ([], (), 0, [])
    assert plan.order.dtype == plan.covered.dtype == np.int64


def test_a_value_cannot_be_computed_from_what_a_target_has():
    made = program("t", Weighted((3.0,)), {"w": ("float32", (4,))})
    made.moves["#w"], made.regions["#w"] = [], [Region((0,), (4,))]
    mapping = made.mapping(provenance={"#w": "AOA statement 2: a -> b"})
    with provoked("transfer/plan.py", "say what new elements hold, as with fill=0") as caught:
        plan_fill(catalog_of([whole("t", "float32", (4,))]), np.arange(1), mapping)
    made.nodes.append(Node(Constant(0, "float32"), TensorInfo((4,), "float32"), ()))
    made.regions["#w"] = [Region((0,), (4,), len(made.nodes) - 1, (), (0,))]
    plan = plan_fill(catalog_of([whole("t", "float32", (4,))]), np.arange(1), made.mapping())
    assert plan.covered.tolist() == [4, 4]
    assert str(caught.value) == (
        "a value is computed from what a target has, which statements cannot do (AOA statement 2: a -> b) "
        "(key '#w'). Remedy (FC603): say what new elements hold, as with fill=0"
    )


# -- any plan ----------------------------------------------------------------------------------------------------------


def made_of_regions(made, name, kinds):
    """Bool: the elements of a tensor that are of such regions."""
    mask = np.zeros(made.tensors[name].shape, dtype=bool)
    for region in made.regions.get(name, ()):
        if (region.node is None) in kinds:
            mask[window(region.offset, region.shape)] = True
    return mask


def fill(plan, made, values, arrays):
    """The targets, filled in the order of the plan; every row is rubbish until its elements arrive."""
    sources = catalog_of([whole(key, *made.sources[key]) for key in made.sources])
    pieces = plan_reads(ShardMatcher(sources), plan, made.mapping()).pieces
    memory = targets_of(arrays).memory
    filling = Filling(plan, memory, pieces.target)
    stored = [values[key].reshape(-1) for key in made.sources]
    for piece, copy in enumerate(pieces.copies()):
        row = int(pieces.target[piece])
        filling.advance(row)
        write_values(filling.host_storage(row), copy, copy.gather_from(stored[pieces.source[piece]]))
        filling.piece_done(row)
    filling.finish()
    return filling


@pytest.mark.parametrize("seed", range(60))
def test_any_plan_fills_every_element_once_with_what_the_whole_program_gives(monkeypatch, seed):
    pick = Pick.from_seed(seed)
    tile = pick.choice((1, 3, 8, 1 << 20))
    monkeypatch.setattr(plan_module, "TILE_ELEMENTS", tile)
    made = random_program(pick, 3, computed=True, keep=True)
    values = {key: random_values(*made.sources[key], i) for i, key in enumerate(made.sources)}
    names = {name: (info.dtype, info.shape) for name, info in made.tensors.items() if "/" not in name}
    shards = [shard for shard in layout(pick, names, 2) if shard.rank == 0]
    if not shards:
        return
    own = {key: random_values(*kind, 50 + i) for i, (key, kind) in enumerate(names.items())}
    expected = [shard.of(made.value(shard.key, values, own[shard.key])) for shard in shards]
    arrays = {str(i): shard.of(own[shard.key]).copy() for i, shard in enumerate(shards)}
    # Not all of them, and in another order.
    rows = np.random.default_rng(seed).permutation(len(shards))[: max(1, len(shards) - 1)]
    plan = plan_fill(catalog_of(shards), rows, made.mapping())
    fill(plan, made, values, arrays)
    for row in rows.tolist():
        assert arrays[str(row)].tobytes() == expected[row].tobytes()
    check(plan, made, rows, tile)


def check(plan, made, rows, tile):
    """What holds of every plan."""
    assert [row for row in plan.order.tolist() if plan.is_target(row)] == rows.tolist()
    assert sorted(plan.order.tolist()) == sorted([*rows.tolist(), *range(plan.targets, len(plan.catalog))])
    for row in range(len(plan.catalog)):
        shard = shard_of_row(plan.catalog, row)
        is_made = {kinds: made_of_regions(made, shard.key, kinds).reshape(-1)[elements(shard)].reshape(-1)
                   for kinds in ((True, False), (True,))} if row in plan.order else None  # fmt: skip
        if is_made is None:
            assert (plan.covered[row], plan.kept.get(row)) == (0, None)
            continue
        assert plan.covered[row] == is_made[True, False].sum()
        positions = [copy.gather_from(np.arange(len(is_made[True,]))).reshape(-1) for copy in plan.kept.get(row, ())]
        assert sorted(np.concatenate([[], *positions]).tolist()) == np.flatnonzero(is_made[True,]).tolist()
        assert all((copy.source_base, copy.source_strides) == (copy.target_base, copy.target_strides)
                   for copy in plan.kept.get(row, ()))  # fmt: skip
    last = {row: number for number, each in enumerate(plan.tiles) for row in each.operands}
    assert {row: number for number, each in enumerate(plan.tiles) for row in each.freed} == last
    assert sum(len(each.freed) for each in plan.tiles) == len(last) == len(plan.catalog) - plan.targets
    for earlier, each in zip((None, *plan.tiles), plan.tiles):
        assert each.box.size <= tile
        assert all(plan.turn[row] <= each.after for row in (each.row, *each.operands))
        assert earlier is None or earlier.after <= each.after < len(plan.order)
        # A later row is of a later tile, or of another target.
        assert [math.prod(shape) for shape in each.shapes] == plan.size[list(each.operands)].tolist()
