"""export_safetensors: files that the safetensors library opens, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paddle_flexckpt import export_safetensors
from paddle_flexckpt.aoa import compile_program
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign.formats import SourceDirectory, not_empty
from paddle_flexckpt.media import local
from paddle_flexckpt.media.local import LocalBackend, LocalOutputFile
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.tools import export, tensor_files
from paddle_flexckpt.tools.whole_tensors import iterate_tensors
from paddle_flexckpt.transfer import plan
from tests.native.samples import flip
from tests.property import examples
from tests.saved import data_file, short
from tests.transfer.samples import SHAPES, save, values_of

# complex128 has no code in safetensors.
KINDS = {f"m.{name}": (name, SHAPES[i % 4]) for i, name in enumerate(DTYPES) if name != "complex128"}
KINDS.update({"m.empty": ("float32", (0, 3)), "other": ("bfloat16", (3, 3)), "m.bfloat16.moment1_0": ("float32", (6,))})
KINDS["extra_state.rng.rank0"] = ("uint8", (16,))
TINY_HEADER = 200
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


TINY = {"b": np.asarray([1, 2, 3], np.int8), "ä": np.asarray([1, 2], np.float32), "c": np.asarray(0.5, np.float64)}


def test_every_byte_of_a_file(tmp_path):
    """Wide elements come first, data begins at a multiple of eight, and names are written as they are."""
    save(tmp_path / "in", TINY)
    export_safetensors(tmp_path / "in", tmp_path / "out")
    header = (
        '{"__metadata__":{"format":"pt"},"c":{"dtype":"F64","shape":[],"data_offsets":[0,8]},'
        '"ä":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},"b":{"dtype":"I8","shape":[3],"data_offsets":[16,19]}}'
    ).encode()
    header += b" " * (-len(header) % 8)
    data = b"".join(TINY[key].tobytes() for key in "cäb")
    expected = len(header).to_bytes(8, "little") + header + data
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected


def test_every_byte_of_an_index(tmp_path):
    """In the order of names, as many in a file as fit: of 3 and 8 bytes two in 11, and not three in 18."""
    save(tmp_path / "in", TINY)
    assert len(export_safetensors(tmp_path / "in", tmp_path / "one", max_file_bytes=19).files) == 1
    report = export_safetensors(tmp_path / "in", tmp_path / "out", max_file_bytes=18)
    assert report.files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert (tmp_path / "out" / "model.safetensors.index.json").read_text() == (
        '{\n  "metadata": {\n    "total_size": 19\n  },\n  "weight_map": {\n'
        '    "b": "model-00001-of-00002.safetensors",\n    "c": "model-00001-of-00002.safetensors",\n'
        '    "ä": "model-00002-of-00002.safetensors"\n  }\n}\n'
    )
    files = export_safetensors(tmp_path / "in", tmp_path / "three", max_file_bytes=10).files
    assert len(files) == 3


def test_what_is_reported(tmp_path, caplog):
    save(tmp_path / "in", {**TINY, "c.moment1_0": np.ones(2, np.float32)}, unique_id=3)
    with caplog.at_level("DEBUG", "paddle_flexckpt"):
        report = export_safetensors(tmp_path / "in", tmp_path / "out")
    assert (report.source, report.unique_id, report.output) == (str(tmp_path / "in"), 3, str(tmp_path / "out"))
    assert (report.keys, report.left_out, report.total_bytes, report.unfed) == (3, 1, 19, [])
    assert (report.bytes_extra, report.peak_scratch_bytes, report.maybe_fused, report.replicas_used) == (0, 0, [], {})
    assert sorted(report.seconds) == ["plan", "total", "write"]
    assert 0 < report.seconds["plan"] + report.seconds["write"] <= report.seconds["total"] * 1.001
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_states_that_nothing_feeds_are_told_with_the_states(tmp_path):
    save(tmp_path / "in", {key: np.ones((2, 2), np.float32) for key in ("a", "b", "a.moment1_0")})
    program = {"aoa_statements": ["a, b -> t, axis=0"]}
    assert export_safetensors(tmp_path / "in", tmp_path / "out", program).unfed == []
    report = export_safetensors(tmp_path / "in", tmp_path / "all", program, states=True)
    assert report.unfed == ["t.moment1_0"]


def test_what_may_be_fused_is_told_once(tmp_path, caplog):
    """These are cut along their last axis, and nothing is recorded of their order."""
    kinds = {"a": ("float32", (4, 6)), "b": ("float32", (4, 6)), "c": ("float32", (6,)), "d": ("int8", (4, 6))}
    save(tmp_path / "in", values_of(kinds))
    report = export_safetensors(tmp_path / "in", tmp_path / "out")
    assert report.maybe_fused == ["a", "b", "d"]
    assert len([record for record in caplog.records if "in which order" in record.message]) == 1
    statements = {"aoa_statements": ["b -> b", "d -> e"]}
    assert export_safetensors(tmp_path / "in", tmp_path / "few", statements).maybe_fused == ["a"]


def test_one_tensor_is_written_before_the_next_is_read(tmp_path, monkeypatch):
    save(tmp_path / "in", TINY, world=1)
    events, sizes = [], {}
    original = FileReader.read, LocalOutputFile.write
    create = LocalBackend.create

    def noting(self, name, mode, size=None):
        if name.endswith(".safetensors"):
            sizes[name] = size
        return create(self, name, mode, size)

    monkeypatch.setattr(LocalBackend, "create", noting)
    monkeypatch.setattr(FileReader, "read", lambda *args: events.append("read") or original[0](*args))
    monkeypatch.setattr(
        LocalOutputFile, "write", lambda self, data: events.append(len(data)) or original[1](self, data)
    )
    monkeypatch.setattr(LocalOutputFile, "finish", finishing(events, LocalOutputFile.finish))
    export_safetensors(tmp_path / "in", tmp_path / "out", max_file_bytes=18)
    assert sizes == {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    first, second = (size - data for size, data in zip(sizes.values(), (11, 8)))
    assert events[:6] == [first, "read", 8, "read", 3, "finish"]
    assert events[6:10] == [second, "read", 8, "finish"]


def finishing(events, original):
    def finish(self):
        events.append("finish")
        return original(self)

    return finish


def test_one_tensor_and_a_tile_are_in_memory(tmp_path, monkeypatch):
    """Each tensor is 4 MB; there are 16 of them, every other one computed."""
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 1 << 14)
    size = 4 << 20
    save(tmp_path / "in", {f"t{i}": np.full(size // 4, i, np.float32) for i in range(16)}, world=1)
    statements = [f"t{i} -> u{i}, scale=2.0" for i in range(0, 16, 2)]
    for number, (config, limit) in enumerate([({"aoa_statements": statements}, 3 * size), (None, 1 << 30)]):
        tracemalloc.start()
        try:
            export_safetensors(tmp_path / "in", tmp_path / f"out{number}", config, max_file_bytes=limit)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # The reader's staging block and the plans come on top.
        assert size < peak < 2 * size
    found = load_file(tmp_path / "out0" / "model-00006-of-00006.safetensors")
    assert {key: float(array[-1]) for key, array in found.items()} == {"u8": 16.0}


PROGRAMS = (
    None,
    ["w^T -> t"],
    ["w^T -> t, scale=0.5", 'v -> v, dtype="float16"'],
    ["w, v -> wv, axis=1", "w -> w"],
    ["w -> top, bottom, axis=0", 'v -> long, pad="[[1, 2], [0, 1]]", fill=3'],
    ['w -> x, permute="[1, 0]"', 'w -> y, dtype="bfloat16"', 'v -> z, slice="[1:, :]"'],
)


@examples(30)
@given(
    rows=st.integers(1, 5).map(lambda n: 2 * n),
    columns=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    program=st.sampled_from(PROGRAMS),
    band_bytes=st.integers(1, 200),
    limit=st.sampled_from([1, 300, 1 << 30]),
    world=st.integers(1, 3),
)
def test_bands_make_the_same_files_as_whole_tensors(rows, columns, program, band_bytes, limit, world):
    """Whatever statements make of them; a shard is cut by columns, three axes as flattened ranges."""
    kinds = {"w": ("float32", (rows, columns[0])), "v": ("float32", (rows, columns[1])), "e": ("int8", (0, 3))}
    kinds |= {"u": ("float64", (2, 3, columns[0])), "s": ("uint8", ()), "n": ("int16", (columns[1],))}
    program = program and {"aoa_statements": program}
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        values = values_of(kinds)
        for key in "wv":  # they are cast
            values[key] = np.arange(values[key].size, dtype=np.float32).reshape(values[key].shape)
        save(Path(root, "in"), values, world)
        whole = export_safetensors(f"{root}/in", f"{root}/whole", program, max_file_bytes=limit)
        patch.setattr(export, "BAND_BYTES", band_bytes)
        bands = export_safetensors(f"{root}/in", f"{root}/bands", program, max_file_bytes=limit)
        assert (bands.files, bands.keys, bands.total_bytes) == (whole.files, whole.keys, whole.total_bytes)
        assert bands.maybe_fused == whole.maybe_fused
        for file in whole.files:
            assert Path(root, "bands", file).read_bytes() == Path(root, "whole", file).read_bytes()


@pytest.mark.parametrize(
    "statement",
    [None, "w^T -> t", "w -> s, scale=2.0", 'w^T -> c, dtype="bfloat16"', 'w -> z, pad="[[0, 1], [0, 0]]", fill=0'],
)
def test_of_a_large_tensor_a_band_is_in_memory(tmp_path, monkeypatch, statement):
    size, band = 64 << 20, 4 << 20
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 1 << 17)
    monkeypatch.setattr(export, "BAND_BYTES", band)
    written, write = [], LocalOutputFile.write
    monkeypatch.setattr(LocalOutputFile, "write", lambda self, data: written.append(len(data)) or write(self, data))
    save(tmp_path / "in", {"w": np.arange(size // 4, dtype=np.float32).reshape(-1, 1024)}, world=1)
    written.clear()
    tracemalloc.start()
    try:
        report = export_safetensors(tmp_path / "in", tmp_path / "out", statement and {"aoa_statements": [statement]})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Beside the band, its tile and that tile's operand: blocks that are read whole, at most KEPT_BLOCKS.
    assert band < peak < band + 24 * (1 << 20)
    assert len(written) >= report.total_bytes // band
    assert max(written) <= band
    assert report.bytes_verified == report.bytes_read >= size
    if statement is None:
        assert (report.bytes_read, report.bytes_extra) == (size, 0)


def test_bands_are_as_large_as_may_be(tmp_path, monkeypatch):
    """Each band of a transposed tensor reads all of what is stored: so there are few."""
    monkeypatch.setattr(export, "BAND_BYTES", 7 * 400)
    save(tmp_path / "in", {"w": np.zeros((100, 20), np.float32)}, world=1)
    written, write = [], LocalOutputFile.write
    monkeypatch.setattr(LocalOutputFile, "write", lambda self, data: written.append(len(data)) or write(self, data))
    export_safetensors(tmp_path / "in", tmp_path / "out", {"aoa_statements": ["w^T -> t"]})
    assert written[1:] == [7 * 400, 7 * 400, 6 * 400]


@pytest.mark.parametrize(("verify", "notices"), [("read", True), ("full", True), ("off", False)])
def test_a_damaged_block_between_two_bands_is_noticed(tmp_path, monkeypatch, verify, notices):
    """No band has all of it."""
    monkeypatch.setattr(export, "BAND_BYTES", 3 << 18)
    save(tmp_path / "in", {"w": np.zeros((6, 3 << 17), np.uint8)}, world=1)
    manifest = SourceDirectory(tmp_path / "in").read_manifest()
    flip(tmp_path / "in" / data_file(tmp_path / "in"), int(manifest.catalog.byte_offset[0]) + (3 << 18))
    if notices:
        refused("are damaged", tmp_path / "in", tmp_path / "out", kind=CorruptCheckpointError, verify=verify)
    else:
        assert export_safetensors(tmp_path / "in", tmp_path / "out", verify=verify).bytes_verified == 0


def test_another_programs_large_tensor_is_exported_in_bands(tmp_path, monkeypatch):
    """Its files have no checksums."""
    value = np.arange(4000, dtype=np.int16).reshape(40, 100)
    (tmp_path / "in").mkdir()
    save_file({"w": value}, tmp_path / "in" / "model.safetensors")
    monkeypatch.setattr(export, "BAND_BYTES", 1000)
    report = export_safetensors(tmp_path / "in", tmp_path / "out", {"aoa_statements": ["w^T -> t"]})
    assert (report.keys, report.bytes_verified) == (1, 0)
    assert load_file(tmp_path / "out" / "model.safetensors")["t"].tolist() == value.T.tolist()


def test_tensors_without_elements_and_filled_ones_have_their_place(tmp_path):
    values = {"a": np.zeros((0, 3), np.float32), "b": np.ones(2, np.float32), "z": np.zeros((2, 0), np.int64)}
    save(tmp_path / "in", values)
    made = ['b -> c, pad="[[0, 3]]", fill=2', 'b -> c2, pad="[[1, 0]]", fill=3, dtype="float16"', "b -> y", "b -> b"]
    program = {"aoa_statements": made}
    for limit, count in ((1, 6), (1 << 20, 1)):
        out = tmp_path / str(limit)
        report = export_safetensors(tmp_path / "in", out, program, max_file_bytes=limit)
        assert (len(report.files), report.keys) == (count, 6)
        found = {}
        for file in report.files:
            found.update(load_file(out / file))
        assert {key: (array.shape, array.ravel().tolist()) for key, array in found.items()} == {
            "a": ((0, 3), []), "b": ((2,), [1, 1]), "z": ((2, 0), []),
            "c": ((5,), [1, 1, 2, 2, 2]), "c2": ((3,), [3, 1, 1]), "y": ((2,), [1, 1]),
        }  # fmt: skip


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
    used = ("m.float32", "m.float16", "m.bfloat16", "other")
    program = [
        "m.float32 -> a, scale=0.5",
        'm.float16 -> b, dtype="bfloat16"',
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
    assert (header["b"]["dtype"], len(found["b"])) == ("BF16", 2 * values["m.float16"].size)
    assert report.peak_scratch_bytes > 0


def test_an_id_is_chosen(tmp_path):
    for value in (1.0, 2.0):
        save(tmp_path / "in", {"x": np.full(2, value, np.float32)}, world=1)
    for unique_id, value in ((0, 1.0), (None, 2.0)):
        out = tmp_path / f"out {unique_id}"
        export_safetensors(tmp_path / "in", out, unique_id=unique_id)
        assert load_file(out / "model.safetensors")["x"].tolist() == [value] * 2


def test_how_much_is_verified_is_chosen(tmp_path):
    save(tmp_path / "in", {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, world=1)
    program = {"aoa_statements": ['w -> w, slice="[0:1]"']}
    for verify, verified, extra in (("read", 48, 0), ("full", 48, 32), ("off", 0, 0), (False, 0, 0)):
        report = export_safetensors(tmp_path / "in", tmp_path / f"out {verify}", program, verify=verify)
        assert (report.bytes_verified, report.bytes_extra) == (verified, extra)


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
    refused(
        f"got no key that starts with 'x.' among {len(KINDS)}. Remedy .FC201.: correct prefix",
        checkpoint,
        out,
        prefix="x",
    )
    refused(
        "nothing to export; got optimizer states.*Remedy .FC201.: give states=True",
        checkpoint,
        out,
        prefix="extra_state",
    )
    removed = {"aoa_statements": [f"{key} -> _" for key in KINDS]}
    refused("there is nothing to export; got no key among 0", checkpoint, out, removed, states=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("there is nothing to export", checkpoint, empty, prefix="x")
    refused("max_file_bytes has to be an integer >= 1; got 0", checkpoint, out, max_file_bytes=0)
    refused("verify has to be .*'never'", checkpoint, out, verify="never")
    refused("unexpected keyword argument 'verified'", checkpoint, out, kind=TypeError, verified="read")
    compiled = compile_program(["other -> x"], SourceDirectory(checkpoint).read_manifest().catalog, None)
    refused("has to be a dict with 'aoa_statements'; got a TensorMapping", checkpoint, out, compiled)
    (used / "mine").unlink()
    (used / "directory").mkdir()
    with pytest.raises(ValidationError, match="is not empty"):
        export_safetensors(checkpoint, used)
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
    refused("another use for this name .key 'm.__metadata__'.", tmp_path / "in", tmp_path / "out", prefix="m")


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path):
    save(tmp_path / "in", values_of({"a": ("float32", (1000,)), "b": ("float32", (1000,))}), world=1)
    file = tmp_path / "in" / data_file(tmp_path / "in")
    content = file.read_bytes()
    file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    for out in (tmp_path / "new", tmp_path / "there"):
        if out.name == "there":
            out.mkdir()
        refused("are damaged", tmp_path / "in", out, kind=CorruptCheckpointError, max_file_bytes=4000)
    export_safetensors(tmp_path / "in", tmp_path / "new", verify=False)
    file.unlink()
    refused("is missing", tmp_path / "in", tmp_path / "more", kind=CorruptCheckpointError)


def test_a_header_that_no_reader_would_take(checkpoint, tmp_path, monkeypatch):
    for size, fits in ((TINY_HEADER, True), (TINY_HEADER - 1, False)):
        monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", size)
        save(tmp_path / f"in {size}", TINY)
        if fits:
            export_safetensors(tmp_path / f"in {size}", tmp_path / f"out {size}")
            continue
        text = f"the header of model.safetensors would have {TINY_HEADER} bytes; safetensors allows {size}. Remedy"
        refused(text, tmp_path / f"in {size}", tmp_path / f"out {size}")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fails", ["make_directory", "create", "finish", "sync", "remove"])
def test_whatever_fails_the_output_is_as_it_was(tmp_path, monkeypatch, there, fails):
    save(tmp_path / "in", TINY)
    out, calls = tmp_path / "out", []
    if there:
        out.mkdir()
    name = "sync" if fails == "remove" else fails
    owner = LocalOutputFile if fails == "finish" else LocalBackend
    original = getattr(owner, name)

    def failing(self, *args, **options):
        calls.append(args)
        # The index is synchronised too.
        if len(calls) == {"create": 2, "finish": 2}.get(name, 1) and (name != "sync" or os.listdir(out)):
            raise OSError(28, "No space left on device")
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, failing)
    if fails == "remove":
        monkeypatch.setattr(LocalBackend, "remove", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="No space left"):
            export_safetensors(tmp_path / "in", out)
        return
    refused("No space left", tmp_path / "in", out, kind=OSError, max_file_bytes=18)


def test_a_checkpoint_that_cannot_be_read_is_the_error_of_the_file_system(tmp_path, monkeypatch):
    save(tmp_path / "in", TINY)
    file = tmp_path / "in" / data_file(tmp_path / "in")
    file.unlink()
    file.symlink_to(file)
    refused("symbolic links", tmp_path / "in", tmp_path / "out", kind=OSError)


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
    flip(path / data_file(path), int(manifest.catalog.byte_offset[row]))
    (path / data_file(path, 1)).unlink()
    with caplog.at_level("WARNING", "paddle_flexckpt"):
        report = export_safetensors(path, tmp_path / "out")
    check_tensors(tmp_path / "out" / "model.safetensors", {key: values[key] for key in MODEL})
    assert "1_0-1.safetensors is missing" in short(report.replicas_used["m.bfloat16"])
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


@pytest.mark.parametrize("below", ["", "step_00000001"])
def test_an_output_that_has_a_checkpoint_is_not_said_to_be_emptied(tmp_path, below):
    backend = open_backend(tmp_path)
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / below / "0.manifest").write_bytes(b"")
    text = str(not_empty(backend, "output"))
    assert "has a checkpoint" in text and "is not empty. Remedy (FC405): give another output" in text
    assert "empty it" not in text
    (tmp_path / below / "0.manifest").rename(tmp_path / below / "notes")
    assert "is not empty. Remedy (FC405): give another output, or empty it" in str(not_empty(backend, "output"))
