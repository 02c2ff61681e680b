"""Simulate an accelerator for Paddle's CPU wheel: device memory, streams, events, copies and collectives.

It is a plugin of Paddle's CustomDevice interface, compiled by g++ at first use. It serves to test code that handles
device tensors on a machine without a device; it computes nothing faster. A process has it if it is started with the
variables of :func:`environment`; :func:`missing_tools` says why there is none.

* Memory: host code that follows the address of a device gets :class:`HostTouchError`, which names the tensor, and the
  counter ``host_touches`` goes up. (A system call that is given such an address fails with EFAULT, and is not counted.)
  Fresh memory is filled with 0xff, freed memory with 0xfb; a copy, kernel or collective that names freed memory raises
  an error, counted as ``freed_uses``. When ``memory_gib`` are used up, Paddle raises its MemoryError.
* What was freed serves the next work of the stream that used it first, as with a caching allocator: other streams that
  still use it meet 0xfb. With ``eager_free=0``, freeing waits for the device instead, as ``cudaFree`` does.
* Streams: a thread each, with bandwidths, latency and delays that follow from ``seed``; under ``lazy=1`` a stream
  does only what somebody waits for, so that a missing wait always shows. ``lose_event`` and ``lose_wait`` drop one.
* Collectives: sockets between processes. A peer that has ended, or is silent for ``patience_s``, makes the device fail:
  each later wait raises an error with the communicator and the rank.
* :func:`stats`: counters; :func:`trace`: every copy and collective, with waits and Python callers under ``trace=1``.
"""

from .build import BuildError, build, missing_tools
from .control import (
    DEVICE_TYPE,
    Span,
    configure,
    delay,
    environment,
    page_lock,
    page_unlock,
    read,
    reset,
    runtime,
    spans,
    stats,
    trace,
)
from .touches import HostTouchError

__all__ = [
    "DEVICE_TYPE",
    "BuildError",
    "HostTouchError",
    "Span",
    "build",
    "configure",
    "delay",
    "environment",
    "missing_tools",
    "page_lock",
    "page_unlock",
    "read",
    "reset",
    "runtime",
    "spans",
    "stats",
    "trace",
]
