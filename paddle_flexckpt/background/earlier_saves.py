"""The background writers of this process, whose saves a later save to the same directory waits for.

A save without ``async_save`` imports nothing else of this room.

Tested in tests/background/test_writer.py and tests/background/test_failures.py.
"""

from __future__ import annotations

import weakref
from typing import Any

# Each BackgroundWriter adds itself.
WRITERS: weakref.WeakSet[Any] = weakref.WeakSet()


def await_earlier(path: str) -> None:
    """Wait for the pending saves to a directory, and raise the errors of earlier ones. Every save begins with this.

    Raises:
        CheckpointError: An asynchronous save has failed, and nobody has seen its error yet.
    """
    writers = [writer for writer in list(WRITERS) if writer.is_own]
    for writer in writers:
        writer.wait_for(path)
    if writers:
        from paddle_flexckpt.background.pending import raise_failures

        raise_failures([handle for writer in writers for handle in writer.take_failed()])
