"""Versions of weights by real ranks: tensor parallelism with sharding V2, a pipeline; bit-equal to ``fc.publish``."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("paddle")
pytest.importorskip("zstandard")
import paddle
import paddle.nn as nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

import paddle_flexckpt as fc
from paddle_flexckpt.rollout.local_copy import apply_version
from paddle_flexckpt.testing.cpu_world import init_fleet
from tests.rollout import reference

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

VERSIONS = 4

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        parallel = fleet.meta_parallel
        self.words = parallel.VocabParallelEmbedding(10, 8)
        self.up = parallel.ColumnParallelLinear(8, 12, has_bias=True, gather_output=False)
        self.down = parallel.RowParallelLinear(12, 8, has_bias=True, input_is_parallel=True)
        self.frozen = nn.Linear(8, 8)
        self.frozen.weight.stop_gradient = True

    def forward(self, x):
        return self.frozen(self.down(self.up(self.words(x))))


def publish_versions(kind, directory):
    """Train, and publish each step as a version and as a model of its own."""
    fc.install()
    if kind == "tensor parallel":
        init_fleet(mp=2, sharding=2, split_param=True)
    else:
        hcg = init_fleet(dp=2, pp=2, accumulate_steps=2, micro_batch_size=2)
    paddle.seed(7)
    with paddle.utils.unique_name.guard():
        if kind == "tensor parallel":
            net = Net()
        else:
            layers = [LayerDesc(nn.Linear, 8, 8) for _ in range(4)]
            net = PipelineLayer(layers, loss_fn=nn.MSELoss(), topology=hcg.topology())
    inner = paddle.optimizer.AdamW(0.01, parameters=[p for p in net.parameters() if not p.stop_gradient])
    model, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(inner)
    reports = []
    for step in range(VERSIONS):
        # Each with a publisher of its own, as after a restart.
        how = {"full_every": 3, "encoding": ("xor", "overwrite")[step % 2]}
        publisher = fc.WeightPublisher(os.path.join(directory, "versions"), **how)
        reports.append(publisher.publish(model))
        fc.publish(model, os.path.join(directory, f"published{step + 1}"))
        data = np.random.RandomState(step)
        if kind == "tensor parallel":
            model(paddle.to_tensor(data.randint(0, 10, [4, 3]))).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        else:
            x = paddle.to_tensor(data.randn(4, 8).astype("float32"))
            model.train_batch([x, x], optimizer)
    return [(report.version, report.base_version, report.keys, report.bytes_written) for report in reports]


# -- what is asserted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor parallel", "pipeline"])
def test_versions_are_what_publish_writes(world4, tmp_path, kind):
    found = world4.run(publish_versions, kind=kind, directory=str(tmp_path))
    assert [row[:2] for row in found[0]] == [[1, None], [2, 1], [3, 2], [4, None]]
    for number in range(1, VERSIONS + 1):
        expected = reference.tensors_of(tmp_path / f"published{number}")
        assert len(expected) >= 7
        apply_version(tmp_path / "versions", tmp_path / "ours", number)
        reference.pull(tmp_path / "theirs", None, tmp_path / "versions", number)
        assert reference.tensors_of(tmp_path / "ours") == reference.tensors_of(tmp_path / "theirs") == expected
    # The frozen weight is in no delta; each delta was written by several ranks.
    unchanged = 2 if kind == "tensor parallel" else 0
    assert found[0][1][2] <= len(expected) - (unchanged > 0)
    assert sum(rank[1][3] > 0 for rank in found) > 1
