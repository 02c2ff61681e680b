"""Copies between storages and streams: every element once and in order, in bounded steps where a device takes part."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import StridedCopy, array_axes
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.transfer import copies
from paddle_flexckpt.transfer.copies import (
    SMALL_PART,
    copy_pieces,
    copy_values,
    pack,
    pack_copy,
    read_values,
    unpack,
    write_values,
)
from tests.property import examples

CHUNK = 24


class Device:
    """A device in the host's memory, which notes what is asked of it."""

    def __init__(self, array):
        self.array, self.asked = array, []

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def flat(self):
        return self.array.reshape(-1)

    def along_axes(self, copy, side):
        return copy.along_axes(side, self.array.shape)

    def reach(self, copy, side):
        """Each axis of a copy has to run along one of the array: so it is on devices."""
        strides = (copy.source_strides, copy.target_strides)[side]
        for stride, extent in zip(strides, copy.extents):
            assert len(array_axes(stride, extent, self.array.shape)) == 1

    def read(self, copy):
        self.reach(copy, 0)
        self.asked.append(("read", copy.size * self.dtype.itemsize))
        return copy.gather_from(self.flat).copy()

    def write(self, copy, values):
        assert values.dtype == self.dtype
        self.reach(copy, 1)
        self.asked.append(("write", copy.size * self.dtype.itemsize))
        copy.scatter_into(self.flat)[...] = values.reshape(copy.extents)

    def copy_from(self, source, copy):
        assert source.dtype == self.dtype
        source.reach(copy, 0)
        self.reach(copy, 1)
        self.asked.append(("copy", copy.size * self.dtype.itemsize))
        copy.scatter_into(self.flat)[...] = copy.gather_from(source.flat)


class OtherDevice(Device):
    """One of another kind."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(copies, "DEVICE_CHUNK_BYTES", CHUNK)


def numbers(shape, dtype=np.int32, start=0):
    return np.arange(start, start + np.prod(shape, dtype=int)).astype(dtype).reshape(shape)


# All of a (5, 6) matrix but its last row and column, into the transpose of another.
TURNED = StridedCopy((4, 5), 0, (6, 1), 1, (1, 6))
# The whole of both.
PLAIN = StridedCopy((30,), 0, (1,), 0, (1,))


def carried_out(copy, source, target):
    """The target's elements after the copy."""
    expected = target.copy()
    for index in np.ndindex(*copy.extents):
        at = [base + int(np.dot(index, strides)) for base, strides in (
            (copy.source_base, copy.source_strides), (copy.target_base, copy.target_strides))]  # fmt: skip
        expected.reshape(-1)[at[1]] = source.reshape(-1)[at[0]].astype(target.dtype)
    return expected


KINDS = [np.asarray, Device, OtherDevice]


