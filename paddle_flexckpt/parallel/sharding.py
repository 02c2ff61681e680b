"""Sharded optimizers (ZeRO stage 1 and 2): which states this rank owns, and which part of each.

V1 and stage 2 give whole parameters to ranks; with tensor fusion V1 lays those of a rank end to end in buffers, each
padded, and steps on the buffers, whose states are taken apart again here. V2 lays all parameters end to end in buffers,
pads each, and splits the buffers evenly, so that a rank owns a flattened range of some parameters. The optimizer that
shards Muon does the first with matrices and the second with all others. Tested in tests/parallel/test_sharding.py,
tests/distributed/test_sharding.py and tests/distributed/test_muon.py.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from paddle_flexckpt.parallel.experts import check_experts
from paddle_flexckpt.parallel.optimizers import (
    create_accumulators,
    describe_states,
    keys_by_parameter_name,
    on_host,
    require_described,
)
from paddle_flexckpt.parallel.slices import BufferSlot, StateTables
from paddle_flexckpt.parallel.state_creation import create_dense_states
from paddle_flexckpt.sharded_weight import ShardedStateDict


class ShardingV1Mixin:
    """A DygraphShardingOptimizer: whole states on the rank that owns the parameter."""

    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the states like :class:`OptimizerMixin`; a rank describes the parameters that it owns.

        Raises:
            ValueError: Also if a fused parameter has left its buffer.
        """
        names = keys_by_parameter_name(model_sharded_state_dict, chain.from_iterable(self._rank2params.values()))
        group = self._hcg.get_sharding_parallel_group()
        check_experts(dict.fromkeys(self._param2rank, group), model_sharded_state_dict, names)
        owned = self._rank2params[self._sharding_rank]
        # With comm_overlap alone, too, parameters are in buffers; but then the step is on the parameters.
        if self.tensor_fusion and self.fuse_optimizer:
            require_described(owned, names)
            tables = _buffer_tables(self, owned)
            return describe_states(tables, model_sharded_state_dict, names, tables.ranges)
        create_accumulators(self._inner_opt, [p for p in owned if not p.stop_gradient], names)
        return describe_states(self._inner_opt, model_sharded_state_dict, names)


def _buffer_tables(optimizer: Any, parameters: list[Any]) -> StateTables:
    """Return the tables of a V1 optimizer with tensor fusion, by parameter; missing states are created.

    Paddle has no record of the places in its buffers, but a parameter's memory is a part of its buffer's. The step
    updates all parameters that this rank owns, whatever their stop_gradient is by now.
    """
    inner, buffers = optimizer._inner_opt, optimizer._rank2fused[optimizer._sharding_rank]
    slots: list[dict[str, BufferSlot]] = [{} for _ in buffers]
    for parameter in parameters:
        size, width = int(parameter._numel()), int(parameter.element_size())
        for buffer, members in zip(buffers, slots):
            begin = (parameter.data_ptr() - buffer.data_ptr()) // width
            if begin >= 0 and begin + size <= int(buffer.shape[0]):
                members[parameter.name] = BufferSlot(slice(0, size), begin)
                break
        else:
            raise ValueError(
                f"sharding V1 with tensor_fusion: parameter {parameter.name!r} is in none of the {len(buffers)} fused "
                "buffers of this rank any more, so that steps do not change it: it was given other memory after "
                "fleet.distributed_optimizer(). Remedy (FC807): build model and optimizer anew, and set values in "
                "place, by set_value()"
            )
    create_dense_states(inner, buffers)
    masters = getattr(inner, "_master_weights", None) or {}
    tables = StateTables(bool(getattr(inner, "_multi_precision", True)), getattr(inner, "_name", None))
    for buffer, members in zip(buffers, slots):
        tables.add_buffer(inner, buffer, masters.get(buffer.name), members)
    return tables


