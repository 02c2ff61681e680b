"""Suspend the cyclic garbage collector where very many objects are made, none of which is in a cycle.

A pass over all objects of a process that has imported Paddle takes a tenth of a second, and creating objects for some
thousand tensors triggers one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Suspend the collector during a with statement, or a decorated function.

    If several threads do so at the same time, the first to end resumes it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
