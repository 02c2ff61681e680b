"""Register which axis of which parameter is split, for classes of layers that cannot say so themselves.

Rules are kept by the qualified name of the class, so that a rule can be registered for a class whose module nobody has
imported yet, and finding one imports nothing. Tested in tests/trainer/test_model_rules_unit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

from paddle_flexckpt.sharded_weight import FusedAxis

Axes = Mapping[str, Union[int, FusedAxis]]
# The axes by the name of the layer's own parameter; or a function that is given the layer and returns them.
ModelRule = Union[Axes, Callable[[Any], Axes]]

_RULES: dict[str, ModelRule] = {}


def register_model_rule(layer_class: type | str, rule: ModelRule) -> None:
    """Say which axes of a layer's own parameters tensor parallelism splits, for a class that is not one's own.

    It holds for subclasses too, unless they or a class between say something else: with a rule of their own here, or
    with a ``_get_shard_rules()``. A later rule for the same class replaces an earlier one.

    Args:
        layer_class: The class, or ``"package.module.Class"``; then nothing is imported.
        rule: ``{name of the parameter: axis}``, with a :class:`FusedAxis` for one that fuses several; or a function
            that is given the layer and returns that. Parameters that it does not name are not split, or tell their
            ``split_axis``.

    Raises:
        TypeError: The class or the rule is none.
    """
    if not isinstance(layer_class, type) and not (isinstance(layer_class, str) and "." in layer_class):
        raise TypeError(f"layer_class has to be a class, or its name with its module; got {layer_class!r}")
    if not callable(rule) and not isinstance(rule, Mapping):
        raise TypeError(f"rule has to be a dict of axes, or a function that gives one; got {rule!r}")
    _RULES[layer_class if isinstance(layer_class, str) else qualified_name(layer_class)] = rule


def unregister_model_rule(layer_class: type | str) -> None:
    """Take a rule back; without it, do nothing."""
    _RULES.pop(layer_class if isinstance(layer_class, str) else qualified_name(layer_class), None)


def qualified_name(layer_class: type) -> str:
    """Return ``package.module.Class``."""
    return f"{layer_class.__module__}.{layer_class.__qualname__}"


def registered_axes(layer: Any, stop: type) -> dict[str, int | FusedAxis] | None:
    """Return what the registry says of a layer's own parameters.

    Args:
        layer: The layer.
        stop: The class whose ``_get_shard_rules`` every layer has, ``paddle.nn.Layer``.

    Returns:
        The axes; None where no rule is registered, or the layer itself or a class nearer to it than the rule's has a
        ``_get_shard_rules()``.

    Raises:
        TypeError: The rule's function returned something else.
    """
    if "_get_shard_rules" in vars(layer):
        return None
    for cls in type(layer).__mro__:
        if cls is stop:
            return None
        rule = _RULES.get(qualified_name(cls))
        if rule is not None:
            axes = rule(layer) if callable(rule) else rule
            if not isinstance(axes, Mapping):
                raise TypeError(f"the rule of {qualified_name(cls)} has to give a dict of axes; got {axes!r}")
            return dict(axes)
        if "_get_shard_rules" in vars(cls):
            return None
    return None
