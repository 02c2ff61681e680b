"""Blocks of which only a part is needed: no byte reaches a target unverified, and what that costs is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError, dtype_of
from paddle_flexckpt.native import block_reader, read_planner
from paddle_flexckpt.native.checksums import verify_mode
from paddle_flexckpt.native.reader import FileReader
from tests.native.conftest import take_maps_away
from tests.native.samples import flip, store, whole
from tests.native.test_reader import Ranges, needed_mask, read_targets, whole_of
from tests.property import examples
from tests.property.layouts import Pick, Shard, elements, grid
from tests.ramdisk import memory_directory


def column(low: int, high: int, rows: int, columns: int) -> StridedCopy:
    return StridedCopy((rows, high - low), low, (columns, 1), 0, (high - low, 1))


def touched_blocks(stored, targets: list[Shard], block_bytes: int) -> dict[str, np.ndarray]:
    """How often each byte of the files is read if every block with a needed byte is read once."""
    catalog = stored.manifest.catalog
    need = needed_mask(stored, targets)
    masks = {name: np.zeros_like(mask) for name, mask in need.items()}
    for row, length in enumerate(catalog.byte_length.tolist()):
        begin = int(catalog.byte_offset[row])
        for start in range(begin, begin + length, block_bytes):
            block = slice(start, min(start + block_bytes, begin + length))
            masks[catalog.file_name(row)][block] = int(need[catalog.file_name(row)][block].any())
    return masks


def drawn(pick: Pick) -> tuple[list[Shard], Shard]:
    """Stored shards of a tensor, and a box of it to read."""
    shape = pick.shape(4, 6)
    dtype = pick.choice(("uint8", "bfloat16", "float32", "complex128"))
    shards = [Shard("w", dtype, shape, o, box, None, i % 2) for i, (o, box) in enumerate(grid(pick, shape))]
    if pick.integer(0, 1):  # the first cell is stored as two flattened ranges
        first = shards.pop(0)
        cut = pick.integer(0, math.prod(first.shape))
        shards += [replace(first, flat=(0, cut)), replace(first, flat=(cut, math.prod(first.shape)))]
    shards.sort(key=lambda shard: shard.rank)
    offset = tuple(pick.integer(0, extent - 1) for extent in shape)
    box = tuple(pick.integer(1, extent - low) for low, extent in zip(offset, shape))
    return shards, Shard("w", dtype, shape, offset, box, None, 0)


@pytest.mark.parametrize("min_pread", [1, 16 << 10], ids=["preads", "scattered"])
@examples(150)
@given(st.data())
def test_every_touched_block_is_read_once_and_verified(min_pread, data):
    pick = Pick.from_draw(data.draw)
    shards, target = drawn(pick)
    with memory_directory() as path, pytest.MonkeyPatch.context() as monkeypatch:
        stored = store(path, shards, block_bytes=16)
        monkeypatch.setattr(read_planner, "MIN_PREAD_BYTES", min_pread)
        take_maps_away(monkeypatch)
        ranges = Ranges(monkeypatch)
        (memory,), reader = read_targets(stored, [target])
    assert memory.tobytes() == whole_of(stored, "w")[elements(target)].tobytes()
    expected = touched_blocks(stored, [target], 16)
    total = sum(int(mask.sum()) for mask in expected.values())
    assert ranges.mapped == 0
    for name, mask in ranges.mask(stored).items():
        assert mask.tolist() == expected[name].tolist()
    assert reader.count.bytes_read == reader.count.bytes_verified == total
    assert reader.count.bytes_extra == total - target.size * dtype_of(target.dtype).itemsize


@pytest.mark.parametrize("min_pread", [1, 16 << 10], ids=["preads", "maps"])
@examples(150)
@given(st.data())
def test_a_flipped_bit_in_what_is_needed_is_found(min_pread, data):
    pick = Pick.from_draw(data.draw)
    shards, target = drawn(pick)
    with memory_directory() as path, pytest.MonkeyPatch.context() as monkeypatch:
        stored = store(path, shards, block_bytes=16)
        monkeypatch.setattr(read_planner, "MIN_PREAD_BYTES", min_pread)
        (memory,), reader = read_targets(stored, [target])
        assert memory.tobytes() == whole_of(stored, "w")[elements(target)].tobytes()
        assert reader.count.bytes_read == memory.nbytes
        assert reader.count.bytes_extra == 0
        needed = [(name, byte) for name, mask in needed_mask(stored, [target]).items() for byte in np.flatnonzero(mask)]
        name, byte = needed[pick.integer(0, len(needed) - 1)]
        flip(path / name, int(byte), pick.integer(0, 7))
        with pytest.raises(CorruptCheckpointError, match="expected xxh3"):
            read_targets(stored, [target])


@pytest.mark.parametrize("maps", [True, False])
def test_a_flipped_bit_in_a_block_of_which_a_part_is_needed_is_named(tmp_path, monkeypatch, maps):
    if not maps:
        take_maps_away(monkeypatch)
    rows, columns, block_bytes = 64, 40, 256
    stored = store(tmp_path, [whole("a", "uint8", (9,)), whole("w", "uint8", (rows, columns), 3)], block_bytes)
    begin = int(stored.manifest.catalog.byte_offset[1])
    path = stored.file(1)
    expected = stored.values[1].reshape(rows, columns)[:, 5:8]
    for byte in (0, 7, 300, 1333, rows * columns - 1):
        flip(path, begin + byte, byte % 8)
        target = np.zeros(rows * 3, dtype=np.uint8)
        with (
            FileReader(str(tmp_path), stored.manifest) as reader,
            pytest.raises(CorruptCheckpointError) as caught,
        ):
            reader.read(1, column(5, 8, rows, columns), target)
        block = byte // block_bytes * block_bytes
        for words in (str(path), "'w'", "rank 3", f"bytes {block} to {block + block_bytes}",
                      f"byte {begin + block} of the file"):  # fmt: skip
            assert words in str(caught.value)
        # Nothing of the damaged block has reached the target.
        clean = [r for r in range(rows) if r * columns + 8 <= block]
        assert (target.reshape(rows, 3)[clean] == expected[clean]).all()
        assert not target.reshape(rows, 3)[[r for r in range(rows) if r * columns + 5 >= block]].any()
        target = np.zeros(rows * 3, dtype=np.uint8)
        with FileReader(str(tmp_path), stored.manifest, "off") as reader:
            reader.read(1, column(5, 8, rows, columns), target)
        assert reader.count.bytes_verified == 0
        assert (target.reshape(rows, 3) != expected).sum() == (5 <= byte % columns < 8)
        flip(path, begin + byte, byte % 8)


@pytest.mark.parametrize(("maps", "counts"), [(True, (550, 900, 0, 1)), (False, (900, 900, 350, 3))])
def test_the_edges_of_a_contiguous_read_are_verified(tmp_path, monkeypatch, maps, counts):
    if not maps:
        take_maps_away(monkeypatch)
    stored = store(tmp_path, [whole("w", "uint8", (1000,))], block_bytes=300)
    target = np.zeros(1000, dtype=np.uint8)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.read(0, StridedCopy((550,), 250, (1,), 0, (1,)), target)  # 50 of block 0, all of 1, 200 of 2
    count = reader.count
    assert (count.bytes_read, count.bytes_verified, count.bytes_extra, count.reads) == counts
    assert target[:550].tobytes() == stored.values[0][250:800].tobytes()


def test_targets_that_share_blocks_read_them_once(tmp_path, unmapped):
    rows, columns = 64, 40
    stored = store(tmp_path, [whole("w", "uint8", (rows, columns))], block_bytes=256)  # 10 blocks
    with FileReader(str(tmp_path), stored.manifest) as reader:
        for low in range(0, columns, 10):
            target = np.zeros(rows * 10, dtype=np.uint8)
            reader.read(0, column(low, low + 10, rows, columns), target)
            assert target.tobytes() == stored.values[0].reshape(rows, columns)[:, low : low + 10].tobytes()
            assert reader.count.bytes_extra == rows * columns - rows * (low + 10)
        reader.read(0, column(0, 7, rows, columns), np.zeros(rows * 7, dtype=np.uint8))
    assert reader.count.bytes_read == reader.count.bytes_verified == rows * columns
    assert (reader.count.reads, reader.count.bytes_extra) == (10, 0)


def test_kept_blocks_are_bounded(tmp_path, monkeypatch, unmapped):
    monkeypatch.setattr(block_reader, "KEPT_BLOCKS", 2)
    stored = store(tmp_path, [whole("w", "uint8", (64, 40))], block_bytes=256)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        for expected in (10, 20):
            target = np.zeros(64 * 3, dtype=np.uint8)
            reader.read(0, column(5, 8, 64, 40), target)
            assert target.tobytes() == stored.values[0].reshape(64, 40)[:, 5:8].tobytes()
            assert len(reader._kept) == 2
            assert reader.count.reads == expected
    assert reader._kept == {}


@pytest.mark.parametrize("order", [((3, 4), (1, 6)), ((4, 3), (6, 1)), ((3, 2, 4), (1, 0, 6))])
def test_copies_in_another_order_than_the_files(tmp_path, order, unmapped):
    extents, strides = order
    stored = store(tmp_path, [whole("w", "int16", (5, 6))], block_bytes=8)
    copy = StridedCopy(extents, 7, strides, 0, tuple(math.prod(extents[i + 1 :]) for i in range(len(extents))))
    target = np.zeros(copy.size, dtype=np.float64)
    with FileReader(str(tmp_path), stored.manifest) as reader:
        reader.read(0, copy, target)
    assert (target.reshape(extents) == copy.gather_from(stored.values[0])).all()
    assert reader.count.bytes_read == reader.count.bytes_verified


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3), st.integers(0, 5))
def test_count_before_counts(axes, base):
    extents, strides, reach = [], [], 0
    for extent, slack in axes:
        extents.insert(0, extent)
        strides.insert(0, reach + slack)
        reach += (extent - 1) * strides[0]
    copy = StridedCopy(tuple(extents), base, tuple(strides), 0, tuple(strides))
    assert copy.is_ascending()
    places = (base + sum(np.indices(extents)[i] * s for i, s in enumerate(strides)) + np.zeros(extents, int)).reshape(
        -1
    )
    for position in range(base + reach + 3):
        assert copy.count_before(position) == (places < position).sum()


MODES = [(True, "read"), (False, "off"), ("read", "read"), ("full", "full"), ("off", "off")]


@pytest.mark.parametrize(("value", "mode"), MODES)
def test_modes(value, mode):
    assert verify_mode(value) == mode


@pytest.mark.parametrize("value", ["all", None, 1, "", 2.0])
def test_other_modes_are_refused(value):
    with pytest.raises(ValidationError, match="verify has to be 'read', 'full' or 'off'.*got"):
        verify_mode(value)
