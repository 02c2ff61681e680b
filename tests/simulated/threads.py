"""Simulated ``threading``, ``queue`` and ``concurrent.futures``, for the processes of one scheduler.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import concurrent.futures
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from tests.simulated.futures import Executor, Future, wait
from tests.simulated.locks import Condition, Event, Lock, Semaphore
from tests.simulated.scheduler import Scheduler
from tests.simulated.tasks import StuckError, Task


class Namespace(SimpleNamespace):
    """Stand for a module: it has the names that it was given, and says which one is missing."""

    def __getattr__(self, name: str) -> Any:
        raise StuckError(f"{self.__dict__.get('__name__')}.{name} is not simulated")


class _Thread:
    """Imitate ``threading.Thread``: a thread of the process that starts it."""

    _scheduler: Scheduler

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.name, self.daemon = name or "Thread", bool(daemon)
        self._task: Task | None = None

    def start(self) -> None:
        process = self._scheduler.process
        process.scheduler.check_alive()
        self._task = self._scheduler.spawn(process, self.run, self.name, self.daemon)
        self._task.local["thread"] = self

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._scheduler.join(self._task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number


class _Local:
    """Imitate ``threading.local``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.__dict__["_scheduler"] = scheduler

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = self._scheduler.current.local.setdefault(self, {})
        return values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values()[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self._values()[name]
        except KeyError:
            raise AttributeError(name) from None


class _Queue:
    def __init__(self, scheduler: Scheduler, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()
        self._maxsize = maxsize
        self._changed = Condition(scheduler)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            full = self._maxsize > 0
            if full and not self._changed.wait_for(lambda: len(self._items) < self._maxsize, timeout if block else 0.0):
                raise queue.Full
            self._items.append(item)
            self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout if block else 0.0):
                raise queue.Empty
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Threads:
    """Hold the simulated modules for one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        bound = {"_scheduler": scheduler}
        self.Thread: Any = type("Thread", (_Thread,), bound)
        self.Future: Any = type("Future", (Future,), bound)
        self.ThreadPoolExecutor: Any = type("ThreadPoolExecutor", (Executor,), {**bound, "_future": self.Future})
        self.threading = Namespace(
            __name__="threading",
            Thread=self.Thread,
            Lock=lambda: Lock(scheduler),
            RLock=lambda: Lock(scheduler, reentrant=True),
            Condition=lambda lock=None: Condition(scheduler, lock),
            Event=lambda: Event(scheduler),
            Semaphore=lambda value=1: Semaphore(scheduler, value),
            BoundedSemaphore=lambda value=1: Semaphore(scheduler, value),
            local=lambda: _Local(scheduler),
            current_thread=self._current_thread,
            main_thread=lambda: self._thread_of(scheduler.process.main),
            get_ident=lambda: scheduler.current.number,
        )
        self.queue = Namespace(
            __name__="queue",
            Queue=lambda maxsize=0: _Queue(scheduler, maxsize),
            SimpleQueue=lambda: _Queue(scheduler),
            Empty=queue.Empty,
            Full=queue.Full,
        )
        # Names that modules import one by one, by what they are in reality.
        self.names: dict[Any, Any] = {
            concurrent.futures.ThreadPoolExecutor: self.ThreadPoolExecutor,
            concurrent.futures.Future: self.Future,
            concurrent.futures.wait: wait,
            threading.Thread: self.Thread,
            threading.Lock: self.threading.Lock,
            threading.RLock: self.threading.RLock,
            threading.Condition: self.threading.Condition,
            threading.Event: self.threading.Event,
            threading.local: self.threading.local,
            queue.Queue: self.queue.Queue,
            queue.SimpleQueue: self.queue.SimpleQueue,
        }

    def _current_thread(self) -> Any:
        return self._thread_of(self._scheduler.current)

    def _thread_of(self, task: Task | None) -> Any:
        if task is None:
            raise StuckError("the process has no main thread")
        thread = task.local.get("thread")
        if thread is None:
            thread = self.Thread(name=task.name, daemon=task.daemon)
            thread._task = task
            task.local["thread"] = thread
        return thread

    def replacement(self, value: Any) -> Any:
        """Return a simulated lock for a real one that a module holds; None if the value is no lock."""
        of: Any = type(value)
        kind = _lock_kind(of)
        return None if kind is None else getattr(self.threading, kind)()


_LOCKS = {
    "Lock": type(threading.Lock()),
    "RLock": type(threading.RLock()),
    "Condition": threading.Condition,
    "local": threading.local,
}


@functools.cache
def _lock_kind(of: Any) -> str | None:
    """Return what of ``threading`` makes such an object, if it is a lock."""
    return next((kind for kind, each in _LOCKS.items() if issubclass(of, each)), None)
