"""Stretches and alike copies: cut, portioned, carried out; what is read of them, in how many requests; and damage."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.media.backend import InputFile
from paddle_flexckpt.native import read_planner, row_files, stretches
from paddle_flexckpt.native.read_planner import BLOCKS_AT_ONCE, portion_edges
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.stretches import AlikeCopies, Stretches
from tests.native.samples import flip, store, whole

BLOCK = 256


def columns(*rows: tuple[int, ...]) -> Stretches:
    return Stretches(*(np.asarray(column, dtype=np.int64) for column in zip(*rows)))


def rows_of(table: Stretches) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in (table.item, table.position, table.length, table.address))))


def stretches_into(arrays: list[np.ndarray], items: list[int] | None = None, position: int = 0) -> Stretches:
    items = list(range(len(arrays))) if items is None else items
    return columns(*((item, position, a.nbytes, a.ctypes.data) for item, a in zip(items, arrays)))


@pytest.fixture
def requests(monkeypatch) -> list[tuple[int, int]]:
    """The offset and number of buffers of every ``os.preadv``."""
    made, preadv = [], os.preadv

    def spy(descriptor, buffers, offset):
        made.append((offset, len(buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    return made


def test_stretches_are_cut_where_blocks_end():
    table = columns((0, 3, 5, 100), (1, 8, 8, 200), (2, 6, 20, 300))
    assert rows_of(table.cut_at(8)) == [
        (0, 3, 5, 100), (1, 8, 8, 200), (2, 6, 2, 300), (2, 8, 8, 302), (2, 16, 8, 310), (2, 24, 2, 318)
    ]  # fmt: skip
    assert table.take(slice(0, 2)).cut_at(8).item.tolist() == [0, 1]


def test_portions_are_bounded_in_bytes_and_number():
    length, no_breaks = np.asarray([4, 4, 9, 1, 1, 1, 1]), np.zeros(0, dtype=np.int64)
    assert portion_edges(length, 8, 3, no_breaks) == [0, 2, 3, 6, 7]
    assert portion_edges(length, 100, 100, no_breaks) == [0, 7]
    assert portion_edges(length, 8, 3, np.asarray([1, 5])) == [0, 1, 2, 3, 5, 7]
    assert portion_edges(length[:0], 8, 3, no_breaks) == [0]


def test_runs_are_listed_some_at_a_time(monkeypatch):
    copy = StridedCopy((2, 3, 4), 0, (100, 10, 1), 0, (12, 4, 1))
    copies = AlikeCopies(copy, np.dtype(np.int16), *(np.asarray(c) for c in ([5, 6], [0, 1000], [10000, 20000])))
    (everything,) = copies.runs()
    assert rows_of(everything)[:4] == [(5, 0, 8, 10000), (5, 20, 8, 10008), (5, 40, 8, 10016), (5, 200, 8, 10024)]
    assert rows_of(everything)[-1] == (6, 1000 + 240, 8, 20000 + 40)
    monkeypatch.setattr(stretches, "RUNS_AT_ONCE", 5)
    parts = list(copies.runs())
    assert [len(part) for part in parts] == [5, 5, 2]
    assert [row for part in parts for row in rows_of(part)] == rows_of(everything)


def test_what_neighbours_in_a_file_is_one_request(tmp_path, requests):
    stored = store(tmp_path, [whole(f"w{i}", "uint8", (100,)) for i in range(9)], block_bytes=BLOCK)
    targets = [np.zeros(100, dtype=np.uint8) for _ in range(9)]
    order = [4, 2, 0, 1, 3, 8, 6]  # 5 and 7 are not wanted
    begin = stored.manifest.catalog.byte_offset
    with FileReader(stored.directory, stored.manifest) as reader:
        reader.read_stretches(stretches_into([targets[i] for i in order], order))
        assert sorted(requests) == [(begin[0], 5), (begin[6], 1), (begin[8], 1)]
        assert (reader.count.reads, reader.count.bytes_read, reader.count.bytes_verified) == (3, 700, 700)
    for i in range(9):
        assert targets[i].tobytes() == (stored.values[i].tobytes() if i in order else bytes(100))


def test_no_request_has_more_buffers_than_the_system_takes(tmp_path, requests, monkeypatch):
    count = 1100
    stored = store(tmp_path, [whole(f"w{i}", "uint8", (3,)) for i in range(count)])
    targets = np.zeros(3 * count, dtype=np.uint8)
    with FileReader(stored.directory, stored.manifest) as reader:
        reader.read_stretches(stretches_into(list(targets.reshape(count, 3))))
    assert targets.tobytes() == b"".join(value.tobytes() for value in stored.values)
    assert [number for _, number in sorted(requests)] == [1024, 76]


@pytest.mark.parametrize("most", [1, 7, 100, 250])
def test_short_answers_are_continued(tmp_path, monkeypatch, most):
    stored = store(tmp_path, [whole(f"w{i}", "uint8", (100,)) for i in range(9)], block_bytes=BLOCK)
    targets, preadv = [np.zeros(100, dtype=np.uint8) for _ in range(9)], os.preadv

    def short(descriptor, buffers, offset):
        left, some = most, []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        return preadv(descriptor, some, offset)

    monkeypatch.setattr(os, "preadv", short)
    with FileReader(stored.directory, stored.manifest) as reader:
        reader.read_stretches(stretches_into(targets))
        assert (reader.count.bytes_read, reader.count.bytes_verified) == (900, 900)
    assert [target.tobytes() for target in targets] == [value.tobytes() for value in stored.values]


def test_a_medium_without_vectors_is_asked_once(tmp_path):
    class File(InputFile):
        size, asked = 100, []

        def read_into(self, buffer, offset):
            self.asked.append((offset, len(buffer)))
            count = min(len(buffer), 25)
            buffer[:count] = bytes(range(offset, offset + count))
            return count

        def close(self):
            pass

    parts = [bytearray(10) for _ in range(4)]
    assert File().read_into_each([memoryview(part) for part in parts], 3) == 25
    assert File.asked == [(3, 40)]
    assert b"".join(parts) == bytes(range(3, 28)) + bytes(15)


def twice(tmp_path, count=5, size=BLOCK):
    """Items that ranks 0 and 1 have both written."""
    shards = [whole(f"w{i}", "uint8", (size,), rank) for rank in (0, 1) for i in range(count)]
    return store(tmp_path, shards, block_bytes=BLOCK)


@pytest.mark.parametrize("verify", ["read", "full"])
@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_damage_in_a_portion_is_found_and_a_replica_serves(tmp_path, monkeypatch, verify, at_once):
    monkeypatch.setattr(read_planner, "BLOCKS_AT_ONCE", at_once)
    stored = twice(tmp_path)
    for item in (1, 3):
        flip(stored.file(0), int(stored.manifest.catalog.byte_offset[item]) + 9)
    targets = [np.zeros(BLOCK, dtype=np.uint8) for _ in range(5)]
    with FileReader(stored.directory, stored.manifest, verify) as reader:
        reader.read_stretches(stretches_into(targets))
        count = reader.count
        assert (count.bytes_read, count.bytes_verified, count.bytes_extra) == (7 * BLOCK, 5 * BLOCK, 2 * BLOCK)
        assert sorted(reader.replicas_used) == ["w1", "w3"]
    assert [target.tobytes() for target in targets] == [value.tobytes() for value in stored.values[:5]]
    damaged = pytest.raises(CorruptCheckpointError, match=f"'w1'.*bytes 0 to {BLOCK} of the shard.*are damaged")
    with damaged, FileReader(stored.directory, stored.manifest, verify, use_replicas=False) as reader:
        reader.read_stretches(stretches_into(targets))


def test_without_verification_nothing_is_compared(tmp_path):
    stored = twice(tmp_path)
    flip(stored.file(0), int(stored.manifest.catalog.byte_offset[1]))
    targets = [np.zeros(BLOCK, dtype=np.uint8) for _ in range(5)]
    with FileReader(stored.directory, stored.manifest, "off") as reader:
        reader.read_stretches(stretches_into(targets))
        assert (reader.count.bytes_verified, reader.replicas_used) == (0, {})
    assert (targets[1] != stored.values[1]).sum() == 1


@pytest.mark.parametrize("verify", ["read", "full", "off"])
def test_a_portion_that_cannot_be_read_is_read_one_by_one(tmp_path, monkeypatch, verify):
    stored, preadv = twice(tmp_path), os.preadv
    bad = int(stored.manifest.catalog.byte_offset[2])

    def failing(descriptor, buffers, offset):
        first = os.readlink(f"/proc/self/fd/{descriptor}") == str(stored.file(0))
        if first and offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    targets = [np.zeros(BLOCK, dtype=np.uint8) for _ in range(5)]
    with FileReader(stored.directory, stored.manifest, verify) as reader:
        reader.read_stretches(stretches_into(targets))
        assert list(reader.replicas_used) == ["w2"]
        assert "Input/output error; read from" in reader.replicas_used["w2"]
        # What is known to be damaged is read whole, and of the replica.
        reader.read_stretches(stretches_into([targets[2][3:50]], [2], 3))
    assert [target.tobytes() for target in targets] == [value.tobytes() for value in stored.values[:5]]
    failed = pytest.raises(OSError, match="Input/output error")
    with failed, FileReader(stored.directory, stored.manifest, verify, use_replicas=False) as reader:
        reader.read_stretches(stretches_into(targets))


def test_a_file_that_is_gone_is_replaced(tmp_path):
    stored = twice(tmp_path)
    stored.file(0).unlink()
    targets = [np.zeros(BLOCK, dtype=np.uint8) for _ in range(5)]
    with FileReader(stored.directory, stored.manifest) as reader:
        reader.check_files(np.arange(5))
        reader.read_stretches(stretches_into(targets))
        assert (reader.count.reads, reader.count.files) == (-(-5 // BLOCKS_AT_ONCE), {stored.file(1).name})
    assert [target.tobytes() for target in targets] == [value.tobytes() for value in stored.values[:5]]


# -- alike copies ------------------------------------------------------------------------------------------------------

FORMS = {
    "cut": StridedCopy((6, 3), 0, (8, 1), 0, (3, 1)),
    "transposed": StridedCopy((3, 6), 0, (1, 8), 0, (6, 1)),
    "spread": StridedCopy((6, 8), 0, (8, 1), 0, (11, 1)),
    "backwards": StridedCopy((4, 3), 0, (8, 1), 9, (-3, 1)),
    "step": StridedCopy((10,), 0, (3,), 0, (2,)),
}


def alike(copy: StridedCopy, items: int, first: int, dtype=np.float32) -> tuple[AlikeCopies, list[np.ndarray]]:
    """One copy of each item, from its element ``first``, and what it goes into."""
    base = copy.target_base
    memory = [np.full(120, -1, dtype=dtype) for _ in range(items)]
    address = np.asarray([each.ctypes.data + base * each.itemsize for each in memory])
    position = np.full(items, first * np.dtype(dtype).itemsize)
    return AlikeCopies(replace(copy, target_base=0), np.dtype(dtype), np.arange(items), position, address), memory


@pytest.mark.parametrize("least", [1, 12, 16 << 10], ids=["runs", "some", "maps"])
@pytest.mark.parametrize("block_bytes", [16, 192, 1 << 20])
@pytest.mark.parametrize("verify", ["read", "full", "off"])
@pytest.mark.parametrize("form", FORMS)
def test_alike_copies_do_what_each_does_alone(tmp_path, monkeypatch, form, verify, block_bytes, least):
    monkeypatch.setattr(read_planner, "MIN_PREAD_BYTES", least)
    copy, count, first = FORMS[form], 7, 0 if form == "spread" else 2
    stored = store(tmp_path, [whole(f"w{i}", "float32", (6, 8)) for i in range(count)], block_bytes=block_bytes)
    copies, memory = alike(copy, count, first)
    with FileReader(stored.directory, stored.manifest, verify) as reader:
        reader.read_alike(copies)
        together = reader.count
    with FileReader(stored.directory, stored.manifest, verify) as reader:
        for item, got in enumerate(memory):
            expected = np.full(120, -1, dtype=np.float32)
            reader.read(item, replace(copy, source_base=first), expected)
            assert got.tobytes() == expected.tobytes()
        alone = reader.count
    for name in ("bytes_read", "bytes_verified", "bytes_extra"):
        assert getattr(together, name) == getattr(alone, name), name
    assert together.reads <= alone.reads + 1  # a portion may end within a run


def test_blocks_that_several_copies_want_are_read_once(tmp_path, requests, unmapped):
    stored = store(tmp_path, [whole(f"w{i}", "float32", (6, 8)) for i in range(4)])
    parts = [alike(FORMS["cut"], 4, first) for first in (0, 3, 0)]
    copies = AlikeCopies(
        FORMS["cut"], np.dtype(np.float32),
        *(np.concatenate([getattr(part, name) for part, _ in parts]) for name in ("item", "position", "address")),
    )  # fmt: skip
    with FileReader(stored.directory, stored.manifest, "full") as reader:
        reader.read_alike(copies)
        count = reader.count
        assert (count.bytes_read, count.bytes_verified, count.reads) == (4 * 192, 4 * 192, 1)
        assert count.bytes_extra == 0
    assert len(requests) == 1
    for first, (_, memory) in zip((0, 3, 0), parts):
        for item in range(4):
            expected = stored.values[item].reshape(6, 8)[:, first : first + 3]
            assert memory[item][:18].tobytes() == expected.tobytes()


@pytest.mark.parametrize("verify", ["read", "full"])
def test_damage_in_what_alike_copies_want(tmp_path, verify):
    shards = [whole(f"w{i}", "float32", (6, 8), rank) for rank in (0, 1) for i in range(4)]
    stored = store(tmp_path, shards)
    flip(stored.file(0), int(stored.manifest.catalog.byte_offset[2]) + 4)
    for form, first in (("cut", 0), ("spread", 0)):
        copies, memory = alike(FORMS[form], 4, first)
        with FileReader(stored.directory, stored.manifest, verify) as reader:
            reader.read_alike(copies)
            found = list(reader.replicas_used)
        assert found == ["w2"]
        for item in range(4):
            expected = np.full(120, -1, dtype=np.float32)
            FORMS[form].scatter_into(expected)[...] = FORMS[form].gather_from(stored.values[item])
            assert memory[item].tobytes() == expected.tobytes()


def test_mapped_pages_are_given_back_after_a_bounded_span(tmp_path, monkeypatch):
    stored = store(tmp_path, [whole(f"w{i}", "uint8", (64, 1 << 10)) for i in range(8)])
    monkeypatch.setattr(row_files, "MAP_SPAN_BYTES", 128 << 10)
    given = []
    monkeypatch.setattr(row_files, "give_back", lambda mapped, begin, end: given.append(end - begin))
    memory = np.zeros((8, 64 * 100), dtype=np.uint8)
    copy = StridedCopy((64, 100), 0, (1 << 10, 1), 0, (100, 1))
    address = memory.ctypes.data + np.arange(8) * 6400
    with FileReader(stored.directory, stored.manifest) as reader:
        reader.read_alike(AlikeCopies(copy, np.dtype(np.uint8), np.arange(8), np.full(8, 800), address))
        assert (reader.count.reads, reader.count.bytes_read) == (8, 8 * 6400)
    assert len(given) == 4
    assert max(given) <= 128 << 10
    for item in range(8):
        assert (memory[item].reshape(64, 100) == stored.values[item].reshape(64, -1)[:, 800:900]).all()


def test_large_copies_of_one_item_share_its_blocks(tmp_path, requests, monkeypatch, unmapped):
    """Columns of tensors of 32 blocks and a part of one: each block is read once, whatever wants it, two at a time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    stored = store(tmp_path, [whole(f"w{i}", "float32", (33, 62)) for i in range(2)], block_bytes=BLOCK)
    rows, columns = 33, 62
    copy = StridedCopy((rows, 20), 0, (columns, 1), 0, (20, 1))
    memory = np.zeros((2, 3, rows, 20), dtype=np.float32)
    item, place = np.repeat([0, 1], 3), np.tile([0, 20, 42], 2)
    address = memory.ctypes.data + np.arange(6) * rows * 20 * 4
    with FileReader(stored.directory, stored.manifest, "full") as reader:
        reader.read_alike(AlikeCopies(copy, np.dtype(np.float32), item, place * 4, address))
        count = reader.count
    for i in range(2):
        values = stored.values[i].reshape(rows, columns)
        for j, first in enumerate((0, 20, 42)):
            assert memory[i, j].tobytes() == values[:, first : first + 20].tobytes()
    nbytes = rows * columns * 4
    assert len(requests) == 2 * -(-nbytes // (BLOCKS_AT_ONCE * BLOCK))
    assert (count.bytes_read, count.bytes_verified) == (2 * nbytes, 2 * nbytes)
    assert count.bytes_extra == 2 * rows * 2 * 4


def test_blocks_between_what_is_wanted_are_not_read(tmp_path, requests, unmapped):
    stored = store(tmp_path, [whole("w", "uint8", (4, 5 * BLOCK))], block_bytes=BLOCK)
    copy, memory = StridedCopy((4, 10), 0, (5 * BLOCK, 1), 0, (10, 1)), np.zeros((4, 10), dtype=np.uint8)
    one = np.asarray([0]), np.asarray([7]), np.asarray([memory.ctypes.data])
    with FileReader(stored.directory, stored.manifest, "full") as reader:
        reader.read_alike(AlikeCopies(copy, np.dtype(np.uint8), *one))
        assert (reader.count.bytes_read, reader.count.bytes_extra) == (4 * BLOCK, 4 * (BLOCK - 10))
    assert (memory == stored.values[0].reshape(4, -1)[:, 7:17]).all()
    assert len(requests) == 4
