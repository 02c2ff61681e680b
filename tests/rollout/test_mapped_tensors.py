"""Mapped tensors have the bytes of their files, and say whether anything still uses them."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.rollout.mapped_tensors import MappedTensors, ModelDirectory

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 4), np.float16),
    "scalar": np.array(7, np.int64),
}


def test_arrays_and_kinds(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "a.safetensors")
    mapped = MappedTensors([str(tmp_path / "a.safetensors")])
    assert mapped.kinds == {"a": ("F32", (2, 3)), "b": ("BF16", (5,)), "empty": ("F16", (0, 4)), "scalar": ("I64", ())}
    for name, array in ARRAYS.items():
        assert mapped.arrays[name].dtype == array.dtype
        assert np.array_equal(mapped.arrays[name], array)
        assert not mapped.arrays[name].flags.writeable
    del array
    assert mapped.close()
    assert mapped.close()
    assert mapped.arrays == {}


def test_a_view_keeps_the_memory(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "a.safetensors")
    mapped = MappedTensors([str(tmp_path / "a.safetensors")])
    view = mapped.arrays["a"][1:]
    assert not mapped.close()
    assert view.tolist() == [[3.0, 4.0, 5.0]]


def test_damaged_files_and_double_names(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(ARRAYS, path)
    with pytest.raises(ValidationError, match=r"two files have a tensor of this name \(key 'scalar', file "):
        MappedTensors([str(path), str(path)])
    path.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        MappedTensors([str(path)])


def test_the_files_of_a_model_directory(tmp_path: Path) -> None:
    save_file({"a": ARRAYS["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": ARRAYS["b"]}, tmp_path / "model-2.safetensors")
    save_file({"a": ARRAYS["a"]}, tmp_path / "consolidated.safetensors")
    assert sorted(ModelDirectory(str(tmp_path)).kinds) == ["a", "b"]
    index = {"weight_map": {"a": "consolidated.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    directory = ModelDirectory(str(tmp_path))
    assert sorted(directory.kinds) == ["a"]
    assert np.array_equal(directory.map().arrays["a"], ARRAYS["a"])
