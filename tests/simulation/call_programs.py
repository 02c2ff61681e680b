"""Random programs of system calls, played on the real system and on the simulated one."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from random import Random
from typing import Any


class Player:
    """Play a program of calls, and note what came of each."""

    def __init__(self, os: Any, fcntl: Any, open: Any, root: str) -> None:
        self.os, self.fcntl, self.open, self.root = os, fcntl, open, root
        self.opened: list[int] = []

    def at(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.root}/{path}"

    def play(self, program: list[tuple]) -> list[Any]:
        found = []
        for name, *args in program:
            try:
                found.append((name, args, getattr(self, name)(*args)))
            except OSError as error:
                names = [each and self.tell(each) for each in (error.filename, error.filename2)]
                found.append((name, args, type(error).__name__, errno.errorcode[error.errno], names))
            except (IndexError, ValueError) as error:
                found.append((name, args, type(error).__name__))
        for descriptor in self.opened:
            self.os.close(descriptor)
        return found

    def tell(self, path: str) -> str:
        return path.replace(self.root, "ROOT")

    # What a program has.

    def open_(self, path: str, flags: int) -> bool:
        self.opened.append(self.os.open(self.at(path), flags, 0o640))
        return True

    def open_in(self, number: int, path: str, flags: int) -> bool:
        self.opened.append(self.os.open(path, flags, 0o640, dir_fd=self.opened[number]))
        return True

    def close(self, number: int) -> None:
        self.os.close(self.opened.pop(number))

    def dup(self, number: int) -> None:
        self.opened.append(self.os.dup(self.opened[number]))

    def on(self, name: str, number: int, *args: Any) -> Any:
        if name == "lseek" and not stat.S_ISREG(self.os.fstat(self.opened[number]).st_mode):
            raise ValueError("each file system has places of its own in a directory")
        found = getattr(self.os, name)(self.opened[number], *args)
        return found if name != "fstat" else self.shown(found)

    def into(self, number: int, sizes: list[int], offset: int) -> Any:
        buffers = [bytearray(size) for size in sizes]
        return self.os.preadv(self.opened[number], buffers, offset), buffers

    def lock(self, number: int, operation: int) -> None:
        self.fcntl.flock(self.opened[number], operation | fcntl.LOCK_NB)

    def shown(self, found: os.stat_result) -> tuple:
        size = found.st_size if not stat.S_ISDIR(found.st_mode) else 0
        return found.st_mode, size, found.st_nlink

    def look(self, name: str, path: str) -> Any:
        found = getattr(self.os, name)(self.at(path))
        return self.shown(found) if name in ("stat", "lstat") else found

    def change(self, name: str, path: str, *args: Any) -> Any:
        if name in ("rename", "replace", "link"):
            args = (self.at(args[0]),)
        getattr(self.os, name)(self.at(path), *args)

    def symlink(self, target: str, path: str) -> None:
        self.os.symlink(self.at(target) if target.startswith("d") else target, self.at(path))

    def readlink(self, path: str) -> str:
        return self.tell(self.os.readlink(self.at(path)))

    def ask(self, name: str, path: str) -> Any:
        found = getattr(self.os.path, name)(self.at(path))
        return self.tell(found) if isinstance(found, str) else found

    def list(self, path: str) -> list[str]:
        return sorted(self.os.listdir(self.at(path)))

    def scan(self, path: str) -> list[tuple]:
        with self.os.scandir(self.at(path)) as entries:
            return [
                (
                    each.name,
                    self.tell(each.path),
                    each.is_dir(),
                    each.is_file(),
                    each.is_symlink(),
                    each.is_dir(follow_symlinks=False),
                )
                for each in sorted(entries, key=lambda each: each.name)
            ]

    def stream(self, path: str, mode: str, data: str) -> Any:
        binary = "b" in mode
        with self.open(self.at(path), mode, **({} if binary else {"encoding": "utf-8"})) as stream:
            found = []
            if set(mode) & set("wax+"):
                found.append(stream.write(data.encode() if binary else data))
            if set(mode) & set("r+"):
                stream.seek(1)
                found.append(stream.read())
            return found, stream.tell()

    def tree(self, path: str = "") -> dict:
        found = {}
        for name in sorted(self.os.listdir(self.at(path))):
            inner = f"{path}/{name}".lstrip("/")
            status = self.os.lstat(self.at(inner))
            found[inner] = self.shown(status)
            if stat.S_ISDIR(status.st_mode):
                found.update(self.tree(inner))
            elif stat.S_ISREG(status.st_mode):
                with self.open(self.at(inner), "rb") as stream:
                    found[inner] += (stream.read(),)
        return found


NAMES = (
    "a",
    "b",
    "d",
    "d/a",
    "d/e",
    "d/e/f",
    "link",
    "d/link",
    "a/",
    "d/",
    "d/.",
    "d/..",
    "d/e/../a",
    ".",
    "n" * 256,
    "d/e/",
)
FLAGS = (
    os.O_RDONLY,
    os.O_RDONLY | os.O_DIRECTORY,
    os.O_RDONLY | os.O_NOFOLLOW,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT,
    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    os.O_RDWR | os.O_APPEND,
    os.O_WRONLY,
    os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
)


def program_of(random: Random, length: int) -> list[tuple]:
    def name() -> str:
        return random.choice(NAMES[:6] if random.random() < 0.7 else NAMES)

    def plain() -> str:
        return random.choice(NAMES[:8])

    def short() -> str:
        return name().replace("n" * 256, "new")

    def number() -> int:
        return random.randrange(-3, 3)

    def data() -> bytes:
        return random.randbytes(random.choice((0, 1, 5, 5000, 20000)))

    makers: tuple[Callable[[], tuple], ...] = (
        lambda: ("open_", name(), random.choice(FLAGS)),
        lambda: ("open_", plain(), random.choice(FLAGS)),
        lambda: ("open_", plain(), os.O_RDONLY | os.O_DIRECTORY),
        lambda: ("open_in", number(), random.choice(("a", "e", "e/f", "")), random.choice(FLAGS)),
        lambda: ("close", number()),
        lambda: ("dup", number()),
        lambda: ("on", "write", number(), data()),
        lambda: ("on", "pwrite", number(), data(), random.randrange(-1, 9000)),
        lambda: ("on", "writev", number(), [data(), data()]),
        lambda: ("on", "read", number(), random.randrange(9000)),
        lambda: ("on", "pread", number(), random.randrange(9000), random.randrange(-1, 9000)),
        lambda: ("into", number(), [1, 0, 3000, 5], random.randrange(-1, 9000)),
        lambda: ("on", "lseek", number(), random.randrange(-5, 5000), random.randrange(3)),
        lambda: ("on", "ftruncate", number(), random.randrange(-1, 12000)),
        lambda: ("on", "fsync", number()),
        lambda: ("on", "fstat", number()),
        lambda: ("lock", number(), random.choice((fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN))),
        lambda: ("look", random.choice(("stat", "lstat")), name()),
        lambda: ("change", "mkdir", name()),
        lambda: ("change", "mkdir", plain()),
        lambda: ("change", "makedirs", plain(), 0o755, random.random() < 0.5),
        lambda: ("change", random.choice(("unlink", "remove", "rmdir")), name()),
        lambda: ("change", random.choice(("rename", "replace")), short(), short()),
        lambda: ("change", random.choice(("rename", "link")), plain(), plain()),
        lambda: ("change", "truncate", plain(), random.randrange(-1, 9000)),
        lambda: (
            "symlink",
            random.choice(("a", "d", "d/e", "d/a", "nowhere", "link", "../a")),
            random.choice(("link", "d/link")),
        ),
        lambda: ("readlink", plain()),
        lambda: (
            "ask",
            random.choice(("exists", "lexists", "isdir", "isfile", "islink", "realpath", "abspath")),
            name(),
        ),
        lambda: ("list", name()),
        lambda: ("scan", plain()),
        lambda: ("stream", plain(), random.choice(("r", "rb", "w", "wb", "x", "ab", "a", "r+", "w+b")), "text" * 3),
    )
    return [random.choice(makers)() for _ in range(length)]
