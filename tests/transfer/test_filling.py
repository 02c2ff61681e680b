"""Filling: in which memory a row is filled, when copies go back, when tiles are computed, how long scratch is held."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.algebra import Box, StridedCopy
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.plan import FillPlan, Tile
from tests.native.samples import whole
from tests.property.layouts import catalog_of
from tests.transfer.held import Held


@dataclass(frozen=True)
class Sum:
    """The sum of the operands, and the first element's place in the whole."""

    def run(self, box, operands):
        return sum(operands, np.full(box.shape, box.offset[0], np.float32))


F32 = np.dtype(np.float32)


def tile(row, operands, shapes, begin=0, after=0, freed=(), step=None, dtype=F32):
    """Two elements of a row, from an element on."""
    copy = StridedCopy((2,), 0, (1,), begin, (1,))
    return Tile(row, step or Sum(), Box((begin,), (2,)), dtype, copy, operands, shapes, freed, after)


def plan_of(shards, targets=None, **parts):
    catalog = catalog_of(shards)
    order = parts.pop("order", range(len(shards)))
    return FillPlan(len(shards) if targets is None else targets, catalog, np.asarray(list(order)), **parts)


def two(**parts):
    return plan_of([whole("a", "float32", (3,)), whole("b", "bfloat16", (2, 2))], **parts)


def memory_of_two(**parts):
    return Held([np.zeros(3, np.float32), np.zeros((2, 2), ml_dtypes.bfloat16)], **parts)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_target_is_opened_once_and_when_it_is_first_asked_for():
    memory = memory_of_two()
    filling = Filling(two(kept={1: []}), memory, np.asarray([0, 1]))
    assert memory.events == []
    first = filling.host_storage(0)
    assert np.shares_memory(first, memory.arrays[0])
    assert filling.host_storage(0) is first
    assert filling.host_storage(1).shape == (4,)
    # All of the first is written; something of the second stays.
    assert memory.events == [("open", 0, True), ("open", 1, False)]


def test_a_device_is_written_in_place():
    device = object()
    for piece_targets in (None, np.asarray([0, 1])):
        memory = memory_of_two(on_devices={1: device})
        filling = Filling(two(), memory, piece_targets)
        assert filling.on_device.tolist() == [False, True]
        assert filling.storage(1) is filling.device_storage(1) is device
        assert np.shares_memory(filling.storage(0), memory.arrays[0])
        assert memory.events == [("on device", 0), ("on device", 1), ("open", 0, True)]


def test_where_no_target_is_on_a_device_none_is_asked():
    memory = memory_of_two()
    assert not Filling(two(), memory).on_device.any()
    assert memory.events == []


def test_scratch_is_never_on_a_device():
    shards = [whole("a", "float32", (3,)), whole("#", "bfloat16", (2, 2))]
    memory = Held([np.zeros(3, np.float32)], on_devices={0: object(), 1: object()})
    filling = Filling(plan_of(shards, 1), memory)
    scratch = filling.storage(1)
    assert (scratch.dtype, scratch.shape) == (ml_dtypes.bfloat16, (4,))
    assert filling.storage(1) is scratch
    assert filling.on_device.tolist() == [True, False]
    assert memory.events == [("on device", 0)]


# -- when copies go back -----------------------------------------------------------------------------------------------


def test_a_copy_goes_back_with_its_last_piece():
    memory = memory_of_two(staged=[0])
    filling = Filling(two(), memory, np.asarray([1, 0, 0]))
    filling.host_storage(0)[:] = [1, 2, 3]
    filling.piece_done(0)
    assert memory.arrays[0].tolist() == [0, 0, 0]
    filling.piece_done(0)
    assert memory.arrays[0].tolist() == [1, 2, 3]
    assert memory.events == [("open", 0, True), ("store", 0)]
    filling.host_storage(1)
    filling.piece_done(1)
    assert memory.events[2:] == [("open", 1, True), ("store", 1)]
    filling.finish()
    assert len(memory.events) == 4


