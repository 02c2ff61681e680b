"""Open files of simulated processes: descriptions, and memory maps.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np

from tests.simulated.files import FileSystem, failure
from tests.simulated.inodes import File, Inode
from tests.simulated.scheduler import Node
from tests.simulated.tasks import Description


class OpenFile(Description):
    """Hold what ``os.open`` makes: an inode, how it was opened, and a place in it. It owns ``flock`` locks.

    Attributes:
        path: As it was opened by.
        node: Whose memory has what is written through it, until it is synced.
    """

    def __init__(self, file_system: FileSystem, inode: Inode, flags: int, path: str, node: Node) -> None:
        super().__init__()
        self.file_system, self.inode, self.flags, self.path, self.node = file_system, inode, flags, path, node
        self.offset = 0
        file_system.open(inode)

    @property
    def reads(self) -> bool:
        """Tell whether it was opened for reading."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writes(self) -> bool:
        """Tell whether it was opened for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    def dispose(self) -> None:
        self.file_system.unlock(self.inode, self)
        self.file_system.close(self.inode)

    def live(self) -> Inode:
        """Return what is open, unless it is gone for the node."""
        self.file_system.check_open(self.inode, self.node)
        return self.inode

    def file(self, to_read: bool = False, to_write: bool = False) -> File:
        """Return the file, if it was opened for that."""
        if (to_read and not self.reads) or (to_write and not self.writes):
            raise failure(errno.EBADF)
        inode = self.live()
        if not isinstance(inode, File):
            raise failure(errno.EISDIR)
        return inode

    def write(self, data: bytes) -> None:
        """Write behind what was written before: as another process does that has it for its stderr."""
        if isinstance(self.inode, File):
            self.offset += self.file_system.write(self.inode, self.offset, data, self.node)


class Map(np.ndarray):  # type: ignore[type-arg]
    """Imitate ``mmap.mmap``: an array of the file's own memory, with the methods of a map."""

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(self)[key]
        return int(found) if isinstance(key, int) else found.tobytes()

    def __setitem__(self, key: Any, value: Any) -> None:
        memory = np.asarray(self)
        memory[key] = value if isinstance(key, int) else np.frombuffer(value, dtype=np.uint8)

    def __bool__(self) -> bool:
        return True

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        """Take a hint, and do nothing."""

    def close(self) -> None:
        """Do nothing: the memory goes with its last user."""


def map_file(opened: OpenFile, length: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE, offset: int = 0) -> Map:
    """Map a file: all of it, if the length is 0.

    Raises:
        OSError: It was not opened for that.
        ValueError: It is empty, or shorter.
    """
    file = opened.file()
    if not opened.reads or (prot & mmap.PROT_WRITE and not opened.writes):
        raise failure(errno.EACCES)
    if prot & mmap.PROT_WRITE and file.names:
        raise NotImplementedError(f"{opened.path} is mapped to be written: what power loss leaves is not modelled")
    if offset % mmap.ALLOCATIONGRANULARITY:
        raise failure(errno.EINVAL)
    if not length:
        if not file.size:
            raise ValueError("cannot mmap an empty file")
        if offset >= file.size:
            raise ValueError("mmap offset is greater than file size")
        length = file.size - offset
    elif offset + length > file.size:
        raise ValueError("mmap length is greater than file size")
    before = file.content.used
    memory = np.frombuffer(file.content.map(), dtype=np.uint8, count=length, offset=offset)
    opened.file_system.used += file.content.used - before
    memory.flags.writeable = bool(prot & mmap.PROT_WRITE)
    return memory.view(Map)
