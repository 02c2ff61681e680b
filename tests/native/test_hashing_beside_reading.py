"""Large reads, whose blocks are hashed by a thread while the next are read: the same bytes, and the same errors."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.engine.files import read_pieces
from paddle_flexckpt.native import checksums
from paddle_flexckpt.native.block_reader import HASHED_AT_ONCE
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning import Pieces
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
        reader.wait_for_hashes()
    return target, reader.count


def name_of_thread() -> str:
    return threading.current_thread().name


def begin_of(stored, row: int) -> int:
    return int(stored.manifest.catalog.byte_offset[row])


@pytest.mark.parametrize("verify", ["read", "full"])
@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 7])
def test_every_byte_is_read_once_and_whole_blocks_are_verified(stored, first, verify):
    target, count = read(stored, StridedCopy((SIZE - first,), first, (1,), 0, (1,)), verify=verify)
    assert target.tobytes() == stored.values[0][first:].tobytes()
    in_part = -first % BLOCK
    if verify == "read":
        assert (count.bytes_read, count.bytes_extra) == (SIZE - first, 0)
        assert count.bytes_verified == SIZE - first - in_part
    else:
        assert count.bytes_verified == count.bytes_read == SIZE - first // BLOCK * BLOCK


def test_the_hashing_is_done_by_a_thread_and_only_by_one(stored, monkeypatch):
    threads = set()
    hash_block = checksums.hash_block
    monkeypatch.setattr(
        checksums, "hash_block", lambda b: threads.add(threading.current_thread().name) or hash_block(b)
    )
    read(stored)
    assert len(threads) == 1
    assert threads.pop().startswith("flexckpt-hash")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flexckpt-hash")]


@pytest.mark.parametrize("block", [0, 1, HASHED_AT_ONCE - 1, HASHED_AT_ONCE, 20, 31, 32, 33])
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


def test_an_error_while_the_thread_is_hashing(stored, monkeypatch):
    """The file ends early, and there is no other copy: the error is told, and nothing is left behind."""
    preadv = os.preadv

    def ends(descriptor, buffers, offset):
        left = max(0, begin_of(stored, 0) + 20 * BLOCK - offset)
        return min(left, preadv(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", ends)
    with pytest.raises(CorruptCheckpointError, match=f"the file ends at byte {begin_of(stored, 0) + 20 * BLOCK}"):
        read(stored, use_replicas=False)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flexckpt-hash")]


def pieces() -> Pieces:
    """Three large copies of one item, into rows of their own."""
    none, one = np.zeros(3, dtype=np.int64), np.ones((3, 1), dtype=np.int64)
    return Pieces(none, np.arange(3), one * SIZE, none, one, none, one)


class Memory:
    """Counts the rows that have begun and those that have arrived; each has to be opened."""

    addresses = np.full(3, -1)

    def __init__(self, reader):
        self.catalog = replace(reader.catalog.take(np.zeros(3, dtype=np.int64)), keys=("w",))
        self.reader, self.events, self.rows = reader, [], [np.zeros(SIZE, dtype=np.uint8) for _ in range(3)]

    def portions(self, rows):
        return [(row, row + 1) for row in rows.tolist()]

    def advance(self, row):
        self.events.append(("advance", row, self.reader.hashing_begun - self.reader.hashing_done))

    def host_storage(self, row):
        return self.rows[row]

    def piece_done(self, row):
        self.events.append(("done", row))

    def pieces_done(self, rows):
        assert not len(rows)


def test_a_piece_has_arrived_when_its_last_block_is_verified(stored, monkeypatch):
    with FileReader(stored.directory, stored.manifest) as reader:
        memory = Memory(reader)
        read_pieces(reader, pieces(), memory, computes=False)
        assert memory.events == [("done", 0), ("done", 1), ("done", 2)]
        assert reader.hashing_begun == reader.hashing_done == 3 * 5
    assert all(row.tobytes() == stored.values[0].tobytes() for row in memory.rows)
    flip(stored.file(0), begin_of(stored, 0) + 7 * BLOCK)
    with FileReader(stored.directory, stored.manifest, use_replicas=False) as reader:
        memory = Memory(reader)
        with pytest.raises(CorruptCheckpointError):
            read_pieces(reader, pieces(), memory, computes=False)
        assert memory.events == []


def test_nothing_is_computed_from_what_is_not_verified(stored):
    with FileReader(stored.directory, stored.manifest) as reader:
        memory = Memory(reader)
        read_pieces(reader, pieces(), memory, computes=True)
    assert memory.events == [
        event for row in range(3) for event in ((("done", row - 1),) if row else ()) + (("advance", row, 0),)
    ] + [("done", 2)]
