"""Schedules of learning rates, and scalers: their states, and why one cannot be restored.

Tested in tests/run_state/test_extra_state.py.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("paddle_flexckpt")

NOT_PASSED = "none was passed"
# Attributes that change with the steps and are missing in Paddle's state_dict() (3.0 to 3.3).
_LEFT_OUT = {"CosineAnnealingWarmRestarts": ("T_i", "T_cur")}
# Attributes that Paddle computes from arguments of other names.
_COMPUTED = {
    "CyclicLR": ("cycle_size", "step_up_pct", "max_lr", "amplitude", "scale_fn", "gamma"),
    "OneCycleLR": ("_step_config", "_steps_size", "_lr_config", "anneal_func"),
}


class ConstantRate:
    """The rate of an optimizer without a scheduler, which ``set_lr`` may have changed."""

    def __init__(self, optimizer: Any) -> None:
        """Take the optimizer, in whatever wrappers."""
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, float]:
        """Return the rate."""
        return {"rate": float(self.optimizer.get_lr())}

    def set_state_dict(self, state: Mapping[str, float]) -> None:
        """Set the rate; where it changes, rank 0 logs so."""
        import paddle.distributed as dist

        before = self.state_dict()["rate"]
        if before != state["rate"] and dist.get_rank() == 0:
            logger.info(f"the constant learning rate is {state['rate']:g}, as it was saved; it was {before:g}")
        self.optimizer.set_lr(state["rate"])


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state and those of all schedulers inside it."""
    return {
        "class": type(scheduler).__name__,
        "state": scheduler.state_dict(),
        "arguments": _arguments(scheduler),
        "left_out": {name: getattr(scheduler, name) for name in _listed(scheduler, _LEFT_OUT)},
        "inside": {name: scheduler_state(inner) for name, inner in _schedulers_inside(scheduler)},
    }


def _kinds(scheduler: Any) -> list[str]:
    return [base.__name__ for base in type(scheduler).__mro__]


