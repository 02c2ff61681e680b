"""Scenarios: asynchronous saves.

What the writer process does is done in its rank's own thread, as a process of its own for the recording layer: it can
die alone. The saves' other code, on both sides, is the library's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paddle_flexckpt.background.outcome import look_for_manifest, save_together
from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.worker import write_share
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, LostRankError
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.backend import SaveLock
from paddle_flexckpt.media.opening import reopen
from paddle_flexckpt.ranks.communicator import Communicator, encode_failure, raise_failures
from paddle_flexckpt.ranks.writer_group import LostCoordinatorError
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.saver import save_state_dict
from tests.crash.job import JobCommunicator, Stopped
from tests.crash.saves import again_with
from tests.crash.scenario import DIRECTORY, Scenario, State, Step, saved, shards

logger = logging.getLogger("paddle_flexckpt")

_TIMEOUT_SECONDS = 30.0


class InlineWriter(BackgroundWriter):
    """Stand for a background writer without a process: a save is carried out when it is handed over."""

    max_pending = 1

    def __init__(self, comm: JobCommunicator) -> None:
        """Args: comm: the rank that it serves."""
        self._comm = comm

    @contextlib.contextmanager
    def open_slot(self) -> Iterator[_Slot]:
        """Give a slot: there is room always."""
        yield _Slot(self._comm)


class _Group(Communicator):
    """The writers of the ranks, which a :class:`WriterGroup` connects in earnest; here the job does."""

    # The number of what is told to those who ask for the outcome.
    OUTCOME = -1

    def __init__(self, comm: JobCommunicator, job: WriteJob) -> None:
        super().__init__(comm.ranks, comm.position)
        self._job, self._token, self._coordinator = comm.job, job.names.token, job.coordinator_position
        self._exchanges = 0

    @property
    def _is_coordinator(self) -> bool:
        return self.position == self._coordinator

    def _all_gather(self, payload: bytes) -> list[bytes]:
        self._exchanges += 1
        try:
            return self._job.gather(self._exchanges, self.position, payload, self._token)
        except LostRankError as error:
            raise (LostRankError if self._is_coordinator else LostCoordinatorError)(str(error)) from error

    def lead(self, leader: int, work: Callable[[], object], context: str = "") -> None:
        if self.size == 1:
            return super().lead(leader, work, context)
        self._exchanges += 1
        error: Exception | None = None
        if self._is_coordinator:
            try:
                work()
            except Exception as failure:
                error = failure
            note = b"" if error is None else encode_failure(error, context)
            self._job.tell(self._token, self._exchanges, self.position, note)
        else:
            heard = self._job.hear(self._token, self._exchanges, self.position, leader)
            if heard is None:
                raise LostCoordinatorError("the coordinator has gone")
            note = heard
        raise_failures(self.ranks, [(leader, note)], error)

    def abort(self, problem: str) -> LostRankError:
        return LostRankError(f"[rank {self.rank}] {problem}")  # leaving is noticed

    def close(self, outcome: bytes = b"") -> None:
        if self._is_coordinator:
            self._job.tell(self._token, self.OUTCOME, self.position, outcome)
        self._job.leave(self._token, self.position)


class _Slot:
    is_locked = False

    def __init__(self, comm: JobCommunicator) -> None:
        self.timeout, self.address = _TIMEOUT_SECONDS, ""
        self._comm = comm

    def stage(self, job: WriteJob, lock: object = None) -> np.ndarray:
        self._job = WriteJob.decode(job.encode())
        self._data = np.zeros(job.data_bytes, dtype=np.uint8)
        return self._data

    def refuse(self, error: CheckpointError) -> None:
        if hasattr(self, "_job"):
            self._save(None, str(error))

    def hand_over(
        self, report: SaveReport, begin: float, lock: SaveLock | None, handle: SaveHandle | None = None
    ) -> SaveHandle:
        handle = handle or SaveHandle(report.path, report.unique_id)
        failure = self._save(lock)
        handle.finish(report if failure is None else failure.error(self._job.context))
        return handle

    def _save(self, lock: SaveLock | None, refusal: str = "") -> Failure | None:
        """Do what the writer does, and if it dies what its training process does."""
        descriptor = None if lock is None else lock.handover()[1]
        rank, writer = self._comm.position, self._comm.job.new_writer()
        with self._comm.job.writing(rank, writer):
            sent = None if descriptor is None else os.dup(descriptor)
        try:
            if lock is not None:
                lock.detach()
        finally:
            # Whatever happens to the rank now, its writer goes on.
            try:
                with self._comm.job.writing(rank, writer):
                    failure = self._write(sent, refusal)
            except Stopped:
                self._comm.job.leave(self._job.names.token, rank)
                # If the rank is dead too it comes no further than to its first call.
                failure = self._find_outcome()
        return failure

    def _find_outcome(self) -> Failure | None:
        if not self._job.is_coordinator:
            token, rank = self._job.names.token, self._comm.position
            answer = self._comm.job.hear(token, _Group.OUTCOME, rank, self._job.coordinator_position)
            if answer is not None:
                return Failure.decode(answer) if answer else None
        directory = open_to_save(reopen(self._job.storage))
        return look_for_manifest(self._job, directory, "the background writer has died")

    def _write(self, descriptor: int | None, refusal: str) -> Failure | None:
        directory = open_to_save(reopen(self._job.storage))
        held = None if self._job.lock is None else directory.backend.locks.adopt(self._job.lock, descriptor)
        write = functools.partial(write_share, self._job, self._data, None, None)
        try:
            outcome = save_together(self._job, directory, _Group(self._comm, self._job), write, refusal)
        finally:
            if held is not None:
                held.release()
        for warning in outcome.warnings:
            logger.warning(warning)
        return outcome.failure


def _step(version: int, unique_id: int | None) -> Step:
    def step(root: str, comm: JobCommunicator) -> SaveReport:
        path = os.path.join(root, DIRECTORY)
        writer = InlineWriter(comm)
        handle = save_state_dict(shards(version, comm), path, comm, unique_id=unique_id, async_save=writer)
        return handle.result(timeout=_TIMEOUT_SECONDS)

    return step


def _asynchronous(ranks: int) -> list[Scenario]:
    zero, one = f"{DIRECTORY}/0", f"{DIRECTORY}/1"

    def scenario(name: str, versions: Sequence[int], steps: Sequence[Step], states: Sequence[State]) -> Scenario:
        return Scenario(
            name=f"asynchronous: {name}, {ranks} ranks",
            ranks=ranks,
            prepare=saved(ranks, *versions),
            steps=tuple(steps),
            states=tuple(states),
            again=again_with(),
        )

    return [
        scenario("fresh", (), [_step(1, None)], [{}, {zero: 1}]),
        scenario("overwrite", (1,), [_step(2, 0)], [{zero: 1}, {zero: 2}]),
        scenario(
            "second id, then overwrite the first",
            (1,),
            [_step(2, None), _step(3, 0)],
            [{zero: 1}, {zero: 1, one: 2}, {zero: 3, one: 2}],
        ),
    ]


ASYNCHRONOUS = (*_asynchronous(1), *_asynchronous(2))
