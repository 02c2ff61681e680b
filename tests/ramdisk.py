"""Temporary directories in memory, where an fsync costs nothing; on disk where the system has no such place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = "/dev/shm"


@contextmanager
def memory_directory(need_bytes: int = 64 << 20) -> Iterator[Path]:
    """A directory that is removed at the end; in memory if ``need_bytes`` are free there."""
    usable = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2 * need_bytes
    with tempfile.TemporaryDirectory(prefix="flexckpt-", dir=_MEMORY if usable else None) as path:
        yield Path(path)
