"""Progress of a call that moves many bytes. The thread that moves them calls the caller's callback.

A callback is called after a number of bytes, not after a time. So the calls are the same in every run, and a call that
stands still is silent. Tested in tests/test_progress.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from paddle_flexckpt.catalog.errors import CheckpointError

# A callback is called about STEPS times, and more often if there would be more than MOST_STEP_BYTES between two calls.
STEPS = 100
MOST_STEP_BYTES = 64 << 20


@dataclass(frozen=True)
class Progress:
    """The progress of a call on this rank.

    Attributes:
        phase: The present phase: ``"write"`` (save, export, conversion, publish), ``"read"`` (load), ``"verify"``,
            ``"digest"`` or ``"compare"``; of an asynchronous save ``"stage"``, ``"queue"``, ``"write"`` and
            ``"commit"``.
        bytes_done: Bytes of tensors that are done; never less than before, and never more than ``bytes_total``.
        bytes_total: Bytes of tensors that this rank has to do.
        items_done: Shards, tensors or files that are done.
        items_total: How many there are; 0 where they are not counted.
    """

    phase: str
    bytes_done: int
    bytes_total: int
    items_done: int = 0
    items_total: int = 0

    @property
    def fraction(self) -> float:
        """Return the part that is done, from 0 to 1; 1 if there is nothing to do."""
        return self.bytes_done / self.bytes_total if self.bytes_total else 1.0


ProgressCallback = Callable[[Progress], object]


class Meter:
    """A counter of what is done, which calls the callback after each step. Threads may share it.

    At the first call nothing is done, at the last all is::

        meter = Meter(callback, "write", bytes_total, items_total)
        for tensor in tensors:
            write(tensor)
            meter.add(tensor.nbytes, items=1)
        meter.finish()

    If the callback raises, the method that called it raises a CheckpointError, and the callback is not called again.
    """

    def __init__(
        self,
        callback: ProgressCallback | None,
        phase: str,
        bytes_total: int,
        items_total: int = 0,
        bytes_done: int = 0,
        items_done: int = 0,
    ) -> None:
        """Call the callback for the first time, with what is done already; None makes a meter that does nothing."""
        self._callback = callback
        self._phase, self._bytes_total, self._items_total = phase, bytes_total, items_total
        self._bytes_done, self._items_done, self._last = bytes_done, items_done, bytes_done
        self._step = max(1, min(bytes_total // STEPS, MOST_STEP_BYTES))
        self._lock = threading.RLock()
        if callback is not None:
            self._report()

    @property
    def is_heard(self) -> bool:
        """Return whether there is a callback; else nothing need be counted."""
        return self._callback is not None

    def add(self, nbytes: int, items: int = 0) -> None:
        """Count this much more as done."""
        if self._callback is not None:
            with self._lock:
                self.reach(self._bytes_done + nbytes, self._items_done + items)

    def reach(self, bytes_done: int, items_done: int = 0) -> None:
        """Set how much is done in all; less than before changes nothing, and more than all counts as all."""
        if self._callback is None:
            return
        with self._lock:
            self._bytes_done = min(max(self._bytes_done, bytes_done), self._bytes_total)
            self._items_done = min(max(self._items_done, items_done), self._items_total)
            if self._bytes_done - self._last >= self._step and self._bytes_done < self._bytes_total:
                self._report()

    def finish(self) -> None:
        """Set all as done; a second call does nothing."""
        if self._callback is not None:
            with self._lock:
                self._bytes_done, self._items_done = self._bytes_total, self._items_total
                self._report()
                self._callback = None

    def _report(self) -> None:
        callback = self._callback
        if callback is None:  # it raised in another thread
            return
        self._last = self._bytes_done
        progress = Progress(self._phase, self._bytes_done, self._bytes_total, self._items_done, self._items_total)
        try:
            callback(progress)
        except Exception as error:
            self._callback = None
            raise CheckpointError(
                f"the progress callback failed at {progress}: {type(error).__name__}: {error}. Remedy (FC101): mend "
                "the callback, or leave progress= out"
            ) from error


#: A meter that does nothing.
SILENT = Meter(None, "", 0)
