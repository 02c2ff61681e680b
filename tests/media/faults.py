"""A file system that fails, or loses power, at a chosen system call.

Power loss takes whatever was not made durable: bytes of files that were not fsynced, and directory entries (created,
renamed) of directories that were not. What was unlinked is gone: the least favourable of what a disk may do.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

_CALLS = ("open", "write", "fsync", "rename", "unlink")


class FaultyFiles:
    """Counts the calls to ``os.open/write/fsync/rename/unlink`` of all threads and makes some of them fail.

    Attributes:
        calls: ``(call, file name)`` of every call so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None = None, dead_after: bool = False) -> None:
        """Args: at: the number of the first call that fails. dead_after: whether all later ones fail as well."""
        self.calls: list[tuple[str, str]] = []
        self._at, self._dead_after = at, dead_after
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in _CALLS}
        self._path: dict[int, str] = {}
        self._unsynced: set[str] = set()
        # Undoes a directory entry that is not durable yet, by the directory.
        self._entries: list[tuple[str, Callable[[], None]]] = []
        for name in _CALLS:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))

    def _step(self, call: str, path: str) -> None:
        number = len(self.calls)
        self.calls.append((call, os.path.basename(path)))
        if self._at is not None and (number == self._at or (self._dead_after and number > self._at)):
            raise OSError(errno.EIO, f"injected at call {number} ({call})", path)

    def _open(self, path, flags, mode=0o777, **kwargs):
        with self._lock:
            self._step("open", path)
            path = os.path.abspath(path)
            is_new = bool(flags & os.O_CREAT) and not os.path.exists(path)
            descriptor = self._real["open"](path, flags, mode, **kwargs)
            self._path[descriptor] = path
            if flags & os.O_CREAT:
                self._unsynced.add(path)
            if is_new:
                self._entries.append((os.path.dirname(path), lambda: self._forget(path)))
            return descriptor

    def _forget(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._real["unlink"](path)

    def _write(self, descriptor, data):
        with self._lock:
            self._step("write", self._path[descriptor])
            self._unsynced.add(self._path[descriptor])
            return self._real["write"](descriptor, data)

    def _fsync(self, descriptor):
        with self._lock:
            path = self._path[descriptor]
            self._step("fsync", path)
            self._real["fsync"](descriptor)
            self._unsynced.discard(path)
            if os.path.isdir(path):
                self._entries = [entry for entry in self._entries if entry[0] != path]

    def _rename(self, source, target):
        with self._lock:
            self._step("rename", target)
            before = None
            with suppress(FileNotFoundError), open(target, "rb") as stream:
                before = stream.read()
            self._real["rename"](source, target)

            def undo() -> None:
                self._real["rename"](target, source)
                if before is not None:
                    with open(target, "wb") as stream:
                        stream.write(before)

            self._entries.append((os.path.dirname(os.path.abspath(target)), undo))

    def _unlink(self, path, **kwargs):
        with self._lock:
            self._step("unlink", path)
            self._real["unlink"](path, **kwargs)

    def lose_power(self) -> None:
        """Takes away what was not durable. Call it after the monkeypatch has been undone."""
        for path in self._unsynced:
            with suppress(FileNotFoundError):
                os.truncate(path, os.path.getsize(path) // 2)
        for _, undo in reversed(self._entries):
            undo()
