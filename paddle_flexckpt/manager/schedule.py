"""Decide when to save, on all ranks alike: the policies, and preemption."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from paddle_flexckpt.engine.agreement import check_same
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.manager.contents import check_step
from paddle_flexckpt.manager.policies import SavePolicy
from paddle_flexckpt.manager.preemption import PreemptionSignals


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

        Args:
            step: The step that has just ended.
            context: What is being done, for the error.

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
        """Live state and the checkpoint of a step are the same now, as it was saved, or else restored."""
        self._last_step = step
        self._last_time = time.monotonic()
        self._saved_since_stop = self._saved_since_stop or (saved and self.should_stop)
