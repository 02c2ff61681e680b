"""Inodes of a simulated file system: files, symbolic links, and directories with what of their names is durable.

Tested in tests/simulation/test_files.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from random import Random
from typing import Any, Optional

from tests.simulated.contents import Content


class Inode:
    """Stand for a file, directory or symbolic link.

    Attributes:
        number: Of the file system's inodes.
        names: The directories that have it, and under which name.
        mode: Kind and permissions, as ``st_mode``.
        mtime_ns: When it was last changed.
        opened: How many open descriptions there are.
        remover: The node that has taken its last name, where that is known.
        locks: Owners of ``flock`` locks, and whether exclusive.
        waiters: Called when a lock is given back.
    """

    __slots__ = ("locks", "mode", "mtime_ns", "names", "number", "opened", "remover", "waiters")

    def __init__(self, number: int, mode: int, mtime_ns: int) -> None:
        self.number, self.mode, self.mtime_ns = number, mode, mtime_ns
        self.names: dict[tuple[Directory, str], None] = {}
        self.opened = 0
        self.remover: Any = None
        self.locks: dict[Any, bool] = {}
        self.waiters: list[Callable[[], object]] = []

    @property
    def size(self) -> int:
        """Return the size, as ``st_size``."""
        return 0

    @property
    def links(self) -> int:
        """Return the number of links, as ``st_nlink``."""
        return len(self.names)


class File(Inode):
    """Stand for a regular file."""

    __slots__ = ("content",)

    def __init__(self, number: int, mode: int, mtime_ns: int, content: Content) -> None:
        super().__init__(number, stat.S_IFREG | mode, mtime_ns)
        self.content = content

    @property
    def size(self) -> int:
        return self.content.size


class Link(Inode):
    """Stand for a symbolic link."""

    __slots__ = ("target",)

    def __init__(self, number: int, mtime_ns: int, target: str) -> None:
        super().__init__(number, stat.S_IFLNK | 0o777, mtime_ns)
        self.target = target

    @property
    def size(self) -> int:
        return len(os.fsencode(self.target))


# Names, and what they stand for: nothing, if None.
Names = dict[str, Optional[Inode]]


class Directory(Inode):
    """Stand for a directory: its names, and changes of them since they were made durable."""

    __slots__ = ("changes", "entries")

    def __init__(self, number: int, mode: int, mtime_ns: int) -> None:
        super().__init__(number, stat.S_IFDIR | mode, mtime_ns)
        self.entries: dict[str, Inode] = {}
        # Before and after; each takes place whole or not at all.
        self.changes: list[tuple[Names, Names]] = []

    @property
    def links(self) -> int:
        return 2 + sum(isinstance(each, Directory) for each in self.entries.values()) if self.names else 0

    def durable(self) -> dict[str, Inode]:
        """Return the names that are durable for certain."""
        names: Names = dict(self.entries)
        for before, _ in reversed(self.changes):
            names.update(before)
        return {name: inode for name, inode in names.items() if inode is not None}

    def lose(self, random: Random) -> dict[str, Inode]:
        """Return the names after a loss of power: any of the changes may be lost, whatever becomes of the others."""
        names: Names = dict(self.durable())
        share = random.choice((0.0, 0.5, 0.5, 1.0))
        for _, after in self.changes:
            if random.random() < share:
                names.update(after)
        return {name: inode for name, inode in names.items() if inode is not None}
