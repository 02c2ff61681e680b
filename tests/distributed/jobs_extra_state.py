"""Jobs of test_extra_state: every rank has generators and a position of its own."""

from __future__ import annotations

import random

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

import paddle_flexckpt as fc
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.testing import cpu_world


def start(tensor, seed):
    size = dist.get_world_size()
    cpu_world.init_fleet(dp=size // tensor, mp=tensor)
    for each in (random.seed, np.random.seed, paddle.seed):
        each(seed + dist.get_rank())
    get_rng_state_tracker().reset()
    get_rng_state_tracker().add("local_seed", seed + 50 + dist.get_rank())
    return paddle.optimizer.lr.StepDecay(0.1, 3)


def draw():
    numbers = [random.random(), float(np.random.rand()), *paddle.rand([2]).numpy().tolist()]
    with get_rng_state_tracker().rng_state("local_seed"):
        return numbers + paddle.rand([2]).numpy().tolist()


def save(directory, tensor):
    scheduler = start(tensor, 100)
    for _ in range(4):
        scheduler.step()
    draw()
    state = collect_extra_state(scheduler, step=7, dataloader={"rank": dist.get_rank()})
    fc.save_state_dict({"weight": paddle.ones([3]), **state}, directory)
    return {"draws": draw()}


def load(directory, tensor):
    scheduler = start(tensor, 200)
    state = load_extra_state(directory)
    before = collect_extra_state()
    report = restore_extra_state(state, scheduler)
    after = collect_extra_state()
    mine = f"extra_state.rng.rank{dist.get_rank()}"
    return {
        "unchanged": before[mine].numpy().tobytes() == after[mine].numpy().tobytes(),
        "draws": draw(),
        "step": report.step,
        "dataloader": report.dataloader,
        "dataloaders": {str(rank): position for rank, position in report.dataloaders.items()},
        "restored": report.restored,
        "not_restored": report.not_restored,
    }


def disagree(directory):
    start(2, 1)
    try:
        fc.save_state_dict(collect_extra_state(step=4 + dist.get_rank()), directory)
    except fc.CheckpointError as error:
        return str(error)
    return None
