"""Reads through buffers: each element arrives once, no buffer overflows, and files are cut between blocks."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import strides_of_shape
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.transfer import buffered_reads
from paddle_flexckpt.transfer.announcing import announce
from paddle_flexckpt.transfer.buffered_reads import BufferedReads, read_through_buffers
from paddle_flexckpt.transfer.copies import copy_values
from paddle_flexckpt.transfer.files import Files, plan_reads
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.plan import plan_fill
from paddle_flexckpt.transfer.transfer import Transfer
from tests.native.samples import flip, whole
from tests.property import examples
from tests.property.layouts import catalog_of
from tests.transfer.held import targets_of
from tests.transfer.samples import save


def pieces(*rows) -> Pieces:
    return Pieces(*(np.asarray(column, dtype=np.int64) for column in zip(*rows)))


def carried_out(reads: BufferedReads, sources, targets, buffer_bytes):
    """Carry out reads in numpy; return the bytes of the parts."""
    for numbers in reads:
        part, places = reads.parts.take(numbers), reads.places[numbers]
        buffer = np.full(buffer_bytes, 0xEE, np.uint8)
        free = np.ones(buffer_bytes, dtype=bool)
        for copy, source, row, place in zip(part.copies(), part.source.tolist(), part.target.tolist(), places.tolist()):
            dtype = targets[row].dtype
            stop = place + copy.size * dtype.itemsize
            assert stop <= buffer_bytes
            assert free[place:stop].all()
            free[place:stop] = False
            assert copy.is_contiguous()[1]
            copy_values(copy, sources[source], buffer[place:stop].view(dtype))
        for write in reads.writes(numbers):
            values = buffer[write.place : write.place + write.copy.size * targets[write.row].itemsize]
            assert not free[write.place : write.place + len(values)].any()
            copy_values(write.copy, values.view(targets[write.row].dtype), targets[write.row])


@st.composite
def layouts(draw):
    """Boxes of source tensors that go to boxes of target tensors, axes in any order, with or without a cast."""
    rows, sources, targets = [], [], []
    for number in range(draw(st.integers(1, 4))):
        ndim = draw(st.integers(1, 3))
        box = [draw(st.integers(1, 9)) for _ in range(ndim)]
        order = draw(st.permutations(range(ndim)))
        sides = []
        for axes in (range(ndim), order):
            before = [draw(st.integers(0, 2)) for _ in axes]
            shape = [box[axis] + first + draw(st.integers(0, 2)) for axis, first in zip(axes, before)]
            units = strides_of_shape(tuple(shape))
            strides = [0] * ndim
            for axis, unit in zip(axes, units):
                strides[axis] = unit
            sides.append((shape, sum(f * u for f, u in zip(before, units)), strides))
        pad = 3 - ndim
        (shape, base, strides), (into, to, steps) = sides
        sources.append((shape, draw(st.sampled_from(["float32", "int8"]))))
        targets.append((into, draw(st.sampled_from(["float32", "float64", sources[-1][1]]))))
        ones, zeros = [1] * pad, [0] * pad
        rows.append((number, number, [*ones, *box], base, [*zeros, *strides], to, [*zeros, *steps]))
    return rows, sources, targets


@examples(300)
@given(layouts(), st.sampled_from([16, 48, 64, 1000]), st.sampled_from([8, 16, 40]))
def test_every_element_arrives_where_it_belongs(layout, buffer_bytes, block_bytes):
    rows, sources, targets = layout
    catalogs = [
        catalog_of([whole(f"t{i}", dtype, tuple(shape)) for i, (shape, dtype) in enumerate(side)])
        for side in (sources, targets)
    ]
    values = [
        np.random.default_rng(i).integers(-9, 99, math.prod(shape)).astype(dtype)
        for i, (shape, dtype) in enumerate(sources)
    ]
    table = pieces(*rows)
    made, expected = ([np.zeros(math.prod(shape), dtype) for shape, dtype in targets] for _ in range(2))
    for copy, source, target in zip(table.copies(), table.source.tolist(), table.target.tolist()):
        copy_values(copy, values[source], expected[target])
    reads = BufferedReads.of(table, *catalogs, block_bytes, buffer_bytes)
    assert reads.parts.size.sum() == table.size.sum()
    carried_out(reads, values, made, buffer_bytes)
    assert [array.tolist() for array in made] == [array.tolist() for array in expected]


def test_files_are_cut_between_blocks_and_what_follows_goes_at_once():
    source = catalog_of([whole("a", "int8", (10, 10)), whole("b", "int8", (30,))])
    target = catalog_of([whole("a", "int8", (10, 10)), whole("b", "int8", (45,))])
    # From the middle of the first block; and two halves that continue each other.
    table = pieces(
        (0, 0, (9, 10), 10, (10, 1), 10, (10, 1)),
        (1, 1, (1, 15), 15, (30, 1), 20, (30, 1)),
        (1, 1, (1, 15), 0, (30, 1), 5, (30, 1)),
    )
    reads = BufferedReads.of(table, source, target, 16, 40)
    assert reads.parts.source_base.tolist() == [0, 15, 10, 48, 80]
    assert reads.parts.size.tolist() == [15, 15, 38, 32, 20]
    assert list(reads) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    flat = [
        [(write.row, write.place, write.copy.target_base, write.copy.size) for write in reads.writes(numbers)]
        for numbers in reads
    ]
    assert flat == [[(1, 0, 5, 30)], [(0, 0, 10, 38)], [(0, 0, 48, 32)], [(0, 0, 80, 20)]]


class Device:
    """A device in numpy, which notes what is written and by which thread."""

    def __init__(self, array, log):
        self.dtype, self._array, self._log = array.dtype, array, log

    def along_axes(self, copy, side):
        assert side == 1
        return copy

    def write(self, copy, values):
        self._log.append((copy.size, threading.current_thread() is threading.main_thread()))
        assert values.dtype == self.dtype
        copy.scatter_into(self._array)[...] = values.reshape(copy.extents)


SHAPES = {"w": ("float32", (60, 70)), "v": ("int64", (800,)), "u": ("float32", (3, 4))}


def values_of():
    return {key: np.arange(np.prod(shape)).astype(dtype).reshape(shape) for key, (dtype, shape) in SHAPES.items()}


def on_devices(arrays, device=Device, **parts):
    """Targets on a device, and the log of what is written to it."""
    targets, log = targets_of(arrays, **parts), []
    targets.memory.on_devices = {row: device(array.reshape(-1), log) for row, array in enumerate(arrays.values())}
    return targets, log


def load(path, targets, **options):
    asked = LoadOptions(**options)
    source = Files(str(path), asked)
    return Transfer(SoloCommunicator(), source, lambda: targets, asked, "load_state_dict", "cannot load").run()


def running():
    return [each for each in threading.enumerate() if each.name == "flexckpt-ring"]


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(buffered_reads, "BUFFER_BYTES", 4096)


@pytest.mark.parametrize("verify", ["read", "full", "off"])
@pytest.mark.usefixtures("small_buffers")
def test_devices_are_filled_in_bounded_steps_by_the_caller(tmp_path, verify):
    values = values_of()
    save(tmp_path, values)
    arrays = {"w": np.zeros((60, 30), np.float32), "v": np.zeros(800, np.int64), "u": np.zeros((3, 4), np.float64)}
    targets, log = on_devices(arrays, parts={"w": ((60, 70), (0, 7))})
    report = load(tmp_path, targets, verify=verify, dtype="cast")
    expected = [values["w"][:, 7:37], values["v"], values["u"]]
    assert [array.tolist() for array in arrays.values()] == [array.tolist() for array in expected]
    assert sum(size for size, _ in log) == 60 * 30 + 800 + 12
    assert max(size for size, _ in log) * 4 <= 4096
    # 7200 bytes in rows and 6400 in blocks; the last was saved in three ranks' columns.
    assert len(log) == 2 + 2 + 3
    assert {caller for _, caller in log} == {True}
    assert not any(event[0] == "open" for event in targets.memory.events)
    assert report.bytes_needed == 60 * 30 * 4 + 800 * 8 + 12 * 4
    assert not running()


@pytest.mark.usefixtures("small_buffers")
def test_damage_is_found_before_it_reaches_a_device(tmp_path):
    values = values_of()
    save(tmp_path, values)
    catalog = CheckpointDirectory(str(tmp_path)).read_manifest().catalog
    row = int(np.argmax(catalog.key == catalog.keys.index("v")))
    flip(tmp_path / catalog.file_name(row), int(catalog.byte_offset[row]) + 6000)
    arrays = {"v": np.zeros(800, np.int64)}
    targets, log = on_devices(arrays)
    with pytest.raises(CorruptCheckpointError, match="are damaged: expected xxh3"):
        load(tmp_path, targets, strict=False, verify="full")
    assert not arrays["v"].any()
    assert log == []
    assert not running()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.usefixtures("small_buffers")
def test_an_error_of_a_device_leaves_nothing_running(tmp_path, error):
    class Broken(Device):
        def write(self, copy, values):
            raise error("the device is gone")

    save(tmp_path, values_of())
    targets, _ = on_devices({"v": np.zeros(800, np.int64)}, Broken)
    with pytest.raises((error, CheckpointError), match="the device is gone"):
        load(tmp_path, targets, strict=False)
    assert not running()


@pytest.mark.usefixtures("small_buffers")
def test_what_is_announced_is_what_is_read(tmp_path):
    """An object store is asked for the ranges, in the order in which they are read."""
    values = values_of()
    save(tmp_path, values)
    targets, _ = on_devices({"v": np.zeros(800, np.int64), "w": np.zeros((60, 70), np.float32)})
    announced, read = [], []

    class Noting(FileReader):
        def read_ahead(self, items, begin, end):
            announced.extend(zip(items.tolist(), begin.tolist(), end.tolist()))

        def read_stretches(self, stretches):
            place = self.catalog.byte_offset[stretches.item] + stretches.position
            asked = stretches.take(np.lexsort((place, self.catalog.file[stretches.item])))
            read.extend(zip(asked.item.tolist(), asked.position.tolist(), asked.length.tolist()))
            super().read_stretches(stretches)

    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    with Noting(str(tmp_path), manifest, "off") as reader:
        reader.block_bytes = 1024
        plan = plan_fill(targets.catalog, np.arange(2), None)
        pieces = plan_reads(ShardMatcher(manifest.catalog), plan, None).pieces
        filling = Filling(plan, targets.memory)
        reader.files.__class__ = type("Far", (type(reader.files),), {"reads_ahead": True})
        announce(reader, pieces, filling)
        read_through_buffers(reader, pieces, filling)
    assert [(item, begin, end - begin) for item, begin, end in announced] == read
