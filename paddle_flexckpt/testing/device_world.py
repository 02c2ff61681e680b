"""Prepare one rank of a world of simulated accelerators, and check each of its jobs.

Unlike the CPU world it lends Paddle almost nothing (:mod:`~.rehearsal_device.lending`). Groups, collectives and kernels
are Paddle's own and the device's. Tested in tests/device/test_world.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from . import rehearsal_device
from .rehearsal_device.lending import lend

#: Counters of the device that a correct program leaves at zero.
MISUSES = ("host_touches", "freed_uses")


class DeviceMisuseError(RuntimeError):
    """Say that a job used device memory in a way that real devices do not survive."""


def prepare() -> None:
    """Make this rank's device current, and lend Paddle what it needs. Call it once, after the import."""
    environment = paddle.distributed.ParallelEnv()
    paddle.set_device(f"{rehearsal_device.DEVICE_TYPE}:{environment.device_id}")
    lend()


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Check what the device counts while this is open, and wait for the device at its end.

    Raises:
        DeviceMisuseError: The host touched device memory, or freed device memory was used.
    """
    before = misuses(rehearsal_device.stats())
    yield
    paddle.device.synchronize()
    after = misuses(rehearsal_device.stats())
    wrong = {name: count - before[name] for name, count in after.items() if count != before[name]}
    if wrong:
        raise DeviceMisuseError(f"the job misused device memory: {wrong}")


def misuses(counters: Mapping[str, Any]) -> dict[str, int]:
    """Return those of the device's counters that count mistakes."""
    return {name: int(counters.get(name, 0)) for name in MISUSES}


def guarded_calls() -> int:
    """Return how often this process has given the device an address, which the device has checked."""
    return int(rehearsal_device.stats()["guarded_calls_ever"])
