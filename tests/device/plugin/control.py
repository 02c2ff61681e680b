"""Give a process the rehearsal device, read its counters and its trace, and change its settings.

Tested in tests/device/test_plugin.py and tests/device/test_seeded_mistakes.py.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from .build import LIBRARY, build

DEVICE_TYPE = "rehearsal"

# Paddle keeps freed memory for later unless it is told to give it back at once. Only then does the device know that
# memory is freed: its counters of memory are exact, and a use of freed memory is found.
_FREE_AT_ONCE = {"FLAGS_allocator_strategy": "auto_growth", "FLAGS_free_idle_chunk": "1"}
# A rank that holds Paddle's store on libuv may end by a signal where a peer hangs up late (U18).
_NO_LIBUV = {"FLAGS_tcp_store_using_libuv": "0"}
_ROOT = Path(__file__).resolve().parents[3]
_WAITS = frozenset({"wait_stream", "wait_event", "wait_device", "stream_wait"})


class Span(NamedTuple):
    """Describe one copy, collective or wait on a device.

    Attributes:
        what: ``h2d``, ``d2h``, ``d2d``; a collective's name, such as ``all_reduce``; ``group`` for messages between
            ranks that were sent together; ``wait_stream``, ``wait_event``, ``wait_device`` for waits of the host;
            ``stream_wait`` for a stream's wait for an event.
        device: Number of the device.
        begin: When the work began, not when it was asked for; on the clock of ``time.monotonic()``.
        end: When it was done.
        nbytes: Bytes that were moved; of a collective, those that were sent to other ranks.
        stream: Number of the stream, in the order of creation; -1 where none takes part.
        pageable: Whether the host's memory was pageable.
        caller: ``file:line`` of the innermost Python frame outside Paddle that asked for it. It is empty unless the
            setting ``trace`` was 1 at that time, or where the thread runs no Python.
    """

    what: str
    device: int
    begin: float
    end: float
    nbytes: int
    stream: int = -1
    pageable: bool = False
    caller: str = ""


class Touch(NamedTuple):
    """Describe a host access to device memory: where it was, and the allocation that it met."""

    device: int
    address: int
    begin: int
    nbytes: int
    freed: bool
    known: bool
    main_thread: bool
    origin: str


def environment(devices: int = 2, runtime: str = "simulated", **settings: object) -> dict[str, str]:
    """Compile the plugin if necessary, and return the environment variables of a process that shall have it.

    Args:
        devices: Number of devices. Several may be the same card.
        runtime: What is below the plugin: ``simulated``, ``cuda``, or ``fake`` (CUDA's runtime, pretended).
        **settings: Settings of :func:`configure`, and ``open`` (1: the host may touch device memory).
    """
    variables = {f"REHEARSAL_{name.upper()}": str(value) for name, value in settings.items()}
    # Processes with the device import this package, to name the tensor that the host has touched.
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"CUSTOM_DEVICE_ROOT": str(build(runtime)), "REHEARSAL_DEVICES": str(devices), "PYTHONPATH": path}
    own |= {"FLEXCKPT_DEVICE_COUNTERS": __package__, **_NO_LIBUV}
    if runtime != "cuda":
        own["FLEXCKPT_SIMULATED_DEVICE"] = "1"
    # Freeing memory of a real device waits for all its work.
    return {**own, **(_FREE_AT_ONCE if runtime != "cuda" else {}), **variables}


@functools.cache
def _library() -> Any:
    root = os.environ.get("CUSTOM_DEVICE_ROOT")
    if not root:
        raise RuntimeError("CUSTOM_DEVICE_ROOT is not set: start the process with plugin.environment()")
    library = ctypes.CDLL(str(Path(root) / LIBRARY))
    library.rehearsal_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    copy: list[Any] = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.rehearsal_read.argtypes = [*copy, ctypes.c_char_p, ctypes.c_size_t]
    library.rehearsal_register_host.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.rehearsal_unregister_host.argtypes = [ctypes.c_void_p]
    library.rehearsal_runtime.restype = ctypes.c_char_p
    return library


def runtime() -> str:
    """Return the name of the runtime that this process's plugin was compiled for."""
    name: bytes = _library().rehearsal_runtime()
    return name.decode()


def configure(**settings: float) -> None:
    """Change settings of this process; each counts from the next operation on.

    ``source/rehearsal.h`` says what they mean: ``h2d_gibs``, ``d2h_gibs``, ``d2d_gibs``, ``ccl_gibs``,
    ``latency_us``, ``pageable_factor``, ``eager_pageable``, ``eager_free``, ``lazy``, ``delay_us``, ``seed``,
    ``memory_gib``, ``patience_s``, ``lose_event``, ``lose_wait``, ``trace``, ``log``.
    """
    for name, value in settings.items():
        if _library().rehearsal_set(name.encode(), float(value)):
            raise ValueError(f"the rehearsal device has no setting {name!r}")


def stats() -> dict[str, Any]:
    """Return all counters since the last reset."""
    counters: dict[str, Any] = _json(_library().rehearsal_stats)
    return counters


def reset() -> None:
    """Set all counters to zero, peaks to what is in use, and forget the trace."""
    _library().rehearsal_reset()


def spans() -> list[Span]:
    """Return every copy and collective since the last reset, in the order in which they ended."""
    return [span for span in trace() if span.what not in _WAITS]


def trace() -> list[Span]:
    """Return every copy and collective since the last reset, and every wait under the setting ``trace``."""
    with tempfile.NamedTemporaryFile(mode="r") as file:
        if _library().rehearsal_spans(file.name.encode()):
            raise OSError(f"the rehearsal device cannot write {file.name}")
        rows = [line.rstrip("\n").split("\t") for line in file]
    found = [
        Span(what, int(device), float(begin), float(end), int(n), int(stream), pageable == "1", caller)
        for what, device, stream, begin, end, n, pageable, caller in rows
    ]
    # Over CUDA, asynchronous copies are written down when somebody asks.
    return sorted(found, key=lambda span: span.end)


def touches() -> list[Touch]:
    """Return the host accesses to device memory that nobody has been told of yet, each once."""
    return [Touch(**touch) for touch in _json(_library().rehearsal_touches)]


def page_lock(address: int, nbytes: int) -> None:
    """Have the device take host memory for page-locked, as ``cudaHostRegister`` does; copies of it do not wait."""
    _library().rehearsal_register_host(address, nbytes)


def page_unlock(address: int) -> None:
    """End what :func:`page_lock` began."""
    _library().rehearsal_unregister_host(address)


def read(address: int, nbytes: int, device: int = 0) -> bytes:
    """Copy device memory to the host through the device, as an extension would; it waits for no stream.

    Raises:
        RuntimeError: The range is not within one live allocation.
    """
    to, wrong = ctypes.create_string_buffer(max(nbytes, 1)), ctypes.create_string_buffer(1 << 16)
    if _library().rehearsal_read(device, to, address, nbytes, wrong, len(wrong)):
        raise RuntimeError(wrong.value.decode(errors="replace"))
    return to.raw[:nbytes]


def delay(device: int, stream: int, operation: int) -> float:
    """Return the seconds before an operation of a stream (the first is number 1) under the present settings."""
    function = _library().rehearsal_delay  # the simulated runtime alone has it
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64], ctypes.c_double
    seconds: float = function(device, stream, operation)
    return seconds


def _json(function: Any) -> Any:
    out = ctypes.create_string_buffer(1 << 20)
    if function(out, len(out)):
        raise RuntimeError("the answer of the rehearsal device does not fit into the buffer")
    return json.loads(out.value)
