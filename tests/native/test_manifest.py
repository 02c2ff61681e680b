"""Manifests: round trip, and the refusal of everything that is not what was written."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import Catalog, CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.native import manifest as manifest_module
from paddle_flexckpt.native.manifest import FORMAT_VERSION, Manifest, merge_parts
from tests.native.samples import store, whole, write_file
from tests.property.layouts import Shard

SHARDS = [
    whole("weight", "bfloat16", (8, 6)),
    Shard("flat/ü .moment1_0", "float32", (4, 4, 4), (0, 2, 0), (4, 2, 4), (5, 20), 0),
    whole("step", "int64", ()),
    whole("empty", "float64", (0, 3)),
    Shard("big", "float8_e4m3fn", (1 << 40, 3), (1 << 39, 0), (2, 3), None, 1),
]


@pytest.fixture
def manifest(tmp_path):
    return store(tmp_path, SHARDS, unique_id=3, world_size=2, step=123).manifest


def assert_same(a: Manifest, b: Manifest) -> None:
    assert (a.catalog.keys, a.catalog.dtypes, a.catalog.files) == (b.catalog.keys, b.catalog.dtypes, b.catalog.files)
    for name in Catalog.COLUMNS:
        left, right = getattr(a.catalog, name), getattr(b.catalog, name)
        assert left.dtype == right.dtype, name
        assert left.tolist() == right.tolist(), name
    assert a.checksums.values.tolist() == b.checksums.values.tolist()
    assert a.checksums.values.dtype == b.checksums.values.dtype == np.uint64
    assert (a.checksums.first.tolist(), a.checksums.block_bytes) == (
        b.checksums.first.tolist(),
        b.checksums.block_bytes,
    )
    assert a.file_bytes.tolist() == b.file_bytes.tolist()
    assert [a.save_token, a.unique_id, a.world_size, a.step] == [b.save_token, b.unique_id, b.world_size, b.step]


def test_round_trip(manifest):
    assert_same(Manifest.decode(manifest.encode(), "3.manifest"), manifest)
    assert manifest.step == 123


def test_round_trip_without_a_step_and_without_rows(tmp_path):
    part = write_file(tmp_path, [], [])
    again = Manifest.decode(part.encode(), "f")
    assert_same(again, part)
    assert again.step is None
    assert len(again.catalog) == 0


def test_a_large_checksum_keeps_all_its_bits(manifest):
    values = manifest.checksums.values.copy()
    values[0] = np.uint64(2**64 - 1)
    changed = replace(manifest, checksums=replace(manifest.checksums, values=values))
    assert Manifest.decode(changed.encode(), "f").checksums.of_block(0, 0) == 2**64 - 1


def test_it_is_a_safetensors_file_without_anything_but_numbers(manifest):
    arrays = safetensors_numpy.load(manifest.encode())
    assert {f"catalog.{name}" for name in Catalog.COLUMNS} < set(arrays)
    assert all(array.dtype.kind in "iu" for array in arrays.values())


def sections(data: bytes) -> dict[str, range]:
    """The bytes of a container by what they are."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    parts = {"header length": range(8), "header": range(8, end)}
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            parts[name] = range(end + low, end + high)
    return parts


def test_every_flipped_bit_is_refused(manifest):
    data = manifest.encode()
    parts = sections(data)
    assert sorted(i for part in parts.values() for i in part) == list(range(len(data)))
    assert {"catalog.key", "catalog.keys", "catalog.byte_offset", "checksums", "file_bytes"} < set(parts)
    # The version has to be read before the checksum, whose algorithm it names: a flip there is a newer version.
    version = data.index(b'"format_version":"') + len(b'"format_version":"')
    for name, part in parts.items():
        for byte in part:
            for bit in range(8) if name != "header" else (byte % 8, (byte + 5) % 8):
                damaged = bytearray(data)
                damaged[byte] ^= 1 << bit
                kind = CheckpointError if byte == version else CorruptCheckpointError
                remedy = "" if byte == version else r".*Remedy \(FC306\): .*repair_manifest\(overwrite=True\)"
                with pytest.raises(kind, match=rf"x/3\.manifest{remedy}"):
                    Manifest.decode(bytes(damaged), "x/3.manifest")


def test_every_truncation_is_refused(manifest):
    data = manifest.encode()
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match=r"x/3\.manifest"):
            Manifest.decode(data[:length], "x/3.manifest")


