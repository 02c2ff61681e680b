"""A file in memory, served to the kernel through FUSE, that logs its writes and flushes and can take them back.

    python -m tests.filesystems.block_file DESCRIPTOR CONTROL BYTES

``DESCRIPTOR`` is an open /dev/fuse that is mounted, on a file: the whole file system is that one file. It is a process
of its own, as one that waits for a disk cannot be the disk. ``CONTROL`` is a connection over which it is told what to
do: a name of a method of :class:`Image` and its arguments; it answers with the result.

The protocol is that of linux/fuse.h. Eight of its requests are enough for one file, which is less than a library for
all of them would take.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import struct
import sys
import zlib
from multiprocessing.connection import Connection
from typing import NamedTuple

_REQUEST = struct.Struct("<IIQQIIIHH")  # length, operation, number, node, user, group, process, ...
_ANSWER = struct.Struct("<IiQ")  # length, error, number
_PLACE = struct.Struct("<QQI")  # handle, offset, size: how requests to read and to write begin
_WRITE_HEADER = 40
_SETATTR, _GETATTR, _OPEN, _READ, _WRITE, _STATFS = 4, 3, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _DESTROY, _FALLOCATE = 18, 20, 25, 26, 38, 43
# FORGET, INTERRUPT, BATCH_FORGET
_NOT_ANSWERED = (2, 36, 42)
_MAJOR, _MINOR = 7, 31
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 15, 1 << 22
_DIRECT_IO = 1 << 0
_MOST_BYTES = 1 << 20
_PAGES = _MOST_BYTES // 4096


class Entry(NamedTuple):
    """One line of the log.

    Attributes:
        kind: ``write``, ``flush`` or ``mark``.
        offset, length: Of a write.
        digest: Of its bytes.
        text: Of a mark.
    """

    kind: str
    offset: int = 0
    length: int = 0
    digest: int = 0
    text: str = ""

    def __str__(self) -> str:
        return " ".join([self.kind, f"{self.offset:#x}+{self.length:#x}" if self.length else self.text]).rstrip()


# Of the entry of a number, the bytes from one position to another.
Part = tuple[int, int, int]


class Image:
    """The bytes of the file, and what can be done with them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = os.memfd_create("blocks", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, size)
        # What was there before each write since the last settle(), to take it back.
        self._undo: list[tuple[int, bytes]] = []
        self._log: list[tuple[Entry, bytes]] = []
        self._logs = False
        self._kept = 0

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._memory, size, offset)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        if self._logs:
            content = bytes(data)
            self._log.append((Entry("write", offset, len(content), zlib.crc32(content)), content))
        self._put(offset, data)

    def flush(self) -> None:
        if self._logs:
            self._log.append((Entry("flush"), b""))

    def _put(self, offset: int, data: memoryview | bytes) -> None:
        self._undo.append((offset, os.pread(self._memory, len(data), offset)))
        os.pwrite(self._memory, data, offset)

    # -- what is asked for over the connection

    def settle(self) -> None:
        """What is there now is not taken back any more."""
        self._undo.clear()

    def rollback(self) -> None:
        """All is as it was at the last settle()."""
        for offset, old in reversed(self._undo):
            os.pwrite(self._memory, old, offset)
        self._undo.clear()

    def start_log(self) -> None:
        self.settle()
        self._log, self._logs, self._kept = [], True, 0

    def mark(self, text: str) -> None:
        self._log.append((Entry("mark", text=text), b""))

    def stop_log(self) -> list[Entry]:
        """The log; the bytes are as they were at its start."""
        self._logs = False
        self.rollback()
        return [entry for entry, _ in self._log]

    def keep(self, count: int) -> None:
        """The first so many entries are durable, for good."""
        if count < self._kept:
            raise ValueError(f"{self._kept} entries are durable by now, so it cannot be {count}")
        for entry, data in self._log[self._kept : count]:
            if entry.kind == "write":
                self._put(entry.offset, data)
        self._kept = count
        self.settle()

    def apply(self, parts: list[Part]) -> None:
        """Parts of later entries have come to the disk too, until the next rollback()."""
        for number, begin, end in parts:
            entry, data = self._log[number]
            self._put(entry.offset + begin, data[begin:end])

    def dump(self, path: str) -> None:
        """Writes the bytes to a sparse file."""
        with open(path, "wb") as stream:
            stream.truncate(self.size)
            end = 0
            while end < self.size:
                try:
                    begin = os.lseek(self._memory, end, os.SEEK_DATA)
                except OSError as error:
                    if error.errno != errno.ENXIO:  # no more data
                        raise
                    return
                end = os.lseek(self._memory, begin, os.SEEK_HOLE)
                stream.seek(begin)
                stream.write(self.read(begin, end - begin))


