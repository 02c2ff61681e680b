"""The rules between Hugging Face's weights and a model's that the classes of PaddleFormers bring along."""

from __future__ import annotations

import copy
from typing import Any

from paddle_flexckpt.catalog import Problem, ValidationError

_FROM, _TO = "_gen_aoa_config", "_gen_inv_aoa_config"


def from_hugging_face(model: Any) -> dict[str, Any]:
    """The AOA config that makes a model's parameters of Hugging Face's tensors.

    Raises:
        ValidationError: The model's class brings none.
    """
    return _rules(type(model), model.config, _FROM)


def to_hugging_face(model_class: type, config: Any) -> dict[str, Any]:
    """The AOA config that makes Hugging Face's tensors of a model's parameters; errors of :func:`from_hugging_face`."""
    return _rules(model_class, config, _TO)


def has_rules(model_class: type) -> bool:
    """Whether a model's class brings both configs."""
    return all(callable(getattr(model_class, name, None)) for name in (_FROM, _TO))


def _rules(model_class: type, config: Any, name: str) -> dict[str, Any]:
    method = getattr(model_class, name, None)
    if not callable(method):
        raise ValidationError(
            [
                Problem(
                    f"there are no rules between Hugging Face's weights and those of a {model_class.__name__}",
                    expected=f"a class method {name}(config)",
                    remedy="give --aoa_config, and load without --load_from_hf",
                )
            ]
        )
    # The statements are of whole tensors; a config may be changed by who makes them.
    made: dict[str, Any] = method(copy.deepcopy(config))
    return made
