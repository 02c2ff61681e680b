"""Arguments of public calls: their types, and for those that a call does not take the nearest that it takes.

Tested in tests/transfer/test_arguments.py and tests/transfer/test_options.py.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.dtypes import check_integer

Call = TypeVar("Call", bound=Callable[..., Any])


def plain_value(name: str, kind: str, value: Any, least: int = 0) -> Any:
    """Return an argument of the kind ``int`` or ``bool``, or one of these or None, as Python's own.

    Arguments of other kinds are returned as they are.

    Raises:
        ValidationError: It is nothing of its kind, or an integer that is too small.
    """
    value = value.item() if isinstance(value, (np.integer, np.bool_)) else value
    declared = kind.removesuffix(" | None")
    if value is None and declared != kind:
        return value
    if declared == "int":
        check_integer(name, value, least)
    if declared == "bool" and type(value) is not bool:
        raise ValidationError([f"{name} is True or False; got {value!r}. Remedy (FC101): give one of these"])
    return value


def plain_arguments(call: Call) -> Call:
    """Declare that :func:`plain_value` checks the arguments of a call, in which no other rank takes part."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **named)
        except TypeError:
            return call(*arguments, **named)  # its own error
        for name, value in bound.arguments.items():
            bound.arguments[name] = plain_value(name, str(signature.parameters[name].annotation), value)
        return call(*bound.args, **bound.kwargs)

    return cast("Call", checked)


def check_names(call: Callable[..., Any], named: Iterable[str], known: Sequence[str]) -> None:
    """Raise TypeError for the first keyword that a call does not take.

    Args:
        call: The call.
        named: The keywords that it is given.
        known: All names of its arguments.
    """
    for name in named:
        if name in known:
            continue
        longer = [each for each in known if each.endswith(f"_{name}")]
        # A checkpoint of a directory has an id; steps are a manager's.
        longer = ["unique_id"] if name == "step" and "unique_id" in known else longer
        similar = longer or difflib.get_close_matches(name, known, 1)
        near = difflib.get_close_matches(name, [each for each in known if each != "self"], 3, 0)
        hint = f"; did you mean {similar[0]!r}?" if similar else f"; the nearest are {', '.join(near)}"
        raise TypeError(f"{call.__qualname__}() got an unexpected keyword argument {name!r}{hint}")


def check_count(call: Callable[..., Any], count: int, positional: Sequence[str], known: Sequence[str]) -> None:
    """Raise TypeError for more arguments by position than a call takes.

    Args:
        call: The call.
        count: The number of arguments that it is given by position.
        positional: The names of those that it takes so.
        known: All names of its arguments, in order.
    """
    if not count > len(positional) > 0:
        return
    by_name = [f"{each}=" for each in known if each not in positional][: count - len(positional)]
    raise TypeError(
        f"{call.__qualname__}() takes {', '.join(positional)} by position, and the rest by name, such as "
        f"{', '.join(by_name)}; got {count} arguments by position"
    )
