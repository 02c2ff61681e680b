"""The gradient reducer of ``paddle.DataParallel`` in Python.

The native ``EagerReducer`` is C++ and takes only a native process group, that is a real gloo group, with all that is
wrong with those (U1, U2) and fourteen file descriptors that are never returned. This one averages the gradients when a
backward pass ends. Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from paddle_flexckpt.undo import Undo

from .process_group import MeshProcessGroup


class Reducer:
    """Has the interface of ``core.EagerReducer``.

    1. The forward pass of the wrapper calls :meth:`prepare_for_backward` (not under ``no_sync``).
    2. The first parameter whose gradient is ready asks to be called at the end of this backward pass.
    3. There, each gradient is averaged over the group, in the order of the parameters.

    A parameter that got no gradient on this rank counts as zero when another rank has one, and is left alone when none
    has.

    Args:
        parameters: the trainable parameters, in the same order on every rank.
        is_sparse: per parameter, whether its gradient is sparse.
        process_group: the group of the replicas.
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
