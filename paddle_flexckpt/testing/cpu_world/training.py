"""Patches of AdamW on half-precision parameters, gradient clearing of sharding V2, and averaging of data parallelism.

Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops
from paddle.base import core
from paddle.distributed.auto_parallel import api
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer

from paddle_flexckpt.testing.cpu_world.arrays import HALF, copy_into
from paddle_flexckpt.testing.cpu_world.process_group import MeshProcessGroup
from paddle_flexckpt.undo import Undo

# Place of `multi_precision` after `found_inf`: beta1, beta2, epsilon, lr_ratio, coeff, with_decay, lazy_mode,
# min_row_size, *it*.
_MULTI_PRECISION = 8


def patch_adamw(patches: Undo) -> None:
    """Emulate AdamW of float16 and bfloat16 parameters: the CPU kernel knows float32 only.

    The float32 master weight is updated and rounded into the parameter, which is what the CUDA kernel does.
    """
    native: Any = _C_ops.adamw_

    def adamw_(param: Any, grad: Any, *args: Any) -> Any:
        if param.dtype not in HALF:
            return native(param, grad, *args)
        # (lr, moment1, moment2, moment2_max, beta1_pow, beta2_pow, master, found_inf, ...): 3.0 and later.
        master, rest = args[6], list(args[8:])
        if master is None:
            raise ValueError("AdamW on half-precision parameters needs multi_precision=True in the CPU world")
        rest[_MULTI_PRECISION] = False
        native(master, grad.astype("float32"), *args[:6], None, args[7], *rest)
        if param.is_dist():  # under stages 1 and 2 its master is cut where it is not
            with paddle.no_grad():
                master = api.reshard(master, param.process_mesh, param.placements)
            copy_into(param._local_value(), master._local_value().astype(param.dtype))
        else:
            copy_into(param, master.astype(param.dtype))
        return (None,) * 7

    patches.set(_C_ops, "adamw_", adamw_)


def _clear_grad(self: Any, set_to_zero: bool = True) -> None:
    for param in self._parameter_list:
        main_grad = getattr(param, "main_grad", None)
        grad = param.grad if main_grad is None else main_grad
        if grad is not None:
            with paddle.no_grad():
                grad.zero_()
    # Names of 3.1 and later; 3.0 never releases its gradient buffers.
    if getattr(self, "sd_release_grads", False) and not getattr(self, "pp_overlap", False):
        for buffer in self._comm_buffer_list:
            if buffer.need_reduce_scale_sync():
                buffer._clear_grad_storage()


def patch_sharding_v2(patches: Undo) -> None:
    """Clear V2's gradients in place.

    Upstream calls ``clear_gradient(True)``, which on the CPU marks the leaf "fake empty"; the next backward then
    *replaces* the gradient instead of adding into the fused buffer, and from step 2 on V2 reduces a buffer of zeros
    (U5).
    """
    # V2 came with 2.6 and is in every 3.x; a version without it has nothing to mend.
    v2 = getattr(dygraph_sharding_optimizer, "DygraphShardingOptimizerV2", None)
    if v2 is not None:
        patches.set(v2, "clear_grad", _clear_grad)


class Reducer:
    """A reducer that averages gradients of ``paddle.DataParallel`` after a backward pass, like ``core.EagerReducer``.

    The latter is C++ and takes only a native process group. That is a gloo group, with its defects (U1, U2) and
    fourteen file descriptors that are never closed.

    1. The forward pass of the wrapper calls :meth:`prepare_for_backward` (not under ``no_sync``).
    2. The first parameter whose gradient is ready asks to be called at the end of this backward pass.
    3. There, each gradient is averaged over the group, in the order of the parameters.

    A parameter that got no gradient on this rank counts as zero when another rank has one, and is left alone when none
    has.
    """

    def __init__(self, parameters: Sequence[Any], is_sparse: Sequence[bool], process_group: MeshProcessGroup) -> None:
        if any(is_sparse):
            raise NotImplementedError("the CPU world does not average sparse gradients; use Embedding(sparse=False)")
        self._parameters = list(parameters)
        self._group = process_group
        self._armed = False
        for parameter in self._parameters:
            parameter._register_backward_hook(self._on_gradient)

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Arm the reducer for the next backward pass."""
        self._armed = True

    def _on_gradient(self, *_: Any) -> None:
        if self._armed:
            self._armed = False
            core.eager._add_backward_final_hook(self._average)

    def _average(self) -> None:
        # One message says who has which gradient, so that all ranks agree on what follows.
        have = paddle.to_tensor(np.array([p.grad is not None for p in self._parameters], "int32"))
        self._group.all_reduce(have, core.ReduceOp.MAX)
        with paddle.no_grad():
            for parameter, anyone in zip(self._parameters, have.numpy()):
                if not anyone:
                    continue
                if parameter.grad is None:
                    parameter.grad = paddle.zeros_like(parameter)
                self._group.all_reduce(parameter.grad, core.ReduceOp.AVG)


def patch_data_parallel(patches: Undo) -> None:
    """Give ``DataParallel`` over a mesh group this reducer; other groups keep the native one."""
    native = core.EagerReducer

    def reducer(parameters: Any, indices: Any, is_sparse: Any, process_group: Any, *rest: Any) -> Any:
        if isinstance(process_group, MeshProcessGroup):
            return Reducer(parameters, is_sparse, process_group)
        return native(parameters, indices, is_sparse, process_group, *rest)

    patches.set(core, "EagerReducer", reducer)
