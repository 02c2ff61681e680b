"""Closing inherited sockets, locks and shared memory in a fork, before anything else runs there.

The fork's copy of a socket keeps the connection open when the owner has ended. Likewise a copy of a lock's descriptor
keeps the lock, and a copy of shared memory keeps the memory. A fork uses none of them.
"""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Held = TypeVar("Held")
_HELD: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def close_in_forks(held: Held, close: Callable[[Held], object] = operator.methodcaller("close")) -> Held:
    """Have each fork of this process close its copy of an object, as long as the object lives; return the object."""
    _HELD[held] = close
    return held


def _close() -> None:
    for held, close in list(_HELD.items()):
        with contextlib.suppress(OSError):  # the system has closed it all the same
            close(held)
    _HELD.clear()


os.register_at_fork(after_in_child=_close)
