"""Optimizers: accumulators and master weights, described as their parameters are.

Names are the in-tree ones: ``{parameter}.{accumulator}_0`` and ``{parameter}.w_0`` for the float32 master weight. They
come from the optimizer's own tables, not from parsing tensor names, so an optimizer with a ``name``, or with
accumulators that nobody foresaw, is described like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddle_flexckpt.sharded_weight import (
    ShardedStateDict,
    ShardedWeight,
    create_sharded_weight_with_new_local,
    make_replicated_sharded_weight,
)

# One number per parameter, whatever the parameter's shape: running powers and products of the decay rates. They have
# to be known by name, because a parameter of one element has accumulators of that shape too.
_SCALARS = frozenset({"beta1_pow_acc", "beta2_pow_acc", "beta2_pow", "momentum_decay_pow", "mu_product", "rho"})


class OptimizerMixin:
    """What ``install()`` gives to optimizers."""

    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describes the optimizer's state as shards.

        Accumulators that do not exist yet, because the optimizer has not stepped, are created with their initial
        values for every trainable parameter; nothing else changes. So the state of a fresh optimizer can be loaded.

        Args:
            model_sharded_state_dict: The model's ``sharded_state_dict()``; it says how each parameter is cut.

        Returns:
            Names to ShardedWeights whose tensors are the live ones. A tied parameter's state stands under the first of
            its names in sorted order and knows the others as aliases.

        Raises:
            ValueError: The optimizer has a parameter that the model's dict has not, or a state whose shape is neither
                its parameter's nor a single number.
        """
        names = _names_by_tensor(model_sharded_state_dict)
        _create_accumulators(self, names)
        owner = _owner_of_state(self)
        sharded: ShardedStateDict = {}
        for raw_name, tensors in self._accumulators.items():
            accumulator = _without_prefix(raw_name, getattr(self, "_name", None))
            for raw_parameter, tensor in tensors.items():
                keys = _keys_of(owner.get(raw_parameter, raw_parameter), names, self)
                state = _describe(keys, f"{accumulator}_0", tensor, model_sharded_state_dict, accumulator in _SCALARS)
                sharded[state.key] = state
        for raw_parameter, tensor in getattr(self, "_master_weights", {}).items():
            keys = _keys_of(raw_parameter, names, self)
            state = _describe(keys, "w_0", tensor, model_sharded_state_dict, False)
            sharded[state.key] = state
        return sharded


def _names_by_tensor(model: Mapping[str, ShardedWeight]) -> dict[str, list[str]]:
    """Structured names, sorted, by the name of the tensor behind them."""
    names: dict[str, list[str]] = {}
    for key in sorted(model):
        names.setdefault(model[key].local_tensor.name, []).append(key)
    return names


def _parameters(optimizer: Any) -> Iterable[Any]:
    for entry in optimizer._parameter_list or []:
        if isinstance(entry, dict):  # parameter groups
            yield from entry["params"]
        else:
            yield entry


def _create_accumulators(optimizer: Any, names: Mapping[str, list[str]]) -> None:
    """Creates the accumulators that the first step would create, and takes no step."""
    from paddle.base import framework

    trainable = [parameter for parameter in _parameters(optimizer) if not parameter.stop_gradient]
    lost = sorted(parameter.name for parameter in trainable if parameter.name not in names)
    if lost:
        raise ValueError(
            f"the optimizer has parameters that are not in model_sharded_state_dict: {lost[:10]}. Remedy: pass the "
            "sharded_state_dict() of the model whose parameters the optimizer was given"
        )
    optimizer._create_accumulators(framework.default_main_program().global_block(), trainable)


def _owner_of_state(optimizer: Any) -> dict[str, str]:
    """Parameters by the names of their master weights: states of half-precision parameters are kept under those."""
    return {master.name: name for name, master in getattr(optimizer, "_master_weights", {}).items()}


def _without_prefix(accumulator: str, optimizer_name: str | None) -> str:
    prefix = f"{optimizer_name}_"
    return accumulator[len(prefix) :] if optimizer_name and accumulator.startswith(prefix) else accumulator


def _keys_of(parameter: str, names: Mapping[str, list[str]], optimizer: Any) -> list[str]:
    if parameter not in names:
        raise ValueError(
            f"{type(optimizer).__name__} has a state for {parameter!r}, which is not in model_sharded_state_dict"
        )
    return names[parameter]


def _describe(
    keys: list[str], suffix: str, tensor: Any, model: Mapping[str, ShardedWeight], scalar: bool
) -> ShardedWeight:
    reference = model[keys[0]]
    key = f"{keys[0]}.{suffix}"
    if scalar:
        state = make_replicated_sharded_weight(key, tensor)
    elif tuple(int(n) for n in tensor.shape) == tuple(reference.local_shape):
        state = create_sharded_weight_with_new_local(key, tensor, reference)
    elif tensor.size == 1:
        state = make_replicated_sharded_weight(key, tensor)
    else:
        raise ValueError(
            f"state {key!r} has shape {list(tensor.shape)}; expected {list(reference.local_shape)} as its parameter, "
            "or a single number"
        )
    state.aliases = tuple(f"{other}.{suffix}" for other in keys[1:])
    return state
