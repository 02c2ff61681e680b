"""The kernel's locks: ``flock`` of a directory by its saver, of a manifest by its readers or its remover.

Tested in tests/native/test_reading_lock.py and tests/media/test_lease.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from typing import Any

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import TakenError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.media.backend import Backend, Lock, SaveLock
from paddle_flexckpt.media.file_names import naming, open_inside
from paddle_flexckpt.media.lease import LEASE_FILE, LeaseLocks

_TAKEN = frozenset({errno.EWOULDBLOCK, errno.EACCES})
# The attempts of a saver while others look at the lock, each for some microseconds.
_MOST_LOOKS = 10_000

logger = logging.getLogger("paddle_flexckpt")

# flock: the file system has no locks, or none on directories (NFS wants a descriptor that can write).
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


class Flock(Lock):
    """A lock of a descriptor. The kernel releases it with its last holder."""

    def __init__(self, descriptor: int) -> None:
        """Args: descriptor: of the file or directory, with the lock; it is closed with this."""
        self._descriptor = descriptor
        close_in_forks(self, Flock.detach)  # or the lock would outlive its holder

    def is_of(self, path: str) -> bool:
        """Return whether the file still has this path: another may have replaced it. If not, release the lock."""
        is_same = False
        try:
            with naming(path):
                is_same = os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            pass
        finally:  # also after an error: the caller then has no lock
            if not is_same:
                self.release()
        return is_same

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            # Closing alone is not enough: a process forked meanwhile has the descriptor too. But nothing else is left
            # to do if the file system fails, and the save has had its outcome by now, the same on every rank.
            try:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            finally:
                self.detach()

    def detach(self) -> None:
        """Close the descriptor; another process that has it keeps the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Nothing was written through it, and it is closed in spite of an error.
            with contextlib.suppress(OSError):
                os.close(descriptor)


class DirectoryLock(Flock, SaveLock):
    """The save lock, by ``flock`` of the directory itself. It needs no file."""

    @classmethod
    def take(cls, path: str) -> DirectoryLock:
        """Take the lock.

        Raises:
            CheckpointError: Another save has it.
            FileNotFoundError: There is no such directory, or another has replaced it meanwhile.
            OSError: The file system has no locks, by its number one of ``NO_LOCKS``; or another error.
        """
        for _ in range(_MOST_LOOKS):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
            if cls.is_taken(path):
                raise TakenError.of(path)
        else:
            raise TakenError.of(path)
        lock = cls(descriptor)
        if not lock.is_of(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return lock

    @staticmethod
    def is_taken(path: str) -> bool:
        """Return whether a saver has the lock; errors of :meth:`take`. A look shares it: a saver waits for its end."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        look = Flock(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return True
        finally:
            look.release()
        return False

    def handover(self) -> tuple[dict[str, Any], int | None]:
        """Implement the base class."""
        return {"kind": "directory"}, self._descriptor


class LocalLocks(LeaseLocks):
    """``flock`` locks of one directory, or a lease where its file system has none."""

    def __init__(self, backend: Backend, enabled: bool, lease_seconds: float, identity: list[int] | None) -> None:
        """Take nothing yet; arguments as of :class:`LocalBackend`."""
        super().__init__(backend, lease_seconds)
        self._enabled = enabled
        self.identity = identity

    def take(self, times: float = 1.0) -> SaveLock:
        """Take a lock of the directory, or a lease where the file system has no locks; errors as of the base class."""
        self.identity = self._found_identity()
        if not self._enabled:
            return SaveLock()
        try:
            return DirectoryLock.take(self._backend.path)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            reason = os.strerror(error.errno)
        logger.info(f"the file system of {self._backend.path} has no locks ({reason}): a lease is taken instead")
        return super().take(times)

    def is_taken(self) -> bool | None:
        """Implement the base class."""
        # NFS has shared locks of directories and no exclusive ones, so its savers take leases.
        if not self._enabled or self.can_run_out or os.path.lexists(self._backend.where(LEASE_FILE)):
            return None
        try:
            return DirectoryLock.is_taken(self._backend.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return None

    def _found_identity(self) -> list[int]:
        found = os.stat(self._backend.path)
        return [found.st_dev, found.st_ino]

    def adopt(self, token: dict[str, Any], descriptor: int | None) -> SaveLock:
        """Implement the base class."""
        return super().adopt(token, None) if descriptor is None else DirectoryLock(descriptor)

    def is_here(self) -> bool:
        """Implement the base class."""
        try:
            return self.identity in (None, self._found_identity())
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """Make sure of the lease, and that the path still leads to the directory in which the save has begun."""
        super().check()
        if not self.is_here():
            raise CheckpointError(
                f"{self._backend.path} is another directory than when the save began: it was renamed, removed or "
                "mounted over meanwhile. Nothing was committed. Remedy (FC403): save again"
            )

    def share(self, name: str) -> Lock:
        """Implement the base class."""
        if not self._enabled:
            return Lock()
        path = self._backend.where(name)
        operation = fcntl.LOCK_SH | fcntl.LOCK_NB
        while True:
            descriptor = open_inside(self._backend.path, name)
            try:
                _flock(descriptor, operation, path, required=False)
            except BlockingIOError:
                logger.warning(f"{path} is about to be replaced or removed by another process: waiting for that")
                operation = fcntl.LOCK_SH
                continue
            shared = Flock(descriptor)
            if shared.is_of(path):
                return shared

    def protect_readers(self, name: str) -> bool:
        """Implement the base class: the file system is asked, as this process may not have taken a lock here."""
        if not self._enabled:
            return False
        descriptor = open_inside(self._backend.path, name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in NO_LOCKS
        finally:
            os.close(descriptor)
        return True

    def claim(self, name: str) -> Lock | None:
        """Implement the base class."""
        if not self._enabled:
            return Lock()
        path = self._backend.where(name)
        try:
            try:
                # NFS gives an exclusive lock only to a descriptor that can write.
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except PermissionError:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Lock()
        try:
            _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path, required=False)
        except BlockingIOError:
            return None
        claimed = Flock(descriptor)
        return claimed if claimed.is_of(path) else None


def _flock(descriptor: int, operation: int, path: str, required: bool = True) -> None:
    """Lock a descriptor, and close it if that fails; unless ``required``, a file system may have no locks."""
    try:
        with naming(path):
            fcntl.flock(descriptor, operation)
    except BaseException as error:  # a signal's, too: the file must be free after it
        if required or not isinstance(error, OSError) or error.errno not in NO_LOCKS:
            os.close(descriptor)
            raise
