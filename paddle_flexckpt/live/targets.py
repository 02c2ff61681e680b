"""Targets of a live state: the table that a transfer works on, and the tensors behind it.

Tested in tests/live/test_shared_memory.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Problem, ValidationError, dtype_of
from paddle_flexckpt.engine.copies import DeviceStorage
from paddle_flexckpt.engine.targets import Memory, Targets
from paddle_flexckpt.live.device_memory import DeviceMemory, devices_of, wait_for_devices
from paddle_flexckpt.live.live_masters import betas_by_address, renew_masters
from paddle_flexckpt.live.page_lock import lock_pages
from paddle_flexckpt.live.state import LocalState, open_state
from paddle_flexckpt.live.tensor_memory import address_range, device_of, dtype_name, is_contiguous, odd_strides
from paddle_flexckpt.live.tensors import HostTensor
from paddle_flexckpt.sharded_weight import MasterSlice

# The most steps in which numpy finds out whether two strided tensors have an element in common.
_MAX_WORK = 100_000


def describe_targets(state_dict: Mapping[str, Any], rank: int) -> Targets:
    """Return the table of a rank's targets, none read-only; arguments and errors as of :func:`.open_state`."""
    state = open_state(state_dict, rank, is_source=False)
    spans, addresses, devices, strides = _locate(state)
    fixed = [row for row in np.flatnonzero(addresses < 0).tolist() if _is_read_only(state.tensors[row])]
    if fixed:
        catalog = state.catalog
        raise ValidationError(
            [
                Problem(
                    "a target cannot be written to",
                    key=catalog.keys[row],
                    rank=rank,
                    got=f"a read-only array of numpy, {catalog.describe(row)}",
                    remedy="load into a copy of it, or open a memory map with mode 'r+' or 'c'",
                )
                for row in fixed
            ]
        )
    return Targets(
        state.catalog,
        tuple([tuple(getattr(weight, "aliases", ())) for weight in state.weights]),
        tuple([tuple(getattr(weight, "raw_names", ())) for weight in state.weights]),
        spans,
        TargetTensors(state, rank, addresses, devices),
        strides=strides,
        masters=frozenset(row for row, weight in enumerate(state.weights) if type(weight) is MasterSlice),
    )


def _is_read_only(tensor: Any) -> bool:
    return isinstance(tensor, np.ndarray) and tensor.size > 0 and not tensor.flags.writeable


def _locate(state: LocalState) -> tuple[np.ndarray, np.ndarray, list[str], dict[int, tuple[int, ...]]]:
    """Return the spans of a state's tensors, addresses of those that can be filled in place, devices, odd strides."""
    tensors, sizes = state.tensors, state.catalog.byte_length
    places: list[tuple[int, bool]] = []
    elsewhere = []
    for tensor, size in zip(tensors, sizes.tolist()):
        if not size:
            places.append((0, False))
        elif isinstance(tensor, np.ndarray):
            flags = tensor.flags
            places.append((tensor.__array_interface__["data"][0], flags.c_contiguous and flags.writeable))
        elif tensor.place.is_cpu_place():
            places.append((tensor.data_ptr(), tensor.is_contiguous()))
        else:
            elsewhere.append(tensor)
            places.append((0, False))
    begins, direct = np.asarray(places, dtype=np.int64).reshape(-1, 2).T
    direct = direct != 0
    spans = np.stack([begins, begins + sizes], axis=1)
    strides = {}
    for row in np.flatnonzero(~direct & (sizes > 0)).tolist():
        spans[row] = address_range(tensors[row])
        if odd := odd_strides(tensors[row]):
            strides[row] = odd
    return spans, np.where(direct, begins, -1), devices_of(elsewhere), strides


class TargetTensors(Memory):
    """The tensors of a rank's targets, as memory."""

    def __init__(self, state: LocalState, rank: int, addresses: np.ndarray, devices: list[str]) -> None:
        """Take the targets of a rank, the addresses of those that are filled in place, and their devices."""
        self._state, self._rank, self._addresses, self._devices = state, rank, addresses, devices

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices on which targets are."""
        return self._devices

    def open(self, row: int, fresh: bool) -> HostTensor:
        """Open a target as host memory; ``fresh``: all of it will be written."""
        return HostTensor(self._state.tensor(row), fresh=fresh)

    def addresses(self) -> np.ndarray:
        """Return int64 per target: the address of a contiguous one on the host, else -1."""
        return self._addresses

    def on_device(self, row: int) -> DeviceStorage | None:
        """Return the storage of a target on a device; None for host memory."""
        tensor = self._state.tensor(row)
        return None if device_of(tensor) is None else DeviceMemory(tensor)

    @contextlib.contextmanager
    def host_buffers(self, count: int, nbytes: int) -> Iterator[list[np.ndarray]]:
        """Lend buffers, page-locked if the backend can lock memory."""
        memory = np.empty((count, nbytes), dtype=np.uint8)
        unlock = lock_pages(memory, self._devices[0])
        try:
            yield list(memory)
        finally:
            if unlock is not None:
                unlock()

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

    def beta(self, row: int, number: int) -> float | None:
        """Return the beta of the live optimizer that a power of it belongs to."""
        span = address_range(self._state.tensor(row))
        return None if span is None else self._betas.get((span[0], number))

    @cached_property
    def _betas(self) -> dict[tuple[int, int], float]:
        return dict(betas_by_address())

    def wait(self) -> None:
        """Wait until devices have finished the work that was begun on them."""
        wait_for_devices(self.devices)

    def finish(self, untouched: Collection[str]) -> None:
        """Renew the masters of live optimizers whose parameters were filled."""
        renew_masters(self._state, untouched, self._rank)


class _Addresses:
    """The addresses of a tensor as an array for numpy, which does not read them."""

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
