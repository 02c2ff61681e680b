"""What Paddle has to be told before it trains on a device type that its own lists do not name.

Tested in tests/device/test_training.py.
"""

from __future__ import annotations

import importlib

from paddle_flexckpt.undo import Undo

from ..cpu_world.optimizers import patch_sharding_v2
from .environment import DEVICE_TYPE


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
        patches.set(module, "alignment", {**module.alignment, DEVICE_TYPE: 256})
    asked = auto_cast._is_custom_device_bfloat16_supported

    def supported() -> bool:
        return auto_cast._current_expected_place().get_device_type() == DEVICE_TYPE or bool(asked())

    patches.set(auto_cast, "_is_custom_device_bfloat16_supported", supported)  # L2
    patch_sharding_v2(patches)  # L3
    return patches
