"""Semi-automatic parallelism and its static graphs on a CPU.

Its communication is C++: the mesh of this package plays no part in it. A reshard is made of all-reduces, all-gathers
and slices, which a CPU has, and of reduce-scatters and all-to-alls, which it has not. Those go through a replica here
(S13). This reaches calls from Python only. What an operator reshards of its own inputs is done in C++; in training in
stages 0 to 3, with tensor fusion and ``fully_shard``, and with tensor parallelism, those are gathers and slices.

``dist.to_static`` and its ``DistModel`` lack communicators on a CPU (S15), and some reshards (S13). A communicator
belongs to a set of ranks and lasts as long as the process: upstream's registry of them can neither drop one nor take
another of the same number. So a group's number follows from its ranks here, and jobs share it.
Tested in tests/semi_auto/test_reshard.py and tests/semi_auto/test_static.py.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import _legacy_C_ops
from paddle.autograd import PyLayer
from paddle.base import core, framework
from paddle.distributed import fleet
from paddle.distributed.auto_parallel import api
from paddle.distributed.auto_parallel.process_mesh import ProcessMesh
from paddle.distributed.auto_parallel.static import process_group

from paddle_flexckpt.testing.cpu_world.process_group import HALF
from paddle_flexckpt.undo import Undo

# Module globals of Paddle that outlive a job, with what they are at the start. Not every version has each module.
_LEFT_BEHIND = (
    ("paddle.distributed.auto_parallel.interface", "_g_mesh", None),
    ("paddle.distributed.auto_parallel.process_mesh", "_g_current_process_mesh", None),
    ("paddle.distributed.auto_parallel.process_mesh", "_g_previous_process_mesh", None),
    ("paddle.distributed.auto_parallel.fully_shard_fusion", "_g_fsdp_context", None),
    ("paddle.distributed.auto_parallel.static.dist_context", "_g_default_distributed_context", None),
)
_LEFT_IN_ENVIRONMENT = ("FLAGS_enable_tensor_fusion", "skip_sharding3_output_reshard")
#: Above the numbers that fleet gives its groups.
_FIRST_NUMBER = 1 << 16
_TIMEOUT_SECONDS = 60
# A communicator uses its store for as long as it is used itself.
_stores: dict[int, Any] = {}


def reset_semi_auto() -> None:
    """Forget what a semi-automatic job leaves behind in its process (S11); ``reset_fleet`` calls it.

    That is the global mesh, the buffers of a fused ``fully_shard``, the two environment variables that switch tensor
    fusion and stage 3 on, the groups of static graphs and of fleet, and that there was such a job at all (on which the
    meaning of ``fully_shard`` hangs). The C++ connections stay: they belong to sets of ranks.
    """
    for module_name, name, value in _LEFT_BEHIND:
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, name):
            setattr(module, name, value)
    for variable in _LEFT_IN_ENVIRONMENT:
        os.environ.pop(variable, None)
    if hasattr(framework.global_var, "_in_auto_parallel_"):
        framework.global_var._in_auto_parallel_ = False
    # ProcessMesh.get_group takes fleet's groups for its own when fleet was ever initialised, which to_static does too.
    vars(fleet.fleet).pop("_hcg", None)
    process_mesh = sys.modules["paddle.distributed.auto_parallel.process_mesh"]
    getattr(process_mesh, "_g_group_map", {}).clear()
    reset_static_graphs()


def patch_semi_auto(patches: Undo) -> None:
    """Mend ``reshard``, ``shard_tensor`` and ``ProcessMesh`` wherever Paddle has a copy of them."""
    patches.set(ProcessMesh, "get_rank_by_dim_and_process_id", _rank_on_axis)
    reshard = _Reshard(api.reshard)
    patches.replace_everywhere("reshard", api.reshard, _untranslated(reshard), "paddle")
    patches.replace_everywhere(
        "shard_tensor", api.shard_tensor, _untranslated(_ShardTensor(api.shard_tensor, reshard)), "paddle"
    )


def _untranslated(call: Any) -> Any:
    """Return a call that static graphs run as it stands in the forward of a model, as they do Paddle's own."""

    @functools.wraps(call.native)
    def run(*args: Any, **named: Any) -> Any:
        return call(*args, **named)

    return paddle.jit.not_to_static(run)


