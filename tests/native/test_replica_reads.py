"""Reading replicas where a copy is damaged: right bytes, each way of damage, and what it costs."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.native import read_planner, row_files
from paddle_flexckpt.native.reader import FileReader
from tests.native.samples import TOKEN, Stored, flip, store, whole
from tests.property.layouts import Shard

ROWS, COLUMNS, BLOCK = 64, 40, 256
SIZE = ROWS * COLUMNS


@pytest.fixture(autouse=True)
def block_by_block(monkeypatch):
    """So that what is read in vain is known to the byte; test_row_files has the other way."""
    monkeypatch.setattr(read_planner, "BLOCKS_AT_ONCE", 1)
    monkeypatch.setattr(row_files, "MOST_THREADS", 1)


@pytest.fixture
def stored(tmp_path) -> Stored:
    """A tensor that ranks 0, 1 and 2 have written whole, and one that only rank 0 has."""
    shards = [whole("w", "uint8", (ROWS, COLUMNS), rank) for rank in (0, 1, 2)]
    return store(tmp_path, [shards[0], whole("alone", "uint8", (SIZE,)), *shards[1:]], block_bytes=BLOCK)


A, ALONE, B, C = range(4)  # rows; their files are 0, 0, 1 and 2
ALL = StridedCopy((SIZE,), 0, (1,), 0, (1,))
COLUMN = StridedCopy((ROWS, 3), 5, (COLUMNS, 1), 0, (3, 1))


def begin_of(stored: Stored, row: int) -> int:
    return int(stored.manifest.catalog.byte_offset[row])


def read(stored: Stored, copies=(ALL,), row: int = A, **options):
    """Reads copies one after the other; gives what is in the targets, and the reader."""
    targets = []
    with FileReader(stored.directory, stored.manifest, **options) as reader:
        reader.check_files(np.asarray([row]))
        for copy in copies:
            targets.append(np.full(copy.size, 0xEE, dtype=np.uint8))
            reader.read(row, copy, targets[-1])
    return targets, reader


def expected(stored: Stored, copy: StridedCopy) -> bytes:
    return copy.gather_from(stored.values[A]).tobytes()


def cut_short(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    with path.open("ab") as stream:
        stream.write(b"x")


def change_token(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(TOKEN.encode(), b"f" * len(TOKEN), 1))


FILES = {
    "missing": (os.unlink, "is missing; the manifest names it"),
    "short": (cut_short, "bytes; expected"),
    "long": (lengthen, "bytes; expected"),
    "foreign": (change_token, "belongs to another save"),
}


@pytest.mark.parametrize("verify", ["read", "full", "off"])
@pytest.mark.parametrize("copy", [ALL, COLUMN], ids=["whole", "column"])
@pytest.mark.parametrize("damage", FILES)
def test_a_file_that_is_not_as_it_was_is_not_read(stored, damage, copy, verify):
    change, what = FILES[damage]
    change(stored.file(0))
    (target,), reader = read(stored, [copy], verify=verify)
    assert target.tobytes() == expected(stored, copy)
    (key,) = reader.replicas_used
    text = reader.replicas_used[key]
    assert key == "w"
    assert text.startswith(str(stored.file(0)))
    assert what in text
    assert text.endswith(f"read from file {str(stored.file(1))!r}, key 'w', saved by rank 1 instead")
    assert reader.count.files == {stored.file(1).name}
    # It costs no byte: the replica is read as the copy would have been.
    clean = FileReader(stored.directory, stored.manifest, verify)
    with clean:
        clean.read(C, copy, np.zeros(copy.size, dtype=np.uint8))
    for name in ("bytes_read", "bytes_verified", "bytes_extra", "reads"):
        assert getattr(reader.count, name) == getattr(clean.count, name)
    # What has no replica is an error as before, as is everything without the permission; before anything is read.
    for row, options in ((ALONE, {}), (A, {"use_replicas": False})):
        with (
            FileReader(stored.directory, stored.manifest, verify, **options) as other,
            pytest.raises(CorruptCheckpointError) as caught,
        ):
            other.check_files(np.asarray([row]))
        assert what in str(caught.value)
        assert "partly overwritten" not in str(caught.value)
        assert "replica" not in str(caught.value)
        assert other.count.bytes_read == 0


@pytest.mark.parametrize("copy", [ALL, COLUMN], ids=["whole", "column"])
def test_a_damaged_block_is_read_from_a_replica(stored, copy):
    bad = 3
    flip(stored.file(0), begin_of(stored, A) + bad * BLOCK + 7, 3)
    (target,), reader = read(stored, [copy])
    assert target.tobytes() == expected(stored, copy)
    text = reader.replicas_used["w"]
    assert list(reader.replicas_used) == ["w"]
    for words in (f"file {str(stored.file(0))!r}, key 'w', saved by rank 0: bytes {bad * BLOCK} to {(bad + 1) * BLOCK}",
                  "are damaged: expected xxh3", f"read from file {str(stored.file(1))!r}"):  # fmt: skip
        assert words in text
    assert "Remedy" not in text
    assert "partly" not in text
    # One block was read in vain; all that is in the target is verified.
    count = reader.count
    assert count.bytes_read == SIZE + BLOCK
    assert count.bytes_verified >= SIZE
    assert count.bytes_extra == count.bytes_read - copy.size
    assert count.files == {stored.file(0).name, stored.file(1).name}


def test_nothing_of_a_damaged_block_stays_in_the_target(stored):
    begin = begin_of(stored, A)
    content = bytearray(stored.file(0).read_bytes())
    content[begin : begin + SIZE] = bytes(255 - value for value in content[begin : begin + SIZE])
    stored.file(0).write_bytes(content)
    (target,), reader = read(stored, verify="read")
    assert target.tobytes() == stored.values[A].tobytes()
    # Once a copy is known to be damaged, it is read no more: one block in vain.
    assert reader.count.bytes_read == SIZE + BLOCK
    assert reader.count.bytes_extra == BLOCK


@pytest.mark.parametrize("verify", ["read", "full"])
def test_copies_that_are_damaged_in_different_places_make_a_whole(stored, verify):
    stored.file(2).unlink()
    for block, row in ((1, A), (4, B), (6, A), (8, B)):
        flip(stored.file(0 if row == A else 1), begin_of(stored, row) + block * BLOCK)
    copies = [ALL, COLUMN, StridedCopy((BLOCK,), BLOCK // 2, (1,), 0, (1,))]
    targets, reader = read(stored, copies, verify=verify)
    for target, copy in zip(targets, copies):
        assert target.tobytes() == expected(stored, copy)
    text = reader.replicas_used["w"]
    assert f"{str(stored.file(0))!r}, key 'w', saved by rank 0: bytes 256 to 512" in text
    assert f"{str(stored.file(1))!r}, key 'w', saved by rank 1: bytes 1024 to 1280" in text
    # Four blocks fail in either pass. Those before the first damage were verified where they are, and then again.
    assert reader.count.bytes_extra >= 8 * BLOCK


def test_a_block_that_is_damaged_everywhere_is_an_error_that_names_all_copies(stored):
    for row, file in ((A, 0), (B, 1), (C, 2)):
        flip(stored.file(file), begin_of(stored, row) + 5 * BLOCK + row)
    with pytest.raises(CorruptCheckpointError) as caught:
        read(stored, verify="full")
    text = str(caught.value)
    for file in (0, 1, 2):
        assert (
            f"file {str(stored.file(file))!r}, key 'w', saved by rank {file}: bytes 1280 to 1536 of the shard" in text
        )
    assert text.count("nor can its replica be read: ") == 2
    assert text.count("Remedy (FC") == 1
    assert "Targets are partly overwritten. Remedy (FC305): load another checkpoint" in text


def test_files_that_are_all_gone_are_an_error_before_anything_is_touched(stored):
    stored.file(0).unlink()
    cut_short(stored.file(1))
    change_token(stored.file(2))
    with FileReader(stored.directory, stored.manifest) as reader, pytest.raises(CorruptCheckpointError) as caught:
        reader.check_files(np.asarray([A]))
    text = str(caught.value)
    for file, what in ((0, "is missing"), (1, "bytes; expected"), (2, "belongs to another save")):
        assert what in text
        assert str(stored.file(file)) in text
    assert "partly overwritten" not in text


def test_without_permission_a_damaged_block_is_the_error_that_it_was(stored):
    flip(stored.file(0), begin_of(stored, A))
    with pytest.raises(CorruptCheckpointError) as caught:
        read(stored, use_replicas=False)
    assert "replica" not in str(caught.value)
    assert "bytes 0 to 256 of the shard" in str(caught.value)
    assert str(caught.value).endswith("Targets are partly overwritten. Remedy (FC305): load another checkpoint")


def test_damage_is_not_noticed_where_nothing_is_verified(stored):
    flip(stored.file(0), begin_of(stored, A) + 3 * COLUMNS + 5)
    (target,), reader = read(stored, [COLUMN], verify="off")
    assert target.tobytes() != expected(stored, COLUMN)
    assert reader.replicas_used == {}


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("copy", [ALL, StridedCopy((BLOCK,), BLOCK // 2, (1,), 0, (1,))], ids=["blocks", "part"])
@pytest.mark.parametrize("verify", ["read", "full", "off"])
def test_a_read_that_fails_is_done_elsewhere(stored, monkeypatch, verify, copy, error):
    preadv = os.preadv
    begin = begin_of(stored, A)

    def failing(descriptor, buffers, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(stored.file(0)) and offset >= begin + BLOCK // 2:
            raise OSError(error, os.strerror(error))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    (target,), reader = read(stored, [copy], verify=verify)
    assert target.tobytes() == expected(stored, copy)
    assert (
        f"{str(stored.file(0))!r}, key 'w', saved by rank 0: {os.strerror(error)}; read from"
        in reader.replicas_used["w"]
    )
    with pytest.raises(OSError, match=os.strerror(error)):
        read(stored, [copy], verify=verify, use_replicas=False)
    with pytest.raises(OSError, match=os.strerror(error)):
        read(stored, [StridedCopy((BLOCK,), BLOCK // 2, (1,), 0, (1,))], ALONE, verify=verify)


def test_a_file_that_ends_while_it_is_read_is_left_for_a_replica(stored, monkeypatch):
    preadv = os.preadv

    def ending(descriptor, buffers, offset):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return 0 if path == str(stored.file(0)) else preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", ending)
    (target,), reader = read(stored)
    assert target.tobytes() == expected(stored, ALL)
    assert f"the file ends at byte {begin_of(stored, A)}; read from" in reader.replicas_used["w"]
    with pytest.raises(CorruptCheckpointError, match="the file ends at byte"):
        read(stored, use_replicas=False)


def test_items_that_differ_are_no_replicas(stored):
    """What a save without comparison may write: the same shard with other values."""
    checksums = stored.manifest.checksums
    values = checksums.values.copy()
    values[checksums.first[B]] ^= np.uint64(1)
    manifest = replace(stored.manifest, checksums=replace(checksums, values=values))
    stored.file(0).unlink()
    (target,), reader = read(replace(stored, manifest=manifest))
    assert target.tobytes() == expected(stored, ALL)
    assert "saved by rank 2 instead" in reader.replicas_used["w"]
    stored.file(2).unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        read(replace(stored, manifest=manifest))


def test_readers_spread_over_the_replicas(stored):
    used = set()
    for row, file in ((A, 0), (B, 1), (C, 2)):
        stored.file(file).rename(stored.directory / "aside")
        _, reader = read(stored, row=row)
        used |= reader.count.files
        (stored.directory / "aside").rename(stored.file(file))
    assert used == {stored.file(index).name for index in range(3)}


def test_many_substitutions_of_one_key_are_told_in_part(tmp_path):
    parts = [Shard("w", "uint8", (8, 4), (i, 0), (1, 4), None, rank) for rank in (0, 1) for i in range(8)]
    stored = store(tmp_path, parts)
    for row in range(8):
        flip(stored.file(0), begin_of(stored, row))
    with FileReader(stored.directory, stored.manifest) as reader:
        for row in range(8):
            target = np.zeros(4, dtype=np.uint8)
            reader.read(row, StridedCopy((4,), 0, (1,), 0, (1,)), target)
            assert target.tobytes() == stored.values[row].tobytes()
    assert reader.replicas_used["w"].count("are damaged") == 3
    assert reader.replicas_used["w"].endswith("; and 5 more")
