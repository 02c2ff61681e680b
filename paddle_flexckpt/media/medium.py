"""Media: the operations on files of an fsspec file system's directory.

Tested in tests/media/test_remote.py.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from paddle_flexckpt.media.file_names import Secrets
from paddle_flexckpt.media.read_ahead import Budget
from paddle_flexckpt.media.retrying import Retrier, is_unanswered


class Listing(NamedTuple):
    """The contents of a directory."""

    files: list[str]
    directories: list[str]


class Upload:
    """A file that is written in chunks through fsspec's own stream. If the stream fails, so does the file."""

    def __init__(self, medium: Medium, name: str, part_bytes: int) -> None:
        """Open the stream."""
        self._medium, self._name, self._written = medium, name, 0
        self._stream: Any = medium.ask(name, medium.file_system.open, medium.path(name), "wb", block_size=part_bytes)

    def send(self, chunk: bytearray) -> None:
        """Write the next chunk; all chunks but the last have the same size."""
        view = memoryview(chunk)
        while len(view):
            count = self._medium.ask_once(self._name, self._stream.write, view)
            # Some streams do not return a number; after a short write the rest is written.
            view = view[count if isinstance(count, int) else len(view) :]
        self._written += len(chunk)

    def finish(self) -> None:
        """Close the file; it exists, whole, when this returns."""
        self._medium.ask_once(self._name, self._stream.close)
        size = self._medium.size(self._name)
        if size != self._written:
            text = f"{self._written} bytes were written, and {size} are there"
            raise OSError(errno.EIO, text, self._medium.where(self._name))

    def abort(self) -> None:
        """Abort; the caller removes any visible part of the file."""
        # The stream may raise anything, and another error is being raised.
        with contextlib.suppress(Exception):
            self._stream.discard()
        with contextlib.suppress(Exception):
            if hasattr(self._stream, "blocksize"):
                # fsspec's buffered streams finish the file when they are collected, unless they are closed.
                self._stream.closed = True
            else:
                self._stream.close()


