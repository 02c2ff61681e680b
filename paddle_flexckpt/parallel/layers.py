"""Give ``sharded_state_dict`` to every ``paddle.nn.Layer`` and wrapper, and rules to tensor and sequence parallel ones.

Paddle's layers split a column-parallel weight ``[in, out]`` by outputs, a row-parallel one by inputs, and an embedding
``[vocabulary, hidden]`` by vocabulary. The sequence-parallel linears do so too; only their activations differ.
"""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.overlaps import finish_steps
from paddle_flexckpt.parallel.slices import describe_buffered, describe_sliced, identity
from paddle_flexckpt.sharded_weight import (
    MODEL_REMEDY,
    FusedAxis,
    ShardedStateDict,
    ShardedWeight,
    build_sharded_state_dict,
    is_sharded_weight,
)

# Name of the method of paddle.nn.Layer, if there is one, that completes the rules of a layer's class.
COMPLETE_RULES = "_complete_shard_rules"
# The attribute under which a wrapper has the model: GroupShardedStage2 is the one without the s.
_MODEL_NAMES = ("_layers", "_layer")


class LayerMixin:
    """The description of a ``paddle.nn.Layer``.

    The protocol: 1. a layer's own parameters and persistable buffers are described by its shard rules; 2. every
    sub-layer describes itself under its name; 3. the names of one tied parameter are linked to each other. A
    layer whose parameters are split overrides :meth:`_get_shard_rules`, and :meth:`_get_shard_group` if the group is
    not its ``model_parallel_group`` or fleet's.
    """

    def sharded_state_dict(self: Any, structured_name_prefix: str = "") -> ShardedStateDict:
        """Describe the layer's and its sub-layers' parameters and persistable buffers as shards.

        Args:
            structured_name_prefix: The prefix of every name, including its dot.

        Returns:
            Names to ShardedWeights whose tensors are the live ones.

        Raises:
            ValueError: A split parameter has no rule, a rule has no parameter, or two sub-layers give the same name.
        """
        sharded = own_shards(self, structured_name_prefix)
        for name, layer in self._sub_layers.items():
            if layer is None:
                continue
            below = describe_layer(layer, f"{structured_name_prefix}{name}.")
            twice = sorted(key for key in below if key in sharded)  # not by sets: one per sub-layer is quadratic
            if twice:
                raise ValueError(f"sub-layer {name!r} of {type(self).__name__} gives names that exist already: {twice}")
            sharded.update(below)
        link_tied_names(sharded)
        return sharded

    def _get_shard_rules(self) -> dict[str, int | FusedAxis] | None:
        """Return the split axis of each of the layer's own parameters that is split; None where none is.

        A parameter that fuses several along that axis (q, k and v; gate and up) has a :class:`FusedAxis` as its rule.
        """
        return None

    def _get_shard_group(self) -> Any:
        """Return the process group that splits the parameters; None means fleet's model-parallel group."""
        return getattr(self, "model_parallel_group", None)


def describe_layer(layer: Any, prefix: str) -> ShardedStateDict:
    """Return a layer's description; each value in it, in whatever shape, is the parameter itself or a view of it.

    Raises:
        ValueError: A layer with a ``sharded_state_dict`` of its own returns a copy: values in it would be lost.
    """
    sharded: ShardedStateDict = layer.sharded_state_dict(structured_name_prefix=prefix)
    if not str(getattr(layer.sharded_state_dict, "__module__", "")).startswith("paddle_flexckpt."):
        _name_views(layer, prefix, sharded)
    return sharded


def _name_views(layer: Any, prefix: str, sharded: ShardedStateDict) -> None:
    """Name views of a layer's parameters like the parameters, so that optimizers find them."""
    named = dict(layer.named_parameters())
    by_name, known = {parameter.name: parameter for parameter in named.values()}, {*map(id, named.values())}
    for key, weight in sharded.items():
        tensor: Any = getattr(weight, "local_tensor", None)
        parameter = by_name.get(getattr(tensor, "name", None), named.get(key[len(prefix) :]))
        if parameter is None or id(tensor) in known or not hasattr(tensor, "_is_shared_buffer_with"):
            continue
        dense = not parameter.is_dist() and parameter._is_initialized() and tensor._is_initialized()
        if not dense or tensor.dtype != parameter.dtype or tensor.size != parameter.size:
            continue
        if not tensor._is_shared_buffer_with(parameter):
            kind = type(layer)
            raise ValueError(
                f"key {key!r}: {kind.__module__}.{kind.__qualname__} describes a copy of its parameter "
                f"{parameter.name!r}, of shape {list(tensor.shape)}; a load would not reach the parameter. "
                "Remedy (FC804): describe the parameter itself, or shaped_view() of paddle_flexckpt.parallel.slices, "
                "which is no copy"
            )
        if tensor.name not in by_name and tensor.data_ptr() == parameter.data_ptr():
            tensor.name = parameter.name


