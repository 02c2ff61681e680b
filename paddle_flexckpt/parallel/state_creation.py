"""States of semi-automatic optimizers, created without a step.

Paddle creates the states of ``dist.shard_optimizer`` in the first step, and when it is asked for them before, it takes
one on gradients of zero. Weight decay then changes the parameters, the beta powers are one step ahead, and gradients
are left that are defined and have no memory. What is created here is what the first step would create, and nothing else
changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paddle_flexckpt.parallel.fully_shard import fused_context, steps_on_buffers
from paddle_flexckpt.parallel.tensor_fusion import (
    fused_pieces,
    remember_prediction,
    trainable_parameters,
    uses_tensor_fusion,
)

# What a parameter group sets on the optimizer when it is stepped.
_GROUP_OPTIONS = {"_beta1", "_beta2", "_epsilon", "_lazy_mode", "_weight_decay"}


def create_states(optimizer: Any) -> None:
    """Creates the accumulators and master weights that the first step would create, and takes no step.

    Parameters, gradients and states that exist stay as they are. No rank talks to another. Frozen parameters, and
    parameters on a mesh that this rank is not on, get no states.

    Args:
        optimizer: What ``dist.shard_optimizer`` returned (stages 0 to 3, with tensor fusion too), or an optimizer of a
            model under ``paddle.distributed.fsdp.fully_shard``.

    Raises:
        ValueError: Tensor fusion without a mesh axis "dp"; an optimizer with parameter groups of a model under
            ``fully_shard``, which Paddle cannot step.
    """
    import paddle

    with paddle.no_grad():
        fully_sharded = _fully_sharded_buffers(optimizer)
        if fully_sharded:
            _create(optimizer, fully_sharded)
        elif uses_tensor_fusion(optimizer):
            _create_fused_states(optimizer)
        elif any(hasattr(parameter, "_need_shard_auto") for parameter in trainable_parameters(optimizer._param_groups)):
            _create_fully_shard_states(optimizer)
        else:
            _create_group_states(optimizer)


def _create(optimizer: Any, parameters: list[Any]) -> None:
    from paddle.base import framework

    optimizer._create_accumulators(framework.default_main_program().global_block(), parameters)


def _create_group_states(optimizer: Any) -> None:
    """Group by group, with the beta powers that the groups get in the first step.

    There every group sets the optimizer's betas when it is stepped, and that is after its states have been created: so
    its beta powers begin with the betas of the group before it.
    """
    inner = getattr(optimizer, "_inner_opt", optimizer)
    before = dict(vars(inner))
    try:
        for entry in optimizer._param_groups:
            _create(optimizer, trainable_parameters([entry]))
            if isinstance(entry, dict):
                inner._update_param_group(entry)
    finally:
        for name in _GROUP_OPTIONS & before.keys():
            setattr(inner, name, before[name])


def _create_fused_states(optimizer: Any) -> None:
    """States of this rank's part of each fused parameter, as one-dimensional as the step's own."""
    import paddle.distributed as dist
    from paddle.distributed.auto_parallel.api import _dtensor_from_local

    pieces = fused_pieces(optimizer, trainable_parameters(optimizer._param_groups))
    remember_prediction(optimizer, pieces)
    for piece in pieces:
        parameter = piece.parameter
        # The step makes such a tensor of every part. Its values are read where there are master weights.
        local = parameter._local_value().flatten()._slice(piece.flat_range.start, piece.flat_range.stop)
        part = _dtensor_from_local(local, parameter.process_mesh, [dist.Replicate()])
        part.name = parameter.name
        part.stop_gradient = False
        _create(optimizer, [part])


def _create_fully_shard_states(optimizer: Any) -> None:
    """``fully_shard`` without fused buffers: states are cut as their parameters are."""
    from paddle.base import framework
    from paddle.distributed.auto_parallel.fully_shard import shard_accumulators

    if isinstance(optimizer._parameter_list[0], dict):
        raise ValueError(
            "an optimizer with parameter groups of a model under fully_shard: Paddle does not shard its states. "
            "Remedy: one list of parameters, and weight decay by apply_decay_param_fun"
        )
    # It works once for an optimizer: what it is not given then gets no states.
    parameters_and_grads = [(parameter, None) for parameter in trainable_parameters(optimizer._param_groups)]
    shard_accumulators(parameters_and_grads, optimizer, framework.default_main_program().global_block())


def under_fully_shard(parameters: Iterable[Any]) -> bool:
    """Whether parameters are those of a model under ``fully_shard`` on a mesh, fused or not."""
    parameters = list(parameters)
    return steps_on_buffers(parameters) or any(hasattr(parameter, "_need_shard_auto") for parameter in parameters)


def _fully_sharded_buffers(optimizer: Any) -> list[Any]:
    """This rank's parts of the buffers of ``fully_shard``, which any step updates in place of the parameters."""
    if not steps_on_buffers(trainable_parameters(optimizer._param_groups)):
        return []
    groups = fused_context().buffer_manager.buffer_groups
    buffers = [group.params_buffer.data_buffer for group in groups]
    return [buffer for buffer in buffers if not buffer.stop_gradient]
