"""Worlds with an accelerator of the plugin for each rank: ``World(n, device="tests.device.ranks")``.

Unlike the CPU world it lends Paddle almost nothing (:func:`lend`). Groups, collectives and kernels are Paddle's own and
the device's. Tested in tests/device/test_world.py and tests/device/test_training.py.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from paddle_flexckpt.testing.cpu_world.training import patch_sharding_v2
from paddle_flexckpt.undo import Undo

from . import plugin

#: Counters of the device that a correct program leaves at zero.
MISUSES = ("host_touches", "freed_uses")


class DeviceMisuseError(RuntimeError):
    """Say that a job used device memory in a way that real devices do not survive."""


def environment(size: int) -> dict[str, str]:
    """Return the variables of the ranks' processes."""
    return plugin.environment(devices=size)


def prepare() -> None:
    """Make this rank's device current, and lend Paddle what it needs. Call it once, after the import."""
    rank = paddle.distributed.ParallelEnv()
    paddle.set_device(f"{plugin.DEVICE_TYPE}:{rank.device_id}")
    lend()


def lend() -> Undo:
    """Complete those lists of Paddle that name device types one by one. ``put_back()`` of what is returned reverts it.

    - L1: tensor fusion (sharding V2, fused gradients) pads parameters to an alignment from a table of device types,
      and raises for a type that is not in it. The optimizer's fusion has a copy of that table.
    - L2: ``paddle.amp`` takes bfloat16 on custom devices of four names alone. On others ``decorate`` returns the model
      in float32 without a word, and ``auto_cast`` warns and does nothing.
    - L3: sharding V2 clears gradients so that the next ``backward()`` replaces them, where it should add into the fused
      buffer: from the second step on, a buffer of zeros is reduced (the CPU world mends the same as U5). It is not the
      device's doing: the flag of an empty gradient is kept by the tensor, wherever that lies.
    """
    from paddle.distributed.fleet.utils import tensor_fusion_helper
    from paddle.optimizer import fusion_utils

    auto_cast = importlib.import_module("paddle.amp.auto_cast")  # the package has a function of that name
    patches = Undo()
    for module in (tensor_fusion_helper, fusion_utils):  # L1
        patches.set(module, "alignment", {**module.alignment, plugin.DEVICE_TYPE: 256})
    asked = auto_cast._is_custom_device_bfloat16_supported

    def supported() -> bool:
        return auto_cast._current_expected_place().get_device_type() == plugin.DEVICE_TYPE or bool(asked())

    patches.set(auto_cast, "_is_custom_device_bfloat16_supported", supported)  # L2
    patch_sharding_v2(patches)  # L3
    return patches


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Check what the device counts while this is open, and wait for the device at its end.

    Raises:
        DeviceMisuseError: The host touched device memory, or freed device memory was used.
    """
    before = misuses(plugin.stats())
    yield
    paddle.device.synchronize()
    after = misuses(plugin.stats())
    wrong = {name: count - before[name] for name, count in after.items() if count != before[name]}
    if wrong:
        raise DeviceMisuseError(f"the job misused device memory: {wrong}")


def misuses(counters: Mapping[str, Any]) -> dict[str, int]:
    """Return those of the device's counters that count mistakes."""
    return {name: int(counters.get(name, 0)) for name in MISUSES}


def guarded_calls() -> int:
    """Return how often this process has given the device an address, which the device has checked."""
    return int(plugin.stats()["guarded_calls_ever"])
