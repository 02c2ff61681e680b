"""Jobs that look at the world of devices itself."""

from __future__ import annotations

import os

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_flexckpt.testing import cpu_world, rehearsal_device


def where():
    """This rank's device, backend and groups, and a sum over all ranks."""
    total = paddle.to_tensor(np.arange(4, dtype="float32") + dist.get_rank())
    dist.all_reduce(total)
    return {
        "device": paddle.device.get_device(),
        "backend": dist.get_backend(),
        "place": str(total.place),
        "sum": total.numpy(),
        "collectives": rehearsal_device.stats()["ccl"]["calls"],
        "group": dist.collective._start_ring_id,
    }


def fleet_of(**degrees):
    """The ranks of this rank's tensor-parallel group, after a fleet of these degrees, with a sum over them."""
    hcg = cpu_world.init_fleet(**degrees)
    group = hcg.get_model_parallel_group()
    total = paddle.to_tensor(float(dist.get_rank()))
    if group.nranks > 1:
        dist.all_reduce(total, group=group)
    return [list(group.ranks), float(total)]


def one_fails():
    """Rank 1 raises while its peers wait for it in a collective of the device."""
    if dist.get_rank() == 1:
        raise ValueError("rank 1 will not come")
    total = paddle.ones([4])
    dist.all_reduce(total)
    paddle.device.synchronize()


def one_dies():
    """Rank 1 ends its process while its peers wait for it in a collective of the device."""
    if dist.get_rank() == 1:
        os._exit(7)
    total = paddle.ones([4])
    dist.all_reduce(total)
    return total.numpy()
