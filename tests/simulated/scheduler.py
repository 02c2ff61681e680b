"""Simulated processes: tasks that run one at a time, in an order that a seed decides, under a clock of their own.

A task is a greenlet, so that the library's code runs unchanged and is interrupted only where it makes a simulated
call. Time passes only between such calls. Of tasks that are due at the same time any may be the next.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import greenlet

from tests.simulated.tasks import Killed, Process, StuckError, Task

# Wall clocks of the simulated world begin in 2033, later than all that was written before.
EPOCH = 2_000_000_000.0
_FIRST_PID = 100


class Node:
    """Stand for a host: its name, its clocks, and whether it is up.

    Attributes:
        offset: Seconds by which its wall clock is ahead.
    """

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name, self.address = name, ""
        self.is_up = True
        self.offset = 0.0
        self._rate = 1.0
        self._since = (0.0, 1000.0)

    def monotonic(self) -> float:
        """Return the seconds since the host was started."""
        since, then = self._since
        return then + (self.scheduler.now - since) * self._rate

    def time(self) -> float:
        """Return what the wall clock shows."""
        return EPOCH + self.monotonic() + self.offset

    @property
    def rate(self) -> float:
        """Return how many of its seconds pass in a second of the world."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._since = (self.scheduler.now, self.monotonic())
        self._rate = rate


