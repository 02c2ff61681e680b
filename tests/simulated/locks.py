"""What tasks wait for: simulated locks, conditions, events and semaphores.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulated.scheduler import Scheduler
from tests.simulated.tasks import Task


class Waiters:
    """Hold tasks that wait for something, woken in an order that the seed decides."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.tasks: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        task, tasks = self._scheduler.current, self.tasks
        tasks.append(task)
        try:
            return self._scheduler.park(timeout)
        finally:
            if task in tasks:
                tasks.remove(task)

    def wake(self, count: int | None = None) -> None:
        tasks = self.tasks
        if not tasks:
            return
        for task in tasks[:count]:
            tasks.remove(task)
            self._scheduler.wake(task)

    def __len__(self) -> int:
        return len(self.tasks)


class Lock:
    """Imitate ``threading.Lock``, or ``RLock`` if it is reentrant."""

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
            # A process that dies in a condition's wait leaves its frames without the lock.
            self._scheduler.check_alive()
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


class Condition:
    """Imitate ``threading.Condition``."""

    def __init__(self, scheduler: Scheduler, lock: Any = None) -> None:
        self._scheduler = scheduler
        self._lock = Lock(scheduler, reentrant=True) if lock is None else lock
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


class Event:
    """Imitate ``threading.Event``."""

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


class Semaphore:
    """Imitate ``threading.Semaphore``."""

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
