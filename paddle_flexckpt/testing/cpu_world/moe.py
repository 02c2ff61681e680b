"""The kernels of mixture-of-experts routing, in numpy: the CPU build has none of them.

Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import _C_ops, _legacy_C_ops

from paddle_flexckpt.undo import Undo

from .arrays import to_array
from .kernels import group_of


def number_count(numbers: Any, upper_range: int) -> Any:
    """Return how often each expert was chosen; -1 (dropped) is not counted."""
    chosen = to_array(numbers).reshape(-1)
    chosen = chosen[(chosen >= 0) & (chosen < upper_range)]
    return paddle.to_tensor(np.bincount(chosen, minlength=upper_range).astype("int64"))


def assign_pos(x: Any, cum_count: Any, eff_num_len: Any) -> Any:
    """Positions of the tokens sorted by their expert, dropped tokens left out."""
    experts = to_array(x).reshape(-1)
    kept = np.flatnonzero(experts >= 0)
    return paddle.to_tensor(kept[np.argsort(experts[kept], kind="stable")].astype("int64"))


def limit_by_capacity(expert_count: Any, capacity: Any, n_worker: int) -> Any:
    """Cut the counts so that no expert gets more than its capacity; earlier workers come first."""
    wanted = to_array(expert_count).reshape(n_worker, -1)
    left = to_array(capacity)
    out = np.zeros_like(wanted)
    for worker in range(n_worker):
        out[worker] = np.minimum(wanted[worker], np.maximum(left, 0))
        left -= wanted[worker]
    return paddle.to_tensor(out.reshape(-1))


def prune_gate_by_capacity(gate_idx: Any, expert_count: Any, n_expert: int, n_worker: int) -> Any:
    """Mark with -1 the tokens that come after their expert is full."""
    gates = to_array(gate_idx)
    left = to_array(expert_count).reshape(-1)
    flat = gates.reshape(-1)
    for index, expert in enumerate(flat):
        if expert >= 0:
            if left[expert] > 0:
                left[expert] -= 1
            else:
                flat[index] = -1
    return paddle.to_tensor(gates)


def random_routing(prob: Any, topk_value: Any, topk_idx: Any) -> Any:
    """Drop the second expert of a token where twice its weight is below the token's random number."""
    limits, values, chosen = to_array(prob), to_array(topk_value), to_array(topk_idx)
    chosen[:, 1] = np.where(2 * values[:, 1] < limits, -1, chosen[:, 1])
    return paddle.to_tensor(chosen)


def global_scatter(x: Any, local_count: Any, global_count: Any, *attributes: Any) -> Any:
    """Send each row to the rank of its expert; the received rows are ordered by expert, then by rank."""
    group = _group_in(attributes)
    rows = to_array(x)
    mine = to_array(local_count).reshape(group.nranks, -1)
    theirs = to_array(global_count).reshape(group.nranks, -1)
    parts = np.split(rows, np.cumsum(mine.sum(1))[:-1])
    received = [
        np.split(part, np.cumsum(counts)[:-1])
        for part, counts in zip(group.process_group.exchange("global_scatter", parts), theirs)
    ]
    return paddle.to_tensor(np.concatenate([received[w][e] for e in range(mine.shape[1]) for w in range(group.nranks)]))


def global_gather(x: Any, local_count: Any, global_count: Any, *attributes: Any) -> Any:
    """Return the inverse of :func:`global_scatter`."""
    group = _group_in(attributes)
    theirs = to_array(global_count).reshape(group.nranks, -1)
    pieces = np.split(to_array(x), np.cumsum(theirs.T.reshape(-1))[:-1])
    # Pieces are ordered by expert, then by rank: rank w's pieces are every nranks-th one from w on.
    parts = [np.concatenate(pieces[w :: group.nranks]) for w in range(group.nranks)]
    return paddle.to_tensor(np.concatenate(group.process_group.exchange("global_gather", parts)))


def _group_in(attributes: tuple[Any, ...]) -> Any:
    """Return the group of a legacy operator call, whose attributes are name, value, name, value."""
    named = dict(zip(attributes[::2], attributes[1::2]))
    return group_of(named.get("ring_id", 0))


def patch_moe(patches: Undo) -> None:
    """Put the stand-ins where Paddle looks for its kernels."""
    from paddle.incubate.distributed.models.moe import moe_layer

    for kernel in (
        number_count,
        assign_pos,
        limit_by_capacity,
        prune_gate_by_capacity,
        random_routing,
        global_scatter,
        global_gather,
    ):
        patches.set(_C_ops, kernel.__name__, kernel)
        patches.set(_legacy_C_ops, kernel.__name__, kernel)
    # It asks for the NCCL version, of which a CPU build has none.
    patches.set(moe_layer, "check_nccl_version_for_p2p", lambda: None)