def test_tiles_count_as_pieces():
    memory = Held([np.zeros(4, np.float32)], staged=[0])
    plan = plan_of([whole("a", "float32", (4,))], tiles=(tile(0, (), ()), tile(0, (), (), 2)))
    filling = Filling(plan, memory, np.zeros(1, np.int64))
    filling.host_storage(0)[:] = 5
    filling.piece_done(0)
    assert memory.events == [("open", 0, True)]
    filling.advance_to(1)
    assert memory.events == [("open", 0, True), ("store", 0)]
    assert memory.arrays[0].tolist() == [0, 0, 2, 2]


def test_without_counts_copies_go_back_at_the_end():
    memory = memory_of_two(staged=[0])
    filling = Filling(two(), memory)
    filling.storage(0)[:] = [1, 2, 3]
    filling.storage(1)
    filling.piece_done(0)
    filling.piece_done(0)
    assert memory.arrays[0].tolist() == [0, 0, 0]
    filling.finish()
    assert memory.arrays[0].tolist() == [1, 2, 3]
    assert [event for event in memory.events if event[0] == "store"] == [("store", 0), ("store", 1)]


def test_pieces_of_what_is_not_open_store_nothing():
    """A row that is scratch, or never written."""
    shards = [whole("a", "float32", (3,)), whole("#", "float32", (3,))]
    memory = Held([np.zeros(3, np.float32)])
    filling = Filling(plan_of(shards, 1), memory, np.asarray([0, 1]))
    for row in (0, 1):
        filling.piece_done(row)
    assert memory.events == []


def test_targets_that_stand_still_are_known_by_their_addresses():
    shards = [*(whole(key, "float32", (3,)) for key in "abc"), whole("#", "float32", (3,))]
    memory = Held([np.zeros(3, np.float32)] * 3)
    plan = plan_of(shards, 3)
    assert Filling(plan, memory).addresses.tolist() == [-1] * 4
    memory.known = np.asarray([100, -1, 300])
    addresses = Filling(plan, memory).addresses
    # Scratch is nobody's.
    assert (addresses.tolist(), addresses.dtype) == ([100, -1, 300, -1], np.int64)
    assert Filling(plan, memory).catalog is plan.catalog
    assert memory.events == []


def test_pieces_that_are_done_together_count_one_by_one():
    memory = memory_of_two(staged=[0])
    filling = Filling(two(), memory, np.asarray([0, 1, 0, 0]))
    filling.host_storage(0)[:] = [1, 2, 3]
    filling.pieces_done(np.asarray([0, 1, 0]))
    assert memory.arrays[0].tolist() == [0, 0, 0]
    filling.piece_done(0)
    assert memory.arrays[0].tolist() == [1, 2, 3]
    Filling(two(), memory).pieces_done(np.asarray([0, 1]))


# -- tiles -------------------------------------------------------------------------------------------------------------


def scratch_plan():
    """Two tiles of a row, each of an operand of its own and of one that they share."""
    operands = [whole(f"#{i}", "float32", (2,)) for i in range(3)]
    shards = [whole("t", "float32", (4,)), *operands, whole("z", "int8", (1,))]
    tiles = (tile(0, (1, 2), ((2,), (2,)), 0, 2, (1,)), tile(0, (3, 2), ((2,), (2,)), 2, 3, (3, 2)))
    return plan_of(shards, 1, tiles=tiles, order=[0, 1, 2, 3, 4])


def test_tiles_are_computed_when_what_comes_before_is_there():
    memory = Held([np.full(4, -1, np.float32)])
    filling = Filling(scratch_plan(), memory)
    filling.host_storage(1)[:] = [1, 2]
    filling.host_storage(2)[:] = [10, 20]
    filling.advance(2)
    assert memory.arrays[0].tolist() == [-1] * 4
    filling.advance(3)
    filling.advance(3)
    assert memory.arrays[0].tolist() == [11, 22, -1, -1]
    filling.host_storage(3)[:] = [3, 4]
    filling.advance(3)
    assert memory.arrays[0].tolist() == [11, 22, -1, -1]
    filling.advance(4)
    assert memory.arrays[0].tolist() == [11, 22, 15, 26]
    filling.advance(4)
    filling.finish()
    assert memory.arrays[0].tolist() == [11, 22, 15, 26]


