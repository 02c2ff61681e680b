"""Remedies about checkpoints of other programs that are followed in numpy or Paddle, each provoked and followed."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.foreign import strided_boxes as boxes
from tests.remedies.following import provoked

A = np.arange(24, dtype=np.float32).reshape(6, 4)


def loaded(path, **options) -> list:
    target = np.full(A.shape, -1, np.float32)
    fc.load_state_dict({"a": target}, path, **options)
    return target.tolist()


def test_compressed_arrays_are_written_uncompressed(tmp_path):
    old, new = tmp_path / "old.npz", tmp_path / "new.npz"
    np.savez_compressed(old, a=A)
    with provoked("foreign/npz.py", "numpy.savez(new, **numpy.load(old)) writes them uncompressed"):
        loaded(old)
    np.savez(new, **np.load(old))
    assert loaded(new) == A.tolist()


@pytest.mark.parametrize("wrong", [A.astype(">f4"), np.array(["a", "b"])], ids=["byte order", "text"])
def test_arrays_are_numbers_in_this_byte_order(tmp_path, wrong):
    np.savez(tmp_path / "old.npz", a=wrong)
    with provoked("foreign/npz.py", "save arrays of numbers in this machine's byte order, by numpy.savez or as saf"):
        loaded(tmp_path / "old.npz")
    np.savez(tmp_path / "new.npz", a=A)
    assert loaded(tmp_path / "new.npz") == A.tolist()


def test_arrays_in_column_major_order_with_too_many_columns(tmp_path, monkeypatch):
    columns = np.asfortranarray(A)
    np.savez(tmp_path / "old.npz", a=columns)
    np.savez(tmp_path / "new.npz", a=np.ascontiguousarray(columns))
    monkeypatch.setattr(boxes, "MOST_BOXES", 2)
    with provoked("foreign/npz.py", "save numpy.ascontiguousarray of it"):
        loaded(tmp_path / "old.npz")
    assert loaded(tmp_path / "new.npz") == A.tolist()


def test_a_pickle_in_column_major_order_with_too_many_columns(tmp_path, monkeypatch):
    columns = np.asfortranarray(A)
    paddle.save({"a": columns}, str(tmp_path / "old.pdparams"), protocol=4)
    paddle.save({"a": np.ascontiguousarray(columns)}, str(tmp_path / "new.pdparams"), protocol=4)
    monkeypatch.setattr(boxes, "MOST_BOXES", 2)
    with provoked("foreign/paddle_pickles.py", "save it in row-major order"):
        loaded(tmp_path / "old.pdparams")
    assert loaded(tmp_path / "new.pdparams") == A.tolist()


def test_a_pickle_of_an_old_protocol_is_saved_again_in_paddle(tmp_path):
    old, new = str(tmp_path / "old.pdparams"), str(tmp_path / "new.pdparams")
    paddle.save({"a": A}, old, protocol=2)
    with provoked("foreign/paddle_pickles.py", "in Paddle, paddle.save(paddle.load(old), new, protocol=4)"):
        loaded(old)
    paddle.save(paddle.load(old), new, protocol=4)
    assert loaded(new) == A.tolist()


def test_a_foreign_checkpoint_has_no_ids(tmp_path):
    np.savez(tmp_path / "a.npz", a=A)
    with provoked("foreign/formats.py", "leave unique_id="):
        loaded(tmp_path / "a.npz", unique_id=3)
    assert loaded(tmp_path / "a.npz") == A.tolist()


def test_a_checkpoint_is_named_by_its_directory(tmp_path):
    fc.save_state_dict({"a": A}, tmp_path / "x")
    (file,) = (tmp_path / "x").glob("*.manifest")
    with provoked("foreign/formats.py", "give the checkpoint's directory, not a file in it"):
        loaded(file)
    assert loaded(tmp_path / "x") == A.tolist()
