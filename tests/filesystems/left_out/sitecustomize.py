"""Leaves out the fsyncs of one kind of file, in each process that finds this on its path: mistakes to be found.

The kind is in the environment, as ``FLEXCKPT_LEFT_OUT``: ``data``, ``directory`` or ``manifest``.
"""

from __future__ import annotations

import os
import stat

_KIND = os.environ["FLEXCKPT_LEFT_OUT"]
_fsync = os.fsync


def _kind(descriptor: int) -> str:
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        return "directory"
    name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
    return "data" if name.endswith(".safetensors") else "manifest" if ".manifest" in name else "other"


def _most_fsyncs(descriptor: int) -> None:
    if _kind(descriptor) != _KIND:
        _fsync(descriptor)


os.fsync = _most_fsyncs
