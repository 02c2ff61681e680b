"""Trains a small network in semi-automatic parallel, on whatever mesh it is started with, and goes on where it stopped.

    python -m paddle.distributed.launch --nproc_per_node 4 train.py --mesh 2x2 --stage 1 --until 20 --checkpoints ckpt

See README.md beside this file.
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn

import paddle_flexckpt as fc

FEATURES, HIDDEN, CLASSES, ROWS = 32, 96, 10, 64


class Network(nn.Layer):
    """Two linear layers, which the mesh's axis "mp" cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


def batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The data of a step, the same on every mesh: the classes are those of a network that nobody trains."""
    teacher = np.random.RandomState(0).randn(FEATURES, CLASSES)
    x = np.random.RandomState(1 + step).randn(ROWS, FEATURES)
    return paddle.to_tensor(x.astype("float32")), paddle.to_tensor((x @ teacher).argmax(1))


def build(mesh: dist.ProcessMesh | None, stage: int, seed: int):
    """Network and optimizer, cut over a mesh of the axes "dp" and "mp"; without a mesh, as they are."""
    paddle.seed(seed)
    model = Network()
    scheduler = paddle.optimizer.lr.CosineAnnealingDecay(0.01, T_max=60)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters(), weight_decay=0.05)
    if mesh is not None:
        plan = {"up": dist.ColWiseParallel(), "down": dist.RowWiseParallel()}
        config = {"dp_config": {"sharding_level": stage}, "mp_config": {"parallelize_plan": plan}}
        model, optimizer = dist.parallelize(model, optimizer, mesh, config=config)
    return model, optimizer, scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", help="extents of the axes dp and mp, for example 2x2; without it, one process")
    parser.add_argument("--stage", type=int, default=0, choices=(0, 1, 2, 3), help="how states are sharded over dp")
    parser.add_argument("--until", type=int, default=20, help="the step at which to stop")
    parser.add_argument("--checkpoints", required=True, help="directory of the run's checkpoints")
    parser.add_argument("--cpu", action="store_true", help="lend Paddle's CPU build the collectives that it lacks")
    options = parser.parse_args()

    mesh = None
    if options.mesh:
        if options.cpu:
            from paddle_flexckpt.testing import cpu_world

            cpu_world.install()
        dist.init_parallel_env()
        extents = [int(n) for n in options.mesh.split("x")]
        ranks = np.arange(dist.get_world_size()).reshape(extents)
        mesh = dist.ProcessMesh(ranks, dim_names=["dp", "mp"])
        dist.auto_parallel.set_mesh(mesh)

    fc.install()
    with fc.CheckpointManager(options.checkpoints) as manager:
        begin = manager.latest_step() or 0
        # Other weights at each start: nothing but the checkpoint can make the losses go on.
        model, optimizer, scheduler = build(mesh, options.stage, seed=begin)
        if begin:
            manager.restore(begin, model=model, optimizer=optimizer, lr_scheduler=scheduler, rng=False)
            say(f"goes on from step {begin}")
        for step in range(begin, options.until):
            x, y = batch(step)
            if mesh is not None:
                placements = [dist.Shard(0), dist.Replicate()]
                x, y = dist.shard_tensor(x, mesh, placements), dist.shard_tensor(y, mesh, placements)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            scheduler.step()
            say(f"step {step + 1:3}  loss {float(loss):.6f}")
        if options.until > begin:
            manager.save(options.until, model=model, optimizer=optimizer, lr_scheduler=scheduler, rng=False)


def say(text: str) -> None:
    """Prints on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
