"""Large reads, which several threads carry out: the same bytes, and the same errors."""

from __future__ import annotations

import itertools
import os
import threading

import numpy as np
import pytest

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.native import block_reader, row_files
from paddle_flexckpt.native.read_planner import BLOCKS_AT_ONCE
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.row_files import ReadThreads, SpareMemory
from tests.native.samples import flip, store, whole

BLOCK = 256
SIZE = 33 * BLOCK + 100  # four groups, one block more, and a part of one
ALL = StridedCopy((SIZE,), 0, (1,), 0, (1,))


@pytest.fixture
def stored(tmp_path):
    return store(tmp_path, [whole("w", "uint8", (SIZE,), rank) for rank in (0, 1)], block_bytes=BLOCK)


def read(stored, copy=ALL, **options):
    target = np.full(copy.size, 0xEE, dtype=np.uint8)
    with FileReader(stored.directory, stored.manifest, **options) as reader:
        reader.read(0, copy, target)
    return target, reader.count


def begin_of(stored, row: int) -> int:
    return int(stored.manifest.catalog.byte_offset[row])


@pytest.mark.parametrize("verify", ["read", "off"])
@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 7])
def test_every_byte_is_read_once_and_all_blocks_are_verified(stored, first, verify):
    target, count = read(stored, StridedCopy((SIZE - first,), first, (1,), 0, (1,)), verify=verify)
    assert target.tobytes() == stored.values[0][first:].tobytes()
    assert (count.bytes_read, count.bytes_extra) == (SIZE - first, 0)
    assert count.bytes_verified == (SIZE - first // BLOCK * BLOCK if verify == "read" else 0)


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flexckpt-read")]


def test_who_has_read_a_portion_hashes_it(stored, monkeypatch, four_threads):
    read_by, hashed_by, everybody, calls = {}, {}, threading.Barrier(4, timeout=60), itertools.count()
    preadv, hash_blocks = os.preadv, block_reader.hash_blocks

    def spy(descriptor, buffers, offset):
        if next(calls) < 4:  # so that each of them reads something
            everybody.wait()
        read_by[address_of(buffers[0])] = threading.get_ident()
        return preadv(descriptor, buffers, offset)

    def spy_hash(blocks):
        hashed_by[address_of(blocks[0])] = threading.get_ident()
        return hash_blocks(blocks)

    monkeypatch.setattr(os, "preadv", spy)
    monkeypatch.setattr(block_reader, "hash_blocks", spy_hash)
    target, _ = read(stored, StridedCopy((32 * BLOCK,), 0, (1,), 0, (1,)))
    assert target.tobytes() == stored.values[0][: 32 * BLOCK].tobytes()
    assert read_by == hashed_by
    assert len(read_by) == 32 // BLOCKS_AT_ONCE
    assert len(set(read_by.values())) == 4
    assert threading.get_ident() in read_by.values()
    assert not own_threads()


def address_of(buffer) -> int:
    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data


@pytest.mark.parametrize("processors", [1, 2, 99])
def test_there_are_no_more_threads_than_processors_and_few_at_most(monkeypatch, processors):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors))
    threads, seen = ReadThreads(), set()
    many = threading.Barrier(min(processors, 4), timeout=60)

    def work(number):
        if number < many.parties:
            many.wait()
        seen.add(threading.get_ident())

    threads.each(work, 50)
    assert len(seen) == min(processors, 4)
    threads.close()
    assert not own_threads()


def test_one_part_and_none_are_the_callers(four_threads):
    threads, seen = ReadThreads(), []
    threads.each(lambda number: seen.append((number, threading.get_ident())), 1)
    threads.each(seen.append, 0)
    assert seen == [(0, threading.get_ident())]
    alone = ReadThreads(several=False)
    alone.each(lambda number: seen.append((number, threading.get_ident())), 3)
    assert seen[1:] == [(number, threading.get_ident()) for number in range(3)]
    assert not own_threads()


