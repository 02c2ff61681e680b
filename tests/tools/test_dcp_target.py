"""Conversion to checkpoints of torch.distributed.checkpoint: read back here, and by torch itself where there is one.

With ``FLEXCKPT_TORCH_PYTHON`` (an interpreter that has torch) torch loads what was written: whole, into DTensors of one
and two ranks and of a mesh, into ShardedTensors, and by its own converter.
"""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from paddle_flexckpt.algebra.flat import flat_range_to_boxes
from paddle_flexckpt.catalog import concat
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.torch_saving import plan_archive
from paddle_flexckpt.tools.comparison import diff
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.conversion_targets import _with_archives
from paddle_flexckpt.tools.models import layout_of
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.foreign import load_torch_dcp, test_torch_dcp
from tests.foreign.layouts import load_into_three_layouts
from tests.foreign.test_torch_saving import archives_of_torch
from tests.tools.test_conversion import CUTS, KINDS, same_tensors, tree
from tests.transfer.samples import save, values_of

EVERY = {f"of.{dtype}": (dtype, shape) for dtype, shape in zip(DTYPES, [(4, 6), (5,), (2, 3, 4), ()] * 5)}
EVERY |= {"none": ("float32", (0, 3)), "model.layers.0.w": ("bfloat16", (8, 12)), "w": ("float32", (6, 4))}
EVERY |= {"w.moment1_0": ("float32", (6, 4)), "extra_state.rng.rank0": ("uint8", (16,))}


@pytest.fixture(scope="module")
def values():
    return values_of(EVERY)


