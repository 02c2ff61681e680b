"""Describe optimizers: accumulators and master weights, like their parameters.

Names are the in-tree ones: ``{parameter}.{accumulator}_0`` and ``{parameter}.w_0`` for the float32 master weight. They
come from the optimizer's own tables, not from parsing tensor names, so an optimizer with a ``name``, or with unknown
accumulators, is described like any other. Paddle's wrappers (HybridParallelOptimizer, HeterParallelOptimizer) forward
missing attributes, so that the inner optimizer's method is called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

from paddle_flexckpt.dist_tensor import is_dist_tensor
from paddle_flexckpt.optimizer_states import HISTORY, MASTER, SCALARS
from paddle_flexckpt.parallel.experts import check_experts
from paddle_flexckpt.parallel.slices import (
    StateTables,
    belongs_to,
    buffer_tables,
    flat_shard,
    identity,
    is_small,
    parameter_name,
    refuse_history,
    shaped_view,
    slice_ranges,
    stepped_parameters,
    steps_on_buffers,
    wrapper_of_optimizer,
)
from paddle_flexckpt.parallel.state_creation import create_dense_states, create_states, under_fully_shard
from paddle_flexckpt.parallel.tensor_fusion import parameters_in
from paddle_flexckpt.sharded_weight import (
    FusedAxis,
    ShardedStateDict,
    ShardedWeight,
    create_sharded_weight_with_new_local,
    make_replicated_sharded_weight,
)

LOOKAHEAD_STEP = "lookahead_step"
_OPTIMIZER_NAMES = ("_inner_opt", "inner_opt", "_optim", "_optimizer", "optimizer")


class OverInstance:
    """A method that takes precedence over an instance attribute of the same name that Paddle has set.

    Stage 3 of Paddle 3.2 and later sets a ``sharded_state_dict`` of its own on every optimizer that it is given, before
    or after ``install()``. That attribute stays, and is in effect again after ``uninstall()``. A user's own is
    respected.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = function.__name__
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._function
        own = vars(instance).get(self._name)
        if own is not None and not str(getattr(own, "__module__", "")).startswith("paddle."):
            return own
        return MethodType(self._function, instance)

    # Only a descriptor with __set__ precedes the attributes of an instance.
    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        if vars(instance).pop(self._name, None) is None:
            raise AttributeError(self._name)


class OptimizerMixin:
    """The description of an optimizer."""

    @OverInstance
    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the optimizer's state as shards.

        Accumulators that do not exist yet, because the optimizer has not stepped, are created with their initial
        values for every trainable parameter; nothing else changes. So the state of a fresh optimizer can be loaded.

        Args:
            model_sharded_state_dict: The model's ``sharded_state_dict()``, which has the split of each parameter.

        Returns:
            Names to ShardedWeights whose tensors are the live ones. A tied parameter's state is under the first of its
            names in sorted order, with the others as aliases.

        Raises:
            ValueError: The optimizer has a parameter that the model's dict lacks, or a state whose shape is neither its
                parameter's, apart from joined or split axes, nor a single number.
        """
        wrapper = wrapper_of_optimizer(self)
        # Stage 3 replaces the parameters by slices during a step, and before the first one.
        listed = getattr(wrapper, "_ori_parameter_list", self._parameter_list)
        names = keys_by_parameter_name(model_sharded_state_dict, parameters_in(listed))
        if wrapper is not None:
            check_experts(dict.fromkeys(names, wrapper._group), model_sharded_state_dict, names)
        trainable = [p for p in parameters_in(self._parameter_list) if not p.stop_gradient]
        if under_fully_shard(trainable):
            require_described(trainable, names)
            create_states(self)
        else:
            with on_host(self):
                create_accumulators(self, list(stepped_parameters(self, trainable)), names)
        tables = buffer_tables(self)
        if tables is not None:
            return describe_states(tables, model_sharded_state_dict, names, tables.ranges)
        ranges = slice_ranges(self, model_sharded_state_dict, names)
        stepped = _stage3_tables(self, trainable) if any(is_small(p) for p in trainable) else self
        return describe_states(stepped, model_sharded_state_dict, names, ranges)


class MixPrecisionMixin:
    """A MixPrecisionOptimizer, which forwards attributes that it does not have. Stage 3 sets its attributes on it."""

    @OverInstance
    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the inner optimizer; if stage 3 put its slices here, this one, like :class:`OptimizerMixin`."""
        if "update_slice" in vars(self):
            return OptimizerMixin.sharded_state_dict(self, model_sharded_state_dict)
        return self._inner_opt.sharded_state_dict(model_sharded_state_dict)


