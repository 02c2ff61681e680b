"""Media: what the files of one fsspec file system can do, and how each kind of them commits.

Paths here are those of the file system, without the protocol.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paddle_flexckpt.media.retrying import Retrier

# How a file takes the place of another at once:
#   put      An object appears whole, when its last byte has been taken, or not at all, and replaces what was there.
#   replace  Files grow visibly; renaming is atomic and replaces.
#   rename   Files grow visibly; renaming is atomic, and fails or leaves a gap where the target exists.
Commit = Literal["put", "replace", "rename"]
COMMITS = get_args(Commit)

COMMIT_OF: dict[str, Commit] = {
    # Object stores: a key is set by one request, or by the last one of an upload in parts.
    **dict.fromkeys(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "obs", "cos", "tos", "oci"), "put"),
    # One dict of the process; whole files are set under their key.
    "memory": "put",
    # POSIX renaming on the server (fsspec asks for posix-rename@openssh.com).
    "sftp": "replace",
    "ssh": "replace",
    # The name node renames atomically; it refuses a target that exists, so that it would have to be removed before.
    "hdfs": "rename",
    "webhdfs": "rename",
    # What these servers do with a target that exists is up to them.
    "ftp": "rename",
    "smb": "rename",
}
# Of these the request that creates a file fails if there is one, whoever is faster.
_EXCLUSIVE = frozenset({"gs", "gcs", "abfs", "abfss", "az", "memory"})
S3_PROTOCOLS = frozenset({"s3", "s3a"})


def commit_of(protocol: str, file_system: Any) -> Commit | None:
    """How the files of a protocol commit; None if that is not known, and so nothing can be saved there.

    A protocol that is not in the table takes the careful way if it renames. fsspec's own ``mv`` does not rename: it
    copies and removes, and what it copies can be seen half.
    """
    import fsspec

    if protocol in COMMIT_OF:
        return COMMIT_OF[protocol]
    return None if type(file_system).mv is fsspec.AbstractFileSystem.mv else "rename"


@dataclass(frozen=True)
class Listing:
    """What is in a directory.

    Attributes:
        files: Names.
        directories: Names.
    """

    files: list[str]
    directories: list[str]


class Upload:
    """A file that is written in parts through fsspec's own stream. Where that fails, so does the file."""

    def __init__(self, medium: Medium, path: str, part_bytes: int) -> None:
        """Opens the stream."""
        self._medium, self._path = medium, path
        self._written = 0
        self._stream: Any = medium.retrier(
            medium.where(path), medium.file_system.open, path, "wb", block_size=part_bytes
        )

    def part(self, data: bytearray) -> None:
        """Writes what follows; all parts but the last have the same size."""
        once = self._medium.once
        view = memoryview(data)
        while len(view):
            count = once(self._medium.where(self._path), self._stream.write, view)
            # Some streams do not tell; a short write is not an error but a beginning.
            view = view[count if isinstance(count, int) else len(view) :]
        self._written += len(data)

    def finish(self) -> None:
        """Closes the file; it is there, whole, when this returns."""
        self._medium.once(self._medium.where(self._path), self._stream.close)
        size = self._medium.size(self._path)
        if size != self._written:
            text = f"{self._written} bytes were written, and {size} are there"
            raise OSError(errno.EIO, text, self._medium.where(self._path))

    def abort(self) -> None:
        """Gives up; what can be seen of the file is removed by the caller."""
        # Anything may be wrong with the stream, and another error is on its way.
        with contextlib.suppress(Exception):
            self._stream.discard()
        if hasattr(self._stream, "blocksize"):
            # fsspec's buffered streams finish the file when they are collected, unless they are closed.
            with contextlib.suppress(Exception):
                self._stream.closed = True
        else:
            with contextlib.suppress(Exception):
                self._stream.close()


