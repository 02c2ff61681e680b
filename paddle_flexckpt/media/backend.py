"""Backends: the files of one directory, on whatever medium it is.

All that the format needs of a medium is this: files that are written once and whole, byte ranges of them, a small
file that appears with all its bytes or not at all (the commit), and a lock among savers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar, Union

from paddle_flexckpt.catalog import CorruptCheckpointError, UnreadableCheckpointError, ValidationError
from paddle_flexckpt.media.file_names import check_file_name
from paddle_flexckpt.media.urls import path_of, redacted, split_url

Buffer = Union[bytes, memoryview]
Item = TypeVar("Item")
Result = TypeVar("Result")


class InputFile(ABC):
    """A file open for reading.

    Attributes:
        size: Its bytes.
    """

    size: int

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills the beginning of a buffer from byte ``offset``; returns how many bytes, 0 at the end of the file."""

    def memory_map(self) -> mmap.mmap | None:
        """The file as a read-only memory map, which the caller closes; None where the medium has none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from byte ``offset``; fewer where the file ends."""
        data = bytearray(max(0, min(length, self.size - offset)))
        with memoryview(data) as view:
            count = fill(self, view, offset)
        return bytes(data[:count])

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Make an error of the medium one of this library, which a restore may pass over.

    Raises:
        UnreadableCheckpointError: The medium failed or refused; the text says how.
    """
    try:
        yield
    except OSError as error:
        raise UnreadableCheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Remedy: look at permissions, links and the state "
            "of the storage; or load another checkpoint"
        ) from error


def fill(file: InputFile, buffer: memoryview, offset: int) -> int:
    """Fills a buffer from byte ``offset``; returns how many bytes there were before the file's end."""
    count = 0
    while count < len(buffer):
        got = file.read_into(buffer[count:], offset + count)
        if got == 0:
            break
        count += got
    return count


class OutputFile(ABC):
    """A new file. Leaving its context finishes it; leaving by an exception aborts it."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Appends all of the data."""

    def make_durable(self) -> None:  # noqa: B027
        """Make the bytes durable where that can be done before :meth:`finish`, which then takes little time."""

    @abstractmethod
    def finish(self) -> None:
        """Closes the file; its bytes are durable when this returns."""

    @abstractmethod
    def abort(self) -> None:
        """Closes and removes the file, as far as the medium lets it: called while another error is on its way."""

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


class SaveLock(ABC):
    """The right to save to a directory."""

    @abstractmethod
    def release(self) -> None:
        """Gives it back; again is fine."""

    @abstractmethod
    def describe(self) -> tuple[dict[str, Any], int | None]:
        """What :meth:`Backend.adopt_lock` needs in another process: JSON-safe values, and a descriptor to be sent."""

    @abstractmethod
    def detach(self) -> None:
        """Ends this process's part in it after another process has adopted it: the lock is not freed."""


class NoLock(SaveLock):
    """The right to save without asking anybody."""

    def release(self) -> None:
        """As in the base class."""

    def describe(self) -> tuple[dict[str, Any], int | None]:
        """As in the base class."""
        return {"kind": "none"}, None

    def detach(self) -> None:
        """As in the base class."""


