"""AdamW on half-precision parameters, and gradient clearing of sharding V2.

Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import _C_ops
from paddle.distributed.auto_parallel import api
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer

from paddle_flexckpt.undo import Undo

from .arrays import copy_into

# Place of `multi_precision` after `found_inf`: beta1, beta2, epsilon, lr_ratio, coeff, with_decay, lazy_mode,
# min_row_size, *it*.
_MULTI_PRECISION = 8


def patch_adamw(patches: Undo) -> None:
    """Emulate AdamW of float16 and bfloat16 parameters: the CPU kernel knows float32 only.

    The float32 master weight is updated and rounded into the parameter, which is what the CUDA kernel does.
    """
    native: Any = _C_ops.adamw_

    def adamw_(param: Any, grad: Any, *args: Any) -> Any:
        if param.dtype not in (paddle.float16, paddle.bfloat16):
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