def test_the_first_error_is_raised_and_nothing_is_begun_after_it(four_threads):
    threads, begun, both = ReadThreads(), [], threading.Barrier(2, timeout=60)

    def work(number):
        begun.append(number)
        if number in (3, 5):
            both.wait()
            raise ValueError(f"part {number}")

    with pytest.raises(ValueError, match="part 3"):
        threads.each(work, 1000)
    assert len(begun) < 1000
    threads.each(begun.append, 2)  # they go on with what is next
    threads.close()


@pytest.mark.parametrize("mapped", [False, True])
def test_threads_read_files_that_others_drop(tmp_path, monkeypatch, four_threads, mapped):
    monkeypatch.setattr(row_files, "MOST_OPEN", 1)
    stored = store(tmp_path, [whole(f"w{i}", "uint8", (999,), i) for i in range(12)])
    got = np.zeros((600, 999), dtype=np.uint8)
    with FileReader(stored.directory, stored.manifest) as reader:

        def read_one(i: int) -> None:
            row = i * 7 % 12
            if mapped:
                begin = begin_of(stored, row)
                got[i] = np.frombuffer(reader.files.map(row), np.uint8)[begin : begin + 999]
            else:
                reader.files.read(row, 0, got[i])

        reader.files.threads.each(read_one, len(got))
    assert (got == [stored.values[i * 7 % 12] for i in range(len(got))]).all()


def test_spare_memory_is_used_again():
    spare = SpareMemory(7)
    with spare.use() as first, spare.use() as second:
        assert first is not second
        assert first.nbytes == second.nbytes == 7
        first, second = id(first), id(second)
    with spare.use() as third, spare.use() as fourth:
        assert {id(third), id(fourth)} == {first, second}


@pytest.mark.parametrize("block", [0, 1, BLOCKS_AT_ONCE - 1, BLOCKS_AT_ONCE, 20, 31, 32, 33])
def test_damage_anywhere_is_found_and_a_replica_serves(stored, block):
    flip(stored.file(0), begin_of(stored, 0) + block * BLOCK + 3)
    with pytest.raises(CorruptCheckpointError) as caught:
        read(stored, use_replicas=False)
    first, last = block * BLOCK, min((block + 1) * BLOCK, SIZE)
    assert f"bytes {first} to {last} of the shard (byte {begin_of(stored, 0) + first} of the file)" in str(caught.value)
    assert str(stored.file(0)) in str(caught.value)
    target, count = read(stored)
    assert target.tobytes() == stored.values[0].tobytes()
    assert count.bytes_verified == SIZE
    # In vain: the damaged block; what had been read of the same copy is used.
    assert (count.bytes_read, count.bytes_extra) == (SIZE + last - first, last - first)


def test_damage_in_both_copies_at_different_places(stored):
    rng = np.random.default_rng(0)
    for _ in range(20):
        damaged = rng.permutation(34)[:12]
        for turn, block in enumerate(damaged.tolist()):
            flip(stored.file(turn % 2), begin_of(stored, turn % 2) + block * BLOCK)
        target, count = read(stored)
        assert target.tobytes() == stored.values[0].tobytes()
        assert count.bytes_verified == SIZE
        for turn, block in enumerate(damaged.tolist()):
            flip(stored.file(turn % 2), begin_of(stored, turn % 2) + block * BLOCK)


def test_an_error_while_threads_read(stored, monkeypatch):
    """The file ends early, and there is no other copy: the error is told, and nothing is left behind."""
    preadv = os.preadv

    def ends(descriptor, buffers, offset):
        left = max(0, begin_of(stored, 0) + 20 * BLOCK - offset)
        return min(left, preadv(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", ends)
    with pytest.raises(CorruptCheckpointError, match=f"the file ends at byte {begin_of(stored, 0) + 20 * BLOCK}"):
        read(stored, use_replicas=False)
    assert not own_threads()
