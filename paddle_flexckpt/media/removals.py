"""Removals: of files, of directories with all that is in them, and the right to remove what a directory has.

Nothing else in the package removes. No link is followed: what the caller names may lead anywhere, but below it a link
to a directory is left alone, with a warning, as others may need its target. Of a link to a file, the link goes.

Tested in tests/media/test_removals.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
from collections.abc import Iterator
from typing import Literal, Union

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media.backend import Backend, Lock

logger = logging.getLogger("paddle_flexckpt")

Path = Union[str, "os.PathLike[str]"]
# What keeps an empty directory's removal: files in it, or that it is a link.
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def remove(path: Path, what: Literal["file", "empty", "tree"] = "file") -> None:
    """Remove a file, a directory if it is empty, or a directory with all that is in it; do nothing if it is not there.

    Raises:
        OSError: The file system refused.
    """
    with contextlib.suppress(FileNotFoundError):
        if what == "file":
            os.unlink(path)
        elif what == "empty":
            try:
                os.rmdir(path)
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    raise
        elif os.path.islink(path):
            _warn(os.fspath(path))
        else:
            shutil.rmtree(path)


def leads_elsewhere(directory: Backend) -> bool:
    """Return whether a directory is a link, or is in one, below the path that the caller has named; warn if so."""
    link = directory.link()
    if link:
        _warn(link)
    return bool(link)


@contextlib.contextmanager
def removing(directory: Backend, name: str = "") -> Iterator[bool]:
    """Hold the lock of a directory while things are removed there, and the claim on a file; yield whether it has both.

    It has not where a save is running, the file is being read, the directory is gone, or :func:`leads_elsewhere`.
    """
    with contextlib.ExitStack() as stack:
        yield not leads_elsewhere(directory) and _take(directory, name, stack)


def _take(directory: Backend, name: str, stack: contextlib.ExitStack) -> bool:
    try:
        stack.enter_context(directory.locks.take())
    except (CheckpointError, FileNotFoundError):
        return False
    claim = directory.locks.claim(name) if name else Lock()
    if claim is not None:
        stack.enter_context(claim)
    return claim is not None


@functools.lru_cache(maxsize=1024)
def _warn(link: str) -> None:
    """Warn once of a link."""
    logger.warning(f"{link} is a link to {os.path.realpath(link)}: what is there is left alone, as others may need it")
