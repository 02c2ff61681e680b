"""Versions by step: what is there is checked before anything of it is given."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.rollout.fastdeploy_versions import Listing, file_digest, open_model, open_snapshot, part_file


@pytest.fixture
def versions(tmp_path):
    """One snapshot for two ranks, of two parts each."""
    path, files = tmp_path / "7", {}
    path.mkdir()
    for rank in range(2):
        for part in range(2):
            name = part_file(rank, 4 + rank, part)
            save_file({f"w{part}": np.full(3, 10 * rank + part, np.float32)}, path / name)
            files[name] = (os.path.getsize(path / name), file_digest(str(path / name)))
    (path / "version.yaml").write_bytes(Listing(7, 2, files).encode())
    return tmp_path


def change(versions, **entries):
    path = versions / "7" / "version.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def refused(error, message, versions, step=7, rank=0, ranks=2, verify=False):
    with pytest.raises(error) as raised:
        open_snapshot(str(versions), step, rank, ranks, verify)
    assert message in str(raised.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_files(versions, rank):
    tensors = open_snapshot(str(versions), "7", rank, 2, verify=True)
    assert {name: array.tolist() for name, array in tensors.arrays.items()} == {
        f"w{part}": [10 * rank + part] * 3 for part in (0, 1)
    }


def test_steps_that_are_not_there(versions):
    for step in (8, "", "..", "../7", "7/", "7\0"):
        refused(ValidationError, "has no directory for step", versions, step)
    refused(ValidationError, "there are ['7']. Remedy (FC301)", versions, 8)
    refused(ValidationError, "there are none", versions / "missing")
    (versions / "8").symlink_to(versions / "7")
    refused(ValidationError, "another step's version", versions, 8)


def test_a_version_is_whole_with_its_listing(versions):
    (versions / "7" / "version.yaml").unlink()
    refused(ValidationError, "has no version.yaml: the version is not whole yet, or was not. Remedy (FC303)", versions)


def test_an_engine_of_another_size(versions):
    refused(ValidationError, "is for an engine of 2 ranks; got rank 0 of 4. Remedy (FC101)", versions, ranks=4)
    refused(ValidationError, "got rank 2 of ?", versions, rank=2, ranks=None)
    refused(ValidationError, "got rank -1 of 2", versions, rank=-1)


def test_damage_of_files(versions):
    path = versions / "7" / part_file(0, 4, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    open_snapshot(str(versions), 7, 0, 2, verify=False)
    refused(CorruptCheckpointError, "got other bytes. Remedy (FC305)", versions, verify=True)
    open_snapshot(str(versions), 7, 1, 2, verify=True)
    path.write_bytes(data[:-1])
    refused(CorruptCheckpointError, f"got {len(data) - 1} bytes", versions)
    path.unlink()
    refused(CorruptCheckpointError, "got no file", versions)


@pytest.mark.parametrize(
    "entries",
    [{"files": []}, {"files": {"a": [1]}}, {"files": {"../x": [1, "2"]}}, {"ranks": "two"}, {"ranks": 3}, {"ranks": 1}],
)
def test_listings_of_others(versions, entries):
    change(versions, **entries)
    refused(CorruptCheckpointError, "is not as publish_fastdeploy writes it", versions)


def test_a_listing_of_fastdeploys_own(versions):
    (versions / "7" / "version.yaml").write_text("step: 7\n")
    refused(CorruptCheckpointError, "is not as publish_fastdeploy writes it", versions)


def test_models_by_step(tmp_path):
    (tmp_path / "3").mkdir()
    with pytest.raises(ValidationError, match="has no safetensors files"):
        open_model(str(tmp_path), 3)
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "3" / "model-00001-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match="without their index"):
        open_model(str(tmp_path), 3)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "3" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="model-00002-of-00002.safetensors is missing"):
        open_model(str(tmp_path), 3)
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "3" / "model-00002-of-00002.safetensors")
    found = open_model(str(tmp_path), 3).arrays
    assert {name: array.tolist() for name, array in found.items()} == {"a": [1, 1], "b": [0, 0]}
    index["metadata"] = {"delta_encoding": "xor"}
    (tmp_path / "3" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValidationError, match="is a delta to another version"):
        open_model(str(tmp_path), 3)


def test_one_file_is_a_model(tmp_path):
    (tmp_path / "s").mkdir()
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "s" / "model.safetensors")
    assert open_model(str(tmp_path), "s").arrays["a"].tolist() == [1, 1]
