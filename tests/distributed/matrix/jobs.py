"""What the ranks do: train and save, or load and train on. Every rank leaves its shards for the test to assemble."""

from __future__ import annotations

import json
import os

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.auto_parallel.api import dtensor_from_local
from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer
from paddle.distributed.sharding import group_sharded_parallel

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world
from tests.distributed import test_experts as experts
from tests.distributed.matrix.expert_flows import ExpertFlow
from tests.distributed.matrix.network import LENGTH, VOCABULARY, build, fill
from tests.distributed.matrix.sharded_experts import ShardedExperts
from tests.distributed.matrix.strategies import AFTER, BY_NAME, REHEARSED

BATCH, MICRO_BATCHES = 32, 4
BEFORE = 3


class Trainer:
    """One strategy's model and optimizer."""

    def __init__(self, name, model, salt):
        fc.install()
        strategy = self.strategy = BY_NAME[name]
        self.replicas = strategy.dp * strategy.sharding // strategy.cp
        if strategy.level is not None:
            self.replicas = strategy.world
        hcg = cpu_world.init_fleet(
            dp=strategy.dp if strategy.level is None or strategy.sharding > 1 else strategy.world,
            mp=strategy.mp,
            pp=strategy.pp,
            sharding=strategy.sharding,
            split_param=strategy.split,
            accumulate_steps=MICRO_BATCHES,
            micro_batch_size=BATCH // self.replicas // MICRO_BATCHES,
            strategy=switched(strategy),
            hybrid=context_parallel(strategy) if strategy.cp > 1 else None,
        )
        place = hcg.get_data_parallel_rank() * strategy.sharding + hcg.get_sharding_parallel_rank()
        self.place = place // strategy.cp if strategy.level is None else dist.get_rank()
        self.model = build(strategy, model == "tied")
        fill(self.model.sharded_state_dict(), salt)
        trained = [p for p in self.model.parameters() if not p.stop_gradient]
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=trained)
        if strategy.sequence:
            sequence.register_sequence_parallel_allreduce_hooks(self.model, 1, False)
        self.runner = self.model
        if strategy.level is not None:
            groups = {}
            if strategy.sharding > 1:
                groups = {"group": hcg.get_sharding_parallel_group(), "dp_group": hcg.get_data_parallel_group()}
            self.runner, self.optimizer, _ = group_sharded_parallel(
                self.model, self.optimizer, strategy.level, segment_size=64, exclude_layer=[*strategy.exclude], **groups
            )
        elif strategy.world > 1:
            if strategy.main_gradients:
                MixPrecisionLayer(self.model, "bfloat16")
                self.optimizer = MixPrecisionOptimizer(self.optimizer)
            self.runner = fleet.distributed_model(self.model)
            self.optimizer = fleet.distributed_optimizer(self.optimizer)
        assert strategy.runner in (None, type(self.runner).__name__)
        fc.check(self.runner, self.optimizer)  # training and checkpoints are as without it

    def step(self, number):
        """One step on the global batch of that number; returns its loss."""
        generator = np.random.RandomState(number)
        tokens, labels = (generator.randint(0, VOCABULARY, (BATCH, LENGTH)) for _ in range(2))
        part = slice(BATCH // self.replicas * self.place, BATCH // self.replicas * (self.place + 1))
        batch = [paddle.to_tensor(each[part]) for each in (tokens, labels)]
        if self.strategy.cp > 1:  # neighbours have halves of the same sequences
            batch = [paddle.split(each, self.strategy.cp, 1)[dist.get_rank() % self.strategy.cp] for each in batch]
        if self.strategy.pp > 1 or self.strategy.pipelined:
            loss = self.runner.train_batch(batch, self.optimizer)
        else:
            loss = self.runner(*batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad(**({"set_to_zero": False} if self.strategy.main_gradients else {}))
        loss = loss.detach().mean()  # a pipeline's has the shape [1]
        if dist.get_world_size() > 1:
            dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    def steps(self, first, last):
        return [self.step(number) for number in range(first, last)]

    def state(self):
        """Model and optimizer as the library describes them, asked of the wrapper."""
        model = self.runner.sharded_state_dict()
        return {**model, **self.optimizer.sharded_state_dict(model)}

    def shards(self):
        """What to look at for the values of the state."""
        return self.state()


def switched(strategy):
    """Fleet's strategy with what is switched on besides the degrees."""
    found = fleet.DistributedStrategy()
    for configs, switches in (("sharding_configs", strategy.switches), ("pp_configs", strategy.pp_switches)):
        for name, value in switches:
            setattr(found.hybrid_configs[configs], name, value)
    return found


def context_parallel(strategy):
    """Entries of hybrid_configs: context parallelism divides the ranks of sharding, where experts have groups."""
    degrees = {"cp_degree": strategy.cp, "ep_degree": 2, "moe_sharding_degree": strategy.sharding // 2}
    return {**degrees, "order": ["pp", "moe_sharding", "sharding", "ep", "dp", "sep", "cp", "mp"]}


class ExpertTrainer:
    """The same of a mixture of experts."""

    def __init__(self, name, salt):
        fc.install()
        strategy = BY_NAME[name]
        group, place, degree = experts.layout(strategy.experts, strategy.mp)
        self.net = experts.Net(group, salt, place, degree)
        self.optimizer = experts.adamw(self.net)

    def steps(self, first, last):
        # An expert without tokens has no gradient in a fresh job and a zero one, which AdamW steps on, after
        # clear_grad(): a job that goes on forgets its gradients, as one that resumes has none.
        self.optimizer.clear_grad(set_to_zero=False)
        return experts.train(self.net, self.optimizer, range(first, last))

    def state(self):
        return experts.state_of(self.net, self.optimizer)

    def shards(self):
        return self.state()


class DistTensors:
    """The same state as distributed tensors, made of local values. It is not trained."""

    def __init__(self, name, model, salt):
        fc.install()
        cpu_world.reset_fleet()
        size, rank = dist.get_world_size(), dist.get_rank()
        mesh = dist.ProcessMesh(list(range(size)), dim_names=["x"])
        plain = build(BY_NAME["single"], model == "tied")
        trained = [p for p in plain.parameters() if not p.stop_gradient]
        state = plain.sharded_state_dict()
        state.update(paddle.optimizer.AdamW(0.01, parameters=trained).sharded_state_dict(state))
        self._state, self._boxes = {}, {}
        for key, weight in state.items():
            shape = list(weight.global_shape)
            cut = bool(shape) and shape[0] % size == 0
            local = [shape[0] // size, *shape[1:]] if cut else shape
            values = paddle.zeros(local, weight.local_tensor.dtype)
            placement = dist.Shard(0) if cut else dist.Replicate()
            self._state[key] = dtensor_from_local(values, mesh, [placement])
            self._boxes[key] = (local, shape, [local[0] * rank if cut else 0, *[0] * (len(shape) - 1)][: len(shape)])
        fill(self.shards(), salt)

    def steps(self, first, last):
        raise NotImplementedError("distributed tensors are only moved here")

    def state(self):
        return self._state

    def shards(self):
        """The local values, described by hand."""
        return {
            key: fc.ShardedWeight(key, self._state[key]._local_value(), *map(tuple, box))
            for key, box in self._boxes.items()
        }


def begin(strategy, model, salt):
    """A fresh job; the salt decides its values."""
    if BY_NAME[strategy].semi:
        return DistTensors(strategy, model, salt)
    if BY_NAME[strategy] in REHEARSED:
        return ShardedExperts(strategy, salt)
    if model == "mixture":
        return ExpertFlow(strategy, salt)
    return ExpertTrainer(strategy, salt) if model == "experts" else Trainer(strategy, model, salt)


def leave(state, folder):
    """Writes this rank's shards, with what the library says of them."""
    os.makedirs(folder, exist_ok=True)
    rank, arrays, index = dist.get_rank(), {}, []
    for number, (key, weight) in enumerate(state.items()):
        arrays[str(number)] = weight.local_tensor.numpy()
        flat = weight.flattened_range
        index.append(
            [
                key,
                list(weight.global_shape),
                list(weight.global_offset),
                list(weight.local_shape),
                [int(flat.start), int(flat.stop)] if weight.is_flattened else None,
            ]
        )
    np.savez(os.path.join(folder, f"{rank}.npz"), **arrays)
    with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as stream:
        json.dump(index, stream)


def place(folder, nodes):
    """Where this rank's checkpoint is: one directory for all, or that of its node, of which there is one by rank."""
    if nodes is None:
        return {"path": os.path.join(folder, "checkpoint")}
    return {"path": os.path.join(folder, f"node{nodes[dist.get_rank()]}"), "storage": "per_node"}


def save(strategy, model, folder, trained=True, nodes=None, node_copies=1):
    """Trains, saves, leaves the shards, and trains on; or gives all of the state values, where training is left out."""
    trainer = begin(strategy, model, "saved")
    before = trainer.steps(0, BEFORE) if trained else []
    state = trainer.state()
    if not trained:
        fill(trainer.shards(), "untrained")
    # To nodes in the background: the steps that follow change the tensors.
    handle = fc.save_state_dict(
        state, **place(folder, nodes), unique_id=0, step=BEFORE, node_copies=node_copies, async_save=nodes is not None
    )
    leave(trainer.shards(), os.path.join(folder, "saved"))
    after = trainer.steps(BEFORE, BEFORE + AFTER) if trained else []
    report = handle if nodes is None else handle.result()
    return {"losses": before + after, "bytes": report.total_bytes}


def load(strategy, model, folder, trained=True, nodes=None):
    """Loads into a fresh job with other values, leaves the shards, and trains on."""
    trainer = begin(strategy, model, "other")
    state = trainer.state()
    report = fc.load_state_dict(state, **place(folder, nodes), strict=True)
    leave(trainer.shards(), os.path.join(folder, f"loaded-{strategy}"))
    losses = trainer.steps(BEFORE, BEFORE + AFTER) if trained else []
    return {"losses": losses, "seconds": report.seconds["total"]}


def reshard(source, target, model, folder, trained=(True, True)):
    """Moves a live, trained job into another strategy of the same world, and trains on there."""
    origin = begin(source, model, "saved")
    if trained[0]:
        origin.steps(0, BEFORE)
    held = origin.state()
    if not trained[0]:
        fill(origin.shards(), "untrained")
    leave(origin.shards(), os.path.join(folder, f"live-{source}"))
    # fleet broadcasts initial values over a group in the order of parameter names. After a pipeline, whose stages have
    # made different numbers of parameters, the counters in those names would differ between the ranks.
    with paddle.utils.unique_name.guard("moved_"):
        destination = begin(target, model, "other")
    fc.reshard_sharded_state_dict(held, destination.state(), strict=True)
    leave(destination.shards(), os.path.join(folder, f"moved-{source}-{target}"))
    return {"losses": destination.steps(BEFORE, BEFORE + AFTER) if trained[1] else []}
