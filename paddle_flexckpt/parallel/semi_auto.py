"""Serve semi-automatic parallelism: ``dist.shard_optimizer``, ``dist.to_static`` and ``dist.shard_scaler``.

A DistModel keeps parameters and states in the scope of its program, under raw names. They are described here under the
names that they have in dynamic mode, with the live memory, so one checkpoint serves both modes.
Tested in tests/semi_auto/test_states.py, tests/semi_auto/test_dist_model.py and tests/compat/test_semi_auto.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from paddle_flexckpt.parallel.optimizers import (
    OverInstance,
    describe_flat,
    describe_states,
    keys_by_parameter_name,
    require_described,
    strip_optimizer_name,
)
from paddle_flexckpt.parallel.slices import buffer_tables, parameter_name
from paddle_flexckpt.parallel.state_creation import create_states
from paddle_flexckpt.parallel.tensor_fusion import (
    buffer_pieces,
    parameters_in,
    trainable_parameters,
    uses_tensor_fusion,
)
from paddle_flexckpt.sharded_weight import ShardedStateDict, ShardedWeight, make_replicated_sharded_weight

# {parameter}_fp32_master_0, {parameter}_fp32_master_0_{accumulator}_0 and {parameter}_{accumulator}_0, where the number
# counts the optimizers of the process.
_MASTER = re.compile(r"_fp32_master_\d+")
_COUNTER = re.compile(r"_\d+$")
# Not states: values that the optimizer or its scheduler sets at every step; dense tensors that the forward uses without
# having them in the model (tables of a rotary embedding); and sums of gradients, which are 0 after a step.
_NO_STATE = re.compile(r"learning_rate_\d+|eager_tmp_\d+|gradient_merge_.*|.*@GRAD@MERG.*")
# The place where shard_scaler makes the method that it sets on a scaler.
_HOME = "paddle.distributed.auto_parallel.api"


class ShardOptimizerMixin:
    """The description of the optimizer that ``dist.shard_optimizer`` returns."""

    def state_dict(self: Any) -> dict[str, Any]:
        """Return Paddle's state dict without changing anything.

        States that do not exist yet are created as the first step would create them. States that ``set_state_dict`` was
        given, and that no step has used yet, are returned as given.

        Returns:
            Names as Paddle makes them (``linear_0.w_0.dist_moment1_0``) to the live tensors; ``master_weights`` and
            ``LR_Scheduler`` as in Paddle.
        """
        # The argument of set_state_dict: Paddle would look there for every state that is created, and fail.
        if not self._accumulators_holder:
            create_states(self)
        return self._inner_opt.state_dict()  # type: ignore[no-any-return]

    @OverInstance
    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the states like :class:`OptimizerMixin`.

        Every state is described by its own placements, which under stages 1 and 2 differ from its parameter's. With
        tensor fusion a rank describes its ranges of the flattened parameters; before the first step, those of the
        buffers that the step will make.

        Raises:
            ValueError: The optimizer has a parameter that the model's dict lacks, or the parameters of its states are
                not known.
        """
        names = keys_by_parameter_name(model_sharded_state_dict, parameters_in(self._param_groups))
        parameters = trainable_parameters(self._param_groups)
        require_described(parameters, names)
        create_states(self)
        tables = buffer_tables(self)
        if tables is not None:
            return describe_states(tables, model_sharded_state_dict, names, tables.ranges)
        ranges = None
        if uses_tensor_fusion(self):
            pieces = buffer_pieces(self, parameters)
            ranges = {**{p.name: slice(0, 0) for p in parameters}, **{p.parameter.name: p.flat_range for p in pieces}}
        return describe_states(self._inner_opt, model_sharded_state_dict, names, ranges)


