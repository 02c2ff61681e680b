"""Observers: functions that are called when a save, load, reshard, export, conversion and so on ends.

The process has one list of observers, so that they also hear of the calls that a library makes. Tested in
tests/test_observers.py.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from paddle_flexckpt.report import Report

logger = logging.getLogger("paddle_flexckpt")

Call = TypeVar("Call", bound=Callable[..., Any])
MEMORY = "memory"


@dataclass(frozen=True)
class Event:
    """The end of a call on this rank.

    Attributes:
        call: ``"save"``, ``"load"``, ``"reshard"``, ``"export"``, ``"convert"``, ``"merge"``, ``"verify"``,
            ``"publish"`` or ``"push"``.
        path: The directory or URL that the call was given; ``"memory"`` for a reshard, the engine for a push.
        time: The time of the end, in seconds since 1970.
        seconds: The duration; of an asynchronous save, until it was committed or had failed.
        report: The call's report; None if it failed.
        error_type: Name of the error's class; "" if the call succeeded.
        error: The error's text; "" if the call succeeded.
    """

    call: str
    path: str
    time: float
    seconds: float
    report: Report | None = None
    error_type: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the call succeeded."""
        return self.report is not None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, the report as its ``to_dict()``."""
        report = None if self.report is None else self.report.to_dict()
        return {**vars(self), "report": report, "ok": self.ok}


Observer = Callable[[Event], object]


class Observation:
    """The registration of an observer, until :meth:`stop`; leaving the context calls that."""

    def __init__(self, callback: Observer) -> None:
        """Args: callback: the observer."""
        self._callback = callback

    def stop(self) -> None:
        """Remove the observer. A call of it that has begun goes on. A second ``stop()`` does nothing."""
        with _LOCK:
            _OBSERVATIONS[:] = [each for each in _OBSERVATIONS if each is not self]

    def notify(self, event: Event) -> None:
        """Call the observer. An error that it raises is only logged, as the observed call has ended already."""
        try:
            self._callback(event)
        except Exception:
            logger.exception(f"an observer failed when it was told of a {event.call} ({event.path}); nothing else did")

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


_LOCK = threading.Lock()
_OBSERVATIONS: list[Observation] = []
# The observed calls of each thread that have not ended.
_UNDER_WAY = threading.local()


def observe(callback: Observer) -> Observation:
    """Have a function called with an :class:`Event` whenever a call of this process ends, well or not.

    Observers are called in the order of their registration, in the thread that ends the call. An asynchronous save
    ends in a background thread, before ``handle.result()`` returns: an observer must not wait for saves. An exception
    of an observer is logged with its traceback, at the level ERROR, and changes nothing: a committed checkpoint stays.

    Args:
        callback: The function.

    Returns:
        The registration: ``stop()``, or leaving it as a context manager, ends it.

    Raises:
        TypeError: It cannot be called.
    """
    if not callable(callback):
        raise TypeError(f"an observer has to be a function of an Event; got {callback!r}")
    observation = Observation(callback)
    with _LOCK:
        _OBSERVATIONS.append(observation)
    return observation


def notify(call: str, path: object, seconds: float, outcome: Report | BaseException) -> None:
    """Call all observers for a call that has ended."""
    with _LOCK:
        observations = list(_OBSERVATIONS)
    if not observations:
        return
    # A storage has a path of its own.
    what = call, str(getattr(path, "path", path)), time.time(), seconds
    if isinstance(outcome, Report):
        event = Event(*what, report=outcome)
    else:
        event = Event(*what, error_type=type(outcome).__name__, error=str(outcome))
    for observation in observations:
        observation.notify(event)


def observed(call: str, path: str = "") -> Callable[[Call], Call]:
    """Declare that observers are called when a function returns a report or raises.

    Args:
        call: The name of the call in events.
        path: The name of the argument with the directory or URL; "" for a call in memory.
    """

    def declare(function: Call) -> Call:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if call in _UNDER_WAY.__dict__:
                return function(*arguments, **options)  # a part of that call
            begin = time.perf_counter()

            def where() -> object:
                if not path:
                    return MEMORY
                try:
                    return signature.bind_partial(*arguments, **options).arguments.get(path)
                except TypeError:  # the call's own error
                    return None

            setattr(_UNDER_WAY, call, True)
            try:
                result = function(*arguments, **options)
            except Exception as error:
                notify(call, where(), time.perf_counter() - begin, error)
                raise
            finally:
                delattr(_UNDER_WAY, call)
            if isinstance(result, Report):
                notify(call, where(), time.perf_counter() - begin, result)
            return result

        return wrapper  # type: ignore[return-value]

    return declare


class ScalarWriter(Protocol):
    """A writer of numbers by step, such as VisualDL's ``LogWriter``."""

    def add_scalar(self, tag: str, value: float, step: int) -> object:
        """Write one number."""


