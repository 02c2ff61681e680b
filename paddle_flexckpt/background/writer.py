"""Background writers: saves handed over to a process of their own, and what becomes of them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paddle_flexckpt.background.admission import Admission
from paddle_flexckpt.background.exit_status import end_with_status_1
from paddle_flexckpt.background.failed import raise_failed, told
from paddle_flexckpt.background.flights import Flight, Flights
from paddle_flexckpt.background.handle import SaveHandle
from paddle_flexckpt.background.priority import IO_CLASSES, IoClass
from paddle_flexckpt.background.process import WriterProcess
from paddle_flexckpt.background.settlement import Settlement
from paddle_flexckpt.background.staging import StagingPool
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.catalog.failures import Failure
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.media.backend import open_described

logger = logging.getLogger("paddle_flexckpt")

_DESCRIPTION_BYTES = 16 << 20

# A save has to know of the others under way to its directory, and those may be another writer's.
WRITERS: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


class BackgroundWriter:
    """Saves while training goes on. It serves one rank: the one that makes it, in the process that makes it.

    The first save starts a process, which stays, and takes memory for a copy of the rank's state, which later saves use
    again. A context manager: leaving it waits for the saves under way.

    Attributes:
        max_pending: Saves under way at the same time.
        timeout: Seconds that the ranks' writers wait for each other.
    """

    def __init__(
        self,
        max_pending: int = 1,
        nice: int = 10,
        io_class: IoClass = "best-effort-low",
        timeout: float = 1800.0,
    ) -> None:
        """Takes no resources yet.

        Args:
            max_pending: Saves under way at the same time, each with its own copy of the state in memory. One more
                waits, in the call, until one of them is over.
            nice: What is added to the writer's nice value: it gets the processor time that others leave.
            io_class: Its I/O priority: ``"best-effort-low"``, ``"idle"``, or ``"unchanged"``.
            timeout: Seconds that the ranks' writers wait for each other. A save fails if a rank has written nothing so
                long after others have. Of a rank whose processes have died that is noticed within seconds.

        Raises:
            ValidationError: An argument makes no sense, or the system is not Linux.
        """
        problems = []
        if not isinstance(max_pending, int) or isinstance(max_pending, bool) or max_pending < 1:
            problems.append(f"max_pending has to be an integer >= 1; got {max_pending!r}")
        if not isinstance(nice, int) or isinstance(nice, bool) or not 0 <= nice <= 19:
            problems.append(f"nice has to be an integer from 0 to 19; got {nice!r}")
        if io_class not in IO_CLASSES:
            problems.append(f"io_class has to be one of {', '.join(map(repr, IO_CLASSES))}; got {io_class!r}")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            problems.append(f"timeout has to be a number of seconds > 0; got {timeout!r}")
        if not hasattr(os, "memfd_create"):
            problems.append("asynchronous saves need Linux. Remedy: save synchronously")
        if problems:
            raise ValidationError(problems, "cannot make a BackgroundWriter")
        self.max_pending, self.timeout = max_pending, float(timeout)
        self._nice, self._io_class = nice, io_class
        self._owner = os.getpid()
        self._pool = StagingPool()
        self._flights = Flights(max_pending)
        # Held while the process, or which save it has, changes.
        self._lock = threading.Lock()
        self._process: WriterProcess | None = None
        self._is_closed = False
        WRITERS.add(self)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))

    @property
    def is_own(self) -> bool:
        """Whether this process made the writer; a fork of that process did not, and cannot use it."""
        return os.getpid() == self._owner

    @property
    def pid(self) -> int | None:
        """Process id of the writer process, if there is one now."""
        process = self._process
        return None if process is None else process.pid

    @property
    def pending(self) -> int:
        """Number of saves under way."""
        return len(self._flights)

    @property
    def staging_bytes(self) -> int:
        """Memory taken for copies of the state."""
        return self._pool.nbytes

    def reserve(self, nbytes: int) -> None:
        """Takes the memory for the coming saves now, so that the first of them does not have to.

        Args:
            nbytes: Bytes of tensors that this rank writes in one save, as ``bytes_written`` of a report says.

        Raises:
            CheckpointError: The machine has not so much memory left.
        """
        self._check_usable()
        # Behind the data stands its description: names and shapes.
        nbytes += nbytes // 64 + _DESCRIPTION_BYTES
        segments = [self._pool.take(nbytes) for _ in range(self.max_pending - self.pending)]
        for segment in segments:
            segment.touch()
            self._pool.give_back(segment)

    @contextlib.contextmanager
    def admit(self) -> Iterator[Admission]:
        """Room for one more save, and a process for it; waits for room. What is not handed over is given back.

        Raises:
            CheckpointError: The writer is closed or another process's, or its process could not be started.
        """
        self._check_usable()
        self._flights.admit()
        try:
            with self._lock:
                address = self._running().address
            admission = Admission(self._pool, self._launch, self.timeout, address)
            try:
                yield admission
            finally:
                admission.drop()
        finally:
            self._flights.leave()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until no save is under way; returns whether that is so.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            CheckpointError: This is a fork of the process that made the writer.
        """
        self._check_own()
        return self._flights.wait(timeout)

    def wait_for(self, place: str) -> None:
        """Waits until no save to one directory is under way."""
        self._flights.wait(which=lambda flight: flight.job.place == place)

    def take_failed(self) -> list[SaveHandle]:
        """The saves that failed without anybody having seen their errors; they count as seen from now on."""
        return self._flights.take_failed()

    def close(self) -> None:
        """Waits for the saves under way, ends the process, and gives the memory back.

        Raises:
            CheckpointError: A save has failed, and nobody has seen its error yet.
        """
        self._check_own()
        self._stop()
        atexit.unregister(self._at_exit)
        raise_failed(self.take_failed())

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # Another error is on its way. Those of saves are told when the interpreter exits.
            self._stop()

    def _stop(self) -> None:
        self._is_closed = True
        self._flights.wait()
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
            sys.stderr.write(f"paddle_flexckpt: an error that nobody has seen: {told(handle)}\n")
        if failed:
            end_with_status_1()

    def _check_own(self) -> None:
        if not self.is_own:
            raise CheckpointError(
                f"this BackgroundWriter belongs to process {self._owner}, of which this one is a fork. Remedy: save "
                "there, or make another BackgroundWriter here"
            )

    def _check_usable(self) -> None:
        self._check_own()
        if self._is_closed:
            raise ValidationError(["this BackgroundWriter is closed. Remedy: make another one"])

    def _running(self) -> WriterProcess:
        """The process, started if there is none, or none any more; the lock is held."""
        if self._process is None or self._process.has_ended:
            self._process = WriterProcess(self._nice, self._io_class, self._begun, self._land, self._after_death)
        return self._process

    def _launch(self, flight: Flight) -> None:
        how = ""
        with self._lock:
            try:
                flight.process = self._running()
            except CheckpointError as error:
                how = str(error)
            number = self._flights.begin(flight)
        process = flight.process
        if process is None:
            self._bury(number, how)
            return
        # Without a descriptor, a lock is known by its description, which is in the job.
        descriptor = None if flight.lock is None else flight.lock.describe()[1]
        try:
            process.submit(number, flight.segment, flight.job, descriptor)
        except ConnectionError:
            # It has died since. _after_death knows, or will know, that it had this save.
            logger.debug("the background writer died while it was given a save")

    # The following run in the threads that listen to processes.

    def _begun(self, number: int) -> None:
        """A process has taken up a save, and its lock. Until then the lock is kept alive here: it may be a lease."""
        flight = self._flights[number]
        if flight.lock is not None:
            flight.lock.detach()
            flight.lock = None

    def _land(self, number: int, outcome: dict[str, Any]) -> None:
        """A process says what became of a save."""
        failure = None if outcome["failure"] is None else Failure.from_dict(outcome["failure"])
        self._settle(number, failure, outcome["seconds"], outcome["warnings"])

    def _after_death(self, process: WriterProcess, how: str) -> None:
        """A process has ended."""
        with self._lock:
            if self._process is process:
                self._process = None
            orphans = self._flights.orphans_of(process)
        for number in orphans:
            self._bury(number, f"{how} while it was saving")
        if not orphans and not process.is_finishing:
            logger.warning("%s while it had nothing to save; the next save starts another", how)

    def _bury(self, number: int, how: str) -> None:
        """Finds out what becomes of a save whose process has died. The other ranks have a say, so it may take time."""
        job = self._flights[number].job

        def settle() -> None:
            error = CheckpointError(how)
            try:
                directory = open_to_save(open_described(job.storage))
                failure = Settlement(job, directory).abandon(error)
            except Exception as unknown:  # whatever the storage does, somebody waits for the outcome
                failure = Failure.of(CheckpointError(f"{how}; it is not known what became of the save: {unknown!r}"))
            self._settle(number, failure, {}, [])

        threading.Thread(target=settle, name="paddle_flexckpt-settle", daemon=True).start()

    def _settle(self, number: int, failure: Failure | None, seconds: dict[str, float], warnings: list[str]) -> None:
        flight = self._flights[number]
        seconds = {**flight.report.seconds, **seconds, "total": time.perf_counter() - flight.begin}
        report = replace(flight.report, seconds=seconds, warnings=[*flight.report.warnings, *warnings])
        for warning in warnings:
            logger.warning(warning)
        if failure is None and flight.job.is_coordinator:
            logger.info(report.summary())
        self._pool.give_back(flight.segment)
        if flight.lock is not None:
            # The writer has died before it took it over.
            flight.lock.release()
        self._flights.end(number, report if failure is None else failure.error(flight.job.context))


def _forget(reference: weakref.ReferenceType[BackgroundWriter]) -> None:
    """In a fork: its copy of the connection would keep the writer process waiting when the training process is gone."""
    writer = reference()
    if writer is not None and writer._process is not None:
        writer._process.forget()
