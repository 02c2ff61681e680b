"""The table of URL schemes: how the file system of each commits, and the class that makes its requests.

A scheme that fsspec knows becomes a first-class medium by one row here. If it needs other requests than :class:`Medium`
makes, write a subclass, as ``s3.py`` does, and name it in the row.

Tested in tests/media/test_protocols.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from paddle_flexckpt.media.medium import Medium, MemoryMedium
from paddle_flexckpt.media.s3 import S3Medium

# How a file replaces another atomically:
#   put      An object appears whole, after its last byte, or not at all, and replaces the one that was there.
#   replace  Files grow visibly; renaming is atomic and replaces.
#   rename   Files grow visibly; renaming is atomic, and fails or leaves a gap where the target exists.
Commit = Literal["put", "replace", "rename"]
COMMITS = get_args(Commit)


class Protocol(NamedTuple):
    """The properties of a URL scheme.

    Attributes:
        commit: How its files commit. None: nothing can be saved, unless its file system in fsspec has a rename.
        creates: Whether the request that creates a file fails if the file exists, even if it is new. A class may find
            out for itself, as :class:`S3Medium` does.
        medium: The class that makes the requests.
    """

    commit: Commit | None = None
    creates: bool = False
    medium: type[Medium] = Medium


_OTHER = Protocol()
_STORE = Protocol("put")
_CREATING_STORE = Protocol("put", creates=True)
_S3 = Protocol("put", medium=S3Medium)

PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        # Object stores: a key is set by one request, or by the last one of an upload in parts.
        "s3": _S3,
        "s3a": _S3,
        "gs": _CREATING_STORE,
        "gcs": _CREATING_STORE,
        "abfs": _CREATING_STORE,
        "abfss": _CREATING_STORE,
        "az": _CREATING_STORE,
        "oss": _STORE,
        "obs": _STORE,
        "cos": _STORE,
        "tos": _STORE,
        "oci": _STORE,
        "memory": Protocol("put", creates=True, medium=MemoryMedium),
        # POSIX renaming on the server (fsspec asks for posix-rename@openssh.com).
        "sftp": Protocol("replace"),
        "ssh": Protocol("replace"),
        # The name node renames atomically, but refuses an existing target, which would have to be removed before.
        "hdfs": Protocol("rename"),
        "webhdfs": Protocol("rename"),
        # These servers treat an existing target in different ways.
        "ftp": Protocol("rename"),
        "smb": Protocol("rename"),
        # These are read only.
        "http": _OTHER,
        "https": _OTHER,
    }
)


def protocol_of(scheme: str) -> Protocol:
    """Return the properties of a URL scheme, in small letters, whether it is in the table or not."""
    return PROTOCOLS.get(scheme, _OTHER)


def commit_of(scheme: str, file_system: Any) -> Commit | None:
    """Return how the files of a scheme commit; None if that is not known, so that nothing can be saved there.

    A scheme without a row uses "rename" if it can rename. fsspec's own ``mv`` does not rename: it copies and removes,
    so that a half copied file is visible.
    """
    import fsspec

    commit = protocol_of(scheme).commit
    if commit is None and type(file_system).mv is not fsspec.AbstractFileSystem.mv:
        return "rename"
    return commit