class Medium:
    """The files of one directory of an fsspec file system. The name "" stands for the directory itself.

    A subclass makes other requests, or makes them in another way; ``protocols.py`` has the URL schemes of each class.

    Attributes:
        file_system: fsspec's.
        pid: The process that may use it.
        budget: The limits of concurrent requests, for each file that is written and for each reader.
        takes_password: Whether the file system uses a password that is in the URL.
        is_shared: Whether other processes see the files.
    """

    takes_password: ClassVar[bool] = True
    is_shared: ClassVar[bool] = True

    @classmethod
    def options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options for fsspec's file system, from those of the caller."""
        return options

    def __init__(
        self, file_system: Any, creates: bool, root: str, shown: str, retries: int, budget: Budget, secrets: Secrets
    ) -> None:
        """Wrap fsspec's file system; ``creates``: whether the request that creates a file fails where there is one."""
        self.file_system, self.pid, self.budget = file_system, os.getpid(), budget
        self._creates, self._root, self._shown = creates, root, shown
        self._retrier, self._once = Retrier(retries, secrets), Retrier(0, secrets)

    def where(self, name: str) -> str:
        """Return a file's URL, for errors."""
        return f"{self._shown}/{name}" if name else self._shown

    def path(self, name: str) -> str:
        """Return a file's path in the file system."""
        return f"{self._root}/{name}" if name else self._root

    def ask(self, name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Make a request about a file, with retries; arguments and errors as of :class:`Retrier`."""
        return self._retrier(self.where(name), function, *arguments, **keywords)

    def ask_once(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a request that cannot be repeated."""
        return self._once(self.where(name), function, *arguments)

    @property
    def exclusive(self) -> bool:
        """Return whether a creation fails if the file exists, even when two processes create it at once."""
        put = getattr(self.file_system, "_pipe_file", self.file_system.pipe_file)
        return self._creates and "mode" in inspect.signature(put).parameters

    def entries(self) -> Listing:
        """List the directory; return nothing if it does not exist."""
        # Others write there, so fsspec's cache does not count.
        self.file_system.invalidate_cache(self._root)
        found = Listing([], [])
        try:
            entries = self.ask("", self.file_system.ls, self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return found
        start = self._root.rstrip("/") + "/"
        for entry in entries:
            name = entry["name"].rstrip("/")
            # A file is its own only entry; a marker of a directory has the same name.
            if name.startswith(start):
                (found.directories if entry["type"] == "directory" else found.files).append(name[len(start) :])
        return found

    def info(self, name: str) -> dict[str, Any]:
        """Return fsspec's description of a file or directory; FileNotFoundError if it is not there."""
        self.file_system.invalidate_cache(self.path(name))
        info: dict[str, Any] = self.ask(name, self.file_system.info, self.path(name))
        return info

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return int(self.info(name)["size"])

    def exists(self, name: str) -> bool:
        """Return whether there is a file or directory."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self.info(name))
        return False

    def head(self, name: str, length: int) -> tuple[int, bytes]:
        """Return a file's size, and up to ``length`` first bytes of it, or none if they would cost another request.

        Raises:
            FileNotFoundError: It is not there.
            IsADirectoryError: It is something else.
        """
        info = self.info(name)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "is no file", self.where(name))
        return int(info["size"]), b""

    def read(self, name: str, begin: int = 0, end: int | None = None, stop: threading.Event | None = None) -> bytes:
        """Return bytes of a file, to its end if ``end`` is None; no further try is made once ``stop`` is set.

        Raises:
            FileNotFoundError: It is not there.
            OSError: The request failed for good.
        """
        keywords: dict[str, Any] = {"start": begin, "end": end, "stop": stop}
        if not self.file_system.async_impl:
            # Without this it reads ahead at every call.
            keywords["cache_type"] = "none"
        data: bytes = self.ask(name, self.file_system.cat_file, self.path(name), **keywords)
        return data

    def put(
        self, name: str, data: bytes | bytearray, exclusive: bool = False, before: Callable[[], None] = lambda: None
    ) -> None:
        """Write a whole file; if it is to be ``exclusive``, FileExistsError if there is one already.

        ``before`` is called before each try; what it raises ends them.
        """
        keywords: dict[str, Any] = {}
        if exclusive:
            self.check_new(name)
            if self.exclusive:
                keywords["mode"] = "create"

        def is_ours(error: Exception) -> bool | None:
            """Return whether an earlier try has created the file that now exists."""
            return True if exclusive and isinstance(error, FileExistsError) and self.read(name) == data else None

        def send() -> None:
            before()
            self.file_system.pipe_file(self.path(name), bytes(data), **keywords)

        self.ask(name, send, recover=is_ours)

    def version_of(self, name: str) -> str:
        """Return the version that :meth:`publish` would replace; empty if there is none, or the medium has none."""
        return ""

    def publish(self, name: str, data: bytes | bytearray, replaced: str, before: Callable[[], None]) -> None:
        """Write a whole file in place of the version that :meth:`version_of` has found.

        If the version has changed, it is looked at again, and replaced if ``before`` still allows it, which is called
        before each try as for :meth:`put`. Where the medium has no such condition, it is replaced in any case.
        """
        if self.exclusive:
            try:
                self.put(name, data, True, before)
                return
            except FileExistsError as error:
                if is_unanswered(error):
                    raise  # an earlier try may have written it, and another save have replaced it since
        self.put(name, data, before=before)

    def check_new(self, name: str, text: str = "exists") -> None:
        """Raise FileExistsError if a file is there."""
        if self.exists(name):
            raise FileExistsError(errno.EEXIST, text, self.where(name))

    def upload(self, name: str, part_bytes: int, exclusive: bool) -> Upload | None:
        """Begin to write a file in chunks; None where only whole files can be written."""
        if exclusive:
            self.check_new(name)
        return Upload(self, name, part_bytes)

    def rename(self, source: str, target: str, replaces: bool) -> None:
        """Rename a file; FileExistsError if the target is there and renaming does not replace it."""
        if not replaces:
            self.check_new(target, "exists, and this file system cannot replace a file at once")
        self.ask_once(target, self.file_system.mv, self.path(source), self.path(target))

    def remove(self, name: str, before: Callable[[], None] = lambda: None) -> None:
        """Remove a file, if it exists. ``before`` is called as for :meth:`put`."""

        def send() -> None:
            before()
            self.file_system.rm_file(self.path(name))

        with contextlib.suppress(FileNotFoundError):
            self.ask(name, send)

    def unfinished(self, start: str = "") -> list[tuple[str, str]]:
        """Return the names, with a given beginning, and ids of unfinished uploads, if the medium lists them."""
        return []

    def abandon(self, name: str, upload: str) -> None:
        """Abort an upload of :meth:`unfinished`."""

    def make_directory(self) -> None:
        """Make the directory and those above it."""
        self.ask("", self.file_system.makedirs, self._root, exist_ok=True)

    def remove_directory(self) -> None:
        """Remove the directory, if it exists and is empty.

        Arrow (HDFS) removes a directory with all files that came meanwhile, so there an empty one stays.
        """
        is_recursive = any(kind.__name__ == "ArrowFSWrapper" for kind in type(self.file_system).__mro__)
        if not is_recursive and not any(self.entries()):
            with contextlib.suppress(FileNotFoundError):
                self.ask("", self.file_system.rmdir, self._root)


class MemoryMedium(Medium):
    """The files of a dict of this process, each of which is set whole under its key."""

    is_shared = False

    def upload(self, name: str, part_bytes: int, exclusive: bool) -> Upload | None:
        """Implement the base class: there are no chunks."""
        return None
