"""A simulated file system: inodes and names in memory, which of them are durable, and what a loss of power leaves.

It knows neither clocks nor processes: :mod:`system` makes the calls, and says when they happen and which of them fail.
The model of what is durable is that of tests/crash/power_loss.py. A file system that several nodes share has its names
on a server, at once; what a node has written and not synced goes with that node.

Tested in tests/simulation/test_files.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import xxhash

from tests.simulated.contents import Content
from tests.simulated.inodes import Directory, File, Inode, Link, Names

_NAME_BYTES = 255
# Told of a change that was made: what it was, the path, the inode.
Watcher = Callable[[str, str, Inode], object]


def failure(number: int) -> OSError:
    """Return an error of the operating system, without a file's name."""
    return OSError(number, os.strerror(number))


class FileSystem:
    """Stand for a file system.

    Attributes:
        name: For messages.
        is_shared: Whether several nodes have it: names are durable at once, and a node loses its own writes alone.
        device: As ``st_dev``.
        capacity: Bytes of space; None for no end of it.
        used: Bytes that are taken.
        full_errno: The error when there is no space: ENOSPC, or EDQUOT for a quota.
        read_only: Whether changes are refused.
        gone: The error of every call while the file system is out of reach; None while it is there.
        locks: What ``flock`` is: "flock", "nfs" (exclusive ones need a descriptor that can write) or "none".
        reuses_numbers: Whether a new inode may have the number of one that is gone, as on ext4.
        keeps_open: Whether a file that another node has removed can be used by who has it open; over NFS it cannot.
        clock: Returns the time for ``st_mtime_ns``.
        watchers: Told of every change.
    """

    def __init__(
        self,
        name: str = "disk",
        seed: int = 0,
        device: int = 1,
        is_shared: bool = False,
        capacity: int | None = None,
        locks: str = "flock",
        is_tracked: bool = True,
    ) -> None:
        """Args: seed: decides in which order names are listed. is_tracked: whether power may be lost."""
        self.name, self.device, self.is_shared, self.capacity, self.locks = name, device, is_shared, capacity, locks
        self.used, self.full_errno, self.read_only = 0, errno.ENOSPC, False
        self.gone: int | None = None
        self.reuses_numbers, self.keeps_open = False, True
        self._spare_numbers: list[int] = []
        self.clock: Callable[[], int] = lambda: 0
        self.watchers: list[Watcher] = []
        self._seed, self._is_tracked, self._last = seed, is_tracked, 1
        self.root = Directory(self._last, 0o755, 0)
        self.root.names[self.root, ""] = None

    def __repr__(self) -> str:
        return f"<file system {self.name}>"

    def on_change(self, watcher: Watcher) -> None:
        """Have a function called after each change: what, path, inode.

        It is one of create, mkdir, link, symlink, unlink, rmdir, leave (a rename took this name), rename (a rename gave
        this name), write, truncate, sync, chmod, and lose for all that a loss of power has changed.
        """
        self.watchers.append(watcher)

    def _tell(self, what: str, directory: Directory, name: str, inode: Inode) -> None:
        if self.watchers:
            above = self.path_of(directory)
            self._tell_path(what, f"{'' if above == '/' else above}/{name}", inode)

    def _tell_path(self, what: str, path: str, inode: Inode) -> None:
        for watcher in self.watchers:
            watcher(what, path, inode)

    def path_of(self, inode: Inode) -> str:
        """Return a path of an inode from the file system's root; of one without a name its number."""
        parts: list[str] = []
        while inode is not self.root:
            place = next(iter(inode.names), None)
            if place is None:
                parts.append(f"(inode {inode.number}, without a name)")
                break
            inode, name = place
            parts.append(name)
        return "/" + "/".join(reversed(parts))

    # What every call asks first.

    def check(self, changes: bool = False) -> None:
        """Raise OSError if the file system is out of reach, or must not be changed."""
        if self.gone is not None:
            raise failure(self.gone)
        if changes and self.read_only:
            raise failure(errno.EROFS)

    def check_open(self, inode: Inode, node: Any) -> None:
        """Raise OSError if an open file is gone for a node."""
        if not self.keeps_open and inode.remover not in (None, node):
            raise failure(errno.ESTALE)

    def _next_number(self) -> int:
        if self.reuses_numbers and self._spare_numbers:
            return self._spare_numbers.pop()
        self._last += 1
        return self._last

    # Names.

    def lookup(self, directory: Inode, name: str) -> Inode | None:
        """Return what a directory has under a name."""
        if self.gone is not None:
            raise failure(self.gone)
        if not isinstance(directory, Directory):
            raise failure(errno.ENOTDIR)
        if len(name) > 63 and len(os.fsencode(name)) > _NAME_BYTES:
            raise failure(errno.ENAMETOOLONG)
        return directory.entries.get(name)

    def names_of(self, directory: Inode) -> list[str]:
        """Return the names of a directory, in an order of the file system's own."""
        self.check()
        if not isinstance(directory, Directory):
            raise failure(errno.ENOTDIR)
        seed = self._seed
        return sorted(directory.entries, key=lambda name: xxhash.xxh3_64_intdigest(os.fsencode(name), seed))

    def _place_for(self, directory: Inode, name: str) -> Directory:
        """Return the directory if a new name can be made in it; else raise OSError."""
        if self.lookup(directory, name) is not None:
            raise failure(errno.EEXIST)
        assert isinstance(directory, Directory)
        if not directory.names:
            raise failure(errno.ENOENT)  # it was removed while it was open
        self.check(changes=True)
        return directory

    def _change(self, directory: Directory, after: Names) -> None:
        """Make names, or take them, all at once."""
        entries = directory.entries
        if self._is_tracked and not self.is_shared:
            directory.changes.append(({name: entries.get(name) for name in after}, after))
        for name, inode in after.items():
            there = entries.pop(name, None)
            if there is not None:
                there.names.pop((directory, name), None)
                self._free(there)
            if inode is not None:
                entries[name] = inode
                inode.names[directory, name] = None
        directory.mtime_ns = self.clock()

    def _free(self, inode: Inode) -> None:
        """Give space back, if nobody can reach the inode any more."""
        if not inode.names and not inode.opened:
            self._spare_numbers.append(inode.number)
            if isinstance(inode, File):
                self.used -= inode.content.used

    def create(self, directory: Inode, name: str, mode: int = 0o644) -> File:
        """Make an empty file."""
        place = self._place_for(directory, name)
        file = self.create_nameless(mode)
        self._change(place, {name: file})
        self._tell("create", place, name, file)
        return file

    def create_nameless(self, mode: int = 0o600) -> File:
        """Make an empty file that has no name, as a memfd."""
        return File(self._next_number(), mode, self.clock(), Content(is_tracked=self._is_tracked))

    def make_directory(self, directory: Inode, name: str, mode: int = 0o755) -> Directory:
        """Make an empty directory."""
        place = self._place_for(directory, name)
        if self.room <= 0:
            raise failure(self.full_errno)
        made = Directory(self._next_number(), mode, self.clock())
        self._change(place, {name: made})
        self._tell("mkdir", place, name, made)
        return made

    def link(self, inode: Inode, directory: Inode, name: str) -> None:
        """Give an inode one more name."""
        place = self._place_for(directory, name)
        if isinstance(inode, Directory):
            raise failure(errno.EPERM)
        if not inode.names:
            raise failure(errno.ENOENT)
        self._change(place, {name: inode})
        self._tell("link", place, name, inode)

    def symlink(self, target: str, directory: Inode, name: str) -> Link:
        """Make a symbolic link."""
        place = self._place_for(directory, name)
        made = Link(self._next_number(), self.clock(), target)
        self._change(place, {name: made})
        self._tell("symlink", place, name, made)
        return made

    def _there(self, directory: Inode, name: str) -> tuple[Directory, Inode]:
        found = self.lookup(directory, name)
        if found is None:
            raise failure(errno.ENOENT)
        assert isinstance(directory, Directory)
        self.check(changes=True)
        return directory, found

    def unlink(self, directory: Inode, name: str, node: Any = None) -> None:
        """Take a file's name; of which node, is known where that matters."""
        place, found = self._there(directory, name)
        if isinstance(found, Directory):
            raise failure(errno.EISDIR)
        self._change(place, {name: None})
        found.remover = None if found.names else node
        self._tell("unlink", place, name, found)

    def remove_directory(self, directory: Inode, name: str) -> None:
        """Remove an empty directory."""
        place, found = self._there(directory, name)
        if not isinstance(found, Directory):
            raise failure(errno.ENOTDIR)
        if found.entries:
            raise failure(errno.ENOTEMPTY)
        self._change(place, {name: None})
        self._tell("rmdir", place, name, found)

    def rename(self, directory: Inode, name: str, other: Inode, new: str, node: Any = None) -> None:
        """Give an inode another name, whatever has that now; of which node, is known where that matters."""
        place, inode = self._there(directory, name)
        there = self.lookup(other, new)
        assert isinstance(other, Directory)
        if isinstance(inode, Directory) and (inode is other or any(inode is each for each in self._above(other))):
            raise failure(errno.EINVAL)
        if there is inode:
            return
        if there is not None:
            if there is place or any(there is each for each in self._above(place)):
                raise failure(errno.ENOTEMPTY)
            if isinstance(inode, Directory) and not isinstance(there, Directory):
                raise failure(errno.ENOTDIR)
            if isinstance(there, Directory):
                if not isinstance(inode, Directory):
                    raise failure(errno.EISDIR)
                if there.entries:
                    raise failure(errno.ENOTEMPTY)
        if not other.names:
            raise failure(errno.ENOENT)
        if place is other:
            self._change(place, {new: inode, name: None})
        else:
            self._change(other, {new: inode})
            self._change(place, {name: None})
            if isinstance(inode, Directory):
                # Durable at once, so that no loss of power leaves a directory in two places, or in none.
                place.changes.clear()
                other.changes.clear()
        if there is not None and not there.names:
            there.remover = node
        self._tell("leave", place, name, inode)
        self._tell("rename", other, new, inode)

    @staticmethod
    def _above(directory: Directory) -> Iterator[Directory]:
        while directory.names:
            above = next(iter(directory.names))[0]
            if above is directory:
                return
            yield (directory := above)

    # Bytes.

    def read(self, file: File, offset: int, count: int) -> bytes:
        """Return the bytes from a place; fewer where the file ends."""
        self.check()
        return file.content.read(offset, count)

    def read_into(self, file: File, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from a place; how many bytes there were."""
        self.check()
        return file.content.read_into(offset, buffer)

    @property
    def room(self) -> int:
        """Return how many more bytes it takes."""
        return (1 << 62) if self.capacity is None else self.capacity - self.used

    def write(self, file: File, offset: int, data: Any, writer: Any = None) -> int:
        """Put bytes at a place; return how many of them had room."""
        self.check(changes=True)
        if not len(data):
            return 0
        content = file.content
        if self.capacity is not None:
            missing = content.growth(offset + len(data)) - self.room
            if missing >= len(data):
                raise failure(self.full_errno)
            if missing > 0:
                data = data[: len(data) - missing]
        before = content.used
        content.write(offset, data, writer)
        self.used += content.used - before
        file.mtime_ns = self.clock()
        if self.watchers:
            self._tell_path("write", self.path_of(file), file)
        return len(data)

    def truncate(self, file: File, length: int, writer: Any = None) -> None:
        """Set another length."""
        self.check(changes=True)
        before = file.content.used
        file.content.truncate(length, writer)
        self.used += file.content.used - before
        file.mtime_ns = self.clock()
        if self.watchers:
            self._tell_path("truncate", self.path_of(file), file)

    def sync(self, inode: Inode, writer: Any = None) -> None:
        """Make the bytes of a file, or the names in a directory, durable."""
        self.check()
        if isinstance(inode, File):
            inode.content.sync(writer if self.is_shared else None)
        elif isinstance(inode, Directory):
            inode.changes.clear()
        if self.watchers:
            self._tell_path("sync", self.path_of(inode), inode)

    def fail_to_sync(self, inode: Inode, random: Random, writer: Any = None) -> None:
        """Leave what an fsync that fails leaves: no later one makes durable what this one should have."""
        if isinstance(inode, File):
            inode.content.fail_to_sync(random, writer if self.is_shared else None)
            self._tell_path("lose", self.path_of(inode), inode)

    def stat(self, inode: Inode) -> os.stat_result:
        """Return what ``os.stat`` returns."""
        self.check()
        ns, mode = inode.mtime_ns, inode.mode
        seconds = ns // 10**9
        fields = (mode, inode.number, self.device, inode.links, 0, 0, inode.size, seconds, seconds, seconds)
        return os.stat_result(fields, {"st_mtime_ns": ns, "st_mtime": ns / 1e9, "st_ctime_ns": ns, "st_atime_ns": ns})

    # Who has it open, and who has locked it.

    def open(self, inode: Inode) -> None:
        """Keep an inode while it is open, with or without a name."""
        inode.opened += 1

    def close(self, inode: Inode) -> None:
        """End an :meth:`open`."""
        inode.opened -= 1
        self._free(inode)

    def lock(self, inode: Inode, owner: Any, exclusive: bool) -> bool:
        """Take a ``flock`` lock, if nobody is in the way; what the owner had before goes first, as on Linux."""
        self.check()
        self.unlock(inode, owner)
        if any(exclusive or other for other in inode.locks.values()):
            return False
        inode.locks[owner] = exclusive
        return True

    @staticmethod
    def unlock(inode: Inode, owner: Any) -> None:
        """Give a lock back, if the owner has one."""
        if inode.locks.pop(owner, None) is not None:
            waiters, inode.waiters = inode.waiters, []
            for waiter in waiters:
                waiter()

    # What a crash leaves.

    def _reachable(self) -> Iterator[Inode]:
        """Yield all inodes that have a name, had one, or will."""
        seen: dict[Inode, None] = {self.root: None}
        waiting = [self.root]
        while waiting:
            directory = waiting.pop()
            found = [*directory.entries.values()]
            for change in directory.changes:
                found += [inode for names in change for inode in names.values() if inode is not None]
            for inode in found:
                if inode not in seen and isinstance(inode, Directory):
                    waiting.append(inode)
                seen[inode] = None
        return iter(seen)

    def lose_power(self, random: Random) -> None:
        """Keep of all changes what is durable, and of the others what the model allows."""
        reachable = sorted(self._reachable(), key=lambda inode: inode.number)
        for inode in reachable:
            inode.names.clear()
            inode.locks.clear()
            if isinstance(inode, Directory):
                inode.entries, inode.changes = inode.lose(random), []
            elif isinstance(inode, File):
                inode.content.lose(random)
        self.root.names[self.root, ""] = None
        # What no path leads to from the root is lost.
        seen: set[Inode] = {self.root}
        self.used, waiting, numbers = 0, [self.root], {self.root.number}
        while waiting:
            directory = waiting.pop()
            for name, inode in directory.entries.items():
                inode.names[directory, name] = None
                if inode in seen:
                    continue
                seen.add(inode)
                if inode.number in numbers:
                    inode.number = self._last = self._last + 1  # it is back, and a later one has its number
                numbers.add(inode.number)
                if isinstance(inode, Directory):
                    waiting.append(inode)
                elif isinstance(inode, File):
                    self.used += inode.content.used
        self._spare_numbers.clear()
        self._tell_path("lose", "/", self.root)

    def lose_all(self) -> None:
        """Be empty, as another disk is that takes the place of this one."""
        for inode in self._reachable():
            inode.names.clear()
        self.root.entries, self.root.changes, self.used = {}, [], 0
        self.root.names[self.root, ""] = None

    def lose_client(self, writer: Any, random: Random) -> None:
        """Keep of the bytes that one node wrote and did not sync what the model allows; nothing else is lost."""
        for inode in sorted(self._reachable(), key=lambda inode: inode.number):
            if isinstance(inode, File) and inode.content.is_dirty:
                before = inode.content.used
                inode.content.lose(random, writer)
                self.used += inode.content.used - before
                self._tell_path("lose", self.path_of(inode), inode)
