"""Blocks that one rank of a host has verified for the others."""

from __future__ import annotations

import errno
import itertools
import os
import threading

import numpy as np
import pytest

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.media.local import LocalInputFile
from paddle_flexckpt.native import block_checks
from paddle_flexckpt.native.checksums import hash_block
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.verdicts import Verdicts, fingerprints
from tests.native.samples import flip, store, whole

BLOCK, BLOCKS = 256, 12


@pytest.fixture
def tables():
    made = [Verdicts(BLOCKS) for _ in range(3)]
    yield made
    for table in made:
        table.close()


def share(tables):
    addresses = [table.address for table in tables]
    for table in tables:
        table.share(addresses)


def test_what_one_notes_the_others_have(tables):
    share(tables)
    tables[1].note(77)
    assert [table.has(77) for table in tables] == [True] * 3
    assert [(table.position, table.sharers) for table in tables] == [(0, 3), (1, 3), (2, 3)]
    assert not tables[0].has(78)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
def test_each_begins_with_a_share_of_its_own(tables, count):
    share(tables)
    orders = [table.order(count) for table in tables]
    assert all(sorted(order) == [*range(count)] for order in orders)
    own = [order[: count * (i + 1) // 3 - count * i // 3] for i, order in enumerate(orders)]
    assert sorted(itertools.chain(*own)) == [*range(count)]


@pytest.mark.parametrize("kind", ["gone", "another", "foreign process"])
def test_a_table_that_cannot_be_opened_leaves_a_rank_alone(tables, kind):
    first = tables[0].address
    if kind == "gone":
        tables[0].close()
    elif kind == "another":
        first = tables[2].address.rpartition(b" ")[0] + b" " + bytes(16)
    else:
        first = b"4194305 3 " + bytes(16)
    tables[1].share([first, tables[1].address])
    tables[1].note(77)
    assert (tables[1].position, tables[1].sharers, tables[2].has(77)) == (0, 1, False)


def test_blocks_have_different_fingerprints():
    digests = np.asarray([hash_block(b"%d" % number) for number in range(64)], dtype=np.uint64)
    file, offset = (each.ravel() for each in np.meshgrid(digests, np.arange(1000) * 100))
    found = fingerprints(file, offset, np.zeros(len(file), dtype=np.uint64))
    assert len({*found}) == len(found)
    assert 0 not in found


def column(rows, columns, low, high):
    return StridedCopy((rows, high - low), low, (columns, 1), 0, (high - low, 1))


def test_ranks_of_a_host_compare_each_block_once(tmp_path, monkeypatch, tables):
    """Each of three readers wants other columns of one tensor. They go in turns, as the worst case of a fair one."""
    rows = BLOCK * BLOCKS // 48
    stored = store(tmp_path, [whole("w", "uint8", (rows, 48))], block_bytes=BLOCK)
    hashed, hash_block = [], block_checks.hash_block
    monkeypatch.setattr(block_checks, "hash_block", lambda block: hashed.append(len(block)) or hash_block(block))
    share(tables)
    for number, table in enumerate(tables):
        with FileReader(str(tmp_path), stored.manifest) as reader:
            reader.checks.verdicts = table
            target = np.zeros(rows * 16, dtype=np.uint8)
            reader.read(0, column(rows, 48, 16 * number, 16 * number + 16), target)
            assert target.tobytes() == stored.values[0].reshape(rows, 48)[:, 16 * number :][:, :16].tobytes()
            assert (reader.count.bytes_read, reader.count.bytes_verified) == (rows * 16, rows * 48)
    assert hashed.count(BLOCK) * BLOCK == rows * 48


def test_damage_is_found_by_each_rank_that_needs_the_block(tmp_path, tables):
    stored = store(tmp_path, [whole("w", "uint8", (64, 48))], block_bytes=BLOCK)
    flip(stored.file(), int(stored.manifest.catalog.byte_offset[0]) + 5 * BLOCK)
    share(tables)
    for table in tables:
        with FileReader(str(tmp_path), stored.manifest) as reader, pytest.raises(CorruptCheckpointError, match="xxh3"):
            reader.checks.verdicts = table
            reader.read(0, column(64, 48, 0, 16), np.zeros(64 * 16, dtype=np.uint8))


def test_what_is_known_of_a_file_is_not_taken_for_another_of_its_name(tmp_path, tables):
    """The first reader has the damaged file open, and the second one its mended successor."""
    stored = store(tmp_path, [whole("w", "uint8", (64, 48))], block_bytes=BLOCK)
    share(tables)
    intact, target = stored.file().read_bytes(), np.zeros(64 * 16, dtype=np.uint8)
    flip(stored.file(), int(stored.manifest.catalog.byte_offset[0]))
    with FileReader(str(tmp_path), stored.manifest) as first, FileReader(str(tmp_path), stored.manifest) as second:
        first.checks.verdicts, second.checks.verdicts = tables[:2]
        first.check_files(np.asarray([0]))
        (tmp_path / "mended").write_bytes(intact)
        (tmp_path / "mended").replace(stored.file())
        second.read(0, column(64, 48, 0, 16), target)
        with pytest.raises(CorruptCheckpointError, match="xxh3"):
            first.read(0, column(64, 48, 0, 16), target)


def test_a_file_that_is_replaced_while_it_is_closed_is_an_error(tmp_path):
    stored = store(tmp_path, [whole("w", "uint8", (64, 48))], block_bytes=BLOCK)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        target = np.zeros(64 * 16, dtype=np.uint8)
        reader.read(0, column(64, 48, 0, 16), target)
        reader.files._files.clear()  # as if many others had been opened since
        reader.files._maps.clear()
        (tmp_path / "other").write_bytes(stored.file().read_bytes())
        flip(tmp_path / "other", int(stored.manifest.catalog.byte_offset[0]))
        (tmp_path / "other").replace(stored.file())
        with pytest.raises(CorruptCheckpointError, match="has changed since it was first opened"):
            reader.read(0, column(64, 48, 0, 16), target)


def test_a_file_that_cannot_be_mapped_is_read_in_whole_blocks_and_is_not_damaged(tmp_path, monkeypatch):
    def refuse(file):
        raise OSError(errno.ENODEV, "no maps here")

    monkeypatch.setattr(LocalInputFile, "memory_map", refuse)
    stored = store(tmp_path, [whole("w", "uint8", (64, 48))], block_bytes=BLOCK)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        target = np.zeros(64 * 16, dtype=np.uint8)
        reader.read(0, column(64, 48, 0, 16), target)
        assert target.tobytes() == stored.values[0].reshape(64, 48)[:, :16].tobytes()
        assert (reader.damaged_files, reader.count.bytes_verified) == ([], 64 * 48)


def test_threads_count_a_block_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    stored = store(tmp_path, [whole("w", "uint8", (64, 48))], block_bytes=BLOCK)
    barrier, done = threading.Barrier(4), []
    with FileReader(str(tmp_path), stored.manifest) as reader:
        whole_range = np.asarray([0]), np.asarray([0]), np.asarray([64 * 48])

        def work():
            barrier.wait(60)
            done.append(bool(reader.may_read_parts(*whole_range)[0]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [True] * 4
        assert reader.count.bytes_verified == 64 * 48
