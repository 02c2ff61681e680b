"""The writers of this process: what one save has to know of the others, whoever asked for them."""

from __future__ import annotations

import functools
import os

from paddle_flexckpt.background.failed import raise_failed
from paddle_flexckpt.background.job import place_of
from paddle_flexckpt.background.writer import WRITERS, BackgroundWriter


def await_earlier(path: str) -> None:
    """What every save does first: waits for the saves under way to its directory, and tells the errors of earlier ones.

    Args:
        path: The directory.

    Raises:
        CheckpointError: An asynchronous save has failed, and nobody has seen its error yet.
    """
    writers = [writer for writer in list(WRITERS) if writer.is_own]
    for writer in writers:
        writer.wait_for(place_of(path))
    raise_failed([handle for writer in writers for handle in writer.take_failed()])


def shared_writer() -> BackgroundWriter:
    """The writer of ``async_save=True``: one for a process, made when it is first asked for."""
    return _writer_of(os.getpid())


@functools.cache
def _writer_of(pid: int) -> BackgroundWriter:
    # By process: a fork cannot use the writer of its parent.
    return BackgroundWriter()
