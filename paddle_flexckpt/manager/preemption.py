"""Preemption signals: a flag for the loop, the handlers that were there before, forks, and data loaders' workers.

A queue or an init system may send a signal to every process of a job. Where it ends a worker of a data loader, Paddle
raises in the trainer before the step is saved. So a worker that is forked while a manager is open ignores its signals.

Tested in tests/manager/test_schedule.py and tests/manager/test_loader_workers.py.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.undo import Undo

_LIBC = ctypes.CDLL(None)
# Room for a struct sigaction or a sigset_t of any C library. Their contents are not used here.
_STRUCT_BYTES = 1024


def check_signals(given: object) -> tuple[int, ...]:
    """Return preemption signals as a tuple, or raise ValidationError."""
    signals = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else None
    if signals is None or not all(isinstance(each, int) and not isinstance(each, bool) for each in signals):
        raise ValidationError(
            f"preemption_signals has to be signals in a tuple; got {given!r}. Remedy (FC101): give (signal.SIGTERM,), "
            "say, or () for none"
        )
    return signals


class PreemptionSignals:
    """Handlers of preemption signals, which only set a flag; the loop saves between two steps.

    A previous handler that is a Python function is called as well, except for Python's own handler of SIGINT, which
    raises KeyboardInterrupt. Without signals no handler is installed. A fork of the process has the previous handlers,
    from its first instruction; a data loader's worker then ignores the signals (:class:`LoaderWorkers`).
    """

    def __init__(self, signals: Iterable[int]) -> None:
        """Install the handlers, or raise ValidationError and install none."""
        self._received = False
        self._closed = self._ignores = False
        # The previous handlers, as Python and as the system knows them: a handler may be one in C.
        self._previous: dict[int, tuple[Any, Any]] = {}
        numbers = tuple(dict.fromkeys(signals))
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValidationError(
                "signal handlers can be installed in the main thread only. Remedy (FC102): make the manager there, or "
                "give preemption_signals=()"
            )
        if numbers:
            self._workers = loader_workers(os.getpid())  # it imports Paddle, which installs handlers
        for number in numbers:
            try:
                previous, action = signal.getsignal(number), ctypes.create_string_buffer(_STRUCT_BYTES)
                _LIBC.sigaction(number, None, action)
                # Known before the handler can run.
                self._previous[number] = previous, action
                signal.signal(number, self._handle)
            except (OSError, ValueError, TypeError) as error:
                self._previous.pop(number, None)
                self.close()
                raise ValidationError([f"preemption_signals: {number!r} cannot be handled: {error}"]) from error
        if numbers:
            _register_at_forks()
            _INSTALLED.add(self)
            self._workers.count(self._previous, 1)

    @property
    def is_active(self) -> bool:
        """Return whether there are signals to wait for."""
        return bool(self._previous)

    @property
    def received(self) -> bool:
        """Return whether one of the signals has come."""
        return self._received

    def close(self, stopped: bool = False) -> None:
        """Restore the previous handlers; after a signal, or if the ranks have ``stopped`` for one, only Python's.

        A handler in C and the default action would end the process: launchers send a signal several times.
        In another thread than the main thread, or if another handler was installed after this one, that is impossible.
        Then this handler stays, and does what the previous one did.
        """
        if self._closed:
            return
        self._closed, self._ignores = True, stopped or self._received
        if self in _INSTALLED:
            self._workers.count(self._previous, -1)
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                _uncover(number)

    def _stays(self, number: int) -> bool:
        """Return whether a signal is ignored after the end."""
        previous = self._previous[number][0]
        return self._ignores and not callable(previous) and previous != signal.SIG_IGN

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number][0]
        if not self._closed:
            self._received = True
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, frame)
        elif self._stays(number):
            pass
        elif signal.getsignal(number) == self._handle:
            _uncover(number)
            signal.raise_signal(number)
        elif callable(previous):
            previous(number, frame)


# All that exist, closed or not.
_INSTALLED: weakref.WeakSet[PreemptionSignals] = weakref.WeakSet()
# For each thread that forks, the arguments of the call that restores its signal mask.
_MASKS: dict[int, tuple[int, Any, None]] = {}


def _uncover(number: int) -> None:
    """Restore the handlers that closed objects have replaced, from the newest on."""
    while True:
        owner = getattr(signal.getsignal(number), "__self__", None)
        if not isinstance(owner, PreemptionSignals) or not owner._closed or owner._stays(number):
            return
        previous, action = owner._previous[number]
        # Python cannot set a handler that it does not know (None), but the system can.
        signal.signal(number, signal.SIG_DFL if previous is None else previous)
        _LIBC.sigaction(number, action, None)


@functools.cache
def _register_at_forks() -> None:
    """Have each fork put the previous handlers back in the child; a signal that comes earlier is held until then.

    ``register_at_fork`` ignores exceptions of its functions, and a handler may raise one. So the signal mask is
    restored by a callable in C, which no handler can interrupt: ``next`` of a lazy ``starmap``.
    """
    arguments = map(_MASKS.pop, iter(threading.get_ident, None))
    give_back = functools.partial(next, itertools.starmap(_LIBC.pthread_sigmask, arguments))
    os.register_at_fork(before=_hold_signals, after_in_child=_close_all)
    os.register_at_fork(after_in_parent=give_back, after_in_child=give_back)


def _hold_signals() -> None:
    held, before = (ctypes.create_string_buffer(_STRUCT_BYTES) for _ in range(2))
    for number in {number for each in _INSTALLED for number in each._previous}:
        _LIBC.sigaddset(held, number)
    _LIBC.pthread_sigmask(int(signal.SIG_BLOCK), held, before)
    _MASKS.setdefault(threading.get_ident(), (int(signal.SIG_SETMASK), before, None))


def _close_all() -> None:
    for each in list(_INSTALLED):
        each._closed, each._ignores = True, False
    for number in {number for each in _INSTALLED for number in each._previous}:
        _uncover(number)


class LoaderWorkers:
    """The workers of this process's data loaders, which outlive the signals of open managers, and end with it."""

    def __init__(self) -> None:
        """Begin without signals."""
        from multiprocessing import get_start_method, util

        from paddle.io.dataloader.dataloader_iter import _DataLoaderIterMultiProcess

        self._loader, self._trainer, self._undo = _DataLoaderIterMultiProcess, os.getpid(), Undo()
        # Without a look at the default, which would be fixed by that. Paddle's is to fork.
        self._forks = lambda: get_start_method(allow_none=True) in (None, "fork")
        # Shared with forks. By the number of a signal: how many open managers wait for it. At 0: whether this exits.
        self._shared = memoryview(mmap.mmap(-1, 4 * signal.NSIG)).cast("I")
        # At exit multiprocessing calls this, and then terminates and joins the workers.
        util.Finalize(None, self._shared.__setitem__, (0, 1), exitpriority=0)

    def count(self, signals: Iterable[int], change: int) -> None:
        """Count a manager that waits for signals, or one that does no more."""
        for number in signals:
            self._shared[number] += change
        if not any(self._shared[1:]):
            self._undo.put_back()
        elif not self._undo:
            self._undo.set(self._loader, "_init_workers", self._shielding(self._loader._init_workers))

    def _shielding(self, fork_workers: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return Paddle's method that forks a loader's workers, with signals held until the workers ignore them."""

        @functools.wraps(fork_workers)
        def fork_shielded(loader: Any) -> None:
            if os.getpid() != self._trainer or not self._forks():
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
            time.sleep(0.5)
        os._exit(0)


@functools.cache
def loader_workers(trainer: int) -> LoaderWorkers:
    """Return the object of a process, by its number; a fork has one of its own."""
    return LoaderWorkers()
