"""Flights: the saves of a writer that were handed over and are not settled yet, and those that failed unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from paddle_flexckpt.background.handle import SaveHandle
from paddle_flexckpt.background.job import WriteJob
from paddle_flexckpt.background.process import WriterProcess
from paddle_flexckpt.background.staging import Segment
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media.locks import SaveLock
from paddle_flexckpt.report import SaveReport


@dataclass(eq=False)
class Flight:
    """One save that was handed over.

    Attributes:
        handle: What the caller has of it.
        job: This rank's part of it.
        report: What is known so far.
        begin: When it was asked for, by the performance counter.
        segment: Where its data is, followed by the encoded job.
        lock: The coordinator's lock, until the writer has taken it over.
        process: The process that has it; None once that has died.
    """

    handle: SaveHandle
    job: WriteJob
    report: SaveReport
    begin: float
    segment: Segment
    lock: SaveLock | None
    process: WriterProcess | None = None


class Flights:
    """The saves under way, at most so many. All methods may be called from several threads."""

    def __init__(self, limit: int) -> None:
        """Args: limit: how many may be under way."""
        self._limit = limit
        self._changed = threading.Condition()
        self._flights: dict[int, Flight] = {}
        self._failed: list[SaveHandle] = []
        self._admitted = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._flights)

    def admit(self) -> None:
        """Waits until there is room for one more, and keeps it for the caller."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._flights) + self._admitted < self._limit)
            self._admitted += 1

    def leave(self) -> None:
        """Gives back what :meth:`admit` gave: the save was begun, or there will be none."""
        with self._changed:
            self._admitted -= 1
            self._changed.notify_all()

    def begin(self, flight: Flight) -> int:
        """Notes that a save is under way; returns its number."""
        with self._changed:
            number = self._count
            self._count += 1
            self._flights[number] = flight
            return number

    def __getitem__(self, number: int) -> Flight:
        return self._flights[number]

    def orphans_of(self, process: WriterProcess) -> list[int]:
        """The saves that a process had when it died. It has them no more, so they are given once."""
        with self._changed:
            numbers = [number for number, flight in self._flights.items() if flight.process is process]
            for number in numbers:
                self._flights[number].process = None
            return numbers

    def end(self, number: int, outcome: SaveReport | CheckpointError) -> None:
        """Notes what became of a save."""
        with self._changed:
            flight = self._flights.pop(number)
            flight.handle.settle(outcome)
            if flight.handle.error is not None:
                self._failed.append(flight.handle)
            self._changed.notify_all()

    def wait(self, timeout: float | None = None, which: Callable[[Flight], bool] = lambda flight: True) -> bool:
        """Waits until no save is under way, or none of some; returns whether that is so.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.
            which: The saves that matter.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not any(map(which, self._flights.values())), timeout)

    def take_failed(self) -> list[SaveHandle]:
        """The saves that have failed without anybody having seen it; they count as seen from now on."""
        with self._changed:
            failed = [handle for handle in self._failed if not handle.seen]
            self._failed = []
        for handle in failed:
            handle.seen = True
        return failed
