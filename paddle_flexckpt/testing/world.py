"""A kept-alive world of worker processes that runs functions on every rank.

Starting processes takes seconds, almost all of it importing and rendezvous; initialising fleet again in running
processes takes a tenth of a second. So a test session starts one world per size and sends it one job per layout.

The controller (this module; it does not import Paddle) and the workers talk over loopback sockets in JSON frames, with
a random token. When the controller goes away, for whatever reason, its sockets close and the workers exit: no orphans.
Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paddle_flexckpt.media.removals import remove
from paddle_flexckpt.testing import frames
from paddle_flexckpt.testing.reports import WorldError, relevant_stacks, size_of, tail_of

#: Environment variable with the address of a worker's controller, and the token.
ADDRESS_VARIABLE = "PADDLE_FLEXCKPT_WORLD"

_WORKER = Path(__file__).with_name("rank_worker.py")
#: Seconds for a worker to dump its stacks, or to end, before it is killed.
_DUMP_TIME = 5.0


class World:
    """A world of N worker processes under ``paddle.distributed.launch``, started at the first job.

    1. ``run`` starts the workers if there are none: each installs the CPU world and calls ``init_parallel_env``.
    2. It sends the job to all of them. Each resets fleet and unique names, calls the function and answers with its
       result.
    3. If the function raises on one rank, the job is aborted on the others: their collectives raise instead of waiting.
    4. If a rank does not answer in time, its stacks are dumped and all are killed; the next ``run`` starts new ones.

    Args:
        size: number of ranks, 2 or more (Paddle makes no process group of one).
        device: name of a module that gives each rank an accelerator, with Paddle's own process groups over its backend
            instead of the CPU world. The module has four functions: ``environment(size)`` returns variables for the
            workers, ``prepare()`` makes a rank's device current, ``checked()`` is a context in which each job runs, and
            ``guarded_calls()`` counts the calls that the device has checked. An abort does not reach ranks that wait
            for the device: after ``grace`` seconds the world is killed, and the error has all stacks.
        env: environment variables for the workers, over the inherited ones.
        timeout: default time limit of a job in seconds.
        grace: seconds that the other ranks get to finish after one has failed.
        start_timeout: seconds for the workers to start.
        log_dir: the directory of the logs, with a sub-directory per start; by default a temporary directory that
            :meth:`close` removes.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 300.0,
        grace: float = 30.0,
        start_timeout: float = 600.0,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a world has at least 1 rank, not {size}")
        self.size, self.timeout, self.grace, self.start_timeout = size, timeout, grace, start_timeout
        self.device, self._env = device, dict(env or {})
        self._keep_logs = log_dir is not None
        self.log_dir = Path(tempfile.mkdtemp(prefix="flexckpt-world-") if log_dir is None else log_dir).absolute()
        self.starts = 0
        self._guarded: dict[tuple[int, int], int] = {}
        self._logs_now = self.log_dir
        self._job = 0
        self._log_starts: dict[int, int] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, _Worker] = {}
        self._closed = False
        atexit.register(self.close)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def guarded_calls(self) -> int:
        """Return how many calls the devices have checked, over all jobs that have answered."""
        return sum(self._guarded.values())

    @property
    def alive(self) -> bool:
        """Return whether the workers are running."""
        return bool(self._workers)

    def run(self, job: str | Callable[..., Any], *, time_limit: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a function on every rank.

        Args:
            job: ``"module.path:function"`` or a function at the top level of a module that the workers can import; the
                entries of this process's ``sys.path`` are passed on.
            time_limit: seconds for this job; the world's ``timeout`` when None.
            **kwargs: arguments of the function, as far as JSON can express them.

        Returns:
            The results in rank order, as JSON gives them back: tuples become lists, numpy arrays become nested lists.

        Raises:
            WorldError: a rank raised, hung or died.
            ValueError: the function cannot be named, or an argument is not JSON.
        """
        if self._closed:
            raise ValueError("this world has been closed")
        target = job if isinstance(job, str) else name_of(job)
        try:
            json.dumps(kwargs)
        except TypeError as error:
            raise ValueError(f"the arguments of {target} must be JSON: {error}") from error
        if not self._workers:
            try:
                self._start()
            except BaseException:
                self._kill()
                raise
        self._job += 1
        path = [os.path.abspath(entry) for entry in sys.path]
        order = {"do": "run", "job": self._job, "target": target, "kwargs": kwargs, "path": path}
        try:
            answers = self._round(target, order, self.timeout if time_limit is None else time_limit)
        except BaseException:
            self._kill()  # also after a KeyboardInterrupt: workers that are still busy are of no use to the next job
            raise
        failures = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if failures:
            # In the order of their answers: the cause comes before what it led to on other ranks.
            if self.device:
                self._kill()  # a collective that not all ranks have joined would meet those of the next job
            which = f"ranks {sorted(failures)} of {self.size}, on rank {next(iter(failures))} first"
            raise WorldError(
                f"{target} failed on {which}; arguments {kwargs}", failures, None, _results(answers), self._logs()
            )
        return [answers[rank].get("result") for rank in range(self.size)]

    def close(self) -> None:
        """End the workers and remove the temporary logs. The world cannot be used again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for worker in self._workers.values():
            worker.try_send({"do": "exit"})
        self._await_ends(time.monotonic() + _DUMP_TIME)
        self._kill()
        if not self._keep_logs:
            with contextlib.suppress(OSError):
                remove(self.log_dir, "tree")

    # -- one job -------------------------------------------------------------------------------------------------------

    def _round(
        self, target: str, message: dict[str, Any], limit: float, already_sent: Sequence[int] = ()
    ) -> dict[int, dict[str, Any]]:
        """Send a message to all and collect one answer of each, or kill the world and raise."""
        self._log_starts = {rank: size_of(self._log(rank)) for rank in self._workers}
        for worker in self._workers.values():
            if worker.rank not in already_sent:
                worker.try_send(message)
        answers: dict[int, dict[str, Any]] = {}
        dead: dict[int, str] = {}
        aborted = ""
        deadline = time.monotonic() + limit
        why = f"{target} did not finish within {limit:g} s"
        with _selector(self._workers) as selector:
            while len(answers) + len(dead) < self.size:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events and time.monotonic() >= deadline:
                    break
                for key, _ in events:
                    worker = key.data
                    try:
                        answer, _ = frames.recv_frame(worker.sock)
                    except (EOFError, OSError) as error:
                        selector.unregister(worker.sock)
                        worker.ended = True
                        dead[worker.rank] = f"the process ended while it ran {target} ({error})"
                        problem = f"rank {worker.rank} died"
                    else:
                        if answer.get("job") != message.get("job"):
                            continue  # what an aborted start left behind
                        answers[worker.rank] = answer
                        if "guarded_calls" in answer:
                            self._guarded[self.starts, worker.rank] = answer["guarded_calls"]
                        if "error" not in answer:
                            continue
                        problem = f"rank {worker.rank} failed"
                    if time.monotonic() + self.grace < deadline:
                        deadline = time.monotonic() + self.grace
                        why = f"{target}: {problem}, and others did not finish within {self.grace:g} s after that"
                    aborted = aborted or problem  # what came first is the cause of the rest
                    for other in self._workers.values():
                        if other.rank not in answers and other.rank not in dead:
                            other.try_send({"do": "abort", "job": message.get("job"), "reason": aborted})
        if len(answers) == self.size:
            return answers
        failures = {**dead, **{rank: answer["error"] for rank, answer in answers.items() if "error" in answer}}
        if len(answers) + len(dead) == self.size:
            why = f"{target}: ranks {sorted(dead)} died"
        stacks = self._dump([rank for rank in self._workers if rank not in answers])
        self._kill()
        raise WorldError(why, failures, stacks, _results(answers), self._logs())

    def _dump(self, ranks: Sequence[int]) -> dict[int, str]:
        """Make those of these workers that live write their stacks and die; return what they wrote.

        A worker registers SIGUSR1 with faulthandler and lets it chain to the default action, so the end of the process
        shows that the dump is complete: nothing has to be polled, and it works while the worker is stuck in C code.
        Workers that the launcher has ended, because another one died, have written theirs too.
        """
        living = [self._workers[rank] for rank in ranks if not self._workers[rank].ended]
        for worker in living:
            worker.kill(signal.SIGUSR1)
        self._await_ends(time.monotonic() + _DUMP_TIME, ranks)
        stacks = {
            rank: relevant_stacks(tail_of(self._logs_now / f"stacks.{rank}", limit=None)) for rank in self._workers
        }
        return {rank: stack for rank, stack in stacks.items() if stack}

    def _log(self, rank: int) -> Path:
        return self._logs_now / f"workerlog.{rank}"

    def _logs(self) -> dict[int, str]:
        """Return what each rank has written since the job began."""
        return {rank: tail_of(self._log(rank), self._log_starts.get(rank, 0)) for rank in range(self.size)}

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.starts += 1
        # A directory that only this user may enter: the launcher logs the environment, and the token is in it.
        self._logs_now = self.log_dir / f"start{self.starts}"
        self._logs_now.mkdir(parents=True, mode=0o700)
        token = secrets.token_hex(32)
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, self.size)) as listener:
            host, port = listener.getsockname()
            command = [sys.executable, "-m", "paddle.distributed.launch"]
            if self.device:
                command += ["--devices", ",".join(map(str, range(self.size)))]
            else:
                command += ["--nproc_per_node", str(self.size)]
            # Loopback: the launcher would otherwise resolve this machine's name, which one off-line may not be able to.
            command += ["--host", "127.0.0.1", "--log_dir", str(self._logs_now), str(_WORKER)]
            device = importlib.import_module(self.device).environment(self.size) if self.device else {}
            own = {ADDRESS_VARIABLE: f"{host}:{port}:{token}:{self._logs_now}"}
            env = {**_clean_environment(), **device, **self._env, **own}
            with open(self._logs_now / "launch.log", "wb") as log:
                self._launcher = subprocess.Popen(
                    command,
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._accept_all(listener, token, time.monotonic() + self.start_timeout)
        # Rank 0 opens the store before the others look for it: a client that comes too early sleeps for three seconds.
        path = [os.path.abspath(entry) for entry in sys.path]
        for step in ("prepare", "init"):
            self._job += 1
            order = {"do": step, "job": self._job, "device": self.device, "path": path}
            ahead = (0,) if step == "init" else ()
            for rank in ahead:
                first = self._workers[rank]
                first.try_send(order)
                first.sock.settimeout(self.start_timeout)
                # It says that it opens the store now. If it does not, the following round tells why.
                with contextlib.suppress(EOFError, OSError):
                    frames.recv_frame(first.sock)
                first.sock.settimeout(None)
            answers = self._round("the start", order, self.start_timeout, already_sent=ahead)
            errors = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
            if errors:
                raise WorldError(f"the world of {self.size} did not start", errors, logs=self._logs())

    def _accept_all(self, listener: socket.socket, token: str, deadline: float) -> None:
        # Short waits, since the end of the launcher shows up nowhere but in its return code.
        listener.settimeout(0.25)
        while len(self._workers) < self.size:
            code = self._launcher.poll() if self._launcher else None
            if code is not None or time.monotonic() >= deadline:
                reason = (
                    "its workers did not connect in time" if code is None else f"the launcher ended with code {code}"
                )
                log = tail_of(self._logs_now / "launch.log")
                raise WorldError(f"the world of {self.size} did not start: {reason}\n{log}", logs=self._logs())
            try:
                sock, _ = listener.accept()
            except socket.timeout:
                continue
            try:
                hello = frames.accept_hello(sock, token)
            except OSError as error:
                logging.getLogger(__name__).warning("refused a connection: %s", error)
                sock.close()
                continue
            self._workers[hello["rank"]] = _Worker(hello["rank"], hello["pid"], sock)

    def _await_ends(self, deadline: float, ranks: Sequence[int] | None = None) -> None:
        """Wait until the connection of each of these workers (all of them when None) has closed, or the deadline."""
        with _selector({rank: self._workers[rank] for rank in (self._workers if ranks is None else ranks)}) as selector:
            while selector.get_map() and (events := selector.select(max(0.0, deadline - time.monotonic()))):
                for key, _ in events:
                    try:
                        frames.recv_frame(key.data.sock)
                    except (EOFError, OSError):
                        key.data.ended = True
                        selector.unregister(key.fileobj)

    def _kill(self) -> None:
        """Kill what is left. The launcher gives each worker a session of its own, so each is killed by itself."""
        for worker in self._workers.values():
            worker.kill(signal.SIGKILL)
        self._await_ends(time.monotonic() + _DUMP_TIME)
        for worker in self._workers.values():
            worker.sock.close()
        self._workers.clear()
        if self._launcher is not None:
            if self._launcher.poll() is None:
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
            self._launcher = None


class _Worker:
    """One connected worker process."""

    def __init__(self, rank: int, pid: int, sock: socket.socket) -> None:
        self.rank, self.pid, self.sock = rank, pid, sock
        self.ended = False

    def try_send(self, message: dict[str, Any]) -> None:
        """Send, unless the worker is gone: then the caller next finds its connection closed."""
        with contextlib.suppress(OSError):
            frames.send_frame(self.sock, message)

    def kill(self, number: signal.Signals) -> None:
        """Signal the process, unless its connection has closed: then its id may belong to another process by now."""
        if not self.ended:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                self.ended = True


def name_of(function: Callable[..., Any]) -> str:
    """Return the ``"module:qualname"`` of a top-level function.

    Raises:
        ValueError: a lambda, a nested function, or one of a script: no other process could import it.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        raise ValueError(f"a job must be a top-level function of an importable module, not {function!r}")
    return f"{module}:{name}"


def _results(answers: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
    return {rank: answer.get("result") for rank, answer in answers.items() if "error" not in answer}


def _selector(workers: Mapping[int, _Worker]) -> selectors.BaseSelector:
    selector = selectors.DefaultSelector()
    for worker in workers.values():
        if not worker.ended:
            selector.register(worker.sock, selectors.EVENT_READ, worker)
    return selector


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that select a device or another world."""
    foreign = ("PADDLE_", "FLAGS_selected_", "REHEARSAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    for name in ("CUDA_VISIBLE_DEVICES", "CUSTOM_DEVICE_ROOT", "MASTER_ADDR", "MASTER_PORT", "POD_IP"):
        kept.pop(name, None)
    # The ranks share the cores; more threads per rank only get into each other's way.
    kept["OMP_NUM_THREADS"] = "1"
    return kept
