"""Tensors to numpy arrays and back, in place, and the reduction of arrays in rank order.

Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core

Op = core.ReduceOp

# numpy has no bfloat16: Paddle hands its bits out as uint16, and takes uint16 back as bfloat16.
HALF = (paddle.float16, paddle.bfloat16)


def to_array(tensor: Any) -> np.ndarray:
    """Return a contiguous copy of a tensor's values (bfloat16 as its uint16 bits)."""
    with paddle.no_grad():
        tensor = tensor.detach()
        return np.array((tensor if tensor.is_contiguous() else tensor.contiguous()).numpy())


def copy_into(target: Any, source: Any) -> None:
    """Copy ``source`` into ``target`` in place: writes go through views and into fused buffers.

    ``set_value`` and ``assign`` would give the target a new storage and so cut it off from the buffer that it is a part
    of.
    """
    with paddle.no_grad():
        if list(source.shape) != list(target.shape):
            source = source.reshape(target.shape)
        (target if target.stop_gradient else target.detach()).copy_(source, True)


def put_array(target: Any, array: np.ndarray) -> None:
    """Copy an array of a tensor of the same dtype (see :func:`to_array`) into ``target``, in place."""
    with paddle.no_grad():
        source = paddle.to_tensor(np.ascontiguousarray(array), place=paddle.CPUPlace())
        if source.dtype != target.dtype:
            same_size = source.element_size() == target.element_size()
            source = source.view(target.dtype) if same_size else source.astype(target.dtype)
    copy_into(target, source)


def reduce_arrays(arrays: Sequence[np.ndarray], dtype: Any, op: Any) -> Any:
    """Reduce one array per rank, in the order given.

    Half precision is accumulated in float32 and rounded once (gloo's own float16 sum is inf: U2). The result is a
    tensor of ``dtype``.

    Raises:
        ValueError: an operation that is not one of SUM, AVG, MAX, MIN, PRODUCT.
    """
    total = _accumulator(arrays[0], dtype)
    for array in arrays[1:]:
        total = _fold(total, _accumulator(array, dtype), op)
    if op == Op.AVG:
        total = (total / len(arrays)).astype(total.dtype)
    return paddle.to_tensor(total, place=paddle.CPUPlace()).astype(dtype)


def _accumulator(array: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype not in HALF:
        return array
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _fold(total: np.ndarray, array: np.ndarray, op: Any) -> np.ndarray:
    if op in (Op.SUM, Op.AVG):
        return np.logical_or(total, array) if total.dtype == bool else total + array
    if op == Op.MAX:
        return np.maximum(total, array)
    if op == Op.MIN:
        return np.minimum(total, array)
    if op == Op.PRODUCT:
        return total * array
    raise ValueError(f"the CPU world cannot reduce with {op}")
