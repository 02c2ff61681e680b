"""Errors of full disks, of limits on files and of what cannot be written to, with the figures and the remedy.

Tested in tests/native/test_data_file.py, tests/loading/test_publishing.py and tests/media/test_destinations.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.media.file_names import naming

UNWRITABLE = (
    "Remedy (FC406): let this process write there (owner, permissions, a read-only mount, a file in the place of a "
    "directory), or give another path"
)
_REFUSED = frozenset((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP))


@contextlib.contextmanager
def writing(path: str, nbytes: int | None = None) -> Iterator[None]:
    """Add the file's name to errors, and the remedy to those of a full disk, with figures, or of a refusal."""
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno in _REFUSED:
            raise OSError(error.errno, f"{os.strerror(error.errno)}: {path}. {UNWRITABLE}") from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        remedy = "Remedy (FC402): make room on that storage for what all its ranks write, and call again"
        room = ""
        if error.errno == errno.EFBIG:
            remedy = "Remedy (FC402): raise the limit on the size of a file (`ulimit -f`), and call again"
        else:
            with contextlib.suppress(OSError):
                room = f", and {format_bytes(shutil.disk_usage(os.path.dirname(path)).free)} are free there now"
        size = "" if nbytes is None else f" has {format_bytes(nbytes)}"
        text = f"{os.strerror(error.errno)}: {path}{size}{room}. {remedy}"
        raise OSError(error.errno, text) from None


def tell_total(error: CheckpointError, nbytes: int) -> None:
    """Add the bytes that all ranks write, if there are any, to the text of an error of a full disk, and of no other."""
    if nbytes and "make room on that storage for what all its ranks write" in str(error):
        error.args = (f"{error}; all ranks together write {format_bytes(nbytes)}",)
