"""The memory tier over real process groups: nodes are lost with their memory, and the job goes on under other layouts.

The jobs: a tensor-parallel run whose ranks imitate nodes, until it dies; and its restart, on what is left of them.
"""

from __future__ import annotations

import os
import shutil

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.manager import SaveEvery
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.testing.world import World
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import Net

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
KINDS = ("col", "row")

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Job:
    """A model in training under some degree of tensor parallelism, and the manager of its rank's node."""

    def __init__(self, directory, degree, nodes):
        fc.install()
        hcg = common.init_tensor_parallel(degree)
        place, _ = common.place_in(hcg)
        self.net = Net(KINDS, True, degree, place=place, salt=str(degree))
        scheduler = paddle.optimizer.lr.StepDecay(0.01, 3)
        self.optimizer = paddle.optimizer.AdamW(scheduler, parameters=self.net.parameters())
        self.sampler = fc.ElasticBatchSampler(range(1000), batch_size=12 // dist.get_world_size(), shuffle=True, seed=5)
        self.run = {"model": self.net, "optimizer": self.optimizer, "data": self.sampler}
        self.root, node = f"{directory}/root", nodes[dist.get_rank()]
        memory = fc.MemoryTier(f"{directory}/node{node}", save_when=SaveEvery(2), copies=2)
        self.manager = fc.CheckpointManager(self.root, save_when=SaveEvery(8), memory=memory)

    def step(self, number):
        loss = (self.net(common.inputs_of(KINDS, number)) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.optimizer._learning_rate.step()
        self.sampler.advance()
        return float(loss)

    def digests(self):
        shards = self.net.sharded_state_dict()
        found = fc.digest({**shards, **fc.optimizer_sharded_state_dict(self.optimizer, dict(shards))})
        return [found, self.optimizer.get_lr(), self.sampler.state_dict()]


def train_and_die(directory, degree, nodes):
    """Trains to step 7, and dies there; the state after step 6, the last that is in memory, and the loss after it."""
    job = Job(directory, degree, nodes)
    try:
        with job.manager as manager:
            for step in range(1, 8):
                loss = job.step(step)
                if manager.should_save(step):
                    manager.save(step, **job.run)
                    state = job.digests()
            manager.wait()
            raise InterruptedError
    except InterruptedError:
        return [state, loss]


def restart(directory, degree, nodes):
    """What is restored, what of the root was read for it, and whether the run goes on from there."""
    job = Job(directory, degree, nodes)
    opened, right = [], LocalBackend.open
    LocalBackend.open = lambda self, name: opened.append(os.path.join(self.path, name)) or right(self, name)
    try:
        report = job.manager.restore(**job.run)
    finally:
        LocalBackend.open = right
    state = job.digests()
    loss = job.step(report.step + 1)
    if job.manager.should_save(8):
        job.manager.save(8, **job.run)
    steps = job.manager.all_steps()
    job.manager.close()
    from_root = sorted({path for path in opened if path.startswith(job.root)})
    return [report.step, report.tier, list(report.nodes), from_root, state, loss, steps]


# -- what is asserted --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def died(world4, tmp_path_factory):
    """The run of four ranks on four nodes."""
    path = tmp_path_factory.mktemp("died") / "now"
    (state, loss), *others = world4.run(train_and_die, directory=str(path), degree=4, nodes=[0, 1, 2, 3])
    assert all(other == [state, loss] for other in others)
    assert sorted(os.listdir(path / "root")) == ["run.json"]
    shutil.copytree(path, path.parent / "copy")
    return path, state, loss


def go_on(run, died, lost, degree, nodes):
    path, state, loss = died
    shutil.rmtree(path)
    shutil.copytree(path.parent / "copy", path)
    shutil.rmtree(path / f"node{lost}")
    for rank, found in enumerate(run(restart, directory=str(path), degree=degree, nodes=nodes)):
        step, tier, counted, from_root, restored, after, steps = found
        assert (step, tier, counted) == (6, "memory", [3, 4])
        assert from_root == [str(path / "root" / "run.json")] * (rank == 0), "0 bytes of the state"
        assert restored == state, "to the bit, with schedule and position"
        assert after == pytest.approx(loss, rel=1e-5)
        assert steps == [6, 8]
    assert sorted(each.name for each in path.glob("node*/*")) == [], "the root has the last step: the memory is freed"


@pytest.mark.parametrize("lost", range(4))
def test_on_as_many_ranks_with_an_empty_node(world4, died, lost):
    go_on(world4.run, died, lost, degree=2, nodes=[0, 1, 2, 3])


def test_on_the_ranks_that_are_left(died):
    world = World(3)
    try:
        go_on(world.run, died, 1, degree=1, nodes=[0, 2, 3])
    finally:
        world.close()


@pytest.mark.slow
def test_on_twice_as_many(died):
    """Some tests of simulated ranks do the same (tests/manager/test_memory_tier.py)."""
    world = World(8)
    try:
        go_on(world.run, died, 2, degree=4, nodes=[0, 0, 1, 1, 2, 2, 3, 3])
    finally:
        world.close()
