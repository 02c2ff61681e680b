"""Simulated processes and their threads: descriptors, signals, and how they end.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import greenlet


class Killed(BaseException):
    """Signal that the process is dead. Not an Exception, so that nobody mistakes it for an error to be handled."""


class StuckError(RuntimeError):
    """Signal that simulated code waits for what cannot come, or does more than it may."""


class Description:
    """Hold what a descriptor stands for. Several descriptors, also of different processes, may stand for one."""

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


class Task:
    """Stand for a thread of a process.

    Attributes:
        error: What it ended with, if that was not meant.
        is_started: Whether its function has been called.
    """

    def __init__(self, scheduler: Any, process: Process, function: Callable[[], Any], name: str, daemon: bool):
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

    def forget(self) -> None:
        """Let go of the frames that it has left, and of what they hold."""
        error = self.error
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        self._function, self.greenlet = lambda: None, greenlet.greenlet(lambda: None)
        self.local.clear()


class Process:
    """Stand for a simulated process.

    Attributes:
        descriptors: The table of its descriptors.
        environ: Its environment.
        status: How it ended, as ``subprocess`` says it: negative for a signal.
        stopped: Whether it is suspended, as by SIGSTOP.
        suspended: When it was suspended last, and when it went on.
        handlers: What it does with signals; SIGTERM and others end it by default.
        state: What its modules hold for themselves, by name: module globals are one process's own.
    """

    def __init__(
        self, scheduler: Any, node: Any, name: str, parent: Process | None = None, environ: dict | None = None
    ) -> None:
        self.scheduler, self.node, self.name, self.parent = scheduler, node, name, parent
        self.pid = scheduler.next_pid()
        self.environ: dict[str, str] = dict(environ or {})
        self.descriptors: dict[int, Description] = {}
        self.tasks: list[Task] = []
        self.main: Task | None = None
        self.alive, self.stopped = True, False
        self.suspended = (-1e9, -1e9)
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

    def forget(self) -> None:
        """Let go of all that its modules and frames have held."""
        self.state.clear()
        self.kept.clear()
        self.exit_functions.clear()
        self.handlers.clear()
        for task in self.tasks:
            task.forget()

    def stop(self) -> None:
        """Suspend the process."""
        if self.alive:
            self.stopped = True
            self.suspended = (self.scheduler.now, self.scheduler.now)
            self.scheduler.note("is stopped", self)

    def resume(self) -> None:
        """Let a suspended process go on."""
        if self.alive and self.stopped:
            self.stopped = False
            self.suspended = (self.suspended[0], self.scheduler.now)
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

    def _call_at_exit(self, function: Callable[[], Any]) -> None:
        """Do as the interpreter does: what it raises is printed, and the other functions are called."""
        try:
            function()
        except Exception:
            text = traceback.format_exc()
            self.stderr(text)
            self.scheduler.main_errors.append((self.scheduler.current, text))

    def _finish(self, task: Task) -> None:
        """Do as the interpreter does: wait for threads that are no daemons, then call what ``atexit`` has."""
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
                self._call_at_exit(function)
            self.exit(self.state.pop("exit status", status))

        # The same thread, as far as the process can tell.
        self.main = self.scheduler.spawn(self, end, "MainThread", daemon=True)
        self.main.local = task.local
