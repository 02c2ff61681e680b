"""Conversions to Paddle's own format in one process: what stock Paddle reads of them, and writes itself."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.tools.conversion import convert_checkpoint
from tests.transfer.samples import save, values_of

paddle = pytest.importorskip("paddle")
pytest.importorskip("paddle.distributed.flex_checkpoint")
loader = importlib.import_module("paddle.distributed.flex_checkpoint.dcp.load_state_dict")
saver = importlib.import_module("paddle.distributed.flex_checkpoint.dcp.save_state_dict")
pytestmark = pytest.mark.paddle

DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128".split()
KINDS = {dtype: (dtype, (7, 3)) for dtype in DTYPES} | {"scalar": ("float32", ()), "row": ("int64", (5,))}


@pytest.fixture(autouse=True)
def forget():
    """What Paddle keeps of a load is not to be the next one's."""
    yield
    loader._metadata_manager.clear()
    loader.PATH_TO_CHECKPOINT_FILES.clear()


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "in", values_of(KINDS))
    return tmp_path / "in"


def bits(state):
    return {
        key: (str(tensor.dtype), tuple(tensor.shape), np.ascontiguousarray(tensor.numpy()).tobytes())
        for key, tensor in state.items()
    }


def expected():
    return {
        key: (f"paddle.{value.dtype.name}", value.shape, value.tobytes()) for key, value in values_of(KINDS).items()
    }


def empty():
    return {key: paddle.zeros(shape, dtype) for key, (dtype, shape) in KINDS.items()}


@pytest.mark.parametrize("limit", [1 << 30, 100], ids=["one file", "many"])
def test_every_type_is_loaded_bit_for_bit(checkpoint, tmp_path, limit):
    convert_checkpoint(checkpoint, tmp_path / "out", format="paddle", max_file_bytes=limit)
    state = empty()
    loader.load_state_dict(state, str(tmp_path / "out"))
    assert bits(state) == expected()
    forgotten = loader.load_merged_state_dict(str(tmp_path / "out"))
    assert bits(forgotten) == expected()


def test_what_is_refused_paddle_itself_reads_wrong(tmp_path):
    """Of its own file: where it moves nothing between ranks, a float8 target becomes int8; elsewhere it does not."""
    target = paddle.ones([4]).cast("float8_e4m3fn")
    saver.save_state_dict({"w": paddle.zeros([4]).cast("float8_e4m3fn")}, str(tmp_path))
    loader.load_state_dict({"w": target}, str(tmp_path))
    assert target.dtype == paddle.int8


def test_it_says_what_paddle_itself_says(checkpoint, tmp_path):
    """The same tensors, saved by Paddle and converted from Paddle: the same objects, but for their order."""
    state = empty()
    convert_checkpoint(checkpoint, tmp_path / "one", format="paddle")
    loader.load_state_dict(state, str(tmp_path / "one"))
    saver.save_state_dict(state, str(tmp_path / "stock"))
    assert SourceDirectory(tmp_path / "stock").origin() == "paddle"
    convert_checkpoint(tmp_path / "stock", tmp_path / "two", format="paddle")
    theirs, ours = (paddle.load(str(tmp_path / name / "0.metadata")) for name in ("stock", "two"))
    assert type(ours) is type(theirs)
    assert vars(ours) == vars(theirs)
    theirs, ours = (
        paddle.load(str(tmp_path / name / "0_0.distcp"), return_numpy=True, keep_name_table=True)
        for name in ("stock", "two")
    )
    names = [each.pop("StructuredToParameterName@@") for each in (theirs, ours)]
    assert names[0].keys() == names[1].keys()
    assert {key: (array.dtype, array.shape, array.tobytes()) for key, array in ours.items()} == {
        key: (array.dtype, array.shape, array.tobytes()) for key, array in theirs.items()
    }
    # Converted once more, byte for byte.
    for name in ("0.metadata", "0_0.distcp"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
