"""What ``dist.to_static`` and its ``DistModel`` lack on a CPU: communicators (S15), and some reshards (S13).

A communicator belongs to a set of ranks and lasts as long as the process: upstream's registry of them can neither drop
one nor take another of the same number. So a group's number follows from its ranks here, and jobs share it.
Tested in tests/semi_auto/test_static.py.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import _legacy_C_ops
from paddle.base import core
from paddle.distributed.auto_parallel.static import process_group

from paddle_flexckpt.undo import Undo

#: Above the numbers that fleet gives its groups.
_FIRST_NUMBER = 1 << 16
_TIMEOUT_SECONDS = 60

# A communicator uses its store for as long as it is used itself.
_stores: dict[int, Any] = {}


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