class Medium:
    """The files of one fsspec file system."""

    def __init__(self, file_system: Any, protocol: str, root: str, shown: str, retrier: Retrier, once: Retrier) -> None:
        """Wraps a file system.

        Args:
            file_system: Of fsspec.
            protocol: Its protocol.
            root: The path in it that ``shown`` stands for.
            shown: URL of the root, for errors.
            retrier: Makes requests that can be made again.
            once: Makes those that cannot.
        """
        self.file_system = file_system
        self.retrier = retrier
        self.once = once
        self._protocol = protocol
        self._root, self._shown = root, shown

    def where(self, path: str) -> str:
        """A path as a URL, for errors."""
        return self._shown + path[len(self._root) :]

    @property
    def exclusive(self) -> bool:
        """Whether, of two that create a file, one fails for certain."""
        return self._protocol in _EXCLUSIVE and self._has_create_mode

    @property
    def _has_create_mode(self) -> bool:
        return "mode" in inspect.signature(self._pipe_function).parameters

    @property
    def _pipe_function(self) -> Any:
        return getattr(self.file_system, "_pipe_file", self.file_system.pipe_file)

    def entries(self, path: str) -> Listing:
        """What is in a directory; nothing if it is not there."""
        # Others write there: what this process has seen earlier does not count.
        self.file_system.invalidate_cache(path)
        try:
            entries = self.retrier(self.where(path), self.file_system.ls, path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return Listing([], [])
        found = Listing([], [])
        start = path.rstrip("/") + "/"
        for entry in entries:
            name = entry["name"].rstrip("/")
            # A file is its own and only entry; a marker of a directory is called like it.
            if name.startswith(start):
                (found.directories if entry["type"] == "directory" else found.files).append(name[len(start) :])
        return found

    def info(self, path: str) -> dict[str, Any]:
        """fsspec's description of a file or directory.

        Raises:
            FileNotFoundError: It is not there.
        """
        self.file_system.invalidate_cache(path)
        info: dict[str, Any] = self.retrier(self.where(path), self.file_system.info, path)
        return info

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return int(self.info(path)["size"])

    def head(self, path: str, length: int) -> tuple[int, bytes]:
        """Size of a file, and up to ``length`` first bytes of it, or none if they would cost another request.

        Raises:
            FileNotFoundError: It is not there.
            IsADirectoryError: It is something else.
        """
        info = self.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "is no file", self.where(path))
        return int(info["size"]), b""

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes of a file; to its end if ``end`` is None.

        Raises:
            FileNotFoundError: It is not there.
        """
        # Else what is not asynchronous reads ahead at every call.
        keywords: dict[str, Any] = {} if self.file_system.async_impl else {"cache_type": "none"}
        data: bytes = self.retrier(self.where(path), self.file_system.cat_file, path, start=begin, end=end, **keywords)
        return data

    def put(self, path: str, data: bytes | bytearray, exclusive: bool = False) -> None:
        """Writes a whole file.

        Args:
            path: Where.
            data: All of it.
            exclusive: Whether it is an error if there is one already.

        Raises:
            FileExistsError: There is.
        """
        keywords: dict[str, Any] = {}
        if exclusive:
            if self.exists(path):
                raise FileExistsError(errno.EEXIST, "exists", self.where(path))
            if self.exclusive:
                keywords["mode"] = "create"

        def is_ours(error: Exception) -> bool | None:
            """An earlier try may have created the file that is in the way now."""
            return True if exclusive and isinstance(error, FileExistsError) and self.read(path) == data else None

        self.retrier(self.where(path), self.file_system.pipe_file, path, bytes(data), again=is_ours, **keywords)

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def upload(self, path: str, part_bytes: int, exclusive: bool) -> Upload | None:
        """Begins to write a file in parts; None where only whole files can be written."""
        if self._protocol == "memory":
            return None
        if exclusive and self.exists(path):
            raise FileExistsError(errno.EEXIST, "exists", self.where(path))
        return Upload(self, path, part_bytes)

    def rename(self, source: str, target: str) -> None:
        """Renames a file."""
        self.once(self.where(target), self.file_system.mv, source, target)

    def remove(self, path: str) -> None:
        """Removes a file; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            self.retrier(self.where(path), self.file_system.rm_file, path)

    def unfinished(self, path: str) -> list[tuple[str, str]]:
        """Uploads in a directory that nobody has finished, as names and ids; none where that cannot be told."""
        return []

    def abandon(self, path: str, upload: str) -> None:
        """Gives up an upload of :meth:`unfinished`."""

    def make_directory(self, path: str) -> None:
        """Makes a directory and those above it."""
        self.retrier(self.where(path), self.file_system.makedirs, path, exist_ok=True)

    def remove_directory(self, path: str) -> None:
        """Removes a directory, if it is empty; one that is not there is fine."""
        found = self.entries(path)
        if not found.files and not found.directories:
            with contextlib.suppress(FileNotFoundError):
                self.retrier(self.where(path), self.file_system.rmdir, path)
