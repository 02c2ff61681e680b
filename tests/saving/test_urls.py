"""URLs wherever paths are taken."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

pytest.importorskip("paddle")
pytest.importorskip("fsspec")
import fsspec
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt import run_state
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.native.directory import is_complete
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state


@pytest.fixture
def url():
    yield "memory://flexckpt-urls/run"
    fsspec.filesystem("memory").store.clear()


def test_plain_tensors_and_extra_state(url, tmp_path):
    weight = paddle.rand([4, 6])
    state = {"model": {"w": weight}, **collect_extra_state(step=3, rng=False, note="x")}
    report = fc.save_state_dict(state, url)
    assert report.path == url
    merged = fc.load_merged_state_dict(url)
    assert (merged["model.w"].numpy() == weight.numpy()).all()
    target = {"model": {"w": paddle.zeros([4, 6])}}
    assert fc.load_state_dict(target, url).source == url
    assert (target["model"]["w"].numpy() == weight.numpy()).all()
    extra = restore_extra_state(load_extra_state(url), rng=False)
    assert (extra.step, extra.more) == (3, {"note": "x"})
    assert is_complete(url)
    assert [info.path for info in fc.list_checkpoints("memory://flexckpt-urls")] == [url]
    assert fc.verify_checkpoint(url).ok
    statements = ["model.w^T -> t"]
    assert "model.w" in fc.explain(statements, url)
    assert "model.w" in fc.explain(statements, open_storage(url), {"t": paddle.zeros([6, 4])})
    turned = fc.load_merged_state_dict(url, aoa_config={"aoa_statements": statements})
    assert (turned["t"].numpy() == weight.numpy().T).all()
    fc.export_safetensors(url, f"{url}-out", {"aoa_statements": statements})
    fc.export_safetensors(url, tmp_path / "out", {"aoa_statements": statements})
    assert open_storage(f"{url}-out").read("model.safetensors") == (tmp_path / "out/model.safetensors").read_bytes()


def test_an_error_names_the_url(url):
    with pytest.raises(fc.ValidationError, match=f"{url} does not exist"):
        fc.load_state_dict({"w": paddle.zeros([1])}, url)
    fc.save_state_dict({"w": paddle.ones([2])}, url)
    with pytest.raises(fc.ValidationError, match=f"cannot load from '{url}'"):
        fc.load_state_dict({"other": paddle.zeros([1])}, url)


def test_columns_and_rows(url):
    """Without a memory map, what is scattered comes out of whole blocks."""
    whole = np.arange(700 * 900, dtype=np.float32).reshape(700, 900)
    fc.save_state_dict({"w": paddle.to_tensor(whole)}, url)
    for verify in ("read", "full", "off"):
        part = paddle.zeros([700, 41])
        shard = fc.ShardedWeight("w", part, (700, 41), (700, 900), (0, 859))
        report = fc.load_state_dict({"w": shard}, url, verify=verify)
        assert (part.numpy() == whole[:, 859:]).all()
        assert report.bytes_read >= report.bytes_needed
        assert report.bytes_verified == (0 if verify == "off" else report.bytes_read)


def test_every_public_function_that_takes_a_path_takes_any_location():
    found = 0
    for function in (getattr(room, name) for room in (fc, run_state) for name in room.__all__):
        if inspect.isfunction(function) and function is not fc.open_storage:  # it makes such a location
            for parameter in inspect.signature(function).parameters.values():
                if parameter.name in ("path", "output"):
                    found += 1
                    assert parameter.annotation == "Location", function
    assert inspect.signature(is_complete).parameters["path"].annotation == "Location"
    assert found >= 8
    assert Location is not None
