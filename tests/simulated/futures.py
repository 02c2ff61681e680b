"""Simulated ``concurrent.futures``: pools of threads of one process.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from tests.simulated.locks import Event, Waiters
from tests.simulated.scheduler import Scheduler
from tests.simulated.tasks import Task


class Future:
    """Imitate ``concurrent.futures.Future``."""

    _scheduler: Scheduler

    def __init__(self) -> None:
        self._state = "pending"
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters = Waiters(self._scheduler)
        self._callbacks: list[Callable[[Any], Any]] = []

    def set_running_or_notify_cancel(self) -> bool:
        if self._state == "cancelled":
            return False
        self._state = "running"
        return True

    def cancel(self) -> bool:
        if self._state == "pending":
            self._state = "cancelled"
            self._end()
        return self._state == "cancelled"

    def cancelled(self) -> bool:
        return self._state == "cancelled"

    def running(self) -> bool:
        return self._state == "running"

    def done(self) -> bool:
        return self._state in ("cancelled", "finished")

    def _end(self) -> None:
        self._waiters.wake()
        for callback in self._callbacks:
            callback(self)

    def set_result(self, value: Any) -> None:
        self._value, self._state = value, "finished"
        self._end()

    def set_exception(self, error: BaseException | None) -> None:
        self._error, self._state = error, "finished"
        self._end()

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else self._scheduler.now + timeout
        while not self.done():
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                return False
            self._waiters.wait(left)
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.wait(timeout):
            raise concurrent.futures.TimeoutError
        if self._state == "cancelled":
            raise concurrent.futures.CancelledError
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._value


class Executor:
    """Imitate ``concurrent.futures.ThreadPoolExecutor``."""

    _scheduler: Scheduler
    _future: type[Future]

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "", **_: Any) -> None:
        self._most = max_workers or 4
        self._prefix = thread_name_prefix
        self._work: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._changed = Waiters(self._scheduler)
        self._tasks: list[Task] = []
        self._idle = 0
        self._closed = False

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._scheduler.check_alive()
        future = self._future()
        self._work.append((future, lambda: function(*args, **kwargs)))
        if len(self._changed):
            self._changed.wake(1)
        elif len(self._tasks) < self._most:
            name = f"{self._prefix}_{len(self._tasks)}"
            # The interpreter waits for such threads: they are no daemons. An idle one does not keep it.
            self._tasks.append(self._scheduler.spawn(self._scheduler.process, self._serve, name, daemon=True))
        return future

    def _serve(self) -> None:
        while True:
            while not self._work:
                if self._closed:
                    return
                self._changed.wait()
            future, call = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(function, *each) for each in zip(*iterables)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            while self._work:
                self._work.popleft()[0].cancel()
        self._changed.wake()
        if wait:
            for task in self._tasks:
                self._scheduler.join(task)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def wait(futures: Iterable[Future], timeout: float | None = None, return_when: str = "ALL_COMPLETED") -> Any:
    """Imitate ``concurrent.futures.wait``."""
    futures = set(futures)
    if not futures:
        return concurrent.futures.wait([])

    def is_over() -> bool:
        done = [future for future in futures if future.done()]
        if return_when == concurrent.futures.FIRST_COMPLETED:
            return bool(done)
        if return_when == concurrent.futures.FIRST_EXCEPTION and any(each._error is not None for each in done):
            return True
        return len(done) == len(futures)

    scheduler = next(iter(futures))._scheduler
    end = None if timeout is None else scheduler.now + timeout
    changed = Event(scheduler)
    for future in futures:
        future.add_done_callback(lambda _: changed.set())
    while not is_over():
        left = None if end is None else end - scheduler.now
        if left is not None and left <= 0:
            break
        changed.clear()
        changed.wait(left)
    done = {future for future in futures if future.done()}
    return SimpleNamespace(done=done, not_done=futures - done)