class Server:
    """Answers the kernel."""

    def __init__(self, descriptor: int, image: Image) -> None:
        self._descriptor, self._image = descriptor, image
        self._buffer = bytearray(_MOST_BYTES + 65536)
        self._view = memoryview(self._buffer)
        os.set_blocking(descriptor, False)

    def answer_all(self) -> bool:
        """Answers what has been asked; False if the file is not mounted any more."""
        while True:
            try:
                os.readv(self._descriptor, [self._buffer])
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return False
                if error.errno in (errno.ENOENT, errno.EINTR):  # the request was withdrawn
                    continue
                raise
            _, operation, number, *_ = _REQUEST.unpack_from(self._buffer)
            if operation in _NOT_ANSWERED:
                continue
            status, data = self._answer(operation)
            with contextlib.suppress(FileNotFoundError):  # it was withdrawn meanwhile
                os.writev(self._descriptor, [_ANSWER.pack(_ANSWER.size + len(data), -status, number), data])

    def _answer(self, operation: int) -> tuple[int, bytes]:
        begin, blocks = _REQUEST.size, self._image.size // 4096
        if operation == _READ:
            _, offset, size = _PLACE.unpack_from(self._buffer, begin)
            return 0, self._image.read(offset, size)
        if operation == _WRITE:
            _, offset, size = _PLACE.unpack_from(self._buffer, begin)
            begin += _WRITE_HEADER
            self._image.write(offset, self._view[begin : begin + size])
            return 0, struct.pack("<II", size, 0)
        if operation == _FSYNC:
            self._image.flush()
            return 0, b""
        if operation == _INIT:
            flags = _ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _MAX_PAGES
            numbers = (_MAJOR, _MINOR, 0, flags, 64, 48, _MOST_BYTES, 1, _PAGES, 0)
            return 0, struct.pack("<IIIIHHIIHH32x", *numbers)
        if operation in (_GETATTR, _SETATTR):
            # How long it holds; number, size, blocks; times; mode, links, owners, device; size of a block.
            numbers = (3600, 1, self._image.size, blocks * 8, 0o100600, 1, 4096)
            return 0, struct.pack("<Q8x QQQ 36x II 12x I 4x", *numbers)
        if operation == _OPEN:
            return 0, struct.pack("<QII", 1, _DIRECT_IO, 0)
        if operation == _STATFS:
            return 0, struct.pack("<5Q4I24x", blocks, 0, 0, 1, 0, 4096, 255, 4096, 0)
        if operation in (_RELEASE, _FLUSH, _DESTROY):
            return 0, b""
        # Discards among them: what is discarded stays as it is.
        return (errno.EOPNOTSUPP if operation == _FALLOCATE else errno.ENOSYS), b""


def serve(descriptor: int, control: Connection, size: int) -> None:
    """Until the file is unmounted, or nobody is left to tell what to do."""
    image = Image(size)
    server = Server(descriptor, image)
    while True:
        ready, _, _ = select.select([descriptor, control], [], [])
        if descriptor in ready and not server.answer_all():
            return
        if control in ready:
            try:
                name, *arguments = control.recv()
            except EOFError:
                return
            control.send(getattr(image, name)(*arguments))


if __name__ == "__main__":
    # What it sends is of that module, and not of this one, which is called __main__.
    from tests.filesystems import block_file

    block_file.serve(int(sys.argv[1]), Connection(int(sys.argv[2])), int(sys.argv[3]))
