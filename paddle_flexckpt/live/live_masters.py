"""Masters of live optimizers: float32 copies that would undo, at the next step, a load of parameters without them.

Tested in tests/live/test_masters_and_fused.py.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.engine.names import raw_parameter
from paddle_flexckpt.live.state import LocalState
from paddle_flexckpt.live.state_names import tensor_name
from paddle_flexckpt.live.tensor_memory import address_range

logger = logging.getLogger(__name__)

_HALF = frozenset({"float16", "bfloat16"})


def renew_masters(state: LocalState, untouched: Collection[str], rank: int) -> int:
    """Set masters that a load left out to the loaded parameters, as the first step of a fresh job would.

    Optimizers are found among the objects of the process, as they are no argument of a load. Warns of masters that are
    not laid out as their parameters. Returns the number of masters that were renewed. ``untouched`` are the keys of the
    state that were not loaded.
    """
    half = np.asarray([name in _HALF for name in state.catalog.dtypes], dtype=bool)
    if not half.any():
        return 0
    rows = [row for row, key in enumerate(state.catalog.keys) if key not in untouched]
    tensors = [state.tensor(row) for row in rows]
    loaded: dict[str, list[Any]] = {}
    for row, tensor, is_half in zip(rows, tensors, half[state.catalog.dtype[rows]].tolist()):
        name = tensor_name(state.weights[row] or tensor) if is_half else None
        if name is not None and hasattr(tensor, "_copy_to"):
            dist = getattr(state.weights[row], "dist_tensor", None)
            loaded.setdefault(raw_parameter(name), []).append(tensor if dist is None else dist)
    if not loaded:
        return 0
    filled = sorted(span[0] for span in map(address_range, tensors) if span is not None)
    renewed, stale = _renew_all(loaded, filled)
    if stale:
        gc.collect()  # an optimizer that is not used any more may still exist
        stale = _renew_all(loaded, filled)[1]
    if stale:
        logger.warning(
            f"rank {rank}: parameters were loaded without their float32 masters, of which an optimizer has "
            f"{len(stale)} that are laid out otherwise, such as {stale[0]!r}: unless they are loaded too, its next "
            "step overwrites the parameters. Remedy: load weights before the first step, or give the optimizer's "
            "states too, with master_weights='convert' where the checkpoint has no masters"
        )
    return renewed


def _renew_all(loaded: Mapping[str, Sequence[Any]], filled: Sequence[int]) -> tuple[int, list[str]]:
    """Renew the masters of all live optimizers; return their number, and the names of those laid out otherwise."""
    renewed, stale = 0, []
    for optimizer in _optimizers():
        own = {raw_parameter(parameter.name): parameter for parameter in _parameters(optimizer)}
        for name, master in optimizer._master_weights.items():
            named, stepped = loaded.get(raw_parameter(name), ()), own.get(raw_parameter(name))
            if not named or _is_filled(_local(master), filled):
                continue
            # Parameters of several networks may have one name.
            parameter = next((each for each in named if each is stepped), None)
            if parameter is not None and _alike(parameter, master):
                renewed += _renew(_local(master), _local(parameter))
            elif parameter is not None or stepped is None or not all(_is_elsewhere(stepped, each) for each in named):
                stale.append(name)
    return renewed, stale


def betas_by_address() -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the betas of all live optimizers, by the address of each power of one, and its number, 1 or 2."""
    for optimizer in _optimizers("_accumulators"):
        for number in (1, 2):
            beta: Any = getattr(optimizer, f"_beta{number}", None)
            powers = optimizer._accumulators.get(f"beta{number}_pow_acc", {}) if beta is not None else {}
            spans = (address_range(_local(power)) for power in powers.values())
            yield from (((span[0], number), float(beta)) for span in spans if span is not None)


def _optimizers(having: str = "_master_weights") -> Iterator[Any]:
    """Yield every live optimizer of Paddle that has masters, or other tensors."""
    from paddle.optimizer import Optimizer

    gc.unfreeze()  # objects set aside by gc.freeze() are not among the tracked ones
    for each in gc.get_objects():
        # Of the type itself: isinstance() asks proxies, which may do anything.
        if issubclass(type(each), Optimizer) and getattr(each, having, None):
            yield each


def _parameters(optimizer: Any) -> Iterator[Any]:
    for entry in optimizer._parameter_list or ():
        yield from entry["params"] if isinstance(entry, dict) else (entry,)


def _local(tensor: Any) -> Any:
    return tensor._local_value() if tensor.is_dist() else tensor


def _is_filled(master: Any, begins: Sequence[int]) -> bool:
    """Return whether a load wrote into a master, or into ranges of it; ``begins``: sorted addresses."""
    span = address_range(master)
    return span is None or bisect_left(begins, span[0]) < bisect_left(begins, span[1])


def _renew(master: Any, parameter: Any) -> bool:
    """Copy a parameter into its master, unless the master rounds to it: then it was loaded too, and is more exact."""
    value = parameter.astype("float32")
    stale = bool((master.astype(parameter.dtype).astype("float32") != value).any())
    if stale:
        master.copy_(value, True)
    return stale


def _is_elsewhere(stepped: Any, parameter: Any) -> bool:
    """Return whether an optimizer's parameter is another model's, of the same name, or padding behind a parameter.

    Where a buffer is sliced, a slice lies in the parameter, or else behind it in the same buffer.
    """
    if list(stepped.shape) == list(parameter.shape):
        return True
    if stepped.is_dist() or parameter.is_dist() or not stepped._is_initialized() or not parameter._is_initialized():
        return False
    part, whole = address_range(stepped), address_range(parameter)
    if part is None or whole is None or not stepped._is_shared_buffer_with(parameter):
        return False
    return part[1] <= whole[0] or whole[1] <= part[0]


def _alike(parameter: Any, master: Any) -> bool:
    """Return whether two tensors have the same shape, and the same part of it on this rank."""
    if list(parameter.shape) != list(master.shape) or parameter.is_dist() != master.is_dist():
        return False
    return not parameter.is_dist() or list(parameter.placements) == list(master.placements)
