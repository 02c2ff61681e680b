"""Pending saves: room for a save with a writer, saves that are not over yet, and their handles with the errors unseen.

Tested in tests/background/test_writer.py and tests/background/test_failures.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.background.process import WriterProcess
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.staging import LockPages, Segment, StagingPool, WaveSender, WrittenFile
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.media.backend import SaveLock
from paddle_flexckpt.progress import Progress
from paddle_flexckpt.report import SaveReport


class SaveHandle:
    """A handle of an asynchronous save, which is pending, committed or failed. The outcome is the same on every rank.

    A failure that nobody has seen is raised by the next save. If no save follows, it is printed when the interpreter
    exits, and the exit status is 1.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        seen: Whether the caller has learned how the save ended.
        written: The file with this rank's data, of a save to nodes.
        progress: How far this rank is: ``"stage"`` while data is copied, ``"queue"`` until the writer starts on it,
            ``"write"`` (copies and parity, if the save is to nodes), and ``"commit"`` when this rank has written all.
            It does not change after the save is over.
    """

    def __init__(self, path: str, unique_id: int) -> None:
        """Args: path: the checkpoint's directory. unique_id: its id there."""
        self.path = path
        self.unique_id = unique_id
        self._owner = os.getpid()
        self._finished = threading.Event()
        self._outcome: SaveReport | CheckpointError | None = None
        self.seen = False
        self.written: WrittenFile | None = None
        self.progress = Progress("stage", 0, 0)

    def done(self) -> bool:
        """Return whether the save is over, committed or failed, without waiting.

        Raises:
            CheckpointError: The handle came here by a fork.
        """
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save is over, committed or failed; return whether it is over.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            CheckpointError: The handle came here by a fork.
        """
        self._check_own()
        return self._finished.wait(timeout)

    def _check_own(self) -> None:
        if os.getpid() != self._owner:
            raise CheckpointError(
                f"the handle of the save of id {self.unique_id} to {self.path!r} belongs to process {self._owner}, of "
                "which this one is a fork. Remedy (FC102): ask there"
            )

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the save is over and return its report.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            CheckpointError: The save failed; the directory holds the checkpoints that it held before.
            TimeoutError: It is not over yet.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the save of id {self.unique_id} to {self.path!r} is not over after {timeout} s")
        self.seen = True
        if isinstance(self._outcome, SaveReport):
            return self._outcome
        raise self._outcome or RuntimeError("a save that is over has no outcome")

    @property
    def error(self) -> CheckpointError | None:
        """Return why the save failed; None while it is pending and when it is committed."""
        return self._outcome if isinstance(self._outcome, CheckpointError) else None

    def finish(self, outcome: SaveReport | CheckpointError) -> None:
        """Set the outcome of the save. The writer calls this, once."""
        self._outcome = outcome
        self._finished.set()


def describe_failure(handle: SaveHandle) -> str:
    """Return the text about a save that failed."""
    return f"the asynchronous save of id {handle.unique_id} to {handle.path!r} failed: {handle.error}"


def raise_failures(handles: list[SaveHandle]) -> None:
    """Raise the errors of failed saves as one error; do nothing if there are none.

    Raises:
        CheckpointError: There are failed saves. The error has their class, if they have one in common.
    """
    errors = [handle.error for handle in handles if handle.error is not None]
    if errors:
        kinds = {Failure.of(error).kind for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else CheckpointError.__name__
        raise Failure(kind, tuple(map(describe_failure, handles))).error()


@dataclass(eq=False)
class PendingSave:
    """One save, from the moment that it has memory.

    Attributes:
        segment: The memory that has its data, followed by the encoded job.
        report: The report so far; empty until the save is handed over.
        begin: When it was requested, by the performance counter.
        lock: The coordinator's lock, until the writer has taken it over.
        process: The writer process that has it; None once that has died.
        waves: The sender of its data, if the data goes in waves.
        source: A file with its data, and the first byte there; None if the segment has the data, or nobody needs it.
        refusal: The reason for which this rank refuses the save; empty if it does not. The other writers get it.
    """

    handle: SaveHandle
    job: WriteJob
    segment: Segment
    report: SaveReport | None = None
    begin: float = 0.0
    lock: SaveLock | None = None
    process: WriterProcess | None = None
    waves: WaveSender | None = None
    source: tuple[int, int] | None = None
    refusal: str = ""

    def close_source(self) -> None:
        """Close the file with the save's data, here; the writer has its own descriptor."""
        source, self.source = self.source, None
        if source is not None:
            os.close(source[0])


