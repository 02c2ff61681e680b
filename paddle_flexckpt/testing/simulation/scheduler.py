"""Simulated processes: tasks that run one at a time, in an order that a seed decides, under a clock of their own.

A task is a greenlet, so that the library's code runs unchanged and is interrupted only where it makes a simulated
call. Time passes only between such calls. Of tasks that are due at the same time any may be the next.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import errno
import heapq
import os
import random
import signal
import traceback
from collections.abc import Callable
from typing import Any

import greenlet

# Wall clocks of the simulated world begin in 2033, later than all that was written before.
EPOCH = 2_000_000_000.0
_FIRST_PID = 100


class Killed(BaseException):
    """The process is dead. Not an Exception, so that nobody mistakes it for an error to be handled."""


class StuckError(RuntimeError):
    """Simulated code waits for what cannot come, or does more than it may."""


class Description:
    """What a descriptor stands for. Several descriptors, also of different processes, may stand for one."""

    def __init__(self) -> None:
        self.references = 0

    def acquire(self) -> None:
        self.references += 1

    def release(self) -> None:
        self.references -= 1
        if self.references == 0:
            self.dispose()

    def dispose(self) -> None:
        """Do what the kernel does when the last descriptor is closed."""


class Node:
    """A host: its name, its clocks, and whether it is up.

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
        """Seconds since the host was started."""
        since, then = self._since
        return then + (self.scheduler.now - since) * self._rate

    def time(self) -> float:
        """The wall clock."""
        return EPOCH + self.monotonic() + self.offset

    @property
    def rate(self) -> float:
        """How many of its seconds pass in a second of the world."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._since = (self.scheduler.now, self.monotonic())
        self._rate = rate


class Task:
    """A thread of a process.

    Attributes:
        error: What it ended with, if that was not meant.
        is_started: Whether its function has been called.
    """

    def __init__(self, scheduler: Scheduler, process: Process, function: Callable[[], Any], name: str, daemon: bool):
        self.scheduler, self.process, self.name, self.daemon = scheduler, process, name, daemon
        self.number = scheduler.next_number()
        self.error: BaseException | None = None
        self.result: Any = None
        self.ended = False
        self.is_started = False
        self.waiters: list[Task] = []
        self.local: dict[Any, Any] = {}
        # Which wait it is in; a timer of an earlier one is void.
        self.generation = 0
        self.is_parked = False
        self.was_woken = False
        self._function = function
        # It returns to the loop, whoever made it.
        self.greenlet = greenlet.greenlet(self._run, scheduler.hub)

    def __repr__(self) -> str:
        return f"<task {self.name} of {self.process.name}>"

    def _run(self) -> None:
        self.is_started = True
        try:
            self.result = self._function()
        except Killed:
            pass
        except SystemExit as error:
            self.error = error
        except BaseException as error:  # as of a thread or a program: it is printed, and remembered
            self.error = error
        self.ended = True
        self.process.end_task(self)
        for waiter in self.waiters:
            self.scheduler.wake(waiter)


class Process:
    """A simulated process.

    Attributes:
        descriptors: The table of its descriptors.
        environ: Its environment.
        status: How it ended, as ``subprocess`` says it: negative for a signal.
        stopped: Whether it is suspended, as by SIGSTOP.
        handlers: What it does with signals; SIGTERM and others end it by default.
        state: What its modules hold for themselves, by name: module globals are one process's own.
    """

    def __init__(
        self, scheduler: Scheduler, node: Node, name: str, parent: Process | None = None, environ: dict | None = None
    ) -> None:
        self.scheduler, self.node, self.name, self.parent = scheduler, node, name, parent
        self.pid = scheduler.next_pid()
        self.environ: dict[str, str] = dict(environ or {})
        self.descriptors: dict[int, Description] = {}
        self.tasks: list[Task] = []
        self.main: Task | None = None
        self.alive, self.stopped = True, False
        self.status: int | None = None
        self.handlers: dict[int, Any] = {}
        self.exit_functions: list[Callable[[], Any]] = []
        self.pending_signals: list[int] = []
        self.watchers: list[Callable[[Process], None]] = []
        self.state: dict[Any, Any] = {}
        self.kept: list[Any] = []
        self.stderr: Callable[[str], None] = lambda text: None
        self._deferred: list[Task] = []
        scheduler.processes.append(self)

    def __repr__(self) -> str:
        return f"<process {self.name} ({self.pid}) on {self.node.name}>"

    def start(self, function: Callable[[], Any]) -> Task:
        """Call a function in the process's main thread; when it returns, the process ends."""
        self.main = self.scheduler.spawn(self, function, "MainThread", daemon=False)
        return self.main

    # Descriptors.

    def install(self, description: Description) -> int:
        number = 3
        while number in self.descriptors:
            number += 1
        description.acquire()
        self.descriptors[number] = description
        return number

    def lookup(self, number: int) -> Description:
        try:
            return self.descriptors[number]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def close(self, number: int) -> None:
        self.lookup(number)
        self.descriptors.pop(number).release()

    # Its end.

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the process at once."""
        self._die(-int(number))

    def exit(self, status: int) -> None:
        """End the process as ``_exit`` does."""
        self._die(status)

    def _die(self, status: int) -> None:
        if not self.alive:
            return
        self.alive, self.status = False, status
        scheduler = self.scheduler
        scheduler.note(f"ends with status {status}", self)
        for number in sorted(self.descriptors):
            self.descriptors.pop(number).release()
        self.kept.clear()
        for task in self.tasks:
            if not task.ended and task is not scheduler.running:
                scheduler.unwind(task)
        self._deferred.clear()
        for watcher in list(self.watchers):
            watcher(self)

    def stop(self) -> None:
        """Suspend the process."""
        if self.alive:
            self.stopped = True
            self.scheduler.note("is stopped", self)

    def resume(self) -> None:
        """Let a suspended process go on."""
        if self.alive and self.stopped:
            self.stopped = False
            self.scheduler.note("goes on", self)
            for task in self._deferred:
                self.scheduler.ready(task)
            self._deferred.clear()

    def defer(self, task: Task) -> None:
        """Keep a task that is due until the process goes on."""
        self._deferred.append(task)

    def signal(self, number: int) -> None:
        """Deliver a signal."""
        if not self.alive:
            return
        if number == signal.SIGKILL:
            self.kill(number)
        elif number == signal.SIGSTOP:
            self.stop()
        elif number == signal.SIGCONT:
            self.resume()
        else:
            handler = self.handlers.get(number, signal.SIG_DFL)
            if handler == signal.SIG_IGN:
                return
            if handler == signal.SIG_DFL and number != signal.SIGINT:
                if number != signal.SIGCHLD:
                    self.kill(number)
                return
            self.pending_signals.append(number)
            if self.main is not None and self.main.is_parked:
                self.scheduler.ready(self.main)

    def handle_signals(self) -> None:
        """Call the handlers of signals that have come; in the main thread only."""
        while self.pending_signals and self.scheduler.running is self.main:
            number = self.pending_signals.pop(0)
            handler = self.handlers.get(number, signal.default_int_handler)
            if callable(handler):
                handler(number, None)

    def end_task(self, task: Task) -> None:
        """Take note that a thread has ended; with the main thread ends the process."""
        if task.error is not None and self.alive:
            text = "".join(traceback.format_exception(type(task.error), task.error, task.error.__traceback__))
            if not isinstance(task.error, SystemExit):
                self.stderr(text)
                errors = self.scheduler.main_errors if task is self.main else self.scheduler.thread_errors
                errors.append((task, text))
        if task is self.main and self.alive:
            self._finish(task)

    def _finish(self, task: Task) -> None:
        """As the interpreter does: wait for threads that are no daemons, then call what ``atexit`` has."""
        status = 0
        if isinstance(task.error, SystemExit):
            code = task.error.code
            status = code if isinstance(code, int) else int(code is not None)
        elif task.error is not None:
            status = 1

        def end() -> None:
            for other in list(self.tasks):
                while other is not self.scheduler.running and not other.daemon and not other.ended:
                    self.scheduler.join(other)
            for function in reversed(self.exit_functions):
                function()
            self.exit(self.state.pop("exit status", status))

        # The same thread, as far as the process can tell.
        self.main = self.scheduler.spawn(self, end, "MainThread", daemon=True)
        self.main.local = task.local


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
        self._numbers = 0
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

    @property
    def current(self) -> Task:
        """The task that runs."""
        if self.running is None:
            raise StuckError("a simulated call from outside of the simulated processes")
        return self.running

    @property
    def process(self) -> Process:
        """The process whose task runs."""
        running = self.running
        return self.current.process if running is None else running.process

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
        running = self.running or self.current
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
        """When something is due next; None if nothing is."""
        return self._queue[0][0] if self._queue else None

    def _push(self, when: float, item: Any, generation: int) -> None:
        self._numbers += 1
        heapq.heappush(self._queue, (when, self._turn(), self._numbers, item, generation))

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