class LookAheadMixin:
    """A LookAhead: the inner optimizer, the slow weights, and the number of steps, which decides when they mix."""

    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the states like :class:`OptimizerMixin`; the number of steps has the key :data:`LOOKAHEAD_STEP`."""
        import paddle

        names = keys_by_parameter_name(model_sharded_state_dict, parameters_in(self._parameter_list))
        create_accumulators(self, [p for p in parameters_in(self._parameter_list) if not p.stop_gradient], names)
        if self._global_step_var is None:  # as the first step makes it
            name = paddle.base.unique_name.generate("lookahead_step")
            self._global_step_var = paddle.static.create_global_var([1], 0, "int32", persistable=True, name=name)
        inner = describe_optimizer(self.inner_optimizer, model_sharded_state_dict)
        steps = make_replicated_sharded_weight(LOOKAHEAD_STEP, self._global_step_var)
        return {**inner, **describe_states(self, model_sharded_state_dict, names), LOOKAHEAD_STEP: steps}


class LBFGSMixin:
    """An LBFGS. Its history, in lists over all parameters laid end to end, is extra state."""

    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Raise ValueError: the lists have the length of the steps so far, which a fresh job cannot know."""
        raise ValueError(
            "the state of LBFGS cannot be described as shards: it is lists of any length, of all parameters end to "
            "end. Remedy (FC805): save the model without its optimizer, and "
            "collect_extra_state(lbfgs=optimizer.state_dict()); after the load, "
            "optimizer.set_state_dict(restore_extra_state(load_extra_state(path)).more['lbfgs'])"
        )

    def set_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        """Restore a ``state_dict()`` on the device of the parameters; Paddle's own method silently leaves it out.

        Raises:
            ValueError: It is the state of another optimizer.
        """
        if set(state_dict) != {"state"}:
            raise ValueError(
                f"LBFGS.set_state_dict: expected the one key 'state'; got {sorted(map(str, state_dict))[:10]}. "
                "Remedy (FC805): pass what the state_dict() of an LBFGS gave"
            )
        place = next(iter(parameters_in(self._parameter_list))).place

        def copied(value: Any) -> Any:
            if isinstance(value, list):
                return [copied(each) for each in value]
            return value._copy_to(place, True) if hasattr(value, "_copy_to") else value

        self.state.clear()
        self.state.update({name: copied(value) for name, value in state_dict["state"].items()})


def keys_by_parameter_name(model: Mapping[str, ShardedWeight], parameters: Iterable[Any]) -> dict[str, list[str]]:
    """Return structured names, sorted, by the name of the parameter behind them.

    Two networks that are made under ``unique_name.guard()`` have parameters of the same names. So of several tensors of
    one name only the optimizer's own parameter counts.

    Args:
        model: The model's ``sharded_state_dict()``.
        parameters: The optimizer's parameters.

    Raises:
        ValueError: Two of the optimizer's parameters have one name.
    """
    own: dict[str, Any] = {}
    for parameter in parameters:
        if own.setdefault(parameter_name(parameter.name), parameter) is not parameter:
            raise ValueError(
                f"two parameters of the optimizer have the name {parameter.name!r}, for which Paddle keeps one state: "
                "each step of one changes the other's. Remedy (FC805): make all networks of an optimizer under one "
                "unique_name.guard(), or an optimizer for each"
            )
    found: dict[str, list[str]] = {}
    for key in sorted(model):
        found.setdefault(parameter_name(model[key].local_tensor.name), []).append(key)
    names: dict[str, list[str]] = {}
    for name, keys in found.items():
        matches = {key: belongs_to(model[key], own[name]) if name in own else None for key in keys}
        certain = [key for key in keys if matches[key] is True]
        possible = [key for key in keys if matches[key] is None]
        # The optimizer's own tensor, or else the only candidate.
        if certain or len({identity(model[key]) for key in possible}) == 1:
            names[name] = certain or possible
    return names


def on_host(optimizer: Any) -> AbstractContextManager[None]:
    """Return a context in which new tensors are in host memory, if an optimizer of group sharding has them there."""
    if not getattr(optimizer, "offload", False):
        return nullcontext()
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_utils import device_guard

    return device_guard()  # type: ignore[no-any-return]


def _stage3_tables(optimizer: Any, parameters: Collection[Any]) -> StateTables:
    """Return the tables of a stage-3 optimizer with offload, with the masters of small half-precision parameters."""
    masters = {
        parameter.name: parameter.master_weight
        for parameter in parameters
        if is_small(parameter) and parameter.dtype != parameter.master_weight.dtype
    }
    return StateTables(True, getattr(optimizer, "_name", None), optimizer._accumulators, masters)


