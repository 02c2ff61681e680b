"""Move data in two stages that run at the same time: threads fill buffers, and their caller uses the full ones.

A save fills them from a device and writes them to a file; a load fills them from a file and copies them to a device. A
few buffers are used again and again, so the memory is bounded, whatever the amount of data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class BufferRing(Generic[T]):
    """A ring of buffers that threads fill, in order, while the caller uses the full ones.

    A context manager: leaving it ends the threads, also after an error.
    """

    def __init__(
        self,
        buffers: Sequence[np.ndarray],
        fill: Callable[[np.ndarray], T | None],
        finish: Callable[[T], None] | None = None,
    ) -> None:
        """Take the buffers and the functions that fill them; :meth:`take` begins.

        ``fill`` fills a buffer and returns a description of the content, None at the end. One thread at a time does so.
        If there is a ``finish``, it only chooses the content, which ``finish`` copies: two threads do so, so that the
        device or disk always has a next copy.
        """
        self._fill, self._finish = fill, finish
        self._free: SimpleQueue[np.ndarray | None] = SimpleQueue()
        # The begun fills, in order.
        self._begun: SimpleQueue[Future[tuple[np.ndarray, T] | None]] = SimpleQueue()
        self._end: Future[tuple[np.ndarray, T] | None] | None = None
        self._order, self._is_over = threading.Lock(), False
        self._threads: list[threading.Thread] = []
        for buffer in buffers:
            self._free.put(buffer)

    def take(self) -> tuple[np.ndarray, T] | None:
        """Return the next full buffer and its content's description; None at the end. Raises an error of ``fill``."""
        if not self._threads:
            for _ in range(1 if self._finish is None else 2):
                thread = threading.Thread(target=self._run, name="flexckpt-ring", daemon=True)
                self._threads.append(thread)
                thread.start()
        taken = self._end or self._begun.get()
        if taken.exception() is not None or taken.result() is None:
            self._end = taken  # the end stays the end
        return taken.result()

    def give_back(self, buffer: np.ndarray) -> None:
        """Allow a buffer to be filled again."""
        self._free.put(buffer)

    def _run(self) -> None:
        while True:
            done: Future[tuple[np.ndarray, T] | None] = Future()
            try:
                with self._order:
                    buffer = None if self._is_over else self._free.get()
                    if self._is_over or buffer is None:
                        return
                    self._begun.put(done)
                    item = self._fill(buffer)
                    if item is None:
                        self._is_over = True
                if item is None:
                    done.set_result(None)
                    return
                if self._finish is not None:
                    self._finish(item)
            except BaseException as error:  # the caller raises it
                self._is_over = True
                done.set_exception(error)
                return
            done.set_result((buffer, item))

    def close(self) -> None:
        """Fill no more, and wait for the threads."""
        self._is_over = True
        self._free.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> BufferRing[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
