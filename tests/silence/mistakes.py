"""Callers' mistakes, each with what may come of it.

A mistake changes a :class:`~tests.silence.judge.Case` and returns "equal" (the mistake is none in the end: every target
has to be bit-equal to what the oracle says), "error" (it has to be noticed), "either", or None where the case has
nothing to make it with. What a mistake makes of the *source* needs no verdict: where the shards that ranks really pass
are no whole tensors, or replicas differ, the oracle sees that, and then the save or reshard has to fail.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Optional

from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.silence.judge import Case
from tests.silence.models import (
    State,
)

Mistake = Callable[[Case], Optional[str]]
MISTAKES: dict[str, Mistake] = {}


def mistake(name: str) -> Callable[[Mistake], Mistake]:
    def register(function: Mistake) -> Mistake:
        MISTAKES[name] = function
        return function

    return register


def some_key(case: Case, state: State) -> str | None:
    keys = sorted(state)
    return case.pick.choice(keys) if keys else None


def some_rank(case: Case, states: list[State]) -> int:
    return case.pick.integer(0, len(states) - 1)


def another(case: Case, states: list[State]) -> tuple[int, int] | None:
    """Two different ranks."""
    if len(states) < 2:
        return None
    first = some_rank(case, states)
    return first, (first + case.pick.integer(1, len(states) - 1)) % len(states)


def copied(weight: ShardedWeight, **changes: Any) -> ShardedWeight:
    """A shard with other attributes."""
    values = {name: getattr(weight, name) for name in
              ("key", "local_tensor", "local_shape", "global_shape", "global_offset", "is_flattened", "flattened_range",
               "aliases", "fused")}  # fmt: skip
    return ShardedWeight(**{**values, **changes})


def collect() -> None:
    """Fill :data:`MISTAKES`."""
    for module in ("at_save", "in_calls", "in_targets", "in_statements"):
        importlib.import_module(f"tests.silence.mistakes_{module}")
