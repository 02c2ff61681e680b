"""Checkpoints of torch.distributed.checkpoint with uneven shards, of ShardedTensor, meshes and FSDP, bit for bit.

``data/torch_sharded_tensor`` and ``data/torch_meshes`` are of torch 2.13.0 on four ranks. With
``FLEXCKPT_TORCH_PYTHON`` they are written anew, and a model under FSDP2 and under the first FSDP with its optimizer.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.foreign import make_torch_layouts
from tests.foreign.layouts import load_into_three_layouts

DATA = Path(__file__).parent / "data"


def check(path):
    """Every tensor is there, whole and in three layouts; returns them."""
    arrays = {}
    for key, said in json.loads((path / "expected.json").read_text()).items():
        flat = np.frombuffer(bytes.fromhex(said["data"]), dtype_of(said["dtype"]).numpy)
        arrays[key] = flat.reshape(said["shape"])
    with TensorReader(path / "checkpoint") as reader:
        assert set(reader.infos) == set(arrays)
        for key, array in arrays.items():
            got = reader.read(key)
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), key
    assert load_into_three_layouts(path / "checkpoint", arrays) <= 1.05
    return arrays


def boxes(path, key):
    """What each rank has of a tensor: first element, shape."""
    table = SourceDirectory(path / "checkpoint").read_manifest().catalog
    return {
        (int(table.rank[row]), table.unpadded(row, table.offset), table.unpadded(row, table.shape))
        for row in range(len(table))
        if table.key_name(row) == key
    }


def test_sharded_tensors():
    path = DATA / "torch_sharded_tensor"
    assert set(check(path)) == set(make_torch_layouts.SHARDED)
    for key, (_, _, of_ranks) in make_torch_layouts.SHARDED.items():
        wanted = {(rank, *box) for rank, found in enumerate(of_ranks) for box in found}
        assert boxes(path, key) == wanted, key


def test_meshes_of_one_and_two_axes():
    path = DATA / "torch_meshes"
    assert set(check(path)) == {*make_torch_layouts.MESHES, *make_torch_layouts.LINES}
    assert {shape for _, _, shape in boxes(path, "model.both")} == {(3, 4), (3, 3), (2, 4), (2, 3)}
    assert sorted(offset for _, offset, _ in boxes(path, "model.twice")) == [(0, 0), (2, 0), (4, 0), (6, 0)]
    # Of what is the same on several ranks one has written each box.
    assert len(boxes(path, "model.replicated")) == 1 and len(boxes(path, "model.second")) == 2
    assert sorted(shape for _, _, shape in boxes(path, "line.uneven") if shape[0]) == [(1, 3), (3, 3), (3, 3), (3, 3)]


@pytest.mark.parametrize("kind", ["sharded_tensor", "meshes", "fsdp", "fsdp1"])
def test_what_torch_writes_now(tmp_path, kind):
    python = os.environ.get("FLEXCKPT_TORCH_PYTHON")
    if not python:
        pytest.skip("FLEXCKPT_TORCH_PYTHON names no interpreter with torch")
    known = "import torch.distributed.fsdp as fsdp; fsdp.fully_shard"
    if kind == "fsdp" and subprocess.run([python, "-c", known], capture_output=True).returncode:
        pytest.skip("this torch has no fully_shard")
    command = [python, make_torch_layouts.__file__, str(tmp_path / "new"), kind]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    arrays = check(tmp_path / "new")
    if kind.startswith("fsdp"):
        name = "optim.state.3.bias.step" if kind == "fsdp" else "optim.state.2.bias.step"
        assert {"model.0.weight", "optim.state.0.weight.exp_avg", name} <= set(arrays)
        assert len(boxes(tmp_path / "new", "model.0.weight")) == (4 if kind == "fsdp" else 3)