class Scheduler:
    """Run the tasks of all processes.

    Attributes:
        random: From the seed; everything that could be otherwise asks it.
        now: Seconds since the beginning of the world.
        running: The task that runs.
        story: What was worth a line: when, which process, what.
        thread_errors: Threads that ended with an error that nobody caught, and its text.
        main_errors: Main threads that did.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.running: Task | None = None
        self.processes: list[Process] = []
        self.story: list[tuple[float, str, str]] = []
        self.thread_errors: list[tuple[Task, str]] = []
        self.main_errors: list[tuple[Task, str]] = []
        self.switches = 0
        # Those of processes and tasks, and those of what is queued: a plan that changes nothing must not change pids.
        self._numbers = self._entries = 0
        self._thread = get_ident()
        self._queue: list[tuple[float, float, int, Any, int]] = []
        self._turn = self.random.random
        self._until = float("inf")
        self.hub = greenlet.getcurrent()
        self._unwinding: list[Task] = []

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def next_pid(self) -> int:
        return _FIRST_PID + self.next_number()

    def check_thread(self) -> None:
        """Refuse a simulated call of a real thread that is none of the simulation's, which would change the luck."""
        if get_ident() != self._thread:
            name = threading.current_thread().name
            raise StuckError(f"a simulated call from the real thread {name!r}, which something else has left running")

    @property
    def luck(self) -> random.Random:
        """Return what decides, for a simulated call that draws without letting time pass."""
        self.check_thread()
        return self.random

    @property
    def current(self) -> Task:
        """Return the task that runs."""
        self.check_thread()
        if self.running is None:
            raise StuckError("a simulated call from outside of the simulated processes")
        return self.running

    @property
    def process(self) -> Process:
        """Return the process whose task runs."""
        return self.current.process

    def note(self, text: str, process: Process | None = None) -> None:
        """Add a line to the story."""
        if process is None and self.running is not None:
            process = self.running.process
        self.story.append((self.now, "" if process is None else process.name, text))

    # Tasks.

    def spawn(self, process: Process, function: Callable[[], Any], name: str = "", daemon: bool = True) -> Task:
        """Begin a thread of a process; it runs when its turn comes."""
        task = Task(self, process, function, name or f"Thread-{self._numbers}", daemon)
        process.tasks.append(task)
        self.ready(task)
        return task

    def ready(self, task: Task) -> None:
        """Let a task run now, or soon."""
        self._push(self.now, task, task.generation)

    def wake(self, task: Task) -> None:
        """End a task's :meth:`park`."""
        if task.is_parked and not task.was_woken:
            task.was_woken = True
            self.ready(task)

    def after(self, seconds: float, callback: Callable[[], Any]) -> None:
        """Call a function outside of all tasks when so much time has passed."""
        self._push(self.now + seconds, callback, 0)

    def plan(self, when: float, number: int, callback: Callable[[], Any]) -> None:
        """Call a function at a time, before all else that is due then; nothing else depends on there being a plan.

        ``number`` orders the plans of one time.
        """
        heapq.heappush(self._queue, (when, -1.0, number, callback, 0))

    def sleep(self, seconds: float) -> None:
        """Let time pass for the task that runs; others may run meanwhile."""
        self.check_alive()
        end, queue = (self.now + seconds if seconds > 0.0 else self.now), self._queue
        # Nobody else is due before: then there is nothing to switch to.
        if end < self._until and (not queue or queue[0][0] > end) and not self.process.stopped:
            self._turn()  # as many draws as of a wait: a plan that changes nothing must not change the luck
            self.now = end
            return
        self._wait(end)

    def park(self, timeout: float | None = None) -> bool:
        """Wait until another task calls :meth:`wake`; return whether it did so in time."""
        self.check_alive()
        return self._wait(None if timeout is None else self.now + max(timeout, 0.0))

    def _wait(self, deadline: float | None) -> bool:
        task = self.current
        task.generation += 1
        task.is_parked, task.was_woken = True, False
        try:
            if deadline is not None:
                self._push(deadline, task, task.generation)
            process, switch = task.process, self.hub.switch
            while True:
                switch()
                if not process.alive:
                    raise Killed
                if process.pending_signals and task is process.main:
                    # A handler may raise; or else the wait goes on.
                    process.handle_signals()
                if task.was_woken:
                    return True
                if deadline is not None and self.now >= deadline:
                    return False
        finally:
            task.is_parked = False
            task.generation += 1

    def join(self, task: Task, timeout: float | None = None) -> bool:
        """Wait until a task has ended; return whether it has."""
        if not task.ended:
            task.waiters.append(self.current)
            try:
                self.park(timeout)
            finally:
                if self.current in task.waiters:
                    task.waiters.remove(self.current)
        return task.ended

    def check_alive(self) -> None:
        """Raise :class:`Killed` in a process that is dead; call the handlers of signals that have come."""
        running = self.current
        process = running.process
        if not process.alive:
            raise Killed
        if process.pending_signals and running is process.main:
            process.handle_signals()

    def unwind(self, task: Task) -> None:
        """Have a dead process's task leave its frames; each simulated call that it makes meanwhile is refused."""
        self._unwinding.append(task)

    # The loop.

    def run(self, until: float | None = None, steps: int | None = None) -> None:
        """Run until nothing is left to do, or so far.

        Raises:
            StuckError: More than ``steps`` switches of tasks were made.
        """
        self._until = float("inf") if until is None else until
        limit = None if steps is None else self.switches + steps
        queue, pop, last = self._queue, heapq.heappop, self._until
        while self._unwinding or (queue and queue[0][0] <= last):
            while self._unwinding:
                self._unwind(self._unwinding.pop(0))
            if not queue or queue[0][0] > last:
                continue
            when, _, _, item, generation = pop(queue)
            is_task = type(item) is Task
            if is_task and (item.generation != generation or item.ended or not item.process.alive):
                continue  # a timer of a wait that is over lets no time pass
            if when > self.now:
                self.now = when
            if not is_task:
                item()
                continue
            if item.process.stopped:
                item.process.defer(item)
                continue
            self.switches += 1
            self.running = item
            try:
                item.greenlet.switch()
            finally:
                self.running = None
            if limit is not None and self.switches > limit:
                raise StuckError(f"more than {steps} switches of tasks, at {self.now:.3f} s")
        if until is not None:
            self.now = max(self.now, until)

    @property
    def next_event(self) -> float | None:
        """Return when something is due next; None if nothing is."""
        return self._queue[0][0] if self._queue else None

    def _push(self, when: float, item: Any, generation: int) -> None:
        self._entries += 1
        heapq.heappush(self._queue, (when, self._turn(), self._entries, item, generation))

    def _unwind(self, task: Task) -> None:
        if task.ended:
            return
        if not task.is_started:
            task.ended = True
            return
        self.running = task
        try:
            task.greenlet.throw(Killed)
        finally:
            self.running = None
