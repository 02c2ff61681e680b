"""Files made to be slow: what is done is counted, errors are short, and nothing but a named error comes out."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError, validate
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import load_merged_state_dict
from paddle_flexckpt.native.directory import list_checkpoints
from paddle_flexckpt.native.manifest import Manifest, _digest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.native.samples import store, whole
from tests.property.layouts import Shard

# Far above what is needed here, far below what these files took.
SECONDS = 10


def put(path, shards) -> None:
    (path / "0.manifest").write_bytes(store(path, shards).manifest.encode())


def looks(path, shape):
    """Every way of looking at a checkpoint; gives the texts of what they say, in less than :data:`SECONDS` of CPU."""

    def said(work) -> str:
        try:
            found = work()
        except CheckpointError as error:
            return str(error)
        return "\n".join(map(str, getattr(found, "problems", []))) or str(found)

    begin = time.process_time()
    target = {"w": np.zeros(shape, np.uint8)}
    texts = [
        said(lambda: verify_checkpoint(path)),
        said(lambda: load_state_dict(target, path, SoloCommunicator())),
        said(lambda: list_checkpoints(path)),
    ]
    assert time.process_time() - begin < SECONDS
    return texts


def windows(count: int) -> list[Shard]:
    """Every row overlaps with every other."""
    return [Shard("w", "uint8", (2 * count,), (row,), (count,), None, 0) for row in range(count)]


def strips(count: int) -> list[Shard]:
    """Each row crosses half of the others and leaves as many holes."""
    size = count + 1
    rows = [Shard("w", "uint8", (size, size), (2 * i, 0), (1, size), None, 0) for i in range(count // 2)]
    return rows + [Shard("w", "uint8", (size, size), (0, 2 * i), (size, 1), None, 0) for i in range(count // 2)]


def dots(count: int) -> list[Shard]:
    """No row overlaps, and there are holes all over."""
    side = int(count**0.5)
    size = 2 * side + 1
    places = [(2 * i, 2 * j) for i in range(side) for j in range(side)]
    return [Shard("w", "uint8", (size, size), place, (1, 1), None, 0) for place in places]


@pytest.mark.parametrize("rows", [windows(2000), strips(1600), dots(2500)], ids=["windows", "strips", "dots"])
def test_rows_that_overlap_and_leave_holes(tmp_path, rows):
    put(tmp_path, rows)
    verified, loaded, _ = looks(tmp_path, rows[0].global_shape)
    assert "key 'w'" in verified
    assert "key 'w'" in loaded
    assert max(map(len, (verified, loaded))) < 2000


def test_what_is_compared_is_bounded(monkeypatch):
    """With a low bound the same is said of fewer rows; at and below it nothing is."""
    from paddle_flexckpt.catalog import CatalogBuilder, group_replicas, validate_coverage

    monkeypatch.setattr(validate, "MAX_OVERLAPS", 3)
    for count, tangled in ((3, 0), (4, 1)):
        builder = CatalogBuilder(0)
        for row in range(count):
            builder.add("w", "uint8", (6,), (row,), (3,) if row < count - 1 else (6 - row,))
        catalog = builder.build()
        coverage = validate_coverage(catalog, group_replicas(catalog))
        assert (len(coverage.too_many_overlaps), len(coverage.overlaps)) == ((0, 3) if not tangled else (1, 0))


def test_overlaps_that_are_few_load_as_before(tmp_path):
    rows = [Shard("w", "uint8", (40,), (start,), (10,), None, 0) for start in range(0, 31, 5)]
    stored = store(tmp_path, rows)
    data = np.arange(40, dtype=np.uint8)
    content = bytearray(stored.file().read_bytes())
    for row, begin in zip(rows, stored.manifest.catalog.byte_offset.tolist()):
        content[begin : begin + 10] = data[row.offset[0] : row.offset[0] + 10].tobytes()
    stored.file().write_bytes(content)
    (tmp_path / "0.manifest").write_bytes(stored.manifest.encode())
    target = {"w": np.zeros(40, np.uint8)}
    load_state_dict(target, tmp_path, SoloCommunicator(), verify="off")
    assert target["w"].tolist() == data.tolist()


def crafted(path, **replaced) -> None:
    """A manifest with other arrays and the right digest."""
    stored = store(path, [whole("w", "float32", (4,))])
    data = stored.manifest.encode()
    arrays = safetensors_numpy.load(data)
    length = int.from_bytes(data[:8], "little")
    info = json.loads(data[8 : 8 + length])["__metadata__"]
    del info["digest"]
    arrays.update(replaced)
    info["digest"] = _digest(arrays, info)
    (path / "0.manifest").write_bytes(safetensors_numpy.save(arrays, metadata=info))


def deep(depth: int) -> np.ndarray:
    return np.frombuffer(b"[" * depth + b"]" * depth, dtype=np.uint8)


CRAFTED = {
    "nested names": {"catalog.keys": deep(100_000)},
    "nested files": {"catalog.files": deep(100_000)},
    "axes": {f"catalog.{name}": np.ones((1, 100_000), np.int8) for name in ("global_shape", "offset", "shape")},
    "no axes": {f"catalog.{name}": np.ones((1, 0), np.int8) for name in ("global_shape", "offset", "shape")},
    "long name": {"catalog.dtypes": np.frombuffer(json.dumps(["x" * 1_000_000]).encode(), np.uint8)},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_manifests_give_short_errors(tmp_path, name):
    crafted(tmp_path, **CRAFTED[name])
    with pytest.raises(CorruptCheckpointError) as caught:
        SourceDirectory(tmp_path).read_manifest()
    assert len(str(caught.value)) < 1000
    (info,) = list_checkpoints(tmp_path)
    assert not info.complete
    assert not verify_checkpoint(tmp_path).ok
    with pytest.raises(CorruptCheckpointError):
        load_merged_state_dict(str(tmp_path))


def test_the_same_manifest_without_a_change_is_read(tmp_path):
    crafted(tmp_path)
    assert isinstance(SourceDirectory(tmp_path).read_manifest(), Manifest)


def test_notes_of_saves_with_deep_nesting_are_no_notes(tmp_path):
    directory = open_to_save(tmp_path)
    put(tmp_path, [whole("w", "float32", (4,))])
    (tmp_path / "3.saving").write_bytes(deep(100_000).tobytes())
    assert directory.cleaner.remove_dead_saves() == ["3.saving"]


def test_a_header_with_very_many_tensors(tmp_path):
    """Linear: safetensors' own spelling is read by one expression for each entry."""
    count = 100_000
    entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    begin = time.process_time()
    manifest = SourceDirectory(tmp_path).read_manifest()
    assert time.process_time() - begin < SECONDS
    assert len(manifest.catalog) == count
    assert os.path.getsize(tmp_path / "model.safetensors") > 5_000_000


@pytest.mark.parametrize("shape", ["01", "-1", "1.0", "1e3", " 1", "1,", "9" * 40])
def test_numbers_that_are_none_of_a_header(tmp_path, shape):
    text = '{"w":{"dtype":"U8","shape":[' + shape + '],"data_offsets":[0,1]}}'
    text += " " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"\0")
    if shape == " 1":
        assert len(SourceDirectory(tmp_path).read_manifest().catalog) == 1
        return
    with pytest.raises((CorruptCheckpointError, ValidationError)):
        SourceDirectory(tmp_path).read_manifest()
