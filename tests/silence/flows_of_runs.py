"""Flows of a run that goes on: with other arguments of its schedule, or at another position in its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.data import ElasticBatchSampler
from tests.property.layouts import Pick
from tests.silence.flow import flow, judged, refused
from tests.silence.flows import Job
from tests.silence.judge import Finding

KINDS = ("cosine", "exponential", "polynomial", "noam", "piecewise", "natural", "inverse", "milestones", "steps",
         "lambda", "restarts", "one cycle", "cyclic", "linear")  # fmt: skip


def _schedule(pick: Pick, kind: str) -> Any:
    """A schedule of a kind, with random arguments."""
    lr = paddle.optimizer.lr
    rate, gamma, n = pick.choice((0.05, 0.1, 0.3)), pick.choice((0.3, 0.5, 0.9)), pick.integer(2, 12)
    makes = {
        "noam": lambda: lr.NoamDecay(8 * n, n, rate),
        "piecewise": lambda: lr.PiecewiseDecay([n, n + pick.integer(1, 5)], [rate, rate * gamma, rate / 9]),
        "natural": lambda: lr.NaturalExpDecay(rate, gamma),
        "inverse": lambda: lr.InverseTimeDecay(rate, gamma),
        "polynomial": lambda: lr.PolynomialDecay(rate, n, power=1 + gamma, cycle=bool(pick.integer(0, 1))),
        "exponential": lambda: lr.ExponentialDecay(rate, gamma),
        "milestones": lambda: lr.MultiStepDecay(rate, [n, n + 3], gamma),
        "steps": lambda: lr.StepDecay(rate, n, gamma),
        "lambda": lambda: lr.LambdaDecay(rate, lambda step: gamma**step),
        "cosine": lambda: lr.CosineAnnealingDecay(rate, n, rate * gamma / 9),
        "restarts": lambda: lr.CosineAnnealingWarmRestarts(rate, n, pick.integer(1, 3)),
        "one cycle": lambda: lr.OneCycleLR(rate, 3 * n, anneal_strategy=pick.choice(("cos", "linear"))),
        "cyclic": lambda: lr.CyclicLR(rate, rate + gamma, n, pick.integer(1, 5)),
        "linear": lambda: lr.LinearLR(rate, n, gamma / 3),
    }
    if kind == "warmup":
        return lr.LinearWarmup(_schedule(pick, KINDS[n % 3]), n, 0.0, rate)
    return makes[kind]()


def _rates(schedule: Any, steps: int) -> list[Any]:
    """The rates of the next steps; None from the one that the schedule refuses."""
    found = []
    for _ in range(steps):
        try:
            schedule.step()
        except ValueError:  # of OneCycleLR, beyond its end
            return [*found, None]
        found.append(schedule())
    return found


def _kinds(schedule: Any) -> list[type]:
    inner = getattr(schedule, "learning_rate", None)
    return [type(schedule), *(_kinds(inner) if hasattr(inner, "step") else [])]


@flow("a schedule has other arguments")
def _arguments(pick: Pick, root: Path) -> str:
    seeds, kind = (pick.integer(0, 1 << 30), pick.integer(0, 1 << 30)), pick.choice((*KINDS, "warmup"))
    kinds = kind, kind if pick.integer(0, 7) else pick.choice(KINDS)
    old, here = (_schedule(Pick.from_seed(seed), kind) for seed, kind in zip(seeds, kinds))
    like = _schedule(Pick.from_seed(seeds[1]), kinds[1])
    step = min(pick.integer(1, 15), getattr(old, "total_steps", 16) - 1)
    if None in _rates(old, step):
        return "error"  # of Paddle's, in training
    saved, loaded = Job(["net"], [0], True, old), Job(["net"], [0], True, here)
    with fc.CheckpointManager(root / "run", preemption_signals=()) as manager:
        manager.save(1, model=saved.net, optimizer=saved.optimizer, lr_scheduler=old)
        error = refused(lambda: manager.restore(model=loaded.net, optimizer=loaded.optimizer, lr_scheduler=here))
    may_fail = _kinds(old) != _kinds(here) or None in _rates(like, step)
    found = [here.last_epoch, loaded.optimizer.get_lr(), *_rates(here, 8)]
    wanted = [step, like(), *_rates(like, 8)]
    return judged(error, found, wanted, f"{kinds} at step {step}: {found} {wanted}", may_fail=may_fail)


@flow("a loader's iterator or an epoch is older than a restore")
def _positions(pick: Pick, _root: Path) -> str:
    length, seed, shuffle, drop = pick.integer(8, 40), pick.integer(0, 9), bool(pick.integer(0, 1)), pick.integer(0, 1)

    def samplers(ranks: int, batch: int) -> list[ElasticBatchSampler]:
        options = {"shuffle": shuffle, "drop_last": bool(drop), "seed": seed}
        return [ElasticBatchSampler(range(length), batch, ranks, rank, **options) for rank in range(ranks)]

    def order(epoch: int) -> list[int]:
        return (np.random.RandomState([seed, epoch]).permutation(length) if shuffle else np.arange(length)).tolist()

    (before, *_), group = samplers(pick.integer(1, 3), pick.integer(1, 2)), samplers(pick.integer(1, 4), 2)
    before.advance(pick.integer(0, 30))
    state, size = before.state_dict(), group[0].global_batch_size
    how = pick.choice(("advance", "loop", "epoch", "none"))
    refusals, ahead = 0, pick.integer(0, 2)
    loops = [sampler.batches(list(sampler)) for sampler in group] if how == "loop" else []
    old = [iter(sampler) for sampler in group] if how == "advance" else []
    for _ in range(ahead):
        for sampler, iterator in zip(group, loops or old):
            next(iterator, None)
            if how == "advance" and pick.integer(0, 1) and ahead == 1:
                sampler.advance()
    drawn = [sampler.position for sampler in group]
    for sampler, place in zip(group, drawn):
        sampler.load_state_dict(state)
        at = sampler.position
        if how == "epoch" and at >= length:
            error = refused(lambda sampler=sampler, at=at: sampler.set_epoch(pick.integer(0, at // length - 1)))
            if error is None or sampler.position != at:
                raise Finding(f"an epoch before {at // length} begins: {error}")
            refusals += 1
        if how in ("advance", "loop") and place != at:
            took: list[list[int]] = []
            loop = loops[sampler.rank] if loops else None
            error = refused(sampler.advance if loop is None else lambda loop=loop, took=took: took.extend(loop))
            # A loop that has not begun begins here; one that has ended gives nothing.
            if ahead + (loop is None) and (sampler.position != at or took or (error is None and loop is None)):
                raise Finding(f"an iterator of position {place} counts at {at}: {error}")
            refusals += error is not None
    position, wanted, steps = group[0].position, [], 2 * length // size + 1
    for _ in range(steps):
        if drop and length - position % length < size:
            position += length - position % length
        wanted += [order((position + i) // length)[(position + i) % length] for i in range(size)]
        position += size
    found: list[int] = []
    while len(found) < len(wanted):
        for sampler in group:
            sampler.set_epoch(sampler.epoch)
        for batches in zip(*(sampler.batches(list(sampler)) for sampler in group)):
            found += [sample for batch in batches for sample in batch]
    judged(None, found[: len(wanted)], wanted, f"{how}, from sample {state['position']} of {length}")
    return "error" if refusals else "equal"
