"""The states of LR schedulers, with the schedulers inside them, and of GradScalers.

Tested in tests/run_state/test_extra_state.py.
"""

from __future__ import annotations

from typing import Any

# What moves with the steps but is not in Paddle's state_dict() (3.0 to 3.3): the place in the current cycle.
_LEFT_OUT = {"CosineAnnealingWarmRestarts": ("T_i", "T_cur")}


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state and that of the schedulers inside it, whatever wraps whatever."""
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


def restore_scheduler(scheduler: Any, saved: dict[str, Any]) -> str | None:
    """Set a scheduler, and those inside it, to a state of :func:`scheduler_state`; or return why it cannot."""
    expected, got = _classes(saved), _classes(scheduler_state(scheduler))
    if expected != got:
        return f"the checkpoint has a {expected}, this run a {got}"

    def restore(target: Any, state: dict[str, Any]) -> None:
        target.set_state_dict(state["state"])
        for name in _left_out(target):
            setattr(target, name, state["left_out"][name])
        for name, inner in _schedulers_inside(target):
            restore(inner, state["inside"][name])

    restore(scheduler, saved)
    return None


def restore_plain_scheduler(scheduler: Any, saved: dict[str, Any]) -> str | None:
    """Set a scheduler to a state of its own ``state_dict()``, as others save it; or return why it cannot."""
    own = scheduler.state_dict()
    if own.keys() != saved.keys():
        return f"the checkpoint has a scheduler's {sorted(saved)}, this run's {type(scheduler).__name__} {sorted(own)}"
    scheduler.set_state_dict(saved)
    return None


def _classes(state: dict[str, Any]) -> str:
    inside = ", ".join(f"{name}={_classes(inner)}" for name, inner in state["inside"].items())
    return f"{state['class']}({inside})" if inside else state["class"]


def restore_scaler(scaler: Any, saved: dict[str, Any]) -> str | None:
    """Set a GradScaler to a state of its ``state_dict()``; or return why it cannot."""
    if not saved:
        return "it was disabled when it was saved"
    if not scaler.state_dict():
        return "it is disabled in this run"
    scaler.load_state_dict(saved)
    return None
