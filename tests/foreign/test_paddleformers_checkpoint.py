"""FlexCheckpoints of PaddleFormers: several directories of Paddle's own format as one source."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.verification import verify_checkpoint
from paddle_flexckpt.tools.whole_tensors import iterate_tensors
from tests.foreign.writers import metadata_pickle

STATE_DIRECTORIES = ("model_state", "optimizer_state", "master_weight")
W = np.arange(24, dtype=np.float32).reshape(6, 4)
HELD = {
    "model_state": {"w": W},
    "optimizer_state": {"w.moment1_0": W + 100, "w.beta1_pow_acc_0": W[0, :1]},
    "master_weight": {"w.w_0": W + 200},
    "ema_state": {"w.w_0": W + 300},
}
EXPECTED = {
    "w": W,
    "w.moment1_0": W + 100,
    "w.beta1_pow_acc_0": W[0, :1],
    "w.w_0": W + 200,
    "ema_state.w.w_0": W + 300,
}


def write_directory(path, tensors, unique_id=0):
    """Two ranks, each with half of the rows."""
    path.mkdir(parents=True, exist_ok=True)
    files, states = {}, {}
    for rank in range(2):
        name = f"{rank}_{unique_id}.distcp"
        for key, array in tensors.items():
            rows = len(array) // 2
            if not rows and rank:
                continue
            mine = array[rank * rows : (rank + 1) * rows] if rows else array
            offset = (rank * rows,) + (0,) * (array.ndim - 1)
            shard = {"key": key, "dtype": "float32", "shape": array.shape, "offset": offset, "local": mine.shape}
            files.setdefault(name, []).append(shard)
            states.setdefault(name, {})[key] = np.ascontiguousarray(mine)
    (path / f"{unique_id}.metadata").write_bytes(metadata_pickle(files))
    for name, state in states.items():
        (path / name).write_bytes(pickle.dumps({**state, "StructuredToParameterName@@": {}}, 4))


def write(path, names=tuple(HELD), unique_id=0):
    for name in names:
        write_directory(path / name, HELD[name], unique_id)
    return path


def contents(path, unique_id=None):
    directory = SourceDirectory(path)
    manifest = directory.read_manifest(unique_id)
    return dict(iterate_tensors(directory.backend, manifest, names=manifest.catalog.keys))


def assert_holds(path, expected, unique_id=None):
    got = contents(path, unique_id)
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name].reshape(array.shape), array, err_msg=name)


def test_directories_are_one_source(tmp_path):
    write(tmp_path)
    (tmp_path / "saved_signal_0").write_text("1")
    assert detect_format(tmp_path) == "paddleformers"
    assert_holds(tmp_path, EXPECTED)
    manifest = SourceDirectory(tmp_path).read_manifest()
    assert (manifest.origin, manifest.world_size, manifest.foreign) == ("paddleformers", 2, True)
    assert "optimizer_state/1_0.distcp" in manifest.catalog.files
    report = verify_checkpoint(tmp_path)
    assert (report.ok, report.bytes_verified, report.keys) == (True, 0, 5)


def test_each_directory_is_one_by_itself(tmp_path):
    write(tmp_path)
    assert detect_format(tmp_path / "ema_state") == "paddle"
    assert_holds(tmp_path / "ema_state", HELD["ema_state"])


def test_a_model_alone(tmp_path):
    assert_holds(write(tmp_path, ["model_state"]), HELD["model_state"])


def test_without_tensors_there_is_nothing_in_a_directory(tmp_path):
    """Single precision has no master weights, and PaddleFormers saves none of them."""
    write(tmp_path, ["model_state", "optimizer_state"])
    write_directory(tmp_path / "master_weight", {})
    assert_holds(tmp_path, {**HELD["model_state"], **HELD["optimizer_state"]})


def test_averages_without_metadata_are_left_out(tmp_path):
    write(tmp_path)
    (tmp_path / "ema_state" / "0.metadata").unlink()
    assert sorted(contents(tmp_path)) == sorted(name for name in EXPECTED if not name.startswith("ema_state"))


def test_ids(tmp_path):
    write(tmp_path)
    for name in HELD:
        write_directory(tmp_path / name, {key: array + 1000 for key, array in HELD[name].items()}, 3)
    assert_holds(tmp_path, {name: array + 1000 for name, array in EXPECTED.items()})
    assert_holds(tmp_path, EXPECTED, 0)
    with pytest.raises(
        ValidationError, match=r"has no checkpoint with id 2; ids by directory: \{'model_state': \[0, 3\]"
    ):
        contents(tmp_path, 2)


@pytest.mark.parametrize("name", ["model_state", "optimizer_state", "master_weight"])
def test_a_directory_whose_save_was_not_finished(tmp_path, name):
    write(tmp_path)
    (tmp_path / name / "0.metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{name} has no 0\.metadata, .* the save was not finished"):
        contents(tmp_path)


def test_a_file_that_is_missing(tmp_path):
    write(tmp_path)
    (tmp_path / "master_weight" / "1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"master_weight/1_0\.distcp is missing"):
        contents(tmp_path)


def test_a_file_that_goes_missing_later(tmp_path):
    manifest = SourceDirectory(write(tmp_path)).read_manifest()
    (tmp_path / "master_weight" / "1_0.distcp").unlink()
    row = [manifest.catalog.file_name(row) for row in range(len(manifest.catalog))].index("master_weight/1_0.distcp")
    with (
        FileReader(str(tmp_path), manifest) as reader,
        pytest.raises(CorruptCheckpointError, match=r"master_weight/1_0\.distcp is missing"),
    ):
        reader.check_files(np.asarray([row]))


def test_the_same_key_in_two_directories(tmp_path):
    write(tmp_path)
    write_directory(tmp_path / "optimizer_state", {"w": W})
    with pytest.raises(
        CorruptCheckpointError, match="two directories have the same key.*'w'.*model_state and optimizer"
    ):
        contents(tmp_path)


@pytest.mark.parametrize("beside", ["0.metadata", "model.safetensors", "optimizer.tp00.safetensors"])
def test_another_checkpoint_beside_them_is_refused(tmp_path, beside):
    write(tmp_path)
    if beside == "0.metadata":
        write_directory(tmp_path, HELD["model_state"])
    else:
        (tmp_path / beside).write_bytes(safetensors_numpy.save({"w": W}))
    with pytest.raises(
        ValidationError, match="has more than one checkpoint: .*PaddleFormers.* Remedy .FC301.: give the path"
    ):
        detect_format(tmp_path)
    with pytest.raises(ValidationError, match="has more than one checkpoint"):
        SourceDirectory(tmp_path).read_manifest()


def test_links_out_of_the_directory(tmp_path):
    write(tmp_path / "elsewhere")
    (tmp_path / "checkpoint").mkdir()
    os.symlink(tmp_path / "elsewhere" / "model_state", tmp_path / "checkpoint" / "model_state")
    with pytest.raises(CorruptCheckpointError, match="is a link out of the checkpoint's directory"):
        detect_format(tmp_path / "checkpoint")
    # One that comes later is found too.
    write(tmp_path / "late")
    manifest = SourceDirectory(tmp_path / "late").read_manifest()
    os.rename(tmp_path / "late" / "model_state", tmp_path / "moved")
    os.symlink(tmp_path / "moved", tmp_path / "late" / "model_state")
    with (
        FileReader(str(tmp_path / "late"), manifest) as reader,
        pytest.raises(CorruptCheckpointError, match="is a link out of the checkpoint's directory"),
    ):
        reader.check_files(np.arange(1))


def test_export_reads_them(tmp_path):
    write(tmp_path / "source")
    report = export_safetensors(tmp_path / "source", tmp_path / "out")
    assert report.left_out
    got = safetensors_numpy.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(got["w"], W)


def test_from_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(write(tmp_path)) + "/", "/paddleformers/", recursive=True)
    try:
        assert detect_format("memory://paddleformers") == "paddleformers"
        assert_holds("memory://paddleformers", EXPECTED)
    finally:
        memory.rm("/paddleformers", recursive=True)
