"""Refuse parameters that the last training step has left stale, where the ranks of a call cannot finish it.

Tested in tests/distributed/test_overlaps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.overlaps import stale_parameters


def refuse_stale(keys: Sequence[str], tensors: Sequence[Any], rank: int) -> None:
    """Raise if one of these tensors is a parameter that other ranks' steps have changed, without their values.

    Raises:
        ValidationError: There are such parameters; the text has their keys, and the ranks that have to gather them.
    """
    stale = {_address(parameter): ranks for parameter, ranks in stale_parameters()}
    stale.pop(None, None)  # some have no memory
    if not stale:
        return
    found = [(key, ranks) for key, ranks in zip(keys, (stale.get(_address(tensor)) for tensor in tensors)) if ranks]
    problems = [
        Problem(
            "with its overlap Paddle leaves the parameter stale after step(), until the next forward",
            key=key,
            rank=rank,
            expected=f"a call of ranks {[int(each) for each in ranks]} together, who have parts of the new values",
            remedy="call the model's sharded_state_dict() on all of these ranks first",
        )
        for key, ranks in found
    ]
    if problems:
        raise ValidationError(problems)


def _address(tensor: Any) -> int | None:
    local = tensor._local_value() if hasattr(tensor, "is_dist") and tensor.is_dist() else tensor
    return int(local.data_ptr()) if hasattr(local, "_is_initialized") and local._is_initialized() else None
