"""Gradient scalers of semi-automatic parallelism, for releases of Paddle that look into gradients without memory.

Tested in tests/compat/test_semi_auto.py.
"""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.parallel.optimizers import OverInstance

# Where shard_scaler makes the method that it sets on a scaler.
_HOME = "paddle.distributed.auto_parallel.api"


class ScalerMixin:
    """Mend gradient scalers of Paddle before 3.1.1.

    ``dist.shard_scaler`` sets a method on the scaler that unscales every gradient that is defined. One that has no
    memory (``clear_grad(set_to_zero=False)`` leaves such, and so do the parameters of other pipeline stages in a
    resumed job) gets arbitrary memory, which is taken for a gradient from then on, or the process crashes.
    """

    @OverInstance
    def _unscale(self: Any, optimizer: Any) -> None:
        """Unscale as Paddle does, but only parameters whose gradients have memory."""
        own = vars(self).get("_unscale")
        if own is None:
            self._paddle__unscale(optimizer)
            return
        if own.__module__ != _HOME:  # fleet's scaler walks through other lists
            own(optimizer)
            return
        # What Paddle walks through: groups of parameters, or parameters.
        groups = optimizer._param_groups
        grouped = bool(groups) and isinstance(groups[0], dict)
        lists = [entry["params"] for entry in groups] if grouped else [optimizer._parameter_list]
        before = [list(parameters) for parameters in lists]
        try:
            for parameters in lists:
                parameters[:] = [parameter for parameter in parameters if not _lacks_memory(parameter._grad_ivar())]
            own(optimizer)
        finally:
            for parameters, all_of_them in zip(lists, before):
                parameters[:] = all_of_them


def _lacks_memory(gradient: Any) -> bool:
    return gradient is not None and not gradient._is_initialized()


def unscales_without_looking(version: str) -> bool:
    """Return whether a release of Paddle unscales gradients that have no memory: those before 3.1.1 do.

    Args:
        version: ``paddle.__version__``; ``0.0.0`` is a build from source.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return (0, 0, 0) < numbers < (3, 1, 1)
