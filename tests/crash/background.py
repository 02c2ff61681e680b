"""Scenarios: asynchronous saves.

What the writer process does is done in its rank's own thread, as a process of its own for the recording layer: it can
die alone. The saves' other code, on both sides, is the library's.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence

import numpy as np

from paddle_flexckpt.background import BackgroundWriter, SaveHandle, WriteJob
from paddle_flexckpt.background.outcome import SaveOutcome
from paddle_flexckpt.background.worker import carry_out
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.live.saver import save_state_dict
from paddle_flexckpt.media.backend import SaveLock
from paddle_flexckpt.media.opening import reopen
from paddle_flexckpt.report import SaveReport
from tests.crash.job import JobCommunicator, Stopped
from tests.crash.saves import again_with
from tests.crash.scenario import DIRECTORY, Scenario, State, Step, saved, shards

logger = logging.getLogger("paddle_flexckpt")

_TIMEOUT_SECONDS = 30.0


class InlineWriter(BackgroundWriter):
    """Stand for a background writer without a process: a save is carried out when it is handed over."""

    def __init__(self, comm: JobCommunicator) -> None:
        """Args: comm: the rank that it serves."""
        self._comm = comm

    @contextlib.contextmanager
    def open_slot(self) -> Iterator[_Slot]:
        """Give a slot: there is room always."""
        yield _Slot(self._comm)


class _Slot:
    is_locked = False

    def __init__(self, comm: JobCommunicator) -> None:
        self.timeout, self.address = _TIMEOUT_SECONDS, ""
        self._comm = comm

    def stage(self, job: WriteJob, lock: object = None) -> np.ndarray:
        self._job = WriteJob.decode(job.encode())
        self._data = np.zeros(job.data_bytes, dtype=np.uint8)
        return self._data

    def hand_over(
        self, report: SaveReport, begin: float, lock: SaveLock | None, handle: SaveHandle | None = None
    ) -> SaveHandle:
        handle = handle or SaveHandle(report.path, report.unique_id)
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
                    failure = self._carry_out(sent)
            except Stopped:
                # If the rank is dead too it comes no further than to its first call.
                directory = open_to_save(reopen(self._job.storage))
                failure = SaveOutcome(self._job, directory).agree_after_death(
                    CheckpointError("the background writer has died")
                )
        handle.finish(report if failure is None else failure.error(self._job.context))
        return handle

    def _carry_out(self, descriptor: int | None) -> Failure | None:
        directory = open_to_save(reopen(self._job.storage))
        held = None if self._job.lock is None else directory.backend.locks.adopt(self._job.lock, descriptor)
        try:
            outcome = carry_out(self._job, directory, self._data)
        finally:
            if held is not None:
                held.release()
        for warning in outcome["warnings"]:
            logger.warning(warning)
        return None if outcome["failure"] is None else Failure.from_dict(outcome["failure"])


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
            cleans_up=False,
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
