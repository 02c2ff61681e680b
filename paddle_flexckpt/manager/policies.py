"""When to save and what to keep: policies, and the decision to save, the same on all ranks.

Policies are pure functions of steps, times and metrics. The decision follows them, and signals that the process will
soon be ended.

Retention is a function of the records of the existing checkpoints. Each policy selects the ones that it keeps; a
checkpoint that no policy keeps may be removed. No state is needed between runs, so an interrupted run goes on as if it
had not been interrupted.
Tested in tests/manager/test_policies.py and tests/manager/test_schedule.py.
"""

from __future__ import annotations

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.dtypes import plain_integer
from paddle_flexckpt.manager.preemption import PreemptionSignals
from paddle_flexckpt.manager.step_contents import check_step
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.tools.step_record import StepRecord
from paddle_flexckpt.transfer.agreement import check_same

logger = logging.getLogger("paddle_flexckpt")

Mode = Literal["min", "max"]
Policy = TypeVar("Policy")
# Metrics of KeepBest that this process has warned of, or that a save has had.
_WARNED: set[str] = set()


class _Checked:
    """Base of policies, which checks their numbers when they are made."""

    def __post_init__(self) -> None:
        """Raise ValidationError where a number is not positive, or there is no such mode."""
        for name, given in vars(self).items():
            value = plain_integer(given)
            object.__setattr__(self, name, value)
            expected, is_bool = "", isinstance(value, bool)
            if name in ("steps", "count") and (is_bool or not isinstance(value, int) or value < 1):
                expected = "an integer >= 1"
            if name == "seconds" and (is_bool or not isinstance(value, (int, float)) or not 0 < value < math.inf):
                expected = "a positive number"
            if name == "mode" and value not in ("min", "max"):
                expected = "'min' or 'max'"
            if name == "metric" and not isinstance(value, str):
                expected = "the name of one of metrics="
            if expected:
                raise ValidationError(
                    [f"{type(self).__name__}: {name} has to be {expected}; got {value!r}. Remedy (FC101): give one"]
                )


class SavePolicy(ABC):
    """A policy of when to save."""

    #: Whether :meth:`wants` depends on a clock, so that ranks have to agree on its result.
    uses_clock = False

    @abstractmethod
    def wants(self, step: int, seconds: float) -> bool:
        """Return whether to save now.

        Args:
            step: The step that has just ended.
            seconds: Time since the last save, restore or start of the manager.
        """


@dataclass(frozen=True)
class SaveEvery(_Checked, SavePolicy):
    """A save at every step that is a multiple of ``steps``."""

    steps: int

    def wants(self, step: int, seconds: float) -> bool:
        """Return whether the step is a multiple."""
        return step % self.steps == 0


@dataclass(frozen=True)
class SaveInterval(_Checked, SavePolicy):
    """A save at the first step that ends ``seconds`` or more after the last save, by the coordinator's clock."""

    seconds: float
    uses_clock = True

    def wants(self, step: int, seconds: float) -> bool:
        """Return whether the time has come."""
        return seconds >= self.seconds


class KeepPolicy(ABC):
    """A policy of which checkpoints to keep."""

    @abstractmethod
    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the steps that this policy keeps.

        Args:
            records: The records of all checkpoints, each step once, in rising order.
        """


@dataclass(frozen=True)
class KeepLatest(_Checked, KeepPolicy):
    """Retention of the ``count`` highest steps."""

    count: int

    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the last ones."""
        return sorted(record.step for record in records)[-self.count :]


@dataclass(frozen=True)
class KeepEvery(_Checked, KeepPolicy):
    """Permanent retention of every step that is a multiple of ``steps``."""

    steps: int

    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the multiples."""
        return [record.step for record in records if record.step % self.steps == 0]


@dataclass(frozen=True)
class KeepBest(_Checked, KeepPolicy):
    """Retention of the ``count`` best steps by a metric (of equal ones the later); it may not be missing or NaN."""

    count: int
    metric: str = "loss"
    mode: Mode = "min"

    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the best ones."""
        return best_first(records, self.metric, self.mode)[: self.count]


