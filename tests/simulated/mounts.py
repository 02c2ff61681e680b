"""What the paths of a simulated node lead to: its file systems, symbolic links, and where a new name would be.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import errno
import functools
import os
import posixpath

from tests.simulated.files import FileSystem, failure
from tests.simulated.inodes import Directory, Inode, Link

_PATH_BYTES = 4096
_MOST_LINKS = 40


class Place:
    """Describe where a path leads.

    Attributes:
        file_system: The one that has it.
        directory: The directory that has the last name, or would have it.
        name: The last name; empty where the path ends with none: ``/``, ``.`` or ``..``.
        inode: What is there; None if nothing is.
        with_slash: Whether the path ends with a slash, so that it can only be a directory's.
    """

    __slots__ = ("directory", "file_system", "inode", "name", "with_slash")

    def __init__(
        self, file_system: FileSystem, directory: Directory, name: str, inode: Inode | None, with_slash: bool = False
    ) -> None:
        self.file_system, self.directory, self.name, self.inode = file_system, directory, name, inode
        self.with_slash = with_slash

    def found(self) -> Inode:
        """Return what is there; raise OSError if nothing is, or a file where a slash demands a directory."""
        if self.inode is None:
            raise failure(errno.ENOENT)
        if self.with_slash and not isinstance(self.inode, Directory):
            raise failure(errno.ENOTDIR)
        return self.inode


@functools.lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[tuple[str, ...], bool, bool]:
    """Return the names of a path, the last one first, and whether it ends with a slash, and with a dot."""
    # What has a slash behind it is a directory's name; what has a dot behind that too, the directory itself.
    parts = tuple(part for part in reversed(path.split("/")) if part not in ("", "."))
    return parts, path[-1:] == "/", path.rstrip("/").rsplit("/", 1)[-1] == "."


class Mounts:
    """Hold the file systems of one node."""

    def __init__(self, root: FileSystem) -> None:
        self.root = root
        # By the directory on which it is mounted; and back, by its root.
        self._on: dict[Inode, FileSystem] = {}
        self._under: dict[Directory, tuple[FileSystem, Directory]] = {}
        self._paths: list[tuple[str, FileSystem]] = [("/", root)]

    def mount(self, path: str, file_system: FileSystem) -> None:
        """Have a path lead to a file system; directories are made for it."""
        directory: Inode = self.root.root
        here = self.root
        for name in path.strip("/").split("/"):
            below = here.lookup(directory, name) or here.make_directory(directory, name)
            here.sync(directory)
            on = self._on.get(below)
            here, directory = (here, below) if on is None else (on, on.root)
        assert isinstance(directory, Directory), path
        self._on[directory] = file_system
        self._under[file_system.root] = here, directory
        self._paths.insert(0, (path.rstrip("/") + "/", file_system))
        self._paths.sort(key=lambda each: -len(each[0]))

    @property
    def file_systems(self) -> list[FileSystem]:
        """Return all of them."""
        return [file_system for _, file_system in self._paths]

    def file_system_at(self, path: str) -> FileSystem:
        """Return the file system that a path leads to, as its text says."""
        path += "/"
        return next((each for prefix, each in self._paths if path.startswith(prefix)), self.root)

    def is_mounted_on(self, inode: Inode) -> bool:
        """Tell whether it is the root of a file system, which can neither be removed nor renamed."""
        return inode in self._under or inode is self.root.root

    def walk(self, path: str, base: tuple[FileSystem, Directory] | None = None, follow: bool | None = True) -> Place:
        """Follow a path, from ``base`` if it is relative; of a link at its end ``follow`` says whether to go on.

        Where it does not, a slash behind the link has it go on all the same, unless ``follow`` is None.

        Raises:
            OSError: There is no such directory, or the file system is out of reach.
        """
        if not path:
            raise failure(errno.ENOENT)
        if len(path) >= _PATH_BYTES // 4 and len(os.fsencode(path)) >= _PATH_BYTES:
            raise failure(errno.ENAMETOOLONG)
        system, here = (self.root, self.root.root) if base is None or path[0] == "/" else base
        parts, with_slash, with_dot = _parts(path)
        waiting, links = list(parts), 0
        directory: Inode = here
        # Where the last name is that was followed, what it is, and what it leads to.
        last: tuple[FileSystem, Directory, str, Inode] = system, here, "", here
        while waiting:
            part = waiting.pop()
            if part == "..":
                system.check()
                if not isinstance(directory, Directory):
                    raise failure(errno.ENOTDIR)
                system, directory = self._above(system, directory)
                last = system, directory, "", directory
                continue
            inode = system.lookup(directory, part)
            assert isinstance(directory, Directory)
            if isinstance(inode, Link) and (waiting or follow or with_dot or (with_slash and follow is not None)):
                links += 1
                if links > _MOST_LINKS:
                    raise failure(errno.ELOOP)
                if inode.target[:1] == "/":
                    system, directory = self.root, self.root.root
                    last = system, self.root.root, "", self.root.root
                waiting += _parts(inode.target)[0]
                continue
            if inode is None:
                if waiting or with_dot:
                    raise failure(errno.ENOENT)
                return Place(system, directory, part, None, with_slash)
            last = system, directory, part, inode
            on = self._on.get(inode)
            if on is not None:
                system, inode = on, on.root
                last = system, on.root, "", on.root
            directory = inode
        if not with_dot:
            return Place(*last, with_slash)
        system.check()
        if not isinstance(directory, Directory):
            raise failure(errno.ENOTDIR)
        return Place(system, directory, "", directory)

    def _above(self, system: FileSystem, directory: Directory) -> tuple[FileSystem, Directory]:
        if directory in self._under:
            system, directory = self._under[directory]
        for above, _ in directory.names:
            return system, above
        return system, directory

    def real_path(self, path: str) -> str:
        """Imitate ``os.path.realpath`` for an absolute path: what is not there stays as it is."""
        done, waiting = "/", list(_parts(path)[0])
        # Links on the way, each with how many parts were left when its target was taken up.
        links: dict[str, int] = {}
        while waiting:
            part = waiting.pop()
            links = {link: left for link, left in links.items() if left <= len(waiting)}
            if part == "..":
                done = posixpath.dirname(done)
                continue
            joined = posixpath.join(done, part)
            try:
                inode = self.walk(joined, follow=False).inode
            except OSError:
                inode = None
            if not isinstance(inode, Link):
                done = joined
            elif joined in links:
                return posixpath.normpath(posixpath.join(joined, *reversed(waiting)))
            else:
                links[joined] = len(waiting)
                if inode.target[:1] == "/":
                    done = "/"
                waiting += _parts(inode.target)[0]
        return done
