"""plain_state_statements: AOA statements between the keys of a plain state dict and structured names.

Raw names of parameters (``linear_0.w_0``) count layers, so the same model has others in another world, where a linear
layer is a ``column_parallel_linear_0``. Only the process that has the model can say what they mean. What it says may be
written to a file beside the checkpoint, and used by any other process::

    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    statements = fc.plain_state_statements(model.sharded_state_dict(), plain)
    ...
    fc.load_state_dict({**model_shards, **optimizer_shards}, path, aoa_config={"aoa_statements": statements})

Tested in tests/live/test_name_compatibility.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle_flexckpt.aoa.parser import quoted
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.engine.names import raw_parameter, split_raw, without_prefix
from paddle_flexckpt.live.state import flatten_state_dict, is_tensor, tensor_name


def plain_state_statements(
    model_sharded_state_dict: Mapping[str, Any], plain_state_dict: Mapping[str, Any], direction: str = "from_plain"
) -> list[str]:
    """Return the AOA statements that rename what a plain state dict of a live model holds, from or to structured names.

    Args:
        model_sharded_state_dict: The model's ``sharded_state_dict()``, or anything else that has its tensors, or
            ShardedWeights of them, by structured name.
        plain_state_dict: The plain state dict as it is, or is to be, saved: of the model, the optimizer, or both,
            nested as it is there. What is no tensor (the state of an LR scheduler) is left out.
        direction: ``"from_plain"``: the checkpoint has the plain names and the targets the structured ones.
            ``"to_plain"``: the other way round.

    Returns:
        One statement for each key whose structured name is another, in the order of the state dict.

    Raises:
        ValidationError: A key belongs to no parameter of the model, two keys have one structured name, or the direction
            is none; all are listed.
    """
    if direction not in ("from_plain", "to_plain"):
        raise ValidationError([f"direction is 'from_plain' or 'to_plain'; got {direction!r}"])
    names: dict[str, list[str]] = {}
    for key in sorted(model_sharded_state_dict):
        name = tensor_name(model_sharded_state_dict[key])
        if name is not None:
            names.setdefault(raw_parameter(name), []).append(key)
    first = list(model_sharded_state_dict)[:3]
    problems: list[Problem] = []
    plain_of: dict[str, str] = {}
    for plain, value in flatten_state_dict(plain_state_dict)[0].items():
        if not is_tensor(getattr(value, "local_tensor", value)):
            continue
        structured = _structured(plain, value, model_sharded_state_dict, names)
        if structured is None:
            problems.append(
                Problem(
                    "a key of the plain state dict belongs to no parameter of the model",
                    key=plain,
                    got=f"{len(model_sharded_state_dict)} keys of the model, such as {first}",
                    remedy="pass the sharded_state_dict() of the model to which it belongs, or leave this key out",
                )
            )
        elif plain_of.setdefault(structured, plain) != plain:
            problems.append(
                Problem(f"key {plain_of[structured]!r} has the structured name {structured!r} as well", key=plain)
            )
    if problems:
        raise ValidationError(problems, "cannot make statements for a plain state dict")
    pairs = [(plain, structured) for structured, plain in plain_of.items() if plain != structured]
    if direction == "to_plain":
        pairs = [(structured, plain) for plain, structured in pairs]
    return [f"{quoted(left)} -> {quoted(right)}" for left, right in pairs]


def _structured(plain: str, value: Any, model: Mapping[str, Any], names: Mapping[str, list[str]]) -> str | None:
    """Return the structured name of a key of a plain state dict, or None."""
    own = tensor_name(value)
    keys = names.get(raw_parameter(own), []) if own is not None else []
    if keys:
        # A parameter itself; of a tied one, the key says by which name. A wrapper's state_dict() may have others.
        return next((key for key in keys if plain == key or plain.endswith(f".{key}")), keys[0])
    for _, name in without_prefix(plain):
        raw = split_raw(name, names)
        if raw is not None and raw.parameter in names:
            return f"{names[raw.parameter][0]}.{raw.state}"
    return next((name for _, name in without_prefix(plain) if name in model), None)
