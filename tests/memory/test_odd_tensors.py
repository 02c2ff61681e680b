"""Values of a state that look like tensors of their shape, and are not; targets that cannot be written to."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.remedies.following import provoked

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
SHARD = {"local_shape": (2, 3), "global_shape": (2, 3), "global_offset": (0, 0)}


def sparse(form):
    paddle = pytest.importorskip("paddle")
    tensor = paddle.sparse.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 5.0], [2, 3])
    return tensor if form == "coo" else tensor.to_sparse_csr()


ODD = {
    "coo": (lambda: sparse("coo"), "a tensor has to be dense", "give its to_dense(); or save its indices()"),
    "csr": (lambda: sparse("csr"), "a tensor has to be dense", "give its to_dense(); or save its indices()"),
    "masked": (
        lambda: np.ma.masked_array(VALUES, VALUES > 2),
        "has to be a plain one",
        "of a masked array its filled()",
    ),
    "matrix": (lambda: np.asmatrix(VALUES), "has to be a plain one", "give numpy.asarray() of it"),
    "records": (
        lambda: np.zeros((2, 3), [("x", "f4")]),
        "dtype of a tensor is not supported",
        "or take it out and save",
    ),
    "objects": (lambda: np.full((2, 3), None), "dtype of a tensor is not supported", "or take it out"),
    "big end first": (lambda: VALUES.astype(">f4"), "dtype of a tensor is not supported", "cast it, or take it out"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("as_shard", [False, True])
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_looks_like_a_tensor_of_its_shape_is_refused_by_key(move, kind, as_shard, side):
    make, what, remedy = ODD[kind]
    value, plain = make(), np.zeros((2, 3), np.float32)
    value = ShardedWeight("odd", value, **SHARD) if as_shard else value
    source, target = ({"a": VALUES, "odd": VALUES}, {"a": plain, "odd": value})
    if side == "source":
        source, target = {"a": VALUES, "odd": value}, {"a": plain, "odd": plain.copy()}
    with pytest.raises(ValidationError, match=what) as caught:
        move(source, target)
    assert "key 'odd', rank 0" in str(caught.value)
    assert remedy in str(caught.value)
    assert not plain.any()


def test_the_remedies_give_what_looks_the_same(move):
    def moved(value):
        into = np.zeros((2, 3), np.float32)
        move({"w": value}, {"w": into})
        return into.tolist()

    coo, masked = sparse("coo"), np.ma.masked_array(VALUES, VALUES > 2)
    with provoked("memory/tensor_memory.py", "give its to_dense(); or save its indices() and values()"):
        moved(coo)
    assert moved(coo.to_dense()) == [[0, 1, 0], [0, 0, 5]]
    with provoked("memory/tensor_memory.py", "give numpy.asarray() of it; of a masked array its filled()"):
        moved(masked)
    assert moved(masked.filled(-1)) == [[0, 1, 2], [-1, -1, -1]]
    assert moved(np.asarray(np.asmatrix(VALUES))) == VALUES.tolist()
    with provoked("memory/tensor_memory.py", "cast it, or take it out and save it as extra state"):
        moved(VALUES.astype(">f4"))
    assert moved(VALUES.astype(">f4").astype("f4")) == VALUES.tolist()


def read_only(kind, path):
    if kind == "bytes":
        return np.frombuffer(bytes(24), np.float32).reshape(2, 3)
    if kind == "map":
        np.zeros(6, np.float32).tofile(path)
        return np.memmap(path, np.float32, "r", shape=(2, 3))
    array = np.zeros((3, 2), np.float32).T if kind == "strided" else np.zeros((2, 3), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("kind", ["plain", "strided", "bytes", "map"])
@pytest.mark.parametrize("as_shard", [False, True])
def test_a_read_only_target_is_refused_before_any_is_filled(move, tmp_path, kind, as_shard):
    array, other = read_only(kind, tmp_path / "map"), np.zeros((2, 3), np.float32)
    fixed = ShardedWeight("b", array, **SHARD) if as_shard else array
    with provoked(
        "memory/live_targets.py", "load into a copy of it, or open a memory map with mode 'r+' or 'c'"
    ) as caught:
        move({"a": VALUES, "b": VALUES}, {"a": other, "b": fixed})
    for words in ("a target cannot be written to", "key 'b'", "rank 0", "float32 [0:2, 0:3] of [2, 3]"):
        assert words in str(caught.value)
    assert not other.any()
    copy = array.copy() if kind != "map" else np.memmap(tmp_path / "map", np.float32, "r+", shape=(2, 3))
    move({"a": VALUES, "b": VALUES}, {"a": other, "b": copy})
    assert copy.tolist() == other.tolist() == VALUES.tolist()
    # It is read, as a source.
    move({"b": array}, {"b": np.ones((2, 3), np.float32)})


def test_a_read_only_target_is_no_target_of_a_kept_plan(tmp_path):
    comm, array = SoloCommunicator(), np.zeros((2, 3), np.float32)
    save_state_dict({"w": VALUES}, tmp_path, comm)
    for _ in range(2):
        load_state_dict({"w": array}, tmp_path, comm)
    array.flags.writeable = False
    with pytest.raises(ValidationError, match="cannot be written to"):
        load_state_dict({"w": array}, tmp_path, comm)
    load_state_dict({"none": np.zeros((0, 3)), "w": np.zeros((2, 3), "f4")}, tmp_path, comm, strict=False)
