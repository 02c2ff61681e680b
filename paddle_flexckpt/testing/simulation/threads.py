"""Simulated ``threading``, ``queue`` and ``concurrent.futures``, for the processes of one scheduler.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from paddle_flexckpt.testing.simulation.scheduler import Scheduler, StuckError, Task


class Namespace(SimpleNamespace):
    """What stands for a module: it has the names that it was given, and says which one is missing."""

    def __getattr__(self, name: str) -> Any:
        raise StuckError(f"{self.__dict__.get('__name__')}.{name} is not simulated")


class Waiters:
    """Tasks that wait for something, woken in an order that the seed decides."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tasks: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        task = self._scheduler.current
        self._tasks.append(task)
        try:
            return self._scheduler.park(timeout)
        finally:
            with contextlib.suppress(ValueError):
                self._tasks.remove(task)

    def wake(self, count: int | None = None) -> None:
        chosen = self._tasks if count is None else self._tasks[:count]
        for task in list(chosen):
            self._tasks.remove(task)
            self._scheduler.wake(task)

    def __len__(self) -> int:
        return len(self._tasks)


class _Lock:
    def __init__(self, scheduler: Scheduler, reentrant: bool = False) -> None:
        self._scheduler, self._reentrant = scheduler, reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiters = Waiters(scheduler)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler.current
        if self._reentrant and self._owner is task:
            self._depth += 1
            return True
        end = None if timeout < 0 else self._scheduler.now + timeout
        self._scheduler.check_alive()
        while self._depth:
            left = None if end is None else end - self._scheduler.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiters.wait(left)
        self._owner, self._depth = task, 1
        return True

    def release(self) -> None:
        if not self._depth:
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._waiters.wake(1)

    def locked(self) -> bool:
        return self._depth > 0

    def is_owned(self) -> bool:
        return self._owner is self._scheduler.running

    def give_up(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        self._waiters.wake(1)
        return depth

    def take_again(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition:
    def __init__(self, scheduler: Scheduler, lock: Any = None) -> None:
        self._scheduler = scheduler
        self._lock = _Lock(scheduler, reentrant=True) if lock is None else lock
        self._waiters = Waiters(scheduler)
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth = self._lock.give_up()
        try:
            return self._waiters.wait(timeout)
        finally:
            self._lock.take_again(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._set = False
        self._waiters = Waiters(scheduler)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.wait(timeout)
        return self._set


class _Semaphore:
    def __init__(self, scheduler: Scheduler, value: int = 1) -> None:
        self._scheduler, self._value = scheduler, value
        self._waiters = Waiters(scheduler)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        end = None if timeout is None else self._scheduler.now + timeout
        while not self._value:
            left = None if end is None else end - self._scheduler.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiters.wait(left)
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        self._waiters.wake(n)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class _Thread:
    """A thread of the process that starts it."""

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
    """``threading.local``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.__dict__["_scheduler"] = scheduler

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = self._scheduler.current.local.setdefault(id(self), {})
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
        self._changed = _Condition(scheduler)

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


class _Future:
    """``concurrent.futures.Future``."""

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


class _Executor:
    """``concurrent.futures.ThreadPoolExecutor``."""

    _scheduler: Scheduler
    _future: type[_Future]

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "", **_: Any) -> None:
        self._most = max_workers or 4
        self._prefix = thread_name_prefix
        self._work: deque[tuple[_Future, Callable[[], Any]]] = deque()
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


def wait(futures: Iterable[_Future], timeout: float | None = None, return_when: str = "ALL_COMPLETED") -> Any:
    """``concurrent.futures.wait``."""
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
    changed = _Event(scheduler)
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


class Threads:
    """The simulated modules for one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        bound = {"_scheduler": scheduler}
        self.Thread: Any = type("Thread", (_Thread,), bound)
        self.Future: Any = type("Future", (_Future,), bound)
        self.ThreadPoolExecutor: Any = type("ThreadPoolExecutor", (_Executor,), {**bound, "_future": self.Future})
        self.threading = Namespace(
            __name__="threading",
            Thread=self.Thread,
            Lock=lambda: _Lock(scheduler),
            RLock=lambda: _Lock(scheduler, reentrant=True),
            Condition=lambda lock=None: _Condition(scheduler, lock),
            Event=lambda: _Event(scheduler),
            Semaphore=lambda value=1: _Semaphore(scheduler, value),
            BoundedSemaphore=lambda value=1: _Semaphore(scheduler, value),
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
        """A simulated lock for a real one that a module holds; None if the value is no lock."""
        if isinstance(value, type(threading.Lock())):
            return self.threading.Lock()
        if isinstance(value, type(threading.RLock())):
            return self.threading.RLock()
        if isinstance(value, threading.Condition):
            return self.threading.Condition()
        if isinstance(value, threading.local):
            return self.threading.local()
        return None
