"""Create states of optimizers without a step, above all those of semi-automatic ones.

Paddle creates the states of ``dist.shard_optimizer`` in the first step. If they are requested earlier, it makes a step
on gradients of zero. Weight decay then changes the parameters, the beta powers are one step ahead, and gradients are
left that are defined and have no memory. The functions here create the states that the first step would create, and
change nothing else. Tested in tests/semi_auto/test_state_creation.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paddle_flexckpt.parallel.slices import buffer_context, parameter_name, steps_on_buffers
from paddle_flexckpt.parallel.tensor_fusion import (
    buffer_pieces,
    remember_prediction,
    trainable_parameters,
    uses_tensor_fusion,
)

# The attributes of an optimizer that the creation of states changes.
_TABLES = ("_accumulators", "_accumulators_holder", "_already_create_accumulator", "_master_weights", "_opti_name_list")
# Whether states are created at all when they are requested.
_may_create = contextvars.ContextVar("creating", default=True)


@contextlib.contextmanager
def no_new_states() -> Iterator[None]:
    """Describe optimizers by the states that they have, and create none, for the time of a with statement."""
    token = _may_create.set(False)
    try:
        yield
    finally:
        _may_create.reset(token)


def create_states(optimizer: Any) -> None:
    """Create the accumulators and master weights that the first step would create, and take no step.

    It serves ``dist.shard_optimizer`` (stages 0 to 3, with tensor fusion too), and optimizers of a model under
    ``paddle.distributed.fsdp.fully_shard``. Parameters, gradients and states that exist stay as they are. No rank talks
    to another. Frozen parameters, and parameters on a mesh that this rank is not on, get no states.

    Raises:
        ValueError: Tensor fusion without a mesh axis "dp"; an optimizer with parameter groups of a model under
            ``fully_shard``, which Paddle cannot step; the argument of ``set_state_dict`` lacks a state. Nothing has
            been created then.
    """
    import paddle

    with paddle.no_grad(), _all_or_nothing(optimizer):
        parameters = trainable_parameters(optimizer._param_groups)
        buffers = _fully_sharded_buffers(parameters)
        if buffers:
            _create(optimizer, buffers)
        elif uses_tensor_fusion(optimizer):
            _create_buffer_states(optimizer, parameters)
        elif any(hasattr(parameter, "_need_shard_auto") for parameter in parameters):
            _create_fully_shard_states(optimizer, parameters)
        else:
            _create_group_states(optimizer)


def create_dense_states(optimizer: Any, parameters: Iterable[Any]) -> None:
    """Create the states of an optimizer whose first step creates them itself, as that step would.

    Raises:
        ValueError: The argument of ``set_state_dict`` lacks a state. Nothing has been created then.
    """
    groups = [entry for entry in getattr(optimizer, "_param_groups", None) or () if isinstance(entry, dict)]
    number = {parameter_name(p.name): i for i, entry in enumerate(groups) for p in entry["params"]}
    by_group: dict[int | None, list[Any]] = {}
    for parameter in parameters:
        by_group.setdefault(number.get(parameter_name(parameter.name)), []).append(parameter)
    with _all_or_nothing(optimizer), _same_options(optimizer):
        for group, members in by_group.items():
            # With a group come its settings: beta powers begin with the group's betas.
            _create(optimizer, members if group is None else {**groups[group], "params": members})


def _create(optimizer: Any, parameters: list[Any] | dict[str, Any]) -> None:
    from paddle.base import framework

    if _may_create.get():
        optimizer._create_accumulators(framework.default_main_program().global_block(), parameters)


@contextlib.contextmanager
def _all_or_nothing(optimizer: Any) -> Iterator[None]:
    """Undo the creation of an optimizer's states if the argument of ``set_state_dict`` turns out to be incomplete.

    Paddle removes the given states from that argument one by one, and stops at a missing one. But if all given states
    are used up, it silently initializes the rest.
    """
    from paddle.base import unique_name

    inner = getattr(optimizer, "_inner_opt", optimizer)
    if not getattr(inner, "_accumulators_holder", None):
        yield
        return
    given, accumulators, counters = inner._accumulators_holder, inner._accumulators, unique_name.generator.ids
    tables = {name: copy.copy(getattr(inner, name)) for name in _TABLES if hasattr(inner, name)}
    by_parameter = {name: dict(tensors) for name, tensors in accumulators.items()}
    entries, before, attributes = given.copy(), counters.copy(), set(vars(inner))
    cause: Exception | None = None
    lacking: list[str] = []
    try:
        yield
    except Exception as error:  # put back, and raised again below
        cause = error
    else:
        # Once all given states are used, Paddle no longer looks for missing ones.
        for name, tensors in accumulators.items():
            new = [tensor.name for key, tensor in tensors.items() if key not in by_parameter.get(name, ())]
            lacking.extend(name for name in new if name not in entries)
    if cause is None and not lacking:
        return
    _put_back(given, entries)
    _put_back(accumulators, by_parameter)
    for name in tables.keys() - {"_accumulators", "_accumulators_holder"}:
        setattr(inner, name, tables[name])
    for name in vars(inner).keys() - attributes:
        delattr(inner, name)  # fully_shard notes there that all states exist
    _put_back(counters, before)
    if cause is not None and not isinstance(cause, AssertionError):
        raise cause
    raise ValueError(
        f"{type(inner).__name__}: what set_state_dict() was given lacks a state that the first step needs: "
        f"{cause or ', '.join(lacking[:3])}. It has {len(entries)} entries, such as {sorted(entries)[:3]}. "
        "Remedy (FC204): give it the state of all trainable parameters, under the names that this process has for "
        "them; or none, and load sharded_state_dict()"
    ) from cause


def _put_back(table: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(before)


@contextlib.contextmanager
def _same_options(optimizer: Any) -> Iterator[None]:
    """Restore the settings that a parameter group changes on its optimizer, such as betas.

    Paddle has settings that a group leaves out in a table of defaults: ``beta1`` is set as ``_beta1``.
    """
    inner = getattr(optimizer, "_inner_opt", optimizer)
    options = (f"_{name}" for name in getattr(inner, "_default_dict", ()))
    before = {name: vars(inner)[name] for name in options if name in vars(inner)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(inner, name, value)


def _create_group_states(optimizer: Any) -> None:
    """Create states group by group, with the beta powers of the first step of ``dist.shard_optimizer``.

    There every group sets the optimizer's betas when it is stepped, and that is after its states have been created: so
    its beta powers begin with the betas of the group before it.
    """
    inner = getattr(optimizer, "_inner_opt", optimizer)
    with _same_options(optimizer):
        for entry in optimizer._param_groups:
            _create(optimizer, trainable_parameters([entry]))
            if isinstance(entry, dict):
                inner._update_param_group(entry)


def _create_buffer_states(optimizer: Any, parameters: list[Any]) -> None:
    """Create states of this rank's part of each fused parameter, as one-dimensional as the step's own."""
    import paddle.distributed as dist
    from paddle.distributed.auto_parallel.api import _dtensor_from_local

    pieces = buffer_pieces(optimizer, parameters)
    if not _may_create.get():
        return
    remember_prediction(optimizer, pieces, parameters)
    for piece in pieces:
        parameter = piece.parameter
        # The step makes such a tensor of every part. Its values are read where there are master weights.
        local = parameter._local_value().flatten()._slice(piece.flat_range.start, piece.flat_range.stop)
        part = _dtensor_from_local(local, parameter.process_mesh, [dist.Replicate()])
        part.name = parameter.name
        part.stop_gradient = False
        _create(optimizer, [part])


def _create_fully_shard_states(optimizer: Any, parameters: list[Any]) -> None:
    """Create states under ``fully_shard`` without fused buffers, split as their parameters are."""
    from paddle.base import framework
    from paddle.distributed.auto_parallel.fully_shard import shard_accumulators

    if isinstance(optimizer._parameter_list[0], dict):
        raise ValueError(
            "an optimizer with parameter groups of a model under fully_shard: Paddle does not shard its states. "
            "Remedy (FC807): one list of parameters, and weight decay by apply_decay_param_fun"
        )
    # It works once for an optimizer: parameters that are not passed get no states.
    if not _may_create.get():
        return
    block = framework.default_main_program().global_block()
    shard_accumulators([(parameter, None) for parameter in parameters], optimizer, block)


def under_fully_shard(parameters: Iterable[Any]) -> bool:
    """Return whether parameters belong to a model under ``fully_shard`` on a mesh, fused or not."""
    parameters = list(parameters)
    return steps_on_buffers(parameters) or any(hasattr(parameter, "_need_shard_auto") for parameter in parameters)


def _fully_sharded_buffers(parameters: list[Any]) -> list[Any]:
    """Return this rank's parts of the buffers of ``fully_shard``, which a step updates in place of parameters."""
    if not steps_on_buffers(parameters):
        return []
    groups = buffer_context().buffer_manager.buffer_groups
    buffers = [group.params_buffer.data_buffer for group in groups]
    return [buffer for buffer in buffers if not buffer.stop_gradient]
