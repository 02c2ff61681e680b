"""Files of a remote medium: reading ahead within bounds, writing in chunks.

Tested in tests/media/test_remote.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence

from paddle_flexckpt.media.backend import REPLACING, Buffer, InputFile, Mode, OutputFile
from paddle_flexckpt.media.medium import Medium, Upload
from paddle_flexckpt.media.protocols import Commit
from paddle_flexckpt.media.read_ahead import ReadAhead, Wanted, plan_requests

# The first bytes that opening a file reads: the save token, and most headers.
HEAD_BYTES = 16 << 10
# A request takes as long as some MiB of its answer.
LONGEST_WINDOW = 8 << 20
# Bytes of all windows of a directory: a load that joins the files of many ranks reads from all of them in turns.
WINDOWS_BYTES = 64 << 20
# Gaps up to this are fetched too, as they take less time than a request.
GAP_BYTES = 256 << 10


class Windows:
    """Bytes of several files that were read ahead. The memory is bounded: the least recently used are dropped first."""

    def __init__(self, most_bytes: int = WINDOWS_BYTES) -> None:
        """Args: most_bytes: of all windows; one is kept whatever its size."""
        self._most = most_bytes
        # In the order of their use.
        self._windows: dict[int, tuple[int, bytes]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, file: int) -> tuple[int, bytes]:
        """Return a file's window: its first byte in the file, and its bytes; an empty one if it has none."""
        with self._lock:
            window = self._windows.pop(file, (0, b""))
            if window[1]:
                self._windows[file] = window
            return window

    def put(self, file: int, begin: int, data: bytes) -> None:
        """Replace a file's window; an empty one removes it."""
        with self._lock:
            self._bytes += len(data) - len(self._windows.pop(file, (0, b""))[1])
            if data:
                self._windows[file] = (begin, data)
            while self._bytes > self._most and len(self._windows) > 1:
                self._bytes -= len(self._windows.pop(next(iter(self._windows)))[1])


class RemoteInputFile(InputFile):
    """A file that is read by requests for byte ranges.

    Announced ranges come from a :class:`ReadAhead`. Other reads make a request each. Where reads follow each other,
    each request is twice as long as the one before, up to a bound, so that no more is read ahead than has been read.
    """

    def __init__(self, medium: Medium, name: str, windows: Windows) -> None:
        """Open a file; FileNotFoundError if it is not there."""
        self._medium, self._name, self._windows = medium, name, windows
        self.size, head = medium.head(name, HEAD_BYTES)
        self._ahead: tuple[ReadAhead, int] | None = None
        self._read_to = 0
        self._last = len(head)
        windows.put(id(self), 0, head)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Implement the base class."""
        length = min(len(buffer), self.size - offset)
        if length <= 0:
            return 0
        if self._ahead is not None:
            ahead, number = self._ahead
            count = ahead.read_into(number, buffer[:length], offset)
            if count:
                return count
        begin, window = self._windows.get(id(self))
        if not begin <= offset < begin + len(window):
            begin, window = offset, self._request(offset, length)
        start = offset - begin
        length = min(length, len(window) - start)
        buffer[:length] = memoryview(window)[start : start + length]
        self._read_to = offset + length
        if self._read_to == begin + len(window):  # all of it has been read
            self._windows.put(id(self), 0, b"")
        elif begin == offset:
            self._windows.put(id(self), begin, window)
        return length

    def read_into_each(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Implement the base class, without a copy of announced bytes."""
        count = 0
        if self._ahead is not None:
            ahead, number = self._ahead
            for buffer in buffers:
                got = ahead.read_into(number, buffer, offset + count)
                count += got
                if got < len(buffer):
                    break
        return count or super().read_into_each(buffers, offset)

    def _request(self, offset: int, length: int) -> bytes:
        follows = 0 <= offset - self._read_to <= GAP_BYTES
        ahead = min(2 * self._last, LONGEST_WINDOW) if follows else 0
        self._last = max(length, ahead)
        return self._medium.read(self._name, offset, min(self.size, offset + self._last))

    def close(self) -> None:
        """Implement the base class; announced ranges of it and of the files along with it are not fetched any more."""
        self._windows.put(id(self), 0, b"")
        if self._ahead is not None:
            self._ahead[0].close()
            self._ahead = None

    def read_ahead(self, files: Sequence[InputFile], wanted: Wanted) -> int:
        """Implement the base class, where several requests can be made at a time."""
        budget = self._medium.budget
        remote = [file for file in files if isinstance(file, RemoteInputFile)]
        if budget.requests < 2 or not self._medium.file_system.async_impl or len(remote) < len(files):
            return 0
        for file in remote:
            if file._ahead is not None:
                file._ahead[0].close()

        def read(number: int, begin: int, end: int, stop: threading.Event) -> bytes:
            file = remote[number]
            return file._medium.read(file._name, begin, end, stop)

        requests = plan_requests(wanted, budget)
        ahead = ReadAhead(read, requests, budget)
        for number, file in enumerate(remote):
            file._ahead = (ahead, number)
        return requests.extra_bytes


