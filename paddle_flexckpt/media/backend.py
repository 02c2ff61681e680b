"""Backends: the files of one directory, on any medium.

The format needs little of a medium: files that are written once and whole, byte ranges of them, a small file that
appears with all its bytes or not at all (the commit, :func:`publish`), and a lock among savers.

Tested in tests/media/test_remote.py, tests/media/test_destinations.py and tests/native/test_reading_lock.py.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union

from paddle_flexckpt.catalog import CorruptCheckpointError, UnreadableCheckpointError
from paddle_flexckpt.media.file_names import check_member, check_not_elsewhere

if TYPE_CHECKING:
    from paddle_flexckpt.media.read_ahead import Wanted

Buffer = Union[bytes, memoryview]
Self = TypeVar("Self", bound="Lock")
Item = TypeVar("Item")
Result = TypeVar("Result")

# How a new file gets its name:
#   new        No file may have the name.
#   replace    It appears whole when it is finished, in place of any file of that name.
#   publish    As replace, but a file is not replaced if it has changed since `note_replaced`, where a medium can detect
#              that.
#   overwrite  It is written in place: for small files that may be seen half written.
Mode = Literal["new", "replace", "publish", "overwrite"]
REPLACING: tuple[Mode, ...] = ("replace", "publish")
# The kinds of entries to list: files without the lease; directories; or all.
Kind = Literal["files", "directories", "any"]


class InputFile(ABC):
    """A file that is read.

    Attributes:
        size: Its size in bytes.
        version: Another one if the file has been replaced or written to since, where the medium can tell.
    """

    size: int
    version: object = None

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the beginning of a buffer from byte ``offset``; return how many bytes, 0 at the end of the file."""

    def read_into_each(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers, one after the other, from byte ``offset``, by one request if the medium answers it whole.

        Returns:
            The number of bytes, as of :meth:`read_into`: the last ones may be missing.
        """
        if len(buffers) == 1:
            return self.read_into(buffers[0], offset)
        data = bytearray(sum(map(len, buffers)))
        with memoryview(data) as view:
            count = self.read_into(view, offset)
            begin = 0
            for buffer in buffers:
                part = view[begin : min(begin + len(buffer), count)]
                buffer[: len(part)] = part
                begin += len(buffer)
        return count

    def read_ahead(self, files: Sequence[InputFile], wanted: Wanted) -> int:
        """Begin to fetch the ``wanted`` ranges of ``files``, in this order, if requests take long.

        Return the number of bytes that are fetched without being needed.
        """
        return 0

    def memory_map(self) -> mmap.mmap | None:
        """Return the file as a read-only memory map, which the caller closes; None if the medium has none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from byte ``offset``; fewer where the file ends."""
        data = bytearray(max(0, min(length, self.size - offset)))
        with memoryview(data) as view:
            count = fill(self, view, offset)
        return bytes(data[:count])

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class OutputFile(ABC):
    """A new file that is written. Leaving its context finishes it; leaving by an exception aborts it."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Write all of the data after what was written before."""

    def write_many(self, parts: Sequence[Buffer]) -> None:
        """Write several buffers one after the other, in as few requests as possible."""
        for part in parts:
            self.write(part)

    def make_durable(self) -> None:  # noqa: B027
        """Make the bytes durable where that can be done before :meth:`finish`, which then takes little time."""

    def note_replaced(self) -> None:  # noqa: B027
        """Remember the version of the file that this one will replace, where a medium can tell versions apart.

        :meth:`finish` then replaces no other version.
        """

    @abstractmethod
    def finish(self) -> None:
        """Close the file; its bytes are durable when this returns."""

    @abstractmethod
    def abort(self) -> None:
        """Close the file, and remove it if it is known to be this one; another error is being raised."""

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise


class Lock:
    """A lock that is held until it is released. This class locks nothing; subclasses do.

    This class and the next two serve media without locks, and callers who keep savers apart themselves.
    ``local_locks.py`` has the kernel's locks, ``lease.py`` leases for media without locks.
    """

    def release(self) -> None:
        """Release the lock; a second call does nothing."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class SaveLock(Lock):
    """The save lock of a directory. This class grants it to everybody."""

    def handover(self) -> tuple[dict[str, Any], int | None]:
        """Return the arguments of :meth:`Locks.adopt` in another process: JSON-safe values, and a descriptor."""
        return {"kind": "none"}, None

    def detach(self) -> None:
        """End this process's part after another process has adopted the lock: the lock is not released."""


class Locks:
    """The locks of one directory: one for savers, and one for each file, shared by readers, exclusive for removal."""

    def take(self, times: float = 1.0) -> SaveLock:
        """Take the save lock; a lease is of so many ``times`` its usual time.

        Raises:
            CheckpointError: Another saver has it.
        """
        return SaveLock()

    def is_taken(self) -> bool | None:
        """Return whether a saver has the save lock; None if this medium cannot tell at once."""
        return None

    def adopt(self, token: dict[str, Any], descriptor: int | None) -> SaveLock:
        """Take over a lock from another process, with the result of :meth:`SaveLock.handover` there."""
        return SaveLock()

    def is_here(self) -> bool:
        """Return whether the path still leads to the directory whose lock was taken."""
        return True

    def check(self) -> None:
        """Make sure, right before a commit, that the save lock is still held.

        Raises:
            CheckpointError: Another saver has it by now, or the directory is another one.
        """

    def ensure_held(self) -> None:
        """Check, unless the last check is still valid; errors as of :meth:`check`."""

    @property
    def can_run_out(self) -> bool:
        """Return whether the save lock can be lost by a process that is suspended and goes on without knowing it."""
        return False

    def forget_lost(self) -> None:
        """Forget the save lock if it has been lost.

        A failed save calls this before it removes its files: a removal needs the lock as long as it is remembered.
        """

    def check_before_release(self) -> None:
        """Check, beside another request, whether the save lock is still held, so that a release soon after need not."""

    def share(self, name: str) -> Lock:
        """Protect a file from being claimed while it is read. Wait for a process that has claimed it.

        Media without locks protect nothing, and do not look for the file.

        Raises:
            FileNotFoundError: It is not there, or not any more.
            CorruptCheckpointError: As in :meth:`Backend.open`.
        """
        return Lock()

    def protect_readers(self, name: str) -> bool:
        """Return whether the lock of a file's reader is seen by those who would remove the file.

        Raises:
            FileNotFoundError: It is not there, or not any more.
        """
        return False

    def claim(self, name: str) -> Lock | None:
        """Take the right to remove or replace a file, and with it others that its readers need.

        Returns:
            The lock; None if the file is being read. A file that does not exist has no readers.
        """
        return Lock()


class Backend(ABC):
    """The files of one directory, through one kind of storage.

    Attributes:
        path: The directory as the caller named it; of a URL, without what is secret.
        locks: The locks of savers, readers and removers.
        has_path: Whether other programs of this machine can open the files by their paths.
        replaces: Whether one file can replace another atomically; otherwise :func:`publish` refuses to replace any.
        at_once: How many requests about several files may be under way at a time.
    """

    path: str
    locks: Locks
    has_path: bool = False
    replaces: bool = True
    at_once: int = 1

    @abstractmethod
    def names(self, kind: Kind = "files") -> list[str]:
        """Return the names of the files in it, or of the directories; none if it does not exist."""

    @abstractmethod
    def child(self, name: str) -> Backend:
        """Return a directory in it, whether it exists or not."""

    def link(self) -> str:
        """Return the highest link in the path below the directory that the caller has named; "" if there is none."""
        return ""

    def where(self, name: str) -> str:
        """Return a file's path or URL, for errors and reports."""
        return os.path.join(self.path, name)

    @abstractmethod
    def open(self, name: str) -> InputFile:
        """Open a file.

        Raises:
            FileNotFoundError: It is not there.
            CorruptCheckpointError: The name leads out of the directory, or to something that is not a file.
            OSError: The medium failed.
        """

    def read(self, name: str) -> bytes:
        """Return a whole file; errors of :meth:`open`."""
        with self.open(name) as file:
            data = file.read(0, file.size)
            if len(data) != file.size:
                raise CorruptCheckpointError(f"{self.where(name)} became shorter while it was read")
            return data

    @abstractmethod
    def create(self, name: str, mode: Mode = "new", size: int | None = None) -> OutputFile:
        """Begin a file; ``mode`` decides what happens to one of its name, ``size`` is the number of bytes, if known.

        Raises:
            FileExistsError: A file of that name exists, now or at the end, and may not be replaced.
            OSError: The medium refused.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it exists.

        Raises:
            CheckpointError: This process has lost the lease that it had here: another save may have the name by now.
            OSError: That, or the medium refused.
        """

    def remove_unfinished(self, wanted: Callable[[str], bool]) -> None:  # noqa: B027
        """Remove a medium's unfinished uploads of ``wanted`` files, which :meth:`names` does not list."""

    @abstractmethod
    def make_directory(self) -> None:
        """Make the directory, if it is not there.

        Raises:
            ValidationError: A file has its name.
        """

    @abstractmethod
    def remove_directory(self) -> None:
        """Remove the directory, if it exists and is empty."""

    @abstractmethod
    def sync(self) -> None:
        """Make the directory's entries durable."""

    @abstractmethod
    def reopen_token(self) -> dict[str, Any]:
        """Return a token with which :func:`media.opening.reopen` opens this directory in another process, JSON-safe.

        Raises:
            ValidationError: Other processes cannot reach it.
        """


Location = Union[str, "os.PathLike[str]", Backend]


def publish(backend: Backend, name: str, data: bytes, *checks: Callable[[], object]) -> None:
    """Commit: make all earlier writes durable, then make a file appear, whole or not at all.

    It takes the place of a file of that name, and is durable when this returns.

    The ``checks`` are called right before the file appears, at the same time if that is faster on the medium. If one
    raises, the file does not appear.

    Raises:
        CheckpointError: Another saver has the save lock by now, or the directory is another one.
        FileExistsError: There is a file of that name, and this medium cannot replace it atomically.
        OSError: The medium refused; the file may be the old one or the new one.
    """
    backend.sync()
    try:
        with backend.create(name, "publish", len(data)) as file:
            file.write(data)
            file.make_durable()
            run_beside(backend, backend.locks.check, file.note_replaced, *checks)
            # The other checks may have taken long.
            backend.locks.ensure_held()
    except FileNotFoundError:
        # Where a file is renamed, the next saver has removed it before. The lease says who that is.
        backend.locks.check()
        raise
    backend.sync()


def write_file(backend: Backend, name: str, data: bytes, mode: Mode = "overwrite") -> None:
    """Write a small file; its bytes are durable when this returns, its name is after :meth:`Backend.sync`."""
    with backend.create(name, mode, len(data)) as file:
        file.write(data)


def map_files(backend: Backend, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function for each of several files; several at a time if that is faster on the medium.

    The first error, in the order of the items, is raised.
    """
    items = list(items)
    if len(items) < 2 or backend.at_once < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(backend.at_once, len(items)), thread_name_prefix="flexckpt") as pool:
        return list(pool.map(function, items))


def run_beside(backend: Backend, *steps: Callable[[], object]) -> None:
    """Run steps that are independent of each other, as :func:`map_files` does."""
    map_files(backend, lambda step: step(), steps)


def exists(backend: Backend) -> bool:
    """Return whether the directory exists; on media without directories, whether it has a file."""
    return os.path.isdir(backend.path) if backend.has_path else bool(backend.names("any"))


def inner(backend: Backend, name: str) -> Backend:
    """Return a directory right below one, which a checkpoint names.

    Raises:
        CorruptCheckpointError: The name leads elsewhere.
    """
    if backend.has_path:
        check_not_elsewhere(backend.path, name)
    check_member(backend.path, name)
    return backend.child(name)


def open_member(backend: Backend, name: str) -> InputFile:
    """Open a file of the directory or, as ``directory/file``, of one below it; errors of :meth:`Backend.open`."""
    *folders, file = name.split("/")
    for folder in folders:
        backend = inner(backend, folder)
    return backend.open(file)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an OSError of the medium into an UnreadableCheckpointError, which a restore may skip."""
    try:
        yield
    except OSError as error:
        raise UnreadableCheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Remedy (FC401): look at permissions, links and "
            "the state of the storage; or load another checkpoint"
        ) from error


def fill(file: InputFile, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from byte ``offset``; return the number of bytes before the file's end."""
    count = 0
    while count < len(buffer):
        got = file.read_into(buffer[count:], offset + count)
        if got == 0:
            break
        count += got
    return count
