"""AOA statements for the user's own objects: made for a plain state dict, and explained.

Tested in tests/loading/test_name_compatibility.py and tests/aoa/test_docs.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Union

from paddle_flexckpt.aoa import AoaConfig
from paddle_flexckpt.aoa.compile import explain as explain_program
from paddle_flexckpt.aoa.parser import quoted
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, without_extra_state
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Backend, Location
from paddle_flexckpt.memory.state import flatten_state_dict, is_tensor, open_state
from paddle_flexckpt.memory.state_names import ambiguous_name, keys_by_name, tensor_name
from paddle_flexckpt.transfer.names import raw_parameter, split_raw, without_prefix

Tensors = Union[Location, Mapping[str, Any], Catalog]


def plain_state_statements(
    model_sharded_state_dict: Mapping[str, Any], plain_state_dict: Mapping[str, Any], direction: str = "from_plain"
) -> list[str]:
    """Return the AOA statements that rename what a plain state dict of a live model holds, from or to structured names.

    Raw names of parameters (``linear_0.w_0``) count layers, so the same model has other names in another world. Only
    the process that has the model can make these statements; any other may use them.

    Args:
        model_sharded_state_dict: The model's ``sharded_state_dict()``, or anything else that has its tensors, or
            ShardedWeights of them, by structured name.
        plain_state_dict: The plain state dict as it is, or is to be, saved: of the model, the optimizer, or both,
            nested as it is there. Values that are not tensors (the state of an LR scheduler) are left out.
        direction: ``"from_plain"``: the checkpoint has the plain names and the targets the structured ones.
            ``"to_plain"``: the other way round.

    Returns:
        One statement for each key whose structured name differs, in the order of the state dict.

    Raises:
        ValidationError: A key belongs to no parameter of the model, two keys have one structured name, or the direction
            is invalid; all are listed.
    """
    if direction not in ("from_plain", "to_plain"):
        raise ValidationError([f"direction is 'from_plain' or 'to_plain'; got {direction!r}"])
    found = keys_by_name(model_sharded_state_dict)
    names = {name: next(iter(places.values())) for name, places in found.items()}
    first = list(model_sharded_state_dict)[:3]
    problems: list[Problem] = [ambiguous_name(name, places) for name, places in found.items() if len(places) > 1]
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
                    code="FC104",
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
        # A parameter itself. The key decides between the names of a tied one. A wrapper's state_dict() may have others.
        return next((key for key in keys if plain == key or plain.endswith(f".{key}")), keys[0])
    for _, name in without_prefix(plain):
        raw = split_raw(name, names)
        if raw is not None and raw.parameter in names:
            return f"{names[raw.parameter][0]}.{raw.state}"
    return next((name for _, name in without_prefix(plain) if name in model), None)


def explain(aoa_config: AoaConfig, src: Tensors, dst: Tensors | None = None, keys: Iterable[str] = ()) -> str:
    """Explain where each target of a load with AOA statements would come from; only the manifest is read.

    ::

        print(fc.explain(["weight^T -> w"], "run/shards", {"w": paddle.zeros([2, 4])}))

    Args:
        aoa_config: The statements, as in :func:`load_state_dict`.
        src: The source: a checkpoint's directory, a state dict of this rank's shards, or a catalog.
        dst: The destination, in one of these forms; None means all that the statements make or leave of the source.
        keys: Only these targets; all by default.

    Returns:
        A few lines for each target; at the end, the targets without a source and the sources without a use.

    Raises:
        ValidationError: The statements are malformed or do not fit, or there is no such key.
    """
    return explain_program(aoa_config, _catalog(src), None if dst is None else _catalog(dst), keys)


def _catalog(tensors: Tensors) -> Catalog:
    """Return the shards of a checkpoint or of a state, without a run's extra state."""
    if isinstance(tensors, Catalog):
        return tensors
    if isinstance(tensors, Mapping):
        return open_state(tensors, 0).catalog
    if not isinstance(tensors, (str, os.PathLike, Backend)):
        raise ValidationError(
            [f"expected a checkpoint's directory, a state dict or a catalog; got a {type(tensors).__name__}"]
        )
    return without_extra_state(SourceDirectory(tensors).read_manifest(None).catalog)
