"""The kernels of model parallelism, which the CPU build does not have.

``c_embedding`` has a CPU kernel; the rest of what ``fleet.layers.mpu`` calls raises NotFound. These stand-ins compute
the same on tensors, with a backward pass, and communicate through the group's process group.
Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import _C_ops, _legacy_C_ops
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.distributed import collective
from paddle.distributed.communication.reduce import _get_reduce_op
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_flexckpt.undo import Undo

from .process_group import empty_like


def group_of(ring_id: int) -> Any:
    """Return the communication group of a ring id."""
    return collective._get_group_map()[ring_id]


def gather_last_axis(x: Any, group: Any) -> Any:
    """Concatenate every member's ``x`` along the last axis."""
    parts = empty_like(x, group.nranks)
    group.process_group.all_gather(parts, x.contiguous(), True).wait()
    return paddle.concat(parts, axis=-1)


def c_identity(x: Any, *_: Any) -> Any:
    return paddle.assign(x)


def c_split(x: Any, rank: int, nranks: int, ring_id: int = 0, use_model_parallel: bool = True) -> Any:
    """This rank's part of ``x``; like the CUDA kernel it splits the last axis."""
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
    return _Concat.apply(x, rank, nranks, ring_id)


class SplitWithRightBackward(PyLayer):
    """``mp_ops.c_split_eager``, whose own backward gathers on axis 0 although its forward split the last one (U4)."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, group: Any, rank: int, nranks: int) -> Any:
        ctx.group = group
        return c_split(tensor, rank, nranks)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return gather_last_axis(grad, ctx.group)


class _SoftmaxWithCrossEntropy(PyLayer):
    """Cross entropy over logits whose class axis is split between the members. Computed in float32."""

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
    return _SoftmaxWithCrossEntropy.apply(logits, label, ignore_index, ring_id, rank)


def all_reduce_(x: Any, ring_id: int = 0, op: int = 0) -> Any:
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
    return _AllReduceSum.apply(x, ring_id)


def patch_kernels(patches: Undo, mend_split: bool) -> None:
    """Put the stand-ins where Paddle looks for its kernels.

    Args:
        patches: records the changes.
        mend_split: also replace ``c_split_eager``; False keeps upstream's wrong backward (U4).
    """
    for kernel in (c_identity, c_split, c_concat, c_softmax_with_cross_entropy, all_reduce_, mp_allreduce_sum):
        patches.set(_C_ops, kernel.__name__, kernel)
    # Some callers still use the old operator, whose attributes follow as name, value, name, value.
    patches.set(_legacy_C_ops, "c_identity", c_identity)
    # Absent before 3.1: there c_split_eager is a local class of _c_split and cannot be replaced.
    if mend_split and hasattr(mp_ops, "c_split_eager"):
        patches.set(mp_ops, "c_split_eager", SplitWithRightBackward)
