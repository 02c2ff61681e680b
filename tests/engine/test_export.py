"""export_safetensors: files that the safetensors library opens, whole or not at all."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from paddle_flexckpt import export_safetensors
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.engine.whole_tensors import iterate_tensors
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media import local
from tests.engine.samples import SHAPES, save, values_of
from tests.native.samples import flip

# complex128 has no code in safetensors.
KINDS = {f"m.{name}": (name, SHAPES[i % 4]) for i, name in enumerate(DTYPES) if name != "complex128"}
KINDS.update({"m.empty": ("float32", (0, 3)), "other": ("bfloat16", (3, 3)), "m.bfloat16.moment1_0": ("float32", (6,))})
KINDS["extra_state.rng.rank0"] = ("uint8", (16,))
MODEL = sorted(set(KINDS) - {"m.bfloat16.moment1_0", "extra_state.rng.rank0"})


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


@pytest.fixture(scope="module")
def checkpoint(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "checkpoint"
    save(path, values)
    return path


def check_tensors(file, wanted):
    """The file holds exactly the wanted arrays."""
    with safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert sorted(opened.keys()) == sorted(wanted)
    header, data = raw(file)
    for name, array in wanted.items():
        entry = header[name]
        assert (entry["dtype"], entry["shape"]) == (DTYPES[array.dtype.name].safetensors, list(array.shape))
        begin, end = entry["data_offsets"]
        assert begin % array.itemsize == 0
        assert data[begin:end] == array.tobytes()


def raw(file):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    return header, content[8 + length :]


def test_one_file_without_states(checkpoint, values, tmp_path):
    report = export_safetensors(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == report.files == ["model.safetensors"]
    check_tensors(tmp_path / "out" / "model.safetensors", {key: values[key] for key in MODEL})
    total = sum(values[key].nbytes for key in MODEL)
    assert (report.keys, report.left_out, report.total_bytes, report.bytes_read) == (len(MODEL), 2, total, total)
    assert 0 < report.bytes_verified <= total
    assert "2 states left out" in report.summary()
    assert json.loads(json.dumps(report.as_dict()))["files"] == report.files


def test_the_safetensors_library_loads_the_values(tmp_path):
    values = values_of({"a": ("float32", (4, 3)), "b": ("int64", ()), "c": ("float16", (2, 3, 4))})
    save(tmp_path / "in", values)
    export_safetensors(tmp_path / "in", tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(loaded) == ["a", "b", "c"]
    for key, array in loaded.items():
        assert (array.dtype, array.shape) == (values[key].dtype, values[key].shape)
        assert array.tobytes() == values[key].tobytes()


def test_states_where_they_are_wanted(checkpoint, values, tmp_path):
    report = export_safetensors(checkpoint, tmp_path, states=True)
    check_tensors(tmp_path / "model.safetensors", values)
    assert (report.keys, report.left_out) == (len(KINDS), 0)


@pytest.mark.parametrize("limit", [1, 100, 256])
def test_numbered_files_and_their_index(checkpoint, values, tmp_path, limit):
    report = export_safetensors(checkpoint, tmp_path, max_file_bytes=limit)
    count = len(report.files)
    assert count > 1
    assert report.files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert sorted(os.listdir(tmp_path)) == sorted([*report.files, "model.safetensors.index.json"])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(values[key].nbytes for key in MODEL)}
    assert list(index["weight_map"]) == MODEL
    sizes = []
    for file in report.files:
        names = [name for name, place in index["weight_map"].items() if place == file]
        assert names
        check_tensors(tmp_path / file, {name: values[name] for name in names})
        sizes.append(sum(values[name].nbytes for name in names))
        assert sizes[-1] <= limit or sum(values[name].nbytes > 0 for name in names) == 1
    # No file could have taken the first tensor of the next one.
    firsts = [min(name for name, place in index["weight_map"].items() if place == file) for file in report.files]
    assert all(size + values[first].nbytes > limit for size, first in zip(sizes, firsts[1:]))


def test_a_prefix_chooses_and_is_taken_off(checkpoint, values, tmp_path):
    export_safetensors(checkpoint, tmp_path, prefix="m")
    check_tensors(tmp_path / "model.safetensors", {k[2:]: values[k] for k in MODEL if k.startswith("m.")})


def test_statements_say_what_is_written(checkpoint, values, tmp_path):
    used = ("m.float32", "m.float64", "m.bfloat16", "other")
    program = [
        "m.float32 -> a, scale=0.5",
        'm.float64 -> b, dtype="bfloat16"',
        "m.bfloat16^T -> c",
        *(f"{key} -> _" for key in MODEL if key not in used),
    ]
    report = export_safetensors(checkpoint, tmp_path, {"aoa_statements": program})
    header, data = raw(tmp_path / "model.safetensors")
    assert sorted(header) == ["a", "b", "c", "other"]
    found = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    half = values["m.float32"] * np.float32(0.5)
    assert np.frombuffer(found["a"], np.float32).tolist() == pytest.approx(half.reshape(-1).tolist(), nan_ok=True)
    assert found["c"] == values["m.bfloat16"].T.tobytes()
    assert found["other"] == values["other"].tobytes()
    assert (header["b"]["dtype"], len(found["b"])) == ("BF16", 2 * values["m.float64"].size)
    assert report.peak_scratch_bytes > 0


def test_an_id_is_chosen(tmp_path):
    for value in (1.0, 2.0):
        save(tmp_path / "in", {"x": np.full(2, value, np.float32)}, world=1)
    for unique_id, value in ((0, 1.0), (None, 2.0)):
        out = tmp_path / f"out {unique_id}"
        export_safetensors(tmp_path / "in", out, unique_id=unique_id)
        assert load_file(out / "model.safetensors")["x"].tolist() == [value] * 2


# --- what is wrong ------------------------------------------------------------------------------------------------


def refused(match, path, output, *args, kind=ValidationError, **options):
    existed = output.exists()
    with pytest.raises(kind, match=match):
        export_safetensors(path, output, *args, **options)
    assert output.exists() == existed
    assert not existed or not output.is_dir() or sorted(os.listdir(output)) in ([], ["mine"])


def test_what_cannot_be_written_is_an_error_before_anything_is(checkpoint, tmp_path):
    out, used = tmp_path / "out", tmp_path / "used"
    used.mkdir()
    (used / "mine").write_text("mine")
    refused("is not empty. Remedy", checkpoint, used)
    refused("is not a directory, so nothing can be saved there. Remedy", checkpoint, used / "mine")
    refused("does not exist", tmp_path / "nowhere", out)
    refused("nothing to export; got no key that starts with 'x.' among", checkpoint, out, prefix="x")
    refused("nothing to export; got optimizer states.*states=True", checkpoint, out, prefix="extra_state")
    refused("positive integer; got 0", checkpoint, out, max_file_bytes=0)
    refused("AOA statement 1", checkpoint, out, {"aoa_statements": ["nowhere -> x"]})
    refused("no checkpoint with id 7", checkpoint, out, unique_id=7)


def test_a_dtype_that_safetensors_lacks(tmp_path):
    values = values_of({"a": ("float32", (4,)), "c": ("complex128", (4,))})
    save(tmp_path / "in", values)
    refused("no such dtype .key 'c'.; got complex128. Remedy", tmp_path / "in", tmp_path / "out")
    refused("'c'", tmp_path / "in", tmp_path / "out", {"aoa_statements": ["a -> c_is_as_it_is"]})
    export_safetensors(tmp_path / "in", tmp_path / "out", {"aoa_statements": ["c -> _"]})
    check_tensors(tmp_path / "out" / "model.safetensors", {"a": values["a"]})


def test_a_name_that_safetensors_uses(tmp_path):
    save(tmp_path / "in", {"m.__metadata__": np.zeros(2, np.float32)})
    refused("another use for this name", tmp_path / "in", tmp_path / "out", prefix="m")


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path):
    save(tmp_path / "in", values_of({"a": ("float32", (1000,)), "b": ("float32", (1000,))}), world=1)
    file = tmp_path / "in" / "0_0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    for out in (tmp_path / "new", tmp_path / "there"):
        if out.name == "there":
            out.mkdir()
        refused("are damaged", tmp_path / "in", out, kind=CorruptCheckpointError, max_file_bytes=4000)
    export_safetensors(tmp_path / "in", tmp_path / "new", verify=False)
    file.unlink()
    refused("is missing", tmp_path / "in", tmp_path / "more", kind=CorruptCheckpointError)


@pytest.mark.parametrize("fails", ["write_all", "rename", "index"])
def test_a_file_system_that_fails_leaves_nothing_behind(checkpoint, tmp_path, monkeypatch, fails):
    calls = []
    name = "rename" if fails == "rename" else "write_all"
    original = getattr(os if fails == "rename" else local, name)

    def failing(*args):
        calls.append(args)
        wrong = b"weight_map" in b"".join(args[1]) if fails == "index" else len(calls) == 3
        if wrong:
            raise OSError(28, "No space left on device")
        return original(*args)

    monkeypatch.setattr(os if fails == "rename" else local, name, failing)
    refused("No space left", checkpoint, tmp_path / "out", kind=OSError, max_file_bytes=100)
    assert len(calls) > 1
    monkeypatch.undo()
    export_safetensors(checkpoint, tmp_path / "out", max_file_bytes=100)


def test_replicas_are_exported_where_a_copy_is_damaged(values, tmp_path, caplog):
    path = tmp_path / "checkpoint"
    save(path, values, replicas=2, save_replicas=True)
    manifest = SourceDirectory(path).read_manifest()
    row = manifest.catalog.keys.index("other")
    row = int(np.flatnonzero((manifest.catalog.key == row) & (manifest.catalog.rank == 0))[0])
    flip(path / "0_0.safetensors", int(manifest.catalog.byte_offset[row]))
    (path / "1_0.safetensors").unlink()
    with caplog.at_level("WARNING", "paddle_flexckpt"):
        report = export_safetensors(path, tmp_path / "out")
    check_tensors(tmp_path / "out" / "model.safetensors", {key: values[key] for key in MODEL})
    assert "1_0.safetensors is missing" in report.replicas_used["m.bfloat16"]
    assert "bytes 0 to 6 of the shard" in report.replicas_used["other"]
    assert f"{len(report.replicas_used)} read from replicas, as copies of them are damaged" in report.summary()
    assert f"{len(report.replicas_used)} tensors were read from replicas, such as" in caplog.text
    caplog.clear()
    tensors = dict(iterate_tensors(path, manifest, names=["other"]))
    assert tensors["other"].tobytes() == values["other"].tobytes()
    assert "a tensor was read from replicas, such as 'other'" in caplog.text
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        export_safetensors(path, tmp_path / "none", use_replicas=False)
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        list(iterate_tensors(path, manifest, names=["other"], use_replicas=False))
    assert not (tmp_path / "none").exists()
