"""Locks: the right to save to a directory, and to read or remove one of its files.

The classes here ask nobody: they are for media without locks, and for callers who keep savers apart themselves.
``local_locks.py`` has the locks of the kernel, ``lease.py`` those of media without locks.

Tested in tests/native/test_reading_lock.py.
"""

from __future__ import annotations

from typing import Any, TypeVar

Self = TypeVar("Self", bound="Lock")


class Lock:
    """Hold a right until it is released; this one holds nothing."""

    def release(self) -> None:
        """Give the right back; to do so again is fine."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class SaveLock(Lock):
    """Hold the right to save to a directory; this one asks nobody."""

    def handover(self) -> tuple[dict[str, Any], int | None]:
        """Return what :meth:`Locks.adopt` needs in another process: JSON-safe values, and a descriptor to be sent."""
        return {"kind": "none"}, None

    def detach(self) -> None:
        """End this process's part after another process has adopted the lock: the lock is not freed."""


class Locks:
    """Hand out the locks of one directory: to one saver at a time, and to readers of a file or one who removes it."""

    def take(self) -> SaveLock:
        """Take the right to save here.

        Raises:
            CheckpointError: Somebody else has it.
        """
        return SaveLock()

    def adopt(self, token: dict[str, Any], descriptor: int | None) -> SaveLock:
        """Take over a lock from another process, by what :meth:`SaveLock.handover` returned there."""
        return SaveLock()

    def check(self) -> None:
        """Make sure, right before a commit, that the right to save is still held.

        Raises:
            CheckpointError: Somebody else has it by now, or the directory is another one.
        """

    def share(self, name: str) -> Lock:
        """Keep a file from being claimed as long as it is read. Wait for whoever has claimed it.

        Media without locks keep nothing, and do not look for the file.

        Raises:
            FileNotFoundError: It is not there, or not any more.
            CorruptCheckpointError: As in :meth:`Backend.open`.
        """
        return Lock()

    def claim(self, name: str) -> Lock | None:
        """Take the right to remove or replace a file, and with it others that its readers need.

        Returns:
            The lock; None if somebody reads the file. A file that is not there has no readers.
        """
        return Lock()
