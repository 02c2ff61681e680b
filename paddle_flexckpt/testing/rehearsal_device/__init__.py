"""A simulated accelerator for Paddle's CPU wheel: device memory, streams, events, copies and collectives.

It is a plugin of Paddle's CustomDevice interface, compiled by g++ at first use. It serves to test code that handles
device tensors on a machine without a device; it computes nothing faster.
"""

from .build import BuildError, build, missing_tools
from .control import Span, configure, delay, page_lock, page_unlock, read, reset, spans, stats, trace
from .environment import DEVICE_TYPE, environment
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
    "spans",
    "stats",
    "trace",
]
