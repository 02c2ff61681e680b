"""The local backend: a directory of a file system that this machine has mounted.

Files and directories become durable through :func:`fsync`; :func:`sync_path` does it by their path.

Tested in tests/media/test_local.py, tests/media/test_destinations.py and tests/crash/test_faults.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.media.backend import REPLACING, Backend, Buffer, InputFile, Kind, Mode, OutputFile
from paddle_flexckpt.media.file_names import naming, open_inside
from paddle_flexckpt.media.full_disks import UNWRITABLE, writing
from paddle_flexckpt.media.lease import LEASE_FILE, LEASE_SECONDS
from paddle_flexckpt.media.local_locks import LocalLocks
from paddle_flexckpt.media.removals import remove

logger = logging.getLogger("paddle_flexckpt")

# Errors of file systems that cannot make names durable: CIFS, 9p, vboxsf, some of FUSE.
_NO_DURABLE_NAMES = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
# Devices that a warning was given for.
_WARNED: set[int] = set()
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
# The most buffers of one readv or writev (IOV_MAX of Linux; no system has less than 16).
_MOST_PARTS = min(1024, os.sysconf("SC_IOV_MAX"))
# Attempts to create a directory. Other processes may remove it while it is empty.
_TRIES = 5


class LocalInputFile(InputFile):
    """A file that is read with ``preadv``."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Args: descriptor: of the file; it is closed with this. path: for errors."""
        self._descriptor = descriptor
        self._path = path
        try:
            with naming(path):
                found = os.fstat(descriptor)
        except OSError:
            self.close()
            raise
        self.size, self.version = found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Implement the base class."""
        with naming(self._path):
            return os.preadv(self._descriptor, [buffer], offset)

    def read_into_each(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Implement the base class, without a copy of the bytes."""
        with naming(self._path):
            return os.preadv(self._descriptor, buffers[:_MOST_PARTS], offset)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes as the base class does, without a copy of them."""
        data = b""
        with naming(self._path):
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    break
                data = data + more if data else more
        return data

    def memory_map(self) -> mmap.mmap | None:
        """Return a map as the base class does; None for an empty file, which cannot be mapped."""
        with naming(self._path):
            return mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ) if self.size else None

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Nothing was written through it, and it is closed in spite of an error.
            with contextlib.suppress(OSError):
                os.close(descriptor)

    __del__ = close


class LocalOutputFile(OutputFile):
    """A file that is written from its beginning to its end."""

    def __init__(self, path: str, mode: Mode = "new", size: int | None = None) -> None:
        """Begin the file of so many bytes; under a temporary name if it is to replace another."""
        self._final = path
        self._path = f"{path}.{os.urandom(16).hex()}.tmp" if mode in REPLACING else path
        self._overwrites = mode == "overwrite"
        how = os.O_TRUNC if self._overwrites else os.O_EXCL
        self._writing = partial(writing, self._path, size)
        with self._writing():
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o666)
        self._is_durable = False

    def write(self, data: Buffer) -> None:
        """Implement the base class."""
        self.write_many([data])

    def write_many(self, parts: Sequence[Buffer]) -> None:
        """Implement the base class, with ``writev``."""
        self._is_durable = False
        with self._writing():
            write_all(self._descriptor, parts)

    def make_durable(self) -> None:
        """Implement the base class."""
        if not self._is_durable:
            fsync(self._descriptor, self._path)
        self._is_durable = True

    def finish(self) -> None:
        """Make the bytes durable, and then rename the file."""
        with self._writing():
            self.make_durable()
            self._close()
        if self._path != self._final:
            os.rename(self._path, self._final)

    def abort(self) -> None:
        """Implement the base class; a file that was being overwritten stays as it is by now."""
        # A file that cannot be removed does no harm, and must not hide the error behind the abort.
        with contextlib.suppress(OSError):
            if self._is_own():
                remove(self._path)
                # Its save may be over. Nobody would remove the file if a loss of power brought it back.
                sync_path(os.path.dirname(self._path))
        with contextlib.suppress(OSError):
            self._close()

    def _is_own(self) -> bool:
        """Return whether the file of this name is this one.

        If this process was suspended for long, its file may have been removed, and a later save may have the name.
        """
        if self._path != self._final:
            return True
        if self._overwrites or self._descriptor < 0:
            return False
        return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path, follow_symlinks=False))

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class OutputParts:
    """A file that this and other processes of the machine write in parts. Leaving the context closes it."""

    def __init__(self, path: str) -> None:
        """Open the file; the first process creates it."""
        self._path = path
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write_at(self, data: Buffer, offset: int) -> None:
        """Write all of the data from byte ``offset`` on."""
        left = memoryview(data)
        with writing(self._path):
            while len(left):
                count = os.pwrite(self._descriptor, left, offset)
                left, offset = left[count:], offset + count

    def take_turn(self, wait: bool) -> bool:
        """Take the turn to write; return whether this process has it.

        Without turns writes are as safe, but the kernel admits only one at a time while the others spin. On file
        systems without locks it is always this process's turn.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def end_turn(self) -> None:
        """Let others write."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def make_durable(self) -> None:
        """Make durable what all processes have written: they share one kernel."""
        fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> OutputParts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LocalBackend(Backend):
    """A directory of a local or mounted file system."""

    has_path = True

    def __init__(
        self, path: str, lock: bool = True, lease_seconds: float = LEASE_SECONDS, identity: list[int] | None = None
    ) -> None:
        """Open nothing yet; options as of :func:`media.opening.open_storage`.

        ``identity``: device and inode of the directory, if a save has begun there; they must be the same at the commit.
        """
        self.path, self._depth = path, 0
        self._settings: dict[str, Any] = {"lock": lock, "lease_seconds": lease_seconds}
        self.locks: LocalLocks = LocalLocks(self, lock, lease_seconds, identity)

    def names(self, kind: Kind = "files") -> list[str]:
        """Implement the base class."""
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if _is_of(entry, kind)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def child(self, name: str) -> LocalBackend:
        """Implement the base class."""
        child = LocalBackend(os.path.join(self.path, name), **self._settings)
        child._depth = self._depth + 1
        return child

    def link(self) -> str:
        """Implement the base class."""
        path, found = self.path, ""
        for _ in range(self._depth):
            path, found = os.path.dirname(path), path if os.path.islink(path) else found
        return found

    def open(self, name: str) -> LocalInputFile:
        """Implement the base class."""
        return LocalInputFile(open_inside(self.path, name), self.where(name))

    def create(self, name: str, mode: Mode = "new", size: int | None = None) -> LocalOutputFile:
        """Implement the base class."""
        return LocalOutputFile(self.where(name), mode, size)

    def remove(self, name: str) -> None:
        """Implement the base class; it needs the lease, of a process that has taken one.

        Raises:
            CheckpointError: Another saver has taken the lease over, and may have files of this name by now.
        """
        self.locks.ensure_held()
        remove(self.where(name))

    def make_directory(self, mode: int = 0o777) -> None:
        """Make the directory and those above it, and make their entries durable; errors as of the base class."""
        for _ in range(_TRIES):
            try:
                self._make_directory(mode)
            except FileNotFoundError:
                continue  # another process has removed one that was empty
            except NotADirectoryError as error:
                raise self.no_directory() from error
            if os.path.isdir(self.path):
                return
        raise self.no_directory()

    def check_writable(self) -> None:
        """Raise ValidationError if this process cannot make the directory, or files in it; nothing is touched."""
        path = os.path.abspath(self.path)
        while not os.path.lexists(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        if not os.path.isdir(path):
            raise self.no_directory()
        if not os.access(path, os.W_OK | os.X_OK):
            raise ValidationError(f"{self.path} cannot be saved to: {path} is not writable. {UNWRITABLE}")

    def _make_directory(self, mode: int) -> None:
        missing = []
        path = os.path.abspath(self.path)
        while not os.path.isdir(path) and path != os.path.dirname(path):
            missing.append(path)
            path = os.path.dirname(path)
        # Another process may just have created the lowest existing directory, without making its entry durable yet.
        _sync_entry(path)
        # One by one, so that only the lowest of those that a dead process has left is in doubt.
        for lacking in reversed(missing):
            with contextlib.suppress(FileExistsError), writing(lacking):
                os.mkdir(lacking, mode)
            sync_path(os.path.dirname(lacking))

    def no_directory(self) -> ValidationError:
        """Return the error of what cannot be saved here."""
        return ValidationError(
            f"{self.path} is not a directory, so nothing can be saved there. Remedy (FC406): give another path"
        )

    def remove_directory(self) -> None:
        """Implement the base class."""
        remove(self.path, "empty")

    def sync(self) -> None:
        """Implement the base class."""
        sync_path(self.path)

    def reopen_token(self) -> dict[str, Any]:
        """Implement the base class."""
        return {"path": os.path.abspath(self.path), **self._settings, "identity": self.locks.identity}


def _is_of(entry: os.DirEntry[str], kind: Kind) -> bool:
    """Return whether an entry is one of those that are listed."""
    if kind == "directories":
        try:
            return entry.is_dir()
        except OSError:
            return True  # opening it raises an error that says why
    # Anything but a directory counts as a file, so that an object in the way of one is found.
    return kind == "any" or (not entry.is_dir(follow_symlinks=False) and entry.name != LEASE_FILE)


def fsync(descriptor: int, path: str) -> None:
    """Make the bytes of a file, or the entries of a directory, durable."""
    with writing(path):
        os.fsync(descriptor)


def sync_path(path: str) -> None:
    """Make the entries of a directory, or the bytes of a closed file, durable.

    If a file system has no such call for directories, a warning is logged once, and the save goes on.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with naming(path):
        try:
            fsync(descriptor, path)
        except OSError as error:
            if error.errno not in _NO_DURABLE_NAMES or not os.path.isdir(path):
                raise
            _warn_of_names(path, os.stat(path).st_dev, error)
        finally:
            os.close(descriptor)


def _warn_of_names(path: str, device: int, error: OSError) -> None:
    """Warn once for each device that names may not be durable there."""
    if device not in _WARNED:
        _WARNED.add(device)
        logger.warning(
            "the file system of %r cannot make names of files durable (fsync of a directory: %s): after a loss of "
            "power, a checkpoint that was reported as saved may be gone, or lack files, which a load would notice. "
            "The bytes of files are durable, and nothing is lost when a process dies",
            path,
            error.strerror,
        )


def _sync_entry(path: str) -> None:
    """Make durable that a directory exists, unless its parent cannot be changed from here."""
    try:
        sync_path(os.path.dirname(path))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise


def write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    """Write all bytes of all parts, also after short writes."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        count, done = os.writev(descriptor, left[:_MOST_PARTS]), 0
        while done < len(left) and count >= left[done].nbytes:
            count -= left[done].nbytes
            done += 1
        del left[:done]
        if count:
            left[0] = left[0][count:]
