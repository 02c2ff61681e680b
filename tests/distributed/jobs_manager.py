"""Jobs of test_manager: a tensor-parallel run with a manager, from the beginning or where an earlier one stopped."""

from __future__ import annotations

import os
import signal

import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.manager import KeepBest, KeepLatest, SaveEvery
from tests.distributed import jobs_common as common
from tests.distributed.jobs_common import Net
from tests.run_state.test_extra_state import scaler

KINDS = ("col", "row")


def train(directory, degree, steps, seed, preempted=None):
    """The loop of the manager's documentation. ``preempted``: the rank that gets SIGTERM, and in which step."""
    fc.install()
    hcg = common.init_tensor_parallel(degree)
    place, _ = common.place_in(hcg)
    paddle.seed(seed)
    net = Net(KINDS, True, degree, salt=str(seed), place=place)
    scheduler = paddle.optimizer.lr.StepDecay(0.01, 3)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=net.parameters())
    amp = scaler(float(seed))
    run = {"model": net, "optimizer": optimizer, "lr_scheduler": scheduler, "scaler": amp}
    handler = signal.getsignal(signal.SIGTERM)
    losses, saved, collectives, start, extra = {}, [], set(), 0, None
    keep = (KeepLatest(2), KeepBest(1))
    with fc.CheckpointManager(directory, save_when=SaveEvery(4), keep=keep) as manager:
        if manager.latest_step() is not None:
            report = manager.restore(**run)
            start = report.step
            extra = [report.extra.more, sorted(report.extra.not_restored)]
        for step in range(start + 1, steps + 1):
            # Noise of the generator that is restored, the same on every rank.
            inputs = common.inputs_of(KINDS, step)
            loss = (net(inputs + paddle.rand(inputs.shape)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            scheduler.step()
            losses[str(step)] = float(loss)
            if preempted == [dist.get_rank(), step]:
                os.kill(os.getpid(), signal.SIGTERM)
            before = manager._comm.collectives
            wanted = manager.should_save(step)
            collectives.add(manager._comm.collectives - before)
            if wanted:
                manager.save(step, **run, metrics={"loss": loss}, extra={"seed": seed})
                saved.append(step)
            if manager.should_stop:
                break
        return {
            "start": start,
            "extra": extra,
            "losses": losses,
            "saved": saved,
            "steps": manager.all_steps(),
            "best": manager.best_step(),
            "collectives": sorted(collectives),
            "preempted": manager.preempted,
            "scale": amp.state_dict()["scale"].item(),
            "caught": signal.getsignal(signal.SIGTERM) != handler,
        }


def handler_is_the_default():
    """Whether what an earlier job's manager installed is gone."""
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def fall_back(directory, degree):
    """Restores with a fall-back; every rank's report."""
    fc.install()
    hcg = common.init_tensor_parallel(degree)
    place, _ = common.place_in(hcg)
    net = Net(KINDS, True, degree, salt="other", place=place)
    with fc.CheckpointManager(directory) as manager:
        error = common.outcome(lambda: manager.restore(model=net, optimizer_states="ignore"))
        report = manager.restore(model=net, fallback=True, optimizer_states="ignore")
    return {"error": error, "step": report.step, "skipped": {str(step): why for step, why in report.skipped.items()}}
