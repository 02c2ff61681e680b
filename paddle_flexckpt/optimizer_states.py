"""The states of optimizers, by the names that Paddle gives them; and the parameter and state of a key.

The names of Paddle's optimizers 3.0 to 3.3 are their ``_..._acc_str``; ModelAverage's are literals. A state of another
optimizer becomes known by its name in one of the tuples here. A checkpoint that was saved or converted again identifies
states by their names alone.
Tested in tests/aoa/test_language.py and tests/aoa/test_states.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# The end of the key of a float32 master weight.
MASTER = "w_0"
# One number for each parameter, whatever the parameter's shape. They have to be known by name, because a parameter of
# one element has accumulators of that shape too. (Numbers of other optimizers, such as NAdam's mu_product, are in
# tensors of the parameter's shape, and are split like it.)
SCALARS = ("beta1_pow_acc", "beta2_pow_acc")
# The first moments, of the optimizers with powers of beta.
FIRST_MOMENTS = ("moment1", "moment")
# ASGD's last gradients. By name, because a history of one has as many elements as the parameter.
HISTORY = "y"
# A parameter may have such a name too: it is a state's only after the name of a parameter.
COMMON = ("d", "m", "restore", "slow", "sum_1", "sum_2", "sum_3", HISTORY)
# Names of all accumulators.
ACCUMULATORS = (
    *SCALARS, *FIRST_MOMENTS, *COMMON,
    "_avg_squared_grad", "_avg_squared_update", "beta1_pow", "beta2_pow", "inf_norm", "learning_rates", "mean_grad",
    "mean_square", "moment2", "moment2_max", "momentum", "momentum_decay_pow", "mu_product", "num_accumulates",
    "num_updates", "old_num_accumulates", "prevs", "rho", "velocity",
)  # fmt: skip
# The accumulators of Adam and AdamW, in their order.
ADAM = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
# The ends of keys of states, by their names in torch's optimizers.
OF_TORCH = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}
# The state of a parameter itself.
PARAMETER = ""
STATES = frozenset({MASTER, *(f"{name}_0" for name in ACCUMULATORS if name not in COMMON)})
# torch's optimizers: {optimizer}.state.{parameter}.exp_avg, {optimizer}.param_groups...; a state dict of an optimizer
# alone begins with "state.", and then the name of a state tells.
_OF_OPTIMIZER = re.compile(r"(?:.*\.)?(?:optim\w*|opt\w*_state|opt)(?:\.\d+)?\.(?:state|param_groups)\..+", re.DOTALL)
_OF_TORCH = re.compile(
    r"(?:.*\.)?(?:param_groups\..+|state\..+\.(?:(?:max_)?exp_avg(?:_sq(?:_row|_col)?)?|exp_inf|momentum_buffer|"
    r"square_avg|grad_avg|acc_delta|mu_product|step|state[12]|absmax[12]|qmap[12]))",
    re.DOTALL,
)
# Counters and positions, which no cast may round.
_COUNTER = re.compile(
    r"(?:.*[._])?(?:step|steps|epoch|iteration|position_ids|num_batches_tracked|num_updates)", re.DOTALL
)
_NUMBERED = re.compile(r".*_\d+")
# In each name with a wrapper; see aoa/compile.py.
WRAPPED_HINT = "_layer"
_WRAPPED = re.compile(r"((?:model|optimizer)\.)?(?:_layers?\.)+")


def unwrapped(name: str) -> str:
    """Return a name without the wrappers that it begins with, also behind ``model.`` or ``optimizer.``."""
    found = _WRAPPED.match(name) if WRAPPED_HINT in name else None
    return name if found is None else f"{found[1] or ''}{name[found.end() :]}"


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


def is_torch_state(key: str) -> bool:
    """Return whether a key is that of a state, or a setting, of one of torch's optimizers."""
    if "state." not in key and "param_groups." not in key:
        return False
    return (_OF_OPTIMIZER.fullmatch(key) or _OF_TORCH.fullmatch(key)) is not None


def is_counter(key: str) -> bool:
    """Return whether a key is that of a counter, or of positions, whose numbers no cast may round."""
    return _COUNTER.fullmatch(key) is not None


def state_key(base: str, state: str) -> str:
    """Return the key of a state of a parameter."""
    return f"{base}.{state}" if state else base
