"""A run's samples over real ranks: other numbers of ranks and other batches continue where the run stopped.

The jobs: data parallel training on a shuffled data set, from the beginning or where an earlier job stopped.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import numpy as np
import paddle
from paddle.distributed import fleet

import paddle_flexckpt as fc

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
LENGTH, EPOCHS = 53, 3

# -- what each rank runs -----------------------------------------------------------------------------------------------


def train(directory, data, tensor, batch, steps):
    """Train some steps, and save; return this rank's samples, and its coordinates in the data and tensor groups."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": data, "mp_degree": tensor}
    fleet.init(is_collective=True, strategy=strategy)
    samples = [(np.array([number], dtype="float32"),) for number in range(LENGTH)]
    sampler = fc.ElasticBatchSampler(samples, batch, shuffle=True, seed=3)
    loader = paddle.io.DataLoader(samples, batch_sampler=sampler, return_list=True)
    paddle.seed(1)
    layer = paddle.nn.Linear(1, 1)
    taken, step = [], 0
    with fc.CheckpointManager(directory, preemption_signals=()) as manager:
        if manager.latest_step() is not None:
            step = manager.restore(model=layer, data=sampler).step
        last = step + steps
        for _ in range(sampler.epoch, EPOCHS):
            for (numbers,) in sampler.batches(loader):
                step += 1
                taken.append(numbers.numpy().ravel().astype(int).tolist())
                if step == last:
                    manager.save(step, model=layer, data=sampler)
                    hcg = fleet.get_hybrid_communicate_group()
                    return taken, hcg.get_data_parallel_rank(), hcg.get_model_parallel_rank()
    raise AssertionError("the epochs have ended")


# -- what is asserted --------------------------------------------------------------------------------------------------


def test_other_ranks_and_batches_continue_with_the_next_sample(world, tmp_path):
    parts = [(2, 1, 4, 5), (2, 2, 3, 4), (1, 1, 7, 3), (3, 1, 2, 6)]  # data and tensor parallel, batch, steps
    samples = []
    for data, tensor, batch, steps in parts:
        outcomes = world(data * tensor).run(
            train, directory=str(tmp_path), data=data, tensor=tensor, batch=batch, steps=steps
        )
        by_rank = {}
        for taken, rank, _ in outcomes:
            assert by_rank.setdefault(rank, taken) == taken, "tensor parallel ranks have the same samples"
        for batches in zip(*(by_rank[rank] for rank in sorted(by_rank))):
            samples += [sample for each in batches for sample in each]
    alone = fc.ElasticBatchSampler(range(LENGTH), 1, 1, 0, shuffle=True, seed=3)
    expected = []
    while len(expected) < len(samples):
        expected += [batch[0] for batch in alone.batches(list(alone))]
    assert samples == expected[: len(samples)]
    assert len(samples) > 2 * LENGTH
