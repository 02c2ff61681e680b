"""Simulated calls on open files: to open and close them, read, write, sync, map and lock them; and streams over them.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Sequence
from typing import Any

from tests.simulated.calls import SECONDS, UMASK, Calls, ShortWrite, text_of
from tests.simulated.files import FileSystem, failure
from tests.simulated.inodes import Directory, File, Link
from tests.simulated.open_files import Map, OpenFile, map_file

# A write of more may be cut off where its process dies.
_WHOLE_BYTES = 4096


class FileCalls(Calls):
    """Imitate calls on descriptors, and those that make them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._memory = FileSystem("memory", device=1, is_tracked=False)

    # Opening and closing.

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = text_of(path)
        return self.call("open", text, lambda: self._open(text, flags, mode, dir_fd), text)

    def _open(self, path: str, flags: int, mode: int, dir_fd: int | None) -> int:
        creates, writes = bool(flags & os.O_CREAT), flags & os.O_ACCMODE != os.O_RDONLY
        exclusive = creates and bool(flags & os.O_EXCL)
        place = self.walk(path, dir_fd, follow=not (flags & os.O_NOFOLLOW or exclusive))
        inode = place.inode
        if creates and place.with_slash:
            raise failure(errno.EISDIR)
        if exclusive and inode is not None:
            raise failure(errno.EEXIST)
        if creates and isinstance(inode, Directory):
            raise failure(errno.EISDIR)
        if inode is None and creates:
            inode = place.file_system.create(place.directory, place.name, mode & ~UMASK & 0o7777)
        inode = place.found() if inode is None else inode
        place.file_system.check()
        if isinstance(inode, Link):
            raise failure(errno.ENOTDIR if flags & os.O_DIRECTORY else errno.ELOOP)
        if not isinstance(inode, Directory) and (place.with_slash or flags & os.O_DIRECTORY):
            raise failure(errno.ENOTDIR)
        if isinstance(inode, Directory) and writes:
            raise failure(errno.EISDIR)
        if writes or flags & os.O_TRUNC:
            place.file_system.check(changes=True)
        opened = OpenFile(place.file_system, inode, flags, path, self.process.node)
        if flags & os.O_TRUNC and isinstance(inode, File):
            place.file_system.truncate(inode, 0, opened.node)
        return self.process.install(opened)

    def memfd_create(self, name: str, flags: int = 0) -> int:
        def make() -> int:
            inode = self._memory.create_nameless()
            return self.process.install(OpenFile(self._memory, inode, os.O_RDWR, f"memfd:{name}", self.process.node))

        return self.call("memfd_create", name, make)

    def close(self, descriptor: int) -> None:
        found = self.process.lookup(descriptor)
        where, process = getattr(found, "path", ""), self.process
        try:
            self.enter("close", where)
        finally:
            # Linux frees the descriptor whatever it answers.
            if process.alive:
                process.close(descriptor)

    def dup(self, descriptor: int) -> int:
        return self.call("dup", "", lambda: self.process.install(self.process.lookup(descriptor)))

    def open_stream(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        """Imitate ``open``."""
        plain = mode.replace("b", "").replace("t", "").replace("+", "")
        ways = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL, "a": os.O_CREAT | os.O_APPEND}
        if plain not in ways:
            raise ValueError(f"invalid mode: {mode!r}")
        access = os.O_RDWR if "+" in mode else os.O_RDONLY if plain == "r" else os.O_WRONLY
        descriptor = file if isinstance(file, int) else self.open(file, access | ways[plain], 0o666)
        try:
            if isinstance(self.opened(descriptor).inode, Directory):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        except OSError:
            self.close(descriptor)
            raise
        raw = RawFile(self, descriptor, file, plain)
        if plain == "a":
            raw.seek(0, os.SEEK_END)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        stream: Any
        if "+" in mode:
            stream = io.BufferedRandom(raw, size)
        else:
            stream = io.BufferedReader(raw, size) if plain == "r" else io.BufferedWriter(raw, size)
        return stream if "b" in mode else io.TextIOWrapper(stream, encoding or "utf-8", errors, newline)

    # Bytes.

    def preadv(self, descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        opened = self.opened(descriptor)
        return self.call("preadv", opened.path, lambda: self._read_into(opened, buffers, offset))

    @staticmethod
    def _read_into(opened: OpenFile, buffers: Sequence[Any], offset: int) -> int:
        file, count = opened.file(to_read=True), 0
        if offset < 0:
            raise failure(errno.EINVAL)
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            got = opened.file_system.read_into(file, offset + count, view)
            count += got
            if got < len(view):
                break
        return count

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        opened = self.opened(descriptor)

        def read() -> bytes:
            file = opened.file(to_read=True)
            if offset < 0:
                raise failure(errno.EINVAL)
            return opened.file_system.read(file, offset, count)

        return self.call("pread", opened.path, read)

    def read(self, descriptor: int, count: int) -> bytes:
        opened = self.opened(descriptor)

        def read() -> bytes:
            data = opened.file_system.read(opened.file(to_read=True), opened.offset, count)
            opened.offset += len(data)
            return data

        return self.call("read", opened.path, read)

    def readv(self, descriptor: int, buffers: Sequence[Any]) -> int:
        opened = self.opened(descriptor)

        def read() -> int:
            count = self._read_into(opened, buffers, opened.offset)
            opened.offset += count
            return count

        return self.call("readv", opened.path, read)

    def write(self, descriptor: int, data: Any) -> int:
        return self._write("write", descriptor, data, None)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        return self._write("pwrite", descriptor, data, offset)

    def writev(self, descriptor: int, buffers: Sequence[Any]) -> int:
        return self._write("writev", descriptor, b"".join(memoryview(each).cast("B") for each in buffers), None)

    def _write(self, kind: str, descriptor: int, data: Any, offset: int | None) -> int:
        opened, view = self.opened(descriptor), memoryview(data).cast("B")
        # The kernel looks at signals between pages: a process that is killed may have written a part.
        random, first = self.scheduler.random, len(view)
        if len(view) > _WHOLE_BYTES and random.random() < 0.25:
            first = random.randrange(_WHOLE_BYTES, len(view))

        def put(part: memoryview, more: int = 0) -> int:
            file = opened.file(to_write=True)
            if offset is not None and offset < 0:
                raise failure(errno.EINVAL)
            place = opened.offset if offset is None else offset + more
            if opened.flags & os.O_APPEND and len(part):
                place = file.size
            count = opened.file_system.write(file, place, part, opened.node)
            if offset is None:
                opened.offset = place + count
            return count

        try:
            count = self.call(kind, opened.path, lambda: put(view[:first]))
        except ShortWrite as short:
            return put(view[: min(short.count, len(view))])
        if count == first < len(view):
            self.scheduler.sleep(random.uniform(*SECONDS))
            with contextlib.suppress(OSError):  # told to the next write
                count += put(view[first:], first)
        return count

    def lseek(self, descriptor: int, offset: int, whence: int = os.SEEK_SET) -> int:
        opened = self.opened(descriptor)
        self.scheduler.check_alive()
        base = {os.SEEK_SET: 0, os.SEEK_CUR: opened.offset, os.SEEK_END: opened.inode.size}[whence]
        if base + offset < 0:
            raise failure(errno.EINVAL)
        opened.offset = base + offset
        return opened.offset

    def ftruncate(self, descriptor: int, length: int) -> None:
        opened = self.opened(descriptor)

        def cut() -> None:
            if length < 0 or not opened.writes or not isinstance(opened.inode, File):
                raise failure(errno.EINVAL)
            opened.file_system.truncate(opened.inode, length, opened.node)

        self.call("ftruncate", opened.path, cut)

    def truncate(self, path: Any, length: int) -> None:
        text = path if isinstance(path, int) else text_of(path)
        if isinstance(text, int):
            self.ftruncate(text, length)
            return

        def cut() -> None:
            if length < 0:
                raise failure(errno.EINVAL)
            place = self.walk(text)
            inode = place.found()
            if not isinstance(inode, File):
                raise failure(errno.EISDIR)
            place.file_system.truncate(inode, length, self.process.node)

        self.call("truncate", text, cut, text)

    def fsync(self, descriptor: int) -> None:
        opened = self.opened(descriptor)
        try:
            self.call("fsync", opened.path, lambda: opened.file_system.sync(opened.live(), opened.node))
        except OSError:
            opened.file_system.fail_to_sync(opened.inode, self.scheduler.random, opened.node)
            raise

    def map(self, descriptor: int, length: int, flags: int = 0, prot: int = 3, access: int = 0, offset: int = 0) -> Map:
        """Imitate ``mmap.mmap``."""
        opened = self.opened(descriptor)
        return self.call("mmap", opened.path, lambda: map_file(opened, length, prot, offset))

    def flock(self, descriptor: Any, operation: int) -> None:
        """Imitate ``fcntl.flock``."""
        opened = self.opened(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        self.call("flock", opened.path, lambda: self._flock(opened, operation))

    def _flock(self, opened: OpenFile, operation: int) -> None:
        files, inode, scheduler = opened.file_system, opened.inode, self.scheduler
        if operation & fcntl.LOCK_UN:
            files.unlock(inode, opened)
            return
        if files.locks == "none":
            raise failure(errno.ENOLCK)
        if files.locks == "nfs" and not (opened.writes if operation & fcntl.LOCK_EX else opened.reads):
            raise failure(errno.EBADF)
        while not files.lock(inode, opened, bool(operation & fcntl.LOCK_EX)):
            if operation & fcntl.LOCK_NB:
                raise failure(errno.EWOULDBLOCK)
            task = scheduler.current

            def wake(task: Any = task) -> None:
                scheduler.wake(task)

            inode.waiters.append(wake)
            try:
                scheduler.park()
            finally:
                if wake in inode.waiters:
                    inode.waiters.remove(wake)


class RawFile(io.RawIOBase):
    """Stand for a stream over a descriptor, under those of ``open``."""

    def __init__(self, calls: FileCalls, descriptor: int, name: Any, mode: str) -> None:
        self._calls, self._descriptor = calls, descriptor
        self._process = calls.scheduler.process
        self.name, self.mode = name, mode
        opened = calls.opened(descriptor)
        self._reads, self._writes = opened.reads, opened.writes

    def fileno(self) -> int:
        self._check()
        return self._descriptor

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def readable(self) -> bool:
        self._check()
        return self._reads

    def writable(self) -> bool:
        self._check()
        return self._writes

    def seekable(self) -> bool:
        self._check()
        return True

    def readinto(self, buffer: Any) -> int:
        self._check()
        if not self._reads:
            raise io.UnsupportedOperation("read")
        return self._calls.readv(self._descriptor, [buffer])

    def write(self, data: Any) -> int:
        self._check()
        if not self._writes:
            raise io.UnsupportedOperation("write")
        if not self._process.alive:
            return memoryview(data).nbytes  # collected with its process
        return self._calls.write(self._descriptor, data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check()
        return self._calls.lseek(self._descriptor, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        self._check()
        size = self.tell() if size is None else size
        self._calls.ftruncate(self._descriptor, size)
        return size

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        scheduler = self._calls.scheduler
        if scheduler.running is not None and scheduler.process is self._process:
            self._calls.close(self._descriptor)
        elif self._process.alive:
            self._process.close(self._descriptor)  # collected while another runs
