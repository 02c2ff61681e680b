"""What semi-automatic parallelism lacks on a CPU: some reshards, half precision, and a fresh start between two jobs.

Its communication is C++: the mesh of this package plays no part in it. A reshard is made of all-reduces, all-gathers
and slices, which a CPU has, and of reduce-scatters and all-to-alls, which it has not. Those go through a replica here
(S13). This reaches calls from Python only. What an operator reshards of its own inputs is done in C++; in training in
stages 0 to 3, with tensor fusion and ``fully_shard``, and with tensor parallelism, those are gathers and slices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.base import framework
from paddle.distributed.auto_parallel import api
from paddle.distributed.auto_parallel.process_mesh import ProcessMesh

from .patches import PatchSet, replace_everywhere

_HALF = (paddle.float16, paddle.bfloat16)

# Module globals of Paddle that outlive a job, with what they are at the start. Not every version has each module.
_LEFT_BEHIND = (
    ("paddle.distributed.auto_parallel.interface", "_g_mesh", None),
    ("paddle.distributed.auto_parallel.process_mesh", "_g_current_process_mesh", None),
    ("paddle.distributed.auto_parallel.process_mesh", "_g_previous_process_mesh", None),
    ("paddle.distributed.auto_parallel.fully_shard_fusion", "_g_fsdp_context", None),
    ("paddle.distributed.auto_parallel.static.dist_context", "_g_default_distributed_context", None),
)
_LEFT_IN_ENVIRONMENT = ("FLAGS_enable_tensor_fusion", "skip_sharding3_output_reshard")


def reset_semi_auto() -> None:
    """Forgets what a semi-automatic job leaves behind in its process (S11); ``reset_fleet`` calls it.

    That is the global mesh, the buffers of a fused ``fully_shard``, the two environment variables that switch tensor
    fusion and stage 3 on, the groups of static programs, and that there was such a job at all (on which the meaning of
    ``fully_shard`` hangs). The C++ connections stay: they belong to sets of ranks.
    """
    for module_name, name, value in _LEFT_BEHIND:
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, name):
            setattr(module, name, value)
    for variable in _LEFT_IN_ENVIRONMENT:
        os.environ.pop(variable, None)
    if hasattr(framework.global_var, "_in_auto_parallel_"):
        framework.global_var._in_auto_parallel_ = False
    process_mesh = sys.modules["paddle.distributed.auto_parallel.process_mesh"]
    getattr(process_mesh, "_g_group_map", {}).clear()


def patch_semi_auto(patches: PatchSet) -> None:
    """Mends ``reshard``, ``shard_tensor`` and ``ProcessMesh`` wherever Paddle has a copy of them."""
    patches.set(ProcessMesh, "get_rank_by_dim_and_process_id", _rank_on_axis)
    replace_everywhere(patches, api, "reshard", _Reshard(api.reshard))
    replace_everywhere(patches, api, "shard_tensor", _ShardTensor(api.shard_tensor))


class _Reshard:
    """``reshard`` of dynamic graphs without the kernels reduce_scatter and all_to_all.

    1. A half-precision tensor is cast to float32 and the result back: no kernel slices half precision (S12), and sums
       of it are wrong (U2).
    2. Where a mesh axis goes from partial or sharded to another sharding, it first becomes a replica.

    Args:
        native: Paddle's function; static graphs and changes of the mesh are its own.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def __call__(self, dist_tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
        if not paddle.in_dynamic_mode() or not dist_tensor.is_dist() or dist_tensor.process_mesh != mesh:
            return self._native(dist_tensor, mesh, placements)
        now, wanted = list(dist_tensor.placements), list(placements)
        if now == wanted:
            return self._native(dist_tensor, mesh, placements)
        if dist_tensor.dtype in _HALF:
            return _HalfReshard.apply(dist_tensor, wanted, self)
        middle = [
            before if before == after or before.is_replicated() or after.is_replicated() else dist.Replicate()
            for before, after in zip(now, wanted)
        ]
        if middle != now:
            dist_tensor = self._native(dist_tensor, mesh, middle)
        return self._native(dist_tensor, mesh, placements)


class _HalfReshard(PyLayer):
    """A reshard in float32 of a half-precision tensor.

    Local values are cast, not the distributed tensor: upstream's cast makes a replica of what the mesh does not divide,
    in half precision.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: Sequence[Any], reshard: _Reshard) -> Any:
        ctx.reshard = reshard
        ctx.placements = [dist.Replicate() if p.is_partial() else p for p in tensor.placements]
        mesh = tensor.process_mesh
        return _local_cast(reshard(_local_cast(tensor, "float32"), mesh, placements), tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.reshard(grad, grad.process_mesh, ctx.placements)


def _local_cast(tensor: Any, dtype: Any) -> Any:
    local = tensor._local_value()
    return paddle.Tensor(
        local.astype(dtype) if local._is_initialized() else paddle.zeros(tensor._local_shape, dtype),
        dims=list(tensor.shape),
        process_mesh=tensor.process_mesh,
        placements=tensor.placements,
        place=paddle.CPUPlace(),
    )


class _ShardTensor:
    """``shard_tensor`` that cuts half precision: as a replica first, which is then resharded (S12).

    Args:
        native: Paddle's function.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def __call__(
        self,
        data: Any,
        mesh: Any,
        placements: Sequence[Any],
        dtype: Any = None,
        place: Any = None,
        stop_gradient: bool | None = None,
    ) -> Any:
        whole = all(placement.is_replicated() for placement in placements)
        if whole or not paddle.in_dynamic_mode() or not _is_half(data, dtype):
            return self._native(data, mesh, placements, dtype, place, stop_gradient)
        replica = self._native(data, mesh, [dist.Replicate()] * len(placements), dtype, place, stop_gradient)
        with paddle.no_grad():
            cut = api.reshard(replica, mesh, placements)
        replica.get_tensor()._share_data_with(cut.get_tensor())
        return replica


def _is_half(data: Any, dtype: Any) -> bool:
    if dtype is not None:
        return framework.convert_np_dtype_to_dtype_(dtype) in _HALF
    if isinstance(data, paddle.Tensor):
        return data._is_initialized() and data.dtype in _HALF
    return isinstance(data, np.ndarray) and data.dtype == np.float16


def _rank_on_axis(self: Any, dim: str | int | None, process_id: int) -> int:
    """``ProcessMesh.get_rank_by_dim_and_process_id``; upstream's takes an array of one for a number (S9)."""
    if process_id not in self._process_ids:
        return -1
    if dim is None:
        return 0
    axis = dim if isinstance(dim, int) else self._dim_names.index(dim)
    return int(np.argwhere(self._mesh == process_id)[0][axis])