def _listed(scheduler: Any, table: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [name for kind in _kinds(scheduler) for name in table.get(kind, ())]


def _arguments(scheduler: Any) -> dict[str, Any]:
    """Return the plain arguments that a scheduler was made with, and names of functions, by the attributes' names."""
    names = {each for base in type(scheduler).__mro__ for each in inspect.signature(base.__init__).parameters}  # type: ignore[misc]
    state = {name.lstrip("_") for name in scheduler.state_dict()}
    names -= {"last_epoch", "verbose"}
    computed, found = ["base_lr", *_listed(scheduler, _COMPUTED)], dict[str, Any]()
    for name, value in vars(scheduler).items():
        if name.lstrip("_") not in state and (name in computed or name.lstrip("_") in names):
            with contextlib.suppress(AttributeError, TypeError, ValueError):  # a scheduler, for example
                text = json.dumps(value, default=lambda each: each.__name__ if callable(each) else each.tolist())
                found[name] = json.loads(text)
    return found


def _schedulers_inside(scheduler: Any) -> list[tuple[str, Any]]:
    from paddle.optimizer.lr import LRScheduler

    return [(name, value) for name, value in sorted(vars(scheduler).items()) if isinstance(value, LRScheduler)]


def _differences(scheduler: Any, saved: dict[str, Any]) -> str:
    """Return which arguments are others than the saved ones; earlier releases saved none."""
    before, now, state = saved.get("arguments", {}), _arguments(scheduler), saved["state"]
    # As texts, since NaN differs from itself.
    names = [name for name in before if json.dumps(before[name]) != json.dumps(now.get(name, before[name]))]
    found = [f"{name} was {before[name]!r}, and is {now[name]!r} here" for name in names]
    if "LambdaDecay" in _kinds(scheduler) and not found:
        try:
            rate = scheduler.base_lr * scheduler.lr_lambda(state["last_epoch"])
        except Exception as error:  # of the caller's function
            found.append(f"lr_lambda gave a rate of {state['last_lr']:g}, and raises {error!r} here")
        else:
            if not math.isclose(rate, state["last_lr"], rel_tol=1e-9):
                found.append(f"lr_lambda gave a rate of {state['last_lr']:g}, and gives {rate:g} here")
    for name, inner in _schedulers_inside(scheduler):
        if differing := _differences(inner, saved["inside"][name]):
            found.append(f"in {name}, {differing}")
    return "; ".join(found)


def _keeps_state(scheduler: Any, step: int) -> bool:
    """Return whether a scheduler cannot be stepped to a step: it is beyond it, or has state that steps do not give."""
    own = scheduler.state_dict().keys() - {"last_epoch", "last_lr"}
    has_own = bool(own) and not type(scheduler).__module__.startswith("paddle.")
    return scheduler.last_epoch > step or has_own or _has_plateau(scheduler)


def _has_plateau(scheduler: Any) -> bool:
    inside = (each for _, each in _schedulers_inside(scheduler))
    return "ReduceOnPlateau" in _kinds(scheduler) or any(map(_has_plateau, inside))


def _step_to(scheduler: Any, step: int) -> None:
    """Step a scheduler to a step, without its messages."""
    with contextlib.redirect_stdout(None):
        for _ in range(step - scheduler.last_epoch):
            scheduler.step()
    if scheduler.last_epoch != step:
        raise ValueError(f"it is at step {scheduler.last_epoch}")


def refuse_scheduler(scheduler: Any, saved: dict[str, Any]) -> str | None:
    """Return why a scheduler cannot load a saved state; None if it can."""
    expected, got = _classes(saved), _classes(scheduler_state(scheduler))
    if expected != got:
        return f"the checkpoint has a {expected}, this run a {got}"
    step = saved["state"].get("last_epoch", 0)
    if (differing := _differences(scheduler, saved)) and not _keeps_state(scheduler, step):
        try:
            _step_to(copy.deepcopy(scheduler), step)
        except Exception as error:  # of Paddle's at a step beyond its end, or of a user's own
            return f"{differing}, and this run's schedule cannot be stepped to the saved step: {error!r}"
    return None


def restore_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:
    """Set a scheduler, and those inside it, to a saved state.

    If their arguments are others than the saved ones, step it to the saved step under its own instead, and log a
    warning on rank 0. One that cannot be stepped there gets the saved state; its next rate is of its own arguments.
    One that reduces its rate by past losses keeps the reductions.
    """
    import paddle.distributed as dist

    differing = _differences(scheduler, saved)
    if not differing or _keeps_state(scheduler, saved["state"]["last_epoch"]):
        _set(scheduler, saved)
        rate = saved.get("arguments", {}).get("base_lr")
        if differing and rate and rate != scheduler.base_lr and "ReduceOnPlateau" in _kinds(scheduler):
            scheduler.last_lr = max(scheduler.last_lr * scheduler.base_lr / rate, scheduler.min_lr)
    else:
        _step_to(scheduler, saved["state"]["last_epoch"])
    if differing and dist.get_rank() == 0:
        logger.warning(
            f"the schedule goes on with arguments that were others when it was saved: {differing}. The rate at step "
            f"{scheduler.last_epoch} is {scheduler.last_lr:g}; it was {saved['state']['last_lr']:g}"
        )


def _set(scheduler: Any, saved: dict[str, Any]) -> None:
    scheduler.set_state_dict(saved["state"])
    for name in _listed(scheduler, _LEFT_OUT):
        setattr(scheduler, name, saved["left_out"][name])
    for name, inner in _schedulers_inside(scheduler):
        _set(inner, saved["inside"][name])


def plain_scheduler_problem(scheduler: Any, saved: dict[str, Any]) -> str | None:
    """Return why a scheduler cannot load a state that is a plain ``state_dict()``; None if it can."""
    own = scheduler.state_dict()
    if own.keys() == saved.keys():
        return None
    return f"the checkpoint has a scheduler's {sorted(saved)}, this run's {type(scheduler).__name__} {sorted(own)}"


def _classes(state: dict[str, Any]) -> str:
    inside = ", ".join(f"{name}={_classes(inner)}" for name, inner in state["inside"].items())
    if state["class"] == ConstantRate.__name__:
        return "constant rate"
    return f"{state['class']}({inside})" if inside else state["class"]


def scaler_problem(scaler: Any, saved: dict[str, Any]) -> str | None:
    """Return why a GradScaler cannot load a state that is a ``state_dict()``; None if it can."""
    return "it is disabled in this run" if saved and not scaler.state_dict() else None


def left_out(saved: Mapping[str, Any], lr_scheduler: Any, scaler: Any, data: Any) -> dict[str, str]:
    """Return why saved states of a scheduler, a scaler and a position in the data would not be restored, by name."""
    found = {}
    for name, target, refuse in (
        ("lr_scheduler", lr_scheduler, refuse_scheduler),
        ("scaler", scaler, scaler_problem),
        ("data", data, lambda sampler, state: sampler.refuse(state)),
    ):
        if not saved.get(name):  # a scaler that is disabled has an empty state; earlier releases saved no "data"
            continue
        problem = NOT_PASSED if target is None else refuse(target, saved[name])
        if problem is not None:
            found[name] = problem
    return found
