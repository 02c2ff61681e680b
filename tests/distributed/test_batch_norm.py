"""Models with running statistics, which data-parallel ranks do not share: one rank's are saved, and loaded by all.

The jobs: data parallelism, with other data and other running statistics on every rank.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed import jobs_common as common

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

WIDTH = 6
STATISTICS = ("norm1._mean", "norm1._variance", "norm2._mean", "norm2._variance")


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.BatchNorm1D(WIDTH)
        self.norm2 = nn.BatchNorm(WIDTH)  # Paddle's older class
        self.sync = nn.SyncBatchNorm(WIDTH)  # has no kernel on CPU: described only

    def forward(self, x):
        return self.norm2(self.norm1(self.linear(x)))


def build():
    fc.install()
    cpu_world.init_fleet(dp=dist.get_world_size())
    paddle.seed(7)
    model = Net()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    if dist.get_world_size() == 1:
        return model, optimizer
    return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)


def describe(wrapper, optimizer):
    shards = wrapper.sharded_state_dict()
    return {**shards, **fc.optimizer_sharded_state_dict(optimizer, shards)}


def hexed(state):
    """The bytes of every tensor, as text."""
    return {key: data.hex() for key, data in common.snapshot(state).items()}


def train(wrapper, optimizer, steps=2):
    for number in range(steps):
        random = np.random.RandomState(10 * dist.get_rank() + number)
        loss = (wrapper(paddle.to_tensor(random.randn(8, WIDTH).astype("float32"))) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()


def save(directory, drift):
    """Trains and saves; what this rank holds then, and what the report says.

    Args:
        directory: Where.
        drift: Whether to change a weight by one unit in the last place, on rank 1.
    """
    wrapper, optimizer = build()
    train(wrapper, optimizer)
    state = describe(wrapper, optimizer)
    policy = True
    if drift:
        policy = "close"
        if dist.get_rank() == 1:
            weight = state["linear.weight"].local_tensor
            weight.set_value(paddle.to_tensor(np.nextafter(weight.numpy(), np.float32(2))))
    report = fc.save_state_dict(state, directory, check_replicas=policy)
    return {"held": hexed(state), "replicas": report.replicas, "summary": report.summary()}


def load(directory):
    wrapper, optimizer = build()
    state = describe(wrapper, optimizer)
    fc.load_state_dict(state, directory, strict=True)
    return hexed(state)


# -- what is asserted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drift", [False, True], ids=["in step", "one unit apart"])
def test_a_data_parallel_model_saves_by_default_and_loads_everywhere(world, tmp_path, drift):
    first, second = world(2).run(save, directory=str(tmp_path), drift=drift)
    held, others = first["held"], second["held"]
    differing = {key for key in held if held[key] != others[key]}
    assert differing == set(STATISTICS) | ({"linear.weight"} if drift else set())
    assert first["replicas"] == second["replicas"]
    assert {key: text for key, text in first["replicas"].items() if key in STATISTICS} == dict.fromkeys(
        STATISTICS, "differ; rank 0's values count"
    )
    assert first["replicas"]["sync._mean"] == first["replicas"]["sync._variance"] == "equal"
    assert ("differ by at most " in first["replicas"].get("linear.weight", "")) == drift
    assert f"replicas of {5 if drift else 4} tensors differ" in first["summary"]
    for ranks in (1, 2):
        for loaded in world(ranks).run(load, directory=str(tmp_path)):
            assert loaded == held