@pytest.fixture(scope="module")
def checkpoint(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("dcp") / "checkpoint"
    save(path, values, step=7)
    return path


WAYS = {
    "whole": {},
    "several files": {"max_file_bytes": 200},
    "tensor parallel": {"strategy": "tp=2", "cuts": [("model.*", 1), ("w", 0), ("*", None)]},
    "flattened": {"strategy": "tp=2,sharding=v2:2", "cuts": [("model.*", 1), ("w", 0), ("*", None)]},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_read(checkpoint, values, tmp_path, way):
    report = convert_checkpoint(checkpoint, tmp_path / "out", format="torch_dcp", **WAYS[way])
    assert SourceDirectory(tmp_path / "out").origin() == "torch_dcp"
    assert sorted(os.listdir(tmp_path / "out")) == sorted([".metadata", *report.files])
    same_tensors(checkpoint, tmp_path / "out")
    assert report.keys == len(values)
    assert report.total_bytes == sum(array.nbytes for array in values.values())
    with TensorReader(tmp_path / "out") as reader:
        for key, array in values.items():
            assert reader.read(key).tobytes() == array.tobytes(), key
    if way == "flattened":
        assert load_into_three_layouts(tmp_path / "out", values) <= 1.05


def test_files_are_named_as_torch_names_them(checkpoint, tmp_path):
    assert convert_checkpoint(checkpoint, tmp_path / "one", format="torch_dcp").files == ["__0_0.distcp"]
    several = convert_checkpoint(checkpoint, tmp_path / "several", format="torch_dcp", max_file_bytes=200).files
    assert several == [f"__0_{number}.distcp" for number in range(len(several))] and len(several) > 2
    options = WAYS["tensor parallel"]
    assert convert_checkpoint(checkpoint, tmp_path / "cut", format="torch_dcp", **options).files == [
        "__0_0.distcp", "__1_0.distcp"
    ]  # fmt: skip
    assert SourceDirectory(tmp_path / "cut").read_manifest().world_size == 2


@pytest.mark.parametrize("strategy", ["tp=2", "tp=2,pp=2,dp=2", "sharding=v2:3", "tp=2,sharding=v1:2"])
def test_for_a_strategy_each_rank_has_the_boxes_that_it_would_have_saved(tmp_path, strategy):
    save(tmp_path / "in", values_of(KINDS))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", format="torch_dcp", strategy=strategy, cuts=CUTS)
    same_tensors(tmp_path / "in", tmp_path / "out")
    layout, _ = layout_of(tmp_path / "in", strategy, cuts=CUTS)
    wanted = set()
    table = concat([layout.catalog(rank) for rank in range(layout.strategy.ranks)])
    for row in range(len(table)):
        shape, offset = table.unpadded(row, table.shape), table.unpadded(row, table.offset)
        span = int(table.flat_start[row]), int(table.flat_stop[row])
        for box in flat_range_to_boxes(shape, *(span if span[0] >= 0 else (0, int(table.size[row])))):
            begin = tuple(map(sum, zip(offset, box.offset)))
            wanted.add((table.key_name(row), begin, box.shape))
    found = SourceDirectory(tmp_path / "out").read_manifest().catalog
    assert wanted == {
        (found.key_name(row), found.unpadded(row, found.offset), found.unpadded(row, found.shape))
        for row in range(len(found))
        if found.size[row] and not found.key_name(row).startswith("extra_state")
    }


def test_of_what_torch_has_written_the_same_archives_are_made(tmp_path):
    """Whole tensors; what torch's ranks had in parts, and what was transposed, is not the same."""
    convert_checkpoint(test_torch_dcp.DATA, tmp_path / "out", format="torch_dcp")
    made = (tmp_path / "out" / "__0_0.distcp").read_bytes()
    with TensorReader(test_torch_dcp.DATA) as reader:
        whole = {info.shape for info in reader.infos.values()}
    found = [(archive, tensor) for archive, tensor, _ in archives_of_torch() if tensor.size in whole]
    same = [archive in made for archive, tensor in found if 0 not in tensor.size]
    assert same.count(False) == 1 and same.count(True) == 4


def test_the_same_source_gives_the_same_bytes_by_every_way(checkpoint, tmp_path):
    """Through Hugging Face's files, this library's own, and with other memory."""
    convert_checkpoint(checkpoint, tmp_path / "one", format="torch_dcp")
    convert_checkpoint(checkpoint, tmp_path / "native", strategy="tp=2", cuts=WAYS["tensor parallel"]["cuts"])
    convert_checkpoint(tmp_path / "native", tmp_path / "two", format="torch_dcp", memory_bytes=128 << 20)
    convert_checkpoint(tmp_path / "one", tmp_path / "three", format="torch_dcp")
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == tree(tmp_path / "three")


@pytest.mark.parametrize("parts", [[5], [96, 1], [97]])
def test_data_that_are_not_the_archives_elements_are_refused(parts):
    with pytest.raises(ValueError, match="does not end with a chunk"):
        list(_with_archives([plan_archive("uint8", (96,))] * 2, (np.zeros(part, np.uint8) for part in parts)))


def test_large_arrays_are_written_as_they_are():
    large = np.arange(3 << 20, dtype=np.uint8)
    pieces = list(_with_archives([plan_archive("uint8", (3 << 20,)), plan_archive("uint8", (0,))], [large]))
    assert [len(piece) for piece in pieces if len(piece) > 1 << 20] == [3 << 20]
    assert len(pieces) == 3


def test_by_the_command_line_with_names_of_hugging_face(tmp_path, capsys):
    """Of a model with Paddle's names and fused parameters: rules of its family, as for Hugging Face's files."""
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    kinds = {"model.layers.0.self_attn.q_proj.weight": ("float32", (8, 8))}
    save(tmp_path / "in", values_of(kinds))
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    for form in ("huggingface", "torch_dcp"):
        arguments = ["convert", str(tmp_path / "in"), str(tmp_path / form), "--format", form]
        assert main([*arguments, "--aoa", json.dumps({"aoa_statements": [f"{key}^T -> {key}" for key in kinds]})]) == 0
    assert diff(tmp_path / "huggingface", tmp_path / "torch_dcp").equal
    hf = str(tmp_path / "huggingface")
    assert main(["convert", hf, str(tmp_path / "x"), "--format", "torch_dcp", "--model", "auto"]) == 1
    assert "here both sides are" in capsys.readouterr().err


@pytest.mark.parametrize("way", WAYS)
def test_torch_loads_it(checkpoint, values, tmp_path, way):
    python = os.environ.get("FLEXCKPT_TORCH_PYTHON")
    if not python:
        pytest.skip("FLEXCKPT_TORCH_PYTHON names no interpreter with torch")
    command = [python, load_torch_dcp.__file__, *DTYPES]
    known = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout.split()
    if len(known) < len(DTYPES):  # torch before 2.5
        assert not set(DTYPES) - set(known) - {"uint16", "uint32", "uint64"}
        values = {key: array for key, array in values.items() if EVERY[key][0] in known}
        checkpoint = tmp_path / "in"
        save(checkpoint, values)
    convert_checkpoint(checkpoint, tmp_path / "out", format="torch_dcp", **WAYS[way])
    expected = {
        key: {"dtype": EVERY[key][0], "shape": list(array.shape), "data": array.tobytes().hex()}
        for key, array in values.items()
    }
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    done = subprocess.run(
        [python, load_torch_dcp.__file__, str(tmp_path / "out"), str(tmp_path / "expected.json")],
        check=False, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{kind}:{len(values)}" for kind in ("whole", "file", "1", "2", "layouts")]
