"""Safetensors files of ranks by torch's HuggingFaceStorageWriter: what torch has written, and files that lie.

``data/torch_safetensors`` is of torch 2.13.0; with ``FLEXCKPT_TORCH_PYTHON`` it is written anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, dtype_of
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.attacks.seeds import container
from tests.foreign import make_torch_dcp, make_torch_safetensors
from tests.foreign.layouts import load_into_three_layouts

DATA = Path(__file__).parent / "data" / "torch_safetensors"
FIRST, SECOND = "shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"
ARRAYS = {
    key: array.astype(dtype_of(dtype).numpy)
    for key, (array, dtype, _) in make_torch_dcp.EXPECTED.items()
    if key in make_torch_safetensors.KEYS
}


def check(path):
    assert detect_format(path) == "torch_dcp"
    with TensorReader(path) as reader:
        assert set(reader.infos) == set(ARRAYS)
        for key, array in ARRAYS.items():
            got = reader.read(key)
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), key
        np.testing.assert_array_equal(reader.read("model.rows", slice(2, 4)), ARRAYS["model.rows"][2:4])
    assert load_into_three_layouts(path, ARRAYS) <= 1.05


def test_what_torch_has_written():
    check(DATA)
    manifest = SourceDirectory(DATA).read_manifest()
    assert manifest.world_size == 2
    assert manifest.catalog.rank.tolist() == [0, 0, 1, 1, 1, 1]


def test_what_torch_writes_now(tmp_path):
    python = os.environ.get("FLEXCKPT_TORCH_PYTHON")
    if not python:
        pytest.skip("FLEXCKPT_TORCH_PYTHON names no interpreter with torch")
    subprocess.run([python, make_torch_safetensors.__file__, str(tmp_path / "new")], check=True, timeout=300)
    check(tmp_path / "new")


def why(path, kind=CorruptCheckpointError):
    with pytest.raises(kind) as caught:
        SourceDirectory(path).read_manifest()
    assert "Remedy (FC" in str(caught.value)
    return str(caught.value)


def test_a_rank_that_is_missing(tmp_path):
    shutil.copy(DATA / SECOND, tmp_path)
    text = why(tmp_path)
    assert "lacks the files of some ranks" in text
    assert "key 'model.rows'" in text
    # The whole tensors beside what ranks have written are another checkpoint: the caller has to say which.
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(
        container({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1")
    )
    with pytest.raises(ValueError, match="has more than one checkpoint"):
        SourceDirectory(tmp_path).read_manifest()


def write(path, offsets, shape=(2, 3), key="w", name=SECOND, info=None):
    size = int(np.prod(shape))
    info = json.dumps({"w": {"saved_offsets": offsets}}) if info is None else info
    header = {"__metadata__": {"DCP_SHARDING_INFO": info, "format": "pt"}}
    header[key] = {"dtype": "U8", "shape": list(shape), "data_offsets": [0, size]}
    (path / name).write_bytes(container(header, bytes(size)))


def test_places_that_lie(tmp_path):
    write(tmp_path, [0, 0], name=FIRST)
    write(tmp_path, [2, 0])
    assert SourceDirectory(tmp_path).read_manifest().catalog.global_shape.tolist() == [[4, 3], [4, 3]]
    write(tmp_path, [3, 0])
    assert "key 'w'" in why(tmp_path)
    for offsets in ([2], [2, -1], [2, 0.5], [2, True], [1 << 60, 0], "ab", None, {}):
        write(tmp_path, offsets)
        assert f"{SECOND}: DCP_SHARDING_INFO in its header does not place the chunks" in why(tmp_path)
    write(tmp_path, [2, 0], key="v")
    assert "'w' is no tensor of the file with 2 axes" in why(tmp_path)
    write(tmp_path, [2], shape=(6,))
    assert "key 'w' has 1 axes here, and 2 in another file" in why(tmp_path)
    for info in ("", "[]", "{}", '{"w":1}', '{"w":{}}', "[" * 10_000, '{"w":{"saved_offsets":[0,0]},"w":{}}'):
        write(tmp_path, [0, 0], info=info)
        assert "does not place the chunks" in why(tmp_path)
