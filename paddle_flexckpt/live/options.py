"""Options of public calls: ranks have to agree on all of them but those that a call declares to be a rank's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Call = TypeVar("Call", bound=Callable[..., Any])
OWN = "options_of_each_rank"

PATH = (
    "storage may have another name on another rank; the commit and the checkpoint's token tell whether it is the same"
)
GROUP = "ranks of different groups cannot meet to compare them"
SHARDS = "every rank has its own shards"
UNUSED = "accepted for compatibility, without effect"


def same_on_all_ranks(**own: str) -> Callable[[Call], Call]:
    """Declare that ranks have to pass the same options to a public call, but for some.

    A new option is compared unless it is declared here. The call's docstring gets a sentence that names the options.

    Args:
        **own: By argument that ranks may differ in, the reason why they may.
    """

    def declare(call: Call) -> Call:
        setattr(call, OWN, own)
        doc = inspect.getdoc(call) or ""
        names = ", ".join(f"``{name}``" for name in shared_options(call)) or "what they stand for"
        call.__doc__ = f"{doc}\n\nThe same on every rank, and compared: {names}."
        return call

    return declare


def shared_options(call: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments in which ranks may not differ."""
    own = getattr(call, OWN)
    return [name for name in inspect.signature(call).parameters if name != "self" and name not in own]


def encode_options(call: Callable[..., Any], arguments: Mapping[str, Any], **said: Any) -> bytes:
    """Return what a rank tells the others of its call and options, for :func:`~.communicator.check_same`, as JSON.

    Args:
        call: The public call.
        arguments: Its arguments by name: ``locals()`` in its first line.
        **said: What stands for an argument that has no text of its own, and what else is to be compared.
    """
    values = {name: arguments[name] for name in shared_options(call)}
    return json.dumps({"call": call.__name__, **values, **said}, default=repr).encode()
