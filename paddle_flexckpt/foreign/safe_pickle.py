"""A reader of foreign pickles that knows data only.

The standard unpickler finds and calls what a pickle names, and allocates what a pickle declares. This reader is a stack
machine of its own: it knows the operations that protocols 2 to 5 need for plain data, it looks nothing up, and every
length is compared with the bytes that are there before anything is made of it. Nothing in it recurses.
"""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.foreign.pickle_machine import Machine
from paddle_flexckpt.foreign.pickle_values import Limits

DEFAULT_LIMITS = Limits()


def load_pickle(data: bytes | bytearray | memoryview, file: str = "pickle", limits: Limits = DEFAULT_LIMITS) -> Any:
    """The plain data in a pickle: numbers, str, tuple, list, dict, ndarray, and the three metadata classes.

    Args:
        data: The whole pickle, of protocol 2 to 5. Arrays are read-only views of it, maybe not aligned.
        file: Its name, for errors.
        limits: What it may cost.

    Returns:
        The object. numpy's numbers become Python's.

    Raises:
        UnsafePickleError: It names anything else, or costs more than the limits allow. Nothing was called.
        CorruptCheckpointError: It is cut short or not a pickle.
    """
    view = memoryview(data).toreadonly().cast("B")
    return Machine(view, file, limits).run()
