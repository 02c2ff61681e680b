"""Raise an error for a host access to device memory, which names the tensor.

The plugin calls :func:`report` in the main thread, soon after the access. Tested in tests/device/test_plugin.py.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .control import Touch, touches


class HostTouchError(RuntimeError):
    """Signal that host code has followed the address of a device."""


def report() -> None:
    """Raise :class:`HostTouchError` for the accesses since the last report, if there are any."""
    met = touches()
    if met:
        raise HostTouchError("\n".join(_describe(touch) for touch in met))


def _describe(touch: Touch) -> str:
    owners = [] if touch.freed else sorted(set(_owners(touch)))
    if owners:
        what = "in " + " and ".join(owners[:3])
    elif touch.freed:
        what = f"in {touch.nbytes} bytes of freed memory"
    elif touch.known:
        what = f"in an allocation of {touch.nbytes} bytes, of which no tensor is known to Python"
    else:
        what = "in no allocation"
    text = f"the host has touched memory of device rehearsal:{touch.device} at {touch.address:#x}, {what}"
    if touch.origin:
        text += f", {'freed' if touch.freed else 'allocated'} at {touch.origin}"
    if not touch.main_thread:
        text += ". It was in another thread than this; stderr has the stacks of that time"
    return text


def _owners(touch: Touch) -> Iterator[str]:
    """Yield descriptions of the tensors that hold the address, or else of those in the same allocation."""
    tensors = [(tensor, name) for tensor, name in _tensors() if _begin(tensor)]
    inside = [
        (tensor, name)
        for tensor, name in tensors
        if _begin(tensor) <= touch.address < _begin(tensor) + int(tensor.size) * tensor.element_size()
    ]
    near = [(t, name) for t, name in tensors if touch.begin <= _begin(t) < touch.begin + max(touch.nbytes, 1)]
    names: dict[int, tuple[Any, set[str]]] = {}
    for tensor, name in inside or near:
        names.setdefault(id(tensor), (tensor, set()))[1].add(name)
    for tensor, known in names.values():
        called = ", ".join(sorted(known - {""}))
        yield (
            f"tensor {tensor.name!r}{f' ({called})' if called else ''} of shape {list(tensor.shape)}"
            f" and dtype {str(tensor.dtype).split('.')[-1]}"
        )


def _begin(tensor: Any) -> int:
    return int(tensor.data_ptr()) if tensor._is_initialized() else 0


def _tensors() -> Iterator[tuple[Any, str]]:
    """Yield every live tensor that Python code can reach, with a name under which it is known.

    The garbage collector tracks neither Paddle's tensors nor containers of nothing else: they are found in what
    refers to them.
    """
    kind: Any = sys.modules["paddle"].Tensor
    for frame in _frames():
        values = frame.f_locals
        for name, value in list(values.items()):
            yield from _within(kind, value, f"{name!r} of {frame.f_code.co_name}()")
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            values.clear()  # a copy, which the frame would keep, and with it the tensors
    for holder in gc.get_objects():
        if type(holder) is dict:
            for key, value in list(holder.items()):
                yield from _within(kind, value, repr(key) if isinstance(key, str) else "")
        else:
            for value in gc.get_referents(holder):
                yield from _within(kind, value, "")


def _within(kind: Any, value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the value if it is a tensor, or the tensors in it if the garbage collector does not show it."""
    if isinstance(value, kind):
        yield value, name
    elif type(value) in (dict, tuple) and not gc.is_tracked(value):
        for key, part in value.items() if type(value) is dict else enumerate(value):
            yield from _within(kind, part, f"[{key!r}] of {name}" if name else f"[{key!r}]")


def _frames() -> Iterator[FrameType]:
    """Yield the frames of all threads but those of this package."""
    for top in list(sys._current_frames().values()):
        frame: FrameType | None = top
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith(__package__):
                yield frame
            frame = frame.f_back
