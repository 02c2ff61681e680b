"""Suspend the cyclic garbage collector where very many objects are made, none of which is in a cycle.

A pass over all objects of a process that has imported Paddle takes a tenth of a second, and making objects for some
thousand tensors brings one about.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Suspend the collector for the time of a with statement, or of a function that this decorates.

    Of threads that do so at the same time, the first to end lets it run again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
