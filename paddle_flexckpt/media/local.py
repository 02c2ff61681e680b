"""The local backend: a directory of a file system that this machine has mounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.media.backend import Backend, Buffer, FileLock, InputFile, NoLock, OutputFile, SaveLock
from paddle_flexckpt.media.file_names import check_not_elsewhere, open_inside
from paddle_flexckpt.media.lease import LEASE_FILE, LEASE_SECONDS, LeaseLock, check_lease_seconds

logger = logging.getLogger("paddle_flexckpt")

# flock: the file system has no locks, or none on directories (NFS wants a descriptor that can write).
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Gives errors of descriptors, which do not know a name, the file's."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


class LocalInputFile(InputFile):
    """A file read with ``preadv``."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Args: descriptor: of the file; it is closed with this. path: for errors."""
        self._descriptor = descriptor
        self._path = path
        self.size = os.fstat(descriptor).st_size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """As in the base class."""
        with _naming(self._path):
            return os.preadv(self._descriptor, [buffer], offset)

    def read(self, offset: int, length: int) -> bytes:
        """As in the base class."""
        data = b""
        with _naming(self._path):
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    break
                data = data + more if data else more
        return data

    def memory_map(self) -> mmap.mmap | None:
        """As in the base class; None for an empty file, which cannot be mapped."""
        return mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ) if self.size else None

    def close(self) -> None:
        """As in the base class; again is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalOutputFile(OutputFile):
    """A file written from its beginning to its end."""

    def __init__(self, path: str, replace: bool) -> None:
        """Creates it, exclusively; under another name if it is to replace what is there."""
        self._final = path
        self._path = f"{path}.{os.urandom(16).hex()}.tmp" if replace else path
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._is_durable = False

    def write(self, data: Buffer) -> None:
        """As in the base class."""
        self._is_durable = False
        with _naming(self._path):
            write_all(self._descriptor, memoryview(data))

    def make_durable(self) -> None:
        """As in the base class."""
        with _naming(self._path):
            if not self._is_durable:
                os.fsync(self._descriptor)
        self._is_durable = True

    def finish(self) -> None:
        """As in the base class: fsync, then rename."""
        with _naming(self._path):
            try:
                self.make_durable()
            finally:
                self._close()
        if self._path != self._final:
            os.rename(self._path, self._final)

    def abort(self) -> None:
        """As in the base class."""
        # What cannot be removed does no harm, and must not hide why the file is aborted.
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class DirectoryLock(SaveLock):
    """``flock`` of the directory itself: no file is needed, and the kernel frees it with its last holder."""

    def __init__(self, descriptor: int) -> None:
        """Args: descriptor: of the directory, with the lock."""
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: str) -> DirectoryLock:
        """Takes the lock.

        Raises:
            CheckpointError: Another save has it.
            OSError: The file system has no locks, by its number one of ``NO_LOCKS``; or another error.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _naming(path):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(
                    f"another save is writing to {path}. Remedy: wait until it has finished, or save elsewhere"
                ) from error
            raise
        except BaseException:  # a signal's: whoever goes on after it must find the directory free
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """As in the base class."""
        if self._descriptor >= 0:
            # Closing alone would not do: a process forked meanwhile has the descriptor too. But it is what is left to
            # do where the file system fails, and the save has had its outcome by now, the same on every rank.
            try:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            finally:
                self.detach()

    def describe(self) -> tuple[dict[str, Any], int | None]:
        """As in the base class."""
        return {"kind": "directory"}, self._descriptor

    def detach(self) -> None:
        """As in the base class."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Nothing was written through it, and it is closed whatever the answer is.
            with contextlib.suppress(OSError):
                os.close(descriptor)


class LocalFileLock(FileLock):
    """``flock`` of a file."""

    def __init__(self, descriptor: int) -> None:
        """Args: descriptor: of the file, with the lock; it is closed with this."""
        self._descriptor = descriptor

    @classmethod
    def take(cls, descriptor: int, operation: int, path: str) -> LocalFileLock:
        """Takes the lock, as far as the file system has locks; the descriptor is closed if that fails.

        Args:
            descriptor: Of the file.
            operation: Of ``flock``.
            path: For errors.

        Raises:
            BlockingIOError: Somebody else has it, and ``operation`` does not wait.
        """
        try:
            with _naming(path):
                fcntl.flock(descriptor, operation)
        except BaseException as error:
            if not isinstance(error, OSError) or error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
        return cls(descriptor)

    def is_of(self, path: str) -> bool:
        """Whether the file has this path still: another may have taken its place while this one was waited for."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """As in the base class."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Closing would not do: a process forked meanwhile has the descriptor too.
            try:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                # Nothing was written through it, and it is closed whatever the answer is.
                with contextlib.suppress(OSError):
                    os.close(descriptor)


