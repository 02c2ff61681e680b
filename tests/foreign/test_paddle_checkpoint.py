"""Checkpoints of Paddle's own: metadata of every release, both kinds of data files, and refusals."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, UnsafePickleError, ValidationError
from paddle_flexckpt.foreign import paddle_pickles
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_checkpoint import read_paddle_manifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.foreign.writers import NEW, OLD, metadata_pickle

W = np.arange(24, dtype=np.float32).reshape(6, 4)
B = np.arange(6).astype(ml_dtypes.bfloat16)


def read_catalog(path, unique_id=None):
    return read_paddle_manifest(path, unique_id).catalog


SHARDS = {
    0: [
        {"key": "w", "dtype": "float32", "shape": (6, 4), "offset": (0, 0), "local": (4, 4)},
        {"key": "b", "dtype": "bfloat16", "shape": (2, 3), "offset": (0, 0), "local": (2, 3), "flat": (0, 4)},
    ],
    1: [
        {"key": "w", "dtype": "float32", "shape": (6, 4), "offset": (4, 0), "local": (2, 4)},
        {"key": "b", "dtype": "bfloat16", "shape": (2, 3), "offset": (0, 0), "local": (2, 3), "flat": (4, 6)},
    ],
}
DATA = {0: {"w": W[:4], "b": B[:4]}, 1: {"w": W[4:], "b": B[4:]}}


def write(path, ending="distcp", unique_id=0, shards=SHARDS, **options):
    files = {f"{rank}_{unique_id}.{ending}": rows for rank, rows in shards.items()}
    (path / f"{unique_id}.metadata").write_bytes(metadata_pickle(files, **options))
    for rank, tensors in DATA.items():
        file = path / f"{rank}_{unique_id}.{ending}"
        if ending == "distcp":
            state = {name: array.view(np.uint16) if name == "b" else array for name, array in tensors.items()}
            file.write_bytes(pickle.dumps({**state, "StructuredToParameterName@@": {"w": "linear_0.w_0"}}, 4))
        else:
            file.write_bytes(safetensors_numpy.save(tensors))
    return path


def elements(path, row):
    manifest = SourceDirectory(path).read_manifest()
    catalog = manifest.catalog
    size = int(catalog.size[row])
    target = np.empty(size, dtype=ml_dtypes.bfloat16 if catalog.dtype_name(row) == "bfloat16" else np.float32)
    with FileReader(str(path), manifest) as reader:
        reader.read(row, StridedCopy((size,), 0, (1,), 0, (1,)), target)
    return target.tobytes()


@pytest.mark.parametrize("ending", ["distcp", "safetensors"])
@pytest.mark.parametrize("module", [NEW, OLD])
def test_shards_files_and_bytes(tmp_path, ending, module):
    catalog = read_catalog(write(tmp_path, ending, module=module))
    assert [catalog.key_name(row) for row in range(4)] == ["w", "b", "w", "b"]
    assert [catalog.file_name(row) for row in range(4)] == [f"{rank}_0.{ending}" for rank in (0, 0, 1, 1)]
    assert catalog.rank.tolist() == [0, 0, 1, 1]
    assert catalog.unpadded(2, catalog.offset) == (4, 0)
    assert catalog.unpadded(2, catalog.global_shape) == (6, 4)
    assert (catalog.flat_start.tolist(), catalog.flat_stop.tolist()) == ([-1, 0, -1, 4], [-1, 4, -1, 6])
    for row, (rank, name) in enumerate([(0, "w"), (0, "b"), (1, "w"), (1, "b")]):
        assert elements(tmp_path, row) == DATA[rank][name].tobytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_older_writers_left_fields_out(tmp_path, protocol):
    """Those before global shapes; and those whose indices had no local shape."""
    shards = {rank: [rows[0]] for rank, rows in SHARDS.items()}
    write(tmp_path, shards=shards, module=OLD, left_out=("global_shape", "replica_id"), protocol=protocol)
    catalog = read_catalog(tmp_path)
    assert [catalog.unpadded(row, catalog.global_shape) for row in range(2)] == [(6, 4), (6, 4)]


def test_ranges_of_numpys_numbers(tmp_path):
    rows = [dict(row) for row in SHARDS[0]]
    rows[1]["flat"] = (np.int64(0), np.int64(4))
    assert read_catalog(write(tmp_path, shards={0: rows, 1: SHARDS[1]})).flat_stop.tolist() == [-1, 4, -1, 6]


def test_several_ids(tmp_path):
    write(tmp_path)
    write(tmp_path, unique_id=11)
    write(tmp_path, unique_id=1)
    assert set(read_catalog(tmp_path).files) == {"0_11.distcp", "1_11.distcp"}
    assert set(read_catalog(tmp_path, 1).files) == {"0_1.distcp", "1_1.distcp"}
    with pytest.raises(ValidationError, match=r"id 7; ids here: \[0, 1, 11\]"):
        read_catalog(tmp_path, 7)
    with pytest.raises(ValidationError, match="ids here: none"):
        read_catalog(tmp_path / "nowhere")


@pytest.mark.parametrize("ending", ["distcp", "safetensors"])
def test_a_file_that_is_cut_short_or_missing(tmp_path, ending):
    file = write(tmp_path, ending) / f"1_0.{ending}"
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match=f"1_0.{ending}"):
            read_catalog(tmp_path)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"1_0\.{ending} is missing; the metadata names it"):
        SourceDirectory(tmp_path).read_manifest()


@pytest.mark.parametrize("ending", ["distcp", "safetensors"])
@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"local": (3, 4)}, {"key": "v"}], ids=str)
def test_data_that_is_not_what_the_metadata_says(tmp_path, ending, change):
    shards = {0: [{**SHARDS[0][0], **change}]}
    with pytest.raises(CorruptCheckpointError, match="metadata") as caught:
        read_catalog(write(tmp_path, ending, shards=shards))
    assert f"0_0.{ending}" in str(caught.value)
    assert change.get("key", "w") in str(caught.value)


def test_a_shard_outside_its_tensor(tmp_path):
    shards = {0: [{**SHARDS[0][0], "offset": (3, 0)}]}
    with pytest.raises(ValidationError, match="0.metadata is not usable"):
        read_catalog(write(tmp_path, shards=shards))


def test_another_object_than_metadata(tmp_path):
    (tmp_path / "0.metadata").write_bytes(pickle.dumps({"a": 1}, 4))
    with pytest.raises(CorruptCheckpointError, match="a dict in it; expected Metadata"):
        read_catalog(tmp_path)
    write(tmp_path)
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps([1], 4))
    with pytest.raises(CorruptCheckpointError, match="a list in it; expected a dict of arrays"):
        read_catalog(tmp_path)


@pytest.mark.parametrize("name", ["../0_0.distcp", "/etc/passwd", "..", "", "a\0b", "a/b"])
def test_file_names_stay_inside(tmp_path, name):
    (tmp_path / "0.metadata").write_bytes(metadata_pickle({name: SHARDS[0]}))
    with pytest.raises(CorruptCheckpointError, match="leaves the checkpoint's directory"):
        read_catalog(tmp_path)


def test_code_in_a_data_file(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    write(tmp_path)
    (tmp_path / "1_0.distcp").write_bytes(pickle.dumps({"w": Evil()}, 4))
    with pytest.raises(UnsafePickleError, match=r"1_0\.distcp.*builtins\.print"):
        SourceDirectory(tmp_path).read_manifest()


def test_there_is_nothing_to_verify_them_with(tmp_path):
    path = str(write(tmp_path))
    manifest = SourceDirectory(path).read_manifest()
    with pytest.raises(ValidationError, match="without checksums: verify='full' cannot be kept"):
        FileReader(path, manifest, "full")
    report = verify_checkpoint(path)
    assert (report.ok, report.bytes_verified, report.has_checksums) == (True, 0, False)
    assert "have no checksums and were not read" in report.summary()
    (tmp_path / "1_0.distcp").unlink()
    report = verify_checkpoint(path)
    assert not report.ok
    assert not report.recoverable
    assert "1_0.distcp is missing" in str(report.problems[0])


def test_export_reads_them_like_any_other(tmp_path):
    (tmp_path / "source").mkdir()
    path = str(write(tmp_path / "source"))
    report = export_safetensors(path, str(tmp_path / "out"), ["w^T -> weight", "b -> bias"])
    assert (report.keys, report.bytes_verified) == (2, 0)
    written = safetensors_numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert written["weight"].tobytes() == np.ascontiguousarray(W.T).tobytes()
    assert written["bias"].tobytes() == B.tobytes()


@pytest.mark.parametrize("ending", ["distcp", "safetensors"])
def test_remote_ones(tmp_path, monkeypatch, ending):
    """Without a memory map a pickle is read as a whole to be looked through, if it is not too long for that."""
    pytest.importorskip("fsspec")
    import fsspec

    url = f"memory://flexckpt-paddle/{ending}"
    fsspec.filesystem("memory").put(str(write(tmp_path, ending)) + "/", url, recursive=True)
    assert [elements(url, row) for row in range(4)] == [elements(tmp_path, row) for row in range(4)]
    monkeypatch.setattr(paddle_pickles, "MOST_PICKLE_BYTES", 100)
    if ending == "safetensors":
        read_catalog(url)
        return
    with pytest.raises(
        ValidationError, match=f"{url}/0_0.distcp is a pickle of .* it may have 100. Remedy .FC701.: copy"
    ):
        read_catalog(url)
    read_catalog(tmp_path)
