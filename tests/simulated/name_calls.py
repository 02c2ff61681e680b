"""Simulated calls on names: to look at files and directories, list, make, rename and remove them.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from tests.simulated.calls import UMASK, text_of
from tests.simulated.file_calls import FileCalls
from tests.simulated.files import failure
from tests.simulated.inodes import Directory, File, Inode, Link
from tests.simulated.mounts import Place

_FRAGMENT_BYTES = 4096


class Entry:
    """Describe a name as what ``os.scandir`` yields does."""

    def __init__(self, calls: NameCalls, name: str, path: str, inode: Inode) -> None:
        self.name, self.path = name, path
        self._calls, self._inode = calls, inode

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        if isinstance(self._inode, Link) and follow_symlinks:
            return stat.S_ISDIR(self._mode())
        return isinstance(self._inode, Directory)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        if isinstance(self._inode, Link) and follow_symlinks:
            return stat.S_ISREG(self._mode())
        return isinstance(self._inode, File)

    def _mode(self) -> int:
        try:
            return self._calls.stat(self.path).st_mode
        except FileNotFoundError:
            return 0

    def is_symlink(self) -> bool:
        return isinstance(self._inode, Link)

    def inode(self) -> int:
        return self._inode.number

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._calls.stat(self.path, follow_symlinks=follow_symlinks)


class Listing:
    """Iterate and close, as what ``os.scandir`` returns does."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class NameCalls(FileCalls):
    """Imitate calls on paths, and all others."""

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(path, int):
            return self.fstat(path)
        text = text_of(path)

        def look() -> os.stat_result:
            place = self.walk(text, dir_fd, follow_symlinks)
            return place.file_system.stat(place.found())

        return self.call("stat", text, look, text)

    def fstat(self, descriptor: int) -> os.stat_result:
        opened = self.opened(descriptor)
        return self.call("fstat", opened.path, lambda: opened.file_system.stat(opened.live()))

    def entries(self, kind: str, path: Any) -> list[Entry]:
        """Return what a directory has, for ``listdir`` and ``scandir``."""
        text = text_of(path)

        def look() -> list[Entry]:
            place = self.walk(text)
            directory = place.found()
            names = place.file_system.names_of(directory)
            assert isinstance(directory, Directory)
            above = os.path.join(text, "")
            return [Entry(self, name, above + name, directory.entries[name]) for name in names]

        return self.call(kind, text, look, text)

    def scan(self, path: Any = ".") -> Listing:
        """Imitate ``os.scandir``."""
        return Listing(self.entries("scandir", path))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        text = text_of(path)

        def make() -> None:
            place = self.walk(text, dir_fd, follow=None)
            if place.inode is not None:
                raise failure(errno.EEXIST)
            place.file_system.make_directory(place.directory, place.name, mode & ~UMASK & 0o7777)

        self.call("mkdir", text, make, text)

    def _named(self, place: Place, no_name: int) -> None:
        """Raise OSError if a name may not be taken."""
        place.found()
        if not place.name:
            raise failure(errno.EBUSY if self._mounts[self.process.node].is_mounted_on(place.directory) else no_name)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        text = text_of(path)

        def take() -> None:
            place = self.walk(text, dir_fd, follow=None)
            self._named(place, errno.EISDIR)
            place.file_system.unlink(place.directory, place.name, self.process.node)

        self.call("unlink", text, take, text)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        text = text_of(path)

        def take() -> None:
            place = self.walk(text, dir_fd, follow=None)
            self._named(place, errno.ENOTEMPTY if text.rstrip("/").endswith("..") else errno.EINVAL)
            place.file_system.remove_directory(place.directory, place.name)

        self.call("rmdir", text, take, text)

    def walk_tree(self, path: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        """Imitate ``os.walk``."""
        try:
            entries = self.entries("scandir", path)
        except OSError:
            return
        text, names = text_of(path), [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield text, names, [entry.name for entry in entries if entry.name not in names]
        for name in names:
            yield from self.walk_tree(os.path.join(text, name))

    def remove_tree(self, path: Any) -> None:
        """Imitate ``shutil.rmtree``."""
        for entry in self.entries("scandir", path):
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(entry.path)
            else:
                self.unlink(entry.path)
        self.rmdir(path)

    def disk_usage(self, path: Any) -> Any:
        """Imitate ``shutil.disk_usage``: how much room there is. It is asked for an error's text, and is no moment."""
        place = self.walk(text_of(path))
        place.found()
        return SimpleNamespace(free=place.file_system.room)

    def access(self, path: Any, mode: int) -> bool:
        """Imitate ``os.access`` of a process that may do what the file system does. It is no moment."""
        place = self.walk(text_of(path))
        return place.inode is not None and not (mode & os.W_OK and place.file_system.read_only)

    def statvfs(self, path: Any) -> os.statvfs_result:
        """Imitate ``os.statvfs``: how much room there is."""
        text = text_of(path)

        def look() -> os.statvfs_result:
            place = self.walk(text)
            place.found()
            free = place.file_system.room // _FRAGMENT_BYTES
            return os.statvfs_result((_FRAGMENT_BYTES, _FRAGMENT_BYTES, free, free, free, free, free, free, 0, 255))

        return self.call("statvfs", text, look, text)

    def rename(self, path: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        def move(source: Place, target: Place) -> None:
            if not source.name or not target.name:
                raise failure(errno.EBUSY)
            source.found()
            if target.with_slash and not isinstance(source.inode, Directory):
                raise failure(errno.ENOTDIR)
            node = self.process.node
            source.file_system.rename(source.directory, source.name, target.directory, target.name, node)

        self._on_two("rename", path, new, move, src_dir_fd, dst_dir_fd)

    def link(self, path: Any, new: Any) -> None:
        def make(source: Place, target: Place) -> None:
            if target.inode is not None:
                raise failure(errno.EEXIST)
            source.file_system.link(source.found(), target.directory, target.name)

        self._on_two("link", path, new, make)

    def _on_two(
        self,
        kind: str,
        path: Any,
        new: Any,
        action: Callable[[Place, Place], None],
        fd: int | None = None,
        other_fd: int | None = None,
    ) -> None:
        text, other = text_of(path), text_of(new)

        def act() -> None:
            source = self.walk(text, fd, follow=None)
            if kind == "link":
                source.found()
            try:
                target = self.walk(other, other_fd, follow=None)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    source.found()
                raise
            if source.file_system is not target.file_system:
                source.found()
                raise failure(errno.EXDEV)
            action(source, target)

        try:
            self.call(kind, f"{text} -> {other}", act)
        except OSError as error:
            error.filename, error.filename2 = text, other
            raise

    def symlink(self, target: Any, path: Any) -> None:
        text, to = text_of(path), text_of(target)

        def make() -> None:
            place = self.walk(text, follow=False)
            if place.inode is not None:
                raise failure(errno.EEXIST)
            place.file_system.symlink(to, place.directory, place.name)

        try:
            self.call("symlink", text, make)
        except OSError as error:
            error.filename, error.filename2 = to, text
            raise

    def readlink(self, path: Any) -> str:
        text = text_of(path)

        def look() -> str:
            inode = self.walk(text, follow=False).found()
            if not isinstance(inode, Link):
                raise failure(errno.EINVAL)
            return inode.target

        return self.call("readlink", text, look, text)
