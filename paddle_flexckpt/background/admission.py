"""Admission: one save on its way to a writer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paddle_flexckpt.background.flights import Flight
from paddle_flexckpt.background.handle import SaveHandle
from paddle_flexckpt.background.job import WriteJob
from paddle_flexckpt.background.staging import Segment, StagingPool
from paddle_flexckpt.media.locks import SaveLock
from paddle_flexckpt.report import SaveReport


class Admission:
    """Room for one save with a writer.

    Attributes:
        timeout: Seconds that the ranks' writers wait for each other.
        address: Where others can look whether the writer is alive.
    """

    def __init__(self, pool: StagingPool, launch: Callable[[Flight], None], timeout: float, address: str) -> None:
        """Made by a writer.

        Args:
            pool: Where memory comes from.
            launch: Sends a save on its way.
            timeout: Seconds that the ranks' writers wait for each other.
            address: Where others can look whether the writer is alive.
        """
        self.timeout = timeout
        self.address = address
        self._pool = pool
        self._launch = launch
        self._staged: tuple[WriteJob, Segment] | None = None

    def stage(self, job: WriteJob) -> np.ndarray:
        """Memory for the data of a job.

        Returns:
            uint8, for the bytes of the job's items, end to end.

        Raises:
            CheckpointError: The machine has not so much memory left.
        """
        text = job.encode()
        segment = self._pool.take(job.data_bytes + len(text))
        self._staged = job, segment
        segment.fill(job.data_bytes, text)
        return segment.view(0, job.data_bytes)

    def hand_over(self, report: SaveReport, begin: float, lock: SaveLock | None) -> SaveHandle:
        """Hands the staged job over. It does not fail: what goes wrong now is the outcome of the save.

        Args:
            report: What is known about the save so far.
            begin: When it was asked for, by the performance counter.
            lock: The coordinator's lock, which is the save's from now on.
        """
        if self._staged is None:
            raise RuntimeError("nothing is staged")
        job, segment = self._staged
        self._staged = None
        handle = SaveHandle(report.path, report.unique_id)
        self._launch(Flight(handle, job, report, begin, segment, lock))
        return handle

    def drop(self) -> None:
        """Gives back what was not handed over."""
        if self._staged is not None:
            self._pool.give_back(self._staged[1])
            self._staged = None
