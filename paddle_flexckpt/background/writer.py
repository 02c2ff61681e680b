"""Background writers: saves handed over to a process of their own, and their outcomes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

from paddle_flexckpt.background.earlier_saves import WRITERS
from paddle_flexckpt.background.outcome import find_outcome
from paddle_flexckpt.background.pending import (
    PendingSave,
    PendingSaves,
    SaveHandle,
    SaveSlot,
    describe_failure,
    raise_failures,
)
from paddle_flexckpt.background.process import WriterProcess
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.staging import StagingPool
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import plain_integer
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.media.full_disks import tell_total
from paddle_flexckpt.media.opening import reopen
from paddle_flexckpt.observers import notify
from paddle_flexckpt.progress import Progress
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.transfer.arguments import plain_arguments

logger = logging.getLogger("paddle_flexckpt")

IoClass = Literal["best-effort-low", "idle", "unchanged"]

_DESCRIPTION_BYTES = 16 << 20


class BackgroundWriter:
    """A writer that saves while training goes on, for the rank and in the process that makes it.

    The first save starts a process and allocates memory for a copy of the rank's state; later saves use both again.
    A context manager: leaving it waits for the pending saves.

    Attributes:
        max_pending: Saves that may be pending at the same time.
        timeout: Seconds that the ranks' writers wait for each other.
    """

    def __init__(
        self, max_pending: int = 1, nice: int = 10, io_class: IoClass = "best-effort-low", timeout: float = 1800.0
    ) -> None:
        """Take no resources yet.

        Args:
            max_pending: Saves that may be pending at the same time, each with its own copy of the state in memory. One
                more waits, in the call, until one of them is over.
            nice: A number that is added to the writer's nice value: it gets the processor time that others leave.
            io_class: Its I/O priority: ``"best-effort-low"``, ``"idle"``, or ``"unchanged"``.
            timeout: Seconds that the ranks' writers wait for each other. A save fails if a rank has written nothing so
                long after others have. If the commit takes longer, the others do not know the outcome. A rank whose
                processes have died is noticed within seconds.

        Raises:
            ValidationError: An argument makes no sense, or the system is not Linux.
        """
        problems = []
        max_pending, nice, timeout = map(plain_integer, (max_pending, nice, timeout))
        if not isinstance(max_pending, int) or isinstance(max_pending, bool) or max_pending < 1:
            problems.append(f"max_pending has to be an integer >= 1; got {max_pending!r}. Remedy (FC101): give one")
        if not isinstance(nice, int) or isinstance(nice, bool) or not 0 <= nice <= 19:
            problems.append(f"nice has to be an integer from 0 to 19; got {nice!r}. Remedy (FC101): give one")
        if io_class not in get_args(IoClass):
            problems.append(f"io_class has to be one of {', '.join(map(repr, get_args(IoClass)))}; got {io_class!r}")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            problems.append(f"timeout has to be a number of seconds > 0; got {timeout!r}. Remedy (FC101): give one")
        if not hasattr(os, "memfd_create"):
            problems.append("asynchronous saves need Linux. Remedy (FC505): save synchronously")
        if problems:
            raise ValidationError(problems, "cannot make a BackgroundWriter")
        self.max_pending, self.timeout = max_pending, float(timeout)
        self._nice, self._io_class = nice, io_class
        self._owner = os.getpid()
        self._pool = StagingPool()
        self._saves = PendingSaves(max_pending)
        self._slots: list[SaveSlot] = []
        # Held while the process, or its list of saves, changes.
        self._lock = threading.Lock()
        self._process: WriterProcess | None = None
        self._is_closed = False
        WRITERS.add(self)
        atexit.register(self._at_exit)

    @property
    def is_own(self) -> bool:
        """Return whether this process made the writer; a fork of that process did not, and cannot use it."""
        return os.getpid() == self._owner

    @property
    def pid(self) -> int | None:
        """Return the process id of the writer process, if there is one now."""
        process = self._process
        return None if process is None else process.pid

    @property
    def pending(self) -> int:
        """Return the number of pending saves."""
        return len(self._saves)

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of memory allocated for copies of the state."""
        return self._pool.nbytes

    @plain_arguments
    def reserve(self, nbytes: int) -> None:
        """Allocate the memory for the coming saves now, so that the first of them need not.

        Args:
            nbytes: Bytes of tensors that this rank writes in one save, as in ``bytes_written`` of a report.

        Raises:
            CheckpointError: The machine has not so much memory left.
        """
        self._check_usable()
        # The data is followed by its description: names and shapes.
        nbytes += nbytes // 64 + _DESCRIPTION_BYTES
        segments = [self._pool.take(nbytes) for _ in range(self.max_pending - self.pending)]
        for segment in segments:
            segment.touch()
            self._pool.give_back(segment)

    @contextlib.contextmanager
    def open_slot(self) -> Iterator[SaveSlot]:
        """Wait for room for one more save, and yield it. If nothing is handed over, the room is freed.

        Raises:
            CheckpointError: The writer is closed or another process's, or its process could not be started.
            ValidationError: A save is being staged in slices, which the caller has to end first.
        """
        self._check_usable()
        if any(slot.sliced for slot in self._slots):
            raise ValidationError(
                [
                    "a save with this BackgroundWriter is being staged in slices. Remedy (FC102): call its "
                    "finish_staging() first"
                ]
            )
        with self._saves.room():
            with self._lock:
                address = self._running().address
            slot = SaveSlot(self._pool, self._launch, self.timeout, address)
            self._slots.append(slot)
            try:
                yield slot
            finally:
                self._slots.remove(slot)
                slot.drop()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no save is pending; return whether that is true.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            CheckpointError: This is a fork of the process that made the writer.
        """
        self._check_own()
        return self._saves.wait(timeout)

    def wait_for(self, path: str) -> None:
        """Wait until no save to one directory is pending."""
        place = _real_path(path)
        self._saves.wait(which=lambda save: _real_path(save.job.path) == place)

    def take_failed(self) -> list[SaveHandle]:
        """Return the saves that failed and whose errors nobody has seen; they count as seen from now on."""
        return self._saves.take_failed()

    def close(self) -> None:
        """Wait for the pending saves, end the process, and free the memory.

        Raises:
            CheckpointError: A save has failed, and nobody has seen its error yet.
        """
        self._check_own()
        self._stop()
        atexit.unregister(self._at_exit)
        raise_failures(self.take_failed())

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # Another error is being raised. Those of saves are printed when the interpreter exits.
            self._stop()

    def _stop(self) -> None:
        self._is_closed = True
        self._saves.wait()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.finish()
        self._pool.close()

    def _at_exit(self) -> None:
        if not self.is_own:
            return
        self._stop()
        failed = self.take_failed()
        for handle in failed:
            sys.stderr.write(f"paddle_flexckpt: an error that nobody has seen: {describe_failure(handle)}\n")
        sliced = [slot.sliced for slot in self._slots if slot.sliced]
        for handle in sliced:
            lost = f"the save of id {handle.unique_id} to {handle.path!r} is lost"
            sys.stderr.write(f"paddle_flexckpt: {lost}: finish_staging() of its handle was not called\n")
        if failed or sliced:
            _exit_with_status_1()

    def _check_own(self) -> None:
        if not self.is_own:
            raise CheckpointError(
                f"this BackgroundWriter belongs to process {self._owner}, of which this one is a fork. Remedy (FC102): "
                "save there, or make another BackgroundWriter here"
            )

    def _check_usable(self) -> None:
        self._check_own()
        if self._is_closed:
            raise ValidationError(["this BackgroundWriter is closed. Remedy (FC102): make another one"])

    def _running(self) -> WriterProcess:
        """Return the process, started if there is none (any more); the caller holds the lock."""
        if self._process is None or self._process.has_ended:
            self._process = WriterProcess(self._nice, self._io_class, self._on_message, self._on_end)
        return self._process

    def _running_for(self, job: WriteJob) -> WriterProcess:
        """Return the process that is to run a job; the caller holds the lock.

        For one rank it may be a new one. For several it has to be the one whose address the other writers have.
        """
        process = self._process
        if len(job.ranks) == 1:
            return self._running()
        if process is None or process.has_ended or process.address != job.addresses[job.position]:
            raise CheckpointError("the background writer has ended before the save was handed over")
        return process

    def _launch(self, save: PendingSave) -> None:
        """Give a save to the process; if that has ended, have its outcome found. Errors become the save's outcome."""
        problem = ""
        with self._lock:
            try:
                save.process = self._running_for(save.job)
            except CheckpointError as error:
                problem = str(error)
            number = self._saves.add(save)
        process = save.process
        if process is None:
            self._finish_dead(number, problem)
            return
        # Without a descriptor, a lock is known by its description, which is in the job.
        descriptor = None if save.lock is None else save.lock.handover()[1]
        try:
            waves = None if save.waves is None else save.waves.theirs.fileno()
            process.submit(number, save.segment, descriptor, waves, save.source, save.refusal)
        except ConnectionError:
            # It has died since. _on_end knows, or will learn, that it had this save.
            logger.debug("the background writer died while it was given a save")

    # The following run in the threads that listen to processes.

    def _on_message(self, number: int, message: dict[str, Any]) -> None:
        if "begun" in message:
            self._on_begun(number)
        elif "progress" in message:
            self._saves[number].handle.progress = Progress(**message["progress"])
        else:
            failure = None if message["failure"] is None else Failure.from_dict(message["failure"])
            self._finish(number, failure, message["seconds"], message["warnings"])

    def _on_begun(self, number: int) -> None:
        """Release a save's lock here, as its process has it now. Until then it is held here: it may be a lease."""
        save = self._saves[number]
        if save.lock is not None:
            save.lock.detach()
            save.lock = None

    def _on_end(self, process: WriterProcess, ending: str) -> None:
        """Forget a process that has ended, and have the outcomes of the saves found that it had."""
        with self._lock:
            if self._process is process:
                self._process = None
            orphans = self._saves.take_orphans(process)
        for number in orphans:
            self._finish_dead(number, f"{ending} while it was saving")
        if not orphans and not process.is_finishing:
            logger.warning("%s while it had nothing to save; the next save starts another", ending)

    def _finish_dead(self, number: int, ending: str) -> None:
        """Have a thread find the outcome of a save whose process has died: the other ranks decide, which takes time."""
        job = self._saves[number].job

        def finish() -> None:
            logger.warning(ending)  # only the end of the connection shows others that it has died
            try:
                directory = open_to_save(reopen(job.storage))
                failure = find_outcome(job, directory, ending)
            except Exception as unknown:  # after any error, as callers wait for the outcome
                failure = Failure.of(CheckpointError(f"{ending}; it is not known what became of the save: {unknown!r}"))
            self._finish(number, failure, {}, [])

        threading.Thread(target=finish, name="paddle_flexckpt-finish", daemon=True).start()

    def _finish(self, number: int, failure: Failure | None, seconds: dict[str, float], warnings: list[str]) -> None:
        """End a save: log its warnings, free what it has, and give its handle the outcome."""
        save = self._saves[number]
        for warning in warnings:
            logger.warning(warning)
        outcome: SaveReport | CheckpointError
        if failure is not None or save.report is None:
            failure = failure or Failure.of(CheckpointError("it was not handed over to its end"))
            outcome = failure.error(save.job.context)
            if save.job.layout is None:
                tell_total(outcome, save.report.total_bytes if save.report else 0)
        else:
            seconds = {**save.report.seconds, **seconds, "total": time.perf_counter() - save.begin}
            outcome = replace(save.report, seconds=seconds, warnings=[*save.report.warnings, *warnings])
            if save.job.is_coordinator:
                logger.info(outcome.summary())
        save.close_source()
        self._pool.give_back(save.segment)
        if save.lock is not None:
            # The writer has died before it took the lock over.
            save.lock.release()
        if save.waves is not None and save.report is not None:  # otherwise the caller still listens, and closes it
            save.waves.close()
        try:
            if save.report is not None:  # otherwise the call fails, and reports it
                notify("save", save.job.path, time.perf_counter() - save.begin, outcome)
        finally:
            self._saves.finish(number, outcome)