def test_no_tile_is_due_within_a_portion():
    filling = Filling(scratch_plan(), Held([np.zeros(4, np.float32)]))

    def portions(rows):
        return list(filling.portions(np.asarray(rows, dtype=np.int64)))

    assert portions([0, 1, 2, 2, 3, 3, 4]) == [(0, 4), (4, 6), (6, 7)]
    assert portions([1, 4, 4]) == [(0, 1), (1, 3)]
    assert portions([3]) == [(0, 1)]
    assert portions([]) == [(0, 0)]
    # What counts is the turn of a row, not its number.
    shards = [whole("t", "float32", (4,)), whole("#", "float32", (2,)), whole("z", "int8", (1,))]
    tiles = (tile(1, (2,), ((2,),), 0, 1),)
    filling = Filling(plan_of(shards, 2, tiles=tiles, order=[1, 2, 0]), Held([]))
    assert list(filling.portions(np.asarray([1, 2, 0]))) == [(0, 2), (2, 3)]


def test_the_end_computes_what_is_left():
    memory = Held([np.zeros(4, np.float32)])
    filling = Filling(scratch_plan(), memory)
    for row in (1, 2, 3):
        filling.host_storage(row)[:] = row
    filling.finish()
    assert memory.arrays[0].tolist() == [3, 3, 7, 7]
    assert filling.peak_scratch_bytes == 24


def test_scratch_is_held_until_no_tile_needs_it():
    filling = Filling(scratch_plan(), Held([np.zeros(4, np.float32)]))
    assert filling.peak_scratch_bytes == 0
    held = {row: filling.host_storage(row) for row in (1, 2)}
    assert filling.host_storage(2) is held[2]
    assert filling.peak_scratch_bytes == 16
    filling.advance(3)
    assert filling.host_storage(2) is held[2], "the next tile needs it"
    filling.host_storage(3)
    assert filling.peak_scratch_bytes == 16, "the first operand has gone"
    filling.host_storage(1)
    assert filling.peak_scratch_bytes == 24
    filling.advance(4)
    for row in (2, 3):
        filling.host_storage(row)
    assert filling.peak_scratch_bytes == 24


def test_scratch_that_nothing_arrived_in_is_freed_too():
    """An operand without elements has no pieces."""
    shards = [whole("t", "float32", (2,)), whole("#", "float32", (0,)), whole("#2", "float32", (2,))]

    @dataclass(frozen=True)
    class Second:
        def run(self, box, operands):
            assert operands[0].shape == (0,)
            return operands[1]

    plan = plan_of(shards, 1, tiles=(tile(0, (1, 2), ((0,), (2,)), freed=(1, 2), after=2, step=Second()),))
    memory = Held([np.zeros(2, np.float32)])
    filling = Filling(plan, memory)
    filling.host_storage(2)[:] = 6
    filling.finish()
    assert memory.arrays[0].tolist() == [6, 6]
    assert filling.peak_scratch_bytes == 8


def test_operands_have_their_shapes_and_steps_their_boxes():
    seen = []

    @dataclass(frozen=True)
    class Seen:
        def run(self, box, operands):
            seen.append((box, [operand.shape for operand in operands]))
            return [np.float32(1), np.float32(2)]

    shards = [whole("t", "bfloat16", (4,)), whole("#", "float32", (2, 3))]
    memory = Held([np.zeros(4, ml_dtypes.bfloat16)])
    plan = plan_of(shards, 1, tiles=(tile(0, (1,), ((3, 2),), 1, step=Seen()),))
    Filling(plan, memory).finish()
    assert seen == [(Box((1,), (2,)), [(3, 2)])]
    assert memory.arrays[0].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("given", [np.zeros(1, np.float32), np.zeros(2, np.float64)])
def test_a_step_that_gives_something_else_is_named(given):
    @dataclass(frozen=True)
    class Odd:
        def run(self, box, operands):
            return given

    memory = Held([np.zeros(4, np.float32)])
    plan = plan_of([whole("t", "float32", (4,))], tiles=(tile(0, (), (), 1, step=Odd()),))
    with pytest.raises(CheckpointError) as caught:
        Filling(plan, memory).finish()
    assert str(caught.value) == (
        f"the values computed for key 't' are {given.dtype.name} {list(given.shape)}; expected float32 [2] for "
        f"{Box((1,), (2,))}. Targets are partly overwritten. Remedy (FC603): report this step, Odd, as a defect"
    )
    assert memory.events == []
