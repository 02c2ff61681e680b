"""Preemption: a signal that says that this process will soon be ended, as a flag that the training loop can look at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from paddle_flexckpt.catalog import ValidationError


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
                [
                    "signal handlers can be installed in the main thread only. Remedy: make the manager there, or give "
                    "preemption_signals=()"
                ]
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