class FileLock:
    """A lock on one file: held by its readers together, or by the one who removes it alone. This one holds nothing."""

    def release(self) -> None:
        """Gives it back; again is fine."""

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Backend(ABC):
    """The files of one directory.

    Attributes:
        path: The directory as the caller named it; of a URL, without what is secret.
    """

    path: str

    @property
    def has_path(self) -> bool:
        """Return whether other programs of this machine can open its files by a path."""
        return False

    @property
    def replaces(self) -> bool:
        """Whether a file can take the place of another at once; otherwise :meth:`publish` refuses to."""
        return True

    @property
    def exclusive(self) -> bool:
        """Whether, of two that create a file at a time, one fails for certain."""
        return True

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the files in it; none if it does not exist."""

    @abstractmethod
    def directories(self) -> list[str]:
        """Names of the directories in it; none if it does not exist."""

    @abstractmethod
    def child(self, name: str) -> Backend:
        """A directory in it, whether it exists or not."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the directory is there; on media without directories, whether a file is in it."""

    @abstractmethod
    def where(self, name: str) -> str:
        """A file's path or URL, for errors and reports."""

    def place(self) -> str:
        """Return a text that is the same in two processes only if this is the same directory for both."""
        return self.path

    @abstractmethod
    def open(self, name: str) -> InputFile:
        """Opens a file.

        Raises:
            FileNotFoundError: It is not there.
            CorruptCheckpointError: The name leads out of the directory, or to something that is not a file.
            OSError: The medium failed.
        """

    def inner(self, name: str) -> Backend:
        """A directory right below this one, which a checkpoint names.

        Raises:
            CorruptCheckpointError: The name leads elsewhere.
        """
        try:
            return self.child(check_file_name(name))
        except ValueError as error:
            raise CorruptCheckpointError(f"in {self.path}: {error}. Remedy: load another checkpoint") from error

    def open_member(self, name: str) -> InputFile:
        """Opens a file of the directory or, as ``directory/file``, of one right below it; errors of :meth:`open`."""
        folder, slash, file = name.partition("/")
        return self.inner(folder).open(file) if slash else self.open(name)

    @abstractmethod
    def create(self, name: str, replace: bool = False, size: int | None = None) -> OutputFile:
        """A new file.

        Args:
            name: Its name.
            replace: It appears under its name when it is finished, whole, instead of what is there then.
            size: Bytes that it will have, if that is known.

        Raises:
            FileExistsError: There is one of that name, and it is not to be replaced; now or when it is finished.
            OSError: The medium refused.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Writes a small file, or replaces it; its bytes are durable when this returns."""

    def publish(self, name: str, data: bytes, check: Callable[[], None] = lambda: None) -> None:
        """The commit: all that was written before becomes durable; then the file appears, whole or not at all.

        It takes the place of a file of that name, and is durable when this returns.

        Args:
            name: The file's name.
            data: Its bytes.
            check: Called right before the file appears; what it raises keeps the file from appearing.

        Raises:
            CheckpointError: Somebody else has the right to save by now, or the directory is another one.
            FileExistsError: There is a file of that name, and this medium cannot replace it at once.
            OSError: The medium refused; what is there may be the old file or the new one.
        """
        self.sync()
        with self.create(name, replace=True) as file:
            file.write(data)
            file.make_durable()
            check()
        self.sync()

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is fine."""

    def remove_unfinished(self, wanted: Callable[[str], bool]) -> int:
        """Removes what a medium keeps of files that were begun and not finished, and that :meth:`names` does not list.

        Args:
            wanted: Whether a file is meant, by its name.

        Returns:
            How many there were.

        Raises:
            OSError: The medium refused.
        """
        return 0

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Does the same for each of several files, in any order; several at a time where the medium gains by that.

        Raises:
            Exception: The first one's error, in the order of the items.
        """
        return [function(item) for item in items]

    @abstractmethod
    def remove_directory(self) -> None:
        """Removes the directory if it is empty; one that is not there is fine."""

    @abstractmethod
    def sync(self) -> None:
        """Makes the directory's entries durable."""

    @abstractmethod
    def prepare(self) -> None:
        """Makes the directory.

        Raises:
            ValidationError: There is something else in its place.
        """

    @abstractmethod
    def lock(self) -> SaveLock:
        """Takes the right to save here.

        Raises:
            CheckpointError: Somebody else has it.
        """

    @abstractmethod
    def adopt_lock(self, description: dict[str, Any], descriptor: int | None) -> SaveLock:
        """The lock that another process took and described."""

    def hold(self, name: str) -> FileLock:
        """Keeps a file from being claimed, as long as it is being read. Waits for one who has claimed it.

        On media without locks it is not kept, and not looked for.

        Raises:
            FileNotFoundError: It is not there, or not any more.
            CorruptCheckpointError: As in :meth:`open`.
        """
        return FileLock()

    def claim(self, name: str) -> FileLock | None:
        """The right to remove or replace a file, and with it others that its readers need; None if somebody holds it.

        On media without locks it is given always. A file that is not there has no readers.
        """
        return FileLock()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What opens this directory in another process with :func:`open_described`, JSON-safe.

        Raises:
            ValidationError: Other processes cannot reach it.
        """

    def read(self, name: str) -> bytes:
        """A whole file; errors of :meth:`open`."""
        with self.open(name) as file:
            data = file.read(0, file.size)
            if len(data) != file.size:
                raise CorruptCheckpointError(f"{self.where(name)} became shorter while it was read")
            return data


Location = Union[str, "os.PathLike[str]", Backend]
# What open_storage() takes itself; the rest is fsspec's.
_LOCAL_OPTIONS = frozenset({"lock", "lease_seconds"})
_REMOTE_OPTIONS = _LOCAL_OPTIONS | {"retries", "part_bytes", "commit"}


def open_backend(location: Location) -> Backend:
    """The directory that a path, a URL or a backend stands for.

    Raises:
        ValidationError: It is none of these, or the URL has a scheme that nothing installed knows.
    """
    return location if isinstance(location, Backend) else open_storage(location)


def open_storage(path: str | os.PathLike[str], **options: Any) -> Backend:
    """A directory with options of its own, which may be passed wherever a path is taken.

    Args:
        path: A path, or the URL of anything that fsspec knows (``s3://bucket/run``).
        **options: For paths and URLs: ``lock=False`` lets several savers write at the same time, which is then up to
            the caller to prevent; ``lease_seconds`` (30): where the medium has no locks, a saver that is silent for
            longer may be taken for dead. For URLs: ``retries`` (5) of requests that failed in a way that may pass;
            ``part_bytes`` (8 MiB) that are sent at a time; ``commit`` ("put", "replace" or "rename"): how a file takes
            another's place, for protocols of which that is not known. All others are fsspec's storage options, such as
            ``key``, ``secret`` and ``endpoint_url`` of S3.

    Raises:
        ValidationError: There is no such option, or the URL's scheme needs a package that is not installed.
    """
    text = path_of(path)
    scheme, rest = split_url(text)
    if scheme is None:
        from paddle_flexckpt.media.local import LocalBackend

        unknown = sorted(options.keys() - _LOCAL_OPTIONS)
        if unknown:
            known = ", ".join(sorted(_LOCAL_OPTIONS))
            raise ValidationError([f"options {unknown} are not known for {redacted(text)}; there are: {known}"])
        return LocalBackend(rest, **options)
    # The numpy floor stands without fsspec.
    from paddle_flexckpt.media.remote import FsspecBackend

    own = {name: value for name, value in options.items() if name in _REMOTE_OPTIONS}
    return FsspecBackend(text, {name: value for name, value in options.items() if name not in own}, **own)


def open_described(description: dict[str, Any]) -> Backend:
    """The directory that :meth:`Backend.describe` described."""
    if "url" in description:
        from paddle_flexckpt.media.remote import FsspecBackend

        return FsspecBackend(**description)
    from paddle_flexckpt.media.local import LocalBackend

    return LocalBackend(**description)
