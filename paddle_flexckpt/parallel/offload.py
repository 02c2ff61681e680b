"""Serve the offload of group sharding: master weights and states in host memory, which the optimizer steps on.

Stage 2 (float16 parameters) lays the master weights of a rank's parameters end to end in a buffer, each padded, and
the optimizer steps on the buffer, so that its states are those of the buffer. Here they are taken apart again.

Stage 3 keeps a float32 master of every slice, and of every parameter that is too small to be sliced. A slice's master
*is* the slice from the end of a backward on, and what a forward leaves there in the parameter's own dtype is a copy of
it: so the slice is described by its master. A small parameter is a copy of its master too, in memory of the device.
Tested in tests/distributed/test_sharding.py.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from paddle_flexckpt.parallel.fully_shard import BufferSlot, StateTables
from paddle_flexckpt.parallel.sharding_stage3 import is_small
from paddle_flexckpt.parallel.state_creation import create_dense_states


def on_host(optimizer: Any) -> AbstractContextManager[None]:
    """Return what makes new tensors be in host memory, where an optimizer of group sharding has them there."""
    if not getattr(optimizer, "offload", False):
        return nullcontext()
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_utils import device_guard

    return device_guard()  # type: ignore[no-any-return]


def stage2_tables(optimizer: Any) -> StateTables:
    """Return the tables of a stage-2 optimizer with offload, by parameter; states that are not there are created.

    Raises:
        ValueError: The optimizer has parameter groups, which Paddle then steps on in place of the buffer.
    """
    inner, storage = optimizer._optim, optimizer.offload_params
    if isinstance(inner._param_groups[0], dict):
        raise ValueError(
            "group sharding stage 2 with offload=True and parameter groups: Paddle does not step on the offloaded "
            "parameters then. Remedy: one list of parameters, and weight decay by apply_decay_param_fun"
        )
    # With offload the masters are in use whatever multi_precision says.
    tables = StateTables(True, getattr(inner, "_name", None))
    if storage is None:  # this rank owns no parameter
        return tables
    buffer = storage.buffer
    with on_host(optimizer):
        create_dense_states(inner, [buffer])
    begin, slots = 0, {}
    for master in storage._params:
        size = int(master._numel())
        slots[master.name] = BufferSlot(slice(0, size), begin)
        begin += size + int(storage.param2align[master.name])
    tables.add_buffer(inner, buffer, buffer, slots)
    return tables


def stage3_tables(optimizer: Any, parameters: Collection[Any]) -> StateTables:
    """Return the tables of a stage-3 optimizer with offload, with the masters of small half-precision parameters."""
    masters = {
        parameter.name: parameter.master_weight
        for parameter in parameters
        if is_small(parameter) and parameter.dtype != parameter.master_weight.dtype
    }
    return StateTables(True, getattr(optimizer, "_name", None), optimizer._accumulators, masters)


class Stage3OffloadMixin:
    """Hold what ``install()`` gives to GroupShardedStage3."""

    def _update_params(self: Any) -> Any:
        """Do as Paddle does; masters of small float32 parameters first take what a load has put into the parameters.

        For half-precision parameters the masters themselves are loaded.
        """
        import paddle

        if self._offload:
            for parameter in list(self._unslice_params):
                if parameter.dtype == parameter.master_weight.dtype:
                    parameter.master_weight.get_tensor().set(parameter.numpy(), paddle.CPUPlace())
        return self._paddle__update_params()
