"""Parameters that Paddle leaves stale after ``step()``: whatever looks at them finishes the step first.

Each kind of overlap is trained, and in each way in which values leave the job they are those of the same job without
overlap, bit for bit. Where communication of the CPU world would be over when ``step()`` returns, it is put off until
somebody waits for it, as on a device.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle.base import core

import paddle_flexckpt as fc
from paddle_flexckpt.memory import tensor_memory
from paddle_flexckpt.testing import cpu_world
from tests.distributed import test_pipeline as pipelines
from tests.distributed import test_sharding as sharding
from tests.remedies.following import advised

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Late:
    """A communication that is done when it is waited for, and not before."""

    def __init__(self, work):
        self._work = work

    def wait(self, *_):
        work, self._work = self._work, None
        if work is not None:
            work()
        return True


@contextlib.contextmanager
def late_communication():
    """Put off gathering and broadcasting that is not waited for."""
    group_class, broadcast = cpu_world.MeshProcessGroup, dist.broadcast
    all_gather = group_class.all_gather

    def late_broadcast(tensor, src, group=None, sync_op=True):
        if sync_op:
            return broadcast(tensor, src, group, sync_op)
        return Late(lambda: broadcast(tensor, src, group, True))

    def late_all_gather(self, out, tensor, sync_op=None):
        if sync_op is None and not isinstance(out, list):  # of the buffers of sharding V2
            return Late(lambda: all_gather(self, out, tensor))
        return all_gather(self, out, tensor, sync_op)

    dist.broadcast, group_class.all_gather = late_broadcast, late_all_gather
    try:
        yield
    finally:
        dist.broadcast, group_class.all_gather = broadcast, all_gather


def switch_on(job):
    """Switch the overlap of a job on, as the trainers do."""
    if job.kind.startswith("v2"):
        job.optimizer._set_all_gather_overlap_forward(True, job.model)
        job.optimizer._inner_opt.param2bucket["frozen_0.w_0"] = []  # Paddle's hook looks for the bucket of a frozen one
    else:
        job.optimizer._set_broadcast_overlap(True, job.model)


def unfinished(job):
    """How much Paddle itself counts as under way: buckets, or layers whose forward would wait."""
    optimizer = getattr(job.optimizer, "_inner_opt", job.optimizer)
    buckets = getattr(optimizer, "_comm_buffer_list", ())
    return sum(b.status.name != "READY" for b in buckets) + len(optimizer._forward_pre_hook_remove_helper)


def numbers(kind, **named):
    """Train without overlap; returns the digests after three steps, and the losses of two more."""
    job = sharding.Job(kind, unused=False, **named)
    job.train(sharding.BEFORE)
    return fc.digest(job.state()), job.train(sharding.AFTER)


def leave(kind, directory, ways, **named):
    """Train three steps with an overlap and hand the values out, in each way from a fresh job.

    Returns:
        By way: how much was under way before and after, the digests, and the losses of two more steps.
    """
    found = {}
    with late_communication():
        for way in ways:
            job = sharding.Job(kind, unused=False, **named)
            switch_on(job)
            job.train((7, 8) if way == "load" else sharding.BEFORE[:-1])
            hand_out = WAYS[way](job, job.state(), os.path.join(directory, way))
            job.train((9,) if way == "load" else sharding.BEFORE[-1:])
            begun = unfinished(job)
            digests = hand_out()
            found[way] = {"begun": begun, "left": unfinished(job), "digests": digests}
            found[way]["losses"] = job.train(sharding.AFTER)
    return found


def _saved(job, held, path):
    return lambda: fc.save_state_dict(job.state(), path) and fc.digest(path)


def _held(job, held, path):
    """Described before the last step."""
    return lambda: fc.save_state_dict(held, path) and fc.digest(path)


def _in_the_background(job, held, path):
    return lambda: fc.save_state_dict(held, path, async_save=True).result() and fc.digest(path)


def _in_slices(job, held, path):
    def hand_out():
        pending = fc.save_state_dict(held, path, async_save=True, slice_bytes=1 << 12)
        pending.stage_next()
        pending.finish_staging()
        return pending.result() and fc.digest(path)

    return hand_out


def _managed(job, held, path):
    manager = fc.CheckpointManager(path, async_save=False, preemption_signals=())
    return lambda: manager.save(3, model=job.model, optimizer=job.optimizer) and fc.digest(fc.latest(path).path)


def _resharded(job, held, path):
    targets = _whole(held)
    return lambda: fc.reshard_sharded_state_dict(held, targets) and fc.digest(targets)


def _resharded_by_a_plan(job, held, path):
    targets = _whole(held)
    plan = fc.plan_reshard(held, targets)
    plan.run()
    return lambda: plan.run() and fc.digest(targets)


def _digested(job, held, path):
    return lambda: fc.digest(held)


def _gathered(job, held, path):
    return lambda: fc.digest(dict(fc.full_param(held)))


def _published(job, held, path):
    return lambda: fc.publish(held, path) and fc.digest(path)


def _plain(job, held, path):
    """Weights alone, as Paddle names them."""
    return lambda: fc.save_state_dict(job.net.state_dict(), path) and fc.digest(path)


def _looked_at(job, held, path):
    """Describing is enough for whoever reads the tensors."""

    def hand_out():
        shards = job.model.sharded_state_dict()
        return fc.digest({key: paddle.to_tensor(weight.local_tensor.numpy()) for key, weight in shards.items()})

    return hand_out


def _loaded(job, held, path):
    """What was under way does not come over what is loaded."""
    return lambda: fc.load_state_dict(held, os.path.join(os.path.dirname(path), "saved")) and fc.digest(held)


def _whole(held):
    everybody = []
    dist.all_gather_object(everybody, {key: list(weight.global_shape) for key, weight in held.items()})
    return {key: paddle.zeros(shape) for each in everybody for key, shape in each.items()}


WAYS = {
    "saved": _saved,
    "held": _held,
    "in the background": _in_the_background,
    "in slices": _in_slices,
    "managed": _managed,
    "resharded": _resharded,
    "resharded by a plan": _resharded_by_a_plan,
    "digested": _digested,
    "gathered": _gathered,
    "published": _published,
    "plain": _plain,
    "looked at": _looked_at,
    "loaded": _loaded,
}

# -- what is asserted -------------------------------------------------------------------------------------------------


# Where communication is under way already, all ways wait for it alike.
FEW = ("held", "in the background", "resharded by a plan", "plain", "looked at")


@pytest.mark.parametrize(
    ("kind", "ways"),
    [("v2colors", tuple(WAYS)), ("v1", FEW), ("stage2", FEW)]
    + [pytest.param(kind, tuple(WAYS), marks=pytest.mark.slow) for kind in ("v1", "stage2")],
)
def test_values_of_the_last_step_in_every_way(world2, tmp_path, kind, ways):
    digests, losses = world2.run(numbers, kind=kind)[0]
    for found in world2.run(leave, kind=kind, directory=str(tmp_path), ways=list(ways)):
        for way, result in found.items():
            assert result["begun"] > 0, way
            assert result["left"] == 0, way
            different = [key for key, value in result["digests"].items() if digests[key] != value]
            assert not different, way
            assert result["losses"] == losses, way


def alone(directory):
    """One rank saves a job that has been left under way: refused, until all ranks have finished the step."""
    job = sharding.Job("v2colors", unused=False)
    switch_on(job)
    job.train(sharding.BEFORE)
    stale, digests = job.net.state_dict(), []
    text = ""
    if dist.get_rank() == 0:
        try:
            fc.save_state_dict(stale, directory, process_group="self")
        except fc.ValidationError as error:
            text = str(error)
    job.model.sharded_state_dict()
    if dist.get_rank() == 0:
        fc.save_state_dict(stale, directory, process_group="self")
        digests = fc.digest(directory)
    return text, digests


def installed_late(directory):
    """The library comes when the step is under way already."""
    fc.uninstall()
    try:
        job = sharding.Job("v2colors", install=False, unused=False)
        switch_on(job)
        job.train(sharding.BEFORE)
        fc.install()
        return unfinished(job), fc.digest(job.state())
    finally:
        fc.install()


def emptied():
    """Parameters that Paddle has freed until the next step."""
    job = sharding.Job("v2colors", unused=False)
    job.train(sharding.BEFORE[:1])
    model = job.model.sharded_state_dict()
    job.optimizer._inner_opt.clear_param_storage(1)
    text = ""
    try:
        job.optimizer.sharded_state_dict(model)
    except ValueError as error:
        text = str(error)
    job.optimizer.step()
    return text, len(job.optimizer.sharded_state_dict(model))


def test_a_rank_alone_cannot_gather(world2, tmp_path):
    digests = world2.run(numbers, kind="v2colors")[0][0]
    text, found = world2.run(alone, directory=str(tmp_path))[0]
    assert "key 'cube.weight'" in text and "a call of ranks [0, 1] together" in text
    advised("memory/tensor_memory.py", "call the model's sharded_state_dict() on all of these ranks first", text)
    assert found == {key: digests[key] for key in found} and found


def test_the_library_comes_late(world2, tmp_path):
    digests = world2.run(numbers, kind="v2colors")[0][0]
    for begun, found in world2.run(installed_late, directory=str(tmp_path)):
        assert begun > 0 and found == digests


def test_a_stale_parameter_without_memory_stands_for_no_other_tensor(monkeypatch):
    empty = paddle.create_parameter([2], "float32")
    empty._clear_data()
    monkeypatch.setattr(tensor_memory, "stale_parameters", lambda: [(empty, (0, 1))])
    tensor_memory.refuse_stale(["array", "none"], [np.ones(3), paddle.empty([0])], 0)


def test_parameters_without_memory_are_refused(world2):
    for text, states in world2.run(emptied):
        assert states > 0
        assert "'cube_0.w_0'" in text
        advised("parallel/sharding.py", "ask for the state after step()", text)


def pipeline(overlaps, directory):
    """Sharding V2 of a pipeline that makes the buffers: digests of a save, and the losses after it."""
    job = pipelines.Job("pp2", overlap=True)
    job.train(sharding.BEFORE[:1])
    held = job.state()
    with late_communication():
        if overlaps:
            job.optimizer._set_all_gather_overlap_forward(True, job.wrapper)
        job.train(sharding.BEFORE[1:])
        begun = unfinished(job)
        fc.save_state_dict(held, directory)
        return begun, fc.digest(directory), job.train(sharding.AFTER)


def semi_auto(overlaps, directory):
    """Semi-automatic sharding whose parameters lie in several buffers: the same."""
    from tests.semi_auto import training

    fc.install()
    cpu_world.reset_fleet()
    job = training.build("dp2-fusion")
    if overlaps:
        job.optimizer._enable_sharding_overlap(job.model)
    assign = core.eager_assign_group_by_size
    core.eager_assign_group_by_size = lambda tensors, *_: [[0, 1], [*range(2, len(tensors))]]  # so small are no buffers
    try:
        job.step(0)
    finally:
        core.eager_assign_group_by_size = assign
    held = job.model.sharded_state_dict()
    held.update(job.optimizer.sharded_state_dict(held))
    for step in sharding.BEFORE[1:]:
        job.step(step)
    begun = overlaps and sum(not storage.is_sync for storage in job.optimizer.param_storage)
    fc.save_state_dict(held, directory)
    return begun, fc.digest(directory), [job.step(step) for step in sharding.AFTER]


@pytest.mark.parametrize("job", [pipeline, semi_auto])
def test_buffers_of_pipelines_and_of_semi_automatic_sharding(world, tmp_path, job):
    ranks = world(4 if job is pipeline else 2)
    expected = ranks.run(job, overlaps=False, directory=str(tmp_path / "plain"))
    found = ranks.run(job, overlaps=True, directory=str(tmp_path / "overlap"))
    assert not any(begun for begun, _, _ in expected) and all(begun for begun, _, _ in found)
    assert [rest for _, *rest in found] == [rest for _, *rest in expected]