@dataclass(frozen=True)
class KeepInterval(_Checked, KeepPolicy):
    """Permanent retention of the oldest, and after each one kept the next that was saved ``seconds`` or more later."""

    seconds: float

    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return one for each interval."""
        kept: list[StepRecord] = []
        for record in sorted(records, key=lambda record: (record.time, record.step)):
            if not kept or record.time >= kept[-1].time + self.seconds:
                kept.append(record)
        return [record.step for record in kept]


def steps_to_remove(
    records: Sequence[StepRecord], policies: Sequence[KeepPolicy], newest: int | None = None
) -> list[int]:
    """Return the steps that may be removed, in rising order: those that no policy keeps.

    The highest step and the step that was saved last are never removed. Without policies no step is.

    Args:
        records: The records of all checkpoints, each step once.
        policies: The policies; a step is kept if any of them keeps it.
        newest: The step that was saved last, if known; by the times in the records another may be, as clocks may go
            back.
    """
    if not policies or not records:
        return []
    ordered = sorted(records, key=lambda record: record.step)
    kept = {ordered[-1].step, max(ordered, key=lambda record: (record.time, record.step)).step, newest}
    for policy in policies:
        kept.update(policy.kept(ordered))
    return [record.step for record in ordered if record.step not in kept]


def best_first(records: Sequence[StepRecord], metric: str, mode: Mode) -> list[int]:
    """Return the steps that have the metric, the best one first; of equally good ones the later first."""
    sign = 1.0 if mode == "min" else -1.0
    known = [record for record in records if not math.isnan(record.metrics.get(metric, math.nan))]
    return [record.step for record in sorted(known, key=lambda r: (sign * r.metrics[metric], -r.step))]


def warn_of_missing_metrics(policies: Sequence[KeepPolicy], metrics: Mapping[str, float]) -> None:
    """Log a warning where no metric is one by which a KeepBest chooses; where there are none, once."""
    wanted = [policy.metric for policy in policies if isinstance(policy, KeepBest)]
    is_new = not _WARNED.issuperset(wanted)
    _WARNED.update(wanted)
    if wanted and not any(name in metrics for name in wanted) and (metrics or is_new):
        logger.warning(
            f"metrics= has {', '.join(metrics) or 'no entry'}, and KeepBest chooses by {' and '.join(wanted)}: it does "
            "not keep this step. Remedy (FC903): give KeepBest the name of a metric that is saved, or save its metric "
            "from now on"
        )


def check_policies(name: str, given: Policy | Sequence[Policy], kind: type) -> tuple[Policy, ...]:
    """Return one policy or several, as a tuple; raise ValidationError where one is of another kind."""
    policies: tuple[Policy, ...] = tuple(given) if isinstance(given, (list, tuple)) else (given,)  # type: ignore[assignment]
    for policy in policies:
        if not isinstance(policy, kind):
            example = "SaveEvery(100)" if kind is SavePolicy else "KeepLatest(3)"
            raise ValidationError(
                [f"{name} has to be a {kind.__name__} or several; got {policy!r}. Remedy (FC101): give {example}, say"]
            )
    return policies


class SaveSchedule:
    """The decision to save, by policies and signals.

    Attributes:
        should_stop: Whether a rank had received a signal when the ranks last agreed; the same on every rank.
    """

    def __init__(
        self, comm: Communicator, policies: Sequence[SavePolicy], signals: PreemptionSignals | None = None
    ) -> None:
        """Take the ranks that save, the policies, any of which is enough for a save, and the signals of this rank."""
        self._comm = comm
        self._policies = policies
        self._signals = signals or PreemptionSignals(())
        self._needs_agreement = self._signals.is_active or any(policy.uses_clock for policy in policies)
        self.should_stop = False
        self._saved_since_stop = False
        # The step that was saved or restored last, and when.
        self._last_step: int | None = None
        self._last_time = time.monotonic()

    def should_save(self, step: int, context: str) -> bool:
        """Return whether to save now. One collective at the most, and none without signals and clocks."""
        seconds = 0.0
        if self._needs_agreement:

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