def writer_for(async_save: bool | BackgroundWriter, backend: Backend) -> BackgroundWriter:
    """Return the writer of an asynchronous save.

    Raises:
        ValidationError: The argument is invalid, or other processes cannot reach the directory.
    """
    if async_save is not True and not isinstance(async_save, BackgroundWriter):
        raise ValidationError([f"async_save has to be a bool or a BackgroundWriter; got {async_save!r}"])
    backend.reopen_token()
    return shared_writer() if async_save is True else async_save


def shared_writer() -> BackgroundWriter:
    """Return the writer of ``async_save=True``: one for a process, made when it is first requested."""
    return _writer_of(os.getpid())


@functools.cache
def _writer_of(pid: int) -> BackgroundWriter:
    # By process: a fork cannot use the writer of its parent.
    return BackgroundWriter()


def _real_path(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _exit_with_status_1() -> None:
    """Make the interpreter, which is exiting, end with status 1.

    An error of an atexit function does not change the status, and ``os._exit`` would skip the remaining atexit
    functions. So ``_exit(1)`` becomes the last of the C library's own exit functions: the interpreter has run its
    atexit functions and flushed its streams by then.
    """
    libc = ctypes.CDLL(None)
    # They run in reverse order: C streams are flushed, then the process ends.
    for function, argument in ((libc._exit, 1), (libc.fflush, None)):
        libc.__cxa_atexit(ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(argument), None)
