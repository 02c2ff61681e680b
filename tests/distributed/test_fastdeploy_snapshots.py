"""``publish_fastdeploy`` of real ranks, to an engine of another layout: slices of what ``publish`` writes."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from tests.distributed.test_weight_channel import NAMES, build, read

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# What the engine splits, and along which axis: an up projection by columns, as Hugging Face stores it.
CASES = {
    "tp2 v2": (4, NAMES, {"up_proj.weight": 0, "up.bias": 0, "down.weight": 0, "embed.weight": 0}),
    "pp2": (2, None, {"*.weight": 1}),
}


def publish_both(strategy, directory, aoa_config, axes):
    model = build(strategy)
    fc.publish(model, f"{directory}/whole", aoa_config=aoa_config)
    report = fc.publish_fastdeploy(model, f"{directory}/engine", 12, 2, axes, aoa_config=aoa_config)
    return {"written": report.bytes_written, "total": report.total_bytes, "files": report.files}


@pytest.mark.parametrize("strategy", CASES)
def test_an_engine_of_two_ranks_has_slices_of_what_publish_writes(world, tmp_path, strategy):
    size, names, axes = CASES[strategy]
    results = world(size).run(publish_both, strategy=strategy, directory=str(tmp_path), aoa_config=names, axes=axes)
    whole, files = read(tmp_path / "whole"), results[0]["files"]
    assert sorted(os.listdir(tmp_path / "engine")) == sorted([*files, "version.yaml"])
    assert len(files) == max(size, 2)
    total = 0
    for rank in range(2):
        found = {}
        for name in files:
            if name.startswith(f"model_state.tp{rank}.{rank}.part"):
                tensors = paddle.load(str(tmp_path / "engine" / name), safetensors=True)
                raw = load_file(tmp_path / "engine" / name)
                assert {key: value.numpy().tobytes() for key, value in tensors.items()} == {
                    key: value.tobytes() for key, value in raw.items()
                }
                found.update(tensors)
        assert found.keys() == whole.keys()
        for key, value in whole.items():
            axis = axes.get(key, axes.get("*.weight") if key.endswith(".weight") else None)
            expected = value if axis is None else np.split(value, 2, axis)[rank]
            assert list(found[key].shape) == list(expected.shape)
            assert found[key].numpy().tobytes() == expected.tobytes()
            total += expected.nbytes
    assert sum(each["written"] for each in results) == results[0]["total"] == total
    assert all(each["written"] < total for each in results)
