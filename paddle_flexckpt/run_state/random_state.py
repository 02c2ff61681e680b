"""The state of a process's random number generators: Python's, numpy's, Paddle's, and fleet's model-parallel ones.

Tested in tests/run_state/test_extra_state.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def collect_random_state() -> dict[str, Any]:
    """Return the state of every generator, as values that :mod:`~paddle_flexckpt.catalog.portable` can encode."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.asarray(words, dtype=np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "paddle": {device: _dump(states) for device, states in _generators().items()},
        "tracker": {name: _dump(states) for name, states in sorted(_tracker().get_states_tracker().items())},
    }


def restore_random_state(state: Mapping[str, Any]) -> dict[str, str]:
    """Restore the generators; return the names of those that could not be restored, and why."""
    failed: dict[str, str] = {}

    def attempt(name: str, restore: Callable[..., object], *state: Any) -> None:
        try:
            restore(*state)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"

    python = state["python"]
    words = tuple(int(word) for word in python["words"])
    attempt("python", random.setstate, (python["version"], words, python["gauss"]))
    attempt("numpy", np.random.set_state, state["numpy"])
    for device, states in state["paddle"].items():
        attempt(f"paddle.{device}", _set_paddle, states, device)
    tracker = _tracker()
    for name, states in state["tracker"].items():
        if name in tracker.states_:
            attempt(f"tracker.{name}", _set_tracker, states, name)
        else:
            failed[f"tracker.{name}"] = "the model-parallel tracker of this run has no state of this name"
    for name in tracker.states_:
        if name not in state["tracker"]:
            failed[f"tracker.{name}"] = "the checkpoint has no state of this name"
    return failed


def _tracker() -> Any:
    from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

    return get_rng_state_tracker()


def _generators() -> dict[str, list[Any]]:
    """Return states of Paddle's default generators by device; an accelerator's process draws on the host as well."""
    import paddle
    from paddle.base import core

    states = {"cpu": [core.default_cpu_generator().get_state()]}
    device = paddle.get_device().partition(":")[0]
    if device != "cpu":
        states[device] = paddle.get_rng_state()
    return states


def _set_paddle(states: list[Any], device: str) -> None:
    import paddle
    from paddle.base import core

    # Named in Paddle's functions, "cpu" is an error before 3.3.
    if device == "cpu":
        core.default_cpu_generator().set_state(_restored(states)[0])
    elif device == paddle.get_device().partition(":")[0]:
        paddle.set_rng_state(_restored(states))
    else:
        raise ValueError(f"this run is on {paddle.get_device()}")


def _set_tracker(states: list[Any], name: str) -> None:
    _tracker().set_states_tracker({name: _restored(states)})


def _dump(states: list[Any]) -> list[Any]:
    """Return Paddle's generator states: device, seed, offset, and the engine's state, which is text."""
    dumped = []
    for state in states:
        device, seed, offset, engine = state.__getstate__()
        dumped.append([device, seed, offset, bytes(engine).decode("ascii")])
    return dumped


def _restored(dumped: list[Any]) -> list[Any]:
    from paddle.base import core

    states = []
    for device, seed, offset, engine in dumped:
        state = core.GeneratorState.__new__(core.GeneratorState)
        # As unpickling does; nothing is unpickled here.
        state.__setstate__((device, seed, offset, list(engine.encode("ascii"))))
        states.append(state)
    return states