class _Reshard:
    """A replacement of ``reshard`` of dynamic graphs, without the kernels reduce_scatter and all_to_all.

    1. What upstream has no slices or gathers for is gathered and cut by hand: half precision (S12; and sums of it are
       wrong, U2), and a tensor that leaves the last ranks with nothing (S14).
    2. Where a mesh axis goes from partial or sharded to another sharding, it first becomes a replica (S13).

    Static graphs, changes of the mesh and axes that are cut twice are left to Paddle's own function.
    """

    def __init__(self, native: Any) -> None:
        self.native = native

    def __call__(self, dist_tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
        if not paddle.in_dynamic_mode() or not dist_tensor.is_dist() or dist_tensor.process_mesh != mesh:
            return self.native(dist_tensor, mesh, placements)
        now, wanted = list(dist_tensor.placements), list(placements)
        if _cuts(now) is None or _cuts(wanted) is None or any(p.is_partial() for p in wanted):
            return self.native(dist_tensor, mesh, placements)
        if dist_tensor.dtype in HALF or any(_leaves_nothing(dist_tensor.shape, mesh, some) for some in (now, wanted)):
            return _ReshardByHand.apply(dist_tensor, wanted, self.native)
        middle = [
            before if before == after or before.is_replicated() or after.is_replicated() else dist.Replicate()
            for before, after in zip(now, wanted)
        ]
        if middle != now:
            dist_tensor = self.native(dist_tensor, mesh, middle)
        return self.native(dist_tensor, mesh, placements)


class _ReshardByHand(PyLayer):
    """A reshard through a replica: padded to even shares and gathered, then cut without the padding.

    Half precision travels as float32. Local values are cast, since upstream's cast of a distributed tensor gathers what
    the mesh does not divide.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: Sequence[Any], native: Any) -> Any:
        ctx.native = native
        ctx.placements = [dist.Replicate() if p.is_partial() else p for p in tensor.placements]
        return _cut(_gathered(tensor, native), tensor.process_mesh, placements, tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _cut(_gathered(grad, ctx.native), grad.process_mesh, ctx.placements, grad.dtype)


def _cuts(placements: Sequence[Any]) -> dict[int, int] | None:
    """Return which mesh axis cuts which axis of a tensor; None if two of them cut one."""
    cuts: dict[int, int] = {}
    for mesh_axis, placement in enumerate(placements):
        # One that shares its axis with another has no get_dim() (S6).
        if placement.is_shard() and (not hasattr(placement, "get_dim") or placement.get_dim() in cuts):
            return None
        if placement.is_shard():
            cuts[placement.get_dim()] = mesh_axis
    return cuts


def _share(size: int, degree: int) -> int:
    return -(-size // degree)


def _leaves_nothing(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> bool:
    """Return whether shares that are rounded up leave the last rank with nothing, or with less."""
    return any(
        _share(shape[axis], mesh.shape[mesh_axis]) * (mesh.shape[mesh_axis] - 1) >= shape[axis]
        for axis, mesh_axis in (_cuts(placements) or {}).items()
    )


def _gathered(tensor: Any, native: Any) -> Any:
    """Return all of a distributed tensor as a dense one, in float32 if it is of half precision."""
    mesh, padded = tensor.process_mesh, list(tensor.shape)
    share = list(tensor.shape)
    for axis, mesh_axis in (_cuts(tensor.placements) or {}).items():
        share[axis] = _share(tensor.shape[axis], mesh.shape[mesh_axis])
        padded[axis] = share[axis] * mesh.shape[mesh_axis]
    dtype = "float32" if tensor.dtype in HALF else tensor.dtype
    local = paddle.zeros(share, dtype)
    held = tensor._local_value()
    if held._is_initialized() and held.shape and held._numel():
        local[tuple(slice(0, size) for size in held.shape)] = held.astype(dtype)
    elif not held.shape:
        local = held.astype(dtype)
    whole = native(_labelled(local, padded, mesh, tensor.placements), mesh, [dist.Replicate()] * len(mesh.shape))
    return whole._local_value()[tuple(slice(0, size) for size in tensor.shape)] if padded else whole._local_value()


def _cut(whole: Any, mesh: Any, placements: Sequence[Any], dtype: Any) -> Any:
    """Return this rank's part of a dense tensor, as a distributed one."""
    # Cast first: a slice of nothing still counts as initialised, which operators ask for, and a cast of it does not.
    local = whole.astype(dtype)
    place = np.argwhere(np.reshape(mesh.process_ids, mesh.shape) == dist.get_rank())[0]
    for axis, mesh_axis in (_cuts(placements) or {}).items():
        share = _share(whole.shape[axis], mesh.shape[mesh_axis])
        start = min(share * int(place[mesh_axis]), whole.shape[axis])
        local = local.slice([axis], [start], [min(start + share, whole.shape[axis])])
    return _labelled(local, whole.shape, mesh, placements)


def _labelled(local: Any, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Any:
    return paddle.Tensor(
        local, dims=list(shape), process_mesh=mesh, placements=list(placements), place=paddle.CPUPlace()
    )


class _ShardTensor:
    """A replacement of ``shard_tensor`` for tensors that upstream cannot cut (S12, S14): it reshards a replica."""

    def __init__(self, native: Any, reshard: _Reshard) -> None:
        self.native, self._reshard = native, reshard

    def __call__(
        self,
        data: Any,
        mesh: Any,
        placements: Sequence[Any],
        dtype: Any = None,
        place: Any = None,
        stop_gradient: bool | None = None,
    ) -> Any:
        cuts = _cuts(placements)
        # A parameter whose initialisation was put off has no value to cut yet.
        waits = isinstance(data, paddle.Tensor) and not data._is_initialized()
        if not cuts or waits or not paddle.in_dynamic_mode() or any(p.is_partial() for p in placements):
            return self.native(data, mesh, placements, dtype, place, stop_gradient)
        if not isinstance(data, paddle.Tensor) or dtype is not None:
            data = paddle.to_tensor(data, dtype, place, getattr(data, "stop_gradient", True))
            dtype = None
        outside = dist.get_rank() not in mesh.process_ids  # nothing to cut, and a reshard there ends in SIGSEGV
        if outside or (data.dtype not in HALF and not _leaves_nothing(data.shape, mesh, placements)):
            return self.native(data, mesh, placements, dtype, place, stop_gradient)
        replica = self.native(data, mesh, [dist.Replicate()] * len(placements), dtype, place, stop_gradient)
        with paddle.no_grad():
            cut = self._reshard(replica, mesh, placements)
        # Into the tensor that upstream made, which may be a parameter with all its attributes.
        replica.get_tensor()._share_data_with(cut.get_tensor())
        return replica


def _rank_on_axis(self: Any, dim: str | int | None, process_id: int) -> int:
    """Return ``ProcessMesh.get_rank_by_dim_and_process_id``; upstream's takes an array of one for a number (S9)."""
    if process_id not in self._process_ids:
        return -1
    if dim is None:
        return 0
    axis = dim if isinstance(dim, int) else self._dim_names.index(dim)
    return int(np.argwhere(self._mesh == process_id)[0][axis])


def number_of(ranks: Sequence[int]) -> int:
    """Return the number of the static group of these ranks."""
    return _FIRST_NUMBER + sum(1 << rank for rank in ranks)


def reset_static_graphs() -> None:
    """Forget the groups of static graphs, and that a job ended while it built one."""
    groups = process_group._g_process_group_map
    groups.clear()
    groups[0] = process_group.ProcessGroup(0, [])
    if not paddle.in_dynamic_mode():
        paddle.disable_static()


def patch_static_graphs(patches: Undo) -> None:
    """Give static groups gloo communicators, and static graphs the reshards that a CPU has no kernels for."""
    native = process_group.new_process_group

    def new_process_group(
        ranks: Sequence[int], group_id: int | None = None, force_new_group: bool = False, group_type: str | None = None
    ) -> Any:
        return native(ranks, number_of(ranks) if group_id is None else group_id, force_new_group, group_type)

    patches.replace_everywhere("new_process_group", process_group.new_process_group, new_process_group, "paddle")
    patches.set(process_group.ProcessGroup, "instantiate", _instantiate)
    # It asks for a communicator of NCCL. Connecting a group is a rendezvous already.
    patches.set(_legacy_C_ops, "barrier", lambda *_: None)
    _patch_reshards(patches)


def _instantiate(group: Any) -> None:
    """Replace ``ProcessGroup.instantiate`` for a CPU, where upstream finds no device."""
    rank = dist.get_rank()
    if not group._is_instantiate and group.nranks >= 2 and rank in group.ranks and group.id not in _stores:
        store: Any = core.create_or_get_global_tcp_store()
        place, key = group.local_rank(rank), f"cpu_world/static/{group.id}"
        if place == 0:
            with socket.create_server(("127.0.0.1", 0)) as found:
                port = found.getsockname()[1]
            # Told before it is there: to open a store is to wait for all its clients.
            store.set(key, str(port).encode())
            own = core.TCPStore("127.0.0.1", port, True, group.nranks, _TIMEOUT_SECONDS)
        else:
            store.wait(key)
            own = core.TCPStore("127.0.0.1", int(store.get(key).decode()), False, group.nranks, _TIMEOUT_SECONDS)
        core.CommContextManager.create_gloo_comm_context(own, str(group.id), place, group.nranks)
        _stores[group.id] = own
    group._is_instantiate = True


def _patch_reshards(patches: Undo) -> None:
    """Let static reshards from partial to sharded, and from one sharding to another, go through a replica (S13)."""
    from paddle.distributed.auto_parallel.static.reshard_funcs import (
        p_to_r_reshard_func,
        p_to_s_reshard_func,
        r_to_s_reshard_func,
        s_to_r_reshard_func,
        s_to_s_reshard_func,
    )
    from paddle.distributed.auto_parallel.static.reshard_funcs.base_reshard_func import copy_dist_attr_with_new_member

    def through_replica(gather: Any) -> Any:
        def reshard(_: Any, source: Any, target: Any, value: Any, target_type: Any) -> Any:
            whole = copy_dist_attr_with_new_member(
                source, new_dims_mapping=[-1] * len(value.shape), new_partial_status={}
            )
            whole_type = paddle.base.libpaddle.pir.cvt_to_dist_type(value.type(), whole)
            value = gather().reshard(source, whole, value, whole_type)
            return r_to_s_reshard_func.RToSReshardFunction().reshard(whole, target, value, target_type)

        return reshard

    partial_to_shard = through_replica(p_to_r_reshard_func.PToRReshardFunction)
    patches.set(p_to_s_reshard_func.PToSReshardFunction, "reshard", partial_to_shard)
    patches.set(
        s_to_s_reshard_func.SToSReshardFunction, "reshard", through_replica(s_to_r_reshard_func.SToRReshardFunction)
    )
