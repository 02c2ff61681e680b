"""Stand in for kernels of model parallelism and of mixture-of-experts routing, which the CPU build does not have.

``c_embedding`` has a CPU kernel; the rest of what ``fleet.layers.mpu`` calls raises NotFound. These stand-ins compute
the same on tensors, with a backward pass, and communicate through the group's process group. Routing is in numpy.
Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import _C_ops, _legacy_C_ops
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.distributed import collective
from paddle.distributed.communication.reduce import _get_reduce_op
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_flexckpt.testing.cpu_world.process_group import empty_like, to_array
from paddle_flexckpt.undo import Undo


def group_of(ring_id: int) -> Any:
    """Return the communication group of a ring id."""
    return collective._get_group_map()[ring_id]


def gather_last_axis(x: Any, group: Any) -> Any:
    """Concatenate every member's ``x`` along the last axis."""
    parts = empty_like(x, group.nranks)
    group.process_group.all_gather(parts, x.contiguous(), True).wait()
    return paddle.concat(parts, axis=-1)


def c_identity(x: Any, *_: Any) -> Any:
    """Return a copy of ``x``."""
    return paddle.assign(x)


def c_split(x: Any, rank: int, nranks: int, ring_id: int = 0, use_model_parallel: bool = True) -> Any:
    """Return this rank's part of ``x``; like the CUDA kernel it splits the last axis."""
    size = x.shape[-1] // nranks
    with paddle.no_grad():
        return paddle.assign(x.detach()[..., rank * size : (rank + 1) * size])


class _Concat(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any, rank: int, nranks: int, ring_id: int) -> Any:
        ctx.place = (rank, nranks)
        return gather_last_axis(x, group_of(ring_id))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return c_split(grad, *ctx.place)


def c_concat(x: Any, rank: int, nranks: int, ring_id: int, *_: Any) -> Any:
    """Concatenate the members' ``x`` along the last axis."""
    return _Concat.apply(x, rank, nranks, ring_id)


class SplitWithRightBackward(PyLayer):
    """A replacement of ``mp_ops.c_split_eager``, which splits the last axis but gathers on axis 0 backward (U4)."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, group: Any, rank: int, nranks: int) -> Any:
        ctx.group = group
        return c_split(tensor, rank, nranks)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return gather_last_axis(grad, ctx.group)


class _SoftmaxWithCrossEntropy(PyLayer):
    """The cross entropy, computed in float32, of logits whose class axis is split between the members."""

    @staticmethod
    def forward(ctx: Any, logits: Any, label: Any, ignore_index: int, ring_id: int, rank: int) -> Any:
        process_group = group_of(ring_id).process_group
        scores = logits.detach().astype("float32")
        classes = scores.shape[-1]
        top = scores.max(-1, keepdim=True)
        process_group.all_reduce(top, core.ReduceOp.MAX)
        exponent = paddle.exp(scores - top)
        total = exponent.sum(-1, keepdim=True)
        process_group.all_reduce(total)
        softmax = exponent / total
        label = label.detach().astype("int64")
        local = label - rank * classes
        mine = paddle.logical_and(local >= 0, local < classes)
        local = paddle.where(mine, local, paddle.zeros_like(local))
        picked = paddle.take_along_axis(scores - top, local, axis=-1)
        picked = paddle.where(mine, picked, paddle.zeros_like(picked))
        process_group.all_reduce(picked)
        ignored = label == ignore_index
        loss = paddle.where(ignored, paddle.zeros_like(picked), paddle.log(total) - picked)
        ctx.save_for_backward(softmax, local, mine, ignored)
        ctx.dtype = logits.dtype
        return softmax.astype(logits.dtype), loss.astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Any) -> Any:
        softmax, local, mine, ignored = ctx.saved_tensor()
        hot = paddle.nn.functional.one_hot(local.squeeze(-1), softmax.shape[-1]) * mine.astype("float32")
        out = (softmax - hot) * grad.astype("float32")
        return paddle.where(ignored.expand_as(out), paddle.zeros_like(out), out).astype(ctx.dtype)


def c_softmax_with_cross_entropy(
    logits: Any, label: Any, ignore_index: int = -100, ring_id: int = 0, rank: int = 0, nranks: int = 0
) -> Any:
    """Compute the softmax and the cross entropy of logits whose class axis is split between the members."""
    return _SoftmaxWithCrossEntropy.apply(logits, label, ignore_index, ring_id, rank)


def all_reduce_(x: Any, ring_id: int = 0, op: int = 0) -> Any:
    """Reduce ``x`` over the members, in place."""
    group_of(ring_id).process_group.all_reduce(x, _get_reduce_op(op))
    return x


class _AllReduceSum(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any, ring_id: int) -> Any:
        return all_reduce_(paddle.assign(x), ring_id)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return paddle.assign(grad)


def mp_allreduce_sum(x: Any, ring_id: int = 0, *_: Any) -> Any:
    """Return the sum of the members' ``x``."""
    return _AllReduceSum.apply(x, ring_id)


def patch_kernels(patches: Undo, mend_split: bool) -> None:
    """Put the stand-ins where Paddle looks for its kernels; ``mend_split`` also mends ``c_split_eager`` (U4)."""
    for kernel in (c_identity, c_split, c_concat, c_softmax_with_cross_entropy, all_reduce_, mp_allreduce_sum):
        patches.set(_C_ops, kernel.__name__, kernel)
    # Some callers still use the old operator, whose attributes follow as name, value, name, value.
    patches.set(_legacy_C_ops, "c_identity", c_identity)
    # Absent before 3.1: there c_split_eager is a local class of _c_split and cannot be replaced.
    if mend_split and hasattr(mp_ops, "c_split_eager"):
        patches.set(mp_ops, "c_split_eager", SplitWithRightBackward)


# -- mixture of experts ------------------------------------------------------------------------------------------------


def number_count(numbers: Any, upper_range: int) -> Any:
    """Return how often each expert was chosen; -1 (dropped) is not counted."""
    chosen = to_array(numbers).reshape(-1)
    chosen = chosen[(chosen >= 0) & (chosen < upper_range)]
    return paddle.to_tensor(np.bincount(chosen, minlength=upper_range).astype("int64"))


def assign_pos(x: Any, cum_count: Any, eff_num_len: Any) -> Any:
    """Return the positions of the tokens sorted by their expert, dropped tokens left out."""
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
    """Put the stand-ins for routing where Paddle looks for its kernels."""
    from paddle.incubate.distributed.models.moe import moe_layer

    routing = (number_count, assign_pos, limit_by_capacity, prune_gate_by_capacity, random_routing)
    for kernel in (*routing, global_scatter, global_gather):
        patches.set(_C_ops, kernel.__name__, kernel)
        patches.set(_legacy_C_ops, kernel.__name__, kernel)
    # It asks for the NCCL version, of which a CPU build has none.
    patches.set(moe_layer, "check_nccl_version_for_p2p", lambda: None)
