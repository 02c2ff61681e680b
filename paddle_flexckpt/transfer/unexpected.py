"""Unexpected keys: keys of a source that no rank asks for, which may be an error.

Tested in tests/transfer/test_unexpected.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import EXTRA_STATE, ValidationError
from paddle_flexckpt.optimizer_states import is_counter, is_torch_state, split_state
from paddle_flexckpt.transfer.names import is_state, split_raw
from paddle_flexckpt.transfer.options import TransferOptions


def check_unexpected(
    keys: Sequence[str], used: np.ndarray, mapping: TensorMapping | None, options: TransferOptions, context: str
) -> list[str]:
    """Return the keys of a source that no rank uses, sorted; ``used`` has bool for each key.

    Extra state, and keys that AOA statements remove, do not count.

    Raises:
        ValidationError: They are not allowed; the same on every rank.
    """
    removed = frozenset() if mapping is None else mapping.removed
    unused = [keys[i] for i in np.flatnonzero(~used).tolist()]
    unexpected = sorted(key for key in unused if not key.startswith(EXTRA_STATE) and key not in removed)
    loaded = {keys[i] for i in np.flatnonzero(used).tolist() if not keys[i].startswith(EXTRA_STATE)}
    states = _states_of_loaded(unexpected, keys, loaded)
    if states and options.optimizer_states == "raise":
        masters = states if all(key.endswith(".w_0") for key in states) else []
        # If some states are asked for, there is an optimizer, which does not train the other parameters.
        everything = {*keys}
        frozen = any(is_state(key, everything) for key in loaded)
        raise ValidationError(
            f"no rank asks for {len(states)} optimizer states that the source has of parameters that are loaded, "
            f"such as {', '.join(map(repr, states[:3]))}. Remedy: "
            + (
                "if their parameters were frozen since, load before that (stop_gradient=False), and freeze them then: "
                "the optimizer keeps their states; "
                if frozen and not masters
                else "give the optimizer's too: before its first step it has states only after "
                "paddle_flexckpt.install(), or by optimizer_sharded_state_dict(); "
            )
            + ("to take float32 parameters from their masters, give master_weights='convert'; " if masters else "")
            + ("to go on without these states" if frozen and not masters else "to load weights alone")
            + ", give optimizer_states='ignore'",
            context,
        )
    if options.unexpected_is_an_error:
        ignored = frozenset(states)
        problems = [
            f"no rank asks for key {key!r}, which the source has. Remedy: load it too, or allow it with "
            "strict='missing'"
            for key in unexpected
            if key not in ignored
        ]
        if problems:
            raise ValidationError(problems, context)
    return unexpected


def refuse_nothing(asked: int, unexpected: Sequence[str], context: str) -> None:
    """Raise ValidationError for a transfer that fills none of its targets.

    ``asked`` is the number of all ranks' targets, ``unexpected`` has the keys that no rank asks for.
    """
    if asked:
        there = f"{len(unexpected)} keys, such as {', '.join(map(repr, unexpected[:3]))}" if unexpected else "no key"
        raise ValidationError(
            f"nothing was filled: none of the {asked} targets has a name that the source knows, which has {there}. "
            "Remedy: correct the targets' names, or give the source's keys these names by AOA statements",
            context,
        )


def _states_of_loaded(unused: list[str], keys: Sequence[str], used: set[str]) -> list[str]:
    """Return the keys, of some, that are optimizer states of used ones.

    Raw names (of a plain ``optimizer.state_dict()``) and torch's do not contain the parameter: they count as states of
    loaded parameters, if any parameter is loaded.
    """
    # Steps and settings of torch's optimizers have no tensors in Paddle's.
    torch = {key for key in unused if is_torch_state(key) and not is_counter(key) and "param_groups." not in key}
    candidates = [key for key in unused if key[-1:].isdigit() or key in torch]
    if not candidates or not used:
        return []
    everything = set(keys)
    # If only an optimizer is loaded, no raw name counts as a state of a loaded parameter.
    parameters = any(not is_state(key, everything) for key in used)

    def is_one(key: str) -> bool:
        is_other = split_raw(key) is not None or key in torch
        return split_state(key, everything)[0] in used or (parameters and is_other)

    return [key for key in candidates if is_one(key)]
