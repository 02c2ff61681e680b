"""Digests of the *global* tensors of a training state, made without any code of the checkpoint library.

Whole tensors are put together with plain `paddle.distributed.all_gather` along the axis that Paddle's own layers
declare, and hashed.  Equal digests mean: equal bits, whatever the tensor-parallel degree.
"""

from __future__ import annotations

import hashlib

import numpy as np
import paddle
import paddle.distributed as dist
from model import LanguageModel, split_axis

# Names of the states of AdamW in Optimizer._accumulators.
ADAMW_STATES = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")


def _whole_tensor(name: str, tensor: paddle.Tensor, axis: int | None, model: LanguageModel) -> np.ndarray:
    """Gathers a tensor over the tensor-parallel group of the model; replicas must agree bit for bit."""
    if model.group.nranks == 1:
        return tensor.numpy()
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, tensor.detach(), group=model.group)
    arrays = [part.numpy() for part in parts]
    if axis is not None:
        return np.concatenate(arrays, axis=axis)
    for rank, array in enumerate(arrays):
        if array.tobytes() != arrays[0].tobytes():
            raise RuntimeError(f"{name}: the replicas of tensor-parallel ranks 0 and {rank} differ")
    return arrays[0]


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def state_digests(model: LanguageModel, optimizer: paddle.optimizer.AdamW) -> dict[str, str]:
    """Digests every parameter and every AdamW state as a global tensor.

    Args:
        model: The tensor-parallel model.
        optimizer: Its optimizer, with the states already created.

    Returns:
        SHA-256 by name, for example ``head.weight`` and ``head.weight.moment1``.

    Raises:
        RuntimeError: If replicas differ, or if the ranks do not agree about a global tensor.
    """
    digests = {}
    for name, param in model.named_parameters():
        digests[name] = _digest(_whole_tensor(name, param, split_axis(param), model))
        for state in ADAMW_STATES:
            tensor = optimizer._accumulators[state][param.name]
            axis = split_axis(param) if list(tensor.shape) == list(param.shape) else None
            key = f"{name}.{state}"
            digests[key] = _digest(_whole_tensor(key, tensor, axis, model))
    if dist.get_world_size() > 1:
        everyone: list[dict[str, str]] = []
        dist.all_gather_object(everyone, digests)
        if any(other != digests for other in everyone):
            raise RuntimeError("the ranks of this world do not agree about the global tensors")
    return digests