class ShardingV2Mixin:
    """A DygraphShardingOptimizerV2: flattened ranges of states."""

    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the states like :class:`OptimizerMixin`; a rank describes its range of each parameter.

        Raises:
            ValueError: Also if the pipeline has not made the buffers yet, or parameters have no memory.
        """
        if not self._comm_buffer_list and not any(hasattr(p, "comm_buffer_ref") for p in self._parameter_list):
            raise ValueError(
                "sharding V2 with sharding_comm_overlap of the pipeline has no buffers before the first step. "
                "Remedy (FC806): take the model's sharded_state_dict() from what fleet.distributed_model() returned, "
                "which builds them"
            )
        self._collect_comm_buffers()
        empty = [p.name for b in self._comm_buffer_list if not b.param_storage._is_initialized() for p in b._params]
        if empty:
            raise ValueError(
                f"sharding V2: parameters have no memory between clear_param_storage() and step(): {empty[:5]}. "
                "Remedy (FC806): ask for the state after step()"
            )
        names = keys_by_parameter_name(model_sharded_state_dict, self._parameter_list)
        check_experts(_buffer_groups(self), model_sharded_state_dict, names)
        ranges, slices = _buffer_slices(self)
        create_accumulators(self._inner_opt, slices, names)
        return describe_states(self._inner_opt, model_sharded_state_dict, names, ranges)


class MuonShardingMixin:
    """A MuonShardingOptimizer: whole states of the matrices that a rank owns, flattened ranges of the rest.

    Muon needs whole matrices. So one rank of a group updates each matrix, or each stack of experts; every color has a
    group. All other parameters are in buffers, as under V2, and are updated as by AdamW.
    """

    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the states like :class:`OptimizerMixin`; a matrix has a momentum, and no other accumulator.

        Raises:
            ValueError: Also if a parameter is neither owned by a rank nor in a buffer.
        """
        matrices = (owned for owners in self._rank2params_2d_by_color.values() for owned in owners.values())
        buffered = (buffer._params for buffer in self._comm_buffer_list)
        names = keys_by_parameter_name(model_sharded_state_dict, chain.from_iterable([*matrices, *buffered]))
        groups = _buffer_groups(self)
        ranges, parameters = _buffer_slices(self)
        lost = sorted(self._slice_params.keys() - ranges.keys())
        if lost:
            raise ValueError(
                f"MuonShardingOptimizer has no buffer for {len(lost)} parameters that it slices, such as {lost[0]!r}. "
                "Remedy (FC805): leave its _comm_buffer_list as its constructor made it"
            )
        for color, owners in self._rank2params_2d_by_color.items():
            info = self._color_to_group_info.get(color, {})
            is_shared = info.get("world_size", 1) > 1
            parameters += [p for p in owners.get(info["rank"] if is_shared else 0, ()) if not p.stop_gradient]
            if is_shared:
                groups.update({p.name: info["group"] for owned in owners.values() for p in owned})
        check_experts(groups, model_sharded_state_dict, names)
        create_accumulators(self._inner_opt, parameters, names)
        return describe_states(self._inner_opt, model_sharded_state_dict, names, ranges)


def _buffer_groups(optimizer: Any) -> dict[str, Any]:
    """Return the groups over which the buffers' parameters are sliced."""
    return {p.name: buffer._comm_group for buffer in optimizer._comm_buffer_list for p in buffer._params}


def _buffer_slices(optimizer: Any) -> tuple[dict[str, slice], list[Any]]:
    """Return this rank's range of each parameter that is in a buffer, and the slices that it steps on."""
    ranges, slices = {}, []
    views = (buffer._sharding_param_grad_view.items() for buffer in optimizer._comm_buffer_list)
    for parameter, view in chain.from_iterable(views):
        ranges[parameter] = _owned_range(view)
        # As in step(): a rank without elements of a parameter, padding included, has no state for it.
        if view._param_begin < view._param_end and not view._param.stop_gradient:
            slice_parameter = optimizer._slice_params[parameter]
            view.fill_slice_param(slice_parameter)
            slices.append(slice_parameter)
    return ranges, slices


def _owned_range(view: Any) -> slice:
    """Return this rank's range of a parameter, without the padding behind it.

    The view's begin and end are positions in the buffer, where the parameter starts at ``_index`` and takes
    ``_padded_size`` elements, of which the first ``numel`` are its own.
    """
    size = int(view._param._numel())
    begin = int(view._param_begin) - int(view._index)
    end = int(view._param_end) - int(view._index)
    begin, end = max(0, min(begin, size)), max(0, min(end, size))
    return slice(begin, max(begin, end))


class ShardingStage2Mixin:
    """A GroupShardedOptimizerStage2: whole states on the rank that owns the parameter."""

    def sharded_state_dict(self: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Describe the states like :class:`OptimizerMixin`; a rank describes the parameters that it owns."""
        names = keys_by_parameter_name(model_sharded_state_dict, self._local_params)
        check_experts(dict.fromkeys(names, self._group), model_sharded_state_dict, names)
        owned = [p for p in self._segment_params()[self._rank] if not p.stop_gradient]
        if self.offload:
            require_described(owned, names)
            tables = _offloaded_tables(self)
            return describe_states(tables, model_sharded_state_dict, names, tables.ranges)
        create_accumulators(self._optim, owned, names)
        # If a trainable parameter got no gradient, Paddle does not reduce its bucket, and every rank steps on all its
        # parameters. Owners then send the parameters, but the other ranks' states stay, and are wrong.
        mine = {p.name for p in owned}
        return describe_states(self._optim, model_sharded_state_dict, names, owned=mine)


def _offloaded_tables(optimizer: Any) -> StateTables:
    """Return the tables of a stage-2 optimizer with offload, by parameter; missing states are created.

    Offload lays the master weights of a rank's parameters (float16) end to end in a buffer of host memory, each padded,
    and the optimizer steps on the buffer, so that its states are those of the buffer.
    """
    inner, storage = optimizer._optim, optimizer.offload_params
    if isinstance(inner._param_groups[0], dict):
        raise ValueError(
            "group sharding stage 2 with offload=True and parameter groups: Paddle does not step on the offloaded "
            "parameters then. Remedy (FC807): one list of parameters, and weight decay by apply_decay_param_fun"
        )
    # With offload the masters are in use whatever multi_precision says.
    tables = StateTables(True, getattr(inner, "_name", None))
    if storage is None:  # this rank owns no parameter
        return tables
    buffer = storage.buffer
    with on_host(optimizer):
        create_dense_states(inner, [buffer])
    begin, slots = 0, {}
    for master in storage._params:
        size = int(master._numel())
        slots[master.name] = BufferSlot(slice(0, size), begin)
        begin += size + int(storage.param2align[master.name])
    tables.add_buffer(inner, buffer, buffer, slots)
    return tables