class SaveSlot:
    """A writer's room for one save.

    Attributes:
        timeout: Seconds that the ranks' writers wait for each other.
        address: The address at which other ranks' writers reach this one.
        sliced: The handle of a save that is being staged in slices, which only the holder of the handle can end.
    """

    def __init__(self, pool: StagingPool, launch: Callable[[PendingSave], None], timeout: float, address: str) -> None:
        """Take the writer's pool of memory, its function that starts a save, and two attributes."""
        self.timeout = timeout
        self.address = address
        self._pool = pool
        self._launch = launch
        # The save that is staged, or comes in waves, until it is handed over.
        self._save: PendingSave | None = None
        self.sliced: SaveHandle | None = None

    def stage(self, job: WriteJob, lock_pages: LockPages | None = None) -> np.ndarray:
        """Return memory for the data of a job: uint8, for the bytes of the job's items, end to end.

        ``lock_pages`` page-locks it for the device that the data comes from.

        Raises:
            CheckpointError: The machine has too little memory left.
        """
        return self._take(job, job.data_bytes, lock_pages)[1]

    def stage_written(self, job: WriteJob) -> None:
        """Stage a job whose data file is written already."""
        self._take(job, 0, None)

    def stage_file(self, job: WriteJob, descriptor: int, begin: int) -> None:
        """Stage a job whose data the writer reads from a file, from byte ``begin`` on. The descriptor is closed."""
        try:
            save, _ = self._take(job, 0, None)
        except BaseException:
            os.close(descriptor)
            raise
        save.source = descriptor, begin

    def stage_in_waves(
        self, job: WriteJob, nbytes: int, lock_pages: LockPages | None, lock: SaveLock | None
    ) -> WaveSender:
        """Start a save whose data goes through ``nbytes`` of memory in waves; :meth:`hand_over` follows the last one.

        The coordinator's lock belongs to the save from now on. If the slot is dropped before, the save fails.

        Raises:
            CheckpointError: The machine has too little memory left.
        """
        save, space = self._take(job, nbytes, lock_pages)
        save.lock, save.waves = lock, WaveSender(space)
        self._queue(save)
        return save.waves

    def _take(self, job: WriteJob, nbytes: int, lock_pages: LockPages | None) -> tuple[PendingSave, np.ndarray]:
        """Begin a save with so much memory for its data; return the save and that memory."""
        text = job.encode()
        segment = self._pool.take(nbytes + len(text))
        self._save = PendingSave(SaveHandle(job.path, job.names.unique_id), job, segment)
        self._save.handle.seen = True  # until the save is handed over, the caller raises its errors
        segment.put_job(nbytes, text)
        if lock_pages is not None:
            segment.lock_pages(lock_pages)
        return self._save, segment.view(0, nbytes)

    def _queue(self, save: PendingSave) -> None:
        save.handle.progress = Progress("queue", 0, save.job.data_bytes, 0, len(save.job.items))
        self._launch(save)

    @property
    def is_locked(self) -> bool:
        """Return whether the memory of the staged save is page-locked."""
        return self._save is not None and self._save.segment.is_locked

    def hand_over(
        self, report: SaveReport, begin: float, lock: SaveLock | None, handle: SaveHandle | None = None
    ) -> SaveHandle:
        """Hand the staged job over. This does not fail: errors from now on are the outcome of the save.

        ``report`` is the report so far, ``begin`` when the save was requested, by the performance counter. The
        coordinator's lock belongs to the save from now on. ``handle`` is the save's handle, if it has one already.
        """
        save, self._save = self._save, None
        if save is None:
            raise RuntimeError("nothing is staged")
        save.report, save.begin = report, begin
        save.handle = handle or save.handle
        save.handle.seen = False
        if save.waves is not None:  # the writer has it, and its lock
            save.waves.go()
        else:
            save.lock = lock
            self._queue(save)
        return save.handle

    def refuse(self, error: CheckpointError) -> None:
        """Inform the other ranks' writers that the staged save is not handed over here, and why."""
        if self._save is not None and self._save.waves is None:
            save, self._save = self._save, None
            save.refusal = str(error)
            self._queue(save)

    def drop(self) -> None:
        """Free the memory of a save that was not handed over."""
        self.sliced = None
        save, self._save = self._save, None
        if save is not None and save.waves is not None:
            save.waves.close()
        elif save is not None:
            save.close_source()
            self._pool.give_back(save.segment)


class PendingSaves:
    """The pending saves, up to a bound, and those that failed unseen. All methods are safe for threads."""

    def __init__(self, limit: int) -> None:
        """Args: limit: the most saves that may be pending."""
        self._limit = limit
        self._changed = threading.Condition()
        self._saves: dict[int, PendingSave] = {}
        self._failed: list[SaveHandle] = []
        self._reserved = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._saves)

    def __getitem__(self, number: int) -> PendingSave:
        return self._saves[number]

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Wait until one more save may begin, and reserve its place for the duration of the block."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._saves) + self._reserved < self._limit)
            self._reserved += 1
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= 1
                self._changed.notify_all()

    def add(self, save: PendingSave) -> int:
        """Add a save; return its number."""
        with self._changed:
            number = self._count
            self._count += 1
            self._saves[number] = save
            return number

    def take_orphans(self, process: WriterProcess) -> list[int]:
        """Return the numbers of the saves that a dead process had. A second call returns none."""
        with self._changed:
            numbers = [number for number, save in self._saves.items() if save.process is process]
            for number in numbers:
                self._saves[number].process = None
            return numbers

    def finish(self, number: int, outcome: SaveReport | CheckpointError) -> None:
        """Remove a save that is over, and give its handle the outcome."""
        with self._changed:
            handle = self._saves.pop(number).handle
            handle.finish(outcome)
            if handle.error is not None:
                self._failed.append(handle)
            self._changed.notify_all()

    def wait(self, timeout: float | None = None, which: Callable[[PendingSave], bool] = lambda save: True) -> bool:
        """Wait until no save for which ``which`` is true is pending.

        Return False if ``timeout`` seconds passed first.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not any(map(which, self._saves.values())), timeout)

    def take_failed(self) -> list[SaveHandle]:
        """Return the saves that have failed and whose errors nobody has seen; they count as seen from now on."""
        with self._changed:
            failed = [handle for handle in self._failed if not handle.seen]
            self._failed = []
        for handle in failed:
            handle.seen = True
        return failed
