"""Handles: an asynchronous save as its caller sees it, and the errors of failed saves that nobody has seen.

Tested in tests/background/test_writer.py and tests/background/test_failures.py.
"""

from __future__ import annotations

import os
import threading

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.report import SaveReport


class SaveHandle:
    """Follow an asynchronous save: under way, committed, or failed. The outcome is the same on every rank.

    A failure that nobody has seen is raised by the next save. Without one it is printed when the interpreter exits, and
    the exit status is 1.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id there.
        seen: Whether somebody knows how the save ended.
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
        """Return at once whether the save is over, committed or failed.

        Raises:
            CheckpointError: The handle came here by a fork.
        """
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save is over, committed or failed; return whether it is.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

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
        """Wait until the save is over and return what it did.

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
        """Return why the save failed; None while it is under way and when it is committed."""
        return self._outcome if isinstance(self._outcome, CheckpointError) else None

    def finish(self, outcome: SaveReport | CheckpointError) -> None:
        """Set how the save ended. The writer calls this, once."""
        self._outcome = outcome
        self._finished.set()


def describe_failure(handle: SaveHandle) -> str:
    """Return the text about a save that failed."""
    return f"the asynchronous save of id {handle.unique_id} to {handle.path!r} failed: {handle.error}"


def raise_failures(handles: list[SaveHandle]) -> None:
    """Raise the errors of failed saves as one, of their class if they have one in common; if there are any.

    Raises:
        CheckpointError: There are.
    """
    errors = [handle.error for handle in handles if handle.error is not None]
    if errors:
        kinds = {Failure.of(error).kind for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else CheckpointError.__name__
        raise Failure(kind, tuple(map(describe_failure, handles))).error()
