"""Simulated ``subprocess``, ``signal``, ``atexit``, ``time``, ``secrets`` and ``random``.

Tested in tests/simulation/test_network.py.
"""

from __future__ import annotations

import atexit
import errno
import importlib
import json
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.simulated.locks import Waiters
from tests.simulated.scheduler import Scheduler
from tests.simulated.tasks import Killed, Process, StuckError
from tests.simulated.threads import Namespace

# How long an interpreter takes to start and import.
_START_SECONDS = (0.1, 2.0)


class Popen:
    """Imitate ``subprocess.Popen``, of the one program that the library starts: its writer process."""

    _scheduler: Scheduler

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stderr: int,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        **_: Any,
    ) -> None:
        scheduler = self._scheduler
        scheduler.check_alive()
        parent, options = scheduler.process, json.loads(arguments[3])
        del options["path"]
        process = Process(scheduler, parent.node, f"{parent.name}'s writer", parent, dict(env or {}))
        process.handlers.update(dict.fromkeys((signal.SIGHUP, signal.SIGINT, signal.SIGTERM), signal.SIG_IGN))
        for number in pass_fds:
            description = parent.lookup(number)
            description.acquire()
            process.descriptors[number] = description
        self._words: Any = parent.lookup(stderr)
        self._words.acquire()
        process.stderr = self._say
        process.watchers.append(self._ended)
        self._process, self.pid = process, process.pid
        self._waiters = Waiters(scheduler)
        scheduler.note(f"starts {process.name}")

        def main() -> None:
            scheduler.sleep(scheduler.random.uniform(*_START_SECONDS))
            importlib.import_module("paddle_flexckpt.background.worker").main(**options)

        process.start(main)

    def _say(self, text: str) -> None:
        self._words.write(text.encode())

    def _ended(self, process: Process) -> None:
        self._words.release()
        self._waiters.wake()

    @property
    def returncode(self) -> int | None:
        return self._process.status

    def poll(self) -> int | None:
        self._scheduler.check_alive()
        return self._process.status

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else self._scheduler.now + timeout
        while self._process.status is None:
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("the background writer", timeout or 0.0)
            self._waiters.wait(left)
        return self._process.status

    def kill(self) -> None:
        self._scheduler.check_alive()
        self._process.kill()

    def terminate(self) -> None:
        self._scheduler.check_alive()
        self._process.signal(signal.SIGTERM)


class Processes:
    """Hold the simulated modules for one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.Popen: Any = type("Popen", (Popen,), {"_scheduler": scheduler})
        self.subprocess = Namespace(
            __name__="subprocess",
            Popen=self.Popen,
            DEVNULL=subprocess.DEVNULL,
            TimeoutExpired=subprocess.TimeoutExpired,
        )
        numbers = {name: value for name, value in vars(signal).items() if name.startswith("SIG")}
        self.signal = Namespace(
            __name__="signal",
            **numbers,
            signal=self._set_handler,
            getsignal=self._handler,
            raise_signal=self._raise,
            default_int_handler=signal.default_int_handler,
            strsignal=signal.strsignal,
        )
        self.atexit = Namespace(__name__="atexit", register=self._register, unregister=self._unregister)
        self.time = Namespace(
            __name__="time",
            sleep=scheduler.sleep,
            time=lambda: scheduler.process.node.time(),
            time_ns=lambda: int(scheduler.process.node.time() * 1e9),
            monotonic=lambda: scheduler.process.node.monotonic(),
            clock_gettime=lambda clock: scheduler.process.node.monotonic(),
            perf_counter=lambda: scheduler.process.node.monotonic(),
            strftime=time.strftime,
            gmtime=time.gmtime,
            localtime=time.localtime,
        )
        self.secrets = Namespace(
            __name__="secrets",
            token_bytes=self.random_bytes,
            token_hex=lambda count=16: self.random_bytes(count).hex(),
            compare_digest=secrets.compare_digest,
        )
        self.random = Namespace(
            __name__="random",
            random=lambda: scheduler.luck.random(),
            uniform=lambda low, high: scheduler.luck.uniform(low, high),
            Random=random.Random,
            getstate=lambda: self._own_random().getstate(),
            setstate=lambda state: self._own_random().setstate(state),
        )
        self.names: dict[Any, Any] = {atexit.register: self._register, time.monotonic: self.time.monotonic}

    def random_bytes(self, count: int = 32) -> bytes:
        return self._scheduler.luck.getrandbits(8 * count).to_bytes(count, "little")

    def _own_random(self) -> random.Random:
        """Return the generator of the process's script, whose state is saved; what the library draws is the world's."""
        process = self._scheduler.process
        generator: random.Random = process.state.setdefault("random", random.Random(process.pid))
        return generator

    def _register(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        process = self._scheduler.process
        call = (lambda: function(*args, **kwargs)) if args or kwargs else function
        process.exit_functions.append(call)
        return function

    def _unregister(self, function: Callable[..., Any]) -> None:
        functions = self._scheduler.process.exit_functions
        functions[:] = [each for each in functions if each != function]

    def _set_handler(self, number: int, handler: Any) -> Any:
        process = self._scheduler.process
        if self._scheduler.running is not process.main:
            raise ValueError("signal only works in main thread of the main interpreter")
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        before = process.handlers.get(number, self._default(number))
        process.handlers[number] = handler
        return before

    def _default(self, number: int) -> Any:
        return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL

    def _handler(self, number: int) -> Any:
        return self._scheduler.process.handlers.get(number, self._default(number))

    def _raise(self, number: int) -> None:
        process = self._scheduler.process
        process.signal(number)
        if not process.alive:
            raise Killed
        self._scheduler.check_alive()


def exit_now(scheduler: Scheduler, status: int) -> None:
    """Imitate ``os._exit``."""
    scheduler.process.exit(status)
    raise Killed


def no_such(name: str) -> Any:
    """Return a function that the simulation must not reach."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise StuckError(f"{name} is not simulated")

    return refuse
