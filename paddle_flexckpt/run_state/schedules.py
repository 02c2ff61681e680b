"""Schedules of learning rates, and scalers: their states, and why one cannot be restored.

Tested in tests/run_state/test_extra_state.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("paddle_flexckpt")

NOT_PASSED = "none was passed"
# Attributes that change with the steps and are missing in Paddle's state_dict() (3.0 to 3.3).
_LEFT_OUT = {"CosineAnnealingWarmRestarts": ("T_i", "T_cur")}


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
        "left_out": {name: getattr(scheduler, name) for name in _left_out(scheduler)},
        "inside": {name: scheduler_state(inner) for name, inner in _schedulers_inside(scheduler)},
    }


def _left_out(scheduler: Any) -> list[str]:
    return [name for base in type(scheduler).__mro__ for name in _LEFT_OUT.get(base.__name__, ())]


def _schedulers_inside(scheduler: Any) -> list[tuple[str, Any]]:
    from paddle.optimizer.lr import LRScheduler

    return [(name, value) for name, value in sorted(vars(scheduler).items()) if isinstance(value, LRScheduler)]


def refuse_scheduler(scheduler: Any, saved: dict[str, Any]) -> str | None:
    """Return why a scheduler cannot load a saved state; None if it can."""
    expected, got = _classes(saved), _classes(scheduler_state(scheduler))
    return None if expected == got else f"the checkpoint has a {expected}, this run a {got}"


def restore_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:
    """Set a scheduler, and those inside it, to a saved state."""

    def restore(target: Any, state: dict[str, Any]) -> None:
        target.set_state_dict(state["state"])
        for name in _left_out(target):
            setattr(target, name, state["left_out"][name])
        for name, inner in _schedulers_inside(target):
            restore(inner, state["inside"][name])

    restore(scheduler, saved)


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
    """Return why the saved states of a scheduler, a scaler and a position in the data would not be restored, by name.

    Args:
        saved: The states, under the names of the arguments below.
        lr_scheduler: The scheduler that is to get its state; None: none was passed.
        scaler: The scaler, likewise.
        data: The sampler or stream, likewise.
    """
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
