"""Decide when to save, on all ranks alike: by the policies, and by signals that say that the process will soon end."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.engine.agreement import check_same
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.manager.contents import check_step
from paddle_flexckpt.manager.policies import SavePolicy


class PreemptionSignals:
    """Set a flag when a signal comes, and do nothing else: the loop saves, between two steps.

    A handler that was there before and is a Python function is called as well; Python's own handler of SIGINT, which
    raises KeyboardInterrupt, is not. Without signals nothing is installed.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        """Install the handlers.

        Raises:
            ValidationError: This is not the main thread, or something is not a signal that can be handled; nothing is
                installed.
        """
        self._received = False
        self._closed = False
        self._previous: dict[int, Any] = {}
        numbers = tuple(dict.fromkeys(signals))
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValidationError(
                "signal handlers can be installed in the main thread only. Remedy: make the manager there, or give "
                "preemption_signals=()"
            )
        for number in numbers:
            try:
                # Known before the handler can run.
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
            except (OSError, ValueError, TypeError) as error:
                self._previous.pop(number, None)
                self.close()
                raise ValidationError([f"preemption_signals: {number!r} cannot be handled: {error}"]) from error

    @property
    def watches(self) -> bool:
        """Return whether there are signals to wait for."""
        return bool(self._previous)

    @property
    def received(self) -> bool:
        """Return whether one of the signals has come."""
        return self._received

    def close(self) -> None:
        """Put the old handlers back.

        Where that cannot be done, in another thread or because somebody's handler has come on top of this one, this one
        stays, and does what the old one did.
        """
        if self._closed:
            return
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._handle:
                    # What was not installed from Python is unknown (None), and cannot be put back.
                    signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if self._closed:
            if callable(previous):
                previous(number, frame)
            elif previous != signal.SIG_IGN and signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._received = True
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


class SaveSchedule:
    """Say when to save.

    Attributes:
        should_stop: Whether a rank had got a signal when ranks last agreed; the same on every rank.
    """

    def __init__(self, comm: Communicator, policies: Sequence[SavePolicy], signals: PreemptionSignals) -> None:
        """Take the ranks that save, the policies, any of which may want it, and the signals of this rank."""
        self._comm = comm
        self._policies = policies
        self._signals = signals
        self._agrees = signals.watches or any(policy.uses_clock for policy in policies)
        self.should_stop = False
        self._saved_since_stop = False
        # The step that storage and live state have in common, if they have, and since when.
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
        """Note that live state and the checkpoint of a step are the same now: it was saved, or else restored."""
        self._last_step = step
        self._last_time = time.monotonic()
        self._saved_since_stop = self._saved_since_stop or (saved and self.should_stop)
