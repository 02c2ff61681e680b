"""A mixture of experts under what users combine it with: trained, saved, and resumed under each other's layouts.

The network is a pipeline's: a block of two linears and a mixture, twice. Tokens are cut over data, or over sequence
parallelism; experts are spread over those who have other tokens, or over tensor parallelism, or over Paddle's own
groups for experts. Losses are means over all tokens, whoever has them.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence
from paddle.incubate.distributed.models.moe import MoELayer

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed.matrix.network import fill
from tests.distributed.matrix.sharded_experts import groups_of
from tests.distributed.matrix.strategies import BY_NAME

WIDTH, INNER, EXPERTS, TOP = 6, 10, 4, 2
BATCH, LENGTH, MICRO_BATCHES = 16, 4, 2


class Dense(nn.Layer):
    """Two linears; the first block of sequence parallelism takes its part of the tokens."""

    def __init__(self, sequence_parallel, first):
        super().__init__()
        self.scatters = sequence_parallel and first
        if sequence_parallel:
            self.up = sequence.ColumnSequenceParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
            self.down = sequence.RowSequenceParallelLinear(INNER, WIDTH, has_bias=True, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = x.reshape([-1, WIDTH])
        x = sequence.ScatterOp.apply(x) if self.scatters else x
        return x + self.down(F.gelu(self.up(x)))


class Mixture(nn.Layer):
    """A MoELayer whose experts are spread over a group."""

    def __init__(self, group, shares_tokens, sequence_parallel):
        super().__init__()
        local = EXPERTS if group is None else EXPERTS // group.nranks
        self.moe = MoELayer(
            d_model=WIDTH,
            experts=nn.LayerList(
                [nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(local)]
            ),
            gate={"type": "naive", "top_k": TOP},
            moe_group=group,
            mp_group=group if shares_tokens else None,
        )
        for parameter in self.moe.experts.parameters():
            parameter.no_sync = group is not None
            if (
                shares_tokens or sequence_parallel
            ):  # else fleet makes biases the same on all ranks of tensor parallelism
                parameter.is_distributed = True
        if sequence_parallel:
            for parameter in self.moe.gate.parameters():
                sequence.mark_as_sequence_parallel_parameter(parameter)

    def forward(self, x):
        return x + self.moe(x.unsqueeze(0)).squeeze(0)


class Loss(nn.Layer):
    """A mean over this rank's tokens, divided among ranks whose gradients are summed."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, out, labels):
        return (out * out).mean() / self.parts


class ExpertFlow:
    """One strategy's model and optimizer."""

    def __init__(self, name, salt):
        fc.install()
        strategy = self.strategy = BY_NAME[name]
        self.group, alike = None, None
        if strategy.world == 1:
            self.replicas = 1
        elif strategy.over == "mp":
            batches = {
                "accumulate_steps": MICRO_BATCHES,
                "micro_batch_size": BATCH // strategy.sharding // MICRO_BATCHES,
            }
            degrees = {"mp": strategy.mp, "pp": strategy.pp, "sharding": strategy.sharding}
            whole = fleet.DistributedStrategy()  # ranks of sequence parallelism have other activations
            whole.pipeline_configs = {"enable_partial_send_recv": False}
            hcg = cpu_world.init_fleet(**degrees, split_param=strategy.split, strategy=whole, **batches)
            self.group, self.replicas = hcg.get_model_parallel_group(), strategy.sharding
        else:
            self.group, alike = groups_of(strategy)
            self.replicas = strategy.dp * strategy.sharding
        # Gradients of these are summed: ranks with parts of one sequence, and data parallelism that fleet knows not of.
        self.is_summed = strategy.sequence or (strategy.over == "data" and self.group is not None)
        parts = self.group.nranks if self.is_summed else 1
        self.parts = parts
        self.model = self._build(parts)
        fill(self.model.sharded_state_dict(), salt)
        if alike is not None:
            for name, parameter in self.model.named_parameters():
                if ".experts." in name:
                    parameter.color = {"color": "moe_expert", "group": alike}
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters())
        if strategy.sequence:
            accumulated = MICRO_BATCHES if strategy.pp > 1 else 1
            sequence.register_sequence_parallel_allreduce_hooks(self.model, accumulated, False)
        self.runner = self.model
        if strategy.pp > 1 or strategy.sharding > 1:
            self.runner = fleet.distributed_model(self.model) if strategy.pp > 1 else self.model
            self.optimizer = fleet.distributed_optimizer(self.optimizer)

    def _build(self, parts):
        strategy = self.strategy
        shares = strategy.over == "mp" and not strategy.sequence
        layers = [
            description
            for first in (True, False)
            for description in ((Dense, strategy.sequence, first), (Mixture, self.group, shares, strategy.sequence))
        ]
        if strategy.pp > 1:
            topology = fleet.get_hybrid_communicate_group().topology()
            descriptions = [LayerDesc(*each) for each in layers]
            return PipelineLayer(descriptions, num_stages=strategy.pp, loss_fn=Loss(parts), topology=topology)
        self.loss = Loss(parts)
        return nn.Sequential(*(kind(*given) for kind, *given in layers))

    def step(self, number):
        strategy, rank = self.strategy, dist.get_rank()
        x = np.random.RandomState(number).randn(BATCH, LENGTH, WIDTH).astype("float32")
        # Data parallelism is the outermost axis here, or the only one.
        x = paddle.to_tensor(np.split(x, self.replicas)[rank // (strategy.world // self.replicas)])
        if strategy.pp > 1:
            loss = self.runner.train_batch([x, paddle.zeros([len(x), 1])], self.optimizer).mean()
        else:
            loss = self.loss(self.runner(x), None)
            loss.backward()
            self._exchange_gradients()
            self.optimizer.step()
            self.optimizer.clear_grad()
        loss = loss.detach()
        if strategy.world > 1:
            dist.all_reduce(loss)
        return float(loss) / strategy.world * self.parts

    def _exchange_gradients(self):
        """What fleet does not do: sums over ranks of experts, means of experts whose tokens came from all of them."""
        strategy = self.strategy
        for name, parameter in self.model.named_parameters():
            if self.group is None or parameter.grad is None:
                continue
            if ".experts." in name:
                if strategy.over == "tp":
                    parameter.grad.scale_(1.0 / self.group.nranks)
            elif (self.is_summed and not strategy.sequence) or (
                strategy.over == "mp" and ".gate." in name and not strategy.sequence
            ):
                dist.all_reduce(parameter.grad, group=self.group)

    def steps(self, first, last):
        return [self.step(number) for number in range(first, last)]

    def state(self):
        """Model and optimizer as the library describes them."""
        model = self.runner.sharded_state_dict()
        return {**model, **self.optimizer.sharded_state_dict(model)}

    def shards(self):
        """What to look at for the values of the state."""
        return self.state()
