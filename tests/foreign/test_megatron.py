"""Checkpoints of Megatron-Core: what it has written, in three layouts; formats and states that are refused.

``data/megatron`` is of megatron-core 0.16.1; with ``FLEXCKPT_TORCH_PYTHON`` (and megatron-core) it is written anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError, dtype_of
from paddle_flexckpt.foreign import megatron
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.foreign import make_megatron
from tests.foreign.layouts import load_into_three_layouts

DATA = Path(__file__).parent / "data" / "megatron"
ARRAYS = {key: array.astype(dtype_of(dtype).numpy) for key, (array, dtype, _) in make_megatron.WEIGHTS.items()} | {
    f"{key}.{name}": array + 100 * (number + 1)
    for key, (array, _, _) in make_megatron.WEIGHTS.items()
    for number, name in enumerate(make_megatron.STATES.values())
}


def check(path):
    assert detect_format(path) == "megatron"
    with TensorReader(path) as reader:
        assert set(reader.infos) == set(ARRAYS)
        for key, array in ARRAYS.items():
            got = reader.read(key)
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), key
    assert load_into_three_layouts(path, ARRAYS) <= 1.05


def test_what_megatron_core_has_written():
    check(DATA)
    assert not {"torch", "megatron"} & set(sys.modules)


def write_anew(path, sharding):
    python = os.environ.get("FLEXCKPT_TORCH_PYTHON")
    if not python or subprocess.run([python, "-c", "import megatron.core"], capture_output=True).returncode:
        pytest.skip("FLEXCKPT_TORCH_PYTHON names no interpreter with megatron-core")
    subprocess.run([python, make_megatron.__file__, str(path), sharding], check=True, timeout=300, capture_output=True)


def test_what_megatron_core_writes_now(tmp_path):
    write_anew(tmp_path / "new", "fully_reshardable")
    check(tmp_path / "new")
    write_anew(tmp_path / "flat", "dp_reshardable")
    assert "dp_reshardable" in why(tmp_path / "flat", ValidationError)


def why(path, kind=CorruptCheckpointError):
    with pytest.raises(kind) as caught:
        SourceDirectory(path).read_manifest()
    assert "Remedy (FC" in str(caught.value)
    return str(caught.value)


def test_states_that_belong_to_one_layout(tmp_path):
    """A key of a weight, in the two places where it is, is changed into one of a bucket of the same length."""
    path = shutil.copytree(DATA, tmp_path / "c")
    data = (path / ".metadata").read_bytes()
    old = b"embedding.word_embeddings.weight"
    new = b"optimizer.distributed.dp_group_idx_0.b"
    for key in (b"optimizer.state.exp_avg." + old, b"optimizer.state.param." + old):
        changed = new.ljust(len(key), b"b")
        assert key in data
        (path / ".metadata").write_bytes(data.replace(key, changed))
        text = why(path, ValidationError)
        assert "dp_reshardable states of the optimizer" in text
        assert "--dist-ckpt-optim-fully-reshardable" in text


def test_metadata_json(tmp_path):
    path = shutil.copytree(DATA, tmp_path / "c")
    text = (path / "metadata.json").read_text()
    (path / "metadata.json").write_text(text.replace("torch_dist", "zarr"))
    assert "sharded_backend is 'zarr'" in why(path, ValidationError)
    for damaged in (text[:-1], text + "x", text.replace('"torch_dist"', "1"), text + " " * (1 << 15)):
        (path / "metadata.json").write_text(damaged)
        assert "metadata.json is damaged" in why(path)
    # Another program's, which says nothing about the format: then it is plain DCP, with Megatron's own keys.
    for other in ("{}", "[1]", "", '{"format": "pt"}'):
        (path / "metadata.json").write_text(other)
        assert detect_format(path) == "torch_dcp"
        with TensorReader(path) as reader:
            assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in reader.infos


def test_the_directory_above(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    shutil.copytree(DATA, tmp_path / "iter_0000007")
    text = why(tmp_path, ValidationError)
    assert "but those of Megatron in iter_0000007. Remedy (FC301): give the path of one of them" in text


def test_two_keys_that_become_one(monkeypatch):
    monkeypatch.setattr(megatron, "_NAMES", {**megatron._NAMES, "exp_avg_sq": "moment1_0"})
    assert "two of Megatron's keys are" in why(DATA, ValidationError)
