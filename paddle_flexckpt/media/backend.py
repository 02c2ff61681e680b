"""Backends: the files of one directory, on whatever medium it is.

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
from typing import Any, Literal, TypeVar, Union

from paddle_flexckpt.catalog import CorruptCheckpointError, UnreadableCheckpointError
from paddle_flexckpt.media.file_names import check_member, check_not_elsewhere
from paddle_flexckpt.media.read_ahead import Wanted

Buffer = Union[bytes, memoryview]
Self = TypeVar("Self", bound="Lock")
Item = TypeVar("Item")
Result = TypeVar("Result")

# How a new file comes to its name:
#   new        There must be none of that name.
#   replace    It appears whole when it is finished, instead of what is there then.
#   publish    As replace; what another process puts there since a last look is not replaced, where a medium can tell.
#   overwrite  It is written where it stands: for small files that may be seen half written.
Mode = Literal["new", "replace", "publish", "overwrite"]
REPLACING: tuple[Mode, ...] = ("replace", "publish")
# What is listed: files without the lease; directories; or whatever is there.
Kind = Literal["files", "directories", "any"]


class InputFile(ABC):
    """A file that is read.

    Attributes:
        size: Its size in bytes.
    """

    size: int

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the beginning of a buffer from byte ``offset``; return how many bytes, 0 at the end of the file."""

    def read_into_each(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers, one after the other, from byte ``offset``, by one request if the medium answers it whole.

        Returns:
            How many bytes, as of :meth:`read_into`: the last of them may be missing.
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
        """Begin to bring what will be read of open files of a kind, of which this is one, where a request takes long.

        Args:
            files: Those that ``wanted`` counts; they are closed together.
            wanted: The ranges, in the order in which they will be read.

        Returns:
            How many bytes come along that nobody wants.
        """
        return 0

    def memory_map(self) -> mmap.mmap | None:
        """Return the file as a read-only memory map, which the caller closes; None where the medium has none."""
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
        """Write one after the other, in as few requests as the medium can."""
        for part in parts:
            self.write(part)

    def make_durable(self) -> None:  # noqa: B027
        """Make the bytes durable where that can be done before :meth:`finish`, which then takes little time."""

    def look(self) -> None:  # noqa: B027
        """Look at what a published file would replace now, where a medium can keep it from replacing anything else."""

    @abstractmethod
    def finish(self) -> None:
        """Close the file; its bytes are durable when this returns."""

    @abstractmethod
    def abort(self) -> None:
        """Close the file, and remove it where it is known to be this one; another error is on its way."""

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
        """Give the right back; to do so again is fine."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class SaveLock(Lock):
    """The right to save to a directory. This class grants it to everybody."""

    def handover(self) -> tuple[dict[str, Any], int | None]:
        """Return what :meth:`Locks.adopt` needs in another process: JSON-safe values, and a descriptor to be sent."""
        return {"kind": "none"}, None

    def detach(self) -> None:
        """End this process's part after another process has adopted the lock: the lock is not freed."""


class Locks:
    """The locks of one directory: one for savers, and one for each file, shared by readers, exclusive for removal."""

    def take(self) -> SaveLock:
        """Take the right to save here.

        Raises:
            CheckpointError: Somebody else has it.
        """
        return SaveLock()

    def adopt(self, token: dict[str, Any], descriptor: int | None) -> SaveLock:
        """Take over a lock from another process, by what :meth:`SaveLock.handover` returned there."""
        return SaveLock()

    def is_here(self) -> bool:
        """Return whether the path leads to the directory of which the right to save was taken."""
        return True

    def check(self) -> None:
        """Make sure, right before a commit, that the right to save is still held.

        Raises:
            CheckpointError: Somebody else has it by now, or the directory is another one.
        """

    def recheck(self) -> None:
        """Make sure again, if that was so long ago that it may have changed; errors as of :meth:`check`."""

    @property
    def can_run_out(self) -> bool:
        """Return whether the right that was taken can be lost by who is stopped, and goes on without knowing it."""
        return False

    def forget_lost(self) -> None:
        """Forget the right to save if it has been lost: what follows is done as by one who never had it."""

    def confirm(self) -> None:
        """Ask what a release that follows soon would have to ask: beside another request it takes no time."""

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
        """Begin a file; ``mode`` says what becomes of one of that name, ``size`` how many bytes it will have, if known.

        Raises:
            FileExistsError: There is one of that name, and it is not to be replaced; now or when it is finished.
            OSError: The medium refused.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is fine.

        Raises:
            CheckpointError: This process has lost the lease that it had here: another save may have the name by now.
            OSError: That, or the medium refused.
        """

    def remove_unfinished(self, wanted: Callable[[str], bool]) -> None:  # noqa: B027
        """Remove what a medium keeps of wanted files that were begun and not finished; :meth:`names` lists none."""

    @abstractmethod
    def make_directory(self) -> None:
        """Make the directory, if it is not there.

        Raises:
            ValidationError: There is something else in its place.
        """

    @abstractmethod
    def remove_directory(self) -> None:
        """Remove the directory if it is empty; one that is not there is fine."""

    @abstractmethod
    def sync(self) -> None:
        """Make the directory's entries durable."""

    @abstractmethod
    def reopen_token(self) -> dict[str, Any]:
        """Return what opens this directory in another process with :func:`media.opening.reopen`, JSON-safe.

        Raises:
            ValidationError: Other processes cannot reach it.
        """


Location = Union[str, "os.PathLike[str]", Backend]


def publish(backend: Backend, name: str, data: bytes, *checks: Callable[[], object]) -> None:
    """Commit: make durable all that was written before, then let a file appear, whole or not at all.

    It takes the place of a file of that name, and is durable when this returns.

    The ``checks`` are called right before the file appears, at the same time where the medium gains by that; what one
    raises keeps the file from appearing.

    Raises:
        CheckpointError: Somebody else has the right to save by now, or the directory is another one.
        FileExistsError: There is a file of that name, and this medium cannot replace it at once.
        OSError: The medium refused; what is there may be the old file or the new one.
    """
    backend.sync()
    try:
        with backend.create(name, "publish", len(data)) as file:
            file.write(data)
            file.make_durable()
            run_beside(backend, backend.locks.check, file.look, *checks)
            # The others may have taken long.
            backend.locks.recheck()
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
    """Do the same for each of several files; several at a time where the medium gains by that.

    The first error, in the order of the items, is raised.
    """
    items = list(items)
    if len(items) < 2 or backend.at_once < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(backend.at_once, len(items)), thread_name_prefix="flexckpt") as pool:
        return list(pool.map(function, items))


