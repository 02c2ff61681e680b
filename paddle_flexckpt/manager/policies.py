"""Decide when to save and what to keep, by pure functions of steps, times and metrics.

Retention is a function of the records of the checkpoints that there are. A policy says which of them it keeps; what no
policy keeps may be removed. So nothing has to be remembered between runs, and a run that was interrupted goes on as if
it had not been.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.dtypes import plain_integer
from paddle_flexckpt.engine.step_record import StepRecord

Mode = Literal["min", "max"]
Policy = TypeVar("Policy")


class _Checked:
    """Check the numbers of a policy when it is made."""

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
            if expected:
                raise ValidationError([f"{type(self).__name__}: {name} has to be {expected}; got {value!r}"])


class SavePolicy(ABC):
    """Say at which steps to save."""

    #: Whether the answer depends on a clock, so that ranks have to agree on it.
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
    """Save at every step that is a multiple of ``steps``."""

    steps: int

    def wants(self, step: int, seconds: float) -> bool:
        """Return whether the step is a multiple."""
        return step % self.steps == 0


@dataclass(frozen=True)
class SaveInterval(_Checked, SavePolicy):
    """Save at the first step that ends ``seconds`` or more after the last save, by the coordinator's clock."""

    seconds: float
    uses_clock = True

    def wants(self, step: int, seconds: float) -> bool:
        """Return whether the time has come."""
        return seconds >= self.seconds


class KeepPolicy(ABC):
    """Say which checkpoints to keep."""

    @abstractmethod
    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the steps that this policy keeps.

        Args:
            records: Of all checkpoints that there are, each step once, in rising order.
        """


@dataclass(frozen=True)
class KeepLatest(_Checked, KeepPolicy):
    """Keep the ``count`` highest steps."""

    count: int

    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the last ones."""
        return sorted(record.step for record in records)[-self.count :]


@dataclass(frozen=True)
class KeepEvery(_Checked, KeepPolicy):
    """Keep every step that is a multiple of ``steps``, for ever."""

    steps: int

    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the multiples."""
        return [record.step for record in records if record.step % self.steps == 0]


@dataclass(frozen=True)
class KeepBest(_Checked, KeepPolicy):
    """Keep the ``count`` best by a metric; of equals the later. Those without it, or with NaN, do not count."""

    count: int
    metric: str = "loss"
    mode: Mode = "min"

    def kept(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Return the best ones."""
        return best_first(records, self.metric, self.mode)[: self.count]


@dataclass(frozen=True)
class KeepInterval(_Checked, KeepPolicy):
    """Keep the oldest, and after each one kept the next that was saved ``seconds`` or more later, for ever."""

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
    """Return the steps that may go, in rising order: those that no policy keeps.

    Never among them: the highest step, and the one that was saved last. Without policies nothing goes.

    Args:
        records: Of all checkpoints that there are, each step once.
        policies: Each keeps what it keeps, whatever the others say.
        newest: The step that was saved last, where that is known better than from the times: clocks may go back.
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


def check_policies(name: str, given: Policy | Sequence[Policy], kind: type) -> tuple[Policy, ...]:
    """Return one policy or several, as a tuple.

    Raises:
        ValidationError: Something of another kind is among them.
    """
    policies: tuple[Policy, ...] = tuple(given) if isinstance(given, (list, tuple)) else (given,)  # type: ignore[assignment]
    for policy in policies:
        if not isinstance(policy, kind):
            raise ValidationError([f"{name} has to be a {kind.__name__} or several; got {policy!r}"])
    return policies
