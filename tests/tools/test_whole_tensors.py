"""iterate_tensors: one tensor at a time, exactly its bytes."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.aoa import TensorInfo, compile_program
from paddle_flexckpt.catalog import CorruptCheckpointError, Order, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.tools import whole_tensors
from paddle_flexckpt.tools.comparison import diff
from paddle_flexckpt.tools.digests import digest_checkpoint
from paddle_flexckpt.tools.whole_tensors import WholeTensors, iterate_tensors
from paddle_flexckpt.transfer import files, plan
from tests.saved import data_file
from tests.transfer.samples import SHAPES, save, values_of

KINDS = {f"of.{name}": (name, SHAPES[i % 4]) for i, name in enumerate(DTYPES)}
KINDS.update({"empty": ("float32", (0, 3)), "extra_state.common": ("uint8", (4,))})


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


@pytest.fixture(scope="module")
def checkpoint(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    save(path, values)
    return str(path), CheckpointDirectory(str(path)).read_manifest()


def statements(manifest, *texts):
    return compile_program({"aoa_statements": list(texts)}, manifest.catalog, None)


def test_every_tensor_by_default(checkpoint, values):
    found = dict(iterate_tensors(*checkpoint))
    assert list(found) == sorted(set(KINDS) - {"extra_state.common"})
    for key, array in found.items():
        assert (array.dtype, array.shape) == (values[key].dtype, values[key].shape)
        assert array.tobytes() == values[key].tobytes()


def test_names_and_their_order(checkpoint, values):
    names = ["of.int8", "extra_state.common", "of.bool"]
    assert [name for name, _ in iterate_tensors(*checkpoint, names=names)] == names
    assert list(iterate_tensors(*checkpoint, names=[])) == []
    with pytest.raises(ValidationError) as caught:
        next(iterate_tensors(*checkpoint, names=["of.int8", "of"]))
    said = "there is no such key (key 'of'); got 19 keys, such as ['empty', 'extra_state.common', 'of.bfloat16']"
    assert str(caught.value) == said
    with pytest.raises(ValidationError, match="a key is asked for twice .key 'of.int8'."):
        next(iterate_tensors(*checkpoint, names=["of.int8", "of.bool", "of.int8"]))


@pytest.mark.parametrize("tile", [1, 5, 1 << 22])
def test_what_statements_make(tmp_path, monkeypatch, tile):
    monkeypatch.setattr(plan, "TILE_ELEMENTS", tile)
    rng = np.random.default_rng(0)
    values = {key: rng.standard_normal((6, 4)).astype(np.float32) for key in ("a", "b", "rest")}
    save(tmp_path, values)
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    mapping = statements(
        manifest,
        'a, b -> s, sum, weights="[0.25, 4.0]"',
        "s -> t, scale=3.0",
        "_ -> c, fill=2, optional",
        "a, b -> ab, axis=1",
    )
    with pytest.raises(ValidationError, match="no such key .key 'a'"):
        next(iterate_tensors(str(tmp_path), manifest, mapping, ["a"]))
    mapping = statements(manifest, 'a, b -> t, sum, weights="[0.25, 4.0]"', "a^T, b^T -> ab, axis=1")
    found = dict(iterate_tensors(str(tmp_path), manifest, mapping))
    assert list(found) == ["ab", "rest", "t"]
    a, b = values["a"], values["b"]
    assert found["t"].tobytes() == (a * np.float32(0.25) + b * np.float32(4)).tobytes()
    assert found["ab"].tobytes() == np.concatenate([a.T, b.T], 1).tobytes()
    assert found["rest"].tobytes() == values["rest"].tobytes()


def test_exactly_the_bytes_that_are_needed_are_read(checkpoint, values, monkeypatch):
    path, manifest = checkpoint
    readers = []
    names = ["of.float32", "of.complex128", "empty"]
    monkeypatch.setattr(files, "FileReader", lambda *args: readers.append(FileReader(*args)) or readers[-1])
    tensors, needed = iterate_tensors(path, manifest, names=names), 0
    assert readers == []
    for name, (key, array) in zip(names, tensors):
        assert (key, array.tobytes()) == (name, values[name].tobytes())
        needed += values[name].nbytes
        assert readers[0].count.bytes_read == needed
    assert list(tensors) == []
    assert len(readers) == 1
    assert readers[0].count.bytes_verified > 0


def test_one_tensor_and_a_tile_are_in_memory(tmp_path, monkeypatch):
    """Each tensor is 4 MB; there are 16 of them, every other one computed."""
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 1 << 14)
    size = 4 << 20
    save(tmp_path, {f"t{i}": np.full(size // 4, i, np.float32) for i in range(16)}, world=1)
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    mapping = statements(manifest, *(f"t{i} -> u{i}, scale=2.0" for i in range(0, 16, 2)))
    tracemalloc.start()
    try:
        for _, array in iterate_tensors(str(tmp_path), manifest, mapping):
            assert array[-1] >= 0
            del array
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The reader's staging block and the plans come on top.
    assert size < peak < 2 * size


def test_what_statements_fill_is_not_made_before_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 1 << 14)
    count = 1 << 20
    save(tmp_path, {"a": np.ones(1, np.float32), "z": np.ones((0, 2), np.int8)}, world=1)
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    mapping = statements(manifest, *(f'a -> t{i}, pad="[[0, {count - 1}]]", fill={i}' for i in range(8)))
    found = []
    tracemalloc.start()
    try:
        for key, array in iterate_tensors(str(tmp_path), manifest, mapping):
            found.append((key, array.shape, array[:1].tolist(), array[-1:].tolist()))
            del array
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [*((f"t{i}", (count,), [1], [i]) for i in range(8)), ("z", (0, 2), [], [])]
    assert 4 * count < peak < 8 * count


def test_who_stops_leaves_nothing_open(tmp_path, caplog):
    """And is told what was damaged of what was read."""
    values = values_of({"a": ("float32", (5,)), "b": ("float32", (3, 3))})
    save(tmp_path, values, world=1, replicas=2, save_replicas=True)
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    for name in (data_file(tmp_path), "0.manifest"):  # the manifest is read by the caller
        (tmp_path / name).unlink()
    before = len(os.listdir("/proc/self/fd"))
    tensors = iterate_tensors(str(tmp_path), manifest)
    with caplog.at_level("WARNING", "paddle_flexckpt"):
        key, array = next(tensors)
        assert (key, array.tobytes(), caplog.text) == ("a", values["a"].tobytes(), "")
        tensors.close()
    assert f"{tmp_path} is damaged: " in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        next(iterate_tensors(str(tmp_path), manifest, use_replicas=False))
    with pytest.raises(ValidationError, match="verify"):
        next(iterate_tensors(str(tmp_path), manifest, verify="never"))


def test_the_error_of_the_file_system_stays_one(tmp_path):
    save(tmp_path, values_of({"a": ("float32", (5, 6))}), world=1)
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    file = tmp_path / data_file(tmp_path)
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        next(iterate_tensors(str(tmp_path), manifest))


def test_only_what_is_asked_for_has_to_have_a_natural_order(tmp_path):
    values = {key: np.arange(8, dtype=np.float32).reshape(2, 4) for key in "ab"}
    save(tmp_path, values, world=2)
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    unknown = replace(manifest, catalog=manifest.catalog.with_orders({"b": Order(2, 1, None)}))
    ((_, array),) = iterate_tensors(str(tmp_path), unknown, names=["a"])
    assert array.tolist() == values["a"].tolist()
    with pytest.raises(ValidationError, match="is not in natural order.*'b'"):
        next(iterate_tensors(str(tmp_path), unknown))
    fused = replace(manifest, catalog=manifest.catalog.with_orders({"b": Order(2, 1, "fused_ffn")}))
    found = dict(iterate_tensors(str(tmp_path), fused))
    assert found["a"].tolist() == values["a"].tolist()
    assert found["b"].tolist() == values["b"][:, [0, 2, 1, 3]].tolist()


def test_targets_are_whole_and_share_no_memory():
    memory = WholeTensors()
    infos = {"b": TensorInfo((2, 3), "float32"), "a": TensorInfo((), "int8"), "none": TensorInfo((0, 3), "int64")}
    targets = memory.targets(infos, None)
    assert (targets.catalog.keys, targets.mapping, targets.memory) == (("b", "a", "none"), None, memory)
    assert targets.aliases == targets.raw_names == ((), (), ())
    assert (targets.spans.tolist(), targets.spans.dtype) == ([[0, 0]] * 3, np.int64)
    opened = memory.open(0, True)
    opened.array[:] = np.arange(6)
    assert (opened.array.dtype, opened.staged) == (np.float32, False)
    key, array = memory.take(0)
    assert (key, array.tolist(), array.base is opened.array) == ("b", [[0, 1, 2], [3, 4, 5]], True)
    # Nothing is held of it, and nothing is made of what was not filled.
    assert memory.take(2)[1].shape == (0, 3)
    for row in (0, 1):
        with pytest.raises(ValueError, match="cannot reshape"):
            memory.take(row)


def test_what_keeps_a_targets_values_has_none_here(tmp_path):
    save(tmp_path, values_of({"a": ("float32", (5,))}), world=1)
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    mapping = statements(manifest, 'a -> a, resize="[6]", fill="keep"')
    with pytest.raises(ValidationError, match="keep what a target has"):
        next(iterate_tensors(str(tmp_path), manifest, mapping, ["a"]))


def test_a_missing_file_is_found_before_anything_is_read(tmp_path):
    save(tmp_path, values_of({"a": ("float32", (5, 6)), "b": ("float32", (3, 3))}))
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    (tmp_path / data_file(tmp_path, 2)).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"2_0-\w+\.safetensors is missing"):
        next(iterate_tensors(str(tmp_path), manifest))


@pytest.mark.parametrize("work", ["digest", "diff"])
def test_of_a_large_tensor_a_band_is_in_memory(tmp_path, monkeypatch, work):
    """The two are cut differently, so no checksums serve."""
    size, band = 48 << 20, 2 << 20
    values = {"w": np.arange(size // 4, dtype=np.float32).reshape(-1, 1024), "v": np.ones(7, np.float32)}
    save(tmp_path / "one", values, world=1)
    changed = {"w": values["w"].copy(), "v": values["v"]}
    changed["w"][[5, 700, 12000], [3, 900, 1]] += 1
    save(tmp_path / "two", changed, world=2)
    expected = digest_checkpoint(tmp_path / "one"), diff(tmp_path / "one", tmp_path / "two").differing
    del changed, values
    monkeypatch.setattr(whole_tensors, "BAND_BYTES", band)
    tracemalloc.start()
    try:
        if work == "digest":
            assert digest_checkpoint(tmp_path / "one") == expected[0]
        else:
            found = diff(tmp_path / "one", tmp_path / "two").differing
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20  # blocks that are read whole: 16 MiB of each side, at most
    if work == "diff":
        assert {key: vars(each) for key, each in found.items()} == {
            key: vars(each) for key, each in expected[1].items()
        }
        assert (found["w"].changed, found["w"].first_index) == (3, [5, 3])