def test_bytes_behind_the_end_are_refused(manifest):
    with pytest.raises(CorruptCheckpointError):
        Manifest.decode(manifest.encode() + b"\0", "f")


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04]", b"\x02" + bytes(7) + b"{}", b"\xff" * 64, b"[" * 100_000])
def test_what_was_never_a_manifest_is_refused(data):
    with pytest.raises(CorruptCheckpointError, match="f is damaged or not a"):
        Manifest.decode(data, "f")


def test_deeply_nested_json_is_refused():
    header = b'{"__metadata__":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    with pytest.raises(CorruptCheckpointError):
        Manifest.decode(len(header).to_bytes(8, "little") + header, "f")


def test_another_safetensors_file_is_refused():
    data = safetensors_numpy.save({"w": np.zeros(3)}, metadata={"format": "pt"})
    with pytest.raises(CorruptCheckpointError, match="not a manifest of this library.*'pt'"):
        Manifest.decode(data, "model.safetensors")


def test_a_newer_version_says_what_to_do(manifest, monkeypatch):
    newer = str(FORMAT_VERSION + 1)
    monkeypatch.setattr(manifest_module, "FORMAT_VERSIONS", (newer, newer))
    data = manifest.encode()
    monkeypatch.undo()
    with pytest.raises(ValidationError) as caught:
        Manifest.decode(data, "x/3.manifest")
    for words in (
        "x/3.manifest",
        f"format version '{FORMAT_VERSION + 1}'",
        f"reads versions 1, 2 and {FORMAT_VERSION}",
        "Remedy",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ["../0_3.safetensors", "/etc/passwd", "a/b", "a\\b", "..", ".", ""])
def test_a_file_name_that_leaves_the_directory_is_refused(manifest, name):
    files = (name, *manifest.catalog.files[1:])
    data = replace(manifest, catalog=replace(manifest.catalog, files=files)).encode()
    with pytest.raises(CorruptCheckpointError, match="leaves the checkpoint's directory"):
        Manifest.decode(data, "f")


def test_an_unknown_dtype_is_refused(manifest):
    dtypes = ("float4", *manifest.catalog.dtypes[1:])
    data = replace(manifest, catalog=replace(manifest.catalog, dtypes=dtypes)).encode()
    with pytest.raises(CheckpointError, match="float4"):
        Manifest.decode(data, "f")


def test_an_unknown_checksum_algorithm_is_refused(manifest, monkeypatch):
    monkeypatch.setattr(manifest_module, "ALGORITHM", "crc32")
    data = manifest.encode()
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match="crc32"):
        Manifest.decode(data, "f")


def test_parts_of_different_saves_are_not_merged(tmp_path):
    shards = [whole("a", "float32", (2,), rank) for rank in (0, 1)]
    parts = [
        write_file(tmp_path, [shard], [np.zeros(2, dtype=np.float32)], save_token=f"{rank:032x}")
        for rank, shard in enumerate(shards)
    ]
    with pytest.raises(ValidationError, match="different saves"):
        merge_parts(parts)
    with pytest.raises(ValidationError, match="cannot be merged"):
        merge_parts([])


def test_merged_parts_are_the_parts_one_after_the_other(tmp_path):
    shards = [Shard("w", "float32", (6, 4), (2 * rank, 0), (2, 4), None, rank) for rank in (0, 1, 2)]
    parts = [write_file(tmp_path, [s], [np.full(8, s.rank, dtype=np.float32)], world_size=3) for s in shards]
    parts.insert(1, write_file(tmp_path, [], [], world_size=3))  # a rank that had nothing to write
    merged = merge_parts(parts)
    assert merged.catalog.rank.tolist() == [0, 1, 2]
    assert merged.catalog.files == tuple(f"{rank}_0.safetensors" for rank in (0, 1, 2))
    assert merged.file_bytes.tolist() == [(tmp_path / name).stat().st_size for name in merged.catalog.files]
    for row, part in enumerate(parts[:1] + parts[2:]):
        assert merged.checksums.of_block(row, 0) == part.checksums.of_block(0, 0)
        assert merged.catalog.byte_offset[row] == part.catalog.byte_offset[0]


def test_the_same_manifest_has_the_same_bytes(manifest):
    """A file that is written again, by a process that goes on with the work of another, is the same file."""
    assert len({manifest.encode() for _ in range(20)}) == 1