def shard_rules(layer: Any) -> dict[str, int | FusedAxis]:
    """Return the rules in effect for a layer's own parameters.

    They are the layer's own, unless it has :data:`COMPLETE_RULES`, which knows rules for classes of other libraries.
    """
    rules = dict(layer._get_shard_rules() or {})
    complete = getattr(layer, COMPLETE_RULES, None)
    if complete is not None:
        rules = complete(rules)
    # A layer without bias has a rule for one nonetheless.
    return {name: axis for name, axis in rules.items() if getattr(layer, name, layer) is not None}


def own_shards(layer: Any, prefix: str) -> ShardedStateDict:
    """Return a layer's own parameters and persistable buffers, split by its rules, without its sub-layers'.

    Raises:
        ValueError: A split parameter has no rule, or a rule has no parameter.
    """
    finish_steps()
    rules, state = shard_rules(layer), own_state(layer)
    for name, tensor in state.items():
        if name not in rules and getattr(tensor, "is_distributed", False):
            kind = type(layer)
            raise ValueError(
                f"key {prefix + name!r} is marked is_distributed, but no rule says along which axis it is split; it is "
                f"in a {kind.__module__}.{kind.__qualname__}. Remedy (FC801): give its layer a _get_shard_rules() that "
                "returns {name: axis}; for a class that is not yours, use "
                "paddle_flexckpt.trainer.model_rules.register_model_rule()"
            )
    group = layer._get_shard_group() if rules else None
    whole = build_sharded_state_dict(state, rules, prefix, group)
    if group is not None and group is not getattr(layer, "model_parallel_group", None):
        for name in rules:
            whole[prefix + name].split_by = "own"
    # By their shapes so far: a parameter that stage 3 has released has no memory of its own.
    sharded = {key: describe_buffered(describe_sliced(layer, weight)) for key, weight in whole.items()}
    for name in running_statistics(layer):
        if prefix + name in sharded:
            sharded[prefix + name].replicas = "first"
    return sharded


def running_statistics(layer: Any) -> tuple[str, ...]:
    """Return the names of statistics that a layer measures on its rank's data: they differ between ranks."""
    from paddle.nn.layer import norm

    # Paddle's two families; SyncBatchNorm and those of sparse tensors are of the first.
    return ("_mean", "_variance") if isinstance(layer, (norm._BatchNormBase, norm.BatchNorm)) else ()


def own_state(layer: Any) -> dict[str, Any]:
    """Return a layer's own parameters and persistable buffers by attribute name, without its sub-layers'.

    They are read from the layer itself, not from ``state_dict()``: a layer that overrides that to rename would be
    described under both the old and the new names.
    """
    state = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
    for name, buffer in layer._buffers.items():
        if buffer is not None and name not in layer._non_persistable_buffer_names_set:
            state[name] = buffer
    return state


def link_tied_names(sharded: ShardedStateDict) -> None:
    """Link every name of a tied parameter to the others."""
    names: dict[Any, list[str]] = {}
    for key, weight in sharded.items():
        if is_sharded_weight(weight):
            names.setdefault(identity(weight), []).append(key)
    for tied in names.values():
        if len(tied) < 2:
            continue
        places = {key: (tuple(sharded[key].global_shape), tuple(sharded[key].global_offset)) for key in tied}
        if len(set(places.values())) > 1:
            raise ValueError(
                f"one tied parameter is described in different ways: {places}. Remedy (FC804): give all layers that "
                "share it the same shard rule and group"
            )
        for key in tied:
            if isinstance(sharded[key], ShardedWeight):
                sharded[key].aliases = tuple(sorted(other for other in tied if other != key))


class VocabParallelMixin:
    """A VocabParallelEmbedding, split by its vocabulary."""

    def _get_shard_rules(self) -> dict[str, int]:
        return {"weight": 0}


class ColumnParallelMixin:
    """A ColumnParallelLinear or ColumnSequenceParallelLinear, split by its outputs, as its bias is."""

    def _get_shard_rules(self) -> dict[str, int]:
        return {"weight": 1, "bias": 0}


