"""The network of the semi-automatic tests in fleet's dynamic hybrid parallelism: the same parameters, other layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.base.unique_name import UniqueNameGenerator
from paddle.distributed import fleet

from paddle_flexckpt.testing import cpu_world
from tests.semi_auto.strategies import SIZES
from tests.semi_auto.training import CUT, LEARNING_RATE, WEIGHT_DECAY, Cube, batch, initial


@dataclass(frozen=True)
class FleetStrategy:
    """Degrees of fleet.

    Attributes:
        name: how tests call it.
        ranks: size of the world.
        dp: of data parallelism.
        mp: of tensor parallelism.
        sharding: of optimizer states.
        split_param: V2 of sharding, with flat ranges of fused buffers.
    """

    name: str
    ranks: int
    dp: int = 1
    mp: int = 1
    sharding: int = 1
    split_param: bool = False


STRATEGIES = (
    FleetStrategy("fleet-tp2", 2, mp=2),
    FleetStrategy("fleet-dp2-tp2", 4, dp=2, mp=2),
    FleetStrategy("fleet-sharding2", 2, sharding=2),
    FleetStrategy("fleet-sharding2-v2", 2, sharding=2, split_param=True),
)
BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


class Net(nn.Layer):
    """As :class:`tests.semi_auto.training.Net`; "mp" cuts the linear layers only."""

    def __init__(self, sizes, mp):
        super().__init__()
        self.cube = Cube(sizes)
        self.norm = nn.LayerNorm(sizes.features)
        if mp > 1:
            self.a = fleet.meta_parallel.ColumnParallelLinear(
                sizes.features, sizes.hidden, has_bias=True, gather_output=False
            )
            self.b = fleet.meta_parallel.RowParallelLinear(
                sizes.hidden, sizes.classes, has_bias=True, input_is_parallel=True
            )
        else:
            self.a = nn.Linear(sizes.features, sizes.hidden)
            self.b = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, x):
        return self.b(F.relu(self.a(self.norm(self.cube(x)))))


class FleetBuilt:
    """A network and its optimizer under fleet, ready for ``step``."""

    def __init__(self, strategy, sizes):
        self.strategy, self.sizes = strategy, sizes
        # One prefix on all ranks: fleet broadcasts parameters in the order of their names.
        self._names = UniqueNameGenerator()
        self.hcg = cpu_world.init_fleet(
            dp=strategy.dp, mp=strategy.mp, sharding=strategy.sharding, split_param=strategy.split_param
        )
        with paddle.utils.unique_name.guard(self._names):
            self.model = Net(sizes, strategy.mp)
            for key, parameter in self.model.named_parameters():
                parameter.set_value(self._part(key, parameter))
            inner = paddle.optimizer.AdamW(LEARNING_RATE, parameters=self.model.parameters(), weight_decay=WEIGHT_DECAY)
            self.wrapped = fleet.distributed_model(self.model)
            self.optimizer = fleet.distributed_optimizer(inner)

    def _part(self, key, parameter):
        shape, axis = list(parameter.shape), CUT.get(key)
        if not parameter.is_distributed or axis is None:
            return initial(key, shape)
        shape[axis] *= self.strategy.mp
        return np.split(initial(key, shape), self.strategy.mp, axis)[self.hcg.get_model_parallel_rank()]

    def step(self, i):
        """Trains on batch ``i``; returns the loss of the whole batch."""
        with paddle.utils.unique_name.guard(self._names):
            parts = self.strategy.dp * self.strategy.sharding
            mine = self.hcg.get_data_parallel_rank() + self.hcg.get_sharding_parallel_rank()
            x, y = (paddle.to_tensor(np.split(array, parts)[mine]) for array in batch(i, self.sizes))
            loss = F.cross_entropy(self.wrapped(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            total = loss.detach().clone()
            paddle.distributed.all_reduce(total)
            return float(total) / paddle.distributed.get_world_size()


def build(name, sizes="uneven"):
    """Builds network and optimizer under a strategy. Collective."""
    return FleetBuilt(BY_NAME[name], SIZES[sizes])
