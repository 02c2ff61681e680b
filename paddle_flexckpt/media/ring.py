"""Move data in two stages that run at the same time: a thread fills buffers, its caller uses those that are full.

A save fills them from a device and writes them to a file, a load fills them from a file and copies them to a device.
There are a few buffers, each used again and again, so the memory is bounded whatever passes through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class BufferRing(Generic[T]):
    """Fill buffers in a thread of its own, in order, while the caller uses those that are full.

    A context manager: at its end the thread has ended, whatever happened.
    """

    def __init__(self, buffers: Sequence[np.ndarray], fill: Callable[[np.ndarray], T | None]) -> None:
        """Take what is to be filled and how; :meth:`take` begins.

        Args:
            buffers: The buffers.
            fill: Puts something into a buffer and returns what it is; None when there is nothing more. Only the thread
                calls it.
        """
        self._fill = fill
        self._free: SimpleQueue[np.ndarray | None] = SimpleQueue()
        self._full: SimpleQueue[tuple[np.ndarray, T] | BaseException | None] = SimpleQueue()
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        for buffer in buffers:
            self._free.put(buffer)

    def take(self) -> tuple[np.ndarray, T] | None:
        """Return the next full buffer and what is in it; None at the end. What ``fill`` raised is raised here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flexckpt-ring", daemon=True)
            self._thread.start()
        taken = self._full.get()
        if isinstance(taken, tuple):
            return taken
        self._full.put(taken)  # the end stays the end
        if taken is not None:
            raise taken
        return None

    def give_back(self, buffer: np.ndarray) -> None:
        """Let a buffer be filled again."""
        self._free.put(buffer)

    def _run(self) -> None:
        try:
            while (buffer := self._free.get()) is not None and not self._is_stopped:
                item = self._fill(buffer)
                if item is None:
                    break
                self._full.put((buffer, item))
        except BaseException as error:  # the caller raises it
            self._full.put(error)
        else:
            self._full.put(None)

    def close(self) -> None:
        """Fill no more, and wait for the thread."""
        self._is_stopped = True
        self._free.put(None)
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> BufferRing[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