class RowParallelMixin:
    """A RowParallelLinear or RowSequenceParallelLinear, split by its inputs."""

    def _get_shard_rules(self) -> dict[str, int]:
        return {"weight": 0}  # the bias is added after the sum, so every rank has all of it


# -- wrappers ----------------------------------------------------------------------------------------------------------


class WrapperMixin:
    """A wrapper: DataParallel, GroupShardedStage2, MixPrecisionLayer, or one of fleet (MetaParallelBase).

    Wrappers add nothing to a checkpoint, and no prefix to its keys.
    """

    def sharded_state_dict(self: Any, structured_name_prefix: str = "") -> ShardedStateDict:
        """Describe the wrapped model like :class:`LayerMixin`.

        Raises:
            ValueError: The wrapper has state of its own, which has no name in the model.
        """
        build_overlap_buffers(self)
        return describe_layer(wrapped_model(self), structured_name_prefix)

    def full(self: Any, aoa_config: Any = None, **kwargs: Any) -> Any:
        """Do as ``paddle.nn.Layer.full()``; without statements, by the names of the wrapper's own ``state_dict()``."""
        import paddle

        whole, prefix = paddle.nn.Layer.full(self, aoa_config, **kwargs), own_prefix(self)
        return whole if aoa_config is not None else ((prefix + name, tensor) for name, tensor in whole)


class Stage3OffloadMixin:
    """A GroupShardedStage3 with offload, whose masters and parameters are made equal.

    Stage 3 with offload keeps a float32 master of every slice, and of every parameter that is too small to be sliced.
    From the end of a backward on, a slice's master *is* the slice; a forward leaves a copy of it there in the
    parameter's own dtype. So the slice is described by its master. A small parameter is a copy of its master too, in
    memory of the device.
    """

    def _update_params(self: Any) -> Any:
        """Do as Paddle does, after setting masters of small float32 parameters to the values that a load has written.

        For half-precision parameters the masters themselves are loaded.
        """
        import paddle

        if self._offload:
            for parameter in list(self._unslice_params):
                if parameter.dtype == parameter.master_weight.dtype:
                    parameter.master_weight.get_tensor().set(parameter.numpy(), paddle.CPUPlace())
        return self._paddle__update_params()


def build_overlap_buffers(model: Any) -> None:
    """Build the buffers that a pipeline with sharding_comm_overlap makes in its first step; ignore other models."""
    overlaps = getattr(model, "_sharding_comm_overlap", False) and getattr(model, "_sharding_split_param", False)
    if overlaps and not model._chunk_2_comm_buffers:
        model.register_allreduce_overlap_hook(model._layers, model.sharding_group, model.accumulate_steps, False)


def own_prefix(layer: Any) -> str:
    """Return what the ``state_dict()`` of a wrapper puts before the names of the model that it wraps; else nothing."""
    import paddle

    prefix = ""
    while type(layer).sharded_state_dict is WrapperMixin.sharded_state_dict:
        model = wrapped_model(layer)
        # A method of the wrapper's own gives the model's names. Layer's does not call those of layers inside.
        if prefix or type(layer).state_dict is paddle.nn.Layer.state_dict:
            prefix += "_layers." if layer._sub_layers.get("_layers") is model else "_layer."
        layer = model
    return prefix


def wrapped_model(wrapper: Any) -> Any:
    """Return the model inside a wrapper that has nothing else to save.

    Raises:
        ValueError: The wrapper has other state, or there is no model.
    """
    models = [name for name in _MODEL_NAMES if wrapper._sub_layers.get(name) is not None]
    if len(models) != 1:
        raise ValueError(
            f"{type(wrapper).__name__}: expected a wrapped model under one of {', '.join(_MODEL_NAMES)}; got {models}. "
            f"Remedy (FC804): {MODEL_REMEDY}"
        )
    model = wrapper._sub_layers[models[0]]
    known = {id(tensor) for layer in model.sublayers(include_self=True) for tensor in own_state(layer).values()}
    for path, layer in wrapper.named_sublayers(include_self=True):
        lost = [name for name, tensor in own_state(layer).items() if id(tensor) not in known]
        if lost:
            raise ValueError(
                f"{type(wrapper).__name__} has parameters or buffers besides those of the model that it wraps: {lost} "
                f"of {path or 'its own'}. Remedy (FC804): move them into the model, or override sharded_state_dict()"
            )
    return model