class LocalBackend(Backend):
    """A directory of a local or mounted file system."""

    def __init__(
        self, path: str, lock: bool = True, lease_seconds: float = LEASE_SECONDS, identity: list[int] | None = None
    ) -> None:
        """Opens nothing.

        Args:
            path: The directory; it need not exist.
            lock: Whether savers exclude each other. Without it, that is up to the caller.
            lease_seconds: How long a saver may be silent before another one may take its place, where the file system
                has no locks.
            identity: Device and inode of the directory, if a save has begun there: it has to be the same at the commit.
        """
        self.path = path
        self._lock = lock
        self._lease_seconds = check_lease_seconds(lease_seconds)
        self._lease: LeaseLock | None = None
        self._identity = identity

    @property
    def has_path(self) -> bool:
        """As in the base class."""
        return True

    def names(self) -> list[str]:
        """As in the base class."""
        # Anything but a directory counts: what is in the way of a file is not to be overlooked.
        return self._entries(lambda entry: not entry.is_dir(follow_symlinks=False) and entry.name != LEASE_FILE)

    def directories(self) -> list[str]:
        """As in the base class."""
        return self._entries(_may_be_directory)

    def _entries(self, wanted: Any) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if wanted(entry)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def child(self, name: str) -> LocalBackend:
        """As in the base class."""
        return LocalBackend(os.path.join(self.path, name), self._lock, self._lease_seconds)

    def inner(self, name: str) -> Backend:
        """As in the base class."""
        check_not_elsewhere(self.path, name)
        return super().inner(name)

    def exists(self) -> bool:
        """As in the base class."""
        return os.path.isdir(self.path)

    def where(self, name: str) -> str:
        """As in the base class."""
        return os.path.join(self.path, name)

    def place(self) -> str:
        """As in the base class: the path, and what tells this host's view of its files from that of others."""
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                host = [file.read().strip(), os.stat("/proc/self/ns/mnt").st_ino, os.stat("/").st_ino]
        except OSError:
            host = [os.urandom(16).hex()]
        return f"{host}:{os.path.realpath(self.path)}"

    def open(self, name: str) -> LocalInputFile:
        """As in the base class."""
        return LocalInputFile(open_inside(self.path, name), self.where(name))

    def create(self, name: str, replace: bool = False, size: int | None = None) -> LocalOutputFile:
        """As in the base class."""
        return LocalOutputFile(self.where(name), replace)

    def write(self, name: str, data: bytes) -> None:
        """As in the base class."""
        path = self.where(name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with _naming(path):
            try:
                write_all(descriptor, memoryview(data))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def publish(self, name: str, data: bytes, check: Callable[[], None] = lambda: None) -> None:
        """As in the base class; and the path has to lead to the directory still that the save has begun in."""

        def check_all() -> None:
            if self._lease is not None:
                self._lease.check()
            if self._identity not in (None, self._current_identity()):
                raise CheckpointError(
                    f"{self.path} is another directory than when the save began: it was renamed, removed or mounted "
                    "over meanwhile. Nothing was committed. Remedy: save again"
                )
            check()

        super().publish(name, data, check_all)

    def _current_identity(self) -> list[int]:
        found = os.stat(self.path)
        return [found.st_dev, found.st_ino]

    def remove(self, name: str) -> None:
        """As in the base class."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.where(name))

    def remove_directory(self) -> None:
        """As in the base class."""
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def sync(self) -> None:
        """As in the base class."""
        sync_directory(self.path)

    def prepare(self) -> None:
        """As in the base class; directories above are made too, and their entries made durable."""
        missing = []
        path = os.path.abspath(self.path)
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
            if path == os.path.dirname(path):
                break
        try:
            os.makedirs(self.path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValidationError(
                [f"{self.path} is not a directory, so nothing can be saved there. Remedy: give another path"]
            ) from error
        for made in missing:
            sync_directory(os.path.dirname(made))

    def lock(self) -> SaveLock:
        """As in the base class: a lock of the directory, or a lease where the file system has no locks."""
        self._identity = self._current_identity()
        if not self._lock:
            return NoLock()
        try:
            return DirectoryLock.take(self.path)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            reason = os.strerror(error.errno)
        logger.info(f"the file system of {self.path} has no locks ({reason}): a lease is taken instead")
        self._lease = LeaseLock.take(self, self._lease_seconds)
        return self._lease

    def adopt_lock(self, description: dict[str, Any], descriptor: int | None) -> SaveLock:
        """As in the base class."""
        if description["kind"] == "lease":
            self._lease = LeaseLock.adopt(self, description)
            return self._lease
        return NoLock() if descriptor is None else DirectoryLock(descriptor)

    def hold(self, name: str) -> FileLock:
        """As in the base class."""
        if not self._lock:
            return super().hold(name)
        while True:
            held = LocalFileLock.take(open_inside(self.path, name), fcntl.LOCK_SH, self.where(name))
            if held.is_of(self.where(name)):
                return held
            held.release()

    def claim(self, name: str) -> FileLock | None:
        """As in the base class."""
        if not self._lock:
            return super().claim(name)
        try:
            try:
                # NFS gives an exclusive lock to a descriptor that can write only.
                descriptor = os.open(self.where(name), os.O_RDWR | os.O_CLOEXEC)
            except PermissionError:
                descriptor = os.open(self.where(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return FileLock()
        try:
            claimed = LocalFileLock.take(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, self.where(name))
        except BlockingIOError:
            return None
        if claimed.is_of(self.where(name)):
            return claimed
        claimed.release()
        return None

    def describe(self) -> dict[str, Any]:
        """As in the base class."""
        settings = {"lock": self._lock, "lease_seconds": self._lease_seconds, "identity": self._identity}
        return {"path": os.path.abspath(self.path), **settings}


def _may_be_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory; also if that cannot be told, as whoever opens it will be told why."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def sync_directory(path: str) -> None:
    """Makes a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with _naming(path):
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all bytes; a short write is not an error but a beginning."""
    while len(data):
        data = data[os.write(descriptor, data) :]