def require_described(parameters: Iterable[Any], names: Mapping[str, list[str]]) -> None:
    """Check that the model's dict has all parameters.

    Raises:
        ValueError: It lacks some.
    """
    parameters = list(parameters)
    if steps_on_buffers(parameters):
        return  # describe_states searches the buffers for it; the optimizer may have the original parameters
    lost = sorted(p.name for p in parameters if parameter_name(p.name) not in names)
    if lost:
        raise ValueError(
            f"the optimizer has parameters that are not in model_sharded_state_dict: {lost[:10]}. Remedy (FC805): pass "
            "the sharded_state_dict() of the model whose parameters the optimizer was given"
        )


def create_accumulators(optimizer: Any, parameters: list[Any], names: Mapping[str, list[str]]) -> None:
    """Create the accumulators that the first step would create, and take no step.

    Raises:
        ValueError: A parameter is not in the model's dict, or the argument of ``set_state_dict`` lacks a state.
    """
    require_described(parameters, names)
    create_dense_states(optimizer, parameters)


def describe_states(
    optimizer: Any,
    model: Mapping[str, ShardedWeight],
    names: Mapping[str, list[str]],
    flat_ranges: Mapping[str, slice] | None = None,
    owned: Collection[str] | None = None,
) -> ShardedStateDict:
    """Describe all accumulators and master weights of the optimizer that steps, or those of ``owned`` parameters.

    Args:
        optimizer: The optimizer, or its tables of states.
        model: The model's ``sharded_state_dict()``.
        names: The model's keys by name of parameter.
        flat_ranges: By name of parameter, the flattened range of its local box that this rank has states of. Storage
            beyond the range is padding. Parameters without one have states of their own shape.
        owned: Names of the only parameters whose states are described; None: all.

    Raises:
        ValueError: A state's parameter is not in the model, or its shape does not fit.
    """
    if flat_ranges:
        refuse_history(optimizer)
    # Stage 3 makes masters for every half-precision parameter; without multi_precision no step uses them.
    masters = getattr(optimizer, "_master_weights", {}) if getattr(optimizer, "_multi_precision", True) else {}
    owner = {master.name: name for name, master in masters.items()}
    raw_names_are_unique = _one_stage()
    sharded: ShardedStateDict = {}

    def add(raw_parameter: str, suffix: str, raw_suffix: str, tensor: Any, scalar: bool) -> None:
        parameter = parameter_name(raw_parameter)
        if parameter not in names:
            raise ValueError(
                f"the optimizer has a state for {parameter!r}, which is not in model_sharded_state_dict. "
                "Remedy (FC805): pass the sharded_state_dict() of the model whose parameters the optimizer steps"
            )
        if owned is not None and parameter not in owned:
            return
        keys = names[parameter]
        flat = (flat_ranges or {}).get(parameter)
        if flat is not None and flat.stop <= flat.start:
            return  # this rank's part of the buffer has nothing of the parameter except padding
        state = _describe(keys[0], suffix, tensor, model[keys[0]], scalar, flat)
        # A pipeline stage knows names of a tied parameter that are missing from its own dict.
        others = dict.fromkeys((*keys[1:], *getattr(model[keys[0]], "aliases", ())))
        state.aliases = tuple(f"{other}.{suffix}" for other in others)
        state.raw_names = (f"{parameter}_{raw_suffix}",) if raw_names_are_unique else ()
        sharded[state.key] = state

    for raw_name, tensors in optimizer._accumulators.items():
        accumulator = strip_optimizer_name(raw_name, getattr(optimizer, "_name", None))
        for raw_parameter, tensor in tensors.items():
            # States of half-precision parameters are kept under the names of the master weights.
            parameter = owner.get(raw_parameter, raw_parameter)
            add(parameter, f"{accumulator}_0", f"{raw_name}_0", tensor, accumulator in SCALARS)
    for parameter, tensor in masters.items():
        add(parameter, MASTER, "fp32_master_0", tensor, False)
    return sharded


def _one_stage() -> bool:
    """Return whether every rank builds the same layers, so that their numbers mean the same on all of them."""
    from paddle.distributed.fleet.base import topology

    hcg = topology._HYBRID_PARALLEL_GROUP
    return hcg is None or int(hcg.get_pipe_parallel_world_size()) == 1


def strip_optimizer_name(accumulator: str, optimizer_name: str | None) -> str:
    """Return an accumulator's name without the name that the optimizer was given."""
    prefix = f"{optimizer_name}_"
    return accumulator[len(prefix) :] if optimizer_name and accumulator.startswith(prefix) else accumulator