def run_beside(backend: Backend, *steps: Callable[[], object]) -> None:
    """Take steps that need nothing of each other, as :func:`map_files` does."""
    map_files(backend, lambda step: step(), steps)


def exists(backend: Backend) -> bool:
    """Return whether the directory is there; on media without directories, whether a file is in it."""
    return os.path.isdir(backend.path) if backend.has_path else bool(backend.names("any"))


def place_of(backend: Backend) -> str:
    """Return a text that is the same in two processes only if this is the same directory for both."""
    if not backend.has_path:
        return backend.path
    # What tells this host's view of its files from that of others.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = [file.read().strip(), os.stat("/proc/self/ns/mnt").st_ino, os.stat("/").st_ino]
    except OSError:
        host = [os.urandom(16).hex()]
    return f"{host}:{os.path.realpath(backend.path)}"


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
    """Make an OSError of the medium an UnreadableCheckpointError, which a restore may pass over."""
    try:
        yield
    except OSError as error:
        raise UnreadableCheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Remedy: look at permissions, links and the state "
            "of the storage; or load another checkpoint"
        ) from error


def fill(file: InputFile, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from byte ``offset``; return how many bytes there were before the file's end."""
    count = 0
    while count < len(buffer):
        got = file.read_into(buffer[count:], offset + count)
        if got == 0:
            break
        count += got
    return count
