"""Names of states: which keys are states of which parameter. Tested in tests/aoa/test_language.py."""

from __future__ import annotations

import re
from collections.abc import Mapping

PARAMETER = ""
MASTER = "w_0"
# Names that Paddle's optimizers give to what they accumulate (paddle/optimizer/*.py, `_add_accumulator`).
STATES = frozenset(
    {
        MASTER,
        "moment_0",
        "moment1_0",
        "moment2_0",
        "moment2_max_0",
        "beta1_pow_acc_0",
        "beta2_pow_acc_0",
        "velocity_0",
        "inf_norm_0",
        "mean_square_0",
        "mean_grad_0",
        "momentum_0",
        "momentum_decay_pow_0",
        "mu_product_0",
        "rho_0",
        "prevs_0",
        "learning_rates_0",
        "_avg_squared_grad_0",
        "_avg_squared_update_0",
    }
)
_NUMBERED = re.compile(r".*_\d+")


def split_state(key: str, keys: Mapping[str, object] | set[str]) -> tuple[str, str]:
    """Split a key into (parameter, state); the state of a parameter itself is :data:`PARAMETER`.

    ``block.w_0`` may be the master weight of ``block`` or a parameter of that name. Without a ``block`` it is a
    parameter if it has a state of its own, or if ``block`` ends with a number, as in the names that Paddle gives to
    parameters (``linear_0.w_0``), and has no other state; else it is a state. Names that no optimizer of Paddle uses
    are states only of parameters that are there.
    """
    if not key[-1:].isdigit():
        return key, PARAMETER
    base, dot, state = key.rpartition(".")
    if not dot or not base or not _NUMBERED.fullmatch(state):
        return key, PARAMETER
    if base in keys:
        return base, state
    if state not in STATES or any(f"{key}.{other}" in keys for other in STATES):
        return key, PARAMETER
    generated = state == MASTER and _NUMBERED.fullmatch(base.rpartition(".")[2])
    if generated and not any(f"{base}.{other}" in keys for other in STATES if other != MASTER):
        return key, PARAMETER
    return base, state


def state_key(base: str, state: str) -> str:
    """Return the key of a state of a parameter."""
    return f"{base}.{state}" if state else base
