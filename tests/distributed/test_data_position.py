"""A run's samples over real ranks: other numbers of ranks and other batches continue where the run stopped.

The jobs: data parallel training on a shuffled data set or a packed stream, from the beginning or where an earlier job
stopped.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import itertools

import numpy as np
import paddle
from paddle.distributed import fleet

import paddle_flexckpt as fc

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
LENGTH, EPOCHS, SPLITS = 53, 3, 12

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


class Packer:
    """Packs documents of a split into samples of 4 tokens, and keeps a half-filled buffer, an array."""

    def __init__(self, split):
        self.split, self.next, self.buffer = split, 0, np.zeros(0, dtype="int64")

    def __iter__(self):
        while True:
            while len(self.buffer) < 4:
                tokens = 1000 * self.split + 10 * self.next + np.arange(1 + (self.split + self.next * 5) % 6)
                self.buffer, self.next = np.concatenate([self.buffer, tokens]), self.next + 1
            sample, self.buffer = self.buffer[:4], self.buffer[4:]
            yield sample.tolist()

    def state_dict(self):
        return {"next": self.next, "buffer": self.buffer}

    def load_state_dict(self, state):
        self.next, self.buffer = state["next"], state["buffer"]


def train_on_stream(directory, data, tensor, batch, steps):
    """Train some steps, and save; return this rank's samples, its coordinates, and the splits whose state it saved."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": data, "mp_degree": tensor}
    fleet.init(is_collective=True, strategy=strategy)
    stream = fc.ElasticStream(Packer, SPLITS, name="corpus")
    layer = paddle.nn.Linear(1, 1)
    taken, step = [], 0
    with fc.CheckpointManager(directory, preemption_signals=()) as manager:
        if manager.latest_step() is not None:
            step = manager.restore(model=layer, data=stream).step
        for samples in itertools.islice(stream.batches(batch), steps):
            step += 1
            taken.append(samples)
        manager.save(step, model=layer, data=stream)
        with pytest.raises(fc.ValidationError, match="another number of splits: splits was 12"):
            manager.restore(model=layer, data=fc.ElasticStream(Packer, 2 * SPLITS, name="corpus"))
    hcg = fleet.get_hybrid_communicate_group()
    return taken, hcg.get_data_parallel_rank(), hcg.get_model_parallel_rank(), stream.position


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


def test_a_packed_stream_continues_with_the_next_sample_of_each_split(world, tmp_path):
    # The positions at which the number of ranks changes: 50, 98, 161, none of which is a multiple of the next one's.
    parts = [(2, 1, 5, 5), (4, 1, 3, 4), (3, 1, 7, 3), (1, 2, 2, 6)]  # data and tensor parallel, batch, steps
    samples = []
    for data, tensor, batch, steps in parts:
        outcomes = world(data * tensor).run(
            train_on_stream, directory=str(tmp_path), data=data, tensor=tensor, batch=batch, steps=steps
        )
        by_rank = {}
        for taken, rank, _, position in outcomes:
            assert by_rank.setdefault(rank, taken) == taken, "tensor parallel ranks have the same samples"
            assert position == len(samples) + data * batch * steps
        for step in range(steps):
            queues = [iter(by_rank[rank][step]) for rank in range(data)]
            # Sample k of the stream is with rank k mod data.
            samples += [next(queues[number % data]) for number in range(len(samples), len(samples) + data * batch)]
    alone = fc.ElasticStream(Packer, SPLITS, 1, 0)
    expected = next(alone.batches(len(samples)))
    assert samples == expected
    assert {sample[0] // 1000 for sample in samples} == set(range(SPLITS))