class RemoteOutputFile(OutputFile):
    """A file that is sent in chunks, or as a whole if it fits into one chunk or is written in one piece.

    Where a file is visible while it grows, one that replaces another is written under a name of its own and renamed.
    """

    def __init__(
        self,
        medium: Medium,
        name: str,
        part_bytes: int,
        size: int | None,
        mode: Mode,
        commit: Commit,
        before: Callable[[], None],
    ) -> None:
        """Send nothing yet.

        ``commit`` is the medium's. ``before`` is called before each try to write it whole or to rename it.
        """
        self._before = before
        self._medium, self._target, self._commit = medium, name, commit
        is_renamed = mode in REPLACING and commit != "put"
        self._name = f"{name}.{os.urandom(16).hex()}.tmp" if is_renamed else name
        self._part_bytes, self._size, self._exclusive = part_bytes, size, mode == "new" or is_renamed
        self._is_published, self._replaced = mode == "publish" and not is_renamed, ""
        self._buffer, self._piece = bytearray(), b""
        self._upload: Upload | None = None
        self._whole = False
        # Whether the medium may have a part of it.
        self._is_there = False

    def write(self, data: Buffer) -> None:
        """Implement the base class."""
        if isinstance(data, bytes) and len(data) == self._size:
            # Data that is written in one piece is in memory: one request is the safest way.
            self._piece = data
            return
        view = memoryview(data).cast("B")
        while len(view):
            if len(self._buffer) >= self._part_bytes and not self._whole:
                self._send()
            room = len(view) if self._whole else self._part_bytes - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._medium.upload(self._name, self._part_bytes, self._exclusive)
            self._whole = self._upload is None
            self._is_there = self._upload is not None
        if self._upload is not None:
            # Passed on, not copied: a chunk is large.
            chunk, self._buffer = self._buffer, bytearray()
            self._upload.send(chunk)

    def note_replaced(self) -> None:
        """Implement the base class."""
        if self._is_published:
            self._replaced = self._medium.version_of(self._name)

    def finish(self) -> None:
        """Send the rest, and give the file its name.

        Raises:
            FileExistsError: A file of that name exists, and cannot be replaced atomically.
        """
        if self._upload is not None:
            self._send()
            self._upload.finish()
        else:
            data = self._piece or self._buffer
            try:
                if self._is_published:
                    self._medium.publish(self._name, data, self._replaced, self._before)
                else:
                    self._medium.put(self._name, data, self._exclusive, self._before)
            except FileExistsError:
                raise
            except BaseException:
                self._is_there = True
                raise
        if self._target != self._name:
            self._upload, self._is_there = None, True
            self._before()
            self._medium.rename(self._name, self._target, self._commit == "replace")

    def abort(self) -> None:
        """Implement the base class."""
        self._buffer = bytearray()
        if self._upload is not None:
            self._upload.abort()
        # The file that it was to replace stays. An object appears whole or not at all: one that exists now may be
        # another save's, which has taken over the names of this one.
        if self._exclusive and self._is_there and self._commit != "put":
            with contextlib.suppress(OSError):
                self._medium.remove(self._name)
