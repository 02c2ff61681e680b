"""Simulated ``os.path`` and ``pathlib.Path``: what is text is the real module's, what looks at files is the system's.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import PurePosixPath
from typing import Any

from tests.simulated.name_calls import NameCalls
from tests.simulated.threads import Namespace

_TEXT = (
    "basename commonpath commonprefix dirname isabs join normcase normpath relpath split splitdrive splitext sep "
    "curdir pardir samestat expanduser"
)


def path_module(calls: NameCalls) -> Namespace:
    """Return ``os.path`` for the processes of a calls."""

    def status(path: Any, follow: bool = True) -> os.stat_result | None:
        try:
            return calls.stat(path, follow_symlinks=follow)
        except (OSError, ValueError):
            return None

    def mode(path: Any, follow: bool = True) -> int:
        found = status(path, follow)
        return 0 if found is None else found.st_mode

    def absolute(path: Any) -> str:
        return posixpath.normpath(posixpath.join("/", os.fspath(path)))

    return Namespace(
        __name__="os.path",
        **{name: getattr(posixpath, name) for name in _TEXT.split()},
        exists=lambda path: status(path) is not None,
        lexists=lambda path: status(path, follow=False) is not None,
        isfile=lambda path: stat.S_ISREG(mode(path)),
        isdir=lambda path: stat.S_ISDIR(mode(path)),
        islink=lambda path: stat.S_ISLNK(mode(path, follow=False)),
        getsize=lambda path: calls.stat(path).st_size,
        getmtime=lambda path: calls.stat(path).st_mtime,
        samefile=lambda path, other: posixpath.samestat(calls.stat(path), calls.stat(other)),
        abspath=absolute,
        realpath=lambda path: calls.real_path(posixpath.join("/", os.fspath(path))),
    )


def path_class(calls: NameCalls) -> type[PurePosixPath]:
    """Return ``pathlib.Path`` for the processes of a calls."""

    class Path(PurePosixPath):
        __slots__ = ()

        def read_bytes(self) -> bytes:
            with calls.open_stream(str(self), "rb") as stream:
                data: bytes = stream.read()
            return data

        def read_text(self, encoding: str | None = None) -> str:
            with calls.open_stream(str(self), encoding=encoding) as stream:
                text: str = stream.read()
            return text

        def write_text(self, text: str, encoding: str | None = None) -> int:
            with calls.open_stream(str(self), "w", encoding=encoding) as stream:
                count: int = stream.write(text)
            return count

        def exists(self) -> bool:
            return bool(path_module(calls).exists(str(self)))

    return Path