class ScalarObserver:
    """An observer that writes seconds and bytes with VisualDL: ``fc.observe(ScalarObserver(LogWriter("log")))``.

    Tags are ``flexckpt/save/seconds/write``, ``flexckpt/save/total_bytes`` and so on, and ``flexckpt/save/failed``.
    """

    def __init__(self, writer: ScalarWriter, step: Callable[[], int] | None = None) -> None:
        """Take the writer, and a function that returns the step; by default calls of each kind are counted."""
        self._writer, self._step = writer, step
        self._counts: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        """Write one event."""
        step = self._counts[event.call] if self._step is None else self._step()
        self._counts[event.call] += 1
        numbers = {"failed": float(not event.ok), **_numbers(event)}
        for name, value in numbers.items():
            self._writer.add_scalar(tag=f"flexckpt/{event.call}/{name}", value=value, step=step)


class PrometheusObserver:
    """An observer with metrics for Prometheus: counts of calls by outcome, and the numbers of each call's last report.

    ::

        metrics = PrometheusObserver()
        fc.observe(metrics)
        ...
        metrics.render()  # text for whatever serves /metrics
    """

    def __init__(self) -> None:
        """Begin without events."""
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last: dict[str, Event] = {}

    def __call__(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            self._counts[event.call, "ok" if event.ok else event.error_type] += 1
            if event.ok:
                self._last[event.call] = event

    def render(self) -> str:
        """Return all of it in Prometheus's text format."""
        with self._lock:
            counts, last = dict(self._counts), dict(self._last)
        lines = _head("flexckpt_calls_total", "counter", "Calls that have ended, by outcome: ok, or the error's class.")
        lines += [
            f'flexckpt_calls_total{{call="{call}",outcome="{outcome}"}} {count}'
            for (call, outcome), count in sorted(counts.items())
        ]
        lines += _head("flexckpt_last_success_timestamp_seconds", "gauge", "When the last call that went well ended.")
        for call, event in sorted(last.items()):
            lines.append(f'flexckpt_last_success_timestamp_seconds{{call="{call}"}} {event.time!r}')
        seconds, sizes = [], []
        for call, event in sorted(last.items()):
            for name, value in _numbers(event).items():
                kind, _, phase = name.partition("/")
                if phase:
                    seconds.append(f'flexckpt_last_seconds{{call="{call}",phase="{phase}"}} {value!r}')
                else:
                    sizes.append(f'flexckpt_last_bytes{{call="{call}",field="{kind}"}} {int(value)}')
        lines += [*_head("flexckpt_last_seconds", "gauge", "Seconds of the last report, by phase."), *seconds]
        lines += [*_head("flexckpt_last_bytes", "gauge", "Bytes in the last report, by field."), *sizes]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _numbers(event: Event) -> dict[str, float]:
    """Return the seconds, by phase, and bytes of an event's report."""
    fields = {} if event.report is None else event.report.as_dict()
    seconds = {f"seconds/{phase}": float(value) for phase, value in fields.get("seconds", {}).items()}
    sizes = {name: float(value) for name, value in fields.items() if "bytes" in name and isinstance(value, int)}
    return {**seconds, **sizes}
