"""Arguments of public calls: those that a call does not take are told the nearest that it takes.

Tested in tests/transfer/test_options.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any


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
