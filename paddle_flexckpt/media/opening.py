"""Open a directory by its path or URL, on whatever medium it is.

Tested in tests/media/test_remote.py.
"""

from __future__ import annotations

import os
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.media.backend import Backend, Location
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.urls import path_of, redacted, split_url

# What open_storage() takes itself; the rest is fsspec's.
_LOCAL_OPTIONS = frozenset({"lock", "lease_seconds"})
_REMOTE_OPTIONS = _LOCAL_OPTIONS | {"retries", "part_bytes", "requests_at_once", "bytes_at_once", "commit"}


def open_backend(location: Location) -> Backend:
    """Return the directory that a path, a URL or a backend stands for.

    Raises:
        ValidationError: It is none of these, or the URL has a scheme that nothing installed knows.
    """
    return location if isinstance(location, Backend) else open_storage(location)


def open_storage(path: str | os.PathLike[str], **options: Any) -> Backend:
    """Return a directory with options of its own, which may be passed wherever a path is taken.

    Args:
        path: A path, or the URL of anything that fsspec knows (``s3://bucket/run``).
        **options: For paths and URLs: ``lock=False`` lets several savers write at the same time, which is then up to
            the caller to prevent; ``lease_seconds`` (30): where the medium has no locks, a saver that is silent for
            longer may be taken for dead. For URLs: ``retries`` (5) of requests that failed in a way that may pass;
            ``part_bytes`` (8 MiB) of a long file that one request sends; ``requests_at_once`` (16) and
            ``bytes_at_once`` (64 MiB) that may be under way, for one reader and for one file that is written;
            ``commit`` ("put", "replace" or "rename"): how a file takes another's place, for protocols of which that is
            not known. All others are fsspec's storage options, such as ``key``, ``secret`` and ``endpoint_url`` of S3.

    Raises:
        ValidationError: There is no such option, or the URL's scheme needs a package that is not installed.
    """
    text = path_of(path)
    scheme, rest = split_url(text)
    if scheme is None:
        unknown = sorted(options.keys() - _LOCAL_OPTIONS)
        if unknown:
            known = ", ".join(sorted(_LOCAL_OPTIONS))
            raise ValidationError(f"options {unknown} are not known for {redacted(text)}; there are: {known}")
        return LocalBackend(rest, **options)
    # Whoever uses paths only is spared the time that this import takes.
    from paddle_flexckpt.media.remote import FsspecBackend

    own = {name: value for name, value in options.items() if name in _REMOTE_OPTIONS}
    return FsspecBackend(text, {name: value for name, value in options.items() if name not in own}, **own)


def is_remote(location: Location) -> bool:
    """Return whether a location is on no file system of this host; False where it is no location at all."""
    if isinstance(location, Backend):
        return not isinstance(location, LocalBackend)
    try:
        return split_url(path_of(location))[0] is not None
    except ValidationError:  # opening it says what is wrong
        return False


def reopen(token: dict[str, Any]) -> Backend:
    """Return the directory of a :meth:`Backend.reopen_token`, in the same process or another one."""
    if "url" not in token:
        return LocalBackend(**token)
    from paddle_flexckpt.media.remote import FsspecBackend

    return FsspecBackend(**token)
