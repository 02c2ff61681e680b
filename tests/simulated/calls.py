"""Simulated system calls: what each goes through, and the file systems of the nodes on which they work.

A call first asks whether its process lives, lets what strikes at such a call strike, and takes a while, in which other
tasks run; then it takes place at once.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

from tests.simulated.files import FileSystem, failure
from tests.simulated.inodes import Directory
from tests.simulated.mounts import Mounts, Place
from tests.simulated.open_files import OpenFile
from tests.simulated.scheduler import EPOCH, Node, Scheduler
from tests.simulated.tasks import Process
from tests.simulated.trees import fill

Result = TypeVar("Result")
UMASK = 0o022
SECONDS = 5e-6, 5e-5
_SLOW_SECONDS = 5e-4, 5e-3
_SLOW = frozenset(("fsync", "fdatasync"))
_MEMORY_BYTES = 64 << 30
_FIRST_DEVICE = 100


class ShortWrite(Exception):
    """Signal to a call that it writes so many bytes, and succeeds. What is asked at each call raises it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class LateError(OSError):
    """Signal to a call that it takes place, and fails all the same: an answer is lost.

    What is asked at each call raises it.
    """


class Calls:
    """Make calls on files: what all of them have in common.

    Attributes:
        on_call: Asked before each call, with its name (of the function of ``os``) and a path: by how many seconds it
            takes longer. It may raise the OSError with which the call fails, LateError, or ShortWrite.
    """

    def __init__(self, scheduler: Scheduler, on_call: Callable[[str, str], float] = lambda kind, where: 0.0) -> None:
        self.scheduler, self.on_call = scheduler, on_call
        self._mounts: dict[Node, Mounts] = {}
        self._mounted: list[FileSystem] = []

    # The nodes.

    def add(self, node: Node, seed: int | None = None) -> FileSystem:
        """Give a node its own disk, which it returns, and memory."""
        number = len(self._mounts)
        disk = FileSystem(f"{node.name}'s disk", self.scheduler.random.getrandbits(32) if seed is None else seed, 8)
        disk.clock = lambda: int(node.time() * 1e9)
        mounts = self._mounts[node] = Mounts(disk)
        proc = FileSystem(f"{node.name}'s /proc", device=2, is_tracked=False)
        boot_id = f"{number:08x}-0000-4000-8000-{self.scheduler.random.getrandbits(48):012x}\n"
        fill(proc, {"sys/kernel/random/boot_id": boot_id.encode(), "self/ns/mnt": b"", "meminfo": b""})
        mounts.mount("/proc", proc)
        mounts.mount("/tmp", FileSystem(f"{node.name}'s /tmp", seed=number, device=3, is_tracked=False))
        self.set_memory(node, _MEMORY_BYTES)
        return disk

    def mount(self, node: Node, path: str, file_system: FileSystem) -> None:
        """Have a path of a node lead to a file system; several nodes may have it, and it has a clock of its own."""
        if file_system not in self._mounted:
            self._mounted.append(file_system)
            file_system.device = _FIRST_DEVICE + len(self._mounted)
            file_system.clock = lambda: int((EPOCH + self.scheduler.now) * 1e9)
        self._mounts[node].mount(path, file_system)

    def mounts_of(self, node: Node) -> Mounts:
        """Return the file systems of a node."""
        return self._mounts[node]

    def set_memory(self, node: Node, available: int) -> None:
        """Say how much memory a node has left."""
        proc = self._mounts[node].file_system_at("/proc")
        text = f"MemTotal:       {2 * available >> 10} kB\nMemAvailable:   {available >> 10} kB\n"
        fill(proc, {"meminfo": text.encode()})

    # What every call goes through.

    @property
    def process(self) -> Process:
        """Return the process that makes a call."""
        return self.scheduler.process

    def enter(self, kind: str, where: str) -> None:
        """Begin a call: see whether the process lives, let what strikes here strike, let time pass."""
        scheduler = self.scheduler
        scheduler.check_alive()
        more = self.on_call(kind, where)
        low, high = _SLOW_SECONDS if kind in _SLOW else SECONDS
        scheduler.sleep(low + (high - low) * scheduler.random.random() + (more or 0.0))

    def call(self, kind: str, where: str, action: Callable[[], Result], path: str | None = None) -> Result:
        """Make a call; its errors have the path, if that is given."""
        try:
            late: OSError | None = None
            try:
                self.enter(kind, where)
            except LateError as error:
                late = OSError(error.errno, os.strerror(error.errno or 0))
            result = action()
            if late is not None:
                raise late
            return result
        except OSError as error:
            if error.filename is None and path is not None:
                error.filename = path
            raise

    def opened(self, descriptor: int) -> OpenFile:
        """Return what a descriptor of the process stands for."""
        found = self.process.lookup(descriptor)
        if not isinstance(found, OpenFile):
            raise failure(errno.EINVAL)
        return found

    def walk(self, path: str, dir_fd: int | None = None, follow: bool | None = True) -> Place:
        """Follow a path of the process."""
        base = None
        if dir_fd is not None and path:
            opened = self.opened(dir_fd)
            if not isinstance(opened.inode, Directory):
                raise failure(errno.ENOTDIR)
            base = opened.file_system, opened.inode
        return self._mounts[self.process.node].walk(path, base, follow)

    def real_path(self, path: str) -> str:
        """Imitate ``os.path.realpath`` for an absolute path."""
        return self.call("realpath", path, lambda: self._mounts[self.process.node].real_path(path))


def text_of(path: Any) -> str:
    """Return the text of a path."""
    text = os.fsdecode(path)
    if "\0" in text:
        raise ValueError("embedded null byte")
    return text