@pytest.mark.parametrize("copy", [TURNED, PLAIN], ids=["turned", "plain"])
@pytest.mark.parametrize("dtype", [np.int32, np.float64])
@pytest.mark.parametrize(("of_source", "of_target"), list(itertools.product(KINDS, KINDS)))
def test_values_are_copied_between_all_kinds_of_storage(of_source, of_target, dtype, copy):
    first, second = numbers((5, 6)), numbers((5, 6), dtype, 100)
    expected = carried_out(copy, first, second)
    source, target = (
        kind(array if kind is not np.asarray else array.reshape(-1))
        for kind, array in ((of_source, first), (of_target, second))
    )
    copy_values(copy, source, target)
    assert second.tolist() == expected.tolist()
    assert first.tolist() == numbers((5, 6)).tolist()
    inside = of_source is of_target and of_source is not np.asarray and dtype is np.int32
    for storage, kinds in ((source, {"read"}), (target, {"copy"} if inside else {"write"})):
        if isinstance(storage, Device):
            assert {kind for kind, _ in storage.asked} == (set() if inside and storage is source else kinds)
    steps = [size for storage in (source, target) if isinstance(storage, Device) for _, size in storage.asked]
    assert all(size <= CHUNK * np.dtype(dtype).itemsize // 4 for size in steps)
    if steps and copy is PLAIN:
        # No more steps than are needed: 120 bytes of the source by 24.
        assert len(steps) == 5 * sum(isinstance(s, Device) and s.asked != [] for s in (source, target))


@pytest.mark.parametrize("of_source", [False, True])
def test_a_step_on_a_device_is_along_its_axes(of_source):
    """A step of six elements is two rows of the array: two axes, though they lie one behind the other."""
    array, flat = numbers((5, 3)), numbers(15, start=20)
    source, target = (Device(array), flat) if of_source else (flat, Device(array))
    copy_values(StridedCopy((15,), 0, (1,), 0, (1,)), source, target)
    assert array.ravel().tolist() == flat.tolist() == list(range(0 if of_source else 20, 15 if of_source else 35))
    if of_source:
        device = [part.nbytes for part in pack_copy(StridedCopy((15,), 0, (1,), 0, (1,)), source)]
        assert device == [24, 24, 12]


def test_what_fits_into_one_step_is_not_taken_apart():
    source, target = Device(numbers((2, 3))), np.zeros(6, np.int32)
    whole = StridedCopy((2, 2), 0, (3, 1), 0, (3, 1))
    copy_values(whole, source, target)
    assert source.asked == [("read", 16)]
    assert target.tolist() == [0, 1, 0, 3, 4, 0]


def test_read_values_are_a_view_of_host_memory_or_a_copy_of_device_memory():
    array = numbers((5, 6))
    view = read_values(array.reshape(-1), TURNED)
    assert np.shares_memory(view, array)
    assert view.tolist() == read_values(Device(array), TURNED).tolist() == array[:4, :5].tolist()


@pytest.mark.parametrize("kind", [np.asarray, Device])
def test_written_values_are_cast_to_the_storage(kind):
    array = np.zeros((5, 6), np.float32)
    values = numbers(20, np.int64)
    write_values(kind(array.reshape(-1)) if kind is np.asarray else kind(array), TURNED, values)
    assert array.tolist() == carried_out(TURNED, carried_values(values), np.zeros((5, 6), np.float32)).tolist()


def carried_values(values):
    """A matrix that has the values where TURNED takes them from."""
    matrix = np.zeros((5, 6), values.dtype)
    matrix[:4, :5] = values.reshape(4, 5)
    return matrix


def pieces_of(*found):
    """Pieces from (source, target, copy); copies have as many axes."""
    return Pieces(
        *(np.asarray(column, dtype=np.int64) for column in zip(*(
            (source, target, copy.extents, copy.source_base, copy.source_strides, copy.target_base, copy.target_strides)
            for source, target, copy in found
        )))
    )  # fmt: skip


def test_pieces_are_copied_and_their_bytes_counted():
    sources = [numbers(30), numbers(30, np.int16, 50)]
    targets = [np.zeros(30, np.int64), np.zeros(30, np.int64)]
    small = StridedCopy((2, 3), 4, (6, 1), 0, (3, 1))
    count = copy_pieces(pieces_of((0, 1, TURNED), (1, 0, small)), sources.__getitem__, targets.__getitem__)
    assert count == 20 * 4 + 6 * 2
    assert targets[1].tolist() == carried_out(TURNED, sources[0], np.zeros(30, np.int64)).tolist()
    assert targets[0].tolist() == carried_out(small, sources[1], np.zeros(30, np.int64)).tolist()


# -- streams -----------------------------------------------------------------------------------------------------------


@st.composite
def strided(draw):
    """A copy from the storage of one array to that of another: axes in any order, parts of each; and both shapes."""
    ndim = draw(st.integers(0, 3))
    extents = [draw(st.integers(1, 4)) for _ in range(ndim)]
    bases, strides, shapes = [], [], []
    for _ in range(2):
        order = draw(st.permutations(range(ndim)))
        low = [draw(st.integers(0, 2)) for _ in range(ndim)]
        shape = [low[a] + extents[order[a]] + draw(st.integers(0, 2)) for a in range(ndim)]
        steps = [int(np.prod(shape[a + 1 :])) for a in range(ndim)]
        bases.append(sum(lo * step for lo, step in zip(low, steps)))
        strides.append(tuple(steps[order.index(a)] for a in range(ndim)))
        shapes.append(tuple(shape))
    return StridedCopy(tuple(extents), bases[0], strides[0], bases[1], strides[1]), *shapes


@examples(150)
@given(strided(), st.sampled_from([np.uint8, np.int32, np.float64]), st.sampled_from([np.int32, np.float64]),
       st.booleans(), st.booleans())  # fmt: skip
def test_what_is_packed_is_unpacked(case, source_dtype, target_dtype, from_device, to_device):
    copy, source_shape, target_shape = case
    source, target = numbers(source_shape, source_dtype), np.zeros(target_shape, target_dtype)
    expected = carried_out(copy, source, target)
    from_storage = Device(source) if from_device else source.reshape(-1)
    to_storage = Device(target) if to_device else target.reshape(-1)
    twice = pieces_of((0, 0, copy), (0, 0, copy))
    sent = []
    for part in pack(twice, lambda row: from_storage):
        assert (part.dtype, part.ndim) == (np.uint8, 1)
        contiguous = not from_device and copy.simplified().is_contiguous()[0]
        contiguous &= copy.size * source.itemsize > CHUNK // SMALL_PART
        assert part.nbytes <= CHUNK or contiguous
        assert contiguous == np.shares_memory(part, source)
        sent.append(part.tobytes())
    stream = b"".join(sent)
    assert stream == 2 * copy.gather_from(source.reshape(-1)).tobytes()
    position = 0
    for buffer in unpack(twice, lambda row: to_storage, lambda row: source.dtype):
        straight = not to_device and copy.simplified().is_contiguous()[1] and source_dtype == target_dtype
        straight &= copy.size * source.itemsize > CHUNK // SMALL_PART
        assert straight == np.shares_memory(buffer, target)
        assert (buffer.dtype, buffer.ndim) == (np.uint8, 1)
        assert buffer.nbytes <= CHUNK or straight
        buffer[:] = np.frombuffer(stream, np.uint8, buffer.nbytes, position)
        position += buffer.nbytes
    assert position == len(stream)
    assert target.tolist() == expected.tolist()


def test_steps_of_a_stream_are_as_long_as_they_may_be():
    matrix = numbers((5, 6), np.int16)
    column = StridedCopy((5, 5), 0, (1, 6), 0, (5, 1))
    assert [part.nbytes for part in pack_copy(column, matrix.reshape(-1))] == [24, 24, 2]
    buffers = unpack(pieces_of((0, 0, StridedCopy((5, 5), 0, (5, 1), 0, (1, 6)))), lambda row: matrix.reshape(-1),
                     lambda row: np.dtype(np.int16))  # fmt: skip
    assert [buffer.nbytes for buffer in buffers] == [24, 24, 2]


def test_elements_that_are_longer_than_a_step_are_packed_one_by_one(monkeypatch):
    monkeypatch.setattr(copies, "CHUNK_BYTES", 8)
    matrix = numbers((2, 2), np.complex128)
    turned = StridedCopy((2, 2), 0, (1, 2), 0, (2, 1))
    assert [part.nbytes for part in pack_copy(turned, matrix.reshape(-1), np.empty(16, np.uint8))] == [16] * 4


def test_one_buffer_serves_all_pieces():
    matrix = numbers((5, 6), np.int16)
    buffer = np.zeros(CHUNK, np.uint8)
    parts = pack_copy(StridedCopy((5, 5), 0, (1, 6), 0, (5, 1)), matrix.reshape(-1), buffer)
    assert all(np.shares_memory(part, buffer) for part in parts)


def test_a_device_gets_values_of_its_dtype_as_they_are():
    given = []

    class Noted(Device):
        def write(self, copy, values):
            given.append(values)

    values = numbers(30)
    write_values(Noted(np.zeros((5, 6), np.int32)), PLAIN, values)
    assert given[0] is values


def test_steps_on_the_host_and_on_a_device_differ(monkeypatch):
    monkeypatch.setattr(copies, "CHUNK_BYTES", 8)
    matrix, turned = numbers((5, 6)), pieces_of((0, 0, TURNED))
    for storage, size in ((matrix.reshape(-1), 8), (Device(matrix), 24)):
        parts = [part.nbytes for part in pack(turned, lambda row, storage=storage: storage)]
        assert sum(parts) == 80
        assert max(parts) <= size
        buffers = unpack(turned, lambda row, storage=storage: storage, lambda row: matrix.dtype)
        assert [buffer.nbytes for buffer in buffers] == [size] * (80 // size) + [80 % size] * (80 % size > 0)


def test_one_buffer_serves_all_pieces_of_a_stream():
    matrix = numbers((5, 6))
    twice = pieces_of((0, 0, TURNED), (0, 0, TURNED))
    packed = pack(twice, lambda row: matrix.reshape(-1))
    first = next(packed)
    assert all(np.shares_memory(part, first) for part in packed)
    received = unpack(twice, lambda row: matrix.reshape(-1), lambda row: matrix.dtype)
    first = next(received)
    assert all(np.shares_memory(buffer, first) for buffer in received)


def test_a_longer_buffer_is_made_when_a_device_needs_it(monkeypatch):
    monkeypatch.setattr(copies, "CHUNK_BYTES", 8)
    arrays = [numbers((5, 6)), numbers((5, 6))]
    storages = [arrays[0].reshape(-1), Device(arrays[1])]
    both = pieces_of((0, 0, TURNED), (0, 1, TURNED), (0, 0, TURNED))
    sizes = []
    for buffer in unpack(both, storages.__getitem__, lambda row: np.dtype(np.int32)):
        buffer[:] = 0
        sizes.append(buffer.nbytes)
    assert sizes == [8] * 10 + [24] * 3 + [8] * 11
    for array in arrays:
        assert array.tolist() == carried_out(TURNED, np.zeros_like(array), numbers((5, 6))).tolist()


def test_a_part_of_a_contiguous_target_is_received_straight_into_it():
    target = np.zeros(10, np.int32)
    (buffer,) = unpack(pieces_of((0, 0, StridedCopy((4,), 0, (1,), 3, (1,)))), lambda row: target,
                       lambda row: target.dtype)  # fmt: skip
    buffer.view(np.int32)[:] = [1, 2, 3, 4]
    assert target.tolist() == [0, 0, 0, 1, 2, 3, 4, 0, 0, 0]


def test_nothing_is_copied_of_pieces_without_elements():
    assert copy_pieces(pieces_of((0, 0, StridedCopy((0, 3), 0, (3, 1), 0, (3, 1)))), lambda row: np.zeros(3),
                       lambda row: np.zeros(3)) == 0  # fmt: skip


def test_a_step_may_be_of_three_parts_and_each_piece_of_another_row():
    """A step of 12 elements from the 13th on: the rest of a row of five, a row, and the begin of another."""
    sources = [numbers((5, 6), np.int16), numbers((5, 6), np.int16, 50)]
    columns, rows = StridedCopy((5, 5), 0, (1, 6), 0, (5, 1)), StridedCopy((5, 5), 0, (5, 1), 0, (1, 6))
    stream = b"".join(
        part.tobytes()
        for part in pack(pieces_of((1, 0, columns), (0, 0, columns)), [s.reshape(-1) for s in sources].__getitem__)
    )
    assert np.frombuffer(stream, np.int16).tolist() == [
        *sources[1][:, :5].T.ravel().tolist(), *sources[0][:, :5].T.ravel().tolist(),
    ]  # fmt: skip
    targets = [np.zeros((5, 6), np.int16), np.zeros((5, 6), np.int32)]
    dtypes, position = [np.dtype(np.int8), np.dtype(np.int16)], 0
    received = np.arange(50, dtype=np.int8)
    data = received[:25].tobytes() + received[25:].astype(np.int16).tobytes()
    for buffer in unpack(pieces_of((0, 1, rows), (1, 0, rows)), [t.reshape(-1) for t in targets].__getitem__,
                         dtypes.__getitem__):  # fmt: skip
        buffer[:] = np.frombuffer(data, np.uint8, buffer.nbytes, position)
        position += buffer.nbytes
    assert position == len(data)
    assert targets[1][:, :5].tolist() == received[:25].reshape(5, 5).T.tolist()
    assert targets[0][:, :5].tolist() == received[25:].reshape(5, 5).T.tolist()
