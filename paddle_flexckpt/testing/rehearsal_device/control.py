"""Read the counters of the rehearsal device, and change its settings."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from .build import LIBRARY


class Span(NamedTuple):
    """One copy or collective: what it was, on which device, from when to when (time.monotonic()), and its bytes."""

    what: str
    device: int
    begin: float
    end: float
    nbytes: int


@functools.cache
def _library() -> Any:
    root = os.environ.get("CUSTOM_DEVICE_ROOT")
    if not root:
        raise RuntimeError("CUSTOM_DEVICE_ROOT is not set: start the process with rehearsal_device.environment()")
    library = ctypes.CDLL(str(Path(root) / LIBRARY))
    library.rehearsal_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    library.rehearsal_register_host.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.rehearsal_unregister_host.argtypes = [ctypes.c_void_p]
    return library


def configure(**settings: float) -> None:
    """Change settings: h2d_gibs, d2h_gibs, d2d_gibs, ccl_gibs, latency_us, pageable_factor, eager_pageable, log."""
    for name, value in settings.items():
        if _library().rehearsal_set(name.encode(), float(value)):
            raise ValueError(f"the rehearsal device has no setting {name!r}")


def stats() -> dict[str, Any]:
    """Return all counters since the last reset."""
    out = ctypes.create_string_buffer(1 << 16)
    if _library().rehearsal_stats(out, len(out)):
        raise RuntimeError("the counters do not fit into the buffer")
    return json.loads(out.value)


def reset() -> None:
    """Set all counters to zero, peaks to what is in use."""
    _library().rehearsal_reset()


def spans() -> list[Span]:
    """Return every copy and collective since the last reset."""
    with tempfile.NamedTemporaryFile(mode="r") as file:
        if _library().rehearsal_spans(file.name.encode()):
            raise OSError(f"the rehearsal device cannot write {file.name}")
        rows = [line.split() for line in file]
    return [Span(what, int(device), float(a), float(b), int(n)) for what, device, a, b, n in rows]
