"""The workers of Paddle's data loaders, which outlive preemption signals and end with the trainer.

A queue or an init system may send a signal to every process of a job. Where it ends a worker, Paddle raises in the
trainer, before the step is saved. So a worker that is forked while a manager is open ignores the manager's signals.

Tested in tests/manager/test_loader_workers.py.
"""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import util
from types import FrameType
from typing import Any

from paddle_flexckpt.undo import Undo

_POLL_SECONDS = 0.5


class LoaderWorkers:
    """What a process tells the workers of its data loaders, in memory that it shares with its forks."""

    def __init__(self) -> None:
        """Begin without signals."""
        from paddle.io.dataloader.dataloader_iter import _DataLoaderIterMultiProcess

        self._loader, self._trainer = _DataLoaderIterMultiProcess, os.getpid()
        self._undo = Undo()
        # By the number of the signal: how many open managers wait for it. At 0: whether the trainer is about to exit.
        self._shared = memoryview(mmap.mmap(-1, 4 * signal.NSIG)).cast("I")
        # At exit multiprocessing calls this, and then terminates and joins the workers.
        util.Finalize(None, self._shared.__setitem__, (0, 1), exitpriority=0)

    def shield(self, signals: Iterable[int]) -> None:
        """Have the workers that are forked from now on ignore signals."""
        for number in signals:
            self._shared[number] += 1
        if not self._undo and multiprocessing.get_start_method() == "fork":
            self._undo.set(self._loader, "_init_workers", self._shielding(self._loader._init_workers))

    def expose(self, signals: Iterable[int]) -> None:
        """Undo a :meth:`shield`: the signals end the workers again."""
        for number in signals:
            self._shared[number] -= 1
        if not any(self._shared[1:]):
            self._undo.put_back()

    def _shielding(self, fork_workers: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return Paddle's method that forks a loader's workers, with signals held until the workers ignore them."""

        @functools.wraps(fork_workers)
        def fork_shielded(loader: Any) -> None:
            if os.getpid() != self._trainer:
                return fork_workers(loader)
            signals, given = [each for each in range(1, signal.NSIG) if self._shared[each]], loader._worker_init_fn
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            try:
                # Called after Paddle has set its own handler of SIGTERM, in C.
                loader._worker_init_fn = functools.partial(self._begin, signals, mask, given)
                fork_workers(loader)
            finally:
                loader._worker_init_fn = given
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        return fork_shielded

    def _begin(self, signals: list[int], mask: set[int], given: Callable[[int], object] | None, worker: int) -> None:
        """Begin a worker."""
        for number in signals:
            signal.signal(number, self._handle)
        threading.Thread(target=self._end_with_trainer, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if given is not None:
            given(worker)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._shared[0] or not self._shared[number]:
            os._exit(0)  # as Paddle's handler does

    def _end_with_trainer(self) -> None:
        while os.getppid() == self._trainer and not self._shared[0]:
            time.sleep(_POLL_SECONDS)
        os._exit(0)


@functools.cache
def loader_workers(trainer: int) -> LoaderWorkers:
    """Return the one object of a process, by its number; a fork has another one of its own."""
    return LoaderWorkers()