def _describe(
    parameter: str, suffix: str, tensor: Any, reference: ShardedWeight, scalar: bool, flat: slice | None
) -> ShardedWeight:
    key = f"{parameter}.{suffix}"
    shape, expected = tuple(int(n) for n in tensor.shape), tuple(reference.local_shape)
    if flat is None and is_dist_tensor(tensor):
        # Stages 1 and 2 split states whose parameter is whole: a state has placements of its own.
        return make_replicated_sharded_weight(key, tensor)
    # An integer of one element is a counter (ASGD's m). Its parameter may have one element here and more on other
    # ranks, so shapes do not tell.
    if scalar or (shape in ((), (1,)) and "int" in str(tensor.dtype)):
        return make_replicated_sharded_weight(key, tensor)
    if flat is not None:
        return describe_flat(key, tensor, reference, flat)
    if shape == expected:
        return create_sharded_weight_with_new_local(key, tensor, reference)
    if getattr(reference, "dist_tensor", None) is not None and shape == tuple(reference.global_shape):
        # Paddle leaves the states of a parameter whose first axis has extent 1 dense, on every rank.
        return make_replicated_sharded_weight(key, tensor)
    if shape[1:] == expected and (shape[0] != 1 or suffix == f"{HISTORY}_0"):
        # One copy of the parameter's shape per index of a leading axis of the optimizer's own (ASGD's history).
        made = ShardedWeight(key, tensor, shape, (shape[0], *reference.global_shape), (0, *reference.global_offset))
        rule = getattr(reference, "fused", None)
        if rule is not None:
            # The parameter's statement is about other axes, so it counts under one degree.
            made.fused = FusedAxis(rule.axis % len(reference.global_shape) + 1, None)
        return made
    if tensor.size == 1:
        return make_replicated_sharded_weight(key, tensor)
    if _splits_axes(shape, expected) or _splits_axes(expected, shape):
        # Experts in one parameter: [E, H, I] for training, [E * H, I] in the model's dict.
        return create_sharded_weight_with_new_local(key, shaped_view(f"state {key!r}", tensor, expected), reference)
    raise ValueError(
        f"state {key!r} has shape {list(shape)}; expected {list(expected)} as its parameter, the same with axes joined "
        "or split, or a single number"
    )


def _splits_axes(shape: Sequence[int], joined: Sequence[int]) -> bool:
    """Return whether a shape is another one with some axes split into several, with the same order of elements."""
    axes = [extent for extent in shape if extent != 1]
    for extent in joined:
        count = next((n for n in range(len(axes) + 1) if math.prod(axes[:n]) == extent), None)
        if count is None:
            return False
        axes = axes[count:]
    return not axes


def describe_flat(key: str, tensor: Any, reference: ShardedWeight, flat: slice) -> ShardedWeight:
    """Describe a state that is one flattened range of its parameter's box, with padding behind it."""
    size = int(flat.stop) - int(flat.start)
    if is_dist_tensor(tensor):
        tensor = tensor._local_value()  # fused states are labelled Replicate, with another range on every rank
    if len(tensor.shape) != 1 or int(tensor.shape[0]) < size:
        raise ValueError(f"state {key!r} has shape {list(tensor.shape)}; expected [{size}] or more, for range {flat}")
    # _slice() shares the storage whatever FLAGS_use_stride_kernel says; paddle.slice() would give a copy without it.
    local = tensor if int(tensor.shape[0]) == size else tensor._slice(0, size)
    return flat_shard(key, local, reference, slice(int(flat.start), int(flat.stop)))


# -- wrappers ----------------------------------------------------------------------------------------------------------


def describe_optimizer(optimizer: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Describe an optimizer like :func:`optimizer_sharded_state_dict`, with ``install()`` in effect."""
    inner, seen = optimizer, []
    while not callable(getattr(inner, "sharded_state_dict", None)):
        seen.append(inner)
        inside = optimizer_inside(inner)
        if inside is None or any(inside is wrapper for wrapper in seen):
            raise ValueError(
                f"{type(optimizer).__name__} is no optimizer that can be described: expected a sharded_state_dict() "
                f"method, or an optimizer under one of {', '.join(_OPTIMIZER_NAMES)}; got a {type(inner).__name__} "
                "with neither. Remedy (FC805): pass the optimizer inside the wrapper"
            )
        inner = inside
    describe = inner.sharded_state_dict
    if str(getattr(describe, "__module__", "")).startswith("paddle."):
        # It describes the existing states: none for a fresh optimizer, so that a load would restore nothing.
        kind = type(getattr(describe, "__self__", inner))
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} describes itself by a method of Paddle's own, and "
            "paddle_flexckpt.install() does not know the class: states that do not exist yet would be left out without "
            "a word. Remedy (FC805): use a version of paddle_flexckpt that knows it; or, if it changes nothing of "
            "which rank steps which parameters, pass the optimizer inside it; or save and load the model without its "
            "optimizer"
        )
    state: ShardedStateDict = describe(model_sharded_state_dict)
    return state


def optimizer_inside(wrapper: Any) -> Any:
    """Return the optimizer that a wrapper has under a usual name, or None."""
    own = getattr(wrapper, "__dict__", {})
    return next((own[name] for name in _OPTIMIZER_NAMES if own.get(name) is not None), None)
