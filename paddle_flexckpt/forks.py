"""Close in a fork, before anything else runs there, what stands for the process that was forked.

A copy of a socket keeps the connection when its owner has gone, one of a lock's descriptor keeps the lock, and one of
shared memory keeps the memory. A fork has no use for any of them.
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
    """Have each fork of this process close its copy of something that lives then; return it."""
    _HELD[held] = close
    return held


def _close() -> None:
    for held, close in list(_HELD.items()):
        with contextlib.suppress(OSError):  # the system has closed it all the same
            close(held)
    _HELD.clear()


os.register_at_fork(after_in_child=_close)
