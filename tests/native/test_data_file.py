"""Data files: what any safetensors reader finds in them, and how they are written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import xxhash

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError, dtype_of
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.media.local import write_all
from paddle_flexckpt.native import checksums, data_file
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.native.data_file import BATCH_BYTES, TOKEN_WINDOW, write_data_file
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from tests.native.samples import TOKEN, flip, items_of, store, values_of, whole, write_file
from tests.property.layouts import Shard
from tests.remedies.following import advised


def open_with_safetensors(path) -> tuple[dict[str, dict], dict[str, str]]:
    """Items by name, and the header's metadata, as the safetensors library itself reads them."""
    with safetensors.safe_open(str(path), framework="np") as stream:
        info = stream.metadata()
    return dict(safetensors.deserialize(path.read_bytes())), info


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_opens_with_safetensors(tmp_path, name):
    stored = store(tmp_path, [whole("w", name, (3, 5)), whole("scalar", name, ()), whole("none", name, (0, 4))])
    found, _ = open_with_safetensors(stored.file())
    extra = [2] if name == "complex128" else []
    assert [found[key]["shape"] for key in ("w", "scalar", "none")] == [[3, 5, *extra], [*extra], [0, 4, *extra]]
    assert {entry["dtype"] for entry in found.values()} == {dtype_of(name).safetensors}
    for shard, values in zip(stored.shards, stored.values):
        assert bytes(found[shard.key]["data"]) == values.tobytes()


def test_numpy_values_come_back_through_safetensors(tmp_path):
    stored = store(tmp_path, [whole("a", "float32", (4, 3)), whole("b", "complex64", (2,)), whole("c", "bool", (9,))])
    with safetensors.safe_open(str(stored.file()), framework="np") as stream:
        for shard, values in zip(stored.shards, stored.values):
            tensor = stream.get_tensor(shard.key)
            assert tensor.shape == shard.shape
            assert tensor.tobytes() == values.tobytes()
            assert tensor.dtype == values.dtype


def test_the_header_repeats_every_shard(tmp_path):
    shards = [
        Shard("w", "bfloat16", (8, 6), (2, 3), (4, 3), None, 0),
        Shard("m", "float32", (8, 6), (2, 0), (4, 6), (5, 17), 0),
        whole("s", "int64", ()),
    ]
    stored = store(tmp_path, shards, unique_id=7, world_size=4, step=10)
    found, info = open_with_safetensors(tmp_path / "0_7.safetensors")
    told = json.loads(info.pop("shards"))
    assert info == {
        "save_token": TOKEN, "format": "flexckpt", "format_version": "1", "unique_id": "7", "world_size": "4",
        "step": "10",
    }  # fmt: skip
    assert list(told) == ["w", "m", "s"]
    for shard in shards:
        entry = told[shard.key]
        assert entry == {
            "key": shard.key, "dtype": shard.dtype, "global_shape": list(shard.global_shape),
            "global_offset": list(shard.offset), "local_shape": list(shard.shape),
            "flattened_range": list(shard.flat) if shard.flat else None,
        }  # fmt: skip
    assert found["m"]["shape"] == [12]
    # The file alone says where everything is.
    begin = stored.manifest.catalog.byte_offset
    raw = (tmp_path / "0_7.safetensors").read_bytes()
    for offset, values in zip(begin, stored.values):
        assert raw[offset : offset + values.nbytes] == values.tobytes()


def test_several_shards_of_one_key(tmp_path):
    shards = [Shard("w", "int16", (6, 2), (2 * i, 0), (2, 2), None, 0) for i in range(3)]
    # names that the numbering would choose are taken by other keys
    shards += [whole("w#0", "int16", (1,)), Shard("w#1", "int16", (4,), (0,), (2,), None, 0),
               Shard("w#1", "int16", (4,), (2,), (2,), None, 0)]  # fmt: skip
    stored = store(tmp_path, shards)
    found, info = open_with_safetensors(stored.file())
    told = json.loads(info["shards"])
    assert len(found) == len(told) == 6
    seen = {(entry["key"], tuple(entry["global_offset"])): name for name, entry in told.items()}
    for shard, values in zip(shards, stored.values):
        name = seen[shard.key, shard.offset]
        assert bytes(found[name]["data"]) == values.tobytes()
    assert seen["w#0", (0,)] == "w#0"


@pytest.mark.parametrize(
    "keys",
    [
        ("__metadata__",),
        ("__metadata__", "__metadata__#0"),
        ("模型.权重", "a/b\\c", "with space", " ", "", 'quote"', "new\nline", "🛶", "x" * 5000),
    ],
)
def test_keys_of_any_text(tmp_path, keys):
    stored = store(tmp_path, [whole(key, "uint8", (i + 1,)) for i, key in enumerate(keys)])
    found, info = open_with_safetensors(stored.file())
    by_key = {entry["key"]: name for name, entry in json.loads(info["shards"]).items()}
    assert set(by_key) == set(keys)
    assert "__metadata__" not in found
    for shard, values in zip(stored.shards, stored.values):
        assert bytes(found[by_key[shard.key]]["data"]) == values.tobytes()


