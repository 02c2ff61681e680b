"""Handles: one asynchronous save, as the one who asked for it sees it."""

from __future__ import annotations

import os
import threading

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.report import SaveReport


class SaveHandle:
    """An asynchronous save: under way, committed, or failed. The outcome is the same on every rank.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        seen: Whether somebody has been told how it ended. A failure that nobody has seen is raised by the next save.
    """

    def __init__(self, path: str, unique_id: int) -> None:
        """Args: path: the checkpoint's directory. unique_id: its id there."""
        self.path = path
        self.unique_id = unique_id
        self._owner = os.getpid()
        self._finished = threading.Event()
        self._outcome: SaveReport | CheckpointError | None = None
        self.seen = False

    def done(self) -> bool:
        """Whether the save is over, committed or failed. Returns at once.

        Raises:
            CheckpointError: The handle came here by a fork.
        """
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save is over, committed or failed.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Returns:
            Whether it is over.

        Raises:
            CheckpointError: The handle came here by a fork.
        """
        if os.getpid() != self._owner:
            raise CheckpointError(
                f"the handle of the save of id {self.unique_id} to {self.path!r} belongs to process {self._owner}, of "
                "which this one is a fork. Remedy: ask there"
            )
        return self._finished.wait(timeout)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits until the save is over and says what it did.

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
        """Why the save failed; None while it is under way and when it is committed."""
        return self._outcome if isinstance(self._outcome, CheckpointError) else None

    def settle(self, outcome: SaveReport | CheckpointError) -> None:
        """Called once, by the writer: how the save ended."""
        self._outcome = outcome
        self._finished.set()