class DistModelMixin:
    """The description of the DistModel that ``dist.to_static`` returns."""

    def state_dict(self: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Do as Paddle does; parameters remember their raw names, which identify the states."""
        state: dict[str, Any] = self._paddle_state_dict(*args, **options)
        for key, name in self._structured_to_parameter_name.items():
            if key in state:
                state[key].name = name
        return state

    def sharded_state_dict(self: Any) -> ShardedStateDict:
        """Describe the parameters, and in mode "train" the optimizer's states, as shards.

        With tensor fusion a rank describes its ranges of the states, without padding. The learning rate is left out: a
        scheduler's state is saved with :func:`collect_extra_state`.

        Returns:
            Structured names (``a.weight``, ``a.weight.moment1_0``, ``a.weight.w_0`` for the float32 master) to
            ShardedWeights whose tensors are the live ones. A tied parameter stands under all of its names, and its
            states under the first of them in sorted order, as in dynamic mode.

        Raises:
            ValueError: The model has no program yet, fuses parameters of q, k and v or of a feed-forward layer by a
                pass, or has a state that belongs to no parameter.
        """
        if self._engine._mode is None:
            raise ValueError(
                "the DistModel has no program yet. Remedy (FC806): call its train(), eval() or predict() before its "
                "state is asked for"
            )
        if self._engine.fused_ffn_qkv is not None:
            raise ValueError(
                "the DistModel fuses parameters (fused_ffn_qkv), and its state_dict() takes them apart into copies, "
                "which a load would not reach. Remedy (FC802): unset FLAGS_enable_fused_ffn_qkv_pass; to keep what was "
                "trained with it, save_state_dict(dist_model.state_dict(), path) first, and load that without the flag"
            )
        names = self._parameter_to_structured_name
        state = self.state_dict()
        # Paddle gives one of a tied parameter's names.
        tied: dict[str, list[str]] = {}
        for key in sorted(self._structured_to_parameter_name):
            tied.setdefault(self._structured_to_parameter_name[key], []).append(key)
        sharded: ShardedStateDict = {}
        for given in state:
            if given not in self._structured_to_parameter_name:
                continue
            keys = tied[self._structured_to_parameter_name[given]]
            for key in keys:
                sharded[key] = make_replicated_sharded_weight(key, state[given])
                sharded[key].aliases = tuple(other for other in keys if other != key)
        ranges = _owned_ranges(self._engine._optimizer, sharded, names)
        for raw, tensor in state.items():
            if raw in sharded or parameter_name(raw) in names or _NO_STATE.fullmatch(raw):
                continue  # slice@{parameter} is a view of the parameter itself
            parameter, suffix = _split(raw, names, getattr(self._engine._optimizer, "_name", None))
            first, *others = tied[parameter]
            key = f"{first}.{suffix}"
            if raw == parameter_name(raw) or "_pow_acc" in suffix:
                sharded[key] = make_replicated_sharded_weight(key, tensor)
            else:
                flat = ranges[parameter]
                if flat.stop <= flat.start:
                    continue
                sharded[key] = describe_flat(key, tensor, sharded[names[parameter]], flat)
            sharded[key].aliases = tuple(f"{other}.{suffix}" for other in others)
            sharded[key].raw_names = (parameter_name(raw),)
        return sharded


def _split(raw: str, names: Mapping[str, str], optimizer_name: str | None) -> tuple[str, str]:
    """Split a state's raw name into parameter and suffix: ``linear_0.w_0.dist_moment1_1`` has ``moment1_0``."""
    state = parameter_name(raw)
    ends = (i for i in range(len(state) - 1, 0, -1) if state[i] == "_")
    owner = next((state[:end] for end in ends if state[:end] in names), None)  # the longest
    if owner is None:
        raise ValueError(
            f"the DistModel has a state {raw!r} that belongs to no parameter; there are {sorted(names)[:10]}. "
            "Remedy (FC104): save state_dict() as it is, without other names"
        )
    rest = state[len(owner) :]
    master = _MASTER.match(rest)
    if master is not None:
        rest = rest[master.end() :]
        if not rest:
            return owner, "w_0"
    return owner, strip_optimizer_name(_COUNTER.sub("_0", rest[1:]), optimizer_name)


def _owned_ranges(optimizer: Any, model: Mapping[str, ShardedWeight], names: Mapping[str, str]) -> dict[str, slice]:
    """Return, by raw name of parameter, the range of its local box that this rank has states of.

    Each buffer has its parameters one behind the other, each padded, and is split evenly over the ranks. Paddle keeps
    for each parameter the padded size, and where this rank's piece begins and ends within its part of the buffer.
    """
    import paddle

    inner = getattr(optimizer, "_optimizer", optimizer)  # mixed precision wraps it
    ranges: dict[str, slice] = {}
    for group in getattr(inner, "_slice_param_group_info", ()):
        ranks = inner._sharding_group.ranks
        piece = sum(int(info["padded_size"]) for info in group.values()) // len(ranks)
        begin, offset = ranks.index(paddle.distributed.get_rank()) * piece, 0
        for parameter, info in group.items():
            size = math.prod(model[names[parameter]].local_shape)
            first, last = begin + int(info["param_start"]) - offset, begin + int(info["param_end"]) - offset
            owned = int(info["param_end"]) > int(info["param_start"])
            ranges[parameter] = slice(min(first, size), min(last, size)) if owned else slice(0, 0)
            offset += int(info["padded_size"])
    return ranges


class ScalerMixin:
    """A repair of gradient scalers of Paddle before 3.1.1.

    ``dist.shard_scaler`` sets a method on the scaler that unscales every gradient that is defined. A gradient without
    memory (as ``clear_grad(set_to_zero=False)`` leaves it, or the parameters of other pipeline stages in a resumed job)
    then gets arbitrary memory and counts as a gradient from then on, or the process crashes.
    """

    @OverInstance
    def _unscale(self: Any, optimizer: Any) -> None:
        """Unscale as Paddle does, but only parameters whose gradients have memory."""
        own = vars(self).get("_unscale")
        if own is None:
            self._paddle__unscale(optimizer)
            return
        if own.__module__ != _HOME:  # fleet's scaler walks through other lists
            own(optimizer)
            return
        # Paddle's list of groups of parameters, or of parameters.
        groups = optimizer._param_groups
        grouped = bool(groups) and isinstance(groups[0], dict)
        lists = [entry["params"] for entry in groups] if grouped else [optimizer._parameter_list]
        before = [list(parameters) for parameters in lists]
        try:
            for parameters in lists:
                parameters[:] = [parameter for parameter in parameters if not _lacks_memory(parameter._grad_ivar())]
            own(optimizer)
        finally:
            for parameters, all_of_them in zip(lists, before):
                parameters[:] = all_of_them


def _lacks_memory(gradient: Any) -> bool:
    return gradient is not None and not gradient._is_initialized()


def unscales_missing_gradients(version: str) -> bool:
    """Return whether a release of Paddle unscales gradients that have no memory: those before 3.1.1 do."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return (0, 0, 0) < numbers < (3, 1, 1)  # 0.0.0 is a build from source
