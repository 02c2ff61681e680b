"""``publish`` of a tensor-parallel model by real ranks: what Hugging Face's library reads is the whole model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from paddle.distributed import fleet
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from paddle_flexckpt.loading.publishing import publish
from paddle_flexckpt.testing.cpu_world import init_fleet

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def publish_layers(directory):
    init_fleet(mp=2)
    fc.install()
    paddle.seed(3)
    parallel = fleet.meta_parallel
    model = paddle.nn.LayerDict(
        {
            "up": parallel.ColumnParallelLinear(8, 12, has_bias=True, gather_output=True),
            "down": parallel.RowParallelLinear(12, 8, has_bias=True),
            "words": parallel.VocabParallelEmbedding(10, 8),
        }
    )
    statements = ["up.weight^T -> up_proj.weight", "words.weight -> embed.weight"]
    report = publish(model, directory, aoa_config={"aoa_statements": statements}, config={"model_type": "toy"})
    shards = {key: weight.local_tensor.numpy().tolist() for key, weight in model.sharded_state_dict().items()}
    return {"shards": shards, "files": report.files, "written": report.bytes_written}


# -- what is asserted --------------------------------------------------------------------------------------------------


def test_a_tensor_parallel_model_is_published_whole(world2, tmp_path):
    first, second = world2.run(publish_layers, directory=str(tmp_path / "out"))
    found = {}
    for name in first["files"]:
        found.update(load_file(tmp_path / "out" / name))
    axes = {"up.weight": 1, "up.bias": 0, "down.weight": 0, "words.weight": 0}
    expected = {
        key: np.concatenate([value, second["shards"][key]], axes[key]) if key in axes else np.asarray(value)
        for key, value in first["shards"].items()
    }
    expected = {key: np.asarray(value, np.float32) for key, value in expected.items()}
    expected["up_proj.weight"] = expected.pop("up.weight").T
    expected["embed.weight"] = expected.pop("words.weight")
    assert sorted(found) == sorted(expected)
    assert all((found[key] == expected[key]).all() for key in found)
    assert first["written"] + second["written"] == sum(value.nbytes for value in found.values())
    assert len(first["files"]) == 2
    assert (tmp_path / "out" / "config.json").exists()
