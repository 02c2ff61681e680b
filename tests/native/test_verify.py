"""verify_checkpoint: every damaged byte is found and located, and all that is wrong is listed."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.report import VerifyReport
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.native.samples import Stored, flip, store, whole
from tests.property.layouts import Shard

BLOCK = 16


def shards_of_two_ranks() -> list[Shard]:
    return [
        Shard("w", "float32", (6, 5), (0, 0), (3, 5), None, 0),
        Shard("m", "bfloat16", (4, 6), (0, 0), (4, 6), (0, 11), 0),
        whole("scalar", "int64", ()),
        whole("none", "uint8", (0, 3)),
        Shard("w", "float32", (6, 5), (3, 0), (3, 5), None, 1),
        Shard("m", "bfloat16", (4, 6), (0, 0), (4, 6), (11, 24), 1),
        Shard("c", "complex128", (3,), (0,), (3,), None, 1),
        Shard("d", "uint8", (8,), (0,), (5,), None, 1),
        Shard("d", "uint8", (8,), (5,), (3,), None, 1),
    ]


def checkpoint(path, shards: list[Shard] | None = None, block_bytes: int | None = BLOCK, **header) -> Stored:
    """A checkpoint with its manifest."""
    stored = store(path, shards_of_two_ranks() if shards is None else shards, block_bytes, **header)
    open_to_save(str(path)).write_manifest(stored.manifest)
    return stored


def verify(stored: Stored) -> VerifyReport:
    return verify_checkpoint(stored.directory)


def only(report: VerifyReport):
    (problem,) = report.problems
    return problem


def change(path, byte: int, value: int) -> None:
    """Replaces one byte in place."""
    with path.open("r+b") as stream:
        stream.seek(byte)
        stream.write(bytes([value]))


def data_start(stored: Stored, file: int) -> int:
    return int(stored.manifest.catalog.byte_offset[stored.manifest.catalog.file == file].min())


def block_at(stored: Stored, file: int, byte: int) -> tuple[int, int, int]:
    """Row, first byte and end within the file of the block that a byte of a file is in."""
    catalog = stored.manifest.catalog
    begins, ends = catalog.byte_offset, catalog.byte_offset + catalog.byte_length
    (row,) = np.flatnonzero((catalog.file == file) & (begins <= byte) & (byte < ends))
    first = int(begins[row]) + (byte - int(begins[row])) // BLOCK * BLOCK
    return int(row), first, min(first + BLOCK, int(ends[row]))


def test_a_sound_checkpoint_is_read_once_and_has_no_problem(tmp_path, monkeypatch):
    stored = checkpoint(tmp_path, step=7, world_size=2)
    counts = {os.fspath(stored.file(i)): np.zeros(int(stored.manifest.file_bytes[i]), dtype=int) for i in (0, 1)}
    preadv = os.preadv

    def spy(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        counts[os.readlink(f"/proc/self/fd/{descriptor}")][offset : offset + got] += 1
        return got

    monkeypatch.setattr(os, "preadv", spy)
    report = verify(stored)
    assert report.ok
    assert report.problems == []
    assert (report.unique_id, report.files, report.keys, report.items) == (0, 2, 6, 9)
    assert report.bytes_verified == report.total_bytes == sum(values.nbytes for values in stored.values)
    assert report.bytes_read == stored.manifest.file_bytes.sum()
    for index in (0, 1):
        start = data_start(stored, index)
        count = counts[os.fspath(stored.file(index))]
        assert (count[start:] == 1).all()
        assert not count[:start].any()
    assert "nothing is wrong" in report.summary()
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


@pytest.mark.slow
def test_every_one_of_3000_random_changes_is_found_and_located(tmp_path):
    stored = checkpoint(tmp_path, world_size=2)
    generator = np.random.default_rng(5)
    catalog = stored.manifest.catalog
    original = [stored.file(i).read_bytes() for i in (0, 1)]
    in_headers = 0
    for trial in range(3000):
        file = int(generator.integers(2))
        start = data_start(stored, file)
        # Half of the changes in the data, half in the header; half flip one bit, half replace the byte.
        low, high = (0, start) if trial % 2 else (start, len(original[file]))
        byte, old = int(generator.integers(low, high)), 0
        old = original[file][byte]
        new = (
            old ^ (1 << int(generator.integers(8))) if trial % 4 < 2 else (old + int(generator.integers(1, 256))) % 256
        )
        change(stored.file(file), byte, new)
        report = verify(stored)
        change(stored.file(file), byte, old)
        assert not report.ok, (trial, byte, old, new)
        assert {problem.file for problem in report.problems} == {str(stored.file(file))}
        if byte < start:
            in_headers += 1
            assert byte in [problem.offset for problem in report.problems], (byte, old, new, report.problems)
            assert report.bytes_verified == report.total_bytes
        else:
            row, first, end = block_at(stored, file, byte)
            problem = only(report)
            assert (problem.key, problem.rank) == (catalog.key_name(row), catalog.rank[row])
            assert (problem.offset, problem.end) == (first, end)
            begin = int(catalog.byte_offset[row])
            assert f"bytes {first - begin} to {end - begin} of the shard are damaged" in problem.what
            assert report.bytes_verified == report.total_bytes - (end - first)
    assert in_headers == 1500
    assert verify(stored).ok


def test_all_of_many_damages_are_listed(tmp_path):
    stored = checkpoint(tmp_path)
    generator = np.random.default_rng(6)
    original = [stored.file(i).read_bytes() for i in (0, 1)]
    for _ in range(300):
        damaged: set[tuple[int, int, int]] = set()
        for _ in range(int(generator.integers(2, 9))):
            file = int(generator.integers(2))
            byte = int(generator.integers(data_start(stored, file), len(original[file])))
            change(stored.file(file), byte, original[file][byte] ^ 0x5A)
            damaged.add(block_at(stored, file, byte))
        report = verify(stored)
        for file in (0, 1):
            stored.file(file).write_bytes(original[file])
        assert report.bytes_verified == report.total_bytes - sum(end - first for _, first, end in damaged)
        catalog = stored.manifest.catalog
        begin = catalog.byte_offset.tolist()
        # Neighbours with the same fault are one problem.
        expected = {(row, first) for row, first, _ in damaged} - {(row, end) for row, _, end in damaged}
        assert len(report.problems) == len(expected)
        assert {(p.key, p.offset) for p in report.problems} == {(catalog.key_name(row), at) for row, at in expected}
        for row, first in expected:
            end = first
            while (row, end) in {(r, f) for r, f, _ in damaged}:
                end = next(e for r, f, e in damaged if (r, f) == (row, end))
            text = f"bytes {first - begin[row]} to {end - begin[row]} of the shard"
            assert any(text in p.what and p.offset == first for p in report.problems)


@pytest.mark.slow
def test_truncated_files_are_found_and_what_is_left_is_verified(tmp_path):
    stored = checkpoint(tmp_path)
    original = stored.file(1).read_bytes()
    catalog = stored.manifest.catalog
    rows = np.flatnonzero(catalog.file == 1)
    ends = catalog.byte_offset + catalog.byte_length
    before = int(catalog.byte_length[catalog.file == 0].sum())
    for size in range(len(original)):
        os.truncate(stored.file(1), size)
        report = verify(stored)
        stored.file(1).write_bytes(original)
        first, *others = report.problems
        assert (first.what, first.rank, first.offset) == ("a file is shorter than it was", 1, size)
        assert first.end == len(original)
        assert f"expected {len(original)} bytes; got {size} bytes" in str(first)
        cut = {catalog.key_name(row) for row in rows if ends[row] > size}
        assert {problem.key for problem in others if "are not there" in problem.what} == cut
        whole_blocks = sum(
            min(BLOCK, length - at)
            for begin, length in zip(catalog.byte_offset[rows].tolist(), catalog.byte_length[rows].tolist())
            for at in range(0, length, BLOCK)
            if begin + min(at + BLOCK, length) <= size
        )
        assert report.bytes_verified == before + whole_blocks


def test_a_longer_file_is_found(tmp_path):
    stored = checkpoint(tmp_path)
    size = stored.file(0).stat().st_size
    with stored.file(0).open("ab") as stream:
        stream.write(b"x")
    problem = only(verify(stored))
    assert (problem.what, problem.offset, problem.got) == ("a file is longer than it was", size, f"{size + 1} bytes")


def test_missing_files_are_all_listed(tmp_path):
    stored = checkpoint(tmp_path)
    for index in (0, 1):
        stored.file(index).unlink()
    report = verify(stored)
    assert [(p.what, p.rank, p.file) for p in report.problems] == [
        ("a file that the manifest names is missing", rank, str(stored.file(rank))) for rank in (0, 1)
    ]
    assert report.bytes_read == report.bytes_verified == 0


def test_files_of_two_ranks_that_changed_places_are_found(tmp_path):
    # The files have the same size, items and save token; only the offsets in their headers tell them apart.
    stored = checkpoint(tmp_path, [Shard("w", "uint8", (8, 4), (4 * r, 0), (4, 4), None, r) for r in (0, 1)])
    first, second = stored.file(0).read_bytes(), stored.file(1).read_bytes()
    assert len(first) == len(second)
    stored.file(0).write_bytes(second)
    stored.file(1).write_bytes(first)
    report = verify(stored)
    for index in (0, 1):
        mine = [problem for problem in report.problems if problem.file == str(stored.file(index))]
        assert [problem.what for problem in mine] == [
            "the header describes 'w' otherwise than the manifest",
            "bytes 0 to 16 of the shard are damaged",
        ]
        assert {(problem.key, problem.rank) for problem in mine} == {("w", index)}


def test_another_saves_file_is_one_problem(tmp_path):
    stored = checkpoint(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    theirs = store(other, shards_of_two_ranks(), save_token="f" * 32)
    start = data_start(theirs, 0)
    data = theirs.file(0).read_bytes()
    stored.file(0).write_bytes(data[:start] + bytes(255 - value for value in data[start:]))
    problem = only(verify(stored))
    assert problem.what == "the header has another save_token: another save's file"
    assert (problem.rank, problem.file, problem.expected, problem.got) == (
        0, str(stored.file(0)), stored.manifest.save_token, "f" * 32,
    )  # fmt: skip


def test_a_manifest_of_another_save_is_named(tmp_path):
    stored = checkpoint(tmp_path)
    checksums = replace(stored.manifest.checksums, values=stored.manifest.checksums.values ^ np.uint64(1))
    theirs = replace(stored.manifest, save_token="f" * 32, checksums=checksums)
    (tmp_path / "0.manifest").write_bytes(theirs.encode())
    *others, doubt = verify(stored).problems
    assert [problem.file for problem in others] == [str(stored.file(0)), str(stored.file(1))]
    assert doubt.what == "no data file is of the save that this manifest belongs to"
    assert (doubt.file, doubt.expected, doubt.got) == (
        str(tmp_path / "0.manifest"), stored.manifest.save_token, "f" * 32,
    )  # fmt: skip


def test_a_manifest_of_an_earlier_save_is_named(tmp_path):
    stored = checkpoint(tmp_path)
    for index in (0, 1):
        os.rename(stored.file(index), tmp_path / f"{index}_0.1.safetensors")
    *others, doubt = verify(stored).problems
    assert [problem.what for problem in others] == ["a file that the manifest names is missing"] * 2
    assert "others of its id are there" in doubt.what
    assert (doubt.file, doubt.got) == (str(tmp_path / "0.manifest"), "0_0.1.safetensors, 1_0.1.safetensors")


def test_a_header_that_says_the_same_in_other_bytes_is_damaged(tmp_path):
    stored = checkpoint(tmp_path)
    content = stored.file(1).read_bytes()
    at = content.index(b'\\"key\\": ') + len(b'\\"key\\"')
    stored.file(1).write_bytes(content[:at] + b" :" + content[at + 2 :])
    problem = only(verify(stored))
    assert problem.what == "the header says the same in other bytes"
    assert (problem.file, problem.rank, problem.offset, problem.end) == (
        str(stored.file(1)),
        1,
        at,
        data_start(stored, 1),
    )


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_is_no_file_is_a_problem_and_the_rest_is_verified(tmp_path, make):
    stored = checkpoint(tmp_path)
    stored.file(0).unlink()
    make(stored.file(0))
    report = verify(stored)
    assert (only(report).file, only(report).rank) == (str(stored.file(0)), 0)
    assert "is not a regular file" in str(only(report).got)
    assert report.bytes_verified == stored.manifest.catalog.byte_length[stored.manifest.catalog.file == 1].sum()


REMEDY = "restore the file from a copy, or load another checkpoint"


def test_what_has_intact_replicas_is_recoverable(tmp_path):
    held = [whole("w", "uint8", (40,)), whole("v", "int64", (3,))]
    stored = checkpoint(tmp_path, [replace(shard, rank=rank) for rank in (0, 1) for shard in held])
    originals = [stored.file(index).read_bytes() for index in (0, 1)]
    row = {(shard.key, shard.rank): i for i, shard in enumerate(stored.shards)}

    def damage(key: str, rank: int, byte: int) -> None:
        flip(stored.file(rank), int(stored.manifest.catalog.byte_offset[row[key, rank]]) + byte)

    def report_after(*changes):
        for index in (0, 1):
            stored.file(index).write_bytes(originals[index])
        for change in changes:
            change()
        return verify(stored)

    assert report_after().recoverable
    until = f"{REMEDY}; until then, a load reads the intact replica in "
    # A block.
    report = report_after(lambda: damage("w", 0, 20))
    assert (only(report).remedy, report.recoverable, report.ok) == (until + "1_0.safetensors", True, False)
    assert "1 problem, in spite of which everything can be loaded" in report.summary()
    assert report.as_dict()["recoverable"] is True
    # Two blocks that follow each other, of which the replica has one.
    report = report_after(lambda: damage("w", 0, 0), lambda: damage("w", 0, 20), lambda: damage("w", 1, 20))
    assert ([p.remedy for p in report.problems], report.recoverable) == ([REMEDY, REMEDY], False)
    assert "in spite of which" not in report.summary()
    # Different blocks.
    report = report_after(lambda: damage("w", 0, 0), lambda: damage("w", 1, 20))
    assert [p.remedy for p in report.problems] == [until + "1_0.safetensors", until + "0_0.safetensors"]
    assert report.recoverable
    # A file, with the other whole, and with a block of the other damaged.
    report = report_after(lambda: stored.file(1).unlink())
    assert (only(report).remedy, report.recoverable) == (until + "0_0.safetensors", True)
    report = report_after(lambda: os.truncate(stored.file(1), 300), lambda: damage("v", 0, 4))
    assert not report.recoverable
    assert {p.remedy for p in report.problems if p.key in (None, "v")} == {REMEDY}
    assert {p.remedy for p in report.problems if p.key == "w"} == {until + "0_0.safetensors"}
    # A header: no load needs it.
    report = report_after(lambda: flip(stored.file(0), len(originals[0]) // 2))
    assert (only(report).remedy, report.recoverable) == (REMEDY, True)
    # A manifest, wherever it is damaged; the digit of the format's version too, which is no newer library's.
    manifest = (tmp_path / "0.manifest").read_bytes()
    for byte in (60, manifest.index(b'"format_version":"') + len(b'"format_version":"')):
        assert not report_after(lambda byte=byte: flip(tmp_path / "0.manifest", byte)).recoverable
        (tmp_path / "0.manifest").write_bytes(manifest)


def test_items_with_other_checksums_are_no_replicas(tmp_path):
    stored = checkpoint(tmp_path, [whole("w", "uint8", (40,), rank) for rank in (0, 1)])
    checksums = stored.manifest.checksums
    values = checksums.values.copy()
    values[checksums.first[1] :] ^= np.uint64(1)
    manifest = replace(stored.manifest, checksums=replace(checksums, values=values))
    (tmp_path / "0.manifest").write_bytes(manifest.encode())
    stored.file(0).unlink()
    report = verify(stored)
    assert not report.recoverable
    assert {problem.remedy for problem in report.problems} == {REMEDY}


def test_a_damaged_token_in_a_file_that_is_right_otherwise_is_one_problem_too(tmp_path):
    stored = checkpoint(tmp_path)
    at = stored.file(0).read_bytes().index(stored.manifest.save_token.encode())
    flip(stored.file(0), at + 3)
    report = verify(stored)
    assert only(report).offset == at + 3
    assert report.bytes_verified == report.total_bytes


def test_every_change_of_the_manifest_is_found(tmp_path):
    stored = checkpoint(tmp_path)
    path = tmp_path / "0.manifest"
    data = path.read_bytes()
    generator = np.random.default_rng(7)
    for _ in range(1000):
        byte = int(generator.integers(len(data)))
        change(path, byte, (data[byte] + int(generator.integers(1, 256))) % 256)
        problem = only(verify(stored))
        assert problem.file == str(path)
        assert "the manifest is damaged" in problem.what
        assert "repair" in problem.remedy
        path.write_bytes(data)
    assert verify(stored).ok


def test_holes_are_found_though_every_byte_is_as_written(tmp_path):
    stored = checkpoint(tmp_path, [Shard("w", "uint8", (8, 4), (0, 0), (5, 4), None, 0)])
    report = verify(stored)
    assert only(report).key == "w"
    assert "no rank holds" in only(report).what
    assert not report.recoverable
    assert report.bytes_verified == 20


def test_bytes_that_belong_to_no_shard_are_found(tmp_path):
    stored = store(tmp_path, [whole("a", "uint8", (16,)), whole("b", "uint8", (16,)), whole("c", "uint8", (16,))])
    catalog = stored.manifest.catalog
    kept = np.asarray([0, 2])
    manifest = replace(
        stored.manifest,
        catalog=catalog.take(kept),
        checksums=replace(stored.manifest.checksums, values=stored.manifest.checksums.values[kept], first=np.arange(3)),
    )
    (tmp_path / "0.manifest").write_bytes(manifest.encode())
    report = verify(stored)
    at = int(catalog.byte_offset[1])
    gap = next(problem for problem in report.problems if "belong to none" in problem.what)
    assert (gap.key, gap.offset, gap.expected, gap.got) == ("c", at, f"byte {at}", f"byte {at + 16}")
    assert any("describes 'b' otherwise" in problem.what for problem in report.problems)


def test_what_cannot_be_read_is_a_problem_and_the_rest_is_verified(tmp_path, monkeypatch):
    stored = checkpoint(tmp_path)
    begin = int(stored.manifest.catalog.byte_offset[0])
    preadv = os.preadv

    def failing(descriptor, buffers, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(stored.file(0)) and begin + 16 <= offset < begin + 48:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    report = verify(stored)
    problem = only(report)
    assert (problem.key, problem.offset, problem.got) == ("w", begin + 16, "Input/output error")
    assert "bytes 16 to 48 of the shard cannot be read" in problem.what
    assert report.bytes_verified == report.total_bytes - 32


def test_one_block_is_in_memory_at_a_time(tmp_path):
    stored = checkpoint(tmp_path, [whole("w", "uint8", (12 << 20,))], block_bytes=None)
    stored.values.clear()
    tracemalloc.start()
    try:
        report = verify(stored)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.ok
    assert report.bytes_verified == 12 << 20
    assert peak < 2 << 20


def test_an_id_is_chosen(tmp_path):
    for unique_id in (3, 4):
        checkpoint(tmp_path, unique_id=unique_id)
    flip(tmp_path / "0_3.safetensors", (tmp_path / "0_3.safetensors").stat().st_size - 1)
    assert verify_checkpoint(tmp_path).ok
    assert verify_checkpoint(tmp_path).unique_id == 4
    assert not verify_checkpoint(tmp_path, 3).ok
    with pytest.raises(ValidationError, match="no checkpoint with id 9"):
        verify_checkpoint(tmp_path, 9)
    with pytest.raises(CheckpointError, match="does not exist"):
        verify_checkpoint(tmp_path / "nowhere")


def test_an_empty_checkpoint_is_sound(tmp_path):
    stored = checkpoint(tmp_path, [whole("none", "uint8", (0,))])
    assert verify(stored).ok
    assert isinstance(stored.manifest, Manifest)


@pytest.mark.parametrize("byte", [3, 8, 30, -40])
def test_reports_of_damaged_headers_are_json_safe(tmp_path, byte):
    stored = checkpoint(tmp_path)
    flip(stored.file(), byte if byte >= 0 else data_start(stored, 0) + byte)
    report = verify(stored)
    assert json.loads(json.dumps(report.as_dict()))["problems"][0]["file"] == str(stored.file())
