"""Priorities of a process: it gets what the others leave."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Literal, get_args

IoClass = Literal["best-effort-low", "idle", "unchanged"]
IO_CLASSES: tuple[str, ...] = get_args(IoClass)

# ioprio_set has no function in libc; its number is the kernel's, by machine.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282, "loongarch64": 30, "riscv64": 30}
_THIS_PROCESS = 1
# Class in the upper bits, level (7 is the lowest) in the lower.
_IOPRIO = {"best-effort-low": (2 << 13) | 7, "idle": 3 << 13}


def lower_priority(nice: int, io_class: str) -> list[str]:
    """Lowers this process's priorities for the processor and for storage.

    Args:
        nice: What to add to its nice value.
        io_class: One of :data:`IO_CLASSES`.

    Returns:
        What could not be done and why, in words; the process goes on with the priority that it has.
    """
    refused = []
    try:
        os.nice(nice)
    except OSError as error:
        refused.append(f"the background writer keeps its CPU priority: nice({nice}) was refused ({error})")
    if io_class in _IOPRIO:
        problem = _set_io_priority(_IOPRIO[io_class])
        if problem:
            refused.append(f"the background writer keeps its I/O priority: {io_class!r} was refused ({problem})")
    return refused


def _set_io_priority(value: int) -> str | None:
    """What is wrong, or None."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return f"not known how on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _THIS_PROCESS, 0, value) != 0:
        return os.strerror(ctypes.get_errno())
    return None
