"""Targets of a live state: the table that a transfer works on, and the tensors behind it.

Tested in tests/live/test_shared_memory.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.engine.copies import AnyStorage
from paddle_flexckpt.engine.targets import Memory, Place, Targets
from paddle_flexckpt.live.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.live.live_masters import renew_masters
from paddle_flexckpt.live.state import LocalState, open_state, tensor_name
from paddle_flexckpt.live.tensor_memory import address_range, device_of, dtype_name, is_contiguous
from paddle_flexckpt.live.tensors import HostTensor, open_storage

# Steps that numpy may take to find out whether two strided tensors have an element in common.
_MAX_WORK = 100_000


def describe_targets(state_dict: Mapping[str, Any], rank: int) -> Targets:
    """Return the table of a rank's targets; arguments and errors as of :func:`.open_state`."""
    state = open_state(state_dict, rank)

    def place(row: int) -> Place | None:
        span = address_range(state.tensor(row))
        return None if span is None else (span, state.catalog.dtype_name(row), state.catalog.describe(row))

    return Targets(
        state.catalog,
        tuple(tuple(getattr(weight, "aliases", ())) for weight in state.weights),
        tuple(tuple(getattr(weight, "raw_names", ())) for weight in state.weights),
        tuple(tensor_name(weight or tensor) for weight, tensor in zip(state.weights, state.tensors)),
        tuple(map(place, range(len(state.weights)))),
        TargetTensors(state, rank),
    )


class TargetTensors(Memory):
    """Reach the tensors of a rank's targets."""

    def __init__(self, state: LocalState, rank: int) -> None:
        """Take the targets of a rank."""
        self._state, self._rank = state, rank

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices on which targets are."""
        return devices_of(self._state.tensors)

    def open(self, row: int, fresh: bool) -> HostTensor:
        """Open a target as host memory; ``fresh``: all of it will be written."""
        return HostTensor(self._state.tensor(row), fresh=fresh)

    def on_device(self, row: int) -> AnyStorage | None:
        """Return the storage of a target on a device; None for host memory."""
        tensor = self._state.tensor(row)
        return None if device_of(tensor) is None else open_storage(tensor)

    def overlap(self, one: int, other: int) -> bool:
        """Return whether two targets whose addresses overlap have an element in common, or may have one."""
        tensors = self._state.tensor(one), self._state.tensor(other)
        if all(map(is_contiguous, tensors)):
            return True
        shares_memory: Any = np.shares_memory  # whose stub knows no number for max_work
        try:
            return bool(shares_memory(*map(_as_array, tensors), max_work=_MAX_WORK))
        except np.exceptions.TooHardError:
            return True

    def wait(self) -> None:
        """Wait until devices have done what was begun on them."""
        wait_for_devices(self.devices)

    def finish(self, untouched: Collection[str]) -> None:
        """Renew the masters that live optimizers have of what was filled."""
        renew_masters(self._state, untouched, self._rank)


class _Addresses:
    """Show the addresses of a tensor, for numpy, which does not read them."""

    def __init__(self, tensor: Any) -> None:
        size = dtype_of(dtype_name(tensor)).itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": f"|V{size}",
            "strides": tuple(int(stride) * size for stride in tensor.strides),
            "data": (int(tensor.data_ptr()), False),
        }


def _as_array(tensor: Any) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else np.asarray(_Addresses(tensor))
