"""Texts of paths and URLs, and the secret parts of a URL and its options.

Tested in tests/media/test_remote.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from paddle_flexckpt.catalog import ValidationError

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
