"""Names of files, paths and URLs as text.

File names in a checkpoint, and the files behind them, stay inside its directory. Secret parts of URLs and options are
hidden.

Tested in tests/attacks/test_files.py and tests/media/test_remote.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError

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
        raise ValueError(f"file name {name[:80]!r} leaves the checkpoint's directory, is in one below it, or is none")
    return name


def check_member(directory: str, name: str) -> None:
    """Raise CorruptCheckpointError if the name of a checkpoint's file or directory leads out of it."""
    try:
        check_file_name(name)
    except ValueError as error:
        raise CorruptCheckpointError(f"in {directory}: {error}. Remedy (FC305): load another checkpoint") from error


def check_no_pointer(file: str, start: bytes) -> None:
    """Raise CorruptCheckpointError if a file begins as the pointers do that Git LFS has in place of large files."""
    if start[:8] == b"version ":
        raise CorruptCheckpointError(
            f"{file} is a pointer of Git LFS, not the file that it stands for. Remedy (FC305): fetch that, by "
            "`git lfs pull` in the repository"
        )


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
            f"{path} is a link out of the checkpoint's directory, to {real}. Remedy (FC304): put the {kind} itself "
            "there"
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
            raise CorruptCheckpointError(f"{path} is not a regular file. Remedy (FC305): load another checkpoint")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# User and password in front of the host. A password may contain slashes, as AWS's do; a number up to a slash is a port.
_PASSWORD = re.compile(r"([^/@:?#]*):(?!\d+(?:/|$))(.*)@", re.DOTALL)
_SECRET_OPTION = re.compile(r"secret|token|passw|key|credential|sas|signature|auth", re.IGNORECASE)
# By its name alone it sounds secret, but S3's "key" is an identity.
_NO_SECRET = frozenset({"key"})
HIDDEN = "***"
# Hiding shorter values would also hide words of the text itself.
_SHORTEST_SECRET = 4


def path_of(location: object) -> str:
    """Return the text of a path or URL; ``~`` at its beginning is the user's home, as for a shell.

    Raises:
        ValidationError: It is neither.
    """
    if not isinstance(location, (str, os.PathLike)) or not isinstance(text := os.fspath(location), str):
        raise ValidationError(
            "path has to be a path or URL as text or os.PathLike, or what open_storage() gives; got "
            f"{location!r} ({type(location).__name__})"
        )
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def redacted(url: str) -> str:
    """Return a URL without its password and query, for errors and reports."""
    match = URL.match(url)
    if match is None:
        return url
    rest = match[2]
    password = _PASSWORD.match(rest)
    if password:
        rest = f"{password[1]}:{HIDDEN}@{rest[password.end() :]}"
    return f"{match[1]}://" + re.sub(r"\?.*", f"?{HIDDEN}", rest, count=1, flags=re.DOTALL)


def has_password(url: str) -> bool:
    """Return whether a URL has user and password in it."""
    match = URL.match(url)
    return match is not None and _PASSWORD.match(match[2]) is not None


class Secrets:
    """The parts of a URL and of storage options that errors and reports must not show."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Args: url: of a storage. options: of the storage."""
        found = set(_secret_values(options))
        match = URL.match(url)
        password = _PASSWORD.match(match[2]) if match else None
        if password:
            found |= {password[2], unquote(password[2])}
        if match and "?" in match[2]:
            found.add(match[2].partition("?")[2])
        # Longest first: one may be a part of another.
        self._texts = sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return a text without the secrets."""
        for secret in self._texts:
            text = text.replace(secret, HIDDEN)
        return text


def _secret_values(options: Any, inside: bool = False) -> Iterator[str]:
    """Yield the values of options whose names, or the names of their containers, sound like secrets."""
    if isinstance(options, Mapping):
        for name, value in options.items():
            secret = name not in _NO_SECRET and bool(_SECRET_OPTION.search(str(name)))
            yield from _secret_values(value, inside or secret)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _secret_values(value, inside)
    elif inside and isinstance(options, (str, bytes)):
        yield options if isinstance(options, str) else options.decode(errors="replace")
