"""Remedies about saves that are staged in slices, each provoked and followed."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from tests.remedies.following import provoked

SLICE = 1 << 12


@pytest.fixture
def writer():
    with fc.BackgroundWriter() as writer:
        yield writer


@pytest.fixture
def training():
    """A model whose step changes a large weight by a few elements, and the step."""
    model = paddle.nn.Embedding(1 << 12, 8, sparse=True)
    optimizer = paddle.optimizer.SGD(learning_rate=1.0, parameters=model.parameters())

    def compute():
        model(paddle.to_tensor([(1 << 12) - 1])).sum().backward()

    return model, optimizer, compute


def weight(path) -> np.ndarray:
    target = {"weight": np.zeros((1 << 12, 8), np.float32)}
    fc.load_state_dict(target, path)
    return target["weight"]


def begin(model, path, writer):
    return fc.save_state_dict(model.state_dict(), path, async_save=writer, slice_bytes=SLICE)


@pytest.mark.parametrize("way", ["finish_staging", "finish_before", "without slice_bytes"])
def test_a_step_while_a_save_is_staged(tmp_path, writer, training, way):
    model, optimizer, compute = training
    handle = begin(model, tmp_path, writer)
    compute()
    optimizer.step()
    with provoked("saving/background_saves.py", "call finish_staging() before optimizer.step(), or have finish_before"):
        handle.finish_staging()
    assert not list(tmp_path.glob("*.manifest"))
    was = model.weight.numpy().copy()
    if way == "without slice_bytes":
        handle = fc.save_state_dict(model.state_dict(), tmp_path, async_save=writer)
    else:
        handle = begin(model, tmp_path, writer)
    if way == "finish_before":
        handle.finish_before(optimizer)
    compute()
    if way == "finish_staging":
        handle.finish_staging()
    optimizer.step()
    handle.result()
    assert (model.weight.numpy() != was).any()
    assert weight(tmp_path).tobytes() == was.tobytes()


def test_a_result_or_another_save_before_the_end_of_the_staging(tmp_path, writer, training):
    model = training[0]
    handle = begin(model, tmp_path / "one", writer)
    with provoked("saving/sliced_saves.py", "call finish_staging() first"):
        handle.result()
    with provoked("background/writer.py", "call its finish_staging() first"):
        begin(model, tmp_path / "two", writer)
    handle.finish_staging().result()
    begin(model, tmp_path / "two", writer).finish_staging().result()
    for name in ("one", "two"):
        assert weight(tmp_path / name).tobytes() == model.weight.numpy().tobytes()
