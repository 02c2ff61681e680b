"""Tell another program's loader what a directory of checkpoints has: whoever makes such a file derives from this.

Tested in tests/live/test_paddle_reads.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from paddle_flexckpt.native.manifest import Manifest


class Companion(ABC):
    """Make the file beside the manifests, of a name of its own, that tells another program's loader what is here.

    Attributes:
        name: Its name.
        most_rows: It refuses checkpoints of more shards: one process would need all of their rows, and seconds.
    """

    name: str
    most_rows: int

    @abstractmethod
    def refuse(self, reason: str) -> bytes:
        """Return a file that stops that loader with an error that says why."""

    @abstractmethod
    def encode(self, manifest: Manifest) -> bytes:
        """Return the file for the only checkpoint of a directory."""

    @abstractmethod
    def is_ours(self, data: bytes) -> bool:
        """Return whether a file of that name has been written here, if only in part."""