def test_the_data_is_aligned_and_the_token_is_near_the_start(tmp_path):
    stored = store(tmp_path, [whole("k" * n, "float64", (3,)) for n in range(1, 12)])
    assert (stored.manifest.catalog.byte_offset % 8 == 0).all()
    assert TOKEN.encode() in stored.file().read_bytes()[:TOKEN_WINDOW]


def test_block_checksums_are_those_of_the_bytes_written(tmp_path):
    sizes = (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 3)
    stored = store(tmp_path, [whole(f"k{n}", "uint8", (n,)) for n in sizes])
    raw, sums = stored.file().read_bytes(), stored.manifest.checksums
    for row, size in enumerate(sizes):
        begin = int(stored.manifest.catalog.byte_offset[row])
        blocks = [raw[b : min(b + BLOCK_BYTES, begin + size)] for b in range(begin, begin + size, BLOCK_BYTES)]
        expected = [xxhash.xxh3_64(block).intdigest() for block in blocks]
        assert [sums.of_block(row, i) for i in range(len(blocks))] == expected
        assert sums.first[row + 1] - sums.first[row] == len(blocks)


def record_writes(monkeypatch):
    """Events of the writer, in order: ("hash" | "write" | "fsync" | "close", [(address, bytes), ...])."""
    events = []

    def place(data) -> tuple[int, int]:
        return np.frombuffer(data, dtype=np.uint8).ctypes.data, len(data)

    def spy(module, name, describe):
        original = getattr(module, name)

        def call(*args):
            events.append(describe(*args))
            return original(*args)

        monkeypatch.setattr(module, name, call)

    spy(data_file, "hash_block", lambda block: ("hash", [place(block)]))
    spy(os, "writev", lambda fd, parts: ("write", list(map(place, parts))))
    spy(os, "fsync", lambda fd: ("fsync", []))
    spy(os, "close", lambda fd: ("close", []))
    return events


def test_neighbours_are_written_in_one_call_from_their_own_memory_and_each_block_is_hashed_once(tmp_path, monkeypatch):
    shards = [whole("a", "uint8", (3 * BLOCK_BYTES,)), whole("b", "uint8", (17,)), whole("c", "float32", (5,))]
    values = [values_of(shard, seed) for seed, shard in enumerate(shards)]
    events = record_writes(monkeypatch)
    write_file(tmp_path, shards, values)
    monkeypatch.undo()
    (kind, header), (other_kind, blocks) = events[:2]
    assert kind == other_kind == "write"
    # The float32 shard comes first: the widest elements do.
    at = [value.ctypes.data for value in values]
    expected = sorted([(at[0] + i * BLOCK_BYTES, BLOCK_BYTES) for i in range(3)] + [(at[1], 17), (at[2], 20)])
    assert sorted(blocks) == expected
    assert [size for _, size in header] == [(tmp_path / "0_0.safetensors").stat().st_size - 3 * BLOCK_BYTES - 37]
    assert events[2:-2] == [("hash", [place]) for place in blocks], "while they are in cache"
    assert [kind for kind, _ in events[-2:]] == ["fsync", "close"]


def test_one_call_writes_a_bounded_number_of_bytes_and_of_blocks(tmp_path, monkeypatch):
    shards = [whole("a", "uint8", (BATCH_BYTES + BLOCK_BYTES,)), *(whole(f"k{i}", "uint8", (3,)) for i in range(2000))]
    events = record_writes(monkeypatch)
    write_file(tmp_path, shards, [values_of(shard, 0) for shard in shards])
    monkeypatch.undo()
    calls = [places for kind, places in events if kind == "write"][1:]
    assert [len(places) for places in calls] == [8, 1024, 977]
    assert [sum(size for _, size in places) for places in calls] == [BATCH_BYTES, BLOCK_BYTES + 3 * 1023, 3 * 977]


def test_a_large_item_is_hashed_by_another_thread_while_it_is_written(tmp_path, monkeypatch):
    threads = []
    hash_block = checksums.hash_block
    monkeypatch.setattr(checksums, "hash_block", lambda b: threads.append(threading.current_thread()) or hash_block(b))
    monkeypatch.setattr(data_file, "hash_block", lambda block: pytest.fail("hashed by the thread that writes"))
    shard = whole("a", "uint8", (5 * BLOCK_BYTES + 3,))
    value = values_of(shard, 0)
    part = write_file(tmp_path, [shard], [value])
    assert len(threads) == 6
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    raw = value.tobytes()
    expected = [hash_block(raw[i : i + BLOCK_BYTES]) for i in range(0, len(raw), BLOCK_BYTES)]
    assert [part.checksums.of_block(0, i) for i in range(6)] == expected


