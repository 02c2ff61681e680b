"""Open a directory by its path or URL, on any medium.

Tested in tests/media/test_remote.py.
"""

from __future__ import annotations

import os
import re
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.media.backend import Backend, Location
from paddle_flexckpt.media.file_names import URL, path_of, redacted
from paddle_flexckpt.media.local import LocalBackend

_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::")
# The form that pathlib gives a URL.
_FOLDED = re.compile(r"([a-z][a-z0-9]*):/(?!/)")
# No save makes a directory of such a name: a load treats such a path as a file.
_FILE_NAMES = (".safetensors", ".index.json")
_LOCAL = frozenset({"file", "local"})
# The options of open_storage() itself; all others are fsspec's.
_LOCAL_OPTIONS = frozenset({"lock", "lease_seconds"})
_REMOTE_OPTIONS = _LOCAL_OPTIONS | {"retries", "part_bytes", "requests_at_once", "bytes_at_once", "commit"}


def open_backend(location: Location) -> Backend:
    """Return the directory that a path, a URL or a backend stands for.

    Raises:
        ValidationError: It is none of these, or no installed package knows the URL's scheme.
    """
    return location if isinstance(location, Backend) else open_storage(location)


def open_destination(location: Location) -> Backend:
    """Return the directory of a location that is to be written to.

    Raises:
        ValidationError: It is not a location, or has the name of a file and is not a directory.
    """
    backend = open_backend(location)
    if backend.path.rstrip("/").endswith(_FILE_NAMES) and not os.path.isdir(backend.path):
        raise ValidationError(
            f"{backend.path} names a file, and a checkpoint is a directory. Remedy (FC406): give the path of a "
            "directory"
        )
    return backend


def shown(location: object) -> str:
    """Return the text for a location in errors, valid or not: as the caller names it, without secrets."""
    if isinstance(location, Backend):
        return repr(location.path)
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    return repr(redacted(text) if isinstance(text, str) else text)


def open_storage(path: str | os.PathLike[str], **options: Any) -> Backend:
    """Return a directory with options of its own, which may be passed wherever a path is taken.

    Args:
        path: A path, or the URL of anything that fsspec knows (``s3://bucket/run``).
        **options: For paths and URLs: ``lock=False`` takes no lock, so that the caller has to keep savers from writing
            at the same time; ``lease_seconds`` (30): where the medium has no locks, a saver that is silent for longer
            may be taken for dead. For URLs: ``retries`` (5): further tries of a request whose error may pass;
            ``part_bytes`` (8 MiB): the part of a long file that one request sends; ``requests_at_once`` (16) and
            ``bytes_at_once`` (64 MiB): the most under way, for each reader and for each file that is written;
            ``commit`` ("put", "replace" or "rename"): how a file replaces another, for protocols that are not known
            here. All others are fsspec's storage options, such as ``key``, ``secret`` and ``endpoint_url`` of S3.

    Raises:
        ValidationError: There is no such option, or the URL's scheme needs a package that is not installed.
    """
    text = path_of(path)
    scheme, rest = _split_url(text)
    if scheme is None:
        unknown = sorted(options.keys() - _LOCAL_OPTIONS)
        if unknown:
            known = ", ".join(sorted(_LOCAL_OPTIONS))
            raise ValidationError(f"options {unknown} are not known for {redacted(text)}; there are: {known}")
        return LocalBackend(rest, **options)
    # This import takes time that users of paths alone need not spend.
    from paddle_flexckpt.media.remote import FsspecBackend

    own = {name: value for name, value in options.items() if name in _REMOTE_OPTIONS}
    return FsspecBackend(text, {name: value for name, value in options.items() if name not in own}, **own)


def _split_url(location: str) -> tuple[str | None, str]:
    """Return scheme and rest of a URL; for paths and URLs of local files no scheme and the path."""
    match = URL.match(location)
    if match is None:
        if _CHAIN.match(location) and "://" in location:
            raise ValidationError(
                f"{redacted(location)!r} is a chain of file systems. Remedy (FC406): give the last one's URL"
            )
        folded = _FOLDED.match(location)
        if folded and _is_scheme(folded[1]):
            raise ValidationError(
                f"{location!r} is a URL that has lost a slash, as in pathlib. Remedy (FC406): pass URLs as text"
            )
        return None, location
    scheme, rest = match[1].lower(), match[2]
    if scheme not in _LOCAL:
        return scheme, rest
    if not rest.startswith("/"):
        raise ValidationError(f"{location!r} is a URL of a local file without an absolute path, as in file:///a/b")
    return None, rest


def _is_scheme(name: str) -> bool:
    """Return whether the table has a URL scheme. Few paths need it, so it is imported only here."""
    from paddle_flexckpt.media.protocols import PROTOCOLS

    return name in _LOCAL or name in PROTOCOLS


def is_remote(location: Location) -> bool:
    """Return whether a location is on no file system of this host; False if it is not a location at all."""
    if isinstance(location, Backend):
        return not isinstance(location, LocalBackend)
    try:
        return _split_url(path_of(location))[0] is not None
    except ValidationError:  # opening it raises the error
        return False


def reopen(token: dict[str, Any]) -> Backend:
    """Return the directory of a :meth:`Backend.reopen_token`, in any process."""
    if "url" not in token:
        return LocalBackend(**token)
    from paddle_flexckpt.media.remote import FsspecBackend

    return FsspecBackend(**token)


def place_of(backend: Backend) -> str:
    """Return a text that is equal in two processes only if this is the same directory for both."""
    if not backend.has_path:
        return backend.path
    # Distinguishes this host's view of its files from those of other hosts.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = [file.read().strip(), os.stat("/proc/self/ns/mnt").st_ino, os.stat("/").st_ino]
    except OSError:
        host = [os.urandom(16).hex()]
    return f"{host}:{os.path.realpath(backend.path)}"
