"""The decision to save, the same on all ranks: by the policies, and by signals that the process will soon be ended."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.manager.policies import SavePolicy
from paddle_flexckpt.manager.step_contents import check_step
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.agreement import check_same

_LIBC = ctypes.CDLL(None)
# Room for a struct sigaction or a sigset_t of any C library. Their contents are not used here.
_STRUCT_BYTES = 1024


class PreemptionSignals:
    """Handlers of preemption signals, which only set a flag; the loop saves between two steps.

    A previous handler that is a Python function is called as well, except for Python's own handler of SIGINT, which
    raises KeyboardInterrupt. Without signals no handler is installed. A fork of the process has the previous handlers,
    from its first instruction.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        """Install the handlers.

        Raises:
            ValidationError: This is not the main thread, or something is not a signal that can be handled; nothing is
                installed.
        """
        self._received = False
        self._closed = False
        # The previous handlers, as Python and as the system knows them: a handler may be one in C.
        self._previous: dict[int, tuple[Any, Any]] = {}
        numbers = tuple(dict.fromkeys(signals))
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValidationError(
                "signal handlers can be installed in the main thread only. Remedy: make the manager there, or give "
                "preemption_signals=()"
            )
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
            _watch_forks()
            _WATCHES.add(self)

    @property
    def watches(self) -> bool:
        """Return whether there are signals to wait for."""
        return bool(self._previous)

    @property
    def received(self) -> bool:
        """Return whether one of the signals has come."""
        return self._received

    def close(self) -> None:
        """Restore the previous handlers.

        In another thread than the main thread, or if another handler was installed after this one, that is impossible.
        Then this handler stays, and does what the previous one did.
        """
        if self._closed:
            return
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                _uncover(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number][0]
        if not self._closed:
            self._received = True
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, frame)
        elif signal.getsignal(number) == self._handle:
            _uncover(number)
            signal.raise_signal(number)
        elif callable(previous):
            previous(number, frame)


# All that exist, closed or not.
_WATCHES: weakref.WeakSet[PreemptionSignals] = weakref.WeakSet()
# For each thread that forks, the arguments of the call that restores its signal mask.
_MASKS: dict[int, tuple[int, Any, None]] = {}


def _uncover(number: int) -> None:
    """Restore the handlers that closed watches have replaced, from the newest on."""
    while True:
        watch = getattr(signal.getsignal(number), "__self__", None)
        if not isinstance(watch, PreemptionSignals) or not watch._closed:
            return
        previous, action = watch._previous[number]
        # Python cannot set a handler that it does not know (None), but the system can.
        signal.signal(number, signal.SIG_DFL if previous is None else previous)
        _LIBC.sigaction(number, action, None)


@functools.cache
def _watch_forks() -> None:
    """Have each fork end the watches; a signal that comes earlier is held until then.

    A function that runs no Python restores the signal mask: an exception of a handler has to be raised in the caller,
    and not here.
    """
    arguments = map(_MASKS.pop, iter(threading.get_ident, None))
    give_back = functools.partial(next, itertools.starmap(_LIBC.pthread_sigmask, arguments))
    os.register_at_fork(before=_hold_signals, after_in_child=_end_watches)
    os.register_at_fork(after_in_parent=give_back, after_in_child=give_back)


def _hold_signals() -> None:
    held, before = (ctypes.create_string_buffer(_STRUCT_BYTES) for _ in range(2))
    for number in {number for watch in _WATCHES for number in watch._previous}:
        _LIBC.sigaddset(held, number)
    _LIBC.pthread_sigmask(int(signal.SIG_BLOCK), held, before)
    _MASKS.setdefault(threading.get_ident(), (int(signal.SIG_SETMASK), before, None))


def _end_watches() -> None:
    for watch in list(_WATCHES):
        watch._closed = True
    for number in {number for watch in _WATCHES for number in watch._previous}:
        _uncover(number)


class SaveSchedule:
    """The decision to save, by policies and signals.

    Attributes:
        should_stop: Whether a rank had received a signal when the ranks last agreed; the same on every rank.
    """

    def __init__(self, comm: Communicator, policies: Sequence[SavePolicy], signals: PreemptionSignals) -> None:
        """Take the ranks that save, the policies, any of which is enough for a save, and the signals of this rank."""
        self._comm = comm
        self._policies = policies
        self._signals = signals
        self._agrees = signals.watches or any(policy.uses_clock for policy in policies)
        self.should_stop = False
        self._saved_since_stop = False
        # The step that was saved or restored last, and when.
        self._last_step: int | None = None
        self._last_time = time.monotonic()

    def should_save(self, step: int, context: str) -> bool:
        """Return whether to save now. One collective at the most, and none without signals and clocks.

        Raises:
            ValidationError: This is no step, or ranks are at different ones.
        """
        seconds = 0.0
        if self._agrees:

            def look() -> tuple[None, bytes]:
                check_step(step)
                return None, json.dumps([step, self._signals.received, time.monotonic() - self._last_time]).encode()

            _, answers = self._comm.together(look, context)
            steps, received, times = zip(*map(json.loads, answers))
            check_same([json.dumps({"step": each}).encode() for each in steps], context)
            self.should_stop = self.should_stop or any(received)
            seconds = times[0]
        else:
            check_step(step)
        if step == self._last_step:
            return False
        if self.should_stop and not self._saved_since_stop:
            return True
        return any(policy.wants(step, seconds) for policy in self._policies)

    def note(self, step: int, saved: bool) -> None:
        """Record that a step was saved, or else restored: its checkpoint and the live state are the same now."""
        self._last_step = step
        self._last_time = time.monotonic()
        self._saved_since_stop = self._saved_since_stop or (saved and self.should_stop)