def test_short_writes_lose_nothing(tmp_path, monkeypatch):
    original, counts = os.writev, []

    def write_a_third(fd, parts):
        data = b"".join(parts)
        counts.append(original(fd, [data[: max(1, len(data) // 3)]]))
        return counts[-1]

    monkeypatch.setattr(os, "writev", write_a_third)
    stored = store(tmp_path, [whole("a", "uint8", (1000,)), whole("b", "uint8", (7,)), whole("c", "uint8", (0,))])
    monkeypatch.undo()
    assert len(counts) > 10
    found, _ = open_with_safetensors(stored.file())
    assert bytes(found["a"]["data"]) == stored.values[0].tobytes()
    assert stored.file().stat().st_size == stored.manifest.file_bytes[0]


def test_write_all_of_nothing_calls_nothing(monkeypatch):
    monkeypatch.setattr(os, "writev", lambda *_: pytest.fail("nothing was to be written"))
    write_all(-1, [])
    write_all(-1, [b"", memoryview(b"")])


def write(tmp_path, shards, data=()) -> Manifest:
    return write_data_file(str(tmp_path), items_of(shards, "0_0.safetensors"), iter(data), SaveInfo(TOKEN, 0, 1))


def test_a_rank_without_items_writes_no_file(tmp_path):
    part = write(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
    assert (len(part.catalog), part.catalog.files, part.file_bytes.tolist()) == (0, (), [])


def test_a_file_that_is_there_already_is_another_saves_and_stays(tmp_path):
    (tmp_path / "0_0.safetensors").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        store(tmp_path, [whole("a", "uint8", (3,))])
    assert (tmp_path / "0_0.safetensors").read_bytes() == b"theirs"


@pytest.mark.parametrize("counts", [(3,), (3, 4, 1), (3, 5), (4, 3)])
def test_data_that_is_not_as_planned_is_an_error(tmp_path, counts):
    shards = [whole("a", "uint8", (3,)), whole("b", "uint8", (4,))]
    with pytest.raises(ValueError, match=r"0_0\.safetensors"):
        write(tmp_path, shards, (np.zeros(n, dtype=np.uint8) for n in counts))


def test_a_header_that_safetensors_would_refuse_is_an_error_before_any_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file, "MAX_HEADER_BYTES", 400)
    with pytest.raises(ValueError, match="safetensors allows 400"):
        write(tmp_path, [whole("k" * 200, "uint8", (3,))])
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_an_error_before_any_byte(tmp_path):
    with pytest.raises(ValidationError, match="float4"):
        write(tmp_path, [whole("a", "float4", (3,))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_told_with_figures_and_a_remedy(tmp_path, monkeypatch, number):
    pytest.importorskip("paddle")
    writev = os.writev

    def full(descriptor, parts):
        if sum(map(len, parts)) > BLOCK_BYTES:
            raise OSError(number, os.strerror(number))
        return writev(descriptor, parts)

    with monkeypatch.context() as patch, pytest.raises(fc.CheckpointError) as caught:
        patch.setattr(os, "writev", full)
        patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=3 << 20))
        fc.save_state_dict({"w": np.zeros(2 << 20, np.float32)}, tmp_path)
    text = str(caught.value)
    assert f"[Errno {number}] {os.strerror(number)}" in text
    if number != errno.EIO:
        assert re.search(r"/0_0-\w+\.safetensors has 8.0 MiB, and 3.0 MiB are free there now", text)
        advised("media/full_disks.py", "make room on that storage for what all its ranks write, and call again", text)
    fc.save_state_dict({"w": np.ones(2 << 20, np.float32)}, tmp_path)
    target = {"w": np.zeros(2 << 20, np.float32)}
    fc.load_state_dict(target, tmp_path)
    assert target["w"].all() and len(list(tmp_path.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
def test_another_whole_checkpoint_of_the_directory_is_named(tmp_path, damage):
    pytest.importorskip("paddle")
    for _ in range(4):
        fc.save_state_dict({"w": np.ones(5000, np.float32)}, tmp_path)
    target = {"w": np.zeros(5000, np.float32)}
    for unique_id in (2, 3):
        (path,) = tmp_path.glob(f"0_{unique_id}-*.safetensors")
        if damage == "flip" and unique_id == 3:
            flip(path, path.stat().st_size - 9)
        elif damage == "remove":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(fc.CorruptCheckpointError, match=r"Remedy .FC30[45].: .*such as id 1 here \(unique_id=1\)"):
        fc.load_state_dict(target, tmp_path)
    assert fc.load_state_dict(target, tmp_path, unique_id=1).unique_id == 1
    for path in tmp_path.glob("[0-2].manifest"):
        path.unlink()
    with pytest.raises(fc.CorruptCheckpointError) as caught:
        fc.load_state_dict(target, tmp_path)
    assert "such as id" not in str(caught.value) and caught.value.__cause__ is None
