"""Reading: exactly the bytes that are needed, and every damaged one found and named."""

from __future__ import annotations

import math
import mmap
import os
import resource
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, dtype_of
from paddle_flexckpt.native import read_planner, row_files
from paddle_flexckpt.native.read_planner import BLOCKS_AT_ONCE
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.row_files import RowFiles
from paddle_flexckpt.planning.exchange_plan import plan_read
from paddle_flexckpt.planning.matching import ShardMatcher
from tests.native.samples import flip, size_of, store, whole
from tests.property import examples
from tests.property.layouts import Pick, Shard, catalog_of, elements, grid
from tests.ramdisk import memory_directory


class Ranges:
    """Records the (offset, length) of every ``os.preadv`` and of every mapped copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[str, int, int]] = []
        self.mapped = 0
        preadv, copy_mapped = os.preadv, RowFiles.copy_mapped

        def spy(descriptor, buffers, offset):
            got = preadv(descriptor, buffers, offset)
            self.read.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), offset, got))
            return got

        def spy_mapped(files, *args):
            before = files.count.bytes_read
            copied = copy_mapped(files, *args)
            self.mapped += files.count.bytes_read - before
            return copied

        monkeypatch.setattr(os, "preadv", spy)
        monkeypatch.setattr(RowFiles, "copy_mapped", spy_mapped)

    def mask(self, stored) -> dict[str, np.ndarray]:
        """How often each byte of each file was read by ``preadv``."""
        counts = {name: np.zeros(size, dtype=np.int64) for name, size in
                  zip(stored.manifest.catalog.files, stored.manifest.file_bytes)}  # fmt: skip
        for name, offset, length in self.read:
            counts[name][offset : offset + length] += 1
        return counts


def needed_mask(stored, targets: list[Shard]) -> dict[str, np.ndarray]:
    """Which bytes of the files hold elements of the targets."""
    catalog = stored.manifest.catalog
    masks = {name: np.zeros(size, dtype=np.int64) for name, size in zip(catalog.files, stored.manifest.file_bytes)}
    for row, shard in enumerate(stored.shards):
        wanted = [elements(target) for target in targets if target.key == shard.key]
        if wanted and shard.size:
            hit = np.isin(elements(shard), np.concatenate(wanted))
            itemsize = dtype_of(shard.dtype).itemsize
            begin = int(catalog.byte_offset[row])
            masks[catalog.file_name(row)][begin : begin + len(hit) * itemsize] += np.repeat(hit, itemsize)
    return masks


def read_targets(stored, targets: list[Shard], **options) -> tuple[list[np.ndarray], FileReader]:
    wanted = catalog_of(targets)
    plan = plan_read(ShardMatcher(stored.manifest.catalog), wanted)
    memory = [np.zeros(target.size, dtype=dtype_of(target.dtype).numpy) for target in targets]
    with FileReader(str(stored.directory), stored.manifest, **options) as reader:
        for piece, copy in enumerate(plan.pieces.copies()):
            reader.read(int(plan.pieces.source[piece]), copy, memory[int(plan.pieces.target[piece])])
    return memory, reader


def whole_of(stored, key: str) -> np.ndarray:
    """A tensor put together from its stored shards."""
    shards = [(shard, values) for shard, values in zip(stored.shards, stored.values) if shard.key == key]
    full = np.zeros(size_of(shards[0][0].global_shape), dtype=shards[0][1].dtype)
    for shard, values in shards:
        full[elements(shard)] = values
    return full


@pytest.mark.parametrize("min_pread", [1, 16 << 10], ids=["preads", "maps"])
@examples(100)
@given(st.data())
def test_exactly_the_needed_bytes_are_read_each_once(min_pread, data):
    pick = Pick.from_draw(data.draw)
    shape = pick.shape(4, 6)
    dtype = pick.choice(("uint8", "bfloat16", "float32", "complex128"))
    cells = grid(pick, shape)
    stored_shards = [Shard("w", dtype, shape, offset, box, None, i % 2) for i, (offset, box) in enumerate(cells)]
    if pick.integer(0, 1):  # the first cell is stored as two flattened ranges
        first = stored_shards.pop(0)
        cut = pick.integer(0, math.prod(first.shape))
        stored_shards += [replace(first, flat=(0, cut)), replace(first, flat=(cut, math.prod(first.shape)))]
    stored_shards.sort(key=lambda shard: shard.rank)
    offset = tuple(pick.integer(0, extent - 1) for extent in shape)
    box = tuple(pick.integer(1, extent - low) for low, extent in zip(offset, shape))
    flat = None
    if pick.integer(0, 1):
        low = pick.integer(0, math.prod(box))
        flat = (low, pick.integer(low, math.prod(box)))
    target = Shard("w", dtype, shape, offset, box, flat, 0)
    with memory_directory() as path, pytest.MonkeyPatch.context() as monkeypatch:
        stored = store(path, stored_shards, block_bytes=16)
        monkeypatch.setattr(read_planner, "MIN_PREAD_BYTES", min_pread)
        ranges = Ranges(monkeypatch)
        (memory,), reader = read_targets(stored, [target])
    assert memory.tobytes() == whole_of(stored, "w")[elements(target)].tobytes()
    need = needed_mask(stored, [target])
    total = sum(int(mask.sum()) for mask in need.values())
    assert reader.count.bytes_read == total == target.size * dtype_of(dtype).itemsize
    got = ranges.mask(stored)
    assert sum(int(mask.sum()) for mask in got.values()) + ranges.mapped == total
    for name in need:
        if min_pread == 1:
            assert got[name].tolist() == need[name].tolist()
        assert (got[name] <= need[name]).all()
    assert reader.count.files <= set(stored.manifest.catalog.files)


def test_a_large_read_is_block_by_block_and_straight_into_the_target(tmp_path, monkeypatch):
    stored = store(tmp_path, [whole("w", "float32", (1000,))], block_bytes=512)
    places = []
    preadv = os.preadv

    def spy(descriptor, buffers, offset):
        places.extend((np.frombuffer(buffer, dtype=np.uint8).ctypes.data, len(buffer)) for buffer in buffers)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    target = np.zeros(1000, dtype=np.float32)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.read(0, StridedCopy((1000,), 0, (1,), 0, (1,)), target)
    assert sorted(places) == [(target.ctypes.data + i, min(512, 4000 - i)) for i in range(0, 4000, 512)]
    assert reader.count.reads == 8 // BLOCKS_AT_ONCE
    assert reader.count.bytes_verified == 4000


def test_short_reads_are_continued(tmp_path, monkeypatch):
    stored = store(tmp_path, [whole("w", "uint8", (1000,))], block_bytes=300)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: max(1, len(views[0]) // 2)]], at))
    (memory,), reader = read_targets(stored, [whole("w", "uint8", (1000,))])
    assert memory.tobytes() == stored.values[0].tobytes()
    assert reader.count.bytes_read == reader.count.bytes_verified == 1000


@pytest.mark.parametrize("verify", [True, False])
def test_verified_bytes_are_those_of_all_blocks_that_are_used(tmp_path, verify):
    stored = store(tmp_path, [whole("w", "uint8", (1000,))], block_bytes=300)
    target = np.zeros(1000, dtype=np.uint8)
    with FileReader(str(tmp_path), stored.manifest, verify) as reader:
        reader.read(0, StridedCopy((750,), 250, (1,), 0, (1,)), target)  # part of block 0, then 1, 2 and 3
    assert reader.count.bytes_read == 750
    assert reader.count.bytes_verified == (1000 if verify else 0)
    assert target[:750].tobytes() == stored.values[0][250:].tobytes()


def test_every_flipped_bit_is_found_and_named(tmp_path):
    stored = store(tmp_path, [whole("a", "uint8", (40,)), whole("b.weight", "bfloat16", (5, 9))], block_bytes=32)
    path = stored.file()
    begin = int(stored.manifest.catalog.byte_offset[1])
    for byte in range(90):
        for bit in (byte % 8, (byte + 3) % 8):
            flip(path, begin + byte, bit)
            with pytest.raises(CorruptCheckpointError) as caught:
                read_targets(stored, [whole("b.weight", "bfloat16", (5, 9))])
            flip(path, begin + byte, bit)
            block = byte // 32 * 32
            for words in (str(path), "'b.weight'", "rank 0", f"bytes {block} to {min(block + 32, 90)}",
                          f"byte {begin + block} of the file", "expected xxh3", "Remedy"):  # fmt: skip
                assert words in str(caught.value)
    memory, _ = read_targets(stored, [whole("b.weight", "bfloat16", (5, 9))])
    assert memory[0].tobytes() == stored.values[1].tobytes()


def test_without_verify_a_flipped_bit_is_the_callers_business(tmp_path):
    stored = store(tmp_path, [whole("a", "uint8", (40,))], block_bytes=32)
    flip(stored.file(), int(stored.manifest.catalog.byte_offset[0]))
    memory, _ = read_targets(stored, [whole("a", "uint8", (40,))], verify=False)
    assert (memory[0] != stored.values[0]).sum() == 1


def check_files(stored) -> None:
    with FileReader(str(stored.directory), stored.manifest) as reader:
        reader.check_files(np.arange(len(stored.shards)))


def test_whole_files_pass_the_check(tmp_path):
    check_files(store(tmp_path, [whole("a", "uint8", (40,))]))


def test_a_missing_file_is_named(tmp_path):
    stored = store(tmp_path, [whole("a", "uint8", (40,), 0), whole("b", "uint8", (40,), 1)])
    stored.file(1).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"1_0\.safetensors is missing; the manifest names it\. Remedy"):
        check_files(stored)


@pytest.mark.parametrize("change", [-1, -40, 1])
def test_a_file_of_another_size_is_named(tmp_path, change):
    stored = store(tmp_path, [whole("a", "uint8", (40,))])
    size = stored.file().stat().st_size
    os.truncate(stored.file(), size + change)
    with pytest.raises(CorruptCheckpointError, match=rf"0_0\.safetensors has {size + change} bytes; expected {size}"):
        check_files(stored)


def test_an_empty_file_is_named(tmp_path):
    stored = store(tmp_path, [whole("a", "uint8", (40,))])
    os.truncate(stored.file(), 0)
    with pytest.raises(CorruptCheckpointError, match=r"0_0\.safetensors has 0 bytes"):
        check_files(stored)


def test_a_file_of_another_save_is_named(tmp_path):
    stored = store(tmp_path, [whole("a", "uint8", (40,))])
    other = tmp_path / "other"
    other.mkdir()
    theirs = store(other, [whole("a", "uint8", (40,))], save_token="f" * 32)
    theirs.file().rename(stored.file())
    with pytest.raises(CorruptCheckpointError, match=r"0_0\.safetensors belongs to another save"):
        check_files(stored)


def test_a_file_that_shrinks_after_the_check_is_an_error_too(tmp_path):
    stored = store(tmp_path, [whole("a", "uint8", (40,))])
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.check_files(np.asarray([0]))
        os.truncate(stored.file(), stored.file().stat().st_size - 8)
        with pytest.raises(CorruptCheckpointError, match="'a'.*the file ends at byte"):
            reader.read(0, StridedCopy((40,), 0, (1,), 0, (1,)), np.zeros(40, dtype=np.uint8))


def test_values_are_cast_where_the_target_has_another_dtype(tmp_path):
    stored = store(tmp_path, [whole("w", "int32", (6, 7))], block_bytes=12)
    copy = StridedCopy((6, 7), 0, (7, 1), 3, (1, 6))  # transposed, into a larger memory
    target = np.full(50, -1.0)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.read(0, copy, target)
    expected = stored.values[0].reshape(6, 7).astype(np.float64)
    assert (target[3:45].reshape(7, 6).T == expected).all()
    assert (target[[*range(3), *range(45, 50)]] == -1).all()
    assert reader.count.bytes_verified == 6 * 7 * 4


def test_float8_is_cast_like_ml_dtypes_does(tmp_path):
    stored = store(tmp_path, [whole("w", "float8_e5m2", (16, 16))])
    target = np.zeros(256, dtype=ml_dtypes.bfloat16)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.read(0, StridedCopy((256,), 0, (1,), 0, (1,)), target)
    assert target.tobytes() == stored.values[0].astype(ml_dtypes.bfloat16).tobytes()


def test_mapped_pages_are_given_back(tmp_path, monkeypatch):
    stored = store(tmp_path, [whole("w", "uint8", (64, 16 << 10))])
    monkeypatch.setattr(row_files, "MAP_SPAN_BYTES", 128 << 10)
    given, madvise = [], row_files._madvise

    def spy(address, length, option):
        given.append((option, address, length))
        return madvise(address, length, option)

    monkeypatch.setattr(row_files, "_madvise", spy)
    target = np.zeros(64 * 100, dtype=np.uint8)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.read(0, StridedCopy((64, 100), 8000, (16 << 10, 1), 0, (100, 1)), target)
        start = np.frombuffer(reader.files.map(0), dtype=np.uint8).ctypes.data
    expected = stored.values[0].reshape(64, -1)[:, 8000:8100]
    assert (target.reshape(64, 100) == expected).all()
    assert reader.count.bytes_read == 6400
    first = int(stored.manifest.catalog.byte_offset[0]) + 8000
    assert len(given) == 8
    for number, (option, address, length) in enumerate(sorted(given, key=lambda each: each[1])):
        begin = address - start
        low = first + number * (128 << 10)
        assert option == mmap.MADV_DONTNEED
        assert begin % mmap.PAGESIZE == 0
        assert begin <= low
        assert begin + length >= min(low + 7 * (16 << 10) + 100, stored.file().stat().st_size)


def test_close_closes_everything(tmp_path):
    stored = store(tmp_path, [whole("w", "uint8", (64, 64), 0), whole("v", "uint8", (64, 64), 1)])
    before = set(os.listdir("/proc/self/fd"))
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.check_files(np.asarray([0, 1]))
        reader.read(0, StridedCopy((64, 2), 0, (64, 1), 0, (2, 1)), np.zeros(128, dtype=np.uint8))
        assert len(set(os.listdir("/proc/self/fd"))) > len(before)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("min_pread", [1, 16 << 10], ids=["preads", "maps"])
def test_few_files_are_open_at_a_time(tmp_path, monkeypatch, min_pread):
    stored = store(tmp_path, [Shard("w", "uint8", (64, 8), (4 * i, 0), (4, 8), None, i) for i in range(16)])
    monkeypatch.setattr(row_files, "MOST_OPEN", 2)
    monkeypatch.setattr(read_planner, "MIN_PREAD_BYTES", min_pread)
    before, most, check = len(os.listdir("/proc/self/fd")), 0, row_files.check_data_file

    def spy(*args):
        nonlocal most
        opened = check(*args)
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
        return opened

    monkeypatch.setattr(row_files, "check_data_file", spy)
    for column in (0, 5):
        (memory,), _ = read_targets(stored, [Shard("w", "uint8", (64, 8), (0, column), (64, 3), None, 0)])
        assert (memory == whole_of(stored, "w").reshape(64, 8)[:, column : column + 3].ravel()).all()
    assert 3 <= most <= 6  # two files, two maps, and of each one that comes
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_files_than_a_process_may_open(tmp_path):
    shards = [whole(f"w{i}", "uint8", (8,), i) for i in range(80)]
    stored = store(tmp_path, shards)
    (tmp_path / "0.manifest").write_bytes(stored.manifest.encode())
    for command in ("digest", "verify"):
        done = subprocess.run(
            [sys.executable, "-m", "paddle_flexckpt", command, str(tmp_path)],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_reading_nothing_opens_nothing(tmp_path):
    stored = store(tmp_path, [whole("w", "uint8", (4, 4))])
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.read(0, StridedCopy((0, 4), 0, (4, 1), 0, (4, 1)), np.zeros(0, dtype=np.uint8))
    assert reader.count.files == set()
