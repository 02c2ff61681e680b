"""Describe wrappers of a model or an optimizer: they add nothing to a checkpoint, least of all a prefix to its keys.

Paddle's wrappers of optimizers (HybridParallelOptimizer, HeterParallelOptimizer) pass on what they do not have, so that
the method of the optimizer inside answers; they need no mixin.
"""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.parallel.layers import own_state
from paddle_flexckpt.parallel.tensor_fusion import parameters_in
from paddle_flexckpt.sharded_weight import ShardedStateDict

# The attribute under which a wrapper keeps the model: GroupShardedStage2 is the one without the s.
_MODEL_NAMES = ("_layers", "_layer")
_OPTIMIZER_NAMES = ("_inner_opt", "inner_opt", "_optim", "_optimizer", "optimizer")


class WrapperMixin:
    """Describe DataParallel, GroupShardedStage2, MixPrecisionLayer and the wrappers of fleet (MetaParallelBase)."""

    def sharded_state_dict(self: Any, structured_name_prefix: str = "") -> ShardedStateDict:
        """Do as :meth:`LayerMixin.sharded_state_dict` of the wrapped model.

        Raises:
            ValueError: The wrapper has state of its own, which has no name in the model.
        """
        build_overlap_buffers(self)
        return wrapped_model(self).sharded_state_dict(structured_name_prefix=structured_name_prefix)


class Stage3OffloadMixin:
    """Keep offloaded masters and parameters of GroupShardedStage3 equal.

    Stage 3 with offload keeps a float32 master of every slice, and of every parameter that is too small to be sliced.
    A slice's master *is* the slice from the end of a backward on, and what a forward leaves there in the parameter's
    own dtype is a copy of it: so the slice is described by its master. A small parameter is a copy of its master too,
    in memory of the device.
    """

    def _update_params(self: Any) -> Any:
        """Do as Paddle does; masters of small float32 parameters first take what a load has put into the parameters.

        For half-precision parameters the masters themselves are loaded.
        """
        import paddle

        if self._offload:
            for parameter in list(self._unslice_params):
                if parameter.dtype == parameter.master_weight.dtype:
                    parameter.master_weight.get_tensor().set(parameter.numpy(), paddle.CPUPlace())
        return self._paddle__update_params()


def build_overlap_buffers(model: Any) -> None:
    """Build the buffers that a pipeline with sharding_comm_overlap makes in its first step; leave others alone."""
    overlaps = getattr(model, "_sharding_comm_overlap", False) and getattr(model, "_sharding_split_param", False)
    if overlaps and not model._chunk_2_comm_buffers:
        model.register_allreduce_overlap_hook(model._layers, model.sharding_group, model.accumulate_steps, False)


def wrapped_model(wrapper: Any) -> Any:
    """Return the model inside a wrapper that has nothing else to save.

    Raises:
        ValueError: It has, or there is no model.
    """
    models = [name for name in _MODEL_NAMES if wrapper._sub_layers.get(name) is not None]
    if len(models) != 1:
        raise ValueError(
            f"{type(wrapper).__name__}: expected a wrapped model under one of {', '.join(_MODEL_NAMES)}; got {models}. "
            "Remedy: call sharded_state_dict() of the model itself"
        )
    model = wrapper._sub_layers[models[0]]
    known = {id(tensor) for layer in model.sublayers(include_self=True) for tensor in own_state(layer).values()}
    for path, layer in wrapper.named_sublayers(include_self=True):
        lost = [name for name, tensor in own_state(layer).items() if id(tensor) not in known]
        if lost:
            raise ValueError(
                f"{type(wrapper).__name__} has parameters or buffers besides those of the model that it wraps: {lost} "
                f"of {path or 'its own'}. Remedy: move them into the model, or override sharded_state_dict()"
            )
    return model


def describe_optimizer(optimizer: Any, model_sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Do as :func:`optimizer_sharded_state_dict`, with ``install()`` in effect."""
    inner, seen = optimizer, []
    while not callable(getattr(inner, "sharded_state_dict", None)):
        seen.append(inner)
        inside = _optimizer_inside(inner)
        if inside is None or any(inside is wrapper for wrapper in seen):
            raise ValueError(
                f"{type(optimizer).__name__} is no optimizer that can be described: expected a sharded_state_dict() "
                f"method, or an optimizer under one of {', '.join(_OPTIMIZER_NAMES)}; got a {type(inner).__name__} "
                "with neither. Remedy: pass the optimizer inside the wrapper"
            )
        inner = inside
    describe = inner.sharded_state_dict
    state: ShardedStateDict = describe(model_sharded_state_dict)
    # Paddle's own methods describe what exists; before the first step that is nothing.
    if not state and str(getattr(describe, "__module__", "")).startswith("paddle."):
        _check_stateless(getattr(describe, "__self__", inner))
    return state


def _optimizer_inside(wrapper: Any) -> Any:
    """Return the optimizer that a wrapper keeps under a usual name, or None."""
    own = getattr(wrapper, "__dict__", {})
    return next((own[name] for name in _OPTIMIZER_NAMES if own.get(name) is not None), None)


def _check_stateless(optimizer: Any) -> None:
    """Raise ValueError where an optimizer that was described as stateless has parameters to train."""
    import paddle

    steps = optimizer
    while (inside := _optimizer_inside(steps)) is not None:
        steps = inside
    if isinstance(steps, paddle.optimizer.SGD) and not steps._multi_precision:
        return
    entries = getattr(optimizer, "_parameter_list", None) or getattr(steps, "_parameter_list", None)
    trained = [parameter.name for parameter in parameters_in(entries) if not parameter.stop_gradient]
    if trained:
        kind = type(optimizer)
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} describes itself and gives no state, but it has {len(trained)} "
            f"parameters to train, such as {trained[0]!r}; paddle_flexckpt.install() does not know the class. Remedy: "
            "ask it after its first step; or describe the optimizer inside it by optimizer_sharded_state_dict()"
        )
