"""File names in a checkpoint: they, and the files behind them, stay inside its directory.

Tested in tests/attacks/test_files.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from paddle_flexckpt.catalog import CorruptCheckpointError

_MAX_NAME_BYTES = 255


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the file's name to errors of descriptors, which do not know it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def check_file_name(name: str) -> str:
    """Return a name, if it is a plain file name.

    Raises:
        ValueError: It is not one: a path, ``..``, absolute, empty, too long, or with control characters in it.
    """
    # Lone surrogates are not text and have no bytes.
    plain = name not in ("", ".", "..") and not any(c in "/\\\x7f" or c < " " or "\ud800" <= c < "\ue000" for c in name)
    if not plain or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"file name {name[:80]!r} leaves the checkpoint's directory or is none")
    return name


def check_member(directory: str, name: str) -> None:
    """Raise CorruptCheckpointError if the name of a checkpoint's file or directory leads out of it."""
    try:
        check_file_name(name)
    except ValueError as error:
        raise CorruptCheckpointError(f"in {directory}: {error}. Remedy: load another checkpoint") from error


def check_not_elsewhere(directory: str, name: str) -> None:
    """Raise CorruptCheckpointError if a directory of a checkpoint's is a link out of it."""
    _real_path(directory, name, "directory")


def _real_path(directory: str, name: str, kind: str) -> str:
    """Follow the links of a path; CorruptCheckpointError if they lead out of the directory."""
    path = os.path.join(directory, name)
    real = os.path.realpath(path)
    home = os.path.realpath(directory)
    if os.path.dirname(real) not in (home, _blobs_of(home)):
        raise CorruptCheckpointError(
            f"{path} is a link out of the checkpoint's directory, to {real}. Remedy: put the {kind} itself there"
        )
    return real


def _blobs_of(directory: str) -> str:
    """Return the directory of the files of a snapshot in a cache of Hugging Face's; for any other directory, itself."""
    above = next((each for each in Path(directory).parents if each.name == "snapshots"), None)
    return directory if above is None else str(above.parent / "blobs")


def open_inside(directory: str, name: str) -> int:
    """Open a file of a checkpoint for reading, and return its descriptor.

    The directory may be a link itself; the file may be a link to another file of the directory, not out of it. Only the
    files of a snapshot in a cache of Hugging Face's are links to ``../../blobs``.

    Raises:
        CorruptCheckpointError: The name leads out of the directory, or to something that is not a file.
        FileNotFoundError: There is no such file.
    """
    path = os.path.join(directory, name)
    check_member(directory, name)
    # Without O_NONBLOCK the opening of a pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        descriptor = os.open(_real_path(directory, name, "file"), flags)
    try:
        with naming(path):
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not is_regular:
            raise CorruptCheckpointError(f"{path} is not a regular file. Remedy: load another checkpoint")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
